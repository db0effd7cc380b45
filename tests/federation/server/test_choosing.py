"""The federation takes the method that the pooled rehearsal takes, from sums of losses of rows that sites hold out."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from copfl.algorithms.levels import Levels
from copfl.charts import GainChart
from copfl.choosing.choice import choose
from copfl.choosing.evaluate import Room, to_its_end
from copfl.choosing.first_run import completed_run
from copfl.choosing.folds import folds
from copfl.core.task import Data
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.schemes import SCHEMES
from copfl.data.contract.contract import Column, Contract
from copfl.data.sets.datasets import load
from copfl.errors import RunError, UsageError
from copfl.experiment.preparation import prepare
from copfl.federation.machines.app import init, planned
from copfl.federation.node.choice import FILE, OwnLosses, _reported, held_out
from copfl.federation.node.data import NodeData
from copfl.federation.node.secure_memory import rows_of
from copfl.federation.node.verdict import verdict_of
from copfl.federation.protocol.choice import ALONE_NAMES, LOSS, InFolds
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.choosing import Chosen, chosen_from, kept
from copfl.rivals.records import CONSTANT, TITLES, Array
from copfl.settings.checking import SettingError
from copfl.settings.complete import complete
from copfl.settings.flat import flattened
from copfl.settings.toml import Tables
from tests.federation.in_process import up_by_invitations
from tests.federation.network import node_of, play, write_nodes
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
def test_the_losses_of_each_method_are_those_of_the_rehearsal(tmp_path: Path, secure: bool) -> None:
    """By arrays: of a table the encoders are agreed once, and those of a rehearsal are of each fold's training rows."""
    samples = replace(load("wine"), cells=None, table=None)
    federation = FederatedData(samples, SCHEMES["iid"](samples, 3, seed=0))
    of_app: Tables = {"data": {"name": "wine"}, "run": {"clients": 3}, "secure": {"aggregation": secure}}
    app = flattened(planned(of_app).tables()) | {"samples.contract": ""}
    nodes = write_nodes(federation, tmp_path / "nodes")
    played = play(app | {"session.run": "test", "session.choose": True}, nodes, tmp_path / "runs")
    means = played.records[-1]["mean"]
    assert len(played.records) == 8
    room = Room(samples, folds(federation.partition, samples, 0))
    for name, varying in zip(METHODS, ("intercept", "all"), strict=True):
        levels: Tables = {
            "algorithm": {"name": "levels", "varying": varying},
            "run": {"rounds": 8, "clients": 3},
        }
        expected = to_its_end(
            complete({"data": {"name": "wine"}}, levels), room.folds, samples, range(5)
        ).losses
        most = 1e-3 if secure else 1e-4
        assert means[LOSS + name] == pytest.approx(np.mean([rows.mean() for rows in expected]), rel=most)
        for site, node in enumerate(nodes):
            of_site = json.loads((Path(node["state-dir"]) / FILE).read_text())["losses"][name]
            np.testing.assert_allclose(of_site, expected[site], rtol=0, atol=20 * most)


def means_of(losses: dict[str, list[Array]], kind: str) -> dict[str, float | None]:
    """What the server reads where each site reports of these losses."""
    candidates = InFolds(METHODS, (Levels(), Levels(varying="all")), 5)
    sites = range(len(losses["levels"]))
    found = [_reported(candidates, {name: rows[n] for name, rows in losses.items()}, kind) for n in sites]
    return {name: float(np.nanmean([of_site[name] for of_site in found])) for name in found[0]}


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_rule_is_that_of_the_rehearsal(kind: str) -> None:
    """Also where what is alone has the lowest loss, and is or is not shown to be better."""
    taken = set()
    for seed in range(60):
        draw = np.random.default_rng(seed)
        common = [draw.gamma(2.0, size=60) for _ in range(4)]
        shifts = dict(
            zip((CONSTANT, *METHODS, *ALONE_NAMES[1:]), [0.5, *draw.normal(0, 0.15, 5)], strict=True)
        )
        losses = {
            name: [np.abs(rows + shift + draw.normal(0, 0.3, 60)) for rows in common]
            for name, shift in shifts.items()
        }
        found = chosen_from(means_of(losses, kind), 4, METHODS)
        expected = choose(losses, kind == "regression", 5, alone=ALONE_NAMES)
        assert found.taken == expected.federation
        assert found.losses == pytest.approx({name: expected.validated.means[name] for name in losses})
        assert found.sites == 4
        taken.add(found.taken)
    assert taken >= {*METHODS, "linear alone"}


