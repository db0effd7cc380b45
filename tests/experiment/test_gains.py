"""What each client gains over training alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.experiment import gains, inference
from copfl.experiment.gains import Gains, similar_first
from copfl.report import run_data, sections
from tests.commands import TINY as TINY_OPTIONS
from tests.commands import called

TINY: dict[str, Any] = {"model": "mlp", "clients": 3, "rounds": 3, "mlp": {"width": 4}}
ADAM: dict[str, Any] = {"optimizer": {"name": "adam", "lr": 0.01}}


def test_share_worst_and_spread_by_hand() -> None:
    nan = np.nan
    found = Gains(np.array([0.5, 0.6, 0.7, nan]), np.full(4, nan), np.array([0.6, 0.6, 0.5, nan]))
    assert found.gain[:3].tolist() == pytest.approx([0.1, 0.0, -0.2])
    assert found.share == pytest.approx(1 / 3)
    assert found.worst == 0.5
    assert found.spread == pytest.approx(np.std([0.6, 0.6, 0.5]))


@pytest.mark.parametrize("algorithm", ["fedavg", "copfl"])
def test_alone_is_the_run_of_local_and_the_rounds_do_not_change(algorithm: str, tmp_path: Path) -> None:
    plain = copfl.run(algorithm, **TINY, **ADAM)
    result = copfl.run(algorithm, **TINY, **ADAM, local_baseline=True, out=tmp_path / "run")
    assert result.records == plain.records
    assert plain.gains is None
    epochs = result.experiment.algorithm.total_epochs
    local = copfl.run("local", **TINY, **ADAM, local={"epochs": epochs})
    assert result.gains is not None
    assert result.gains.alone.tolist() == local.accuracy[-1].tolist()
    assert result.gains.personal.tolist() == result.accuracy[-1].tolist()
    read = gains.read(tmp_path / "run")
    assert read is not None
    assert read.alone.tolist() == result.gains.alone.tolist()


def test_alone_is_the_last_evaluation_of_clients_that_are_chosen_at_random() -> None:
    how: dict[str, Any] = {**TINY, **ADAM, "clients": 5, "participation": 0.4}
    found = copfl.run("fedavg", **how, local_baseline=True).gains
    assert found is not None
    assert (np.isnan(found.alone) == np.isnan(found.personal)).all()


def test_local_training_gains_nothing() -> None:
    found = copfl.run("local", **TINY, **ADAM, local_baseline=True).gains
    assert found is not None
    assert (found.gain == 0).all()
    assert found.share == 0


def test_every_model_on_every_clients_samples(tmp_path: Path) -> None:
    result = copfl.run("fedper", **TINY, **ADAM, local_baseline=True, out=tmp_path / "run")
    assert result.analysis is not None
    cross, models = result.analysis.cross, inference.load(tmp_path / "run")
    federation = result.experiment.federation
    for row in range(3):
        for column in range(3):
            test = federation.dataset.test.take(federation.partition.test[column])
            answers = models.predict(models.client(row), test.x, test.y)
            assert cross.accuracy[row, column] == pytest.approx(answers.accuracy)


def test_neighbours_are_alike() -> None:
    pairs = np.array([[1, 0, 0.9, 0], [0, 1, 0, 0.9], [0.9, 0, 1, 0], [0, 0.9, 0, 1]])
    order = similar_first(pairs)
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 2}), frozenset({1, 3})}


def test_the_command_and_the_report_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    answer = called(
        capsys, "run", *TINY_OPTIONS, "--rounds", 2, "--new-clients", 0.4, "--clients", 4, "--out", out
    )
    assert answer.code == 0
    assert answer.out.splitlines()[2].split()[-4:] == ["after", "alone", "gain", "weight"]
    assert "clients gain; worst tenth" in answer.out
    assert "New clients: accuracy in %" in answer.out
    charts = {c.name: c for s in sections.sections(run_data.read_all([out])) for c in s.charts}
    assert {"gain", "new", "cross", "mask-overlap", "label-overlap"} <= charts.keys()
    without = tmp_path / "without"
    answer = called(capsys, "run", *TINY_OPTIONS, "--rounds", 2, "--no-local-baseline", "--out", without)
    assert "gain" not in answer.out
    assert not (without / gains.FILE).exists()
