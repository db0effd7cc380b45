"""FedPAC (Xu et al., ICLR 2023): features are aligned to common class centroids, heads are combined for each client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl import tree
from copfl.algorithms import averaging
from copfl.algorithms.algorithm import Figures, Turn
from copfl.errors import UsageError, at_least
from copfl.optim import Optimizer, Sgd, State, begin, faster, kept, train
from copfl.parts.classes import Sums, class_sums
from copfl.parts.quadratic import on_simplex
from copfl.task import Data, Objective, Plan, Task, cross_entropy, mean_of_real


class Server(NamedTuple):
    w: Tensor  # [s], the body
    heads: Tensor  # [N, h], each client's combined head; one that did not take part keeps its last
    centroids: Tensor  # [C, f]
    known: Tensor  # [C] bool, the classes that have a centroid


class Down(NamedTuple):
    w: Tensor  # [s]
    head: Tensor  # [h], combined for this client
    centroids: Tensor
    known: Tensor


class Client(NamedTuple):
    own: Tensor  # batch-norm statistics, where they are local
    head_moments: State
    body_moments: State


class Upload(NamedTuple):
    w: Tensor  # [s]
    size: Tensor  # []
    head: Tensor  # [h], as trained in this round
    means: Tensor  # [C, f], prior times feature mean of each class, before training
    spread: Tensor  # [], the variance of those
    features: Tensor  # [C, f], sum of the features of each class, after training
    counts: Tensor  # [C]


class Total(NamedTuple):
    w: Tensor
    size: Tensor
    heads: Tensor  # [N, h]: this and the next three are tables, a row per client
    means: Tensor  # [N, C, f]
    spread: Tensor  # [N]
    reported: Tensor  # [N], 1 for those who took part
    features: Tensor  # [C, f]
    counts: Tensor  # [C]


@dataclass(frozen=True)
class FedPAC:
    """Head phase, body phase pulled towards the centroids of all clients, one combined head per client.

    Paper: the class statistics are taken on augmented samples; here on plain ones, normalised by themselves.
    Each phase has an optimizer state of its own, see FedRep.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1  # of the body
    head_epochs: int = 1
    head_speed: float = 10.0  # the head's learning rate, in multiples of the body's
    alignment: float = 1.0  # lambda

    keeps: ClassVar[tuple[str, ...]] = ("head",)  # of the plain mean: heads go to the server, but are not averaged

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)
        at_least(0, head_epochs=self.head_epochs, alignment=self.alignment)
        if not 0 < self.head_speed < float("inf"):
            raise UsageError(f"head_speed={self.head_speed} must be a number above 0")

    @property
    def passes(self) -> int:
        return self.head_epochs + self.epochs

    def server_init(self, task: Task, clients: int) -> Server:
        h, shape = _head(task)
        head = averaging.part(task, self.keeps, task.first, home=True)[:h]
        centroids = task.first.new_zeros(shape)
        body = averaging.part(task, self.keeps, task.first, home=False)
        return Server(body, head.repeat(clients, 1), centroids, torch.zeros_like(centroids[:, 0], dtype=torch.bool))

    def client_init(self, task: Task) -> Client:
        moments = kept(self.optimizer, self.optimizer.init(task.first[: task.d]))
        return Client(averaging.part(task, self.keeps, task.first, home=True)[_head(task)[0] :], moments, moments)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        w, centroids, known = (tree.repeat(t, len(ids)) for t in (server.w, server.centroids, server.known))
        return Down(w, server.heads[ids], centroids, known)

    def personal(self, task: Task, client: Client, down: Down) -> Tensor:
        return averaging.joined(task, self.keeps, torch.cat([down.head, client.own]), down.w)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> Turn[Client, Upload]:
        w = self.personal(task, client, down)
        before, n = class_sums(task, w, data), data.size.to(w.dtype)
        means = before.features / n
        spread = ((before.squares / n - (means * means).sum()) / n).clamp(min=0)
        heads, bodies = (begin(self.optimizer, m, w[: task.d]) for m in (client.head_moments, client.body_moments))
        head, body = averaging.only(task, "head"), averaging.only(task, "body")
        first, second = plan[: self.head_epochs], plan[self.head_epochs :]
        w, heads, _ = train(task, faster(self.optimizer, self.head_speed), w, heads, data, first, active=head)
        aligned = self._aligned(down, before)
        w, bodies, loss = train(task, self.optimizer, w, bodies, data, second, active=body, objective=aligned)
        after = class_sums(task, w, data)
        home, h = averaging.part(task, self.keeps, w, home=True), down.head.shape[0]
        shared = averaging.part(task, self.keeps, w, home=False)
        upload = Upload(shared, n, home[:h], means, spread, after.features, after.counts)
        stays = Client(home[h:], kept(self.optimizer, heads), kept(self.optimizer, bodies))
        return Turn(stays, upload, w, {"loss": loss, "weight": n})

    def _aligned(self, down: Down, own: Sums) -> Objective:
        """Cross-entropy + lambda * mean squared distance to the centroid, or to the own mean where there is none."""
        target = torch.where(down.known[:, None], down.centroids, own.features / own.counts.clamp(min=1)[:, None])
        strength = self.alignment * down.known.any()  # nothing in the first round

        def loss(logits: Tensor, features: Tensor, labels: Tensor, real: Tensor | None) -> Tensor:
            distance = ((features - target[labels]) ** 2).mean(1)
            return cross_entropy(logits, features, labels, real) + strength * mean_of_real(distance, real)

        return loss

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        rows = (upload.head, upload.means, upload.spread, torch.ones_like(upload.spread))
        tables = tree.placed(rows, id, server.heads.shape[0])
        return Total(upload.size * upload.w, upload.size, *tables, upload.features, upload.counts)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Figures]:
        """The mean body, the mean centroids, and for each client that reported the best mixture of those heads."""
        body, figures = averaging.server_update(
            self, task, averaging.Server(server.w), averaging.Total(total.w, total.size)
        )
        some = (total.counts > 0)[:, None]
        centroids = torch.where(some, total.features / total.counts.clamp(min=1)[:, None], server.centroids)
        who = total.reported.nonzero()[:, 0]
        weights = combination(total.means[who].flatten(1), total.spread[who]).to(server.w.dtype)
        heads = server.heads.index_copy(0, who, weights @ total.heads[who])
        figures["own_head"] = weights.diagonal().sum() / max(len(who), 1)  # how much of its own head a client keeps
        return Server(body.w, heads, centroids, server.known | some[:, 0]), figures


