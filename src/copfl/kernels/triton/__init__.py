"""Triton kernels for what PyTorch does in too many passes.

Only imported where there is a GPU and Triton. The same in plain PyTorch is in `folded`, `selection` and `elementwise`;
where Triton is installed, a test runs these in its interpreter and holds the two equal.
"""
