"""`copfl federate init` without a named method, and with that of a rehearsal."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import copfl
from copfl.data.contract.contract import Column, Contract
from copfl.errors import RunError, UsageError
from copfl.federation.machines.app import init, planned
from copfl.federation.machines.rehearsal import rehearsed
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.settings import settings_of
from copfl.settings.toml import Tables
from tests.commands import called
from tests.federation.network import farthest, play, write_nodes

AGE = Column(name="age", type="number", mean=50.0, deviation=10.0)
CONTRACT = Contract(
    columns=(AGE,), targets=(Column(name="disease", type="category", categories=("no", "yes")),)
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> copfl.Result:
    folder = tmp_path_factory.mktemp("rehearsal") / "ours"
    slopes = {"varying": "all"}
    few = {"rounds": 3, "rivals": False, "local_baseline": False}
    return copfl.run("levels", "heart", algorithm_options=slopes, run=few, out=folder, log=None)


@pytest.fixture
def rehearsal(result: copfl.Result) -> Path:
    assert result.folder is not None
    return result.folder


def changed(rehearsal: Path, folder: Path, before: str, after: str) -> Path:
    """The run with another line in run.toml."""
    shutil.copytree(rehearsal, folder)
    text = (folder / "run.toml").read_text()
    assert before in text
    (folder / "run.toml").write_text(text.replace(before, after))
    return folder


def test_a_federation_like_a_run_trains_its_model(
    result: copfl.Result, rehearsal: Path, tmp_path: Path
) -> None:
    """The method, its options, the rounds and the data: nodes with the run's rows get the run's coefficients."""
    config = read_app(init(tmp_path / "app", like=rehearsal))["config"]
    settings = settings_of(config)
    assert (settings.run.algorithm.name, settings.run.algorithm.options["varying"]) == ("levels", "all")
    assert (settings.federation.rounds, settings.federation.clients) == (3, 4)
    nodes = write_nodes(result.experiment.federation, tmp_path / "nodes")
    flat = {
        f"{title}.{key}": value
        for title, table in config.items()
        if title != "proposal"
        for key, value in table.items()
    }
    played = play(flat | {"session.run": "test"}, nodes, tmp_path / "runs")
    assert farthest(played.server, result.state.server) <= 1e-9


def test_with_a_contract_the_data_are_the_contracts_and_the_rest_the_runs(
    rehearsal: Path, tmp_path: Path
) -> None:
    run = changed(rehearsal, tmp_path / "warm", "temperature = 1.0", "temperature = 1.25")
    federation = planned(rehearsed(run, CONTRACT).layer, {"secure": {"aggregation": True}}, contract=CONTRACT)
    assert federation.samples.names == ("no", "yes")
    assert federation.run.run.temperature == 1.25
    assert federation.run.run.even_batches  # in secure sums, whatever the simulation did


def test_sites_with_a_model_of_their_own_are_told_and_the_method_is_deployed(
    rehearsal: Path, tmp_path: Path
) -> None:
    run = changed(rehearsal, tmp_path / "own", 'own_models = ""', 'own_models = "3:forest"')
    (run / "run.toml").write_text((run / "run.toml").read_text().replace('name = "linear"', 'name = "trees"'))
    found = rehearsed(run, None)
    assert "3:forest" in found.note
    assert planned(found.layer).run.model.name == "linear"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("alone = false", "alone = true", "nothing to send"),
        ("rounds = 3", "rounds = 5", "3 of 5 rounds"),
        ('name = "heart"', 'name = "heart"\ntarget = "chol"', "predicts chol, and the contract disease"),
        ("[model]", "[modell]", r"no table \[model\]"),
    ],
)
def test_a_run_that_no_federation_can_repeat_is_refused(
    rehearsal: Path, tmp_path: Path, before: str, after: str, says: str
) -> None:
    run = changed(rehearsal, tmp_path / "run", before, after)
    with pytest.raises((UsageError, RunError), match=says):
        init(tmp_path / "app", like=run, contract=CONTRACT)
    assert not (tmp_path / "app").exists()


def test_a_table_without_a_named_method_has_levels_with_their_rounds() -> None:
    run = planned(contract=CONTRACT).run
    assert (run.algorithm.name, run.model.name, run.run.rounds) == ("levels", "linear", 16)
    named: list[Tables] = [
        {"model": {"name": "mlp"}},
        {"optimizer": {"lr": 0.1}},
        {"algorithm": {"name": "fedavg"}},
    ]
    assert "levels" not in [planned(layer, contract=CONTRACT).run.algorithm.name for layer in named]
    assert planned().run.algorithm.name == "fedpac"  # digits are images


def test_what_levels_cannot_solve_keeps_the_first_choice() -> None:
    names = [f"x{n}" for n in range(2000)]
    columns = tuple(Column(name=name, type="number", mean=0.0, deviation=1.0) for name in names)
    many = Contract(columns=columns, targets=CONTRACT.targets)
    assert planned(contract=many).run.algorithm.name != "levels"


def test_init_says_why_and_how_to_have_another(
    rehearsal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = called(capsys, "federate", "init", str(tmp_path / "usual"), "-d", "heart").out
    assert (
        "Nobody named a method: `copfl federate run` first compares levels, levels with slopes and what"
        in told
    )
    assert "--like RUN" in told
    told = called(capsys, "federate", "init", str(tmp_path / "like"), "--like", str(rehearsal)).out
    assert f"Trained as in {rehearsal}: levels, 3 rounds" in told
    assert "--like RUN" not in told
