"""Products and norms whose bits do not depend on the batch."""
