"""The host tier: pages in the memory of the daemon's machine."""
