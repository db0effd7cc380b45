"""Weights that the server sets: clients without weight do not count in the mean.

The weights come from the evidence on each client's benefit (`experiment.evidence`). The server multiplies
what a client adds to the total by the client's weight, so sums suffice.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from copfl.core import ClientOutput, Data, Metrics, Plan, Task, tree
from copfl.core.payload import update_of
from copfl.wrappers.base import Wrapper


class EvidenceServer(NamedTuple):
    server: Any
    weight: Tensor  # [N], 0 or 1


class EvidenceDown(NamedTuple):
    down: Any
    weight: Tensor  # [], of this client: some algorithms' clients need to know what the server counts


@dataclass(frozen=True)
class ByEvidence(Wrapper):
    """The algorithm whose mean leaves out clients that are known to do harm."""

    wraps: ClassVar[tuple[str, ...]] = ("server", "down")

    def server_init(self, task: Task, clients: int) -> EvidenceServer:
        return EvidenceServer(super().server_init(task, clients), task.initial.new_ones(clients))

    def downlink(self, server: EvidenceServer, ids: Tensor) -> EvidenceDown:
        return EvidenceDown(super().downlink(server, ids), server.weight.index_select(0, ids))

    def client_update(
        self, task: Task, client: Any, down: EvidenceDown, data: Data, plan: Plan
    ) -> ClientOutput:
        output = super().client_update(task, client, down, data, plan)
        update = update_of(down.down, output.upload)
        if update.reported_weight is not None:
            update = update._replace(reported_weight=down.weight * update.reported_weight)
        metrics = {**output.metrics, "weight": down.weight * output.metrics["weight"]}
        return output._replace(client=self.counted(output.client, down, update), metrics=metrics)

    def summand(self, task: Task, server: EvidenceServer, id: Tensor, upload: Any) -> Any:
        weight = server.weight.gather(0, id[None])[0]
        summand = super().summand(task, server, id, upload)
        return tree.each(lambda t: (weight * t).to(t.dtype), summand)

    def server_update(self, task: Task, server: EvidenceServer, total: Any) -> tuple[EvidenceServer, Metrics]:
        inner, metrics = super().server_update(task, server, total)
        return EvidenceServer(inner, server.weight), {**metrics, "without_weight": (server.weight == 0).sum()}

    def leave_out(self, server: EvidenceServer, clients: Tensor) -> EvidenceServer:
        return server._replace(weight=server.weight.masked_fill(clients.to(server.weight.device), 0))
