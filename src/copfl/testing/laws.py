"""The laws of an algorithm, and the trial in which they are checked."""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from copfl import wire
from copfl.core import AnyAlgorithm, ClientOutput, Data, Experts, Plan, Task, received, tree
from copfl.core.algorithm import next_plan, traits
from copfl.core.payload import masked_vectors
from copfl.data.clients.federation import FederatedData
from copfl.engine.mapping import Mapping, NotBatchable, sequential, vmap
from copfl.engine.rounds import Round, State
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.errors import UsageError
from copfl.testing.federations import SIZES, other_federation, small_federation

TOLERANCE = 1e-9
DROPOUT = 0.3  # of the network under test
EVERYBODY = torch.arange(len(SIZES))


def check_algorithm(
    algorithm: AnyAlgorithm | type[AnyAlgorithm], *, rounds: int = 3, batch: int = 4, norm: str = "batch"
) -> None:
    """Raises an AssertionError that names the law that the algorithm breaks; returns if it breaks none.

    Args:
        algorithm: An algorithm with its options, such as FedMine(strength=0.1), or its class.
        rounds: Of each small federation that it is tried in.
        batch: Samples of a training step.
        norm: The normalisation layers of the small network: "batch", "frozen", "group" or "none".
    """
    algorithm = algorithm() if isinstance(algorithm, type) else algorithm
    for law, check in algorithm_checks(algorithm, rounds=rounds, batch=batch, norm=norm):
        try:
            check()
        except AssertionError as error:
            raise AssertionError(f"{law}: {error}") from error


def algorithm_checks(
    algorithm: AnyAlgorithm, *, rounds: int = 3, batch: int = 4, norm: str = "batch"
) -> list[tuple[str, Callable[[], None]]]:
    """The name of each law and a function that raises an AssertionError if the algorithm breaks it.

    For `pytest.mark.parametrize(("law", "check"), algorithm_checks(algorithm))`.
    """
    trial = Trial(algorithm, rounds, batch, norm)
    return [(law, partial(check, trial)) for law, check in LAWS.items()]


class SimulatedRounds(NamedTuple):
    """The state after some rounds, and the metrics of each."""

    state: State
    rounds: list[Round]


