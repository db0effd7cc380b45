"""torch's optimizers as copfl's: of the same rule with the same numbers, or an error that says what differs.

`arguments` calls it where a program passed such an optimizer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from copfl.errors import UsageError

# By torch's class: copfl's name, and torch's numbers with the setting that each is.
RULES: dict[type[torch.optim.Optimizer], tuple[str, Mapping[str, str]]] = {
    torch.optim.SGD: ("sgd", {"momentum": "momentum", "weight_decay": "weight_decay"}),
    torch.optim.Adam: ("adam", {"eps": "eps", "weight_decay": "weight_decay"}),
    torch.optim.AdamW: ("adam", {"eps": "eps"}),
}
# Of torch, how the same steps are computed, and not which.
COMPUTING = ("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "params")
REMEDY = (
    'name "sgd" or "adam", or write an optimizer of your own, a dataclass with the methods of '
    "copfl.core.optim.Optimizer"
)


def is_torch(value: object) -> bool:
    """Whether it is a class of torch.optim, an optimizer, or a function that makes one of parameters."""
    inner = value.func if isinstance(value, functools.partial) else value
    if isinstance(inner, type):
        return issubclass(inner, torch.optim.Optimizer)
    return isinstance(inner, torch.optim.Optimizer) or inspect.isfunction(inner)


def settings_of(value: Any) -> dict[str, Any]:
    """The table [optimizer] with the same steps; without a rate where the program named none.

    Args:
        value: As `is_torch` knows it.
    """
    optimizer = value if isinstance(value, torch.optim.Optimizer) else _made(value)
    kind = type(optimizer)
    if kind not in RULES:
        raise UsageError(f"copfl has no optimizer with the steps of torch.optim.{kind.__name__}; {REMEDY}")
    name, same = RULES[kind]
    group, usual = optimizer.param_groups[0], _made(kind).param_groups[0]
    table = {"name": name, "lr": float(group["lr"])}
    if len(optimizer.param_groups) > 1:
        raise UsageError(
            f"the optimizer has {len(optimizer.param_groups)} groups of parameters; copfl has one"
        )
    if isinstance(value, type) or (isinstance(value, functools.partial) and "lr" not in value.keywords):
        del table["lr"]
    if "betas" in group:
        table |= dict(zip(("beta1", "beta2"), map(float, group["betas"]), strict=True))
    table |= {ours: float(group[theirs]) for theirs, ours in same.items()}
    if group["weight_decay"] and group.get("decoupled_weight_decay", kind is torch.optim.AdamW):
        raise UsageError(
            "copfl's adam has no decoupled weight decay as torch.optim.AdamW has; pass weight_decay=0, or "
            "torch.optim.Adam"
        )
    for key, other in group.items():
        if key not in (*same, *COMPUTING, "lr", "betas", "weight_decay") and other != usual[key]:
            raise UsageError(
                f"copfl's {name} has no {key} as torch.optim.{kind.__name__}({key}={other}); {REMEDY}"
            )
    return table


def _made(factory: Callable[..., Any]) -> torch.optim.Optimizer:
    """What a class or function makes of one parameter."""
    try:
        made = factory([nn.Parameter(torch.zeros(1))])
    except Exception as error:
        raise UsageError(f"optimizer: making it of a list of parameters raised {error!r}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer: the function gave {type(made).__name__}, and no torch optimizer; {REMEDY}"
        )
    return made
