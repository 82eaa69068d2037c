"""The model and its forward pass: loading, batches, backends, runner."""
