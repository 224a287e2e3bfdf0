"""What users and operators watch: metrics, traces, logs, reports, the terminal."""
