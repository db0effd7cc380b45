"""The federation takes the method that the pooled rehearsal takes, from sums of losses of rows that sites hold out."""

from __future__ import annotations

import csv
import dataclasses
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.choosing.evaluate import Room, to_its_end
from copfl.choosing.first_run import completed_run
from copfl.choosing.folds import folds
from copfl.data.clients.federation import FederatedData
from copfl.data.contract.contract import Column, Contract
from copfl.experiment.preparation import prepare
from copfl.federation.machines.app import init, planned
from copfl.federation.node.choice import FILE
from copfl.federation.protocol.choice import LOSS
from copfl.settings.complete import complete
from copfl.settings.flat import flattened
from copfl.settings.toml import Tables
from tests.federation.in_process import up_by_invitations
from tests.federation.network import play, write_nodes
from tests.slow import slow

HEART: dict[str, Any] = {"data": {"name": "heart"}}
METHODS = ("levels", "levels with slopes")


@pytest.fixture(scope="module")
def federation() -> FederatedData:
    return prepare(complete(HEART, {"algorithm": {"name": "levels"}})).federation


def config(**settings: Any) -> dict[str, Any]:
    app = flattened(planned(HEART).tables())
    return (
        app
        | {"session.run": "test", "session.choose": True}
        | {k.replace("__", "."): v for k, v in settings.items()}
    )


@pytest.mark.parametrize("secure", [False, True])
def test_the_losses_of_each_method_are_those_of_the_rehearsal(
    federation: FederatedData, tmp_path: Path, secure: bool
) -> None:
    nodes = write_nodes(federation, tmp_path / "nodes")
    played = play(config(secure__aggregation=secure), nodes, tmp_path / "runs")
    means = played.records[-1]["mean"]
    assert len(played.records) == 8
    # In a federation the encoders are agreed once; those of the rehearsal are of each fold's training rows.
    samples = dataclasses.replace(federation.dataset, cells=None, table=None)
    room = Room(samples, folds(federation.partition, samples, 0))
    for name, varying in zip(METHODS, ("intercept", "all"), strict=True):
        levels: Tables = {"algorithm": {"name": "levels", "varying": varying}, "run": {"rounds": 8}}
        of = complete(HEART, levels)
        expected = to_its_end(of, room.folds, room.samples, range(5)).losses
        assert means[LOSS + name] == pytest.approx(np.mean([rows.mean() for rows in expected]), abs=1e-5)
        for site, node in enumerate(nodes):
            of_site = json.loads((Path(node["state-dir"]) / FILE).read_text())["losses"][name]
            np.testing.assert_allclose(of_site, expected[site], atol=1e-4)


NUMBERS = {
    "age": (0, 120),
    "trestbps": (0, 300),
    "chol": (0, 700),
    "thalach": (0, 300),
    "oldpeak": (-10, 10),
}
CATEGORIES = {"sex": 2, "cp": 4, "fbs": 2, "restecg": 3, "exang": 2, "slope": 3, "ca": 4, "thal": 3}


def hospitals(folder: Path) -> tuple[Contract, list[Path]]:
    """The contract of the four hospitals, and the file of each."""
    with files("copfl.data.sets").joinpath("embedded/heart.csv").open() as table:
        rows = list(csv.DictReader(table))
    names = sorted({row["hospital"] for row in rows})
    columns = [name for name in rows[0] if name != "hospital"]
    sites = []
    for n, name in enumerate(names):
        sites.append(folder / f"{n}.csv")
        with sites[-1].open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(row for row in rows if row["hospital"] == name)
    described = []
    for name in columns[:-1]:
        if name in NUMBERS:
            low, high = NUMBERS[name]
            described.append(Column(name=name, type="number", minimum=low, maximum=high, missing=True))
        else:
            values = tuple(sorted({row[name] for row in rows} - {""}))
            described.append(Column(name=name, type="category", categories=values, missing=True))
    target = Column(name="disease", type="category", categories=("no", "yes"))
    return Contract(missing="fill", columns=tuple(described), targets=(target,)), sites


@slow
def test_four_hospitals_take_what_the_pooled_rehearsal_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody names a method; in secure sums, by the strict policy of each, after they have joined by invitations."""
    contract, sites = hospitals(tmp_path)
    app = init(
        tmp_path / "app",
        {"secure": {"aggregation": True}, "run": {"clients": 4, "rounds": 8}},
        contract=contract,
        host="fl.example.org",
        trial=False,
    )
    assert len(list(up_by_invitations(app, sites))) == 8
    rehearsed, _ = completed_run(HEART)
    chosen = kept(app, METHODS)
    assert chosen is not None
    assert chosen.taken == "levels" == rehearsed.algorithm.name
    assert rehearsed.algorithm.options["varying"] == "intercept"
    assert (
        chosen.sites == 3
    )  # Switzerland has 8 healthy patients: too few of its rows are alike in any division
