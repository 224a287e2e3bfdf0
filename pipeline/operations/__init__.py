"""What a user asks of a store: audit, replay, export, report, preflight."""
