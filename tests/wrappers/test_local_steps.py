"""Local steps: equal to epochs where they divide, the same for clients of every size, and resumed exactly."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl.algorithms import ALGORITHMS, FedAvg, FedRep, Local
from copfl.core import Adam, Sgd, tree
from copfl.core.algorithm import traits
from copfl.engine.mapping import vmap
from copfl.engine.store import DiskStore
from copfl.errors import UsageError
from copfl.experiment.models.new_clients import local_baseline
from copfl.testing import algorithm_checks
from copfl.wrappers.local_steps import LocalSteps, StepsClient, with_local_steps
from tests.kinds import quick
from tests.toys import divided, rounds_of, slopes

FEWER = {"fedrep": {"head_epochs": 2}, "fedbabu": {"tune_epochs": 2}, "pfedme": {"inner_steps": 2}}
STEPPING = [
    name for name in ALGORITHMS if traits(ALGORITHMS[name](**FEWER.get(name, {}))).optimizer is not None
]


def samples(*sizes: int) -> Any:
    """Clients of these sizes, with random samples of two classes."""
    rng = np.random.default_rng(0)
    count = sum(sizes)
    return divided(rng.standard_normal((count, 2)), rng.integers(0, 2, count), sizes)


@pytest.mark.parametrize("algorithm", [FedAvg(epochs=2), FedRep(head_epochs=2)], ids=["fedavg", "fedrep"])
def test_whole_passes_are_epochs(algorithm: Any) -> None:
    """Three rounds end in the same bytes: three steps of four samples are a pass over twelve."""
    federation, task = samples(12, 12), slopes(0.5, -1.0)
    (epochs, _), (steps, _) = (
        rounds_of(one, task, federation, 3, batch=4) for one in (algorithm, LocalSteps(algorithm, 3))
    )
    assert torch.equal(epochs.server.w, steps.server.w)
    ids = torch.arange(2)
    for one, other in zip(
        tree.leaves(epochs.clients.rows(ids)), tree.leaves(steps.clients.rows(ids).client), strict=True
    ):
        assert torch.equal(one, other)


def test_two_passes_of_three_steps_are_two_epochs() -> None:
    federation, task = samples(12, 12), slopes(0.5, -1.0)
    epochs, _ = rounds_of(FedAvg(epochs=2), task, federation, 3, batch=4)
    steps, _ = rounds_of(LocalSteps(FedAvg(), 6), task, federation, 3, batch=4)
    assert torch.equal(epochs.server.w, steps.server.w)


def test_a_client_of_ten_and_one_of_a_thousand_move_as_many_steps() -> None:
    """With steps of the same length, whatever the gradient: Adam's first ones; and the same in both engines."""
    federation, task = samples(10, 1000), slopes(0.5, -1.0)
    algorithm = LocalSteps(Local(Adam(lr=0.01)), 7)
    state, _ = rounds_of(algorithm, task, federation, 1, batch=32)
    rows: StepsClient = state.clients.rows(torch.arange(2))
    assert rows.done.tolist() == [7, 7]
    moved = (rows.client.personal - task.initial).abs().amax(1)
    assert bool((moved > 0.01).all())
    assert bool((moved < 0.08).all())
    batched, _ = rounds_of(algorithm, task, federation, 1, batch=32, mapping=vmap())
    assert torch.allclose(rows.client.personal, batched.clients.rows(torch.arange(2)).client.personal)


def test_a_client_that_misses_rounds_goes_on_where_it_stopped() -> None:
    """A client of four samples, in steps of one: its pass ends when it has taken part twice, however many rounds
    lie between. With plain SGD on a loss without curvature the steps of a pass add up in any order."""
    federation, task = samples(*[4] * 6), slopes(0.5, -1.0)
    state, rounds = rounds_of(LocalSteps(FedAvg(), 2), task, federation, 5, batch=1, participation=0.5)
    times = np.bincount(np.concatenate([one.ids for one in rounds]), minlength=6)
    assert len(set(times.tolist())) > 1
    assert state.clients.rows(torch.arange(6)).done.tolist() == (2 * times).tolist()


