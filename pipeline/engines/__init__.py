"""What verify engines offer, and how one is chosen."""
