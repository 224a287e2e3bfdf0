"""Which drafts are taken, and how deep."""
