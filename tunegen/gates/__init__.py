"""The three gates before anyone trains with a norm: float64, bf16 beside Hugging Face's own, loss curves.

They judge the public norm, with whatever kernels answer it. That each candidate of a sweep is right is verification's
business (`tunegen/verify.py`).
"""
