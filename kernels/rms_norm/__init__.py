"""Root-mean-square norms whose rows keep their bits at any number of rows."""
