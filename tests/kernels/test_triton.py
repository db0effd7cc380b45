"""The Triton kernels, run by Triton's interpreter on the CPU, against the same in plain PyTorch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.slow import slow

SCRIPT = """
import torch
from copfl.kernels import draws, fused, topk, layers
from copfl.kernels.triton import norms, patches, pointwise, random, vectors

torch.manual_seed(0)
close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
shapes = (
    ((3, 3), (1, 1), (1, 1), 5), ((3, 3), (2, 2), (1, 1), 6), ((7, 7), (2, 2), (3, 3), 9), ((2, 3), (1, 2), (0, 1), 5),
)
for kernel, stride, padding, size, channels in ((*shape, c) for shape in shapes for c in (3, 64)):
    x = torch.randn(2, size, size, channels, dtype=torch.float64)
    geometry = layers.Geometry(kernel, stride, padding)
    rows = layers.patches(x, geometry)
    out, filling = tuple(rows.shape[1:3]), -rows.shape[3] % 4
    turned = rows.view(*rows.shape[:3], *kernel, channels).movedim(5, 3).flatten(3)  # channels first
    close(patches.patches(x, out, kernel, stride, padding, False), turned)
    close(patches.patches(x, out, kernel, stride, padding, True), torch.nn.functional.pad(rows, (0, filling)))
    grad = torch.randn(*rows.shape[:3], rows.shape[3] + filling, dtype=torch.float64)
    meant = grad[..., : rows.shape[3]]
    back = layers.unpatch(meant.contiguous(), (size, size), channels, geometry)
    close(patches.unpatch(grad, (size, size), channels, kernel, stride, padding, True), back)
    first = meant.unflatten(3, (*kernel, channels)).movedim(5, 3).flatten(3)
    close(patches.unpatch(first, (size, size), channels, kernel, stride, padding, False), back)
# The whole convolution as it is on a GPU, patches by pixel (many of them) and by channel, against torch's.
layers.compiles = lambda tensor: True
for kernel, stride, padding, size, kernels in (
    ((3, 3), (1, 1), (1, 1), 5, 2), ((3, 3), (1, 1), (1, 1), 2, 40), ((3, 3), (2, 2), (1, 1), 6, 3),
    ((7, 7), (2, 2), (3, 3), 9, 4), ((1, 1), (2, 2), (0, 0), 4, 3),
):
    x = torch.randn(2 * 3, size, size, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, kernels, 3, *kernel, dtype=torch.float64, requires_grad=True)
    place = torch.zeros_like(weight)
    y = layers.convolve(x, weight, layers.Geometry(kernel, stride, padding), None, place)
    toward = torch.randn_like(y)
    mine = torch.autograd.grad(y, (x, weight), toward)
    images = x.detach().permute(0, 3, 1, 2).requires_grad_()
    pairs = zip(images.split(3), weight, strict=True)
    plain = torch.cat([torch.nn.functional.conv2d(i, w, None, stride, padding) for i, w in pairs])
    close(y.permute(0, 3, 1, 2), plain)
    theirs = torch.autograd.grad(plain, (images, weight), toward.permute(0, 3, 1, 2))
    close(mine[0].permute(0, 3, 1, 2), theirs[0])
    close(mine[1], theirs[1])
    close(place, theirs[1])  # written to the given tensor
