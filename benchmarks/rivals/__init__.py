"""Other implementations of RMSNorm, measured beside ours: what `benchmarks/norms.py` is made of."""
