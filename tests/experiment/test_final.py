"""Clients that no round evaluated: with partial participation, they are evaluated when the run ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl.core import tree
from copfl.core.evaluation import primary_metrics
from copfl.core.task import Personal
from copfl.errors import RunError
from copfl.experiment import reading
from copfl.experiment.final import FINAL, in_words
from copfl.experiment.models.client_models import RECEIVED, TRAINED
from copfl.experiment.records import FinalEvaluation, latest
from tests.commands import files

SMALL: dict[str, Any] = {
    "clients": 20,
    "rounds": 4,
    "participation": 0.1,
    "model": "mlp",
    "model_options": {"width": 8},
    "local_baseline": False,
    "rivals": False,
    "seed": 0,
}


def run(algorithm: Any = "fedper", **settings: Any) -> copfl.Result:
    return copfl.run(algorithm, **{**SMALL, **settings})


@pytest.fixture(scope="module", params=[1, 4])
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> copfl.Result:
    return run(eval_every=request.param, out=tmp_path_factory.mktemp("some") / "run")


def kept(result: copfl.Result, client: int) -> tuple[Personal, str]:
    """The model that a client gets, and its stage."""
    assert result.kept is not None
    found = result.kept.get(client)
    assert found is not None
    return found.model, found.stage.name


def of(result: copfl.Result) -> FinalEvaluation:
    assert result.final_evaluation is not None
    return result.final_evaluation


@pytest.mark.job
def test_every_client_has_the_value_of_the_model_that_it_gets(result: copfl.Result) -> None:
    """The oracle: its model is evaluated directly, on its test samples."""
    task, federation = result.experiment.training[:2]
    values = result.final("accuracy")
    for n in range(20):
        data = tree.row(federation.test.rows([n]), 0)
        with torch.no_grad():
            (alone,) = primary_metrics(task, kept(result, n)[0], [data])
        assert np.float32(values[n]) == np.float32(alone)
    of_none = [n for n in range(20) if kept(result, n)[1] == RECEIVED]
    assert of(result).clients == of_none
    evaluated = np.flatnonzero(~np.isnan(latest(result.records, "accuracy", 20)))
    assert sorted([*of_none, *evaluated]) == list(range(20))
    assert all(kept(result, int(n))[1] == TRAINED for n in evaluated)


def test_who_never_trained_is_said_and_the_report_has_the_same_values(result: copfl.Result) -> None:
    took_part = {n for record in result.records for n in record["clients"]}
    assert of(result).never_trained == sorted({*range(20)} - took_part)
    assert result.folder is not None
    read = reading.read(result.folder, "run")
    for name in ("accuracy", "accuracy_before", "accuracy_global", "test_loss", "loss"):
        np.testing.assert_array_equal(read.final(name), result.final(name))
    assert read.final_evaluation is not None
    assert read.final_evaluation.never_trained == of(result).never_trained


def test_by_hand() -> None:
    """Client 1 of three was in a round that nobody evaluated, client 2 in none."""
    found = FinalEvaluation(2, [1, 2], {"accuracy": np.array([0.5, np.nan])}, [2])
    assert found.completed(np.array([1.0, np.nan, np.nan]), "accuracy")[:2].tolist() == [1.0, 0.5]
    assert found.completed(np.array([1.0, 2.0, 3.0]), "loss").tolist() == [1.0, 2.0, 3.0]
    assert in_words(found, ["a", "b", "c"]) == (
        "2 of 3 sites were in no evaluated round; their values are of the model that they have after the last "
        "one, before local training; never trained: c"
    )
    assert in_words(FinalEvaluation(2, [], {}, []), ["a"]) == in_words(None, []) == ""


def test_a_client_that_never_trained_alone_has_no_model() -> None:
    """One that trained in a round without an evaluation has: its record."""
    alone = run("local", eval_every=4)
    without = set(of(alone).never_trained)
    assert without
    assert without.isdisjoint(of(alone).clients)
    assert set(np.flatnonzero(np.isnan(alone.final("accuracy")))) == without
    assert "get no model" in in_words(alone.final_evaluation, alone.client_names)
    compared = run("fedper", eval_every=4, local_baseline=True)
    assert compared.gains is not None
    assert set(np.flatnonzero(np.isnan(compared.gains.alone))) == without
    assert not np.isnan(compared.gains.personal).any()


def test_full_participation_leaves_nobody_out(tmp_path: Path) -> None:
    whole = run(clients=3, rounds=2, participation=1.0, out=tmp_path / "run")
    assert whole.final_evaluation is None
    assert not (tmp_path / "run" / FINAL.file).exists()


def test_the_best_round_counts_where_there_is_one() -> None:
    best = run(select="best", validation=0.2)
    assert not np.isnan(best.final("accuracy")).any()
    assert not np.isnan(best.final("accuracy_validation")).any()
    assert of(best).clients == np.flatnonzero(best.rounds_taken == 0).tolist()


def test_a_stopped_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def stop(round: Any, seconds: float) -> None:
        if round.number == 1:
            raise Killed

    whole = run(out=tmp_path / "whole", checkpoint_every=2)
    with pytest.raises(Killed):
        run(out=tmp_path / "stopped", checkpoint_every=2, on_round=stop)
    assert not (tmp_path / "stopped" / FINAL.file).exists()
    resumed = copfl.resume(tmp_path / "stopped")
    same = [name for name in files(tmp_path / "whole") if name.startswith("models/")]
    for name in (FINAL.file, "rounds.jsonl", *same):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    np.testing.assert_array_equal(resumed.final("accuracy"), whole.final("accuracy"))
    # A run that goes on makes the file again; until then, it is of other rounds.
    (tmp_path / "whole" / FINAL.file).unlink()
    assert of(copfl.resume(tmp_path / "whole")).round == 4
    assert FINAL.read(tmp_path / "whole", 5, 20) is None
    assert of(copfl.resume(tmp_path / "whole", rounds=5)).round == 5


def test_both_engines_measure_the_same() -> None:
    one, other = (run(engine=engine, eval_every=4) for engine in ("sequential", "vmap"))
    assert of(one).clients == of(other).clients
    np.testing.assert_allclose(one.final("test_loss"), other.final("test_loss"), rtol=1e-4)


def test_an_attacker_is_not_evaluated() -> None:
    attacked = run(attack="sign_flip", attack_options={"fraction": 0.3})
    attackers = attacked.experiment.about()["attackers"]
    assert set(of(attacked).clients).isdisjoint(attackers)


@pytest.mark.parametrize(
    "changed",
    [
        {"clients": [0, 0]},
        {"clients": [20]},
        {"clients": ["0"]},
        {"values": {"accuracy": [0.5]}},
        {"values": [[]]},
        {"never_trained": [-1]},
        {"round": "x"},
    ],
)
def test_a_damaged_file_is_an_error(changed: dict[str, Any], tmp_path: Path) -> None:
    right = {"round": 4, "clients": [1, 2], "values": {"accuracy": [0.5, None]}, "never_trained": [2]}
    (tmp_path / FINAL.file).write_text(json.dumps(right))
    assert FINAL.read(tmp_path, 4, 20) is not None
    (tmp_path / FINAL.file).write_text(json.dumps(right | changed))
    with pytest.raises(RunError, match="delete it"):
        FINAL.read(tmp_path, 4, 20)


@pytest.mark.job
def test_a_saved_result_has_the_file(result: copfl.Result, tmp_path: Path) -> None:
    assert result.folder is not None
    original = (result.folder / FINAL.file).read_bytes()
    folder = result.folder
    result.save(tmp_path / "saved")
    result.folder = folder
    assert (tmp_path / "saved" / FINAL.file).read_bytes() == original
    shutil.rmtree(tmp_path / "saved")


def test_a_bundle_has_the_value_as_its_score(result: copfl.Result) -> None:
    assert result.folder is not None
    for n in of(result).clients:
        scores = copfl.load(result.folder, n).description.scores
        assert [score.value for score in scores if score.metric == "accuracy"] == [
            result.final("accuracy")[n]
        ]
