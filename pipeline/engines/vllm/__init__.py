"""vLLM as a verify engine: its own batching and kernels, our drafts, depths and accounts."""
