"""What a job publishes: output files, manifests, exported sets."""
