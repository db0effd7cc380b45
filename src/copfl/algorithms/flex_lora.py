"""FlexLoRA (Bai et al. 2024): adapters of different ranks; the mean of their products, cut to each rank."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Masked, Metrics, Plan, State, Task, UsageError, fresh, one_of
from copfl.parts.adapters import A, B, check, components, dense, factored, rank_of
from copfl.parts.averaging import (
    PartlyPersonal,
    Total,
    combined,
    personal_of,
    shared_of,
    weighted_mean,
    with_shared,
)
from copfl.parts.averaging import Upload as Sums

SEND = ("factors", "products")


class Server(NamedTuple):
    w: Tensor  # [D], with adapters of the largest rank
    ranks: Tensor  # [N] int64, of the clients


class Down(NamedTuple):
    w: Tensor  # [D]
    rank: Tensor  # [] int64, the client's


class Client(NamedTuple):
    personal: Tensor  # [p]
    moments: State
    mask: Tensor  # [D] bool, the entries that it does not send: personal ones, and those beyond its rank


class Upload(NamedTuple):
    shared: Masked  # zero beyond the client's rank
    size: Tensor  # []


@dataclass(frozen=True)
class FlexLoRA(PartlyPersonal):
    """Client n trains adapters of rank r_n: the first r_n rows of A and columns of B, the others are zero.

    The server takes the mean of the products B A, which have no common rank, and decomposes it: U S Vᵀ. Its
    first r_n components are the best approximation of rank r_n, and what client n begins the next round with.
    """

    # Paper: the adapter of rank r has the scale alpha / r of its own; here all have the scale of the model's
    # adapter. The paper's clients draw their ranks; here they are dealt out in turn.
    personal: tuple[str, ...] = ()  # type: ignore[misc]
    ranks: tuple[int, ...] = ()  # of client 0, 1, ..., and again from the first; () is the model's for all
    send: str = "factors"  # "products": B A themselves, which are larger, and whose sum hides them

    needs = (A, B)
    only_mean = (
        "its server decomposes the mean of the products, and the factors of two rounds have no difference"
    )
    summable: ClassVar = MappingProxyType({"send": "products"})  # the options under secure aggregation

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(SEND, send=self.send)
        if any(rank < 1 for rank in self.ranks):
            raise UsageError(f"ranks={self.ranks}: a rank is at least 1")

    def parts(self, task: Task) -> tuple[str, ...]:
        check(task, "flex_lora", self.needs)
        return self.personal

    def server_init(self, task: Task, clients: int) -> Server:
        check(task, "flex_lora", self.needs)
        largest = rank_of(task.layout)
        if max(self.ranks, default=0) > largest:
            raise UsageError(
                f"ranks={self.ranks}: the model's adapters have rank {largest}; give the model the largest "
                f"rank, --adapter lora:r={max(self.ranks)}, or name smaller ones"
            )
        ranks = torch.tensor(self.ranks or (largest,), device=task.device)
        return Server(task.initial, ranks[torch.arange(clients, device=task.device) % len(ranks)])

    def client_init(self, task: Task) -> Client:
        own = personal_of(task, self.parts(task), task.initial)
        return Client(own, fresh(self.optimizer, task), task.local(*self.personal))

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1), server.ranks[ids])

    def global_model(self, task: Task, client: Client, down: Down) -> Tensor:
        """The received model with the client's own parts, its adapters cut to the client's rank."""
        shared = shared_of(task, self.personal, down.w)
        w = combined(task, self.personal, client.personal, shared)
        return torch.where(self._beyond(task, down.rank), 0, w)

    def _beyond(self, task: Task, rank: Tensor) -> Tensor:
        """[D] bool, the entries of A and B beyond this rank."""
        return components(task.layout, task.device) >= rank

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w, beyond = self.global_model(task, client, down), self._beyond(task, down.rank)
        w, moments, loss = self.fit(task, w, client.moments, data, plan, active=~beyond[: task.d])
        mask, size = beyond | task.local(*self.personal), self.weight(data, w)
        after = Client(personal_of(task, self.personal, w), moments, mask)
        factors = Upload(Masked(torch.where(mask, 0, w), mask), size)
        upload = Sums(self._summed(task, w), size) if self.send == "products" else factors
        return ClientOutput(after, upload, w, {"loss": loss, "weight": size})

    def _rest(self) -> tuple[str, ...]:
        return (*self.personal, A, B)

    def _summed(self, task: Task, w: Tensor) -> Tensor:
        """What is averaged: the shared entries without A and B, and the products."""
        return torch.cat([shared_of(task, self._rest(), w), dense(task, w)])

    def _with_sums(self, task: Task, w: Tensor, sums: Tensor) -> Tensor:
        """w with these shared entries, and with adapters that have the products."""
        rest = len(shared_of(task, self._rest(), w))
        return factored(task, with_shared(task, self._rest(), w, sums[:rest]), sums[rest:])

    def summand(self, task: Task, server: Server, id: Tensor, upload: Any) -> Total:
        sums = upload.w if self.send == "products" else self._summed(task, upload.shared.values)
        return Total(upload.size * sums, upload.size)

    def server_update(self, task: Task, server: Any, total: Total) -> tuple[Server, Metrics]:
        mean = weighted_mean(total.w, total.size, self._summed(task, server.w))
        decomposed = self._with_sums(task, server.w, mean)
        lost = dense(task, decomposed) - mean[len(mean) - len(dense(task, server.w)) :]
        w = torch.where(total.size > 0, decomposed, server.w)
        return server._replace(w=w), {"truncated": torch.where(total.size > 0, lost.norm(), 0)}

    def next_message(self, task: Task, down: Down, upload: Any) -> Down:
        """A new client gets its own model back."""
        if self.send == "products":
            return down._replace(w=self._with_sums(task, down.w, upload.w))
        values, mask = upload.shared
        return down._replace(w=torch.where(mask, down.w, values))
