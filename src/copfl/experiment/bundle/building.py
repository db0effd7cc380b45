"""The task of a bundle: its network, built from the settings, with the tensors that were not trained.

A `Bundle` calls it when its model is needed.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from copfl import models as models_of_copfl
from copfl.core.task import Task, task_of
from copfl.data.samples import SURVIVAL
from copfl.errors import RunError, UsageError, raised_as
from copfl.experiment.bundle.base import FROZEN, TOKENIZER
from copfl.experiment.bundle.description import Description, Tokenizer
from copfl.experiment.models import network
from copfl.experiment.tasks import build_task
from copfl.models import pretrained, text
from copfl.settings.schema import Model, record_of


def build(
    description: Description, base: Path | None, trained: Collection[str], size: int, model: Any = None
) -> Task:
    """The task.

    Args:
        description: Of the bundle.
        base: The folder of what was not trained.
        trained: The names of the tensors in the bundle's weights.
        size: Bytes of the bundle's weights and of its base.
        model: The module, or the function that makes it, of a run whose model a Python program passed.
    """
    table, shape, count = dict(description.model), description.input.shape, description.output.count
    name = str(table.get("name", ""))
    if "value" in table and model is None:
        raise UsageError(
            f"the model is {table['value']}, a value that a Python program passed; pass it again: "
            "copfl.load(path, model=...)"
        )
    if pretrained.is_pretrained(name):  # its tensors are in the bundle
        table = {key: value for key, value in table.items() if key != "sha256"} | {"weights": "none"}
        if name.startswith("hf:"):
            if base is None:
                raise RunError(
                    "it has no base, which has the configuration of its model; take a complete copy"
                )
            table["name"] = f"hf:{base.absolute()}"
    settings = dataclasses.replace(record_of("model", table), value=model)
    adapter = record_of("adapter", description.adapter)
    if model is None and settings.name in models_of_copfl.MODELS:
        _check_size(settings, shape, description, size)
    module = network.build_model(settings, adapter, shape, count, description.seed, description.output.kind)
    dtype: torch.dtype = getattr(torch, description.dtype)
    module = module.to(dtype)
    for parameter_name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter_name in trained)
    if base is not None and (base / FROZEN).is_file():
        _fill(module, base / FROZEN)
    if isinstance(module, pretrained.Pretrained) and description.input.text is not None:
        module.mask = pretrained.mask_of(module)  # found by comparing outputs, now those of the real tensors
    output = description.output
    criterion, metrics = build_task(
        record_of("task", description.task), output.kind, (output.mean, output.std)
    )
    if output.kind == SURVIVAL and count != (needed := len(criterion.cuts) or 1):
        raise RunError(
            f"it has {count} outputs, and its objective of survival {needed}; restore it from a copy"
        )
    return task_of(
        module,
        count,
        criterion=criterion,
        metrics=metrics,
        mean=description.input.mean,
        std=description.input.std,
        head=table.get("head"),
        statistics=trained,
        dtype=dtype,
    )


def _check_size(model: Model, shape: Any, description: Description, size: int) -> None:
    """RunError if a model of copfl's has more entries than its files have bytes, before it takes any memory."""
    with torch.device("meta"):
        plain_shape = () if isinstance(shape, dict) else shape
        output = description.output
        module = models_of_copfl.build(
            model.name, plain_shape, output.count, 0, output.kind, **model.arguments
        )
    entries = sum(parameter.numel() for parameter in module.parameters())
    if entries > size:
        raise RunError(f"it describes a model of {entries:,} numbers, and the files have {size:,} bytes")


def _fill(module: nn.Module, path: Path) -> None:
    """Sets the frozen tensors of the module; RunError if they are of another module."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    damaged = f"{path} is damaged or of another model ({{}}); restore it from a copy"
    with raised_as(RunError, damaged, SafetensorError, OSError, RuntimeError):
        missing = module.load_state_dict(load_file(path), strict=False)
    lacking = [name for name, p in module.named_parameters() if not p.requires_grad and name in missing[0]]
    if lacking or missing[1]:
        raise RunError(f"{path} is of another model: {(lacking or missing[1])[0]}; restore it from a copy")


def tokenizer_of(description: Description, base: Path | None) -> Tokenizer | None:
    """The tokenizer of a model that takes texts.

    Args:
        description: Of the bundle.
        base: The folder of what was not trained; None: the bundle has none.
    """
    if description.input.text is None:
        return None
    table, name = description.model, str(description.model.get("name", ""))
    if "tokenizer" not in table and not name.startswith("hf:"):
        return network.tokenizer_of(record_of("model", table))
    if base is None:
        raise RunError("the bundle has no base, which has the tokenizer of its model; take a complete copy")
    config = base if (base / "config.json").is_file() else None
    return text.Tokenizer(base / TOKENIZER, table.get("max_length", 0), config)
