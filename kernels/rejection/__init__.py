"""Rejection: the ratio test and block verification. `reference` is the definition."""