def test_a_client_whose_update_is_not_counted_has_made_no_step() -> None:
    """It keeps its record, and so tries the same batches again."""
    task = slopes(0.5, -1.0)
    x = np.ones((8, 2))
    x[4:] = np.inf
    federation = divided(x, np.zeros(8, np.int64), [4, 4])
    state, rounds = rounds_of(LocalSteps(FedAvg(), 3), task, federation, 2, batch=2)
    assert [one.clients["healthy"].tolist() for one in rounds] == [[1, 0], [1, 0]]
    assert state.clients.rows(torch.arange(2)).done.tolist() == [6, 0]


def test_the_position_is_in_a_record_on_disk_too(tmp_path: Path) -> None:
    task = slopes(0.5, -1.0)
    algorithm = LocalSteps(FedAvg(), 3)
    store = DiskStore(algorithm, task, 3, tmp_path / "records")
    record = algorithm.client_init(task)._replace(done=torch.tensor(41))
    store.put(torch.tensor([1]), tree.repeat(record, 1))
    assert store.rows(torch.arange(3)).done.tolist() == [0, 41, 0]


RUN: dict[str, Any] = {
    "rounds": 5,
    "engine": "vmap",
    "workers": 1,
    "steps": 7,
    "batch": 16,
    "participation": 0.7,
    "checkpoint_every": 1,
    "rivals": False,
    "local_baseline": True,
}


def run(folder: Path, **more: Any) -> Any:
    return copfl.run("ditto", "digits", clients=4, run=RUN | more, out=folder)


@pytest.mark.job
def test_a_run_that_was_stopped_in_the_middle_of_a_pass_resumes_byte_for_byte(tmp_path: Path) -> None:
    """Its clients have 15 samples or more and take 7 steps of 16 a round: few rounds end with a pass."""
    whole = tmp_path / "whole"
    run(whole)
    part = tmp_path / "part"

    class Stop(Exception):
        pass

    def stop(round: Any, *_: Any) -> None:
        if round.number == 2:
            raise Stop

    with pytest.raises(Stop):
        copfl.run("ditto", "digits", clients=4, run=RUN, out=part, on_round=stop)
    copfl.resume(part)
    names = [
        path.relative_to(whole) for path in whole.rglob("*") if path.suffix in (".jsonl", ".safetensors")
    ]
    compared = [name for name in names if "timing" not in name.name]
    assert any(name.name == "rounds.jsonl" for name in compared)
    for name in compared:
        assert (whole / name).read_bytes() == (part / name).read_bytes(), name


def test_the_baseline_makes_as_many_steps() -> None:
    algorithm = LocalSteps(FedRep(Sgd(lr=0.1), head_epochs=3), 5)
    assert local_baseline(algorithm) == LocalSteps(Local(Sgd(lr=0.1), 4), 5)


def test_the_wrapper_is_a_value_that_can_be_replaced() -> None:
    algorithm = LocalSteps(FedAvg(), 5)
    assert dataclasses.replace(algorithm, local_steps=6) == LocalSteps(FedAvg(), 6)
    assert traits(algorithm).local_steps == 5
    assert with_local_steps(FedAvg(), 0) == FedAvg()


def test_an_algorithm_without_steps_refuses_their_number() -> None:
    with pytest.raises(UsageError, match=r"run\.steps=5 has no effect: levels makes no training steps"):
        copfl.complete({"algorithm": {"name": "levels"}, "data": {"name": "heart"}, "run": {"steps": 5}})


@pytest.mark.job
@pytest.mark.parametrize("name", quick(STEPPING))
def test_every_algorithm_with_local_steps(name: str) -> None:
    """That the engines agree, with clients of unequal size and one round in which half take part."""
    algorithm = LocalSteps(ALGORITHMS[name](**FEWER.get(name, {})), 2)
    checks = dict(algorithm_checks(algorithm, rounds=1, batch=4, norm="none"))
    for law in ("fixed shapes", "engines agree", "the same run twice", "wire round trip"):
        checks[law]()
