"""The edge of a service: what it listens on, whom and which files it trusts there."""
