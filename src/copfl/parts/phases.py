"""Local training in two phases, each with a part of the model frozen: head and body, or personal and shared."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from copfl.elementwise import elementwise
from copfl.optim import Optimizer, State, begin, kept, train
from copfl.task import Data, Objective, Plan, Task, cross_entropy


class HeadAndBody(NamedTuple):
    w: Tensor  # [D]
    head_moments: State  # what of them lives on
    body_moments: State
    loss: Tensor  # [], of the body's phase


def head_then_body(
    task: Task,
    optimizers: tuple[Optimizer, Optimizer],
    w: Tensor,
    moments: tuple[State, State],
    data: Data,
    plan: Plan,
    head_epochs: int,
    objective: Objective = cross_entropy,
) -> HeadAndBody:
    """w after `head_epochs` of the plan on the head with the body frozen, then the rest on the body with the head so.

    Each phase has an optimizer state of its own: one common step count would make Adam's first body steps three times
    too large. The `objective` is the body's.
    """
    heads, bodies = (begin(o, m, w[: task.d]) for o, m in zip(optimizers, moments, strict=True))
    head, body = (task.where(part)[: task.d] for part in ("head", "body"))
    w, heads, _ = train(task, optimizers[0], w, heads, data, plan[:head_epochs], active=head)
    rest = plan[head_epochs:]
    w, bodies, loss = train(task, optimizers[1], w, bodies, data, rest, active=body, objective=objective)
    return HeadAndBody(w, kept(optimizers[0], heads), kept(optimizers[1], bodies), loss)


class Halves(NamedTuple):
    w: Tensor  # [D], both halves put together; batch-norm statistics are those of the last phase
    update: Tensor  # [d], delta_n = start - w, Eq. (6)
    moments: State
    loss: Tensor  # [], of the shared half's phase


def personal_then_shared(
    task: Task, optimizer: Optimizer, start: Tensor, moments: State, data: Data, plan: Plan, mask: Tensor, restart: bool
) -> Halves:
    """w after the first half of the plan for the personal entries, the second for the shared ones, Eqs. (3)-(5).

    With `restart` both train from the same start and are put together; else the second goes on from the first.
    """
    epochs, personal = len(plan) // 2, mask[: task.d]
    first, moments, _ = train(task, optimizer, start, moments, data, plan[:epochs], active=personal)
    again = start if restart else first
    second, moments, loss = train(task, optimizer, again, moments, data, plan[epochs:], active=~personal)
    trained = torch.arange(len(start), device=start.device) < task.d
    w, update = elementwise(_merged, mask & trained, first, second, start)
    return Halves(w, update[: task.d], moments, loss)


def _merged(personal: Tensor, first: Tensor, second: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    w = torch.where(personal, first, second)
    return w, start - w
