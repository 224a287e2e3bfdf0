"""The ledger on SQLite and PostgreSQL. The only folder that speaks SQL."""
