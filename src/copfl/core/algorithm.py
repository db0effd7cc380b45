"""The definition of an algorithm: four records of tensors and seven pure functions.

             downlink(server, ids)             client_update(task, client, down, data, plan)
  Server  ────────────────────────►  Down[n] ──►  Client', Upload[n], ...   pure, one client
    ▲                                                │        │
    │ server_update(task, server, total)             │        └─► summand(task, server, id, upload)
    └──────────────  Total = sum over clients  ◄─────┼───────────────────────────────┘
                                                     └─► stays at the client, always

Only Down and Upload are sent. A field that is in neither never leaves its side.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core import tree
from copfl.core.batches import plan, plan_of_steps
from copfl.core.optim import Optimizer, at_rate
from copfl.core.task import Data, Personal, Plan, Task

S = TypeVar("S")
C = TypeVar("C")
D = TypeVar("D")
U = TypeVar("U", contravariant=True)
T = TypeVar("T")

Metrics = dict[str, Tensor]  # scalars


class ClientOutput(NamedTuple):
    """The result of one client's local update."""

    client: Any  # stays at the client
    upload: Any  # is sent to the server
    # The model right after training, which is evaluated, see engine.rounds.Models; where `total_of` adds up, None:
    # that of `personal_model`.
    trained: Personal
    # Always "loss" and "weight", the client's unnormalised weight in the mean. "bytes_up" and "bytes_down"
    # only where messages are sent during the local update; otherwise Upload and Down are counted.
    metrics: Metrics


class Algorithm(Protocol[S, C, D, U, T]):
    """A frozen dataclass of parts and numbers with these methods. None of them has a side effect."""

    @property
    def total_epochs(self) -> int:
        """The number of epochs over the client's data in one local update, and so in its plan."""

    def server_init(self, task: Task, clients: int) -> S:
        """The server before the first round."""

    def client_init(self, task: Task) -> C:
        """A client that has never taken part."""

    def downlink(self, server: S, ids: Tensor) -> D:
        """The messages of the server, a row per client in `ids`."""

    def client_update(self, task: Task, client: C, down: D, data: Data, plan: Plan) -> ClientOutput:
        """One client's local update. No Python branch on a tensor's value: it runs under vmap."""

    def summand(self, task: Task, server: S, id: Tensor, upload: U) -> T:
        """The contribution of this upload to the round's total; every field adds up."""

    def server_update(self, task: Task, server: S, total: T) -> tuple[S, Metrics]:
        """The server after the round, and metrics of the whole federation."""

    def personal_model(self, task: Task, client: C, down: D) -> Personal:
        """The model of this client after it has received the global model, before it trains."""


AnyAlgorithm = Algorithm[Any, Any, Any, Any, Any]


class Traits(NamedTuple):
    """What engines read of an algorithm beside its methods.

    An algorithm needs no base class: it has those of these attributes that differ from the default here. A
    wrapper has those of the algorithm inside, unless it has its own. `next_message` and `trained_alone` are
    optional methods, see below.
    """

    optimizer: Optimizer | None = (
        None  # of the local steps; a client trained alone for comparison uses it too
    )
    public: int = 0  # samples without labels that it needs beside those of the clients
    cut: str = ""  # the module at which a model is divided between client and server
    needs: tuple[str, ...] = ()  # patterns of parameters that the model must train
    attackers: tuple[int, ...] = ()  # clients that are malicious
    only_mean: str = ""  # why its server can take no other step than to the mean; empty: it can
    head_only: bool = False  # whether it trains the head alone, on features of the body as it begins
    trains: str = ""  # the name of the only model that it can train; empty: any model
    usual_rounds: int = 0  # that are enough for it, where a run sets none; 0: those of any run
    # The same, where it depends on other settings: of a run's tables, before they are checked.
    rounds_of: Callable[[Mapping[str, Mapping[str, Any]]], int] | None = None
    local_steps: int = 0  # in place of an epoch; 0: an epoch is a pass over the client's samples
    even_batches: bool = False  # whether all batches of a pass have the same size, but for one sample


