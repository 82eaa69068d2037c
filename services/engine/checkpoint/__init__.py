"""Model checkpoints on disk: configuration, tensors, weights."""
