"""The outer tier: pages as values in Valkey or Redis. Its libraries are imported by the mover alone."""
