"""Requests that wait: their order, what may start, and what is due when."""
