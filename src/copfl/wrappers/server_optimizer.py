"""Server optimizers around algorithms that average: the server moves further, or less far, than the mean.

Only what is averaged and trained moves by the optimizer. Averaged batch-norm statistics are a plain mean. An
entry that no client shared in a round keeps its value and its moments.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import Metrics, Task, UsageError, tree
from copfl.core.algorithm import traits
from copfl.core.payload import VECTOR_FIELDS, WEIGHT_FIELDS
from copfl.errors import how_to_set
from copfl.parts.server_steps import FedExP, Mean, Moments, ServerStep, Spread
from copfl.wrappers.base import Wrapper


class OptimizedServer(NamedTuple):
    server: Any
    moments: Moments


class OptimizedTotal(NamedTuple):
    total: Any
    clients: Tensor  # [], their number
    weight: Tensor  # [], float64: the sum of their weights p_i
    sharers: Tensor | tuple[()]  # [s], the sum of p_i over those that share the entry; (): all share all
    squares: Tensor | tuple[()]  # [], float64: the sum of p_i |w_i - w_0|² over shared, trained entries


@dataclass(frozen=True)
class ServerOptimizer(Wrapper):
    """The algorithm whose server takes `rule`'s step from w, where the algorithm would go to the mean."""

    rule: ServerStep = field(default_factory=FedExP)

    wraps: ClassVar[tuple[str, ...]] = ("server",)

    def server_init(self, task: Task, clients: int) -> OptimizedServer:
        if reason := traits(self.algorithm).only_mean:
            raise UsageError(
                f"{type(self.algorithm).__name__.lower()} takes no step of the server but the mean: "
                f"{reason}; leave the server optimizer out "
                f"({how_to_set('server.name', 'mean', '--server')}), or name another algorithm"
            )
        server = self.algorithm.server_init(task, clients)
        if not getattr(server, "w", torch.zeros(0)).numel():
            raise UsageError(
                f"the server of {type(self.algorithm).__name__.lower()} has no one vector of weights, so it "
                'has no step; leave the server optimizer out, which is server.name="mean", or name an '
                "algorithm that shares all of the model, such as fedavg_ft"
            )
        return OptimizedServer(server, self.rule.init(server.w))

    def summand(self, task: Task, server: Any, id: Tensor, upload: Any) -> OptimizedTotal:
        """The algorithm's own, who shares which entry, and p_i |w_i - w_0|² where the rule asks for it.

        The distance to the initial weights, not to the server's, so that a client can compute it for secure
        aggregation without the server's record; `_spread` moves it to the server's weights.
        """
        total = super().summand(task, server, id, upload)
        sent = next((getattr(upload, name) for name in VECTOR_FIELDS if hasattr(upload, name)), None)
        w, personal = sent if isinstance(sent, tree.Masked) else (sent, None)
        weights = (getattr(upload, name).double() for name in WEIGHT_FIELDS if hasattr(upload, name))
        one = torch.ones((), dtype=torch.float64, device=task.device)
        weight = next(weights, one)
        sharers = () if personal is None else (weight * ~personal).to(task.initial.dtype)
        squares: Tensor | tuple[()] = ()
        if self.rule.needs_spread:
            initial = self._initial(task)
            if w is None or w.shape != initial.shape:
                name = type(self.algorithm).__name__.lower()
                raise UsageError(
                    f"server.name=fedexp needs one vector of weights from each client, and {name} sends "
                    f"{', '.join(upload._fields)}; choose another server optimizer"
                )
            counted = self._trained(task) if personal is None else self._trained(task) & ~personal
            squares = weight * torch.where(counted, w.double() - initial.double(), 0).square().sum()
        return OptimizedTotal(total, one, weight.sum(), sharers, squares)

    def server_update(
        self, task: Task, server: OptimizedServer, total: OptimizedTotal
    ) -> tuple[OptimizedServer, Metrics]:
        after, metrics = self.algorithm.server_update(task, server.server, total.total)
        before = server.server.w
        delta = after.w - before
        spread = self._spread(task, before, after.w, total) if isinstance(total.squares, Tensor) else None
        step, moments = self.rule.step(delta, server.moments, spread)
        is_shared = (total.sharers if isinstance(total.sharers, Tensor) else total.clients) > 0
        moves = self._trained(task) & is_shared
        moments = tree.each(lambda new, old: torch.where(moves, new, old), moments, server.moments)
        w = before + torch.where(moves, step, delta)
        if isinstance(self.rule, FedExP) and spread is not None:
            metrics = {**metrics, "server_step": self.rule.factor(spread)}  # η
        return OptimizedServer(after._replace(w=w), moments), metrics

    def _spread(self, task: Task, before: Tensor, mean: Tensor, total: OptimizedTotal) -> Spread:
        """The clients' mean |Δ_i|² and |Δ|² from sums.

        For every entry with weights that add up to N: Σ p_i (w_i - w)² = Σ p_i (w_i - w_0)²
        - N (mean - w_0)² + N (mean - w)². Both means are over all of the weight, also where few share.
        """
        weight = total.weight.clamp(min=torch.finfo(torch.float64).tiny)
        shares: Any = total.sharers.double() / weight if isinstance(total.sharers, Tensor) else 1.0
        shares = torch.where(self._trained(task), shares, 0.0)
        mean, before, initial = mean.double(), before.double(), self._initial(task).double()
        square = (shares * (mean - before).square()).sum()
        variance = torch.as_tensor(total.squares) / weight - (shares * (mean - initial).square()).sum()
        return Spread(variance.clamp(min=0) + square, square, total.clients)

    def _initial(self, task: Task) -> Tensor:
        """The server's weights before the first round."""
        w: Tensor = self.algorithm.server_init(task, 1).w
        return w

    def _trained(self, task: Task) -> Tensor:
        """Which entries of the server's weights are trained, [s] or [] for all: not averaged statistics."""
        if task.buffers != "average" or len(task.initial) == task.d:
            return torch.ones((), dtype=torch.bool, device=task.device)
        marked = torch.ones_like(task.initial)
        marked[task.d :] = 0
        trained: Tensor = self.algorithm.server_init(dataclasses.replace(task, initial=marked), 1).w != 0
        return trained


def with_server_optimizer(algorithm: Any, rule: ServerStep) -> Any:
    """The algorithm with this step of its server; unchanged for the plain mean."""
    return algorithm if rule == Mean() else ServerOptimizer(algorithm, rule)
