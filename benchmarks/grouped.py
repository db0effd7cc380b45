"""Convolutions with groups and a kernel per client, three ways: `python benchmarks/grouped.py`

Forward and both gradients of 10 clients with batches of 16, in the shapes of resnext50 and of two regnets. "cuDNN"
is one convolution with the groups of all clients, which is what vmap makes of it; "products" are batched products
over the patches of every client and group; "kernel" is `kernels/triton/grouped.py`. Prints the median milliseconds
of each, the floor of the bytes, and the relative difference from cuDNN in float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.kernels import layers
from copfl.kernels.fused import can_compile, without_kernels
from copfl.kernels.layers import Geometry, Groups

BANDWIDTH = 4.2e12  # bytes per second that a copy moves on an H200


class Shape(NamedTuple):
    """Of a convolution with as many kernels as channels."""

    name: str
    channels: int
    groups: int
    size: int  # height and width
    stride: int = 1
    kernel: int = 3


SHAPES = [
    Shape("resnext50, layer 1", 128, 32, 16),
    Shape("resnext50, layer 2, first", 256, 32, 16, 2),
    Shape("resnext50, layer 2", 256, 32, 8),
    Shape("resnext50, layer 3", 512, 32, 4),
    Shape("resnext50, layer 4", 1024, 32, 2),
    Shape("regnet_x_1_6gf", 168, 7, 8),
    Shape("regnet_y_16gf", 448, 4, 8),
]
Case = Callable[[Tensor, Tensor], Tensor]


def ways(shape: Shape, device: str) -> dict[str, Case]:
    """y [N*B, Ho, Wo, C] of x [N*B, H, W, C] and kernels [N, C, C / groups, k, k]."""
    pad, pair = shape.kernel // 2, (shape.stride, shape.stride)
    how = Groups(pair, (pad, pad), (1, 1), shape.groups)

    def by_cudnn(x: Tensor, weight: Tensor) -> Tensor:
        with without_kernels():
            return layers.convolve_groups(x, weight, how)

    def by_products(x: Tensor, weight: Tensor) -> Tensor:
        n, many = len(weight), len(weight) * shape.groups
        apart = x.unflatten(0, (n, -1)).unflatten(-1, (shape.groups, -1)).movedim(4, 1).flatten(0, 2)
        kernels = weight.unflatten(1, (shape.groups, -1)).flatten(0, 1)
        geometry = Geometry((shape.kernel, shape.kernel), pair, (pad, pad))
        y = layers.convolve(apart.contiguous(), kernels, geometry, None, None)
        maps = y.unflatten(0, (many, -1)).unflatten(0, (n, -1)).movedim(1, 4)
        return maps.flatten(4).flatten(0, 1)

    found: dict[str, Case] = {"cuDNN": by_cudnn, "products": by_products}
    if device == "cuda" and can_compile():
        found["kernel"] = lambda x, weight: layers.convolve_groups(x, weight, how)
    return found


def milliseconds(call: Callable[[], object], device: str) -> float:
    """The median of a call; on a GPU that of replays of a recorded one."""
    for _ in range(2):
        call()
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        call()
    for _ in range(20):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return statistics.median(times[2:])


def gap(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """The largest relative difference of the tensors."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def measured(shape: Shape, clients: int, batch: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(clients * batch, shape.size, shape.size, shape.channels, device=device)
    group = shape.channels // shape.groups
    weight = torch.randn(clients, shape.channels, group, shape.kernel, shape.kernel, device=device)
    outputs = -(-shape.size // shape.stride)
    toward = torch.randn(len(x), outputs, outputs, shape.channels, device=device)

    def results(way: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        given = [t.to(dtype).requires_grad_() for t in (x, weight)]
        y = way(*given)
        return (y.detach(), *torch.autograd.grad(y, given, toward.to(dtype)))

    # Forward: x, the kernels and y. Back: x, the kernels, the gradient of y, and both gradients.
    moved = 4 * (3 * x.numel() + 2 * toward.numel() + 3 * weight.numel())
    row: dict[str, Any] = {"shape": shape.name, "floor": 1e3 * moved / BANDWIDTH}
    exact = results(ways(shape, device)["cuDNN"], torch.float64)
    for name, way in ways(shape, device).items():
        try:
            row[name] = milliseconds(lambda way=way: results(way), device)
            row[f"{name}, difference"] = gap(results(way), exact)
            if name == "kernel":
                row["kernel, difference in float64"] = gap(results(way, torch.float64), exact)
        except RuntimeError as error:
            row[name] = str(error)[:200]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no other shape after this many")
    parser.add_argument("--out", type=Path, default=Path("grouped.json"))
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    began, table = time.perf_counter(), []
    for shape in SHAPES:
        if time.perf_counter() - began > options.seconds:
            break
        row = measured(shape, options.clients, options.batch, options.device)
        table.append(row)
        print(
            "  ".join(f"{k}: {v:.3g}" if isinstance(v, float) else f"{k}: {v}" for k, v in row.items()),
            flush=True,
        )
        options.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
