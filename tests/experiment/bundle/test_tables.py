"""Rows of a table: a finished run encodes them as it did in training, whatever became of the training file."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import copfl
from copfl.errors import DataError, UsageError
from copfl.experiment.bundle.description import Input, Output
from copfl.experiment.bundle.inputs import Preparation
from tests.commands import called

COLUMNS = ("age", "sex", "lab", "site", "state")


def frame(rows: int = 120, seed: int = 0, shift: float = 0.0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age, sex = shift + rng.normal(50, 10, rows), rng.choice(["f", "m"], rows)
    state = np.where((age > 50) ^ (sex == "m"), "ill", "well")
    lab, site = rng.normal(1e6, 5, rows), rng.choice(["north", "south"], rows)
    return pd.DataFrame(dict(zip(COLUMNS, (age, sex, lab, site, state), strict=True)))


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Path]:
    """The file of a table, and a run on it."""
    frame().to_csv(tmp_path / "patients.csv", index=False)
    options = {"target": "state", "client": "site"}
    copfl.run(
        "fedper", str(tmp_path / "patients.csv"), data_options=options, rounds=2, engine="sequential",
        out=tmp_path / "run",
    )  # fmt: skip
    return tmp_path / "patients.csv", tmp_path / "run"


def test_the_predictions_of_a_run_do_not_depend_on_its_training_file(trained: tuple[Path, Path]) -> None:
    file, run = trained
    rows = frame(20, seed=1)
    before = copfl.load(run, "north").predict_proba(rows)
    pd.concat([frame(), frame(200, seed=2, shift=40)]).to_csv(file, index=False)  # 200 rows were appended
    assert np.array_equal(copfl.load(run, "north").predict_proba(rows), before)
    file.unlink()
    assert np.array_equal(copfl.load(run, "north").predict_proba(rows), before)


def test_columns_by_name_in_any_order_and_as_an_array(trained: tuple[Path, Path]) -> None:
    bundle, rows = copfl.load(trained[1], 0), frame(10, seed=1)
    expected = bundle.predict_proba(rows)
    assert np.array_equal(bundle.predict_proba(rows[["state", "lab", "sex", "age"]]), expected)
    assert np.array_equal(bundle.predict_proba(rows[["age", "sex", "lab"]].to_numpy()), expected)
    assert np.array_equal(bundle.predict_proba({name: rows[name] for name in rows}), expected)
    assert bundle.estimator().feature_names_in_.tolist() == ["age", "sex", "lab"]
    assert set(bundle.predict(rows)) <= {"ill", "well"}


def test_what_is_unusual_is_reported_by_column(trained: tuple[Path, Path]) -> None:
    bundle, rows = copfl.load(trained[1], 0), frame(10, seed=1)
    other = rows.assign(sex=["x", "y", *rows.sex[2:]])
    with pytest.warns(
        RuntimeWarning, match='column "sex": 2 of 10 values are categories that no train row has'
    ):
        bundle.predict(other)
    gaps = rows.assign(age=[np.nan, *rows.age[1:]], sex=[None, None, *rows.sex[2:]])
    with pytest.raises(DataError, match=r"values are missing: age 1, sex 2, first in row 1\. Complete"):
        bundle.predict(gaps)
    with pytest.raises(UsageError, match=r'no missing "drop".* Known: fill, refuse'):
        bundle.predict(gaps, missing="drop")  # an array has no empty rows
    with pytest.warns(
        RuntimeWarning, match='"age": 1 missing value, filled; "sex": 2 missing values, filled'
    ):
        filled = bundle.predict_proba(gaps, missing="fill")
    mean = bundle.description.input.columns[0].mean
    with pytest.warns(RuntimeWarning, match="no train row has"):
        by_hand = bundle.predict_proba(gaps.fillna({"age": mean, "sex": "neither"}))
    np.testing.assert_allclose(filled, by_hand, atol=1e-6)


def test_categories_as_pandas_has_them(tmp_path: Path) -> None:
    rows = frame().assign(ward=np.arange(120) % 3, smokes=np.arange(120) % 2 == 0)
    rows.to_csv(tmp_path / "t.csv", index=False)
    options = {"target": "state", "client": "site", "categories": "ward"}
    how: dict[str, Any] = {"rounds": 1, "engine": "sequential", "out": tmp_path / "run"}
    copfl.run("fedper", str(tmp_path / "t.csv"), data_options=options, **how)
    bundle = copfl.load(tmp_path / "run", 0)
    kinds = {column.name: column.categories for column in bundle.description.input.columns}
    assert (kinds["ward"], kinds["smokes"]) == (("0", "1", "2"), ("False", "True"))
    expected = bundle.predict_proba(rows)  # numbers and bools; no warning about unknown categories
    assert np.array_equal(bundle.predict_proba(rows.astype({"ward": float})), expected)
    assert np.array_equal(bundle.predict_proba(rows.astype({"ward": str, "smokes": str})), expected)


def test_what_is_wrong_is_one_clear_error(trained: tuple[Path, Path]) -> None:
    bundle, rows = copfl.load(trained[1], 0), frame(10, seed=1)
    with pytest.raises(DataError, match="the table lacks 2 of 3 columns: age, lab; it has sex"):
        bundle.predict(rows[["sex"]])
    for digits in (300, 5000):
        huge = {**frame(2), "age": ["50", "1" * digits]}
        with pytest.raises(
            DataError, match=r"""the column "age" has numbers in training, but '1{40}' in row 2"""
        ):
            bundle.predict(huge)
    with pytest.raises(DataError, match="the column \"age\" has numbers in training, but 'old' in row 2"):
        bundle.predict(rows.assign(age=["50", "old", *["50"] * 8]))
    for encoder in bundle.preparation.input.columns[:1]:
        object.__setattr__(encoder, "std", 1e-12)
    with pytest.raises(DataError, match="row 1 has a number that is too far from those in training"):
        bundle.predict(rows.assign(age=1e29))
    for nested in ("age", "sex"):
        with pytest.raises(DataError, match=rf'"{nested}" has \[1\]; a cell is one number or text'):
            bundle.predict(rows.assign(**{nested: [[1]] * 10}))
    with pytest.raises(DataError, match=r"or an array \[n, 3\] in this order, not \[10, 2\]"):
        bundle.predict(rows[["age", "lab"]].to_numpy())


def test_a_file_with_decimal_commas(trained: tuple[Path, Path], tmp_path: Path) -> None:
    rows = frame(30, seed=1).round(3)
    rows.to_csv(tmp_path / "points.csv", index=False)
    rows.to_csv(tmp_path / "commas.csv", index=False, sep=";", decimal=",")
    preparation = copfl.load(trained[1], 0).preparation
    points, commas = (preparation.read(tmp_path / f"{name}.csv") for name in ("points", "commas"))
    assert np.array_equal(commas.x, points.x)
    assert (points.notes, commas.notes) == ([], ["decimal commas are read as points: age, lab"])


def test_the_commands(trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = trained
    file.unlink()
    rows = frame(30, seed=1)
    rows.drop(columns=["state", "site"]).to_csv(tmp_path / "new.csv", index=False)
    rows.to_csv(tmp_path / "labelled.csv", index=False)
    rows.assign(sex=["x", *rows.sex[1:]]).to_csv(tmp_path / "unknown.csv", index=False)
    bundle = copfl.load(run, "south")

    words = ["predict", run, "--client", "south", "--data", tmp_path / "new.csv"]
    answer = called(capsys, *words, "--out", tmp_path / "answers.csv")
    assert (answer.code, answer.out) == (0, "")
    assert answer.err == f"{tmp_path / 'answers.csv'}: 30 predictions\n"
    with (tmp_path / "answers.csv").open() as opened:
        found = list(csv.DictReader(opened))
    assert list(found[0]) == ["row", "prediction", "probability_ill", "probability_well"]
    assert [row["prediction"] for row in found] == bundle.predict(rows).tolist()
    assert [float(row["probability_ill"]) for row in found] == bundle.predict_proba(rows)[:, 0].tolist()

    reported = called(capsys, "predict", run, "--client", "south", "--data", tmp_path / "unknown.csv")
    assert 'warning: column "sex": 1 of 30 values are categories that no train row has' in reported.err
    assert ': "x"' in reported.err
    folder = run / "models" / "client-0001"
    measured = called(capsys, "evaluate", folder, "--data", tmp_path / "labelled.csv", "--json")
    content = json.loads(measured.out)
    right = float((bundle.predict(rows) == rows.state).mean())
    assert content["metrics"]["accuracy"] == pytest.approx(right)
    assert np.array(content["confusion"]).sum() == 30
    assert sum(one["samples"] for one in content["calibration"]) == 30
    text = called(capsys, "evaluate", folder, "--data", tmp_path / "labelled.csv").out
    assert all(
        word in text for word in ("macro F1", "AUC", "calibration error", "predicted class", "Calibration")
    )
    refused = called(capsys, "evaluate", folder, "--data", tmp_path / "new.csv")
    assert (refused.code, "lacks the column state to predict" in refused.err) == (2, True)


def test_a_new_client_has_a_bundle_too(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = trained
    file.unlink()  # only the run's folder is needed
    frame(40, seed=3).to_csv(tmp_path / "own.csv", index=False)
    words: list[Any] = ["personalize", run, "--data", tmp_path / "own.csv", "--epochs", 2, "--lr", 0.01]
    answer = called(capsys, *words, "--out", tmp_path / "new", "--json")
    content = json.loads(answer.out)
    bundle = copfl.load(tmp_path / "new")
    (score,) = bundle.description.scores
    assert (score.value, score.samples) == (content["accuracy"][-1], content["test"])
    assert bundle.predict(frame(5)).shape == (5,)
    again = called(capsys, *words, "--out", tmp_path / "new")
    assert (again.code, "exists already" in again.err) == (2, True)


def test_some_rows_may_have_a_target(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, new = trained[1], tmp_path / "new.csv"
    line = ("predict", run, "--client", "north", "--data", new)
    frame(3, seed=1).assign(state=["", "?", ""]).to_csv(new, index=False)
    answer = called(capsys, *line)
    assert (answer.code, len(answer.out.splitlines()), answer.err) == (0, 3, "")
    frame(3, seed=1).assign(state=["ill", "", "well"]).to_csv(new, index=False)
    answer = called(capsys, *line)
    assert re.fullmatch(r"accuracy [0-9.]+ % of 2 samples; 1 have no target\n", answer.err)
    found = [line.split("\t")[1] for line in answer.out.splitlines()]
    right = np.mean([found[0] == "ill", found[2] == "well"])
    assert answer.err.startswith(f"accuracy {100 * right:.1f} %")
    measured = called(capsys, "evaluate", *line[1:])
    assert "1 of 3 samples have no target and are left out" in measured.err
    refused = called(capsys, "personalize", run, "--data", new)
    assert "has nothing in the column state to predict in row 2; complete it or remove the row" in refused.err
    frame(3, seed=1).assign(state=["ill", "unknown", "well"]).to_csv(new, index=False)
    answer = called(capsys, *line)
    assert (answer.code, len(answer.out.splitlines())) == (0, 3)
    unscored = "there is a label 'unknown', but the names are ill, well"
    assert answer.err == f"copfl: warning: the predictions are not scored: {unscored}\n"
    for command in ("evaluate", "personalize"):
        words = line[2:] if command == "evaluate" else line[4:]
        refused = called(capsys, command, run, *words)
        assert (refused.code, unscored in refused.err) == (2, True)
    frame(3, seed=1)[["age", "sex", "lab"]].to_csv(new, index=False)
    refused = called(capsys, "personalize", run, "--data", new)
    assert "lacks the column state to predict" in refused.err
    (tmp_path / "new.csv.gz").write_bytes(b"")
    for name, said in (
        ("new.csv.gz", "is not a file of a known kind; give one of .csv"),
        ("", "is a folder,"),
    ):
        refused = called(capsys, *line[:-1], tmp_path / name)
        assert (refused.code, said in refused.err) == (2, True)
    refused = called(capsys, *line[:-1], "nowhere.csv")
    assert "there is no file or folder nowhere.csv; name the samples" in refused.err
    refused = called(capsys, "predict", "nowhere", *line[2:])
    assert "there is no folder nowhere; name a bundle, a run folder or the state-dir" in refused.err


def test_some_values_of_an_array_may_be_missing(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=x.sum(1))
    settings: dict[str, Any] = {"rounds": 1, "clients": 2, "partition": "iid", "engine": "sequential"}
    copfl.run("fedavg", str(tmp_path / "data.npz"), **settings, out=tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=x[:3], y=np.array([1.0, np.nan, 2.0]))
    found = copfl.load(tmp_path / "run", 0).read(tmp_path / "new.npz")
    assert found.y is not None
    assert (found.y.tolist(), found.has_target.tolist()) == ([1.0, 2.0], [True, False, True])


def test_the_help_of_a_client_is_about_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("export", "predict", "evaluate"):
        text = " ".join(called(capsys, command, "--help").out.split())
        assert "--client TEXT The client whose model is used: its number" in text
        assert "column that names the client" not in text


def test_a_row_with_a_missing_value_has_no_prediction(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, new, out = trained[1], tmp_path / "new.csv", tmp_path / "answers.csv"
    rows = frame(6, seed=1)
    rows.assign(age=[rows.age[0], np.nan, *rows.age[2:]], sex=[*rows.sex[:5], ""]).to_csv(new, index=False)
    line = ("predict", run, "--client", "north", "--data", new)
    expected = copfl.load(run, "north").predict(rows[1:5][["age", "sex", "lab"]]).tolist()
    answer = called(capsys, *line)
    warning = (
        "2 of 6 rows have no prediction, as values are missing: age 1, sex 1. They are, counted from 0: 1, 5"
    )
    assert (answer.code, warning in answer.err, "of 4 samples" in answer.err) == (0, True, True)
    lines = [line.split("\t") for line in answer.out.splitlines()]
    assert [len(cells) for cells in lines] == [3, 1, 3, 3, 3, 1]
    assert [cells[1] for cells in lines[2:5]] == expected[1:]
    called(capsys, *line, "--out", out)
    with out.open() as opened:
        cells = list(csv.DictReader(opened))
    assert [row["prediction"] for row in cells][2:] == [*expected[1:], ""]
    assert set(cells[1].values()) == {"1", ""}
    called(capsys, *line, "--out", tmp_path / "answers.npz")
    with np.load(tmp_path / "answers.npz") as arrays:
        assert (arrays["row"].tolist(), len(arrays["prediction"])) == ([0, 2, 3, 4], 4)
    content = json.loads(called(capsys, *line, "--json").out)
    assert [value is None for value in content["probability_ill"]] == [False, True, False, False, False, True]

    measured = called(capsys, "evaluate", *line[1:])
    assert (measured.code, warning in measured.err, "4 samples" in measured.out) == (0, True, True)
    filled = called(capsys, *line, "--missing", "fill")
    assert all(len(line.split("\t")) == 3 for line in filled.out.splitlines())
    refused = called(capsys, *line, "--missing", "refuse")
    assert (refused.code, "values are missing: age 1, sex 1, first in row 2" in refused.err) == (2, True)
    refused = called(capsys, "personalize", run, "--data", new)
    assert (refused.code, "values are missing: age 1, sex 1, first in row 2" in refused.err) == (2, True)


def test_columns_that_should_have_numbers_are_named() -> None:
    output = Output("regression", 2, ("dose", "cost"), ("dose", "cost"))
    wanted = "the column dose and cost to predict must have finite numbers, as the model is of regression"
    for y in (np.array(["1", "high"]), np.array([[1.0, 2.0], [3.0, np.nan]])):
        with pytest.raises(DataError, match=wanted):
            Preparation(Input({}), output).targets(y)


def test_a_row_is_named_by_its_place_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that left out rows with missing values does so of a new client's too, which moves the others."""
    data, new = tmp_path / "t.csv", tmp_path / "new.csv"
    frame().to_csv(data, index=False)
    options = {"target": "state", "client": "site", "missing": "drop"}
    how: dict[str, Any] = {"rounds": 1, "engine": "sequential", "out": tmp_path / "run"}
    copfl.run("fedavg", str(data), data_options=options, **how)
    rows = frame(9, seed=1)
    rows.assign(age=[np.nan, *rows.age[1:]], state=[*rows.state[:4], "", *rows.state[5:]]).to_csv(
        new, index=False
    )
    refused = called(capsys, "personalize", tmp_path / "run", "--data", new)
    assert (refused.code, "has nothing in the column state to predict in row 5;" in refused.err) == (2, True)


