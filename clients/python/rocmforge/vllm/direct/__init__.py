"""The daemon's pages as vLLM's own blocks: nothing is copied, and engines hold one copy of a prefix."""
