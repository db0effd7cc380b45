"""`check_algorithm`: the laws every algorithm must obey, run over the whole registry and open to yours.

| check | the kind of bug it ends |
| --- | --- |
| engines agree in float64: one by one, all at once, in chunks | hidden state; what vmap cannot map |
| messages by id, totals in any order | rows matched by position instead of by id |
| every record through the wire and back | fields that bytes cannot hold; None in round one |
| arguments untouched, two calls equal | edits of what was only lent; randomness from outside the plan |
| shapes and dtypes fixed over rounds | lists that grow |
| one client, some clients, unequal sizes, nobody answers | 1 / (1 - alpha); indexing by position; 0 / 0 |
| uploads carry nothing at personal coordinates | a leak of what must stay home |
| repr shows the numbers, replace() changes one | closures nobody can print |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import nn

from copfl import models, wire
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.batches import plan
from copfl.core.task import Data, Experts, Plan, Task, task_of
from copfl.data.federation import Federation
from copfl.data.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.engine.mapping import Mapping, sequential, vmap
from copfl.engine.simulate import State, begin, simulate

TOLERANCE = 1e-9
SIZES = (5, 9, 3, 12)  # unequal on purpose: one batch, two, less than one, three


def check_algorithm(algorithm: AnyAlgorithm, *, rounds: int = 3, batch: int = 4, norm: str = "batch") -> None:
    """Raises an AssertionError that says which law the algorithm breaks; returns if it breaks none."""
    task, federation = small_federation(norm, SIZES)
    _printable(algorithm)
    # First, because what is edited in place confuses every other check.
    _lent_not_changed(
        algorithm, task, federation, _run(algorithm, task, federation, sequential(), 1, batch), batch
    )
    for participation in (0.5, 1.0):
        reference = _run(algorithm, task, federation, sequential(), rounds, batch, participation)
        for mapping in (vmap(64), vmap(3)):
            other = _run(algorithm, task, federation, mapping, rounds, batch, participation)
            how = f"in chunks of {mapping.chunk} against one by one, participation {participation}"
            _close(reference.server, other.server, f"the server after {rounds} rounds, {how}")
            everybody = torch.arange(len(SIZES))
            _close(reference.clients.rows(everybody), other.clients.rows(everybody), f"the clients, {how}")
    _shapes_stay(algorithm, task, federation, reference, batch)
    _addressed(algorithm, reference)
    _order_does_not_matter(algorithm, task, federation, reference, batch)
    _personal_stays_home(algorithm, task, federation, reference, batch)
    _fits_the_wire(algorithm, task, federation, reference, batch)
    _nobody_answers(algorithm)
    task, federation = small_federation(norm, (6,))
    state = _run(algorithm, task, federation, vmap(64), rounds, batch)
    assert _finite(state.server), "the server is not finite when there is one client alone"


def small_federation(norm: str, sizes: tuple[int, ...], device: str = "cpu") -> tuple[Task, Federation]:
    """A tiny CNN in float64 over random 8x8 images of 4 classes, one client per size; and six public images."""
    rng = np.random.default_rng(0)
    count = sum(sizes)
    x = rng.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
    y = rng.integers(0, 4, count)
    samples = Samples(x, y)
    cuts = np.split(np.arange(count), np.cumsum(sizes)[:-1])
    dataset = Dataset("random", samples, samples, ("a", "b", "c", "d"), mean=(0.5,), std=(0.5,), augment=True)
    federation = Federation(dataset, Partition(tuple(cuts), tuple(cuts), "by hand", {}), device)
    model: nn.Module = models.SmallCNN((1, 8, 8), 4, width=2, hidden=5, norm=norm)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    public = torch.from_numpy(rng.integers(0, 256, (6, 1, 8, 8), dtype=np.uint8))
    task = task_of(
        model, 4, mean=dataset.mean, std=dataset.std, dtype=torch.float64, public=public, device=device
    )
    return task, federation


def _run(
    algorithm: AnyAlgorithm,
    task: Task,
    federation: Federation,
    mapping: Mapping,
    rounds: int,
    batch: int,
    participation: float = 1.0,
) -> State:
    try:
        state = begin(algorithm, task, federation.clients)
        loop = simulate(
            algorithm,
            task,
            federation,
            mapping,
            state,
            rounds=rounds,
            batch=batch,
            participation=participation,
        )
        shown = list(loop)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # what records, and vmap, say to misfits
        raise AssertionError(f"the rounds fail {mapping.name}: {error}") from error
    for one in shown:
        assert {"loss", "weight"} <= one.clients.keys(), (
            "a turn's figures hold its loss and its weight in the mean"
        )
        assert one.clients["healthy"].all(), "a client's record or upload is not finite although its data are"
    return state


def _printable(algorithm: AnyAlgorithm) -> None:
    law = "an algorithm is a frozen dataclass, so that it can be printed and compared"
    assert dataclasses.is_dataclass(algorithm), law
    assert type(algorithm).__dataclass_params__.frozen, law
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        assert f"{field.name}={value!r}" in repr(algorithm), f"repr hides {field.name}"
        assert dataclasses.replace(algorithm, **{field.name: value}) == algorithm, (
            f"replace() loses {field.name}"
        )


def _turn(
    algorithm: AnyAlgorithm, task: Task, federation: Federation, state: State, n: int, batch: int
) -> Any:
    client, down, data, order = _given(algorithm, federation, state, n, batch)
    with torch.no_grad():
        return algorithm.client_update(task, client, down, data, order)


def _given(
    algorithm: AnyAlgorithm, federation: Federation, state: State, n: int, batch: int
) -> tuple[Any, Any, Data, Plan]:
    ids = torch.tensor([n])
    sizes = federation.train.sizes[[n]]
    order = plan(1, state.round, [n], sizes, batch=batch, epochs=algorithm.total_epochs, augment=True)
    rows = (
        tree.rows(state.clients.rows(torch.arange(federation.clients)), ids),
        algorithm.downlink(state.server, ids),
    )
    client, down = (tree.row(r, 0) for r in rows)
    return client, down, tree.row(federation.train.rows([n]), 0), tree.row(order, 0)


def _shapes_stay(
    algorithm: AnyAlgorithm, task: Task, federation: Federation, state: State, batch: int
) -> None:
    client = algorithm.client_init(task)
    for name, first, now in (
        ("server", algorithm.server_init(task, len(SIZES)), state.server),
        ("client", client, tree.row(state.clients.rows(torch.arange(len(SIZES))), 0)),
        ("client", client, _turn(algorithm, task, federation, state, 0, batch).client),
    ):
        before = [(path, t.shape, t.dtype) for path, t in tree.named(first)]
        after = [(path, t.shape, t.dtype) for path, t in tree.named(now)]
        assert before == after, (
            f"the {name}'s record changed its shape over the rounds: {before} became {after}"
        )


def _lent_not_changed(
    algorithm: AnyAlgorithm, task: Task, federation: Federation, state: State, batch: int
) -> None:
    """Every verb leaves its arguments bit for bit as they were, and gives the same answer when asked again."""

    def ask(verb: str, call: Callable[..., Any], *given: Any) -> Any:
        copies, first_weights = tree.each(torch.clone, given), task.initial.clone()
        with torch.no_grad():
            first, second = call(*given), call(*given)
        _same(given, copies, f"{verb} changed what it was lent")
        _same(task.initial, first_weights, f"{verb} changed what it was lent: the task's first weights")
        _same(
            first,
            second,
            f"{verb} gave two answers to the same question; is there randomness outside the plan?",
        )
        return first

    client, down, data, order = _given(algorithm, federation, state, 1, batch)
    ask("downlink", algorithm.downlink, state.server, torch.tensor([1, 3]))
    ask("personal_model", partial(algorithm.personal_model, task), client, down)
    upload = ask("client_update", partial(algorithm.client_update, task), client, down, data, order).upload
    total = ask("summand", partial(algorithm.summand, task), state.server, torch.tensor(1), upload)
    ask("server_update", partial(algorithm.server_update, task), state.server, total)


def _addressed(algorithm: AnyAlgorithm, state: State) -> None:
    """A client's message does not depend on who else gets one, or in which order."""
    everybody, some = torch.arange(len(SIZES)), torch.tensor([2, 0])
    alone = tree.rows(algorithm.downlink(state.server, everybody), some)
    _same(alone, algorithm.downlink(state.server, some), "downlink matches rows by position instead of by id")


