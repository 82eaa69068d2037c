"""``python -m services.top``: the daemon's pools and who uses them, and the engines, as they change."""
