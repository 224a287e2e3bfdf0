"""Linear layers whose rows keep their bits at any number of rows."""
