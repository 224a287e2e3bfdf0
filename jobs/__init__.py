"""What people start: the commands, schedules, the demo and the benchmarks."""
