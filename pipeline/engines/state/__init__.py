"""Sequences, KV blocks and steps: the engine's state, without tensors or models."""
