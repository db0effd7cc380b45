"""Optimizers as values: numbers in a frozen dataclass, state in and out. And `descend`, the one local training loop.

`active` is a bool mask over the parameters: only those may move. None means all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.task import Batch, Data, Epoch, Objective, Task, cross_entropy
from copfl.errors import UsageError, above
from copfl.kernels.fused import elementwise, mostly, of_many_steps

State = Any  # a tree of tensors that the optimizer alone understands


class Optimizer(Protocol):
    """How a gradient becomes a step."""

    @property
    def keep(self) -> bool:
        """Whether the state lives on from round to round; otherwise every round starts afresh."""

    def init(self, parameters: Tensor) -> State:
        """The state before the first step."""

    def step(
        self, parameters: Tensor, grad: Tensor, state: State, active: Tensor | None
    ) -> tuple[Tensor, State]:
        """The parameters and the state after one step, in tensors of their own: they may be written to afterwards."""

    def forget(self, state: State, entries: Tensor) -> State:
        """The state after these entries (bool) changed sides between shared and personal."""


class Velocity(NamedTuple):
    speed: Tensor | tuple[()]  # [d]


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent; the momentum and decay of FedPAC's configuration by default."""

    lr: float = 0.01
    momentum: float = 0.5
    weight_decay: float = 5e-4
    keep: bool = False

    def __post_init__(self) -> None:
        above(0, lr=self.lr)
        _within(0, 1, momentum=self.momentum)

    def init(self, parameters: Tensor) -> Velocity:
        return Velocity(torch.zeros_like(parameters) if self.momentum else ())

    def step(
        self, parameters: Tensor, grad: Tensor, state: Velocity, active: Tensor | None
    ) -> tuple[Tensor, Velocity]:
        speed = state.speed if isinstance(state.speed, Tensor) else None
        w, *faster = elementwise(
            _sgd, parameters, grad, speed, active, self.lr, self.momentum, self.weight_decay
        )
        return w, Velocity(faster[0] if faster else ())

    def forget(self, state: Velocity, entries: Tensor) -> Velocity:
        return Velocity(torch.where(entries, 0, state.speed) if isinstance(state.speed, Tensor) else ())


def _sgd(
    w: Tensor,
    grad: Tensor,
    speed: Tensor | None,
    active: Tensor | None,
    lr: float,
    momentum: float,
    decay: float,
) -> tuple[Tensor, ...]:
    if decay:
        grad = torch.add(grad, w, alpha=decay)
    step = grad if speed is None else torch.add(grad, speed, alpha=momentum)
    moved = torch.sub(w, step, alpha=lr)
    if active is not None:
        moved = torch.where(active, moved, w)
    if speed is None:
        return (moved,)
    return moved, step if active is None else torch.where(active, step, speed)


class Moments(NamedTuple):
    u: Tensor  # [d], mean of the gradient
    v: Tensor  # [d], mean of its square
    t: Tensor  # [], steps taken


@dataclass(frozen=True)
class Adam:
    """Adam with one pair of moments that decay everywhere, active or not: the control that MAMO is held against."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    keep: bool = False

    def __post_init__(self) -> None:
        above(0, lr=self.lr, eps=self.eps)
        _within(0, 1, beta1=self.beta1, beta2=self.beta2)

    def init(self, parameters: Tensor) -> Moments:
        zeros = torch.zeros_like(parameters)
        return Moments(zeros, zeros.clone(), parameters.new_zeros(()))

    def step(
        self, parameters: Tensor, grad: Tensor, state: Moments, active: Tensor | None
    ) -> tuple[Tensor, Moments]:
        if self.weight_decay:
            grad = grad + self.weight_decay * parameters
        t = state.t + 1
        w, u, v = elementwise(
            _adam, parameters, grad, state.u, state.v, 1 - self.beta1**t, 1 - self.beta2**t, active,
            self.lr, self.beta1, self.beta2, self.eps,
        )  # fmt: skip
        return w, Moments(u, v, t)

    def forget(self, state: Moments, entries: Tensor) -> Moments:
        return state  # one pair for both halves: that is what leaks


@of_many_steps
def _adam(
    w: Tensor, grad: Tensor, u: Tensor, v: Tensor, weight_u: Tensor, weight_v: Tensor, active: Tensor | None,
    lr: float, beta1: float, beta2: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    if active is not None:
        grad = torch.where(active, grad, 0)
    u = beta1 * u + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad * grad
    moved = w - lr * (u / weight_u) / (torch.sqrt(v / weight_v) + eps)
    return moved if active is None else torch.where(active, moved, w), u, v


def begin(optimizer: Optimizer, kept: State, parameters: Tensor) -> State:
    """The state a round's training starts from: the one kept since the last round, or a fresh one."""
    return kept if optimizer.keep else optimizer.init(parameters)


def kept(optimizer: Optimizer, state: State) -> State:
    """What of the state lives on to the next round: all or nothing."""
    return state if optimizer.keep else ()


def fresh(optimizer: Optimizer, task: Task) -> State:
    """What of the state is in the record of a client that has never trained."""
    return kept(optimizer, optimizer.init(task.initial[: task.d]))


