"""How many parameters a run config asks for: counted on torch's meta device, where none has memory."""

import math

import torch
from torch import nn

from copfl import models
from copfl.flower.policy.refusal import PolicyError, Refusal
from copfl.models.adapters import target_modules
from copfl.settings.schema import Adapter, Model


def require_size(most: int, model: Model, adapter: Adapter, shape: tuple[int, ...], classes: int) -> None:
    """PolicyError if a model of copfl's has more parameters than the owner allows, before any has memory.

    The owner has entered every other model, and knows its size.

    Args:
        most: `bounds.parameters` of the policy.
        model: the settings of the model.
        adapter: those of its adapter; an empty record for none.
        shape: of one sample.
        classes: number of outputs.
    """
    if model.name not in models.MODELS:
        return
    with torch.device("meta"):
        module = models.build(model.name, shape, classes, 0, **model.arguments)
    count = sum(parameter.numel() for parameter in module.parameters())
    if count <= most and adapter:
        count += adapter_parameters(module, adapter)
    if count > most:
        why = f"the model has {count:,} parameters, and {most:,} are the most"
        raise PolicyError((Refusal("bounds.parameters", why),))


def adapter_parameters(module: nn.Module, adapter: Adapter) -> int:
    """The number of entries of the low-rank matrices beside the target layers."""
    names = target_modules(module, str(adapter.arguments.get("targets", "auto")))
    shapes = [module.get_parameter(f"{name}.weight").shape for name in names]
    rank = int(adapter.arguments.get("r", 8))
    return sum(rank * (shape[0] + math.prod(shape[1:])) for shape in shapes)
