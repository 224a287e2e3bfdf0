"""Submits jobs by the clock: schedule files, their times, and the scheduler."""
