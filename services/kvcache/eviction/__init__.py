"""Eviction: which cached page is evicted first, and which pages are retained."""
