"""Fuzzing: whatever bytes arrive, only declared errors leave. ``python -m tests.fuzz --help``."""
