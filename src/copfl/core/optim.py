"""Optimizers as pure functions: numbers in a frozen dataclass, state in and out.

`active` is a bool mask of the parameters that may change; None means all.
"""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from copfl.errors import UsageError, above, at_least, below_one
from copfl.kernels.fused import LONG, compiles, elementwise
from copfl.kernels.private_torch import fused_adam, mapped

State = Any  # a tree of tensors, defined by the optimizer


class DefaultNumber(float):
    """The default of a number that depends on the data set; one that somebody chose is a plain float."""


class Optimizer(Protocol):
    """The rule that turns a gradient into a step."""

    @property
    def keep(self) -> bool:
        """Whether the state is kept from round to round; otherwise every round starts with a new one."""

    def init(self, parameters: Tensor) -> State:
        """The state before the first step."""

    def step(
        self, parameters: Tensor, grad: Tensor, state: State, active: Tensor | None
    ) -> tuple[Tensor, State]:
        """The parameters and the state after one step, in new tensors, which the caller may overwrite."""

    def forget(self, state: State, entries: Tensor) -> State:
        """The state after these entries (bool) changed between shared and personal."""


class Velocity(NamedTuple):
    speed: Tensor | tuple[()]  # [d]


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent; the momentum and decay of FedPAC's configuration by default."""

    lr: float = DefaultNumber(0.01)
    momentum: float = 0.5
    weight_decay: float = 5e-4
    keep: bool = False

    def __post_init__(self) -> None:
        above(0, lr=self.lr)
        at_least(0, weight_decay=self.weight_decay)
        below_one(momentum=self.momentum)

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


def plain_sgd() -> Sgd:
    """The optimizer of an algorithm whose author chose none: a `Sgd()` of which no number is chosen."""
    return Sgd(momentum=DefaultNumber(Sgd.momentum), weight_decay=DefaultNumber(Sgd.weight_decay))


def is_chosen(optimizer: Optimizer) -> bool:
    """Whether somebody chose this optimizer; a program may pass `Sgd()`, and that is a choice."""
    numbers = [value for value in vars(optimizer).values() if isinstance(value, float)]
    return not numbers or not all(isinstance(number, DefaultNumber) for number in numbers)


def _sgd(
    w: Tensor,
    grad: Tensor,
    speed: Tensor | None,
    active: Tensor | None,
    lr: float | Tensor,
    momentum: float,
    decay: float,
) -> tuple[Tensor, ...]:
    if decay:
        grad = torch.add(grad, w, alpha=decay)
    step = grad if speed is None else torch.add(grad, speed, alpha=momentum)
    moved = w - lr * step if isinstance(lr, Tensor) else torch.sub(w, step, alpha=lr)
    if active is not None:
        moved = torch.where(active, moved, w)
    if speed is None:
        return (moved,)
    return moved, step if active is None else torch.where(active, step, speed)


class Moments(NamedTuple):
    u: Tensor  # [d], mean of the gradient
    v: Tensor  # [d], mean of its square
    t: Tensor  # [], steps taken


class Deferred(NamedTuple):
    """The moments of the first steps of a training, not stored: they are computed again from the gradients."""

    grads: tuple[Tensor, ...]  # [d] each
    t: Tensor  # [], steps taken


DEFERRED = 2  # gradients: more than this many, and the moments of a third step take fewer passes over memory


