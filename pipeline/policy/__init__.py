"""Decisions as pure functions: acceptance, step time, depth, prices. No torch, no SQL."""
