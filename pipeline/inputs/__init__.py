"""Reads inputs: readers, row checks, tokenizers and the planner."""