def faster(optimizer: Optimizer, factor: float) -> Optimizer:
    """The same optimizer at a multiple of its learning rate; the state of the one is the state of the other."""
    if isinstance(optimizer, Scaled):
        return Scaled(faster(optimizer.optimizer, factor), optimizer.lr_factor)
    lr = getattr(optimizer, "lr", None)
    if not isinstance(lr, float) or not dataclasses.is_dataclass(optimizer) or isinstance(optimizer, type):
        raise UsageError(
            f"{optimizer!r} has no learning rate to multiply; an optimizer is a dataclass with a field lr"
        )
    return dataclasses.replace(optimizer, lr=factor * lr)


@dataclass(frozen=True, eq=False)
class Scaled:
    """The optimizer with its steps, and so its learning rate, multiplied by a number that only a round knows."""

    optimizer: Optimizer
    lr_factor: Tensor  # []

    @property
    def keep(self) -> bool:
        return self.optimizer.keep

    def init(self, parameters: Tensor) -> State:
        return self.optimizer.init(parameters)

    def step(
        self, parameters: Tensor, grad: Tensor, state: State, active: Tensor | None
    ) -> tuple[Tensor, State]:
        moved, state = self.optimizer.step(parameters, grad, state, active)
        return elementwise(_scaled, parameters, moved, self.lr_factor)[0], state

    def forget(self, state: State, entries: Tensor) -> State:
        return self.optimizer.forget(state, entries)


def _scaled(start: Tensor, end: Tensor, lr_factor: Tensor) -> tuple[Tensor]:
    return (start + lr_factor * (end - start),)


class Learnt(Protocol):
    """What can be descended on: a Task, or a part of one."""

    @property
    def d(self) -> int:
        """How many entries of w are parameters; the rest are statistics."""

    def batch(self, data: Data, batch: Batch) -> tuple[Tensor, Tensor]:
        """The samples and labels of one step."""

    def gradient(
        self,
        parameters: Tensor,
        buffers: Tensor,
        x: Tensor,
        y: Tensor,
        valid: Tensor | None,
        objective: Objective,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the objective [d], its value, and the buffers after this batch."""


class Trained(NamedTuple):
    """What a descent leaves."""

    w: Tensor  # [D]
    state: State
    loss: Tensor  # [], mean over the steps


def descend(
    task: Learnt,
    optimizer: Optimizer,
    w: Tensor,
    state: State,
    data: Data,
    batches: Epoch,
    *,
    active: Tensor | None = None,
    objective: Objective = cross_entropy,
    adjust: Callable[[Tensor, Tensor], Tensor] | None = None,
    at: Callable[[Tensor], Tensor] | None = None,
) -> Trained:
    """The weights, state and mean loss after one step per batch.

    `adjust(parameters, grad)` may change the gradient, for a pull towards other weights; `at(parameters)` may take it
    at another point, a step ahead or in a mixture; `objective` may look at the features. A step whose batch holds no
    real sample changes nothing.
    """
    parameters, buffers = w[: task.d], w[task.d :]
    loss = steps = w.new_zeros(())
    for batch in batches:
        x, y = task.batch(data, batch)
        point = parameters if at is None else at(parameters)
        grad, value, after = task.gradient(point, buffers, x, y, batch.valid, objective)
        if adjust is not None:
            grad = adjust(parameters, grad)
        moved, next_state = optimizer.step(parameters, grad, state, active)
        if batch.valid is None:
            parameters, buffers, state, loss, steps = moved, after, next_state, loss + value, steps + 1
        else:
            some = batch.valid.any()
            parameters, buffers, state = tree.each(
                partial(mostly, some), (moved, after, next_state), (parameters, buffers, state)
            )
            loss, steps = loss + torch.where(some, value, 0), steps + some
    return Trained(torch.cat([parameters, buffers]), state, loss / steps.clamp(min=1))


def train(
    task: Learnt,
    optimizer: Optimizer,
    w: Tensor,
    state: State,
    data: Data,
    epochs: tuple[Epoch, ...],
    **how: Any,
) -> Trained:
    """`descend` over several passes, with the mean of their losses."""
    losses = []
    for batches in epochs:
        w, state, loss = descend(task, optimizer, w, state, data, batches, **how)
        losses.append(loss)
    return Trained(w, state, torch.stack(losses).mean() if losses else w.new_zeros(()))


def pull(weight: float, centre: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The `adjust` that adds the gradient of weight / 2 * |parameters - centre|^2: a pull towards the centre."""
    return lambda parameters, grad: grad + weight * (parameters - centre)


def has_valid(batch: Batch) -> Tensor:
    """Whether the batch holds a real sample, for a loop that calls `descend` step by step."""
    return (
        torch.ones((), dtype=torch.bool, device=batch.index.device)
        if batch.valid is None
        else batch.valid.any()
    )


def mean_loss(losses: Sequence[Tensor], batches: Sequence[Batch]) -> Tensor:
    """The mean of the steps' losses, over the steps whose batch holds a real sample."""
    counts = torch.stack([has_valid(batch).to(losses[0].dtype) for batch in batches])
    return (torch.stack(list(losses)) * counts).sum() / counts.sum().clamp(min=1)


def _within(low: float, high: float, **numbers: float) -> None:
    for name, number in numbers.items():
        if not low <= number < high:
            raise UsageError(f"{name}={number} must be at least {low} and below {high}")
