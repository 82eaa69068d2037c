"""Sampling parameters and results."""
