"""Code shared by both services: errors, settings, gRPC serving, metrics, GPU IPC handles."""
