"""The one local training loop."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.optim import Optimizer, State, kept
from copfl.core.task import Batch, Data, Epoch, KeyedInputs, Objective, Task
from copfl.kernels.fused import joined, mostly


class Trainable(Protocol):
    """A Task, or a part of one."""

    @property
    def d(self) -> int:
        """The number of parameters in w; the rest are statistics."""

    def batch(self, data: Data, batch: Batch) -> tuple[KeyedInputs, Tensor]:
        """The samples and labels of one step."""

    def gradient(
        self,
        parameters: Tensor,
        buffers: Tensor,
        x: KeyedInputs,
        y: Tensor,
        valid: Tensor | None,
        objective: Objective | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the objective [d], its value, and the buffers after this batch."""


class Trained(NamedTuple):
    """The result of training."""

    w: Tensor  # [D]
    state: State
    loss: Tensor  # [], mean over the steps


def descend(
    task: Trainable,
    optimizer: Optimizer,
    w: Tensor,
    state: State,
    data: Data,
    batches: Epoch,
    *,
    active: Tensor | None = None,
    objective: Objective | None = None,
    adjust: Callable[[Tensor, Tensor], Tensor] | None = None,
    at: Callable[[Tensor], Tensor] | None = None,
    ends: bool = False,
) -> Trained:
    """The weights, state and mean loss after one step per batch.

    `adjust(parameters, grad)` may change the gradient, for a pull towards other weights. `at(parameters)` may
    take the gradient at another point. `objective` replaces the task's and may use the features. A step
    without a valid sample changes nothing. With `ends` nobody needs the state after the last step, and the
    one in the result may be any.
    """
    parameters, buffers = w[: task.d], w[task.d :]
    loss = steps = w.new_zeros(())
    owned = False  # whether the parameters and the state are results of this loop, which nobody else has
    for number, batch in enumerate(batches, 1):
        x, y = task.batch(data, batch)
        point = parameters if at is None else at(parameters)
        grad, value, after = task.gradient(point, buffers, x, y, batch.valid, objective)
        if adjust is not None:
            grad = adjust(parameters, grad)
        overwrites = owned and batch.valid is None and getattr(optimizer, "can_overwrite", False)
        how: Any = {"in_place": True} if overwrites else {}
        if ends and number == len(batches) and getattr(optimizer, "can_end", False):
            how["last"] = True
        if batch.valid is None and getattr(optimizer, "can_defer", False):
            how["defers"] = number < len(batches) and batches[number].valid is None
        moved, next_state = optimizer.step(parameters, grad, state, active, **how)
        if batch.valid is None:
            parameters, buffers, state, loss, steps = moved, after, next_state, loss + value, steps + 1
            owned = True
        else:
            some = batch.valid.any()
            changed = next_state is not state
            new, old = (
                (moved, after, next_state if changed else ()),
                (parameters, buffers, state if changed else ()),
            )
            parameters, buffers, next_state = tree.each(partial(mostly, some), new, old)
            state = next_state if changed else state
            loss, steps = loss + torch.where(some, value, 0), steps + some
    w = joined(parameters, buffers) if len(buffers) else parameters
    return Trained(w, state, loss / steps.clamp(min=1))


def train(
    task: Trainable,
    optimizer: Optimizer,
    w: Tensor,
    state: State,
    data: Data,
    epochs: tuple[Epoch, ...],
    ends: bool = False,
    **how: Any,
) -> Trained:
    """`descend` over several epochs, with the mean of their losses."""
    losses = []
    for number, batches in enumerate(epochs, 1):
        last = ends and number == len(epochs)
        w, state, loss = descend(task, optimizer, w, state, data, batches, ends=last, **how)
        losses.append(loss)
    return Trained(w, state, torch.stack(losses).mean() if losses else w.new_zeros(()))


def pull(weight: float, centre: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The `adjust` that adds the gradient of weight / 2 * |parameters - centre|^2."""
    return lambda parameters, grad: grad + weight * (parameters - centre)


def has_valid(batch: Batch) -> Tensor:
    """Whether the batch has a valid sample, for a loop that calls `descend` step by step."""
    if batch.valid is None:
        return torch.ones((), dtype=torch.bool, device=batch.index.device)
    return batch.valid.any()


def mean_loss(losses: Sequence[Tensor], batches: Sequence[Batch]) -> Tensor:
    """The mean of the steps' losses, over the steps with a valid sample."""
    counts = torch.stack([has_valid(batch).to(losses[0].dtype) for batch in batches])
    return (torch.stack(list(losses)) * counts).sum() / counts.sum().clamp(min=1)


def fresh(optimizer: Optimizer, task: Task) -> State:
    """The optimizer state in the record of a client that has never trained."""
    return kept(optimizer, optimizer.init(task.initial[: task.d]))
