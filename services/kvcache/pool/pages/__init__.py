"""The pages of a pool: their states and holders, and what becomes of their bytes."""
