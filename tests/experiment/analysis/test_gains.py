"""What each client gains over training alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl.charts import Heat
from copfl.core.task import Data
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.experiment import reading
from copfl.experiment.analysis import gains
from copfl.experiment.analysis.gains import GAINS, Gains, similar_first
from copfl.experiment.folder import BASELINE, RunFolder
from copfl.measures.metrics import METRICS
from copfl.report import page
from tests.commands import TINY as TINY_OPTIONS
from tests.commands import called

TINY: dict[str, Any] = {"model": "mlp", "clients": 3, "rounds": 3, "model_options": {"width": 4}}
ADAM: dict[str, Any] = {"optimizer": {"name": "adam", "lr": 0.01}}


def test_share_worst_and_spread_by_hand() -> None:
    nan = np.nan
    found = Gains(np.array([0.5, 0.6, 0.7, nan]), np.full(4, nan), np.array([0.6, 0.6, 0.5, nan]))
    assert found.gain[:3].tolist() == pytest.approx([0.1, 0.0, -0.2])
    assert found.share == pytest.approx(1 / 3)
    assert found.worst == 0.5
    assert found.spread == pytest.approx(np.std([0.6, 0.6, 0.5]))


def test_constant_answers_by_hand() -> None:
    """Client 0 trains on classes 0 0 1 and is tested on 0 1 1 1; client 1 has labels of its own, exchanged."""
    y, tested = np.array([0, 0, 1, 0, 1, 1]), np.array([0, 1, 1, 1, 0, 0])
    samples, test = Samples(np.zeros((6, 1), np.float32), y), Samples(np.zeros((6, 1), np.float32), tested)
    dataset = Dataset("d", samples, test, ("a", "b"))
    train, tests = (np.arange(3), np.arange(3, 6)), (np.arange(4), np.arange(4, 6))
    partition = Partition(train, tests, "iid", {}, labels=np.array([[0, 1], [1, 0]]))
    federation = FederatedData(dataset, partition)
    assert gains.constant_answers(federation, METRICS["accuracy"]).tolist() == [0.25, 0.0]
    auc = gains.constant_answers(federation, METRICS["auc"])
    assert auc[0] == 0.5
    assert np.isnan(auc[1])  # its test samples are of one class
    values = Dataset(
        "d",
        Samples(samples.x, np.array([1.0, 2.0, 3.0, 0.0, 0.0, 0.0], np.float32)),
        Samples(test.x, np.array([2.0, 2.0, 2.0, 4.0, 0.0, 0.0], np.float32)),
        ("v",),
        kind="regression",
    )
    found = gains.constant_answers(FederatedData(values, Partition(train, tests, "iid")), METRICS["rmse"])
    assert found.tolist() == [1.0, 0.0]


@pytest.mark.job
@pytest.mark.parametrize("algorithm", ["fedavg", "copfl"])
def test_alone_is_the_run_of_local_and_the_rounds_do_not_change(algorithm: str, tmp_path: Path) -> None:
    plain = copfl.run(algorithm, **TINY, **ADAM)
    result = copfl.run(algorithm, **TINY, **ADAM, local_baseline=True, out=tmp_path / "run")
    assert result.records == plain.records
    assert plain.gains is None
    epochs = result.experiment.algorithm.total_epochs
    local = copfl.run("local", **TINY, **ADAM, epochs=epochs)
    assert result.gains is not None
    assert result.gains.alone.tolist() == local.accuracy[-1].tolist()
    assert result.gains.personal.tolist() == result.accuracy[-1].tolist()
    read = GAINS.read(tmp_path / "run")
    assert read is not None
    assert read.alone.tolist() == result.gains.alone.tolist()
    assert read.constant.tolist() == pytest.approx([1 / 3] * 3)  # of three classes, as many samples of each


def test_alone_has_the_add_ons_of_the_run() -> None:
    addons: dict[str, Any] = {"addons": {"ema": 0.5}}
    found = copfl.run("fedavg", **TINY, **ADAM, **addons, local_baseline=True).gains
    assert found is not None
    assert found.alone.tolist() == copfl.run("local", **TINY, **ADAM, **addons).accuracy[-1].tolist()


def test_the_file_of_the_baseline_trains_alone_as_the_run_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `report.summary.advice` names: FedPAC has two epochs and may have an average, `-a local` neither."""
    averaged: dict[str, Any] = {"addons": {"ema": 0.5}}
    gained = copfl.run("fedpac", **TINY, lr=0.01, **averaged, local_baseline=True, out=tmp_path / "run").gains
    assert gained is not None
    file = tmp_path / "run" / BASELINE / "run.toml"
    assert called(capsys, "run", "-c", file, "-q", "-o", tmp_path / "alone").code == 0
    repeated = GAINS.read(tmp_path / "alone")
    assert repeated is not None
    assert repeated.alone.tolist() == gained.alone.tolist()
    assert copfl.run("local", **TINY, lr=0.01).accuracy[-1].tolist() != gained.alone.tolist()


