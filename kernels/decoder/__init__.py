"""A whole Llama-style decoder pass over paged KV. `reference` is the definition."""
