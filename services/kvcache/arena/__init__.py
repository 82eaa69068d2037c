"""The memory of a pool (its arena): a mapped file, or an allocation on a GPU."""