class Trial:
    """A small federation with the algorithm under test; the checks share its state after some rounds.

    Its network has dropout, and batch norm or another norm.
    """

    def __init__(self, algorithm: AnyAlgorithm, rounds: int, batch: int, norm: str) -> None:
        self.algorithm, self.rounds, self.batch, self.norm = algorithm, rounds, batch, norm
        self.needs, self.trains = traits(algorithm).needs, traits(algorithm).trains
        self.task, self.federation = self.small_federation(SIZES)
        self.outputs: dict[int, ClientOutput] = {}

    @cached_property
    def batched_task(self) -> Task:
        """With the batched form of the network, which an engine that batches clients trains in a run."""
        return self.task.with_batching()

    def small_federation(self, sizes: tuple[int, ...]) -> tuple[Task, FederatedData]:
        return small_federation(self.norm, sizes, needs=self.needs, dropout=DROPOUT, trains=self.trains)

    @cached_property
    def one_by_one(self) -> SimulatedRounds:
        return self.run(sequential(), self.rounds)

    @cached_property
    def batched(self) -> SimulatedRounds:
        return self.run(vmap(3), self.rounds)  # everybody, in two batches

    @cached_property
    def batched_half(self) -> SimulatedRounds:
        return self.run(vmap(64), self.rounds, participation=0.5)

    @property
    def state(self) -> State:
        return self.one_by_one.state

    def run(self, mapping: Mapping, rounds: int, participation: float = 1.0) -> SimulatedRounds:
        """Some rounds of the federation."""
        task = self.task if mapping.name == "sequential" else self.batched_task
        return self.run_with(task, self.federation, mapping, rounds, participation)

    def run_with(
        self, task: Task, federation: FederatedData, mapping: Mapping, rounds: int, participation: float = 1.0
    ) -> SimulatedRounds:
        """Some rounds, of which each gives finite records and the two metrics; the last one is evaluated."""
        try:
            state = begin(self.algorithm, task, federation.clients)
            shown = list(
                simulate(
                    Simulation(self.algorithm, task, federation, mapping, batch=self.batch),
                    state,
                    rounds=rounds,
                    participation=participation,
                    eval_every=rounds,
                )
            )
        except (
            KeyError,
            TypeError,
            ValueError,
            RuntimeError,
            NotBatchable,
        ) as error:  # of records, and of vmap
            raise AssertionError(f"the rounds fail {mapping.name}: {error}") from error
        for one in shown:
            assert {"loss", "weight"} <= one.clients.keys(), (
                "the metrics of a local update include its loss and its weight in the mean"
            )
            assert one.clients["healthy"].all(), (
                "a client's record or upload is not finite although its data are"
            )
        return SimulatedRounds(state, shown)

    def arguments(self, state: State, n: int) -> tuple[Any, Any, Data, Plan]:
        """The client, the message, the data and the plan of one client's next local update."""
        rows, sizes = state.clients.rows(torch.tensor([n])), self.federation.train.sizes[[n]]
        how: Any = {"seed": 1, "batch": self.batch, "augment": True}
        order = next_plan(self.algorithm, self.task, rows, state.round, [n], sizes, **how)
        client = tree.row(rows, 0)
        down = received(self.algorithm, state.server, torch.tensor(n))
        return client, down, tree.row(self.federation.train.rows([n]), 0), tree.row(order, 0)

    def output(self, n: int) -> ClientOutput:
        """What the client's next local update returns; computed once, which "no side effects" allows."""
        if n not in self.outputs:
            with torch.no_grad():
                self.outputs[n] = self.algorithm.client_update(self.task, *self.arguments(self.state, n))
        return self.outputs[n]


def _frozen_dataclass(trial: Trial) -> None:
    algorithm: Any = trial.algorithm
    assert getattr(getattr(algorithm, "__dataclass_params__", None), "frozen", False), (
        "an algorithm is a frozen dataclass, so that it can be printed and compared"
    )
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        assert f"{field.name}={value!r}" in repr(algorithm), f"repr hides {field.name}"
        changed = dataclasses.replace(algorithm, **{field.name: value})
        assert changed == algorithm, f"replace() loses {field.name}"


def _no_side_effects(trial: Trial) -> None:
    """Every method leaves its arguments as they were, and returns the same when it is called again."""
    algorithm, task = trial.algorithm, trial.task

    def call(name: str, method: Callable[..., Any], *given: Any) -> Any:
        copies, initial = tree.each(torch.clone, given), task.initial.clone()
        with torch.no_grad():
            first, second = method(*given), method(*given)
        _same(given, copies, f"{name} changed its arguments")
        _same(task.initial, initial, f"{name} changed the task's initial weights")
        _same(
            first, second, f"{name} returned two results for one input; is there randomness outside the plan?"
        )
        return first

    state = trial.state
    client, down, data, order = trial.arguments(state, 1)
    call("downlink", algorithm.downlink, state.server, torch.tensor([1, 3]))
    call("personal_model", partial(algorithm.personal_model, task), client, down)
    upload = call("client_update", partial(algorithm.client_update, task), client, down, data, order).upload
    total = call("summand", partial(algorithm.summand, task), state.server, torch.tensor(1), upload)
    call("server_update", partial(algorithm.server_update, task), state.server, total)


def _metrics(round: Round) -> dict[str, Any]:
    return {**round.federation, **round.clients}