def traits(algorithm: Any) -> Traits:
    """The traits of an algorithm, also of one inside wrappers."""
    found: dict[str, Any] = {}
    inside = algorithm
    while inside is not None:
        found = {name: getattr(inside, name) for name in Traits._fields if hasattr(inside, name)} | found
        inside = getattr(inside, "algorithm", None)
    return Traits(**found)


def received(algorithm: AnyAlgorithm, server: Any, id: Tensor) -> Any:
    """The message of the server to this client in this round."""
    return tree.each(lambda t: t[0], algorithm.downlink(server, id[None]))


def next_plan(
    algorithm: AnyAlgorithm,
    task: Task,
    clients: Any,
    round: int,
    ids: Sequence[int] | NDArray[np.int64],
    sizes: Sequence[int] | NDArray[np.int64],
    *,
    seed: int,
    batch: int,
    augment: bool = False,
    limits: tuple[int, int] | None = None,
) -> Plan:
    """The batches of these clients' local updates in this round, a row per client.

    Args:
        algorithm: The algorithm, in its wrappers.
        task: What the clients learn.
        clients: Their records before the updates, a tree of rows.
        round: From 0.
        ids: The clients.
        sizes: How many samples each has.
        seed: Of the run.
        batch: Samples of a step.
        augment: Whether samples are shifted and flipped.
        limits: The smallest and the largest size, where other clients than these train in the same batch.
    """
    how: Any = {"batch": batch, "epochs": epochs_in(algorithm, task, round), "augment": augment}
    how |= {"random": task.random}
    how |= {"device": task.device, "limits": limits}
    if steps := traits(algorithm).local_steps:
        done = steps_done(algorithm, clients).tolist()
        return plan_of_steps(seed, ids, sizes, done, steps=steps, **how)
    return plan(seed, round, ids, sizes, **how, even=traits(algorithm).even_batches)


def epochs_in(algorithm: Any, task: Task, round: int) -> int:
    """The epochs of a local update in this round: `total_epochs`, unless there is a method of this name.

    So the structure of a plan tells `client_update`, without a branch on a tensor, what kind of round it is.

    Args:
        algorithm: In its wrappers.
        task: What the clients learn.
        round: From 0; a new client has the rounds after the last.
    """
    inside = algorithm
    while inside is not None:
        if (rule := getattr(inside, "epochs_in", None)) is not None:
            return int(rule(task, round))
        inside = getattr(inside, "algorithm", None)
    return int(algorithm.total_epochs)


def rows_for(algorithm: Any, task: Task, server: Any, data: Data, before: Any) -> Any:
    """What a local update would compute of the samples alone, for these clients: its `data.known`; None: nothing.

    An algorithm may have a method of this name, if most of it is known from the round before. It runs outside of
    vmap, on clients in one process, and may read values. It changes no result: without it, a local update computes
    the same.

    Args:
        algorithm: In its wrappers.
        task: What the clients learn.
        server: Before the round.
        data: A row per client.
        before: What this returned for the same clients in an earlier round; None: nothing is known.
    """
    rule = getattr(algorithm, "rows_for", None)
    return None if rule is None else rule(task, server, data, before)


def total_of(
    algorithm: Any, task: Task, server: Any, data: Data, uploads: Any, counted: Tensor, before: Any
) -> tuple[Any, Any]:
    """The total of several clients, and what is kept for that of the next round.

    An algorithm with a method of this name and a true `adds_up_rows` has uploads that are sums over rows. Where
    `rows_for` knows the rows, its local update returns in place of the upload what the sums are of, and the clients
    of a process are added up together. It is the total that the uploads have, bit for bit.

    Args:
        algorithm: The algorithm.
        task: What the clients learn.
        server: Before the round.
        data: A row per client, with what `rows_for` knows.
        uploads: A row per client.
        counted: [N] bool, whose uploads are added.
        before: What was kept in the round before; None: nothing.
    """
    total: tuple[Any, Any] = algorithm.total_of(task, server, data, uploads, counted, before)
    return total


def steps_done(algorithm: Any, clients: Any) -> Tensor:
    """The steps that clients have made, of an algorithm with local steps: it is in their records."""
    done: Tensor = algorithm.steps_done(clients)
    return done


