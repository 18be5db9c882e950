"""The three gates before anyone trains with a norm: float64, bf16 beside Hugging Face's own, loss curves."""
