"""Recurring steps, replayed as graphs or from tapes."""
