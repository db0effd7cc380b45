"""IFCA (Ghosh et al., NeurIPS 2020): several models; each client trains the one with its lowest loss."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Metrics, Plan, State, Task, UsageError, tree
from copfl.core.layout import cut, put_together, runs
from copfl.core.random_starts import permuted
from copfl.parts.averaging import Averaging, personal_of, weighted_mean
from copfl.parts.clusters import selected, training_loss


class Server(NamedTuple):
    models: Tensor  # [k, c], theta_1 to theta_k: the clustered entries of each model
    common: Tensor  # [s - c], the entries that all clusters share
    members: Tensor  # [k], the weight of each cluster's clients in the last round


Down = Server  # the server sends all models


class Client(NamedTuple):
    personal: Tensor  # [p], local statistics
    moments: State
    cluster: Tensor  # [] int64, that of its last round; -1 before the first


class Upload(NamedTuple):
    w: Tensor  # [s], trained from the model of its cluster
    size: Tensor  # []
    cluster: Tensor  # [k], 1 for its cluster, else 0


class Total(NamedTuple):
    models: Tensor  # [k, c], the sum of size * w over each cluster
    common: Tensor  # [s - c], over all
    members: Tensor  # [k], the sum of size over each cluster


@dataclass(frozen=True)
class IFCA(Averaging):
    """Algorithm 1 with model averaging (option II): find the cluster, train its model, average by cluster.

    A client's cluster is that of the model with the lowest loss on its training samples, in every round.
    """

    # Paper: the loss that chooses is over all training samples, and batch norm uses their statistics, as in
    # training. Initial models are random; here the entries of each parameter named in `starts` are shuffled.
    clusters: int = 2  # k
    # The parts of which each cluster has its own; the rest is one for all (the paper's weight sharing).
    clustered: tuple[str, ...] = ("body", "head")
    starts: tuple[str, ...] = ("body", "head")  # the parts in which the models differ at first

    minimum = (("clusters", 1),)

    def server_init(self, task: Task, clients: int) -> Server:
        starts = [task.initial, *(permuted(task, self.starts, n) for n in range(1, self.clusters))]
        models = torch.stack([self._clustered(task, w) for w in starts])
        if self.clusters > 1 and bool((models == models[0]).all()):
            raise UsageError(
                f"ifca's {self.clusters} models are the same at the start, so all clients would choose the "
                f"first: {' and '.join(self.starts)} has no entries that differ. Name parts that are drawn "
                'at random and clustered, such as algorithm.starts="head"'
            )
        return Server(models, self._common(task, task.initial), models.new_zeros(self.clusters))

    def client_init(self, task: Task) -> Client:
        personal, moments = super().client_init(task)
        return Client(personal, moments, torch.full((), -1, device=task.device))

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return tree.repeat(server, len(ids))

    # -- the entries of a model: of its cluster, of all clusters, of the client ------------------------------

    def _clustered(self, task: Task, w: Tensor) -> Tensor:
        averaged = () if task.buffers == "local" else ("buffers",)
        return task.layout.entries(w, *self.clustered, *averaged)

    def _common(self, task: Task, w: Tensor) -> Tensor:
        return cut(w, runs(task.layout, (*self.clustered, "buffers")), False)

    def _model(self, task: Task, client: Client, down: Down, cluster: Tensor) -> Tensor:
        inside = torch.cat([selected(down.models, cluster), client.personal])
        return put_together(runs(task.layout, (*self.clustered, "buffers")), inside, down.common)

    # -- Algorithm 1 -----------------------------------------------------------------------------------------

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        """The model of the client's cluster; for a client that has never trained, of the largest cluster."""
        cluster = torch.where(client.cluster < 0, down.members.argmax(), client.cluster)
        return self._model(task, client, down, cluster)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        numbers = torch.arange(self.clusters, device=task.device)
        models = [self._model(task, client, down, number) for number in numbers]
        losses = torch.stack([training_loss(task, w, data) for w in models])
        cluster = losses.argmin()  # the cluster identity estimate
        w = self._model(task, client, down, cluster)
        trained = self.fit(task, w, client.moments, data, plan)
        (personal, moments), (shared, size), model, metrics = self.output(task, trained, data)
        is_member = (numbers == cluster).to(w.dtype)
        after = Client(personal, moments, cluster)
        metrics = {**metrics, "cluster": cluster.to(w.dtype), "cluster_loss": losses.min()}
        return ClientOutput(after, Upload(shared, size, is_member), model, metrics)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        weighted, members = upload.size * self._whole(task, upload.w), upload.size * upload.cluster
        of_cluster = upload.cluster[:, None] * self._clustered(task, weighted)
        return Total(of_cluster, self._common(task, weighted), members)

    def _whole(self, task: Task, shared: Tensor) -> Tensor:
        """w with zeros at local statistics."""
        local = torch.zeros_like(personal_of(task, (), task.initial))
        return torch.cat([shared, local])

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        """The mean of each cluster; one that no client chose stays as it is."""
        models = weighted_mean(total.models, total.members[:, None], server.models)
        size = total.members.sum()
        members = torch.where(size > 0, total.members, server.members)
        used = (members > 0).sum().to(models.dtype)
        return Server(models, weighted_mean(total.common, size, server.common), members), {"clusters": used}

    def next_message(self, task: Task, down: Down, upload: Upload) -> Down:
        """A new client continues from its own model, in the place of its cluster's."""
        w = self._whole(task, upload.w)
        is_own = upload.cluster[:, None] > 0
        models = torch.where(is_own, self._clustered(task, w), down.models)
        return down._replace(models=models, common=self._common(task, w))
