"""Non-finite numbers and degenerate federations: a non-finite value does not spread, and runs continue."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl import wire
from copfl.algorithms import ALGORITHMS
from copfl.core import tree
from copfl.data.arrays import from_arrays
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset
from copfl.engine.mapping import sequential
from copfl.engine.rounds import Round, State
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.errors import WireError
from copfl.experiment.experiment import Experiment
from copfl.experiment.preparation import prepare
from copfl.experiment.result import Result
from copfl.settings.complete import complete
from copfl.wire import Head
from tests.kinds import KINDS, quick
from tests.slow import slow
from tests.toys import divided, only_model, slopes

SMALL: dict[str, Any] = {
    "model": "mlp",
    "model_options": {"width": 4},
    "engine": "sequential",
    "rounds": 2,
}


def samples(classes: int = 3, each: int = 8) -> Dataset:
    """Separable classes; more samples than the clients have, because some algorithms need public ones."""
    rng = np.random.default_rng(0)
    y = np.arange(classes * each) % classes
    x = (rng.normal(size=(len(y), 4)) + 3 * np.eye(classes, 4)[y]).astype(np.float32)
    return from_arrays(x, y, x, y)


WITHOUT_ADAPTERS = [name for name, algorithm in ALGORITHMS.items() if not getattr(algorithm, "needs", ())]
FEDERATIONS = {
    "one client": ((0, 1, 2, 3, 4, 5),),
    "two with the same samples": ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5)),
    "one with all classes, two with one": ((0, 1, 2, 3, 4, 5), (6, 9), (7, 10)),
    "one sample each": ((0,), (1,), (5,)),
}


def degenerate(name: str, parts: tuple[tuple[int, ...], ...], **more: Any) -> Result:
    indices = tuple(np.array(part, np.int64) for part in parts)
    how = {**SMALL, **more}
    if only_model(ALGORITHMS[name]):
        how = {key: value for key, value in how.items() if not key.startswith("model")}
    return copfl.run(name, samples(), partition=Partition(indices, indices, "by hand"), batch=64, **how)


# Every algorithm where a variance, a split or a batch of one client can be none at all, as a job; the others of their
# kinds.
HARDEST = "one sample each"


@pytest.mark.parametrize(
    ("name", "federation"),
    [
        pytest.param(
            name,
            federation,
            marks=[] if name in KINDS else pytest.mark.job if federation == HARDEST else slow,
        )
        for name in WITHOUT_ADAPTERS
        for federation in FEDERATIONS
    ],
)
def test_degenerate_federations(name: str, federation: str) -> None:
    result = degenerate(name, FEDERATIONS[federation])
    assert tree.finite((result.state.server, result.state.clients.saved()))
    assert not any(record["left_out"] for record in result.records)
    for record in result.records:
        assert sum(record["per_client"]["weight"]) == pytest.approx(1, abs=1e-5)
        assert all(0 <= w <= 1 + 1e-6 for w in record["per_client"]["weight"])
        assert all(0 <= a <= 1 for a in record["per_client"]["accuracy"])
        assert all(v is None or math.isfinite(v) for v in record["federation"].values())
    if (
        federation == "two with the same samples"
    ):  # the same samples in another order: the same but for rounding
        assert result.weight[-1] == pytest.approx([0.5, 0.5], abs=1e-3)
        assert result.accuracy[-1, 0] == result.accuracy[-1, 1]


@pytest.mark.parametrize("name", ["copfl", "fedavg", "apfl", "local"])
def test_a_client_that_diverges_in_one_round_is_left_out_and_returns(name: str) -> None:
    rng = np.random.default_rng(0)
    task, algorithm = slopes(0.1, 0.2), ALGORITHMS[name]()
    federation = divided(rng.normal(size=(9, 2)), np.array([0, 1, 1] * 3), (3, 3, 3))
    state, healthy = begin(algorithm, task, 3), []
    finite = federation.train.x.clone()
    for round in simulate(Simulation(algorithm, task, federation, sequential()), state, rounds=4):
        healthy.append(round.clients["healthy"].tolist())
        # Not finite in the second round only.
        federation.train.x[3:6] = math.nan if round.number == 0 else finite[3:6]
        federation.train._last = None
    assert healthy == [[1, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 1]]
    assert tree.finite((state.server, state.clients.saved()))


def diverging(name: str, **run: Any) -> tuple[Experiment, State, list[Round]]:
    """The rounds of three clients that take steps of 1e30."""
    indices = tuple(np.array(part, np.int64) for part in FEDERATIONS["one with all classes, two with one"])
    tables: dict[str, Any] = {
        "algorithm": {"name": name},
        "model": {"name": "mlp", "width": 4},
        "optimizer": {"name": "sgd", "lr": 1e30},
        "run": {"engine": "sequential", "batch": 64, **run},
    }
    e = prepare(
        complete(tables, values={"data": samples(), "partition": Partition(indices, indices, "by hand")})
    )
    state = begin(e.algorithm, e.task, 3)
    shown = list(
        simulate(Simulation(e.algorithm, e.task, e.federation, e.engine), state, rounds=e.settings.rounds)
    )
    return e, state, shown


# These have no learning rate.
@pytest.mark.parametrize("name", quick(sorted({*WITHOUT_ADAPTERS} - {"levels", "trees", "wide_levels"})))
def test_the_server_is_unchanged_if_every_client_diverges(name: str) -> None:
    e, state, shown = diverging(name, rounds=2)
    if any(round.clients["healthy"].any() for round in shown):
        # This algorithm bounds its steps in another way.
        assert tree.finite((state.server, state.clients.saved()))
        return
    initial = e.algorithm.server_init(e.task, 3)
    counters = {"round", "rounds", "step"}
    for (path, after), (_, before) in zip(tree.named(state.server), tree.named(initial), strict=True):
        assert torch.equal(after, before) or path.rpartition(".")[2] in counters, path
    assert not any(round.clients["weight"].any() for round in shown)


def test_products_in_bf16_that_overflow_are_left_out() -> None:
    _, state, shown = diverging("copfl", engine="vmap", precision="bf16", rounds=3)
    assert not all(round.clients["healthy"].all() for round in shown), (
        "steps of 1e30 do not stay finite for long"
    )
    assert tree.finite((state.server, state.clients.saved()))


def test_a_number_that_overflows_on_the_wire_is_refused() -> None:
    head, largest = Head("upload", "run", "", 0, 0), float(torch.finfo(torch.float32).max)
    record = {"w": torch.full((100,), largest)}  # finite, and infinity in bf16
    with pytest.raises(WireError, match=r"infinity|does not fit"):
        wire.decode(wire.encode(record, head, "bf16"), record, head)
    with pytest.raises(WireError, match="does not fit into fp16"):
        wire.encode(record, head, "fp16")
