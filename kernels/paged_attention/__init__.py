"""Attention of ragged queries over paged KV blocks. `reference` is the definition."""
