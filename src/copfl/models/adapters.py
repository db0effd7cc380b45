"""Which parameters of a model are trained: adapters, and names or patterns of parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from copfl.core.layout import inside, layout_of
from copfl.errors import UsageError, above, at_least, below_one, library

# The last part of the names of attention projections, in the models of transformers and timm.
ATTENTION = ("query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "c_attn", "query_key_value", "qkv")
POINTWISE = "1x1"  # a target: every convolution of one pixel


def lora(
    model: nn.Module, *, r: int = 8, alpha: float = 16.0, targets: str = "auto", dropout: float = 0.0
) -> nn.Module:
    """Low-rank matrices beside the target layers: W x + alpha / r · B A x, where B begins at zero

    The target layers stay as they are. `targets` are ends of their names, patterns, or 1x1, joined by "+".
    """
    at_least(1, r=r)
    above(0, alpha=alpha)
    below_one(dropout=dropout)
    names = target_modules(model, targets)
    peft = library("peft")
    config = peft.LoraConfig(r=r, lora_alpha=alpha, target_modules=names, lora_dropout=dropout)
    with warnings.catch_warnings():
        # Of the transposed layers of GPT-2, which peft then treats as such.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
        adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    return adapted


ADAPTERS: dict[str, Callable[..., nn.Module]] = {"lora": lora}


def target_modules(model: nn.Module, targets: str) -> list[str]:
    """The names of the layers that get an adapter."""
    layers = {name: m for name, m in model.named_modules() if _adaptable(m)}
    ends = {name.rpartition(".")[2] for name in layers}
    words: Iterable[str] = [word.strip() for word in targets.split("+")]
    if targets == "auto":
        words = ATTENTION if ends & set(ATTENTION) else (POINTWISE,)
    chosen = [name for name, layer in layers.items() if any(_matches(name, layer, word) for word in words)]
    if not chosen:
        known = ", ".join(sorted(ends)[:20]) or "it has none"
        raise UsageError(
            f'adapter.targets="{targets}" matches no layer of the model; targets are ends of the names of '
            f'its linear layers and convolutions ({known}), patterns such as "*.attention.*", or '
            f'{POINTWISE}, joined by "+"'
        )
    return chosen


def _adaptable(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.groups == 1
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # that of transformers


def _matches(name: str, layer: nn.Module, word: str) -> bool:
    if word == POINTWISE:
        return isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1)
    if any(sign in word for sign in "*?["):
        return fnmatchcase(name, word)
    return name == word or name.endswith(f".{word}")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def merged(model: nn.Module) -> nn.Module:
    """The model with its adapters added into the layers beside them, in place; other layers stay."""
    child: Any
    for name, child in list(model.named_children()):
        if hasattr(child, "get_base_layer") and hasattr(child, "merge"):  # a layer of peft
            child.merge()
            setattr(model, name, child.get_base_layer())
        elif hasattr(child, "modules_to_save"):  # a layer that peft replaced
            setattr(model, name, child.modules_to_save[child.active_adapter])
        else:
            merged(child)
    return model


def select(
    model: nn.Module, *, head: str | None = None, train: str = "", freeze: str = "", adapted: bool = False
) -> None:
    """Sets which parameters are trained, by their requires_grad.

    With an adapter these are its own, those without pretrained values and the head; `train` adds others.
    Without an adapter, `train` names all that are trained, besides those without pretrained values. `freeze`
    is applied last. Both are parts or patterns, such as "head,*.bias".
    """
    parameters = dict(model.named_parameters())
    fresh = set(getattr(model, "fresh", ()))
    if adapted or train:
        model.requires_grad_(True)
        chosen = _chosen(model, head, "train", train)
        if adapted:
            chosen |= {name for name in parameters if is_adapter(name)}
        if adapted and getattr(model, "trains_head", True):
            chosen |= _chosen(model, head, "train", "head")
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in chosen | fresh)
    frozen = _chosen(model, head, "freeze", freeze)
    if random := sorted(frozen & fresh):
        raise UsageError(
            f'model.freeze="{freeze}" would freeze {random[0]}, which has no pretrained values: the model '
            "would have no trained head. Leave it out of model.freeze"
        )
    for name in frozen:
        parameters[name].requires_grad_(False)


def frozen_modules(model: nn.Module) -> tuple[str, ...]:
    """The paths of the modules that have parameters, all of them frozen."""
    trained = {path: {p.requires_grad for p in module.parameters()} for path, module in model.named_modules()}
    return tuple(path for path, found in trained.items() if found == {False})


def _is_norm(module: nn.Module) -> bool:
    """Whether the module normalises: by its name, as libraries have their own, and by its vectors."""
    own = list(module.parameters(recurse=False))
    return "norm" in type(module).__name__.lower() and bool(own) and all(p.dim() == 1 for p in own)


def _chosen(model: nn.Module, head: str | None, option: str, patterns: str) -> set[str]:
    """The names of the parameters that a list of parts and patterns matches."""
    chosen: set[str] = set()
    names = [name for name, _ in model.named_parameters()]
    for word in filter(None, (word.strip() for word in patterns.split(","))):
        parts = [word]
        if word in ("head", "body"):
            parts = [layout_of(model, head).head]
        elif word == "norms":
            parts = [name for name, module in model.named_modules() if _is_norm(module)]
        matching = {name for name in names if any(inside(name, part) for part in parts)}
        matching = set(names) - matching if word == "body" else matching
        if not matching:
            tops = sorted({name.partition(".")[0] for name in names} - {"head", "body"})
            raise UsageError(
                f'model.{option}="{patterns}": "{word}" matches no parameter of the model. Known: head, '
                f'body, norms, {", ".join(tops)}, and patterns of parameters\' names such as "*.bias"'
            )
        chosen |= matching
    return chosen
