"""Triton kernels for operations that take PyTorch many passes over memory.

Only imported on a GPU with Triton. The same in plain PyTorch is in `layers`, `topk` and `fused`; where Triton
is installed, a test runs these in its interpreter and compares the two.
"""
