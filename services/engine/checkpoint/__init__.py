"""Models on disk: configuration, tensors, weights."""
