"""Training of the demo's two small models."""
