"""Days, where times are in seconds."""

DAY_SEC = 86_400.0