def test_alone_is_the_last_evaluation_of_clients_that_are_chosen_at_random(tmp_path: Path) -> None:
    how: dict[str, Any] = {**TINY, **ADAM, "clients": 5, "participation": 0.4, "local_baseline": True}
    result = copfl.run("fedavg", **how)
    found, late = result.gains, result.final_evaluation
    assert found is not None
    assert late is not None
    assert np.flatnonzero(np.isnan(found.alone)).tolist() == late.never_trained  # nobody has trained them
    assert not np.isnan(found.personal).any()
    on_disk = copfl.run("fedavg", **how, store="disk", out=tmp_path / "run").gains
    assert on_disk is not None
    np.testing.assert_array_equal(on_disk.alone, found.alone)


def test_local_training_gains_nothing() -> None:
    found = copfl.run("local", **TINY, **ADAM, local_baseline=True).gains
    assert found is not None
    assert (found.gain == 0).all()
    assert found.share == 0


def test_every_model_on_every_clients_samples(tmp_path: Path) -> None:
    result = copfl.run("fedper", **TINY, **ADAM, local_baseline=True, out=tmp_path / "run")
    assert result.analysis is not None
    cross, models = result.analysis.cross, [copfl.load(tmp_path / "run", n) for n in range(3)]
    federation = result.experiment.federation
    for row in range(3):
        for column in range(3):
            test = federation.dataset.test.take(federation.partition.test[column])
            score = models[row].score(models[row].outputs(test.x), test.y)
            assert cross.values[row, column] == pytest.approx(score)
    y = [federation.dataset.test.take(federation.partition.test[n]).y for n in range(3)]
    right, tested = np.array(cross.per_class).T
    assert tested.tolist() == np.bincount(np.concatenate(y), minlength=10).tolist()
    own = [cross.values[n, n] * len(y[n]) for n in range(3)]
    assert right.sum() == pytest.approx(sum(own))


def test_neighbours_are_alike() -> None:
    pairs = np.array([[1, 0, 0.9, 0], [0, 1, 0, 0.9], [0.9, 0, 1, 0], [0, 0.9, 0, 1]])
    order = similar_first(pairs)
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 2}), frozenset({1, 3})}


@pytest.mark.job
def test_the_command_and_the_report_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    answer = called(
        capsys,
        "run",
        "-a",
        "copfl",
        "-d",
        "digits",
        *TINY_OPTIONS,
        "--rounds",
        2,
        "--new-clients",
        0.4,
        "--clients",
        4,
        "--verbose",
        "--out",
        out,
    )
    assert answer.code == 0
    details = answer.out.partition("\nDetails\n")[2].splitlines()
    assert details[3].split()[-5:] == ["alone", "global", "personal", "gain", "weight"]
    assert "sites gain over training" in answer.out.replace("\n", " ")
    assert "New sites: accuracy in %" in answer.out
    charts = {c.name: c for s in page.sections(reading.read_all([out])) for c in s.charts}
    assert {"gain", "new", "cross", "mask-overlap", "label-overlap"} <= charts.keys()
    without = tmp_path / "without"
    answer = called(capsys, "run", *TINY_OPTIONS, "--rounds", 2, "--no-local-baseline", "--out", without)
    assert "gain" not in answer.out
    assert not (without / GAINS.file).exists()


