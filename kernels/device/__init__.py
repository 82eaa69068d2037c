"""A GPU through CuPy: compilation, launches, staging, workspaces."""
