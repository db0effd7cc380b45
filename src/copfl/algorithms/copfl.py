"""CO-PFL: contribution-oriented personalised federated learning, Algorithms 1 and 2 of the paper."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core.algorithm import ClientOutput, Metrics
from copfl.core.optim import Optimizer, State, kept
from copfl.core.task import Data, Plan, Task
from copfl.core.train import fresh
from copfl.core.tree import Masked
from copfl.errors import UsageError, one_of, share_of
from copfl.kernels.fused import either
from copfl.parts import averaging
from copfl.parts.cowa import Cowa, bounds_of, first_bounds, held
from copfl.parts.mamo import Mamo
from copfl.parts.masks import shared, sharing, weighed
from copfl.parts.phases import Apart, Phases
from copfl.parts.pwpm import Pwpm, personal_fraction

MERGES = ("sharers", "union", "union_kept")


class Server(NamedTuple):
    w: Tensor  # [D], w^k
    weights: Tensor  # [D], the sum of Gamma over those in the last round's mean of each entry; 0 where there was none
    score: Tensor  # [], the sum of Gamma over the last round's clients
    union: Tensor  # [D] bool, m_0^k: personal for at least one client
    round: Tensor  # [] int64, k
    bounds: Tensor | None = None  # [2], what a score is held between in the next round; None: it is not held
    means: Tensor | None = None  # [2], of both scores in the last round; None: they are not scaled by them


Down = Server  # the server keeps nothing to itself


class Client(NamedTuple):
    w: Tensor  # [D], w_n as its last training left it; on its shared entries, what it uploaded, if not apart
    mask: Tensor  # [D] bool, m_n, True = personal; local statistics are personal from the start
    moments: State  # u_n, v_n and their step counts
    seen: Tensor  # [D], the broadcast of the last round it took part in
    score: Tensor  # [], its Gamma in that round
    round: Tensor  # [] int64, that round; -1 before the first
    apart: Apart | None = None  # None: both halves are one model


class Upload(NamedTuple):
    shared: Masked  # g_n, and the mask
    score: Tensor  # [], Gamma_n
    scores: Tensor | None = None  # [2], what it is made of; None: the server need not know


class Total(NamedTuple):
    w: Tensor  # [D], sum of Gamma (1 - m) w
    weight: Tensor  # [D], sum of Gamma (1 - m)
    personal: Tensor  # [D], how many clients hold the entry as personal
    score: Tensor  # [], sum of Gamma
    clients: Tensor  # []
    scores: Tensor | None = None


@dataclass(frozen=True)
class COPFL:
    """Masked local training (MAMO) in two phases, growing masks (PWPM), contribution weights (COWA).

    merge   "sharers": every entry is the mean over the clients that share it. "union" (Paper: Algorithm 1, line 6): an
            entry that anybody holds as personal is never averaged again. "union_kept": and clients keep their own there
    most    no client gets more than this share of the weight; 1: no bound (Paper). The server holds the scores within
            bounds once more: it need not trust what clients say of themselves
    """

    optimizer: Optimizer = field(default_factory=Mamo)
    growth: Pwpm = field(default_factory=Pwpm)
    contribution: Cowa = field(default_factory=Cowa)
    halves: Phases = field(default_factory=Phases)
    merge: str = "sharers"
    max_weight: float = 1.0

    downlink = averaging.downlink_all

    def __post_init__(self) -> None:
        one_of(MERGES, merge=self.merge)
        why = 'candidates="reselect"' if self.growth.candidates == "reselect" else 'phases="apart"'
        if self.merge != "sharers" and (
            self.growth.candidates == "reselect" or self.halves.phases == "apart"
        ):
            raise UsageError(
                f'{why} shares personal entries again, merge="{self.merge}" does not; use "sharers"'
            )
        share_of("the weight", max_weight=self.max_weight)

    @property
    def total_epochs(self) -> int:
        return 2 * self.halves.epochs

    def server_init(self, task: Task, clients: int) -> Server:
        zeros, start = torch.zeros_like(task.initial), torch.zeros((), dtype=torch.int64, device=task.device)
        known = first_bounds(self.max_weight, clients, zeros), self.contribution.first_means(zeros)
        return Server(
            task.initial, zeros, zeros.new_zeros(()), torch.zeros_like(zeros, dtype=torch.bool), start, *known
        )

    def client_init(self, task: Task) -> Client:
        never = torch.full((), -1, dtype=torch.int64, device=task.device)
        moments = fresh(self.optimizer, task)
        score, apart = task.initial.new_zeros(()), self.halves.first(task, moments)
        return Client(task.initial, task.local(), moments, task.initial, score, never, apart)

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        """w_n^k: its own where personal, the broadcast elsewhere."""
        own = client.mask | (down.union & (client.round >= 0)) if self.merge == "union_kept" else client.mask
        return either(own, self.halves.held(client.w, client.seen, down.w), down.w)

    def client_update(
        self, task: Task, client: Client, down: Down, data: Data, plan: Plan
    ) -> ClientOutput[Client, Upload]:
        """Algorithm 2."""
        plan = self.growth.trainable(self.contribution.trainable(plan), down.round)
        start, personal = self.personal_model(task, client, down), client.mask[: task.d]
        # MAMO: the personal half, then the shared half, Eqs. (3)-(5).
        w, update, moments, loss, trained, sent, apart = self.halves.train(
            task, self.optimizer, start, down.w, client.moments, client.apart, data, plan, client.mask
        )
        # PWPM: what changed most turns personal, Eqs. (6)-(8).
        benefit = self.growth.benefit(task, sent, update, data, down.round)
        grown = self.growth.grow(task.layout, personal, update, down.round, benefit)
        if apart is None:  # else no entry changes hands
            moments = self.optimizer.forget(moments, grown ^ personal)
        mask = torch.cat([grown, client.mask[task.d :]])
        # COWA: what the others lack without this client, Eqs. (9)-(10).
        others = self._without(task, client, down, update)
        scores = self.contribution.judge(task, sent, update, others, data, down.means)
        score = held(self.contribution.smoothed(scores.total, client.score), down.bounds)
        after = Client(w, mask, kept(self.optimizer, moments), down.w, score, down.round, apart)
        metrics = {
            "loss": loss,
            "weight": score,
            **scores.metrics(),
            **personal_fraction(grown, update)._asdict(),
        }
        upload = shared(mask if apart is None else task.local(), sent)
        return ClientOutput(after, Upload(upload, score, self.contribution.told(scores)), trained, metrics)

    def _without(self, task: Task, client: Client, down: Down, update: Tensor) -> tuple[Tensor, Tensor]:
        """The server's last step and its model without this client, [d] each: delta_{-n} and w_{-n}."""
        counted = torch.where(
            client.round == down.round - 1, client.score, 0
        )  # in the last mean it was, or not
        d, last = task.d, (counted, down.score, client.round >= 0)
        apart = client.apart  # then it uploaded all of its shared model
        own, mask = (client.w, client.mask) if apart is None else (apart.sent, torch.zeros_like(client.mask))
        vectors = down.w[:d], client.seen[:d], own[:d], mask[:d], down.weights[:d]
        return self.contribution.others(*vectors, update, *last)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        score = held(upload.score, server.bounds)  # again: the server need not trust it
        return Total(*weighed(upload.shared, score), score, torch.ones_like(score), upload.scores)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        """Algorithm 1, lines 4-6."""
        union = server.union | (total.personal > 0)  # masks only grow, and absent clients keep theirs
        averaged = total.weight > 0 if self.merge == "sharers" else (total.weight > 0) & ~union
        weights = torch.where(averaged, total.weight, 0)  # where nothing was averaged nobody can be taken out
        w = averaging.mean(total.w, weights, server.w)
        d, clients = task.d, total.clients.clamp(min=1)
        metrics = sharing(total.personal[:d], averaged[:d], clients)
        bounds = (
            None
            if server.bounds is None
            else bounds_of(total.score, total.clients, self.max_weight, server.bounds)
        )
        means = None if total.scores is None else total.scores / clients
        return Server(w, weights, total.score, union, server.round + 1, bounds, means), metrics
