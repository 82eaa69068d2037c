"""Sampling: the launches on a GPU, and the reference in NumPy."""
