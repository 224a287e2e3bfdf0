"""Operations for users: audit, replay, export, report, preflight."""
