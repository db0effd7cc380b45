"""The matrices of LoRA in w: W x + scaling · B A x for each adapted layer, named as by peft."""

from typing import Any

import torch
from torch import Tensor

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
