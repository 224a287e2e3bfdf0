"""What the engine keeps of sequences, blocks and steps."""
