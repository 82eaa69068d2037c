"""Scheduling: the waiting queue, admission, the scheduler, block tables, and the engine's loop."""
