"""Every way from `init` and `up` ends at models at the nodes, which predict, evaluate and export the same kind of file.

| data | described by | nodes' data |
| --- | --- | --- |
| a table with a column of sites | the data set | partitioned, or files of sites with the column or without it |
| a table without one | the data set | partitioned, or files of sites |
| a table of each site | a contract, open or frozen | files of sites |
| numbers to predict | the data set, or a contract | partitioned, or files of sites |
| texts; several labels | a contract | files of sites |
| times until an event | the data set, or a contract | partitioned, or files of sites |
| arrays | the data set | partitioned, or files of sites |

Each row with files of sites is walked as a trial on one machine; those that differ in what the sites agree on also by
invitations, with COPFL_SLOW=1 all of them.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.data.contract.contract import NUMBER, Column, Contract
from copfl.data.contract.draft import draft
from copfl.federation import init
from tests.commands import called
from tests.federation.in_process import up, up_by_invitations
from tests.slow import slow


class Way(NamedTuple):
    """What a federation was made of, the files of its nodes, and a file to predict."""

    settings: dict[str, Any]
    sites: list[Path]
    rows: Path
    contract: Any = None


def table(path: Path, seed: int = 0, *, hospital: bool = False, target: str = "outcome") -> Path:
    """Ninety rows of a table, of three hospitals if it has their column."""
    draw = random.Random(seed)
    rows = []
    for n in range(90):
        age, ward = draw.randint(20, 89), draw.choice(["heart", "lung"])
        value: object = age * 1.5 if target == "stay" else "ill" if age > 50 else "well"
        rows.append(
            {"age": age, "ward": ward, target: value} | ({"hospital": "abc"[n % 3]} if hospital else {})
        )
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def of_tables(folder: Path, **data: Any) -> dict[str, Any]:
    return {"data": {"name": str(table(folder / "visits.csv")), "target": "outcome", **data}}


def with_hospitals(folder: Path) -> Way:
    file = table(folder / "visits.csv", hospital=True)
    return Way({"data": {"name": str(file), "target": "outcome", "client": "hospital"}}, [], file)


def with_hospitals_and_sites(folder: Path) -> Way:
    """Of the files of the sites one has the column, as its own name, and the others do not need it."""
    way = with_hospitals(folder)
    sites = [table(folder / f"site-{n}.csv", n, hospital=n == 0) for n in range(3)]
    return way._replace(sites=sites, rows=sites[1])


def without_hospitals(folder: Path) -> Way:
    settings = of_tables(folder) | {"partition": {"name": "iid"}}
    return Way(settings, [], folder / "visits.csv")


def sample_and_sites(folder: Path) -> Way:
    sites = [table(folder / f"site-{n}.csv", n) for n in range(3)]
    return Way(of_tables(folder), sites, sites[0])


def contract_and_sites(folder: Path) -> Way:
    sites = [table(folder / f"site-{n}.csv", n) for n in range(3)]
    return Way({}, sites, sites[0], draft(sites[0], target="outcome", leave_open=True))


def frozen_contract_and_sites(folder: Path) -> Way:
    sites = [table(folder / f"site-{n}.csv", n) for n in range(3)]
    return Way({}, sites, sites[0], draft(sites[0], target="outcome", statistics=True))


def numbers_to_predict(folder: Path) -> Way:
    file = table(folder / "stays.csv", target="stay")
    return Way({"data": {"name": str(file), "target": "stay"}, "partition": {"name": "iid"}}, [], file)


def contract_of_numbers_and_sites(folder: Path) -> Way:
    sites = [table(folder / f"site-{n}.csv", n, target="stay") for n in range(3)]
    return Way({}, sites, sites[0], draft(sites[0], target="stay", leave_open=True))


def notes(path: Path, seed: int) -> Path:
    """Ninety rows with a text and two labels."""
    draw = random.Random(seed)
    rows = [(draw.choice(["cough", "fever", "pain"]), draw.randint(0, 1), n % 2) for n in range(90)]
    lines = [
        f"{'wet' if wet else 'dry'} {word} number {n},{wet},{ill}" for n, (word, wet, ill) in enumerate(rows)
    ]
    path.write_text("\n".join(["note,wet,ill", *lines]) + "\n")
    return path


def contract_of_texts_and_sites(folder: Path) -> Way:
    sites = [notes(folder / f"site-{n}.csv", n) for n in range(3)]
    contract = draft(sites[0], target="wet", text="note", drop="ill", leave_open=True)
    return Way({"model": {"name": "words"}}, sites, sites[0], contract)


def contract_of_labels_and_sites(folder: Path) -> Way:
    sites = [folder / f"site-{n}.csv" for n in range(3)]
    for number, site in enumerate(sites):
        draw = random.Random(number)
        rows = [f"{draw.randint(20, 89)},{draw.randint(0, 1)},{n % 2}\n" for n in range(90)]
        site.write_text("".join(["age,cough,fever\n", *rows]))
    return Way({}, sites, sites[0], draft(sites[0], target="cough,fever", leave_open=True))


def stays(path: Path, seed: int = 0) -> Path:
    """Ninety stays, of which every third is censored."""
    draw = random.Random(seed)
    lines = [f"{draw.randint(20, 89)},{draw.randint(1, 40)},{int(n % 3 > 0)}" for n in range(90)]
    path.write_text("\n".join(["age,days,left", *lines]) + "\n")
    return path


def times_until_an_event(folder: Path) -> Way:
    file = stays(folder / "stays.csv")
    settings = {"data": {"name": str(file), "target": "days", "event": "left"}, "partition": {"name": "iid"}}
    return Way(settings, [], file)


def contract_of_survival_and_sites(folder: Path) -> Way:
    sites = [stays(folder / f"site-{n}.csv", n) for n in range(3)]
    contract = draft(sites[0], target="days,left", task="survival", leave_open=True)
    return Way({"task": {"loss": "discrete_time", "cuts": [10, 20]}}, sites, sites[0], contract)


def arrays(folder: Path) -> Way:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(90, 4)).astype(np.float32), np.arange(90) % 2
    np.savez(folder / "arrays.npz", x=x, y=y)
    return Way(
        {"data": {"name": str(folder / "arrays.npz")}, "partition": {"name": "iid"}},
        [],
        folder / "arrays.npz",
    )


def arrays_of_sites(folder: Path) -> Way:
    way = arrays(folder)
    return way._replace(sites=[way.rows] * 3)


WAYS: list[Callable[[Path], Way]] = [
    *(with_hospitals, with_hospitals_and_sites, without_hospitals, sample_and_sites),
    *(contract_and_sites, frozen_contract_and_sites, contract_of_numbers_and_sites),
    *(
        contract_of_texts_and_sites,
        contract_of_labels_and_sites,
        numbers_to_predict,
        times_until_an_event,
        contract_of_survival_and_sites,
        arrays,
        arrays_of_sites,
    ),
]


RUN: dict[str, dict[str, Any]] = {
    "run": {"clients": 3, "rounds": 1},
    "algorithm": {"name": "fedavg"},
    "model": {"name": "linear"},
}
CATEGORIES = {"ward": ("heart", "lung", "skin"), "outcome": ("ill", "well"), "wet": ("0", "1")}
AT_SITES = [way for way in WAYS if "sites" in way.__name__]
# Encoders of numbers and categories, words, times until an event, and arrays, about which nothing is agreed.
AGREED = (contract_and_sites, contract_of_texts_and_sites, contract_of_survival_and_sites, arrays_of_sites)


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, id=way.__name__, marks=[] if way in AGREED else pytest.mark.job) for way in WAYS],
)
def test_a_trial_ends_at_models_that_take_such_rows(
    way: Callable[[Path], Way], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = way(tmp_path)
    app = init(tmp_path / "app", RUN, made.settings, contract=made.contract)
    assert len(list(up(app, sites=made.sites))) == 1
    assert_models_take(sorted((app / "nodes").glob("*/state")), made.rows, capsys)


@pytest.mark.job
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, id=way.__name__, marks=[] if way in AGREED else slow) for way in AT_SITES],
)
def test_machines_end_at_models_that_take_such_rows(
    way: Callable[[Path], Way], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By invitations, in secure sums and with the strict policy."""
    made = way(tmp_path)
    settings = {"secure": {"aggregation": True}}, made.settings
    contract = completed(made.contract)
    app = init(tmp_path / "app", RUN, *settings, contract=contract, host="fl.example.org", trial=False)
    assert len(list(up_by_invitations(app, made.sites))) == 1
    assert_models_take([tmp_path / f"site-{n}" for n in range(3)], made.rows, capsys)


