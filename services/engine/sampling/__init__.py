"""Sampling parameters, and what a draw results in."""
