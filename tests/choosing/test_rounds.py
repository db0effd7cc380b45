"""The rounds and the temperature that held-out rows find for a named method: by hand, and laws."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl.choosing import evaluate, first_run
from copfl.choosing.evaluate import Evaluated, LossByRound, Room, experiment_of, lowest_loss
from copfl.choosing.first_run import with_found_rounds
from copfl.choosing.folds import MOST_BY_STEPS
from copfl.core import tree
from copfl.core.evaluation import predicted
from copfl.engine.rounds import Round
from copfl.errors import UsageError
from copfl.experiment.experiment import Experiment
from copfl.experiment.models.client_models import InMemory
from copfl.measures.calibration import DEVIATION
from copfl.settings.checking import SettingError
from copfl.settings.complete import complete
from copfl.settings.identity import identity
from copfl.settings.schema import Run

FEW: dict[str, Any] = {"rounds": 6, "clients": 3, "find_rounds": "first"}


def test_the_first_round_of_the_lowest_loss_counts() -> None:
    assert lowest_loss(enumerate([3.0, 1.0, 2.0, 1.0], 1)) == 2
    assert lowest_loss([(5, 2.0), (10, 1.5), (12, 1.6)]) == 10  # rounds that were evaluated
    assert lowest_loss([(1, math.inf), (2, math.inf)]) == 1


def test_the_search_ends_after_its_patience() -> None:
    seen = []

    def losses() -> Any:
        for number, loss in enumerate([3.0, 1.0, 2.0, 2.0, 2.0, 0.5], 1):
            seen.append(number)
            yield number, loss

    assert lowest_loss(losses(), patience=3) == 2
    assert seen == [1, 2, 3, 4, 5]
    late = [*range(20, 0, -1), *[1.5] * 9, 0.5]  # lowest in round 20, and lower again ten rounds later
    assert lowest_loss(enumerate(late, 1), patience=3) == 30
    assert lowest_loss(enumerate([*late[:-1], 1.5, 0.5], 1), patience=3) == 20


def test_the_loss_is_a_mean_over_samples() -> None:
    def after(ids: list[int], losses: list[float]) -> Round:
        return Round(0, np.array(ids), {}, {"test_loss": np.array(losses)})

    curve = LossByRound(np.array([1, 3, 0]))
    assert curve.after(after([0, 2], [2.0, math.nan])) == 2.0  # the client without samples has no loss
    assert curve.after(after([1], [1.0])) == (1 * 2.0 + 3 * 1.0) / 4  # the first keeps its latest
    assert curve.after(Round(1, np.array([0]), {}, {})) is None
    assert curve.after(after([0], [math.nan])) == math.inf  # it diverged


def found(monkeypatch: pytest.MonkeyPatch, rounds: dict[str, int]) -> None:
    """The folds find these rounds, by candidate."""

    def evaluate(*_: Any) -> Any:
        return {name: Evaluated([], number) for name, number in rounds.items()}, {}

    monkeypatch.setattr(first_run, "verdict_of", lambda *_: {})
    monkeypatch.setattr(first_run, "evaluate", evaluate)


def test_the_run_trains_on_all_samples_for_the_found_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, {"fedavg": 4})
    result = copfl.run("fedavg", "wine", **FEW)
    settings = result.experiment.settings
    assert (settings.rounds, settings.find_rounds, len(result.records)) == (4, "done", 4)
    given = copfl.run("fedavg", "wine", rounds=4, clients=3)
    assert result.records == given.records
    np.testing.assert_array_equal(result.client_model(0), given.client_model(0))


def test_training_alone_has_its_own_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, {"fedavg": 2, "fedavg alone": 3})
    result = copfl.run("fedavg", "wine", **FEW, local_baseline=True, out=tmp_path / "run")
    assert (result.experiment.settings.rounds, result.experiment.settings.rounds_alone) == (2, 3)
    alone = copfl.run("local", "wine", rounds=3, clients=3)
    assert result.analysis is not None
    np.testing.assert_array_equal(result.analysis.alone, alone.final("accuracy"))
    assert len((tmp_path / "run/baseline/rounds.jsonl").read_text().splitlines()) == 3
    again = copfl.resume(tmp_path / "run")  # finished: it searches nothing
    assert again.records == result.records


def wine(rounds: int, lr: float | None = None) -> Run:
    layer: dict[str, Any] = {"data": {"name": "wine"}, "algorithm": {"name": "fedavg"}}
    return complete(
        {**layer, "run": {**FEW, "rounds": rounds}, "optimizer": {} if lr is None else {"lr": lr}}
    )


def of_folds(run: Run) -> list[Experiment]:
    room = Room.of(run)
    return [experiment_of(run, room.folds, room.samples, n) for n in range(room.folds.by_steps)]


def test_no_test_sample_decides() -> None:
    run, tested = wine(6), []
    of_run = set(np.concatenate(Room.of(run).folds.whole.train))
    for e in of_folds(run):
        partition = e.federation.partition
        assert partition.test_from == "train"
        tested.append(np.concatenate(partition.test))
        assert set(tested[-1]) <= of_run
        for train, test in zip(partition.train, partition.test, strict=True):
            assert not set(train) & set(test)
    assert len(tested) == MOST_BY_STEPS  # of few samples, several folds
    assert not set(tested[0]) & set(tested[1])


@pytest.mark.job
def test_a_lower_loss_is_found() -> None:
    rounds = with_found_rounds(wine(8)).run.rounds
    losses = dict(evaluate._curve(of_folds(wine(8)), [InMemory() for _ in range(3)], lambda: None))
    assert losses[rounds] == min(losses.values())


@pytest.mark.job
def test_the_temperature_has_the_lowest_log_loss_on_held_out_samples() -> None:
    run = wine(8, lr=1e-3)  # so that its probabilities are not sure enough
    of_run = with_found_rounds(run).run
    assert of_run.temperature < 0.95
    answers, classes = [], []
    for e in of_folds(wine(of_run.rounds, lr=1e-3)):
        models = InMemory()
        dict(evaluate._curve([e], [models], lambda: None))  # to the found round
        for n, (model, _) in models.models.items():
            test = tree.row(e.training.federation.test.rows([n]), 0)
            with torch.no_grad():
                probabilities, y = predicted(e.training.task, model, test)
            answers.append(probabilities)
            classes.append(y)
    p, y = np.concatenate(answers), np.concatenate(classes)

    def log_loss(temperature: float) -> float:
        powers = p ** (1 / temperature)
        right = np.take_along_axis(powers / powers.sum(1, keepdims=True), y[:, None], 1)
        return -float(np.log(right).sum()) + (math.log(temperature) / DEVIATION) ** 2 / 2

    assert log_loss(of_run.temperature) < min(log_loss(of_run.temperature * f) for f in (0.9, 1.1))


@pytest.mark.job
def test_clients_without_validation_samples_have_the_temperature_that_was_found(tmp_path: Path) -> None:
    found = copfl.run("fedavg", "wine", rounds=2, clients=3, temperature=0.5, out=tmp_path / "run")
    usual = copfl.run("fedavg", "wine", rounds=2, clients=3, save_models=True)
    assert found.probabilities is not None
    assert found.probabilities.temperature.tolist() == [0.5] * 3
    assert found.records == usual.records  # nothing else changes
    x = found.experiment.federation.dataset.test.x[:5]
    of_usual = usual.predict_proba(x, client=0)
    powers = of_usual**2
    expected = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(found.predict_proba(x, client=0), expected, rtol=1e-5)
    own = copfl.run("fedavg", "wine", rounds=2, clients=3, temperature=0.5, validation=0.3)
    assert own.probabilities is None or len(set(own.probabilities.temperature)) > 1


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ({}, "off"),  # the small sets have a number of rounds
        ({"data": {"name": "cifar10"}}, "off"),  # the paper's protocol
    ],
)
def test_auto_is_off_where_the_rounds_are_known(layer: dict[str, Any], expected: str) -> None:
    layers = [{"data": {"name": "wine"}, "algorithm": {"name": "fedavg"}, "run": {"find_rounds": "auto"}}]
    assert complete(*layers, layer).run.find_rounds == expected


def test_auto_searches_on_own_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "mine.npz"
    np.savez(path, x=rng.normal(size=(60, 3)).astype(np.float32), y=rng.integers(0, 2, 60))

    def found(**run: Any) -> str:
        return complete({"data": {"name": str(path)}, "run": {"find_rounds": "auto", **run}}).run.find_rounds

    assert found() == "first"
    for named in ({"rounds": 5}, {"select": "best"}, {"validation": 0.2}):
        assert found(**named) == "off"
    private: dict[str, Any] = {
        "data": {"name": str(path)},
        "privacy": {"noise": 1.0},
        "run": {"find_rounds": "auto"},
    }
    assert complete(private).run.find_rounds == "off"


def test_what_cannot_search_is_refused(tmp_path: Path) -> None:
    wine = {"data": {"name": "wine"}, "algorithm": {"name": "fedavg"}}
    private = complete({**wine, "privacy": {"noise": 1.0}, "run": FEW})
    with pytest.raises(UsageError, match="spend privacy; name the number of rounds"):
        with_found_rounds(private)
    with pytest.raises(SettingError, match="does not fit a comparison"):
        copfl.sweep(
            {"batch": [8, 16]},
            "wine",
            base_tables={"run": {"find_rounds": "first"}},
            out=tmp_path / "sweep",
            seeds=[0],
        )


def test_how_rounds_were_found_is_no_part_of_what_a_run_is() -> None:
    run = complete({"data": {"name": "wine"}, "algorithm": {"name": "fedavg"}, "run": {"rounds": 4}})
    found = dataclasses.replace(run, run=dataclasses.replace(run.run, find_rounds="done", rounds_alone=7))
    assert identity(run) == identity(found)
