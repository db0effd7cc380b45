"""A run that failed ends with an error or a warning, never with a table of dashes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.data import arrays
from copfl.errors import RunError
from copfl.experiment import records
from copfl.experiment.analysis.hints import named
from tests.commands import TINY as TINY_OPTIONS
from tests.commands import called

TINY: dict[str, Any] = {"model": "mlp", "clients": 3, "model_options": {"width": 4}}


@pytest.mark.parametrize("optimizer", ["sgd", "mamo"])
def test_total_divergence_is_an_error_that_names_clients_and_remedy(optimizer: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as raised:
        copfl.run("copfl", rounds=9, optimizer={"name": optimizer, "lr": 1e30}, out=tmp_path / "run", **TINY)
    message = str(raised.value)
    assert "rounds 1 to 3" in message
    assert "clients 0, 1, 2" in message
    assert "lower learning rate" in message
    assert "resumed, it diverges again" in message
    assert len(records.read(tmp_path / "run" / "rounds.jsonl")) == 3  # the folder is kept


def test_a_run_of_one_round_diverges_too() -> None:
    with pytest.raises(RunError, match="in round 1, no client had a finite model"):
        copfl.run("fedavg", rounds=1, optimizer={"lr": 1e30}, **TINY)


def test_the_command_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--dataset", "digits", *TINY_OPTIONS, "--rounds", 2, "--lr", "1e30", "--out", tmp_path / "run")
    done = called(capsys, "run", *words)
    assert done.code == 2
    assert "training diverged" in done.err
    assert (tmp_path / "run" / "run.toml").exists()


def test_some_clients_that_diverged_are_a_warning() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 5)).astype(np.float32), np.arange(90) % 3
    group = np.arange(90) // 3 % 3
    x[group == 1] *= 1e30
    data = arrays.from_arrays(x[:60], y[:60], x[60:], y[60:], group=group[:60], group_test=group[60:])
    with pytest.warns(RuntimeWarning, match="of 3 diverged|not scaled") as caught:
        result = copfl.run(
            "local",
            data,
            model="mlp",
            partition="by_group",
            clients=3,
            rounds=2,
            model_options={"width": 4},
            optimizer="sgd",
            lr=0.1,
        )
    assert [str(one.message) for one in caught] == result.warnings
    assert len(result.warnings) == 2
    assert "client 1 of 3 diverged" in result.warnings[1]


@pytest.mark.parametrize("server", [{"name": "adam", "lr": 1.0}, {"name": "mean", "lr": 20.0}])
def test_a_loss_that_the_server_makes_explode_is_a_warning_that_says_what_to_set(server: Any) -> None:
    expected = rf"training loss rose from 2\.0.* the server's step \({server['name']}\) may be too long"
    with pytest.warns(RuntimeWarning, match=expected) as caught:
        copfl.run("fedavg", rounds=4, optimizer={"name": "adam", "lr": 0.1}, server=server, **TINY)
    assert any("take the plain mean (server='mean')" in str(one.message) for one in caught)


def test_a_run_that_diverges_with_a_step_of_the_server_names_it() -> None:
    with pytest.raises(RunError, match=r"the server's step \(fedexp\) may be too long: take the plain mean"):
        copfl.run("fedavg", rounds=1, optimizer={"lr": 1e30}, server={"name": "fedexp"}, **TINY)


def test_accuracy_at_chance_is_a_warning() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"constant answer: .* most frequent class in training gives 33\.3 %"
    ):
        copfl.run("fedavg", rounds=10, optimizer={"name": "sgd", "lr": 1e-9}, **TINY)
    assert not copfl.run("local", rounds=10, clients=3, optimizer={"name": "adam", "lr": 0.01}).warnings


def test_many_clients_are_not_all_named() -> None:
    assert named([4]) == "client 4"
    assert named(range(13)) == "clients 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 3 more"
