"""Doing jobs in this process: shared by the commands and the Python interface."""
