"""FedPAC (Xu et al., ICLR 2023): features aligned to common class centroids, a combined head per client."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Metrics, Plan, State, Task, above, faster, fresh, tree
from copfl.parts.averaging import Averaging, combined, personal_of, shared_of
from copfl.parts.averaging import Total as BodyTotal
from copfl.parts.classes import aligned, centroids_of, class_sums, prior_means, table_shape
from copfl.parts.phases import fresh_head, head_then_body
from copfl.parts.quadratic import combination


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
    personal: Tensor  # batch-norm statistics, where they are local
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
class FedPAC(Averaging):
    """Head phase, body phase (`epochs`) aligned to the centroids of all clients, one combined head each.

    Published: lambda 1, one epoch of the head at lr 0.1, 5 of the body at 0.01 (0.02 on CIFAR), else Sgd().

    Paper: the class statistics are taken on augmented samples; here on plain ones, normalised by themselves.
    """

    head_epochs: int = 1
    head_speed: float = 10.0  # the head's learning rate, in multiples of the body's
    alignment: float = 1.0  # lambda

    # Not in the mean: heads are sent to the server, which combines them for each client.
    personal = ("head",)
    minimum = (("head_epochs", 0), ("alignment", 0))
    phases = ("head_epochs", "epochs")

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0, head_speed=self.head_speed)

    def server_init(self, task: Task, clients: int) -> Server:
        centroids, head = task.initial.new_zeros(table_shape(task)), task.layout.entries(task.initial, "head")
        unknown = torch.zeros_like(centroids[:, 0], dtype=torch.bool)
        body = shared_of(task, self.personal, task.initial)
        return Server(body, head.repeat(clients, 1), centroids, unknown)

    def client_init(self, task: Task) -> Client:
        moments = fresh_head(self.optimizer, task), fresh(self.optimizer, task)
        return Client(personal_of(task, (), task.initial), *moments)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        w, centroids, known = (tree.repeat(t, len(ids)) for t in (server.w, server.centroids, server.known))
        return Down(w, server.heads[ids], centroids, known)

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        return combined(task, self.personal, torch.cat([down.head, client.personal]), down.w)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        start = self.personal_model(task, client, down)
        before, n = class_sums(task, start, data), data.size.to(start.dtype)
        optimizers = faster(self.optimizer, self.head_speed), self.optimizer
        moments = client.head_moments, client.body_moments
        pulled = aligned(task, down.centroids, down.known, before, self.alignment)
        w, *states, loss = head_then_body(
            task, optimizers, start, moments, data, plan, self.head_epochs, objective=pulled
        )
        after, body = class_sums(task, w, data), shared_of(task, self.personal, w)
        means, spread = prior_means(before, n)
        weight = self.weight(data, w)
        upload = Upload(
            body, weight, task.layout.entries(w, "head"), means, spread, after.features, after.counts
        )
        client = Client(personal_of(task, (), w), *states)
        return ClientOutput(client, upload, w, {"loss": loss, "weight": weight})

    def next_message(self, task: Task, down: Down, upload: Upload) -> Down:
        return down._replace(head=upload.head)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        rows = (upload.head, upload.means, upload.spread, torch.ones_like(upload.spread))
        tables = tree.placed(rows, id, server.heads.shape[0])
        return Total(upload.size * upload.w, upload.size, *tables, upload.features, upload.counts)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        """The mean body, the mean centroids, and the best mixture of heads for each client that reported."""
        body, metrics = super().server_update(task, server, BodyTotal(total.w, total.size))
        centroids = centroids_of(total.features, total.counts, server.centroids)
        who = total.reported.nonzero()[:, 0]
        weights = combination(total.means[who].flatten(1), total.spread[who]).to(server.w.dtype)
        heads = server.heads.index_copy(0, who, weights @ total.heads[who])
        metrics["own_head_weight"] = weights.diagonal().sum() / max(len(who), 1)  # of a client's own head
        return Server(body.w, heads, centroids, server.known | (total.counts > 0)), metrics
