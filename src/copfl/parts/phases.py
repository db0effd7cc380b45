"""Local training in two phases: of the head and the body, or of the personal and the shared entries."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.core.optim import Optimizer, State, begin, kept
from copfl.core.task import Batch, Data, KeyedInputs, Objective, Plan, Task
from copfl.core.train import train
from copfl.errors import UsageError, at_least, one_of
from copfl.kernels.fused import elementwise

TRAINING = ("in_turn", "together")


@dataclass(frozen=True, eq=False)
class HeadAlone:
    """The task of training a head on a fixed body: its vector is the head's entries and the statistics."""

    task: Task
    w: Tensor  # [D], the body's and some head

    @property
    def d(self) -> int:
        return len(self.task.layout.entries(self.w, "head"))

    def batch(self, data: Data, batch: Batch) -> tuple[KeyedInputs, Tensor]:
        """The samples and labels of one step."""
        return self.task.batch(data, batch)

    def gradient(self, parameters: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the objective for the head [h], its value, and the buffers after this batch."""
        return self.task.gradient(self.w[: self.task.d], *rest, head=parameters)


def fresh_head(optimizer: Optimizer, task: Task) -> State:
    """The state of a head's optimizer in the record of a client that has never trained."""
    return kept(optimizer, optimizer.init(task.layout.entries(task.initial, "head")))


class HeadAndBody(NamedTuple):
    w: Tensor  # [D]
    head_moments: State  # [h] each, as the client's record keeps them
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
    objective: Objective | None = None,
) -> HeadAndBody:
    """w after `head_epochs` of the plan on the head with the body frozen, then the rest on the body.

    Each phase has its own optimizer state: a common step count would make Adam's first body steps three times
    too large. The `objective` is the body's.
    """
    head, body, statistics = task.layout.entries(w, "head"), task.where("body")[: task.d], w[task.d :]
    heads, alone = begin(optimizers[0], moments[0], head), HeadAlone(task, w)
    epochs = plan[: head_epochs if len(head) else 0]  # a head may have no parameters
    moved, heads, _ = train(alone, optimizers[0], torch.cat([head, statistics]), heads, data, epochs)
    w = task.layout.with_entries(torch.cat([w[: task.d], moved[len(head) :]]), "head", moved[: len(head)])
    bodies, rest = begin(optimizers[1], moments[1], w[: task.d]), plan[head_epochs:]
    w, bodies, loss = train(task, optimizers[1], w, bodies, data, rest, active=body, objective=objective)
    return HeadAndBody(w, kept(optimizers[0], heads), kept(optimizers[1], bodies), loss)


class Halves(NamedTuple):
    w: Tensor  # [D], w_n^{k+1} = g + p; batch-norm statistics are those of the shared phase
    update: Tensor  # [d], delta_n = w_n^k - w_n^{k+1}, Eq. (6)
    moments: State
    loss: Tensor  # [], of the shared phase


@dataclass(frozen=True)
class Phases:
    """The training of the personal and the shared entries of one client, Algorithm 2, lines 1-13.

    epochs           for each phase
    state_per_phase  each phase starts with a new optimizer state. An optimizer with one step count for all
                     entries, such as Adam, otherwise takes smaller steps in the second; MAMO's is per entry
    training         "in_turn": the personal entries, then the shared ones (Paper). "together": all at once
    """

    epochs: int = 1
    state_per_phase: bool = False
    training: str = "in_turn"

    def __post_init__(self) -> None:
        one_of(TRAINING, training=self.training)
        at_least(1, epochs=self.epochs)

    @property
    def total_epochs(self) -> int:
        return 2 * self.epochs if self.training == "in_turn" else self.epochs

    def check_state(self, optimizer: Optimizer) -> None:
        """UsageError if each phase shall have a new optimizer state and the optimizer keeps one."""
        if self.state_per_phase and optimizer.keep:
            raise UsageError(
                "state_per_phase=true starts every phase with a new optimizer state, and this optimizer "
                "keeps its state from round to round; set keep=false in [optimizer], or leave out "
                "state_per_phase"
            )

    def train(
        self,
        task: Task,
        optimizer: Optimizer,
        start: Tensor,
        moments: State,
        data: Data,
        plan: Plan,
        mask: Tensor,
    ) -> Halves:
        """w after half of the plan on the personal entries and half on the shared ones, Eqs. (3)-(5).

        Both phases start from the same point, and their results are put together.
        """
        d, personal = task.d, mask[: task.d]
        moments = begin(optimizer, moments, start[:d])
        if self.training == "together":
            w, moments, loss = train(task, optimizer, start, moments, data, plan)
            return Halves(w, (start - w)[:d], moments, loss)
        half = len(plan) // 2
        p, moments, _ = train(task, optimizer, start, moments, data, plan[:half], active=personal)
        if self.state_per_phase:
            moments = optimizer.init(start[:d])
        g, moments, loss = train(task, optimizer, start, moments, data, plan[half:], active=~personal)
        trained = torch.arange(len(start), device=start.device) < d
        w, update = elementwise(_merged, mask & trained, p, g, start)
        return Halves(w, update[:d], moments, loss)


def _merged(personal: Tensor, p: Tensor, g: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    w = torch.where(personal, p, g)
    return w, start - w
