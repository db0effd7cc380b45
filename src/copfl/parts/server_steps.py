"""Steps of the server: how far it moves in the direction of the clients' mean update.

Written with the symbols of the papers: Δ is the mean of the clients' updates, entry by entry, and the server
moves from w to w + step. At β = 0, η = 1 each momentum step is FedAvg's own.

mean      w + η Δ
momentum  FedAvgM (Hsu et al. 2019)
adam, yogi, adagrad
          FedOpt (Reddi et al. 2021), without bias correction, as in the paper
fedexp    FedExP (Jhunjhunwala et al. 2023); it has no rate to tune
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from copfl.errors import above, at_least, below_one


class Moments(NamedTuple):
    """The server's memory, entry by entry; empty where a step needs none."""

    m: Any = ()  # [s], of steps
    v: Any = ()  # [s], of their squares


class Spread(NamedTuple):
    """How much the clients of a round agree; only FedExP asks for it."""

    squares: Tensor  # [], the weighted mean of the clients' |Δ_i|²
    square: Tensor  # [], |Δ|², with the same weight for every entry
    clients: Tensor  # [], the number of clients


class ServerStep(Protocol):
    """One rule. `needs_spread` says whether clients' squared lengths must be added up, one more number."""

    needs_spread: ClassVar[bool]

    def init(self, w: Tensor) -> Moments:
        """The memory before the first round, for the shared entries w."""

    def step(self, delta: Tensor, moments: Moments, spread: Spread | None) -> tuple[Tensor, Moments]:
        """The step and the memory after it; `delta` is the mean update Δ."""


@dataclass(frozen=True)
class Mean:
    """w + η Δ; η = 1 is FedAvg."""

    lr: float = 1.0

    needs_spread: ClassVar[bool] = False

    def __post_init__(self) -> None:
        above(0, **{"server.lr": self.lr})

    def init(self, w: Tensor) -> Moments:
        return Moments()

    def step(self, delta: Tensor, moments: Moments, spread: Spread | None) -> tuple[Tensor, Moments]:
        return self.lr * delta, moments


@dataclass(frozen=True)
class Momentum:
    """FedAvgM: m ← β m + Δ, w + η m. Its steps add up to 1 / (1 - β) times those of FedAvg."""

    lr: float = 1.0
    momentum: float = 0.9

    needs_spread: ClassVar[bool] = False

    def __post_init__(self) -> None:
        above(0, **{"server.lr": self.lr})
        below_one(**{"server.momentum": self.momentum})

    def init(self, w: Tensor) -> Moments:
        return Moments(torch.zeros_like(w))

    def step(self, delta: Tensor, moments: Moments, spread: Spread | None) -> tuple[Tensor, Moments]:
        m = self.momentum * moments.m + delta
        return (m if self.lr == 1 else self.lr * m), Moments(m)


@dataclass(frozen=True)
class _Adaptive:
    """FedOpt, Algorithm 2: m ← β₁ m + (1 - β₁) Δ, w + η m / (√v + τ); v starts at τ².

    η is about the length of one entry's step in one round; where |Δ| is far below τ, η / τ is the rate.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    needs_spread: ClassVar[bool] = False

    def __post_init__(self) -> None:
        above(0, **{"server.lr": self.lr, "server.tau": self.tau})
        below_one(**{"server.beta1": self.beta1, "server.beta2": self.beta2})

    def init(self, w: Tensor) -> Moments:
        return Moments(torch.zeros_like(w), torch.full_like(w, self.tau**2))

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        raise NotImplementedError

    def step(self, delta: Tensor, moments: Moments, spread: Spread | None) -> tuple[Tensor, Moments]:
        m = self.beta1 * moments.m + (1 - self.beta1) * delta
        v = self.second(moments.v, delta.square())
        return self.lr * m / (v.sqrt() + self.tau), Moments(m, v)


@dataclass(frozen=True)
class Adam(_Adaptive):
    """FedAdam: v ← β₂ v + (1 - β₂) Δ²."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class Yogi(_Adaptive):
    """FedYogi: v ← v - (1 - β₂) Δ² sign(v - Δ²)."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """FedAdagrad: v ← v + Δ², and no memory of directions (β₁ = 0)."""

    lr: float = 0.1
    beta1: float = 0.0

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class FedExP:
    """w + η Δ, η = max(1, mean |Δ_i|² / (2 (|Δ|² + ε))): long steps where the clients disagree, nothing to
    tune.

    With P clients of equal length in orthogonal directions the quotient is P / 2. More than that comes from
    unequal weights or rounding alone, so it is the largest η.
    """

    epsilon: float = 1e-3

    needs_spread: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least(0, **{"server.epsilon": self.epsilon})

    def init(self, w: Tensor) -> Moments:
        return Moments()

    def factor(self, spread: Spread) -> Tensor:
        """η, from how much the clients disagree."""
        smallest = torch.finfo(spread.square.dtype).tiny  # a round in which nothing moves
        quotient = spread.squares / (2 * (spread.square + self.epsilon)).clamp(min=smallest)
        return torch.minimum(quotient, spread.clients / 2).clamp(min=1)

    def step(self, delta: Tensor, moments: Moments, spread: Spread | None) -> tuple[Tensor, Moments]:
        assert spread is not None, "a rule that needs the spread gets it"
        return self.factor(spread).to(delta.dtype) * delta, moments


SERVER_STEPS = {
    "mean": Mean,
    "momentum": Momentum,
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
    "fedexp": FedExP,
}
