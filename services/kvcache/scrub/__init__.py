"""Work on the bytes of pages, away from the loop that owns the cache."""
