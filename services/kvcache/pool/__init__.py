"""The pages of one layout: page table, prefix cache, sequences; and all pools under one memory budget."""
