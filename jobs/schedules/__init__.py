"""Jobs that are submitted by the clock: schedule files, their times, and who looks at them."""
