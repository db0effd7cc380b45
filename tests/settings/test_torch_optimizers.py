"""torch's optimizers as copfl's: the same steps on the same gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from copfl.errors import UsageError
from copfl.settings.components import build, component
from copfl.settings.torch_optimizers import is_torch, settings_of

Made = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SAME: dict[str, Made] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": functools.partial(torch.optim.Adam, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.0),
}


@pytest.mark.parametrize("name", SAME)
def test_the_steps_are_torchs(name: str) -> None:
    start = torch.tensor([1.0, -2.0, 0.5])
    parameter = nn.Parameter(start.clone())
    theirs = SAME[name]([parameter])
    ours = build("optimizer", component("optimizer", settings_of(SAME[name])))
    w, state = start, ours.init(start)
    for n in range(4):
        grad = torch.tensor([0.3, -0.2, 0.1]) * (n + 1)
        parameter.grad = grad.clone()
        theirs.step()
        w, state = ours.step(w, grad, state, None)
    torch.testing.assert_close(w, parameter.detach())


def test_a_class_leaves_the_rate_open_and_an_instance_does_not() -> None:
    assert "lr" not in settings_of(torch.optim.SGD)
    assert "lr" not in settings_of(functools.partial(torch.optim.SGD, momentum=0.9))
    made = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.25)
    assert settings_of(made) == {"name": "sgd", "lr": 0.25, "momentum": 0.0, "weight_decay": 0.0}
    assert is_torch(made)
    assert not is_torch("sgd")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.optim.RMSprop, "no optimizer with the steps of torch.optim.RMSprop; name"),
        (torch.optim.AdamW, "no decoupled weight decay as torch.optim.AdamW has; pass weight_decay=0"),
        (functools.partial(torch.optim.Adam, amsgrad=True), "no amsgrad as torch.optim.Adam"),
        (functools.partial(torch.optim.SGD, lr=-1.0), "making it of a list of parameters raised ValueError"),
        (lambda parameters: 3, "the function gave int, and no torch optimizer"),
    ],
)
def test_other_steps_are_one_error(other: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings_of(other)