def test_without_losses_nothing_is_chosen_and_the_error_says_what_to_do() -> None:
    with pytest.raises(RunError, match=r"no site reports losses.*--set session.taken=levels"):
        chosen_from({"accuracy": 0.5}, 4, METHODS)
    alone = Chosen("linear alone", {"levels": 0.4, "linear alone": 0.3}, 4)
    with pytest.raises(RunError, match="nothing is trained together: linear alone has the lowest loss"):
        alone.required()


def test_consent_covers_the_candidates_and_no_other_method() -> None:
    with pytest.raises(
        SettingError, match="none of the candidates that members agreed on: levels, levels with"
    ):
        settings_of(config(session__choose=False, session__taken="trees"))
    with pytest.raises(UsageError, match="'trees'; a federation chooses among levels, levels with slopes"):
        settings_of(config(choice__candidates="levels,trees"))
    of_slopes = settings_of(config(session__choose=False, session__taken="levels with slopes"))
    assert of_slopes.run.algorithm.options["varying"] == "all"
    rows = {rows_of(settings_of(config(**more)).federation, 0) for more in ({}, {"session__choose": False})}
    assert rows == {
        "in 5 folds by disease with seed 0"
    }  # the choice and the training after it are sums of the same rows
    assert rows_of(settings_of(config(run__seed=1)).federation, 0) not in rows


def node_rows(federation: FederatedData, site: int) -> NodeData:
    dataset, rows = federation.dataset, federation.partition.train[site]
    x, y = torch.from_numpy(dataset.train.x[rows]), torch.from_numpy(np.asarray(dataset.train.y[rows]))
    data = Data(x, y, torch.tensor(len(y)))
    return NodeData(data, data, np.zeros(0, np.uint64), settings_of(config()).task)


@pytest.mark.parametrize("site", range(4))
def test_the_difference_of_two_folds_is_of_no_row_that_is_rare_at_its_site(
    federation: FederatedData, tmp_path: Path, site: int
) -> None:
    """At the first model the sum without a fold, subtracted from the sum of all rows, is the sum of the fold."""
    settings, data, least = settings_of(config()), node_rows(federation, site), 5
    node = node_of({"state-dir": str(tmp_path)})
    plain = held_out(settings, node, data)
    assert (plain.of >= 0).all()
    assert plain.left_out == 0
    assert any(rare(plain.train.x[plain.of == fold], least) for fold in range(5))  # else nothing is shown
    strict = held_out(settings, node._replace(policy=replace(node.policy, least_rows=least)), data)
    for part in np.unique(strict.of):
        rows = strict.of == part
        assert not rare(strict.train.x[rows], least)
        counts = np.bincount(strict.train.y[torch.from_numpy(rows)].numpy(), minlength=2)
        assert all(count == 0 or count >= least for count in counts)
    assert len(strict.of) + strict.left_out == len(data.train.y)


def rare(x: Tensor, least: int) -> bool:
    """Whether fewer rows than these have another value than the usual one in some column."""
    others = [len(column) - int(column.unique(return_counts=True)[1].max()) for column in x.T if len(column)]
    return any(0 < count < least for count in others)


def test_the_verdict_of_a_site_is_of_its_own_rows() -> None:
    draw = np.random.default_rng(0)
    rows = draw.gamma(2.0, size=200)
    losses = {name: rows + 0.3 + draw.normal(0, 0.1, 200) for name in ALONE_NAMES}
    losses |= {"levels": rows, "levels with slopes": rows + 1}
    found = verdict_of(OwnLosses("", False, METHODS, losses, None), "levels")
    assert found.sentences.startswith("Training together gains. On 200 rows of this site")
    (chart,) = found.section.charts
    assert isinstance(chart, GainChart)
    assert [row.label for row in chart.rows] == ["the best of them", *TITLES.values()]
    worse = verdict_of(OwnLosses("", False, METHODS, losses, None), "levels with slopes")
    assert worse.sentences.startswith("Training alone is better.")


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