def _order_does_not_matter(
    algorithm: AnyAlgorithm, task: Task, federation: Federation, state: State, batch: int
) -> None:
    def server_after(order: list[int]) -> Any:
        uploads = [_turn(algorithm, task, federation, state, n, batch).upload for n in order]
        parts = [
            algorithm.summand(task, state.server, torch.tensor(n), u)
            for n, u in zip(order, uploads, strict=True)
        ]
        return algorithm.server_update(task, state.server, reduce(tree.add, parts))[0]

    with torch.no_grad():
        first, second = server_after([0, 1, 2, 3]), server_after([3, 1, 0, 2])
    _close(first, second, "the server's answer depends on the order in which uploads arrive")


def _fits_the_wire(
    algorithm: AnyAlgorithm, task: Task, federation: Federation, state: State, batch: int
) -> None:
    """What travels, and what a node keeps on its disk, comes back from its bytes as it was."""
    client, down, _, _ = _given(algorithm, federation, state, 1, batch)
    upload = _turn(algorithm, task, federation, state, 1, batch).upload
    for kind, record in (("server", state.server), ("client", client), ("down", down), ("upload", upload)):
        head = wire.Head(kind, "run", wire.layout_hash(task.layout), state.round, 1)
        again = wire.decode(wire.encode(record, head), record, head).record
        _same(record, again, f"the {kind}'s record does not come back from the wire")