def next_message(algorithm: AnyAlgorithm, task: Task, down: Any, upload: Any) -> Any:
    """The message for the next local update of a new client, whose upload no server receives.

    It stays the same, unless the algorithm has a method of this name: one whose local update starts from the
    global model alone gets its own model back, and so fine-tunes it.
    """
    rule = getattr(algorithm, "next_message", None)
    return down if rule is None else rule(task, down, upload)


def trained_alone(algorithm: Any) -> AnyAlgorithm | None:
    """What a client is trained alone with, for comparison; None: local training with the optimizer.

    It is what the optional method of this name returns, of the algorithm inside wrappers.
    """
    if hasattr(algorithm, "algorithm"):
        return trained_alone(algorithm.algorithm)
    rule = getattr(algorithm, "trained_alone", None)
    return None if rule is None else rule()


def leave_out(algorithm: Any, server: Any, clients: Tensor) -> Any:
    """The server that gives these clients, [N] bool, no weight from now on; see `wrappers.evidence`."""
    return algorithm.leave_out(server, clients)


def message_to_new_client(algorithm: AnyAlgorithm, server: Any, ids: Tensor) -> Any:
    """The message that a client which has never taken part receives: the mean of those to these clients.

    Where they all receive the same, it is that. Of what is not a number, such as a mask, the first counts.
    """
    rows = algorithm.downlink(server, ids)

    def mean(t: Tensor) -> Tensor:
        alike = t.stride(0) == 0 or len(t) == 1 or bool((t == t[:1]).all())
        return t[0] if alike or not t.is_floating_point() else t.mean(0)

    return tree.each(mean, rows)


def blank_samples(task: Task, shape: Any) -> Data:
    """Two samples of zeros, and their targets; samples of several arrays are token numbers."""
    zeros = partial(torch.zeros, dtype=torch.int64, device=task.device)
    if isinstance(shape, dict):
        x: Any = {name: zeros(2, *part) for name, part in shape.items()}
    else:
        x = zeros(2, *shape, dtype=torch.uint8 if len(shape) == 3 else torch.float32)
    shapes = {"classification": (2,), "next_token": tree.leaves(x)[0].shape, "survival": (2, 2)}
    y = zeros(shapes.get(task.criterion.kind, (2, task.classes)))
    return Data(x, y, torch.tensor(2, device=task.device))


def rate_of(algorithm: Any) -> float | None:
    """The learning rate of the algorithm's optimizer, if it has one."""
    return getattr(traits(algorithm).optimizer, "lr", None)


def with_rate(algorithm: Any, lr: float | Tensor) -> Any:
    """The algorithm, also one inside wrappers, at another learning rate, which may be one per client."""
    optimizer = traits(algorithm).optimizer
    if optimizer is None or rate_of(algorithm) is None:
        return algorithm
    return with_optimizer(algorithm, at_rate(optimizer, lr))


def with_optimizer(algorithm: Any, optimizer: Any) -> Any:
    """The algorithm, also one inside wrappers, with another optimizer."""
    if hasattr(algorithm, "algorithm"):
        return dataclasses.replace(algorithm, algorithm=with_optimizer(algorithm.algorithm, optimizer))
    return dataclasses.replace(algorithm, optimizer=optimizer)


def example_output(
    algorithm: AnyAlgorithm, task: Task, data: Data, augment: bool = False, clients: int = 1
) -> ClientOutput:
    """The result of client 0's local update on two of these samples."""
    device = task.device
    x, y = tree.each(lambda t: t[:2], (data.x, data.y))
    data = Data(x, y, torch.tensor(len(y), device=device))
    down = received(algorithm, algorithm.server_init(task, clients), torch.tensor(0, device=device))
    with torch.no_grad():
        client = algorithm.client_init(task)
        rows = tree.repeat(client, 1)
        order = next_plan(algorithm, task, rows, 0, [0], [len(y)], seed=0, batch=2, augment=augment)
        return algorithm.client_update(task, client, down, data, tree.row(order, 0))
