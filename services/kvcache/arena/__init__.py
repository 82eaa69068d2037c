"""The memory of a pool: a mapped file, or an allocation on a GPU."""