def _the_same_run_twice(trial: Trial) -> None:
    """Two runs are equal byte for byte, in their metrics and in all records.

    With batched clients, of which a round draws half: one by one, "no side effects" calls every method twice.
    """
    first, second = trial.batched_half, trial.run(vmap(64), trial.rounds, participation=0.5)
    for one, other in zip(first.rounds, second.rounds, strict=True):
        changed = [
            name
            for name, value in _metrics(one).items()
            if not np.array_equal(value, _metrics(other)[name], equal_nan=True)
        ]
        assert not changed, f"two runs differ in {', '.join(changed)} of round {one.number}"
    end, repeated = ((run.state.server, run.state.clients.rows(EVERYBODY)) for run in (first, second))
    _same(end, repeated, "two runs differ in their records")


def _engines_agree(trial: Trial) -> None:
    half = trial.run(sequential(), trial.rounds, participation=0.5)
    for participation, one, other in (
        (0.5, half, trial.batched_half),
        (1.0, trial.one_by_one, trial.batched),
    ):
        how = f"vmap against sequential, participation {participation}"
        _close(one.state.server, other.state.server, f"the server after {trial.rounds} rounds, {how}")
        left, right = (run.state.clients.rows(EVERYBODY) for run in (one, other))
        _close(left, right, f"the clients, {how}")


def _fixed_shapes(trial: Trial) -> None:
    client = trial.algorithm.client_init(trial.task)
    for name, first, now in (
        ("server", trial.algorithm.server_init(trial.task, len(SIZES)), trial.state.server),
        ("client", client, tree.row(trial.state.clients.rows(EVERYBODY), 0)),
        ("client", client, trial.output(0).client),
    ):
        before, after = ([(path, t.shape, t.dtype) for path, t in tree.named(one)] for one in (first, now))
        assert before == after, f"the {name}'s record changed its shape: {before}, then {after}"


def _messages_by_id(trial: Trial) -> None:
    """A client's message does not depend on the other recipients or on their order."""
    some, server = torch.tensor([2, 0]), trial.state.server
    rows = tree.rows(trial.algorithm.downlink(server, EVERYBODY), some)
    _same(rows, trial.algorithm.downlink(server, some), "downlink matches rows by position instead of by id")


def _any_order_of_uploads(trial: Trial) -> None:
    algorithm, task, server = trial.algorithm, trial.task, trial.state.server

    def server_after(order: list[int]) -> Any:
        uploads = [(torch.tensor(n), trial.output(n).upload) for n in order]
        summands = [algorithm.summand(task, server, id, upload) for id, upload in uploads]
        return algorithm.server_update(task, server, reduce(tree.add, summands))[0]

    with torch.no_grad():
        first, second = server_after([0, 1, 2, 3]), server_after([3, 1, 0, 2])
    _close(first, second, "the server depends on the order in which uploads arrive")


def _personal_entries_stay(trial: Trial) -> None:
    """Masked vectors are zero where personal, and no local batch-norm statistic is in the upload."""
    output = trial.output(0)
    for masked in masked_vectors(output.upload):
        assert not masked.values[masked.personal].any(), "an upload carries values at personal coordinates"
    w = output.trained.w if isinstance(output.trained, Experts) else output.trained
    statistics = w[..., trial.task.d :].flatten()
    # What everybody begins with, such as a variance of 1, says nothing of the client, and weights have it too.
    own = statistics[~torch.isin(statistics, trial.task.initial[trial.task.d :])]
    for path, sent in tree.named(output.upload):
        leaked = torch.isin(sent.double(), own)
        assert not leaked.any(), f"an upload carries local batch-norm statistics: {path}"


def _wire_round_trip(trial: Trial) -> None:
    """Messages, and the records that a node stores, are the same after encoding and decoding."""
    client, down, _, _ = trial.arguments(trial.state, 1)
    records = {"server": trial.state.server, "client": client, "down": down, "upload": trial.output(1).upload}
    for kind, record in records.items():
        head = wire.Head(kind, "run", wire.layout_hash(trial.task.layout), trial.state.round, 1)
        decoded = wire.decode(wire.encode(record, head), record, head).record
        _same(record, decoded, f"the {kind}'s record is not the same after encoding and decoding")


