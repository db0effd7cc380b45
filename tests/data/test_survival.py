"""Times until an event as targets: of arrays and of tables, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import copfl
from copfl.data.arrays import from_arrays
from copfl.data.contract.contract import Contract
from copfl.data.contract.draft import draft
from copfl.data.sets import overview
from copfl.data.sets.datasets import load
from copfl.data.targets import targets_of
from copfl.errors import DataError
from tests.commands import called

TIMES = np.array([[3.0, 1.0], [5.0, 0.0], [0.5, 1.0]])


def cohort(rows: int = 120, sites: int = 3, seed: int = 0) -> dict[str, NDArray[np.float64]]:
    """Patients whose hazard grows with their age, followed for three years at most."""
    rng = np.random.default_rng(seed)
    age, dose = rng.normal(60, 10, rows), rng.normal(size=rows)
    time = rng.exponential(np.exp((60 - age) / 10 - 0.5 * dose)) + 0.01
    return {
        "site": rng.integers(0, sites, rows).astype(np.float64),
        "age": age,
        "dose": dose,
        "years": np.minimum(time, 3).round(3),
        "died": (time <= 3).astype(np.float64),
    }


def written(path: Path, columns: dict[str, NDArray[np.float64]]) -> Path:
    lines = [",".join(f"{value:g}" for value in row) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    return path


def test_targets_are_the_time_and_the_event() -> None:
    found = targets_of([TIMES], "survival", None)
    assert (found.kind, found.names) == ("survival", ("risk",))
    np.testing.assert_array_equal(found.parts[0], TIMES)
    assert found.note == "2 of 3 times end with the event, the others are censored"


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (TIMES[:, 0], "two columns, the time and the event"),
        (np.c_[TIMES, TIMES], "two columns"),
        (np.c_[TIMES, [0, 5, 0]], "the start 5 and the time 5 in sample 1"),
        (np.c_[TIMES, [-1, 0, 0]], "the start -1"),
        (np.c_[TIMES, [0, 0, np.nan]], "the start nan"),
        (np.c_[TIMES * [0, 1], [0, 0, 0]], "the start 0 and the time 0 in sample 0"),
        (TIMES * [-1, 1], "the time -3 in sample 0; times are 0 or more"),
        (TIMES * [np.nan, 1], "the time nan"),
        (TIMES * [1e31, 1], r"the time 3e\+31"),
        (TIMES * [1, 2], "the event 2 in sample 0; it is 1 where the event was seen"),
        (TIMES.astype(str), "survival needs numbers"),
    ],
)
def test_what_is_no_time_until_an_event_is_refused(y: NDArray[np.float64], message: str) -> None:
    with pytest.raises(DataError, match=message):
        targets_of([y], "survival", None)


def test_rows_that_are_censored_at_once_are_left_out_and_events_at_once_come_first(tmp_path: Path) -> None:
    columns = cohort()
    lost, at_once = np.arange(120) % 10 == 3, np.arange(120) % 40 == 5
    columns["years"][lost | at_once] = 0
    columns["died"] = np.where(lost, 0.0, np.where(at_once, 1.0, columns["died"]))
    path = written(tmp_path / "cohort.csv", columns)
    found = load(path, target="years", event="died", client="site", kind="survival")
    y = np.concatenate([found.train.y, found.test.y])
    assert len(y) == 108
    assert sorted(y[y[:, 0] == 0].tolist()) == [[0, 1]] * 3
    assert "12 samples that are censored at time 0 are left out" in found.note
    assert "3 events at time 0 count before the first other time" in found.note
    result = copfl.run(
        "fedavg", path, target="years", event="died", client="site", task="survival", rounds=1, rivals=False
    )
    assert result.survival is not None
    with pytest.raises(DataError, match="every time of y is censored at 0"):
        from_arrays(np.zeros((30, 2)), np.zeros((30, 2)), kind="survival")


def test_arrays_need_the_kind() -> None:
    x, y = np.zeros((30, 2)), np.repeat(TIMES, 10, axis=0)
    assert from_arrays(x, y).kind == "regression"
    dataset = from_arrays(x, y, kind="survival")
    assert dataset.kind == "survival"
    assert dataset.target_scale == ((), ())
    assert "end with the event" in overview.overview(dataset)
    assert overview.targets(dataset) == "survival of 1 time"


def test_the_columns_of_a_table(tmp_path: Path) -> None:
    table = written(tmp_path / "cohort.csv", columns := cohort())
    dataset = load(table, target="years", event="died", client="site")
    assert dataset.kind == "survival"
    assert dataset.table.targets == ("years", "died")
    assert [column.name for column in dataset.table.columns] == ["age", "dose"]
    both = np.concatenate([dataset.train.y, dataset.test.y])
    np.testing.assert_allclose(np.sort(both[:, 0]), np.sort(columns["years"]), rtol=1e-5)
    again = load(table, target="years,died", kind="survival", client="site")
    assert again.digest == dataset.digest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target": "years", "kind": "survival"},
            "survival has two columns, the time and whether the event was seen then; name them",
        ),
        ({"target": "years,died", "event": "age"}, "survival has two columns"),
        (
            {"target": "years", "event": "died", "kind": "regression"},
            "named as event, and the task is regression",
        ),
        ({"target": "years", "event": "dead"}, 'column "dead"'),
        ({"target": "years", "event": "years"}, "0 where the time is censored"),
    ],
)
def test_columns_that_do_not_fit_are_refused(options: dict[str, str], message: str, tmp_path: Path) -> None:
    table = written(tmp_path / "cohort.csv", cohort())
    with pytest.raises(DataError, match=message):
        load(table, client="site", **options)  # type: ignore[arg-type]


def in_stretches(columns: dict[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """The cohort with a row until half a year and one after it, of those who are followed for longer."""
    parts = []
    patient = np.arange(len(columns["years"])).astype(np.float64)
    for begin, end in ((0.0, 0.5), (0.5, np.inf)):
        here = columns["years"] > begin
        part = {name: values[here] for name, values in columns.items()} | {"patient": patient[here]}
        part["died"] = part["died"] * (part["years"] <= end)
        part["years"] = np.minimum(part["years"], end)
        parts.append(part | {"since": np.full(int(here.sum()), begin)})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


STRETCHES: dict[str, Any] = {"target": "years", "event": "died", "start": "since", "client": "site"}


def test_the_rows_of_a_patient_are_on_one_side(tmp_path: Path) -> None:
    table = written(tmp_path / "cohort.csv", columns := in_stretches(cohort()))
    dataset = load(table, group="patient", **STRETCHES)
    assert dataset.table.targets == ("years", "died", "since")
    assert [column.name for column in dataset.table.columns] == ["age", "dose"]
    both = np.concatenate([dataset.train.y, dataset.test.y])
    assert both.shape == (len(columns["years"]), 3)
    train, test = (set(map(tuple, part.x.round(4).tolist())) for part in (dataset.train, dataset.test))
    assert test
    assert not train & test  # age and dose tell patients apart
    np.testing.assert_array_equal(
        load(table, target="years,died,since", kind="survival", client="site", group="patient").test.y,
        dataset.test.y,
    )


def test_without_a_group_a_note_asks_for_it(tmp_path: Path) -> None:
    dataset = load(written(tmp_path / "cohort.csv", in_stretches(cohort())), **STRETCHES)
    assert "if a patient has several, keep them on one side with group='COLUMN'" in dataset.note


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"since": 0.0}, {"group": "patient"}, "a patient has a row until 0.5 and one that starts at 0"),
        ({"since": 9.0}, {}, "the start 9 and the time"),
        ({}, {"event": ""}, "named as start, and the task is not of survival"),
        ({}, {"event": "", "kind": "survival"}, "survival has two columns"),
    ],
)
def test_stretches_that_do_not_fit_are_refused(
    change: dict[str, float], options: dict[str, str], message: str, tmp_path: Path
) -> None:
    columns = in_stretches(cohort())
    columns |= {name: np.full(len(columns["years"]), value) for name, value in change.items()}
    with pytest.raises(DataError, match=message):
        load(written(tmp_path / "cohort.csv", columns), **{**STRETCHES, **options})


def test_an_event_in_words_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "cohort.csv"
    table.write_text("age,years,status\n" + "50,2,dead\n61,3,alive\n" * 20)
    with pytest.raises(DataError, match='"status" has texts; time and event must be numbers'):
        load(table, target="years", event="status")


def test_the_contract_of_a_table_of_survival(tmp_path: Path) -> None:
    table = written(tmp_path / "cohort.csv", cohort())
    dataset = load(table, target="years", event="died", client="site")
    contract = Contract.of(dataset)
    assert contract is not None
    assert (contract.task, contract.target_names, contract.outputs) == (
        "survival",
        ("years", "died"),
        ("risk",),
    )
    assert contract.is_frozen
    assert Contract.read(contract.as_json()) == contract
    example = contract.example()
    assert example.train.y.shape == (len(example.train), 2)
    assert example.kind == "survival"
    agreed = contract.encoders.dataset(table, kind="survival")
    assert agreed.kind == "survival"
    assert agreed.train.x.shape[1] == 2


def test_the_contract_of_stretches(tmp_path: Path) -> None:
    table = written(tmp_path / "cohort.csv", in_stretches(cohort()))
    contract = Contract.of(load(table, group="patient", **STRETCHES))
    assert contract is not None
    assert contract.target_names == ("years", "died", "since")
    assert Contract.read(contract.as_json()) == contract
    assert contract.encoders.dataset(table, kind="survival").train.y.shape[1] == 3
    y = np.repeat(np.c_[TIMES, [0, 1, 0.25]], 10, axis=0)
    of_arrays = Contract.of(from_arrays(np.arange(60.0).reshape(30, 2), y, kind="survival"))
    assert of_arrays is not None
    assert [target.name for target in of_arrays.targets] == ["time", "event", "start"]


def test_the_draft_of_a_contract_of_survival(tmp_path: Path) -> None:
    table = written(tmp_path / "cohort.csv", cohort())
    contract = draft(table, target="years,died", task="survival", drop="site")
    assert [(target.name, target.type) for target in contract.targets] == [
        ("years", "number"),
        ("died", "number"),
    ]


def test_the_commands_take_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = written(tmp_path / "cohort.csv", in_stretches(cohort()))
    columns = ["--target", "years", "--event", "died", "--start", "since"]
    described = called(
        capsys, "data", "describe", table, *columns, "--client", "site", "--set", "data.group=patient"
    )
    assert described.code == 0, described.err
    assert "end with the event" in described.out
    words = ["--drop", "site", "--group", "patient", "--out", tmp_path / "contract.toml"]
    drafted = called(capsys, "federate", "contract", table, *columns, *words)
    assert drafted.code == 0, drafted.err
    assert "survival of years, died, since" in drafted.out
