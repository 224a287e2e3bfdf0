"""Shapes shared by every room: job spec, messages, records, tables and errors. Imports nothing of ours."""
