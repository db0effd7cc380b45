"""A run that failed ends with an error or a warning, never with a table of dashes alone."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import copfl
from copfl.data import arrays
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.errors import RunError
from copfl.experiment import records
from copfl.experiment.analysis.hints import named, untrained_loss, warnings_of
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


def test_a_hopeless_loss_is_an_error_though_every_model_is_finite(tmp_path: Path) -> None:
    with pytest.raises(RunError) as raised:
        copfl.run("fedavg", rounds=9, optimizer={"name": "adam", "lr": 1e6}, out=tmp_path / "run", **TINY)
    message = str(raised.value)
    assert "training diverged: in rounds 1 to 3, the training loss was " in message
    assert "or more, where an untrained model has 2." in message
    assert "use a lower learning rate (lr='RATE')" in message
    lines = records.read(tmp_path / "run" / "rounds.jsonl")
    assert [line["mean"]["healthy"] for line in lines] == [1.0] * 3


@pytest.mark.parametrize("rate", [10.0, 1e6])
def test_a_rate_of_regression_that_is_too_high_is_said(rate: float) -> None:
    rng = np.random.default_rng(0)
    data = arrays.from_arrays(
        rng.normal(size=(90, 5)).astype(np.float32), rng.normal(size=90), group=np.arange(90) % 3
    )
    settings: dict[str, Any] = {"model": "mlp", "rounds": 4, "model_options": {"width": 4}}
    run = partial(copfl.run, "fedavg", data, optimizer={"name": "adam", "lr": rate}, **settings)
    if rate > 100:
        with pytest.raises(RunError, match="training diverged: in rounds 1 to 3, the training loss was"):
            run()
    else:
        with pytest.warns(RuntimeWarning, match="training diverged: the training loss reached"):
            run()


def two_clients(y: NDArray[Any]) -> FederatedData:
    data = arrays.from_arrays(np.zeros((20, 2)), y, group=np.arange(20) // 2 % 2)
    assert data.train.group is not None
    assert data.test.group is not None
    train, test = (
        tuple(np.flatnonzero(group == n) for n in (0, 1)) for group in (data.train.group, data.test.group)
    )
    return FederatedData(data, Partition(train, test, "by_group"))


def line(number: int, loss: float, **others: float | None) -> dict[str, Any]:
    per_client = {"healthy": [1.0, 1.0]}
    return {"round": number, "clients": [0, 1], "mean": {"loss": loss, **others}, "per_client": per_client}


@pytest.mark.parametrize(
    ("losses", "is_said"),
    [
        ([9000.0, 800.0, 1.5, 1.2, 1.3, 1.4], True),  # it rose and did not recover
        ([9000.0, 800.0, 1.5, 1.2, 0.6, 1.4], False),  # it recovered
        ([1.5, 1.4, 1.5, 1.4, 1.5, 1.4], False),  # such as a sum of two losses
        ([0.7, 0.6, 0.5, 0.4, 0.3, 3.4], False),
    ],
)
def test_a_loss_that_ends_above_that_of_an_untrained_model(losses: list[float], is_said: bool) -> None:
    lines = [line(n + 1, loss) for n, loss in enumerate(losses)]
    found = warnings_of(lines, two_clients(np.arange(20) % 2))
    assert [
        sentence.startswith("training diverged: the training loss reached 9e+03") for sentence in found
    ] == ([True] if is_said else [])
    assert not is_said or "at the end it is 1.3 or more, where an untrained model has 0.693" in found[0]


def test_the_loss_of_an_untrained_model() -> None:
    of_classes, of_values = two_clients(np.arange(20) % 2), two_clients(np.arange(20) + 0.5)
    assert untrained_loss({"test_loss_before": 0.9}, of_classes) == 0.9
    assert untrained_loss({"test_loss_before": 0.1}, of_classes) == math.log(2)  # a pretrained model
    assert untrained_loss({"test_loss_before": None}, of_classes) == math.log(2)
    assert untrained_loss({"test_loss_global": 3.0}, of_values) == 3.0
    assert math.isnan(untrained_loss({}, of_values))


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


def test_a_method_without_a_learning_rate_is_not_told_to_change_it() -> None:
    lines = [line(n + 1, 1.0) for n in range(10)]
    for one in lines:
        one["per_client"]["accuracy"] = [0.5, 0.5]
    clients = two_clients(np.arange(20) % 2)  # both clients have as much of both classes
    (rated,) = warnings_of(lines, clients)
    (unrated,) = warnings_of(lines, clients, rated=False)
    assert "Try other learning rates" in rated
    assert unrated == rated.replace(rated[rated.index("other learning") : rated.index("another model")], "")


def test_many_clients_are_not_all_named() -> None:
    assert named([4]) == "client 4"
    assert named(range(13)) == "clients 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 3 more"
