"""Model folders: whether they may be served, by what they are known, and what they are called."""
