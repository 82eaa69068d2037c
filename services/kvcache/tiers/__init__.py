"""The tiers below the pools: what is stored there, what is fetched from there, and when."""
