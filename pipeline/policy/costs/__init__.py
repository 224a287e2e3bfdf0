"""What work costs and what drafting saves. Pure functions."""
