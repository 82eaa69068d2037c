"""Matrix products on a GPU: library GEMMs, and our own GEMVs."""
