"""One layout's pages: page table, prefix cache, sequences; and all pools under one budget."""
