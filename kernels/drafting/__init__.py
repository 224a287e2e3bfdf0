"""Several draft tokens of many sequences, one after another."""
