"""Verification by coupled sampling: process logits, add noise, take the argmax, match the draft."""
