"""Runs that take each client's best round by its validation samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.data.clients.partition import Partition
from copfl.errors import DataError, UsageError
from copfl.experiment import reading
from copfl.experiment.models.client_models import read_stage
from copfl.experiment.models.new_clients import NEW_CLIENTS
from copfl.report import summary
from tests.commands import called, found
from tests.experiment.bundle.test_bundle import samples_of
from tests.slow import slow

SMALL: dict[str, Any] = {
    "clients": 4,
    "rounds": 6,
    "model": "mlp",
    "model_options": {"width": 8},
    "lr": 0.5,  # the metrics rise and fall
    "batch": 8,
}
BEST: dict[str, Any] = {**SMALL, "select": "best"}


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> copfl.Result:
    """A run whose clients have different best rounds."""
    return copfl.run("fedper", **BEST, out=tmp_path_factory.mktemp("best") / "run")


def test_a_bundle_has_the_round_and_both_scores_of_exactly_its_model(best: copfl.Result) -> None:
    assert best.folder is not None
    assert len(set(best.rounds_taken.tolist())) > 1
    for n in range(4):
        bundle = copfl.load(best.folder, n)
        taken = bundle.description.origin.round
        record = best.records[taken - 1]
        assert record["per_client"]["accuracy_validation"][n] == max(
            record["per_client"]["accuracy_validation"][n] for record in best.records
        )
        for split in ("test", "validation"):
            x, y = samples_of(best, n, split)
            own = [score for score in bundle.description.scores if score.metric == "accuracy"]
            (score,) = [score for score in own if score.split == split]
            assert np.float32(bundle.score(bundle.outputs(x), y)) == np.float32(score.value)
            assert score.samples == len(y)
            name = "accuracy" if split == "test" else "accuracy_validation"
            assert score.value == record["per_client"][name][n] == best.final(name)[n]
        card = (best.folder / "models" / f"client-{n:04d}" / "README.md").read_text("utf-8")
        assert f"round {taken} of 6, the best on the client's validation samples" in card


def test_nobody_trains_on_a_validation_sample(best: copfl.Result) -> None:
    partition = best.experiment.federation.partition
    trained = np.concatenate(partition.train)
    assert not np.isin(np.concatenate(partition.validation), trained).any()
    whole = copfl.run("fedper", **{**SMALL, "rounds": 1}).experiment.federation.partition
    for parts in zip(partition.train, partition.validation, whole.train, strict=True):
        train, validation, before = parts
        assert sorted([*train, *validation]) == before.tolist()
        assert len(validation) == round(0.2 * len(before))


def test_what_is_trained_does_not_depend_on_the_choice(best: copfl.Result) -> None:
    last = copfl.run("fedper", **SMALL, validation=0.2)
    assert last.records == best.records
    assert last.rounds_taken.tolist() == [6] * 4
    assert last.final("accuracy").tolist() == last.records[-1]["per_client"]["accuracy"]


@pytest.mark.job
@pytest.mark.parametrize(
    "how",
    [
        {"engine": "sequential"},
        {"engine": "vmap", "chunk": 3},
        {"store": "disk"},
        pytest.param({"workers": 2}, marks=slow),
    ],
    ids=lambda how: next(iter(how.values())),
)
def test_every_engine_keeps_the_same_rounds(best: copfl.Result, how: dict[str, Any], tmp_path: Path) -> None:
    other = copfl.run("fedper", **BEST, **how, out=tmp_path / "run")
    assert other.rounds_taken.tolist() == best.rounds_taken.tolist()
    assert other.kept is not None
    stages = [other.kept.stage(n) for n in range(4)]
    assert [stage.round for stage in stages if stage is not None] == best.rounds_taken.tolist()


def test_a_stopped_run_ends_as_one_that_was_not(best: copfl.Result, tmp_path: Path) -> None:
    assert best.folder is not None

    def stop(round: Any, seconds: float) -> None:
        if round.number == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copfl.run("fedper", **BEST, checkpoint_every=2, out=tmp_path / "run", on_round=stop)
    copfl.resume(tmp_path / "run")
    assert found(tmp_path / "run") == found(best.folder)


def test_a_model_after_the_checkpoint_does_not_survive_another_course(tmp_path: Path) -> None:
    """Between two checkpoints the folder has the models of the first: the rounds after it may turn out otherwise."""

    def stop(round: Any, seconds: float) -> None:
        if round.number == 4:
            raise KeyboardInterrupt

    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        copfl.run("fedper", **BEST, checkpoint_every=3, out=path, on_round=stop)
    result = copfl.run("fedper", **{**BEST, "rounds": 3})
    for n in range(4):
        kept = read_stage(path / "models" / f"client-{n:04d}" / "weights.safetensors")
        assert kept.round == result.rounds_taken[n]


def test_a_run_ends_when_no_client_improves_and_stays_ended(tmp_path: Path) -> None:
    settings = {**BEST, "rounds": 40, "patience": 2}
    path = tmp_path / "run"
    result = copfl.run("fedper", **settings, out=path)
    count = len(result.records)
    assert result.stopped_early
    values = np.array([record["per_client"]["accuracy_validation"] for record in result.records])
    before, after = values[:-2].max(0), values[-2:].max(0)
    assert (after <= before).all()
    assert count > 3
    content = summary.as_json(result)
    assert content["stopped_early"] is True
    assert content["rounds_taken"] == result.rounds_taken.tolist()
    whole = found(path)
    copfl.resume(path)
    assert found(path) == whole
    read = reading.read(path, "run")
    assert read.ended
    assert read.stopped_early
    assert read.final("accuracy").tolist() == result.final("accuracy").tolist()


def test_patience_counts_evaluations_not_rounds(tmp_path: Path) -> None:
    result = copfl.run("fedper", **{**BEST, "rounds": 60, "patience": 2, "eval_every": 3})
    evaluated = [record for record in result.records if "accuracy_validation" in record["per_client"]]
    values = np.array([record["per_client"]["accuracy_validation"] for record in evaluated])
    assert len(result.records) == 3 * len(evaluated) < 60
    assert (values[-2:].max(0) <= values[:-2].max(0)).all()


@pytest.mark.job
def test_new_clients_have_a_validation_score(tmp_path: Path) -> None:
    result = copfl.run("fedper", **{**BEST, "rounds": 2}, new_clients=0.5, out=tmp_path / "run")
    assert result.new_clients is not None
    for place, n in enumerate(result.new_clients.clients):
        bundle = copfl.load(tmp_path / "run", n)
        own = [score for score in bundle.description.scores if score.metric == "accuracy"]
        scores = {score.split: score.value for score in own}
        x, y = samples_of(result, n, "validation")
        assert np.float32(bundle.score(bundle.outputs(x), y)) == np.float32(scores["validation"])
        assert scores["test"] == result.new_clients.accuracy["all"][place]
    stored = NEW_CLIENTS.read(tmp_path / "run")
    assert stored is not None
    assert stored.validation.tolist() == result.new_clients.validation.tolist()


def test_with_few_participants_and_a_metric_of_predictions(tmp_path: Path) -> None:
    settings = {**BEST, "clients": 8, "participation": 0.5, "task": {"metrics": ["macro_f1", "accuracy"]}}
    result = copfl.run("fedavg_ft", **settings, out=tmp_path / "run")
    for n in np.flatnonzero(result.rounds_taken).tolist():
        bundle = copfl.load(tmp_path / "run", n)
        x, y = samples_of(result, n, "validation")
        outputs = bundle.outputs(x)
        for metric in result.experiment.task.metrics:
            (score,) = [
                s for s in bundle.description.scores if (s.split, s.metric) == ("validation", metric.name)
            ]
            assert metric.of(outputs, y) == pytest.approx(score.value)


def test_the_baseline_is_judged_by_the_same_rule() -> None:
    result = copfl.run("fedper", **BEST, local_baseline=True)
    alone = copfl.run("local", **BEST)
    assert result.analysis is not None
    assert result.analysis.alone.tolist() == alone.final("accuracy").tolist()
    assert result.gains is not None
    assert result.gains.personal.tolist() == result.final("accuracy").tolist()


def test_the_table_says_which_rounds_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "run",
        "-a",
        "fedper",
        "-n",
        "4",
        "-r",
        "3",
        "-m",
        "mlp",
        "--select",
        "best",
        "--no-local-baseline",
        "--set",
        "model.width=8",
    ]
    answer = called(capsys, *words, "--validation", "0.25", "--verbose", "--out", tmp_path / "run")
    printed = " ".join(answer.out.split())
    assert "each site's best round on its validation samples: rounds" in printed
    assert "validation: 0.25 of each client's train samples" in printed
    content = json.loads(called(capsys, *words, "--json", "--out", tmp_path / "json").out)
    assert content["select"] == "best"
    assert len(content["clients"]["accuracy_validation"]) == 4


@pytest.mark.job
def test_in_a_comparison_a_row_has_the_chosen_rounds(tmp_path: Path) -> None:
    run: dict[str, Any] = {"clients": 4, "rounds": 4, "batch": 64, "select": "best"}
    base = {"run": run, "model": {"name": "mlp", "width": 8}}
    tune = {"lr": [0.3, 0.03]}
    table = copfl.compare(["fedper", "local"], base_tables=base, seeds=[1], out=tmp_path / "out", tune=tune)
    assert "best round on its validation samples" in str(table)
    for row in table.rows:
        result = copfl.run(
            row.label, optimizer=row.optimizer, **run, seed=1, model="mlp", model_options={"width": 8}
        )
        assert row.outcomes[0].clients["accuracy"] == pytest.approx(result.final("accuracy").tolist())
    with pytest.raises(UsageError, match=r"run\.patience.*equal rounds"):
        copfl.compare(["fedper"], base_tables={"run": {**run, "patience": 2}}, seeds=[0], out=tmp_path / "p")


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(UsageError, match=r'needs run\.select="best"'):
        copfl.run("fedper", **SMALL, patience=3)
    with pytest.raises(UsageError, match=r"run\.validation"):
        copfl.run("fedper", **SMALL, validation=1.0)
    one_each = Partition(
        tuple(np.array([n]) for n in range(3)), tuple(np.array([n]) for n in range(3)), "by hand"
    )
    with pytest.raises(DataError, match="no client has two train samples"):
        copfl.run("fedper", **{**BEST, "clients": 3}, partition=one_each)
