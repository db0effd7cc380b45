"""Clients that never train are fitted after the last round by the algorithm's own local update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl.algorithms import ALGORITHMS
from copfl.core import tree
from copfl.core.algorithm import message_to_new_client, next_message
from copfl.core.batches import plan, split_new
from copfl.core.optim import Adam
from copfl.core.payload import innermost
from copfl.core.task import Experts
from copfl.errors import UsageError
from copfl.experiment.models import new_clients
from copfl.experiment.models.new_clients import NEW_CLIENTS
from copfl.experiment.preparation import prepare
from copfl.settings import named_code
from copfl.settings.complete import complete
from copfl.wrappers.attacks import Attacked
from tests.kinds import quick
from tests.toys import only_model

TINY: dict[str, Any] = {"model": "mlp", "clients": 5, "rounds": 2, "model_options": {"width": 4}}
QUICK: dict[str, Any] = {**TINY, "optimizer": {"name": "adam", "lr": 0.01}}


def test_the_clients_that_are_kept_out() -> None:
    for clients, fraction, count in ((10, 0.2, 2), (5, 0.01, 1), (2, 0.9, 1), (3, 0.0, 0)):
        trained, new = split_new(0, clients, fraction)
        assert len(new) == count
        assert sorted([*trained, *new]) == list(range(clients))
    assert any(split_new(0, 10, 0.2)[1].tolist() != split_new(s, 10, 0.2)[1].tolist() for s in range(1, 9))


@pytest.mark.job
def test_new_clients_do_not_train_and_do_not_change_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = copfl.run("fedavg", **QUICK, new_clients=0.4, out=tmp_path / "run")
    new = result.new_clients
    assert new is not None
    assert len(new.clients) == 2
    assert all(set(record["clients"]).isdisjoint(new.clients) for record in result.records)
    assert np.isnan(result.accuracy[:, new.clients]).all()
    assert new.accuracy.keys() == new.alone.keys() == {"1", "5", "all"}
    assert new.alone["all"].mean() > 0.5
    read = NEW_CLIENTS.read(tmp_path / "run")
    assert read is not None
    assert read.accuracy["5"].tolist() == new.accuracy["5"].tolist()
    monkeypatch.setattr(new_clients, "UPDATES", 2)
    again = copfl.resume(tmp_path / "run", rounds=3)
    whole = copfl.run("fedavg", **{**QUICK, "rounds": 3}, new_clients=0.4)
    assert again.records == whole.records
    assert whole.new_clients is not None
    assert again.new_clients is not None
    assert again.new_clients.accuracy["all"].tolist() == whole.new_clients.accuracy["all"].tolist()


def test_under_concept_shift_a_new_client_has_its_own_labels() -> None:
    shift: dict[str, Any] = {
        "partition": "concept_shift",
        "partition_options": {"per_client": 4, "train_per_class": 3},
    }
    result = copfl.run("fedavg", **QUICK, **shift)
    whole = result.experiment.federation
    new = np.array([1, 3])
    for count in (1, 5, None):
        part = new_clients._only(whole, new, count, 0, torch.device("cpu"))
        for place, client in enumerate(new.tolist()):
            assert part.test.targets(place).tolist() == whole.test.targets(client).tolist()


@pytest.mark.job
def test_local_training_of_a_new_client_is_training_alone() -> None:
    new = copfl.run("local", **QUICK, new_clients=0.4).new_clients
    assert new is not None
    for name, values in new.accuracy.items():
        assert values.tolist() == new.alone[name].tolist()


# That the update of each is one that goes on, the next test has of all of them.
@pytest.mark.job
@pytest.mark.parametrize("name", quick(ALGORITHMS))
def test_every_algorithm_fits_new_clients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_clients, "UPDATES", 2)
    monkeypatch.setattr(new_clients, "SAMPLES", {"5": 5})
    how: dict[str, Any] = {**QUICK, "rounds": 1, "engine": "vmap"}
    if getattr(ALGORITHMS[name], "needs", ()):
        del how["model_options"]
        how["model"] = "tests.toys:adapted_mlp"
    if only_model(ALGORITHMS[name]):
        how = {key: v for key, v in how.items() if key not in ("model", "model_options", "optimizer")}
    new = copfl.run(name, **how, new_clients=0.4).new_clients
    assert new is not None
    assert np.isfinite(new.accuracy["5"]).all()


@pytest.mark.job
def test_every_algorithm_continues_where_its_last_update_ended() -> None:
    """By its own record or by its own model as the next message: a second update is not the first again."""
    # By design fedbabu's fine-tuning begins at the global model, knn_per's new client keeps the global model and
    # remembers its samples, levels' first update is the solution, and trees grow at the server.
    for name in sorted(set(ALGORITHMS) - {"fedbabu", "knn_per", "levels", "trees", "wide_levels"}):
        network = "tests.toys:adapted_mlp" if getattr(ALGORITHMS[name], "needs", ()) else "mlp"
        named_code.name("tests.toys")
        e = prepare(
            complete(
                {"algorithm": {"name": name}, "run": {"clients": 3}, "model": {"name": network, "width": 4}}
            )
        )
        server = e.algorithm.server_init(e.task, 3)
        down = message_to_new_client(e.algorithm, server, torch.arange(3))
        wrapped = new_clients.WithoutServer(e.algorithm, down)
        client, models = wrapped.client_init(e.task), []
        data = tree.row(e.federation.train.rows([0]), 0)
        batches = tree.row(plan(0, 0, [0], [15], batch=8, epochs=e.algorithm.total_epochs), 0)
        nothing = wrapped.server_init(e.task, 3)
        for _ in range(5):
            with torch.no_grad():
                output = wrapped.client_update(e.task, client, nothing, data, batches)
            client, model = output.client, output.trained
            models.append(model.w[0] if isinstance(model, Experts) else model)
        assert not torch.equal(models[0], models[-1]), name


def test_the_next_message_is_the_clients_own_model_where_nothing_is_personal() -> None:
    e = prepare(complete({"algorithm": {"name": "fedavg"}, "run": {"clients": 2}, "model": {"name": "mlp"}}))
    down = e.algorithm.downlink(e.algorithm.server_init(e.task, 2), torch.arange(1))
    own = type(down)(down.w[0] + 1)
    assert torch.equal(next_message(e.algorithm, e.task, down, own).w, own.w)
    per = ALGORITHMS["fedper"](optimizer=Adam())
    assert next_message(per, e.task, down, own) is down


def test_a_wrapper_passes_on_the_next_message() -> None:
    settings: dict[str, Any] = {
        "algorithm": {"name": "fedavg"},
        "run": {"clients": 2},
        "model": {"name": "mlp"},
    }
    for wrapper in ({"robust": {"name": "median"}}, {"addons": {"ema": 0.9, "lr_schedule": "cosine"}}):
        e = prepare(complete(settings | wrapper))
        down = message_to_new_client(e.algorithm, e.algorithm.server_init(e.task, 2), torch.arange(2))
        own = innermost(down)._replace(w=innermost(down).w + 1)
        after = next_message(e.algorithm, e.task, down, own)
        assert type(after) is type(down)
        assert torch.equal(innermost(after).w, own.w)
    private = prepare(complete(settings | {"privacy": {"noise": 1.0}})).algorithm
    assert next_message(private, e.task, down, own) is down  # its upload has noise


def test_what_is_not_allowed() -> None:
    with pytest.raises(UsageError, match=r"new_clients=1\.0 must be a number, at least 0 and below 1"):
        copfl.run("fedavg", **TINY, new_clients=1.0)
    with pytest.raises(UsageError, match="needs at least two clients"):
        copfl.run("fedavg", **{**TINY, "clients": 1}, new_clients=0.5)


@pytest.mark.job
def test_new_clients_are_honest() -> None:
    how: dict[str, Any] = {**QUICK, "new_clients": 0.4, "attack": {"name": "label_flip", "fraction": 0.7}}
    result = copfl.run("local", **how)
    assert isinstance(result.experiment.algorithm, Attacked)
    attackers = result.experiment.algorithm.attackers
    assert result.new_clients is not None
    assert len(attackers) == 2  # 0.7 of the three that train
    assert set(attackers).isdisjoint(result.new_clients.clients)
    for name, values in result.new_clients.accuracy.items():  # on their own labels
        assert values.tolist() == result.new_clients.alone[name].tolist()
