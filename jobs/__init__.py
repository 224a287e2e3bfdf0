"""What users start: commands, schedules, the demo and benchmarks."""
