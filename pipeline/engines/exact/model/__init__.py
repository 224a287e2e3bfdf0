"""Models: files, loading, decoders, passes."""
