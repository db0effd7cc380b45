"""Bundles of survival: probabilities at times, medians, files of other programs, new sites."""

from __future__ import annotations

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import copfl
from copfl.errors import CopflError, UsageError
from copfl.experiment import survival
from copfl.experiment.bundle.places import FILE
from copfl.experiment.models.client_models import WEIGHTS
from copfl.experiment.reading import read_all
from copfl.experiment.survival import SURVIVAL
from copfl.measures.survival import baseline_hazard
from copfl.report.page import sections
from tests.commands import called
from tests.data.test_survival import cohort, written
from tests.hostile import COUNT, json_versions

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "engine": "vmap",
    "target": "years",
    "event": "died",
    "client": "site",
}
SETTINGS |= {"lr": 0.05, "batch_size": 8, "rivals": False}
DISCRETE: dict[str, Any] = {"loss": "discrete_time", "cuts": [0.5, 1.0, 2.0]}
TIMES = [0.5, 1.0, 2.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("survival")
    table = written(path / "cohort.csv", cohort(240))
    copfl.run("fedavg", table, **SETTINGS, out=path / "cox")
    copfl.run("apfl", table, **SETTINGS, task=DISCRETE, out=path / "discrete")
    written(path / "new.csv", {k: v for k, v in cohort(40, seed=1).items() if k != "site"})
    return path


def rows(folder: Path) -> dict[str, Any]:
    with (folder / "new.csv").open() as file:
        lines = list(csv.DictReader(file))
    return {name: [float(line[name]) for line in lines] for name in ("age", "dose")}


def test_the_baseline_hazard_is_breslows_of_the_site(folder: Path) -> None:
    result = copfl.run("fedavg", folder / "cohort.csv", **SETTINGS)
    bundle, federation = result.bundle(1), result.experiment.federation
    train = federation.dataset.train.take(federation.partition.train[1])
    curve, hazard = baseline_hazard(bundle.outputs(train.x)[:, 0], train.y), bundle.description.output.hazard
    assert hazard is not None
    np.testing.assert_allclose(hazard.times, curve.times)
    np.testing.assert_allclose(hazard.values, curve.values, rtol=1e-5)
    assert hazard.followed == train.y[:, 0].max()
    assert copfl.load(folder / "cox", 1).description.output.hazard == hazard


@pytest.mark.parametrize("run", ["cox", "discrete"])
def test_probabilities_fall_with_time_and_risk(run: str, folder: Path) -> None:
    bundle, new = copfl.load(folder / run, 0), rows(folder)
    risk, probabilities = bundle.predict(new), bundle.predict_survival(new, TIMES)
    assert risk.shape == (40,)
    assert (np.diff(probabilities, axis=1) <= 0).all()
    assert (probabilities > 0).all()
    assert (probabilities < 1).all()
    assert np.isnan(bundle.predict_survival(new, [99.0])).all()
    medians = bundle.predict_median(new)
    for n in np.flatnonzero(np.isfinite(medians)):
        after = bundle.predict_survival({name: [own[n]] for name, own in new.items()}, [medians[n]])[0, 0]
        assert after <= 0.5 + 1e-6
    if run == "cox":
        order = np.argsort(risk)
        assert (np.diff(probabilities[order], axis=0) <= 0).all()
        assert (np.diff(medians[order][np.isfinite(medians[order])]) <= 0).all()


def test_the_global_model_has_risks_alone(folder: Path) -> None:
    bundle = copfl.load(folder / "cox", "global")
    assert bundle.predict(rows(folder)).shape == (40,)
    with pytest.raises(UsageError, match="no baseline hazard"):
        bundle.predict_survival(rows(folder), [1.0])
    assert copfl.load(folder / "discrete", "global").predict_survival(rows(folder), [1.0]).shape == (40, 1)


def test_what_is_no_prediction_of_survival_is_refused(folder: Path) -> None:
    bundle = copfl.load(folder / "cox", 0)
    with pytest.raises(UsageError, match="use predict_survival"):
        bundle.predict_proba(rows(folder))
    with pytest.raises(UsageError, match="time"):
        bundle.predict_survival(rows(folder), [-1.0])
    with pytest.raises(UsageError, match="no estimator of survival"):
        bundle.estimator()


def test_the_commands_predict_and_evaluate(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    new, bundle = folder / "new.csv", copfl.load(folder / "cox", 0)
    words: list[Any] = ["predict", folder / "cox", "--client", 0, "--data", new, "--times", "0.5,1"]
    done = called(capsys, *words, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    np.testing.assert_allclose(found["prediction"], bundle.predict(rows(folder)))
    np.testing.assert_allclose(found["survival_0.5"], bundle.predict_survival(rows(folder), [0.5])[:, 0])
    assert found["c_index"] > 0.6
    assert called(capsys, *words, "--out", tmp_path / "answers.csv").code == 0
    head = (tmp_path / "answers.csv").read_text().splitlines()[0]
    assert head == "row,prediction,survival_0.5,survival_1,median"
    assert called(capsys, *words, "--out", tmp_path / "answers.npz").code == 0
    assert np.load(tmp_path / "answers.npz")["survival_1"].shape == (40,)
    done = called(capsys, "evaluate", folder / "cox", "--client", 0, "--data", new)
    assert "C-index" in done.out, done.err
    refused = called(capsys, *words[:-1], "soon")
    assert "--times are numbers with commas" in refused.err


@pytest.mark.job
@pytest.mark.usefixtures("one_onnx_table")
@pytest.mark.parametrize("run", ["cox", "discrete"])
def test_other_programs_get_the_same_outputs(
    run: str, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The export compares the file's outputs with the model's, and fails where they differ."""
    files = {"onnx": "model.onnx", "torch": "model.pt2", "mlflow": "mlflow", "bundle": "bundle"}
    for kind, name in files.items():
        done = called(
            capsys, "export", folder / run, "--client", 0, "--format", kind, "--out", tmp_path / name
        )
        assert done.code == 0, done.err
    again = copfl.load(tmp_path / "bundle")
    np.testing.assert_array_equal(
        again.predict_survival(rows(folder), TIMES),
        copfl.load(folder / run, 0).predict_survival(rows(folder), TIMES),
    )


def test_a_new_site_has_its_own_hazard(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["personalize", folder / "cox", "--data", folder / "new.csv", "--epochs", 1, "--lr", 0.01]
    done = called(capsys, *words, "--out", tmp_path / "model")
    assert done.code == 0, done.err
    assert copfl.load(tmp_path / "model").has_curve


def test_the_run_says_what_probabilities_are_worth(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for run in ("cox", "discrete"):
        found = SURVIVAL.read(folder / run)
        assert found is not None
        assert (found.brier < 0.25).all()
        assert (found.gains > 0).any()
        assert [third.name for third in found.thirds] == ["low risk", "medium risk", "high risk"]
        assert "integrated Brier score" in survival.in_words(found)[0]
        assert [one.name for one in found.sites] == ["0", "1", "2"]
        assert sum(one.samples for one in found.sites) == 240
        assert found.calibration is not None
        assert sum(group.samples for group in found.calibration.groups) == sum(
            one.samples for one in found.thirds
        )
        predicted = [group.predicted for group in found.calibration.groups]
        assert predicted == sorted(predicted)
        assert found.calibration.error < 0.25
        assert "points from Kaplan and Meier's share" in survival.in_words(found)[-1]
        page = sections(read_all([folder / run]))
        (section,) = (one for one in page if one.name == "survival")
        assert [chart.name for chart in section.charts] == [
            "kaplan-meier",
            "kaplan-meier-clients",
            "calibration-horizon",
            "brier",
        ]
    done = called(capsys, "report", folder / "cox", "--out", tmp_path / "page.html")
    assert done.code == 0, done.err
    assert "Survival by predicted risk" in (tmp_path / "page.html").read_text()


def test_the_calibration_by_hand() -> None:
    """Twenty samples in two groups: of the ten of low risk two had the event by 1, of the others all."""
    probability = np.repeat([0.1, 0.9], 10)
    time = np.concatenate([[0.5, 0.5], np.full(8, 2.0), np.full(10, 0.5)])
    targets = np.stack([time, time < 1], 1)
    order = np.random.default_rng(0).permutation(20)
    parts = [(probability[some], targets[some]) for some in np.array_split(order, 3)]
    found = survival._at_horizon(np.array([1.0]), parts)
    assert found is not None
    low, high = found.groups
    assert (low.samples, high.samples) == (10, 10)
    assert [low.predicted, high.predicted] == pytest.approx([0.1, 0.9])
    assert low.observed == pytest.approx(0.2)
    assert low.low < 0.2 < low.high
    assert (high.observed, high.low, high.high) == (1, 1, 1)
    assert found.error == pytest.approx(0.1)
    # Who is censored before the horizon counts by the others, and what nobody was followed to is not known.
    targets[targets[:, 0] > 1] = [0.9, 0]
    (group,) = survival._at_horizon(np.array([1.0]), [(probability, targets)]).groups  # type: ignore[union-attr]
    assert group.predicted == pytest.approx(0.9)
    assert survival._at_horizon(np.array([1.0]), [(probability[:9], targets[:9])]) is None
    assert (
        survival._at_horizon(np.array([1.0]), [(probability, np.column_stack([targets, targets[:, 0] / 2]))])
        is None
    )


def test_a_curve_with_more_times_than_values_is_refused(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "cox" / SURVIVAL.file).read_text())
    content["thirds"][0]["times"].append(1.0)
    (tmp_path / SURVIVAL.file).write_text(json.dumps(content))
    with pytest.raises(copfl.errors.RunError, match="different lengths"):
        SURVIVAL.read(tmp_path)


def test_a_hazard_that_falls_is_refused(folder: Path, tmp_path: Path) -> None:
    copfl.load(folder / "cox", 0).save(tmp_path / "model")
    path = tmp_path / "model" / FILE
    content = json.loads(path.read_text())
    content["output"]["hazard"]["values"][0] = 99.0
    path.write_text(json.dumps(content))
    with pytest.raises(copfl.errors.RunError, match="baseline hazard"):
        copfl.load(tmp_path / "model")


# -- bundles of somebody else --------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["cox", "discrete"])
def test_random_bundles_give_probabilities_or_one_error(run: str, folder: Path, tmp_path: Path) -> None:
    place = tmp_path / run
    copfl.load(folder / run, 0).save(place)
    new = {name: values[:3] for name, values in rows(folder).items()}
    known = 0
    for content in json_versions((place / FILE).read_bytes(), COUNT):
        (place / FILE).write_bytes(content)
        with contextlib.suppress(CopflError):
            bundle = copfl.load(place)
            for values in (bundle.predict_survival(new, TIMES), bundle.predict_median(new)):
                assert len(values) == 3
            known += 1
    assert known


@pytest.mark.parametrize("factor", [1e30, -1e30])
def test_risks_without_end_are_no_warnings(factor: float, folder: Path, tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "cox"
    copfl.load(folder / "cox", 0).save(place)
    with safe_open(place / WEIGHTS, "pt") as content:
        about = content.metadata()
    weights = {name: factor * tensor for name, tensor in load_file(place / WEIGHTS).items()}
    save_file(weights, place / WEIGHTS, metadata=about)
    answer = called(capsys, "predict", place, "--data", folder / "new.csv", "--times", "0.001,1,1e9")
    assert answer.code == 0
    assert "Warning" not in answer.err
    for times in ("nan", "-1", "inf", "0", "1,,2", "x"):
        answer = called(capsys, "predict", place, "--data", folder / "new.csv", "--times", times)
        assert answer.code in (0, 2)
        assert "Traceback" not in answer.err


def test_the_card_says_whose_times_are_in_a_bundle(folder: Path, tmp_path: Path) -> None:
    told = "the times of events of training samples"
    for run, has_times in (("cox", True), ("discrete", False)):
        saved = copfl.load(folder / run, 0).save(tmp_path / run)
        assert (told in (saved / "README.md").read_text()) == has_times
