"""What an algorithm is: four records of tensors and seven pure verbs.

             downlink(server, ids)              client_update(task, client, down, data, plan)
  Server  ────────────────────────►  Down[n] ──►  Client', Upload[n], ...       pure, one client
    ▲                                              │        │
    │ server_update(task, server, total)           │        └─► summand(task, server, id, upload) ─► Total  (adds up)
    └──────────────  total = sum over clients ◄────┼────────────────────────────────┘
                                                   └─► stays at the client, always

Only Down and Upload travel. A field that is in neither never leaves its side.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from copfl.core.task import Data, Personal, Plan, Task, with_statistics

S = TypeVar("S")
C = TypeVar("C")
D = TypeVar("D")
U = TypeVar("U")
T = TypeVar("T")

Metrics = dict[str, Tensor]  # scalars for the record


class ClientOutput(NamedTuple, Generic[C, U]):
    """What one client's turn in a round gives."""

    client: C  # stays at the client
    upload: U  # travels
    trained: Personal  # what the client predicts with right after training; looked at and dropped
    metrics: Metrics  # "loss" and "weight" (its unnormalised weight in the mean) always, and what else is worth seeing;
    # "bytes_up" and "bytes_down" only where messages cross in the middle of a turn; else Upload and Down are counted


class Algorithm(Protocol[S, C, D, U, T]):
    """A frozen dataclass of parts and numbers, with these methods. None of them keeps or changes anything."""

    @property
    def total_epochs(self) -> int:
        """How many times one turn goes over the client's data; the plan holds as many."""

    def server_init(self, task: Task, clients: int) -> S:
        """The server before the first round."""

    def client_init(self, task: Task) -> C:
        """A client that has never taken part."""

    def downlink(self, server: S, ids: Tensor) -> D:
        """What the server sends, a row per client in `ids`."""

    def client_update(self, task: Task, client: C, down: D, data: Data, plan: Plan) -> ClientOutput[C, U]:
        """One client's turn. No Python branch on a tensor's value: it runs under vmap."""

    def summand(self, task: Task, server: S, id: Tensor, upload: U) -> T:
        """What this upload adds to the round's total; every field adds up."""

    def server_update(self, task: Task, server: S, total: T) -> tuple[S, Metrics]:
        """The server after the round, and figures about the whole federation."""

    def personal_model(self, task: Task, client: C, down: D) -> Personal:
        """What this client predicts with once it has the broadcast, before it trains."""


AnyAlgorithm = Algorithm[Any, Any, Any, Any, Any]


# What a look may try, by the ending of its figures' names: the client's model after its turn, before it, and the model
# for everybody. Each is one more pass over the test samples.
EvalModels = tuple[str, ...]
EVAL_MODELS: dict[str, EvalModels] = {
    "all": ("", "_before", "_global"),
    "personal": ("", "_before"),
    "final": ("",),
}


def look(
    algorithm: AnyAlgorithm, task: Task, client: Any, down: Any, trained: Personal, test: Data,
    tried: EvalModels = EVAL_MODELS["all"],
) -> Metrics:  # fmt: skip
    """Accuracy and loss of these models on a client's test samples."""

    def model(name: str) -> Personal:
        if name == "_before":
            return algorithm.personal_model(task, client, down)
        if name == "_global":
            everybody = algorithm.personal_model(task, algorithm.client_init(task), down)
            # A model from outside is tried with the client's own statistics.
            return with_statistics(task, everybody, trained) if task.buffers == "local" else everybody
        return trained

    metrics = {}
    for name in tried:
        loss, accuracy = task.evaluate(model(name), test)
        known = torch.isfinite(loss) & (test.size > 0)  # no samples or a broken model: nan, not a number
        metrics[f"accuracy{name}"] = torch.where(known, accuracy.double(), torch.nan)
        metrics[f"test_loss{name}"] = torch.where(known, loss.double(), torch.nan)
    return metrics