def _round_without_uploads(trial: Trial) -> None:
    """A round in which every client failed leaves a finite server and the global model."""
    algorithm, server = trial.algorithm, trial.algorithm.server_init(trial.task, len(SIZES))
    with torch.no_grad():
        summand = algorithm.summand(trial.task, server, torch.tensor(0), trial.output(0).upload)
        after, _ = algorithm.server_update(trial.task, server, tree.each(torch.zeros_like, summand))
    assert tree.finite(after), "the server is not finite after a round without uploads"
    before, now = (received(algorithm, one, torch.tensor(0)) for one in (server, after))
    _close(getattr(before, "w", None), getattr(now, "w", None), "the global model changed without uploads")


def _one_client(trial: Trial) -> None:
    task, federation = trial.small_federation((6,))
    try:
        state = trial.run_with(task.with_batching(), federation, vmap(64), trial.rounds).state
    except UsageError:
        return  # it needs several, and says so
    assert tree.finite(state.server), "the server is not finite when there is only one client"


def _other_task(kind: str, trial: Trial) -> None:
    """Two rounds on another task, without norms, the same in every engine."""
    task, federation = other_federation(kind, trial.trains)

    def after(mapping: Mapping) -> State:
        state = begin(trial.algorithm, task, federation.clients)
        for one in simulate(
            Simulation(trial.algorithm, task, federation, mapping, batch=trial.batch),
            state,
            rounds=2,
            eval_every=2,
        ):
            assert one.clients["healthy"].all(), "a client's record or upload is not finite"
            values = one.clients.get(task.metrics[0].name, np.zeros(1))
            assert np.isfinite(values).all(), f"the {task.metrics[0].name} of a client is not finite"
        return state

    if trial.needs:  # adapters, which the tiny networks of these tasks lack
        return
    try:
        first, second = after(sequential()), after(vmap(64))
    except NotBatchable as error:
        raise AssertionError(f"the rounds fail: {error}") from error
    except UsageError:
        if kind == "classification" and not trial.trains:
            raise
        return  # it needs classes, and says so
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise AssertionError(f"the rounds fail: {type(error).__name__}: {error}") from error
    _close(first.server, second.server, "the server after 2 rounds, vmap against sequential")
    left, right = (state.clients.rows(EVERYBODY) for state in (first, second))
    _close(left, right, "the clients after 2 rounds, vmap against sequential")


LAWS: dict[str, Callable[[Trial], None]] = {
    "frozen dataclass": _frozen_dataclass,
    "no side effects": _no_side_effects,  # early, because a changed argument confuses the other checks
    "the same run twice": _the_same_run_twice,
    "engines agree": _engines_agree,
    "fixed shapes": _fixed_shapes,
    "messages by id": _messages_by_id,
    "any order of uploads": _any_order_of_uploads,
    "personal entries stay": _personal_entries_stay,
    "wire round trip": _wire_round_trip,
    "round without uploads": _round_without_uploads,
    "one client": _one_client,
    "numbers as targets": partial(_other_task, "regression"),
    "samples of two arrays": partial(_other_task, "classification"),
    "times until an event": partial(_other_task, "survival"),
}


def _close(a: object, b: object, what: str) -> None:
    for (path, left), (_, right) in zip(tree.named(a), tree.named(b), strict=True):
        difference = float((left.double() - right.double()).abs().max()) if left.numel() else 0.0
        assert difference <= TOLERANCE, f"{what}: {path or 'w'} differs by {difference:.3g}"


def _same(a: object, b: object, what: str) -> None:
    for (path, left), (_, right) in zip(tree.named(a), tree.named(b), strict=True):
        assert torch.equal(left, right), f"{what}: {path}"
