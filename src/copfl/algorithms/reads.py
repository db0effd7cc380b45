"""After Reads (Fu et al. 2025): each layer is averaged over the clients whose layers are similar."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import Gathered, Metrics, Task, UsageError, tree
from copfl.parts.averaging import Averaging, Down, Upload, layers, shared_of


class Server(NamedTuple):
    models: Tensor  # [N, s], each client's mean of similar layers; one that did not take part keeps its last
    known: Tensor  # [N] bool, who has ever taken part


class Row(NamedTuple):
    """One client's part of the total."""

    id: Tensor
    w: Tensor  # [s]
    weight: Tensor
    taken: Tensor  # 0: left out of the round


@dataclass(frozen=True)
class Reads(Averaging):
    """For each layer, a client's cluster: the clients whose layer changed in a similar direction.

    A client's next model has, in each layer, the mean over its cluster in that layer. Clusters may overlap.

    Paper: the authors published no code. From the abstract are the similarity of single layers, the soft
    clusters, and the mean of each layer over its cluster. Ours are the measure of similarity, the cosine of
    the layers' changes since the initial weights, its threshold, and a server that computes the clusters
    where the paper's clients do so among themselves. Left out are models of different shapes, with the mutual
    learning that they need, and its privacy guarantee.

    Every two clients are compared, so the server gathers all uploads: O(N s) numbers where others need O(s).
    """

    threshold: float = 0.5  # the lowest cosine within a cluster; -1: one cluster, FedAvg; 1: local training

    fine_tuned = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1 <= self.threshold <= 1:
            raise UsageError(f"threshold={self.threshold} must be between -1 and 1: it is a cosine")

    def server_init(self, task: Task, clients: int) -> Server:
        w = shared_of(task, self.personal, task.initial)
        return Server(w.repeat(clients, 1), torch.zeros(clients, dtype=torch.bool, device=w.device))

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return Down(server.models[ids])

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Gathered:
        row = Row(id, upload.w, upload.size, torch.ones_like(upload.size))
        return Gathered(tree.each(lambda t: t[None], row))

    def server_update(self, task: Task, server: Server, total: Gathered) -> tuple[Server, Metrics]:
        rows: Row = tree.rows(total.rows, total.rows.taken.nonzero()[:, 0])
        if not len(rows.id):
            return server, {"cluster_size": torch.zeros_like(server.models[:1].sum())}
        changes = rows.w - shared_of(task, self.personal, task.initial)
        spans = [slice(start, stop) for start, stop, _ in layers(task, self.personal)]
        clusters = [similar(changes[:, layer], self.threshold) for layer in spans]  # [n, n] bool each
        shares = [
            cluster * rows.weight / (cluster * rows.weight).sum(1, keepdim=True) for cluster in clusters
        ]
        models = torch.cat([share @ rows.w[:, layer] for share, layer in zip(shares, spans, strict=True)], 1)
        # A client that has never taken part starts from the mean of all.
        mean = (rows.weight / rows.weight.sum()) @ rows.w
        others = torch.where(server.known[:, None], server.models, mean)
        known = server.known.index_fill(0, rows.id, True)
        size = torch.stack(clusters).to(mean.dtype).sum(2).mean()
        return Server(others.index_copy(0, rows.id, models), known), {"cluster_size": size}


def similar(changes: Tensor, threshold: float) -> Tensor:
    """[n, n] bool, whether the cosine of two changes [n, ...] reaches the threshold; always with oneself."""
    lengths = changes.norm(dim=1, keepdim=True)
    directions = changes / lengths.clamp(min=torch.finfo(changes.dtype).tiny)
    near: Tensor = (directions @ directions.T).clamp(-1, 1) >= threshold
    return near | torch.eye(len(changes), dtype=torch.bool, device=changes.device)
