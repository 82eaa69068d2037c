"""Sampling: launched on a GPU, and its reference in NumPy."""
