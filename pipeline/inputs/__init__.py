"""Rows in and rows out: object stores, readers, row checks, the planner, output writers."""
