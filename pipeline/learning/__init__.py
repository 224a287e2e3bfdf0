"""Learns draft models from what the store keeps of finished jobs."""
