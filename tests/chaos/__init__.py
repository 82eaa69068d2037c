"""Chaos: a daemon and two engines under faults, and every token compared. ``python -m tests.chaos --help``."""
