"""The model and its forward pass: loading, batches, backend, runner."""
