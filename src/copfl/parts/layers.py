"""The layers of a model in the order of its vector, and a number for each of them."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from copfl.core.layout import Layout


@lru_cache(maxsize=64)
def layer_of_each(layout: Layout) -> tuple[int, ...]:
    """The number of the layer of each tensor of w, statistics included.

    A layer is a module with trained parameters, in the order of the vector. A normalisation counts with the
    layer before it, and both matrices of an adapter with the layer that they adapt.
    """
    numbers: dict[str, int] = {}
    count = 0
    for name in layout.names[: layout.trained]:
        module = _module(name)
        if module not in numbers:
            is_norm = module in layout.norms and count > 0
            numbers[module] = count - 1 if is_norm else count
            count += not is_norm
    return tuple(numbers.get(_module(name), 0) for name in layout.names)


def _module(name: str) -> str:
    """The layer's name: without the parameter's, and without that of an adapter's matrix."""
    module = name.partition(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0]
    return module.removesuffix(".base_layer")


def layer_count(layout: Layout) -> int:
    """L."""
    return max(layer_of_each(layout)) + 1


@lru_cache(maxsize=64)  # a recorded program must not copy from the host
def layer_of_entries(layout: Layout, device: torch.device) -> Tensor:
    """[D] int64, the number of the layer of each entry of w."""
    numbers, sizes = torch.tensor(layer_of_each(layout)), torch.tensor(layout.sizes)
    return numbers.repeat_interleave(sizes).to(device)


def means_of_layers(layout: Layout, values: Tensor) -> Tensor:
    """[L], the mean over the trained entries of each layer, of values [d]."""
    sizes = layout.sizes[: layout.trained]
    sums = [piece.sum() for piece in torch.split(values, list(sizes))]
    members: list[list[int]] = [[] for _ in range(layer_count(layout))]
    for place, number in enumerate(layer_of_each(layout)[: layout.trained]):
        members[number].append(place)
    return torch.stack([_sum([sums[p] for p in layer]) / sum(sizes[p] for p in layer) for layer in members])


def _sum(numbers: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(numbers)).sum()
