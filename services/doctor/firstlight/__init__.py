"""First light: everything that is known only once ROCmForge runs on a GPU, tried in order, as a report to send."""