def _nobody_answers(algorithm: AnyAlgorithm) -> None:
    """A round in which every client failed leaves a finite server."""
    task, federation = small_federation("none", (4,))
    fresh = begin(algorithm, task, 1)
    with torch.no_grad():
        upload = _turn(algorithm, task, federation, fresh, 0, 4).upload
        nothing = tree.each(torch.zeros_like, algorithm.summand(task, fresh.server, torch.tensor(0), upload))
        after, _ = algorithm.server_update(task, fresh.server, nothing)
    assert _finite(after), "the server is not finite after a round that nobody answered"
    _close(
        algorithm.downlink(fresh.server, torch.tensor([0]))._asdict().get("w"),
        algorithm.downlink(after, torch.tensor([0]))._asdict().get("w"),
        "the broadcast weights changed in a round that nobody answered",
    )


def _personal_stays_home(
    algorithm: AnyAlgorithm, task: Task, federation: Federation, state: State, batch: int
) -> None:
    """Masked vectors are zero where personal, and no local batch-norm statistic shows up anywhere in the upload."""
    turn = _turn(algorithm, task, federation, state, 0, batch)

    def look(record: object) -> None:
        if isinstance(record, tree.Masked):
            assert not record.values[record.personal].any(), (
                "an upload carries values at personal coordinates"
            )
        elif isinstance(record, tuple):
            for part in record:
                look(part)

    look(turn.upload)
    w = turn.trained.w if isinstance(turn.trained, Experts) else turn.trained
    statistics = w[..., task.d :].flatten()
    for path, sent in tree.named(turn.upload):
        found = torch.isin(sent.double(), statistics[statistics != 0])
        assert not found.any(), f"an upload carries local batch-norm statistics: {path}"


def _finite(record: object) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tree.leaves(record) if t.is_floating_point())


def _close(a: object, b: object, what: str) -> None:
    for (path, left), (_, right) in zip(tree.named(a), tree.named(b), strict=True):
        difference = float((left.double() - right.double()).abs().max()) if left.numel() else 0.0
        assert difference <= TOLERANCE, f"{what}: {path or 'w'} differs by {difference:.3g}"


def _same(a: object, b: object, what: str) -> None:
    for (path, left), (_, right) in zip(tree.named(a), tree.named(b), strict=True):
        assert torch.equal(left, right), f"{what}: {path}"


__all__ = ["check_algorithm", "small_federation"]