def completed(contract: Contract | None) -> Contract | None:
    """What people add to a draft for secure sums: ranges of numbers, and what a category may be."""

    def of(column: Column) -> Column:
        if not column.is_open:
            return column
        if column.type == NUMBER:
            return replace(column, minimum=0.0, maximum=200.0)
        return replace(column, candidates=CATEGORIES[column.name])

    def of_target(column: Column) -> Column:
        added = of(column)
        return replace(added, categories=added.categories or added.candidates, candidates=())

    if contract is None:
        return None
    targets = tuple(map(of_target, contract.targets))
    return replace(contract, columns=tuple(map(of, contract.columns)), targets=targets)


def assert_models_take(states: list[Path], rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The models of three nodes predict, evaluate and export these rows, of which there are ninety."""
    assert len(states) == 3
    answers, bundle = states[0].parent / "answers.csv", states[0].parent / "exported"
    for state in states:
        done = called(capsys, "predict", state, "--data", rows, "--out", answers)
        assert done.code == 0, done.err
        assert len(answers.read_text().splitlines()) == 91
        done = called(capsys, "evaluate", state, "--data", rows)
        assert (done.code, "90" in done.out) == (0, True), done.err
    done = called(capsys, "export", states[0], "--out", bundle, "--format", "bundle")
    assert done.code == 0, done.err
    again = called(capsys, "predict", bundle, "--data", rows)
    assert again.code == 0, again.err
