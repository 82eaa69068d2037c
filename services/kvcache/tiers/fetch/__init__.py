"""Pages from lower tiers: which are worth fetching, and how they come into a pool."""