@dataclass(frozen=True)
class Adam:
    """Adam with one pair of moments that decay everywhere, active or not: the control for MAMO."""

    lr: float = DefaultNumber(1e-4)
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    keep: bool = False

    can_overwrite: ClassVar[bool] = True  # `step` takes in_place
    can_end: ClassVar[bool] = True  # `step` takes last
    can_defer: ClassVar[bool] = True  # `step` takes defers

    def __post_init__(self) -> None:
        above(0, lr=self.lr, eps=self.eps)
        at_least(0, weight_decay=self.weight_decay)
        below_one(beta1=self.beta1, beta2=self.beta2)

    def init(self, parameters: Tensor) -> Moments:
        zeros = torch.zeros(len(parameters), dtype=parameters.dtype, device=parameters.device)
        return Moments(zeros, zeros, parameters.new_zeros(()))  # the same zeros for all clients

    def step(
        self,
        parameters: Tensor,
        grad: Tensor,
        state: State,
        active: Tensor | None,
        in_place: bool = False,  # whether the parameters and the state may be overwritten
        last: bool = False,  # whether nobody needs the state after it: it is then any
        defers: bool = False,  # whether the state goes into a step with the same `active`, and nowhere else
    ) -> tuple[Tensor, State]:
        if self.weight_decay:
            grad = grad + self.weight_decay * parameters
        t = state.t + 1
        numbers = (1 - self.beta1**t, 1 - self.beta2**t, self.lr, self.beta1, self.beta2, self.eps)
        grads: tuple[Tensor, ...] = ()
        if isinstance(state, Deferred):
            grads = (*state.grads, grad)
        elif defers and state.u is state.v and compiles(parameters):  # the zeros of `init`
            grads = (grad,)
        if grads:
            arguments = parameters, active, *numbers, *grads
            if last or (defers and len(grads) <= DEFERRED):
                return elementwise(_adam_weights_of_gradients, *arguments)[0], Deferred(grads, t)
            w, u, v = elementwise(_adam_of_gradients, *arguments)
            return w, Moments(u, v, t)
        if active is None and parameters.device.type == "cpu" and len(parameters) > LONG and not mapped():
            vectors = parameters, state.u, state.v
            w, u, v = vectors if in_place else map(torch.clone, vectors)
            how = {"lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps}
            if fused_adam((w, u, v), grad, t, **how):  # it rounds differently
                return w, Moments(u, v, t)
        if last:
            return elementwise(_adam_weights, parameters, grad, state.u, state.v, active, *numbers)[0], state
        w, u, v = elementwise(_adam, parameters, grad, state.u, state.v, active, *numbers)
        return w, Moments(u, v, t)

    def forget(self, state: Moments, entries: Tensor) -> Moments:
        return state  # one pair of moments for both kinds of entries


def _adam(
    w: Tensor, grad: Tensor, u: Tensor, v: Tensor, active: Tensor | None, *numbers: Any
) -> tuple[Tensor, ...]:
    weight_u, weight_v, lr, beta1, beta2, eps = numbers
    if active is not None:
        grad = torch.where(active, grad, 0)
    u = beta1 * u + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad * grad
    moved = w - lr * (u / weight_u) / (torch.sqrt(v / weight_v) + eps)
    return moved if active is None else torch.where(active, moved, w), u, v


def _adam_weights(*given: Any) -> tuple[Tensor, ...]:
    """`_adam` without the moments: two of seven passes over memory less."""
    return _adam(*given)[:1]


def _adam_of_gradients(w: Tensor, active: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    """`_adam` after steps with all but the last of these gradients, from moments of zero."""
    numbers, (*earlier, last) = given[:6], given[6:]
    u: Any = 0.0
    v: Any = 0.0
    for grad in earlier:
        u, v = _adam(w, grad, u, v, active, *numbers)[1:]
    return _adam(w, last, u, v, active, *numbers)


def _adam_weights_of_gradients(*given: Any) -> tuple[Tensor, ...]:
    return _adam_of_gradients(*given)[:1]


def begin(optimizer: Optimizer, kept: State, parameters: Tensor) -> State:
    """The state at the start of a round's training: the one kept since the last round, or a new one."""
    return kept if optimizer.keep else optimizer.init(parameters)


def kept(optimizer: Optimizer, state: State) -> State:
    """The state to keep for the next round; () where the optimizer keeps none."""
    return state if optimizer.keep else ()


def faster(optimizer: Optimizer, factor: float) -> Optimizer:
    """The same optimizer, with the same state, at a multiple of its learning rate."""
    if isinstance(optimizer, Scaled):
        return Scaled(faster(optimizer.optimizer, factor), optimizer.lr_factor)
    lr = getattr(optimizer, "lr", None)
    if isinstance(lr, Tensor):
        return at_rate(optimizer, factor * lr)
    if not isinstance(lr, float) or not dataclasses.is_dataclass(optimizer) or isinstance(optimizer, type):
        missing = f"{optimizer!r} has no learning rate to multiply"
        raise UsageError(f"{missing}; an optimizer is a dataclass with a field lr")
    return dataclasses.replace(optimizer, lr=factor * lr)


def at_rate(optimizer: Optimizer, lr: float | Tensor) -> Optimizer:
    """The same optimizer at another learning rate; one per client is not checked, as vmap reads no value."""
    other = copy.copy(optimizer)
    object.__setattr__(other, "lr", lr)
    return other


@dataclass(frozen=True, eq=False)
class Scaled:
    """The optimizer with its steps, and so its learning rate, multiplied by a factor of the round."""

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
