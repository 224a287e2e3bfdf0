"""The demo pair, its prompts and its job."""
