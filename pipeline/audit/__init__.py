"""Digests and entries of the audit log. No SQL, no clock."""
