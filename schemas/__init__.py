"""Shapes shared by every room: spec, messages, records, tables, errors. Imports nothing of ours."""
