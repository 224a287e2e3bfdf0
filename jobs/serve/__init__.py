"""An OpenAI-compatible service of files and batches: its routes, its folder, its steps.

Knows nothing of terminals: `specbatch serve` starts it.
"""
