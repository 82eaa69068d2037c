"""A GPU through CuPy: compiling, launching, staging, workspaces."""