def test_an_empty_text_is_no_reason_to_refuse_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"{word} {n}" for n in range(20) for word in ("good", "bad")]
    rows = pd.DataFrame({"text": texts, "label": ["yes", "no"] * 20, "site": ["a", "a", "b", "b"] * 10})
    rows.to_csv(tmp_path / "t.csv", index=False)
    options = {"target": "label", "client": "site", "text": "text"}
    how: dict[str, Any] = {"rounds": 1, "engine": "sequential", "out": tmp_path / "run"}
    copfl.run("fedavg", str(tmp_path / "t.csv"), data_options=options, **how)
    bundle = copfl.load(tmp_path / "run", 0)
    pd.DataFrame({"text": ["good", "", "bad"]}).to_csv(tmp_path / "new.csv", index=False)
    (tmp_path / "new.txt").write_text("good\n \nbad\n")
    expected = bundle.predict(["good", "bad"]).tolist()
    for name in ("new.csv", "new.txt"):
        line = ("predict", tmp_path / "run", "--client", 0, "--data", tmp_path / name)
        answer = called(capsys, *line)
        assert "1 of 3 rows have no prediction, as values are missing: text 1" in answer.err
        cells = [line.split("\t")[1:2] for line in answer.out.splitlines()]
        assert cells == [[expected[0]], [], [expected[1]]]
        filled = called(capsys, *line, "--missing", "fill").out.splitlines()
        assert filled[1].split("\t")[1] == bundle.predict([""])[0]
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    refused = called(capsys, "predict", tmp_path / "run", "--client", 0, "--data", tmp_path / "latin.txt")
    assert (refused.code, "latin.txt, line 1, is not UTF-8" in refused.err) == (2, True)
