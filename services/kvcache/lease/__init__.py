"""Leases: sessions, their processes, and the quarantine for pages of lost sessions."""
