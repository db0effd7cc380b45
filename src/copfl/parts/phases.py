"""Local training in two phases: of head and body, or personal and shared, with the other frozen; or of two models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core.optim import Optimizer, State, begin, kept
from copfl.core.task import Batch, Data, Objective, Plan, Task, cross_entropy
from copfl.core.train import train
from copfl.errors import at_least, one_of
from copfl.kernels.fused import either, elementwise

PHASES = ("restart", "sequence", "apart")
HOLDS = ("value", "offset")


@dataclass(frozen=True, eq=False)
class HeadAlone:
    """The task of learning a head on a body that stays: its vector is the head's entries and the statistics."""

    task: Task
    w: Tensor  # [D], the body's and some head

    @property
    def d(self) -> int:
        return len(self.task.layout.entries(self.w, "head"))

    def batch(self, data: Data, batch: Batch) -> tuple[Tensor, Tensor]:
        """The samples and labels of one step."""
        return self.task.batch(data, batch)

    def gradient(
        self,
        parameters: Tensor,
        buffers: Tensor,
        x: Tensor,
        y: Tensor,
        valid: Tensor | None,
        objective: Objective,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the objective for the head [h], its value, and the buffers after this batch."""
        return self.task.gradient(self.w[: self.task.d], buffers, x, y, valid, objective, head=parameters)


def fresh_head(optimizer: Optimizer, task: Task) -> State:
    """What of the state of a head's optimizer is in the record of a client that has never trained."""
    return kept(optimizer, optimizer.init(task.layout.entries(task.initial, "head")))


class HeadAndBody(NamedTuple):
    w: Tensor  # [D]
    head_moments: State  # [h] each, what of them lives on
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
    head, body, statistics = task.layout.entries(w, "head"), task.where("body")[: task.d], w[task.d :]
    heads, alone = begin(optimizers[0], moments[0], head), HeadAlone(task, w)
    epochs = plan[: head_epochs if len(head) else 0]  # a module without parameters has nothing to learn
    moved, heads, _ = train(alone, optimizers[0], torch.cat([head, statistics]), heads, data, epochs)
    w = task.layout.with_entries(torch.cat([w[: task.d], moved[len(head) :]]), "head", moved[: len(head)])
    bodies, rest = begin(optimizers[1], moments[1], w[: task.d]), plan[head_epochs:]
    w, bodies, loss = train(task, optimizers[1], w, bodies, data, rest, active=body, objective=objective)
    return HeadAndBody(w, kept(optimizers[0], heads), kept(optimizers[1], bodies), loss)


class Apart(NamedTuple):
    """What a client has besides, if it trains two whole models instead of two halves of one."""

    sent: Tensor  # [D], the shared model as its last training left it, all of which it uploaded
    moments: State  # of its own model; those of the shared one are where others have theirs


class Halves(NamedTuple):
    w: Tensor  # [D], both put together under the mask; batch-norm statistics are those of the last phase, or the own
    update: Tensor  # [d], delta_n = start - w, Eq. (6); of the shared model, if apart
    moments: State
    loss: Tensor  # [], of the shared half's phase
    trained: Tensor  # [D], what predicts: w, or the own model
    sent: Tensor  # [D], what is uploaded where it is shared: w, or the shared model
    apart: Apart | None = None


def own_beside_shared(
    task: Task, optimizer: Optimizer, own: Tensor, broadcast: Tensor, moments: State, apart: Apart, data: Data,
    plan: Plan, mask: Tensor,
) -> Halves:  # fmt: skip
    """Two whole models, which know nothing of each other, after half of the plan each."""
    epochs, shared = len(plan) // 2, either(task.local(), apart.sent, broadcast)  # with statistics of its own
    beside = begin(optimizer, apart.moments, own[: task.d])
    own, beside, _ = train(task, optimizer, own, beside, data, plan[:epochs])
    sent, moments, loss = train(task, optimizer, shared, moments, data, plan[epochs:])
    after = Apart(sent, kept(optimizer, beside))
    return Halves(either(mask, own, sent), (shared - sent)[: task.d], moments, loss, own, sent, after)


def personal_then_shared(
    task: Task,
    optimizer: Optimizer,
    start: Tensor,
    moments: State,
    data: Data,
    plan: Plan,
    mask: Tensor,
    restart: bool,
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
    return Halves(w, update[: task.d], moments, loss, w, w)


def _merged(personal: Tensor, first: Tensor, second: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    w = torch.where(personal, first, second)
    return w, start - w


@dataclass(frozen=True)
class Phases:
    """How a client's personal and shared half train, and what stays of the personal one.

    phases  "restart": both halves train from the same point (Paper: Algorithm 2). "sequence": one after the other.
            "apart": the broadcast trains and is uploaded whole, as if nothing were personal, and the client's own model
            trains beside it; of that, what the mask has lives on
    hold    "value": a personal entry stays what its last training made it (Paper). "offset": its distance to the
            broadcast stays, so that it follows what the others learn
    epochs  for each half
    """

    phases: str = "restart"
    hold: str = "value"
    epochs: int = 1

    def __post_init__(self) -> None:
        one_of(PHASES, phases=self.phases)
        one_of(HOLDS, hold=self.hold)
        at_least(1, epochs=self.epochs)

    def first(self, task: Task, moments: State) -> Apart | None:
        """What a client that has never trained has besides."""
        return Apart(task.initial, moments) if self.phases == "apart" else None

    def held(self, w: Tensor, seen: Tensor, broadcast: Tensor) -> Tensor:
        """What a personal entry is now, if it was w when the broadcast was `seen`."""
        return w if self.hold == "value" else w + (broadcast - seen)

    def train(
        self, task: Task, optimizer: Optimizer, start: Tensor, broadcast: Tensor, moments: State, apart: Apart | None,
        data: Data, plan: Plan, mask: Tensor,
    ) -> Halves:  # fmt: skip
        """Both halves after the plan; `moments` as they are kept."""
        moments = begin(optimizer, moments, start[: task.d])
        if apart is not None:
            return own_beside_shared(task, optimizer, start, broadcast, moments, apart, data, plan, mask)
        restart = self.phases == "restart"
        return personal_then_shared(task, optimizer, start, moments, data, plan, mask, restart)
