"""Digests and entries of the audit log, without SQL and without a clock."""
