"""Matrix products: library GEMMs and the project's own GEMVs on a GPU, and products on a CPU."""