def combination(means: Tensor, spread: Tensor) -> Tensor:
    """The share of each head [m] in each client's own [m]: a_i = argmin a' (diag(v) + D_i) a on the simplex.

    D_i[j, k] = <h_i - h_j, h_i - h_k>, out of one Gram matrix; only differences count, so the mean is taken off first.
    """
    rows = means.double() - means.double().mean(0)
    gram, variance = rows @ rows.T, torch.diag(spread.double())
    weights = [on_simplex(variance + gram + g[i] - g[:, None] - g) for i, g in enumerate(gram)]
    return torch.stack(weights) if weights else gram


def _head(task: Task) -> tuple[int, tuple[int, ...]]:
    """How many entries the head has, and the shape [C, f] of its matrix."""
    named = dict(zip(task.layout.names, task.layout.shapes, strict=True))
    shape = named.get(f"{task.layout.head}.weight", ())
    if len(shape) != 2:
        raise UsageError(f'fedpac wants a Linear head; "{task.layout.head}" is none. Name one, such as head="fc"')
    return sum(length for length, chosen in averaging.runs(task.layout, ("head",)) if chosen), shape


def fedpac(
    optimizer: Optimizer = Sgd(),
    epochs: int = 1,
    head_epochs: int = 1,
    head_speed: float = 10.0,
    alignment: float = 1.0,
) -> FedPAC:
    """Published: lambda 1, one epoch of the head at lr 0.1, 5 of the body at 0.01 (0.02 on CIFAR), else Sgd()."""
    return FedPAC(optimizer, epochs, head_epochs, head_speed, alignment)
