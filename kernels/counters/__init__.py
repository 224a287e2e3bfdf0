"""Counter-based noise: Philox4x32-10 and Gumbel. `reference` is the definition."""
