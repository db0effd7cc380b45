"""Survival in a run: what is learned, what is reported, and what does not apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.errors import CopflError, DataError
from tests.commands import called
from tests.data.test_survival import cohort, in_stretches, written

QUICK: dict[str, Any] = {"rounds": 3, "model": "linear", "engine": "vmap", "target": "years", "event": "died"}
QUICK |= {"client": "site", "lr": 0.05, "batch_size": 8, "rivals": False}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("survival") / "cohort.csv", cohort(240))


@pytest.mark.parametrize("task", [{}, {"loss": "discrete_time", "cuts": [0.5, 1, 2]}, {"ties": "breslow"}])
def test_the_order_of_the_events_is_learned(table: Path, task: dict[str, Any]) -> None:
    result = copfl.run("fedavg", table, **QUICK, task=task)
    assert result.primary.name == "c_index"
    last = result.final("c_index")
    assert last.shape == (3,)
    assert (last > 0.65).all()
    assert np.isfinite(result.final("test_loss")).all()


@pytest.mark.job
@pytest.mark.parametrize("task", [{}, {"loss": "discrete_time", "cuts": [0.5, 1, 2]}])
def test_a_patient_may_have_several_rows(
    tmp_path: Path, task: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    table = written(tmp_path / "stretches.csv", in_stretches(cohort(240)))
    columns = {"start": "since", "group": "patient", "task": task, "rivals": True}
    result = copfl.run("fedavg", table, **QUICK | columns, out=tmp_path / "run")
    assert (result.final("c_index") > 0.65).all()
    assert result.rivals is not None
    assert (result.rivals.best > 0.6).all()
    assert result.survival is not None
    assert np.isnan(result.survival.brier).all()
    assert [third.name for third in result.survival.thirds] == ["low risk", "medium risk", "high risk"]
    bundle = copfl.load(tmp_path / "run", 0)
    probabilities = bundle.predict_survival({"age": [50.0, 70.0], "dose": [0.0, 0.0]}, [0.5])[:, 0]
    assert probabilities[0] > probabilities[1]
    done = called(capsys, "evaluate", tmp_path / "run", "--client", 0, "--data", table)
    assert "C-index" in done.out, done.err


def test_without_a_comparable_pair_a_client_is_left_out_of_the_mean(tmp_path: Path) -> None:
    columns = cohort(240)
    columns["died"] = np.where(columns["site"] == 1, 0.0, columns["died"])
    result = copfl.run("fedavg", written(tmp_path / "t.csv", columns), **QUICK, out=str(tmp_path / "run"))
    found = result.final("c_index")
    assert np.isnan(found[1])
    assert np.isfinite(found[[0, 2]]).all()
    assert np.isfinite(result.records[-1]["mean"]["c_index"])


@pytest.mark.job
def test_sites_alone_have_a_curve_and_coxs_model(table: Path) -> None:
    result = copfl.run("fedavg", table, **QUICK | {"rivals": True, "rounds": 1})
    rivals = result.rivals
    assert rivals is not None
    assert list(rivals.values) == ["constant", "linear"]
    assert rivals.chosen == "linear"
    assert not rivals.left_out
    assert (rivals.constant == 0.5).all()
    assert (rivals.best > 0.6).all()


def test_without_an_event_nothing_can_be_learned(tmp_path: Path) -> None:
    columns = cohort()
    columns["died"][:] = 0
    with pytest.raises(DataError, match="all times are censored"):
        copfl.run("fedavg", written(tmp_path / "t.csv", columns), **QUICK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": {"loss": "squared"}}, "not defined for survival; defined are cox, discrete_time"),
        ({"task": {"loss": "discrete_time"}}, "cuts"),
        ({"task": {"label_smoothing": 0.1}}, "is no option of a survival task"),
        ({"task": {"metrics": ["auc"]}}, "not defined for survival; defined are c_index"),
        ({"algorithm": "fedpac"}, "this task is survival"),
        ({"algorithm": "fedrod", "model": "mlp"}, "this task is survival"),
        ({"algorithm": "levels", "lr": None}, "predicts values by squared error"),
        (
            {"algorithm": "trees", "model": "trees", "lr": None},
            "trees predict values by squared or absolute error",
        ),
    ],
)
def test_what_does_not_apply_is_refused(table: Path, change: dict[str, Any], message: str) -> None:
    given = {"algorithm": "fedavg", **QUICK, **change}
    with pytest.raises(CopflError, match=message):
        copfl.run(given.pop("algorithm"), table, **given)


@pytest.mark.job
def test_a_comparison_a_sweep_and_an_audit(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["-d", table, "--target", "years", "--event", "died", "--client", "site", "-r", 2]
    data += ["--engine", "sequential"]
    words = [*data, "-a", "fedavg,local", "--seeds", 0, "--no-tune", "--no-plots", "--out", tmp_path / "both"]
    compared = called(capsys, "compare", *words)
    assert compared.code == 0, compared.err
    assert "C-index" in compared.out
    assert "Cox's model with a ridge" in " ".join(compared.out.split())
    words = [
        *data,
        "-a",
        "fedavg",
        "--over",
        "lr=0.01,0.1",
        "--seeds",
        0,
        "--no-plots",
        "--out",
        tmp_path / "sweep",
    ]
    swept = called(capsys, "sweep", *words)
    assert swept.code == 0, swept.err
    assert "C-index" in swept.out
    (run,) = (tmp_path / "both" / "runs").glob("fedavg*")
    audited = called(capsys, "audit", run)
    assert audited.code == 0, audited.err
    assert "points of C-index" in audited.out
    assert called(capsys, "report", tmp_path / "both", "--out", tmp_path / "page.html").code == 0
