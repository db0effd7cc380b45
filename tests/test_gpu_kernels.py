"""The Triton kernels, run by Triton's interpreter on the CPU, against the same in plain PyTorch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from copfl import gpu_kernels, selection, folded

torch.manual_seed(0)
close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
shapes = (((3, 3), (1, 1), (1, 1), 5), ((3, 3), (2, 2), (1, 1), 6), ((7, 7), (2, 2), (3, 3), 9))
for kernel, stride, padding, size in shapes:
    x = torch.randn(2, size, size, 3, dtype=torch.float64)
    rows = folded.patches(x, kernel, stride, padding)
    turned = rows.view(*rows.shape[:3], *kernel, 3).movedim(5, 3).contiguous()  # as the weights lie, channels first
    close(gpu_kernels.patches(x, tuple(rows.shape[1:3]), kernel, stride, padding), turned)
    grad = torch.randn_like(turned)
    back = gpu_kernels.unpatch(grad, (size, size), stride, padding)
    flat = grad.movedim(3, 5).flatten(3)
    close(back, folded.unpatch(flat, (size, size), kernel, stride, padding))
for share in (None, (torch.rand(2, 37) < 0.6).double(), torch.zeros(2, 37, dtype=torch.float64)):
    x = torch.randn(2, 37, 20, dtype=torch.float64)
    weight, bias = torch.randn(2, 20, dtype=torch.float64), torch.randn(2, 20, dtype=torch.float64)
    plain = folded.normalised(x, weight, bias, share, 1e-5)
    fast = gpu_kernels.normalise(x, weight, bias, share, 1e-5)
    for a, b in zip(fast, plain, strict=True):
        close(a, b)
    grad = torch.randn_like(x) * (1 if share is None else share[..., None])
    plain = folded.normalised_back(grad, x, weight, fast[1], fast[3], share)
    for a, b in zip(gpu_kernels.normalise_back(grad, x, weight, fast[1], fast[3], share), plain, strict=True):
        close(a, b)
for dtype, bits, width in ((torch.float32, torch.int32, 31), (torch.float64, torch.int64, 63)):
    values = torch.rand(3, 3000, dtype=dtype)
    values[:, ::3], values[1, :500] = values[:, :1], -1
    for count in ([0, 5, 3000], [1, 2500, 1000], [1000, 0, 1]):
        keys = values.view(bits)
        low, above, equal = gpu_kernels.threshold(keys, torch.tensor(count), width)
        assert torch.equal(low, selection._threshold(keys, torch.tensor(count), width)), count
        assert above.tolist() == (keys > low[:, None]).sum(1).tolist()
        assert equal.tolist() == (keys == low[:, None]).sum(1).tolist()
        wide = torch.empty(3, 3008, dtype=bits)[:, :3000].copy_(keys)  # rows that begin at round numbers
        chosen = gpu_kernels.largest(wide, torch.tensor(count), width)
        assert torch.equal(chosen, selection._largest(values, torch.tensor(count))), count
masks = (torch.rand(3, 20000) > 0.3)[:, :19001]
assert gpu_kernels.count(masks).tolist() == masks.sum(1).tolist()
for dtype in (torch.float32, torch.bool):
    new, old = (torch.rand(3, 5008) > 0.5).to(dtype)[:, :5000], (torch.rand(3, 5000) > 0.5).to(dtype)
    before = new.clone()
    put = gpu_kernels.put_back(torch.tensor([True, False, True]), new, old)
    assert put is new
    assert torch.equal(new, torch.stack([before[0], old[1], before[2]]))
    common = old[0].expand(3, -1)  # the same for all
    gpu_kernels.put_back(torch.tensor([False, True, True]), new, common)
    assert torch.equal(new, torch.stack([old[0], old[1], before[2]]))
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (Linux only)")
def test_the_kernels_compute_what_plain_pytorch_does() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1"},  # read when Triton is imported, so in a process of its own
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
