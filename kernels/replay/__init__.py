"""Recurring steps, replayed as CUDA graphs or from tapes."""
