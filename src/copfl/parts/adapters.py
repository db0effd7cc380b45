"""The matrices of LoRA in w: W x + scaling · B A x for each adapted layer, named as by peft."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from copfl.core.layout import Layout
from copfl.core.task import Task
from copfl.errors import UsageError

A, B = "*.lora_A", "*.lora_B"
BASE = "*.base_layer.weight"  # W; part of w only where the user asks for it
HOW = {A: "--adapter lora", B: "--adapter lora", BASE: f'--train "{BASE}" beside --adapter lora'}


def check(task: Task, algorithm: str, needs: tuple[str, ...]) -> None:
    """UsageError if the model trains no parameter of one of these patterns."""
    for pattern in needs:
        try:
            task.where(pattern)
        except UsageError:
            raise UsageError(
                f"{algorithm} works on the matrices of LoRA, and the model trains no parameter {pattern}; "
                f"add them with {HOW[pattern]}, or choose another algorithm"
            ) from None


def _pairs(layout: Layout) -> list[tuple[str, str]]:
    """The names of A and B of every adapter, in the order of the vector."""
    return [(a, a.replace(".lora_A.", ".lora_B.")) for a in layout.names if ".lora_A." in a]


@lru_cache(maxsize=64)  # a recorded program must not copy from the host
def components(layout: Layout, device: torch.device) -> Tensor:
    """[D] int64, the component that an entry of w belongs to: the row of A, the column of B; -1 elsewhere."""
    numbers = [torch.full(shape, -1) for shape in layout.shapes]
    for pair in _pairs(layout):
        for axis, name in enumerate(pair):
            place = layout.names.index(name)
            rank = layout.shapes[place][axis]
            shape = [rank if at == axis else 1 for at in range(len(layout.shapes[place]))]
            numbers[place] = torch.arange(rank).view(shape).expand(layout.shapes[place])
    return torch.cat([number.reshape(-1) for number in numbers]).to(device)


def rank_of(layout: Layout) -> int:
    """r, the largest rank of an adapter."""
    return int(components(layout, torch.device("cpu")).max()) + 1


def _scaling(task: Task, a: str) -> float:
    path, _, adapter = a.removesuffix(".weight").partition(".lora_A.")
    layer: Any = task.module.get_submodule(path)
    return float(layer.scaling[adapter])


def dense(task: Task, w: Tensor) -> Tensor:
    """The products scaling · B A of all adapters, one after the other; of a convolution, as a matrix."""
    tensors = task.layout.split(w[: task.d])
    matrices = (
        _scaling(task, a) * tensors[b].flatten(1) @ tensors[a].flatten(1) for a, b in _pairs(task.layout)
    )
    return torch.cat([matrix.reshape(-1) for matrix in matrices])


def factored(task: Task, w: Tensor, products: Tensor) -> Tensor:
    """w whose adapters have the best approximation of these products by their rank: B = U S / scaling, A =
    Vᵀ.

    Singular values fall, so the first components are the best of every smaller rank. A component of which
    nothing is left has B = 0 and the A of before, as an adapter begins. The largest entry of a row of A is
    positive: a singular value decomposition determines no sign.
    """
    tensors, start = dict(task.layout.split(w[: task.d])), 0
    for a, b in _pairs(task.layout):
        first, second = tensors[a], tensors[b]
        rows, columns = second.shape[0], first.flatten(1).shape[1]
        product = products[start : start + rows * columns].view(rows, columns)
        start += rows * columns
        # On the host: a GPU takes several times as long for one matrix of a few hundred rows.
        decomposed = torch.linalg.svd(product.cpu().double(), full_matrices=False)
        u, s, v = (factor.to(w.device) for factor in decomposed)
        kept = min(len(s), len(first))  # a small layer may have fewer components than the adapter
        u, s, v = u[:, :kept], s[:kept], v[:kept]
        is_left = s > 1e-6 * s[:1]  # below it rounding in single precision decides
        sign = torch.where(v.gather(1, v.abs().argmax(1, keepdim=True)) < 0, -1.0, 1.0).to(v)
        new_first = torch.where(is_left[:, None], v * sign, first.flatten(1)[:kept].double())
        new_second = torch.where(is_left, u * s * sign.T / _scaling(task, a), 0)
        rest = second.flatten(1)[:, kept:].new_zeros(rows, second.shape[1] - kept)
        whole_first = torch.cat([new_first.to(first), first.flatten(1)[kept:]])
        tensors[a] = whole_first.view(first.shape)
        tensors[b] = torch.cat([new_second.to(second), rest], 1).view(second.shape)
    parameters = [tensors[name].reshape(-1) for name in task.layout.names[: task.layout.trained]]
    return torch.cat([*parameters, w[task.d :]])


def products(task: Task, w: Tensor) -> Tensor:
    """[b], scaling · B A of every adapted layer, in the place of its W in the entries of BASE."""
    names, tensors = task.layout.names, task.layout.split(w[: task.d])
    found = []
    for a in (name for name in names if ".lora_A." in name):
        path, _, adapter = a.removesuffix(".weight").partition(".lora_A.")
        layer: Any = task.module.get_submodule(path)
        if f"{path}.base_layer.weight" not in names:
            raise UsageError(f"fedex_lora changes {path}.base_layer.weight, which is frozen; use {HOW[BASE]}")
        product = tensors[a.replace(".lora_A.", ".lora_B.")].flatten(1) @ tensors[a].flatten(1)
        product = product.T if getattr(layer, "fan_in_fan_out", False) else product
        found.append((names.index(f"{path}.base_layer.weight"), layer.scaling[adapter] * product.reshape(-1)))
    return torch.cat([product for _, product in sorted(found, key=lambda pair: pair[0])])