def test_a_stopped_local_baseline_continues_to_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {**TINY, **ADAM, "local_baseline": True, "checkpoint_every": 1}
    copfl.run("fedavg", **how, out=tmp_path / "whole")
    append, trained = RunFolder.append, list[int]()

    def stopped(folder: RunFolder, record: dict[str, Any], seconds: float) -> None:
        if folder.path.name == BASELINE:
            trained.append(record["round"])
            if trained == [1, 2, 3]:
                raise KeyboardInterrupt
        append(folder, record, seconds)

    monkeypatch.setattr(RunFolder, "append", stopped)
    with pytest.raises(KeyboardInterrupt):
        copfl.run("fedavg", **how, out=tmp_path / "stopped")
    assert not (tmp_path / "stopped" / GAINS.file).exists()
    copfl.resume(tmp_path / "stopped")
    assert trained == [1, 2, 3, 3]
    for name in (
        GAINS.file,
        "rounds.jsonl",
        f"{BASELINE}/rounds.jsonl",
        "models/client-0000/weights.safetensors",
    ):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.job
def test_the_matrix_of_a_regression_is_of_its_metric(tmp_path: Path) -> None:
    how: dict[str, Any] = {"rounds": 1, "clients": 3, "model": "mlp", "model_options": {"width": 4}}
    result = copfl.run("fedavg", "diabetes", **how, local_baseline=True, out=tmp_path / "run")
    assert result.analysis is not None
    cross, test = result.analysis.cross, result.experiment.federation
    samples = test.dataset.test.take(test.partition.test[1])
    errors = copfl.load(tmp_path / "run", 0).outputs(samples.x)[:, 0] - samples.y.ravel()
    assert cross.metric == "rmse"
    assert cross.values[0, 1] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-5)
    read = GAINS.read(tmp_path / "run")
    assert read is not None
    assert read.cross.metric == "rmse"
    charts = {c.name: c for s in page.sections(reading.read_all([tmp_path / "run"])) for c in s.charts}
    heat = charts["cross"]
    assert isinstance(heat, Heat)
    assert heat.low_is_bright
    assert "RMSE" in heat.about
    assert heat.unit == ""


def test_the_samples_of_the_matrix_are_evenly_chosen() -> None:
    """Stored class by class: 150 of class 0, 50 of class 1, 100 of class 2. Ten are 5, 2 and 3 of them."""
    y = torch.tensor([0] * 150 + [1] * 50 + [2] * 100)
    data = Data(torch.arange(300), y, torch.tensor(300))
    chosen = gains.evenly_chosen(data, 10)
    assert torch.bincount(chosen.y).tolist() == [5, 2, 3]
    assert chosen.y.tolist() == y[chosen.x].tolist()
    assert int(chosen.size) == 10
    values = gains.evenly_chosen(data._replace(y=y.float()), 3)
    assert values.x.tolist() == [0, 100, 200]
    padded = gains.evenly_chosen(data._replace(size=torch.tensor(2)), 10)
    assert padded.x.tolist() == [0, 1]
    assert gains.evenly_chosen(data._replace(size=torch.tensor(0)), 10).x.tolist() == []


def test_with_data_sorted_by_class_the_matrix_and_the_table_have_every_class() -> None:
    rng = np.random.default_rng(0)
    y, y_test = np.repeat(np.arange(3), 20), np.repeat(np.arange(3), 80)
    x, x_test = (np.eye(3)[labels] + 0.1 * rng.normal(size=(len(labels), 3)) for labels in (y, y_test))
    arrays = (x.astype(np.float32), y, x_test.astype(np.float32), y_test)
    result = copfl.run(
        "fedavg", arrays, model="mlp", clients=1, partition="iid", rounds=2, local_baseline=True
    )
    assert result.analysis is not None
    assert [tested for _, tested in result.analysis.cross.per_class] == [80, 80, 80]
    right = sum(right for right, _ in result.analysis.cross.per_class)
    assert right / 240 == pytest.approx(result.latest("accuracy")[0])


def test_neighbours_are_alike_where_low_is_better() -> None:
    errors = np.array([[1, 9, 2, 9], [9, 1, 9, 2], [2, 9, 1, np.nan], [9, 2, 9, 1]])
    order = similar_first(errors, METRICS["rmse"])
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 2}), frozenset({1, 3})}
