"""Which cached page goes first, and which is retained."""