# With groups: those that share a tile, that fill several, and with dilation.
for groups, ins, outs, kernel, stride, padding, dilation, size in (
    (9, 4, 4, (3, 3), (1, 1), (1, 1), (1, 1), (9, 9)), (2, 24, 20, (3, 1), (2, 1), (1, 0), (1, 2), (5, 4)),
    (5, 2, 3, (3, 3), (1, 1), (1, 1), (1, 1), (4, 5)), (2, 5, 66, (3, 2), (1, 1), (2, 2), (2, 2), (4, 5)),
):
    how = layers.Groups(stride, padding, dilation, groups)
    x = torch.randn(2 * 3, *size, groups * ins, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(2, groups * outs * ins * kernel[0] * kernel[1] + 5, dtype=torch.float64)
    weight = rows[:, 3:-2].view(2, groups * outs, ins, *kernel).requires_grad_()  # a part of a long vector
    place = torch.full_like(rows, torch.nan)[:, 3:-2].view(weight.shape)
    y = layers.convolve_groups(x, weight, how, place)
    toward = torch.randn_like(y)
    mine = torch.autograd.grad(y, (x, weight), toward)
    layers.compiles = lambda tensor: False
    plain = layers.convolve_groups(x, weight, how)
    theirs = torch.autograd.grad(plain, (x, weight), toward)
    layers.compiles = lambda tensor: True
    for a, b in ((y, plain), (mine[0], theirs[0]), (mine[1], theirs[1]), (place, theirs[1])):
        close(a, b)
layers.compiles = fused.compiles
for share in (None, (torch.rand(2, 37) < 0.6).double(), torch.zeros(2, 37, dtype=torch.float64)):
    x = torch.randn(2, 37, 20, dtype=torch.float64)
    weight, bias = torch.randn(2, 20, dtype=torch.float64), torch.randn(2, 20, dtype=torch.float64)
    plain = layers.normalised(x, weight, bias, share, 1e-5)
    fast = norms.normalise(x, weight, bias, share, 1e-5)
    for a, b in zip(fast, plain, strict=True):
        close(a, b)
    grad = torch.randn_like(x) * (1 if share is None else share[..., None])
    plain = layers.normalised_back(grad, x, weight, fast[1], fast[3], share)
    for a, b in zip(norms.normalise_back(grad, x, weight, fast[1], fast[3], share), plain, strict=True):
        close(a, b)
plain_largest = lambda values, counts, sizes: torch.func.vmap(
    lambda v, c: topk.largest_of_each(v, c, sizes))(values, counts)
for dtype, bits, width in ((torch.float32, torch.int32, 31), (torch.float64, torch.int64, 63)):
    values = torch.rand(3, 3000, dtype=dtype)
    values[:, ::3], values[1, :500] = values[:, :1], -1
    keys = values.view(bits)
    wide = torch.empty(3, 3008, dtype=bits)[:, :3000].copy_(keys)  # rows that start at multiples of 32 bytes
    for count in ([0, 5, 3000], [1, 2500, 1000], [1000, 0, 1]):
        counts = torch.tensor(count)[:, None]
        low, above, equal = vectors.threshold(keys, counts, width, (3000,))
        assert torch.equal(low[:, 0], topk._threshold(keys, counts[:, 0], width)), count
        assert above.tolist() == (keys > low).sum(1, keepdim=True).tolist()
        assert equal.tolist() == (keys == low).sum(1, keepdim=True).tolist()
        chosen = vectors.largest(wide, counts, width, (3000,))
        assert torch.equal(chosen, plain_largest(values, counts, (3000,))), count
        sizes = (1000, 1, 0, 1999)  # stretches, each with a count of its own
        many = torch.stack([counts[:, 0], counts[:, 0] % 2, 0 * counts[:, 0], counts.flip(0)[:, 0]], 1)
        chosen = vectors.largest(wide, many, width, sizes)
        assert torch.equal(chosen, plain_largest(values, many, sizes)), count
# A stretch longer than what one program goes over, with ties across the seam.
values = torch.rand(2, 20001).mul(50).round().div(50)
many, sizes = torch.tensor([[9000, 0, 700], [1, 1, 8193]]), (9001, 1, 10999)
chosen = vectors.largest(values.view(torch.int32), many, 31, sizes)
assert torch.equal(chosen, plain_largest(values, many, sizes))
masks = (torch.rand(3, 20000) > 0.3)[:, :19001]
assert vectors.count(masks, (19001,)).tolist() == masks.sum(1, keepdim=True).tolist()
sizes = (9000, 0, 1, 10000)
assert vectors.count(masks, sizes).tolist() == torch.stack([p.sum(1) for p in masks.split(sizes, 1)], 1).tolist()
for dtype in (torch.float32, torch.bool):
    new, old = (torch.rand(3, 5008) > 0.5).to(dtype)[:, :5000], (torch.rand(3, 5000) > 0.5).to(dtype)
    before = new.clone()
    put = vectors.put_back(torch.tensor([True, False, True]), new, old)
    assert put is new
    assert torch.equal(new, torch.stack([before[0], old[1], before[2]]))
    common = old[0].expand(3, -1)  # the same for all
    vectors.put_back(torch.tensor([False, True, True]), new, common)
    assert torch.equal(new, torch.stack([old[0], old[1], before[2]]))
parts = torch.rand(3, 40), old[0, :4500].float().expand(3, -1), torch.rand(3, 0), torch.rand(3, 7)
plain, fused.compiles = torch.func.vmap(fused.joined)(*parts), lambda tensor: True
assert torch.equal(torch.func.vmap(fused.joined)(*parts), plain)
fused.compiles = layers.compiles
# Random numbers: the same places are kept; dropout alone, under vmap, and its gradient.
keys = torch.tensor([7, -3, 2**62 + 5])
for dtype, rounding in ((torch.float64, 1e-15), (torch.float32, 2e-7), (torch.bfloat16, 1e-2)):
    x = torch.randn(6, 5, 40).to(dtype)
    for call, p in ((0, 0.9), (1, 1 / 3), (16, 0.5), (2, 0.0)):
        plain, fast = draws.Draws(keys, call).dropout(x, p), random.dropout(x, keys, call + 1, p)
        assert torch.equal(plain == 0, fast == 0), (dtype, call, p)
        torch.testing.assert_close(fast, plain, rtol=rounding, atol=0)
x = torch.randn(3, 4, 10, dtype=torch.float64, requires_grad=True)
toward = torch.randn(3, 4, 10, dtype=torch.float64)
def row(x, key, toward):
    return torch.func.grad(lambda x: (draws.Draws(key).dropout(x, 0.7) * toward).sum())(x)
def both():
    mapped = torch.func.vmap(row)(x.detach(), keys, toward)
    uniform = torch.func.vmap(lambda key: draws.Draws(key).uniform((4, 10), x))(keys)
    y = draws.Draws(keys).dropout(x.flatten(0, 1), 0.7)
    return mapped, torch.autograd.grad(y, x, toward.flatten(0, 1))[0], uniform
plain, draws.compiles = both(), lambda tensor: True
for a, b in zip(both(), plain, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-14, atol=0)
# Elementwise functions under vmap, every one of the package, each as one kernel.
from copfl.core import optim
from copfl.parts import cowa, mamo, phases, pwpm
made = []
plain_results, fused.compiles = pointwise.results_of, lambda tensor: True
def results_of(function, given):
    found = plain_results(function, given)
    assert found is not None, function
    made.append(function.__name__)
    for a, b in zip(found, function(*given), strict=True):
        assert a.dtype == b.dtype and a.stride(0) % fused.ALIGN == 0, function
        rounding = 1e-12 if b.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(a, b.expand(a.shape), rtol=rounding, atol=rounding)
    return found
pointwise.results_of = results_of
draw = lambda: torch.randn(3, 1500, dtype=torch.float64)
flags, shared = torch.rand(3, 1500) > 0.5, torch.rand(1500) > 0.5
for active in (flags, shared, None):
    for rule in (optim.Sgd(), optim.Sgd(momentum=0.0), optim.Adam(weight_decay=0.1), mamo.Mamo()):
        def steps(w, grad, active=active, rule=rule):
            w, state = rule.step(w, grad, rule.init(w), active)
            return rule.step(w, grad, state, active)
        if active is flags:
            torch.func.vmap(steps)(draw(), draw(), flags)
        else:
            torch.func.vmap(steps)(draw(), draw())
torch.func.vmap(lambda w, g: optim.Adam().step(w, g, optim.Adam().init(w), None, last=True)[0])(draw(), draw())
torch.func.vmap(lambda w, g: mamo.Mamo().step(w, g, mamo.Mamo().init(w), None))(draw().float(), draw().float())
# Adam's first steps keep their gradients instead of the moments.
optim.compiles = fused.compiles
def adam(w, grads, active, deferred):
    state = optim.Adam().init(w)
    for n, grad in enumerate(grads, 1):
        how = {"defers": n < len(grads), "last": n == len(grads)} if deferred else {}
        w, state = optim.Adam().step(w, grad, state, active, **how)
    return w
for active, steps in ((None, 5), (shared, 2)):
    w, grads = draw(), torch.randn(steps, 3, 1500, dtype=torch.float64)
    plain, kept = (torch.func.vmap(lambda w, g: adam(w, g, active, how), (0, 1))(w, grads) for how in (False, True))
    assert torch.equal(kept, plain)
torch.func.vmap(lambda a, b: optim.Scaled(optim.Sgd(), torch.tensor(0.5)).step(a, b, optim.Sgd().init(a), None))(
    draw(), draw()
)
torch.func.vmap(lambda w, g, m: mamo.Mamo().forget(mamo.Mamo().init(w), m))(draw(), draw(), flags)
torch.func.vmap(fused.either)(flags, draw(), draw())
one, two = draw().abs(), draw()
masks, numbers = torch.rand(3, 1500) > 0.5, torch.rand(3, dtype=torch.float64)
for function, given in (
    (cowa._exactly_without, (one, two, draw(), flags, draw().abs(), numbers, masks)),
    (phases._merged, (flags, one, two, draw())),
    (pwpm._moves, (two, flags, numbers)),
    (pwpm._by_change, (two, flags, masks)),
    (pwpm._by_benefit, (two, flags, masks)),
    (pwpm._shared, (flags, one)),
    (pwpm._weighted, (one, flags, numbers)),
):
    torch.func.vmap(lambda *g, function=function: fused.elementwise(function, *g))(*given)
assert len(set(made)) == 16, sorted(set(made))
# Quotients and roots of float32 are exact, those of zeros and of extremes too.
special = torch.tensor([0.0, -0.0, 1.0, -3.0, torch.inf, -torch.inf, torch.nan, 2.0**-149, -(2.0**-126), 3e38])
over, under = (t.reshape(1, -1) for t in torch.meshgrid(special, special, indexing="ij"))
for fast, plain in zip(
    plain_results(lambda x, y: (x / y, torch.sqrt(x)), [over, under]), (over / under, over.sqrt()), strict=True
):
    torch.testing.assert_close(fast, plain, rtol=0, atol=0, equal_nan=True)
rows, healthy = torch.randn(4, 1500, dtype=torch.float64), torch.tensor([True, False, True, True])
rows[1] = torch.nan
close(vectors.sum_rows(healthy, rows), rows[healthy].sum(0))
print("equal")
"""


@slow  # the interpreter of Triton takes long; a GPU runs the kernels in benchmarks/check_gpu.py
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (Linux only)")
def test_the_kernels_compute_what_plain_pytorch_does() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ
        | {"TRITON_INTERPRET": "1"},  # read when Triton is imported, so in a process of its own
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
