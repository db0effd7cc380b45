"""What the first run on a table trains, and that a client's own model is delivered like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import copfl
from copfl.choosing import candidates as trying
from copfl.choosing import first_run as module
from copfl.choosing.candidates import Facts, Tried
from copfl.choosing.first_run import is_open
from copfl.choosing.folds import folds
from copfl.core import tree
from copfl.data.clients.partition import Partition
from copfl.data.samples import CLASSIFICATION, REGRESSION, Dataset, Samples
from copfl.errors import CopflError
from copfl.experiment import rivals
from copfl.experiment.choice import as_json
from copfl.experiment.own_models import kinds_of, written
from copfl.measures.metrics import METRICS
from copfl.rivals import estimators
from copfl.rivals.effort import FEWEST_TREES, PENALTIES, Effort
from copfl.rivals.records import SiteRows
from copfl.rivals.site import site_rivals
from copfl.settings.checking import SettingError
from copfl.settings.complete import complete


def sites(kind: str, count: int = 3, rows: int = 90) -> list[tuple[Any, Any]]:
    """Sites with two columns: a sum with noise, the same for all; or a step at each site's own place."""
    rng = np.random.default_rng(0)
    found = []
    for n in range(count):
        x = rng.normal(size=(rows, 2)).astype(np.float32)
        step = 4.0 * (x[:, 0] > n - 1) + 4.0 * (x[:, 1] * x[:, 0] > 0) + 0.01 * rng.normal(size=rows)
        y = step if kind == "step" else x.sum(1) + rng.normal(size=rows)
        found.append((x, (y > 0).astype(np.int64) if kind == "class" else y.astype(np.float32)))
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without slopes and trees, which have tests of their own and take seconds."""
    without(monkeypatch, trying.SLOPES, trying.TREES)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Nothing of these names is tried."""

    def some(facts: Facts) -> Tried:
        found = trying.candidates_for(facts)
        return found._replace(candidates=tuple(one for one in found.candidates if one.name not in names))

    monkeypatch.setattr(module, "candidates_for", some)


@pytest.mark.usefixtures("quick")
def test_where_sites_are_alike_they_train_together() -> None:
    result = copfl.run(dataset=sites("class", count=10, rows=20))
    assert result.choice is not None
    assert result.choice.federation == "levels"
    assert result.experiment.run.algorithm.name == "levels"


def test_slopes_of_many_features_are_left_out_with_the_reason() -> None:
    found = trying.candidates_for(Facts("classification", "mlp", 60, trying.MOST_SLOPES + 1, ("constant",)))
    assert trying.SLOPES not in [one.name for one in found.candidates]
    assert found.left_out == {trying.SLOPES: "there are 301 features, and more than 300 take long"}


@pytest.mark.usefixtures("quick")
def test_where_each_site_has_its_own_steps_it_gets_its_own_forest(tmp_path: Path) -> None:
    result = copfl.run(dataset=sites("step"), out=tmp_path / "run")
    assert result.choice is not None
    assert result.choice.federation == "forest alone"
    assert set(result.choice.sites) == {"forest alone"}
    assert result.rivals is not None
    forest = result.rivals.values["forest"].tested["rmse"]
    assert result.final("rmse") == pytest.approx(forest, rel=1e-4)  # in single precision
    # The model is the rival, so no rounding calls it better or worse.
    assert result.rivals.chosen == "forest"
    assert result.rivals.personal["rmse"].tolist() == forest.tolist()
    assert set(result.rivals.interval) == {(0.0, 0.0)}
    assert (result.metric("bytes_up") < 1000).all()  # nothing of the forest leaves
    bundle = copfl.load(tmp_path / "run" / "models" / "client-0001")
    x = result.experiment.federation.test.rows([1]).x[0]
    with torch.no_grad():
        expected = result.experiment.task.predict(result.client_model(1), x)
    assert np.allclose(np.asarray(bundle.predict(x.numpy())).ravel(), expected.numpy().ravel(), atol=1e-4)


@pytest.mark.job
def test_clients_of_your_choice_keep_their_own_models() -> None:
    room = {"trees": 101, "nodes": 200, "depth": 40}
    result = copfl.run(
        "levels", sites("class"), model="trees", model_options=room, own_models="1:constant,2:forest"
    )
    assert result.rivals is not None
    loss = {name: values.tested["log_loss"] for name, values in result.rivals.values.items()}
    ours = result.rivals.personal["log_loss"]
    assert ours[1:] == pytest.approx([loss["constant"][1], loss["forest"][2]], rel=1e-4)
    assert ours[0] not in [values[0] for values in loss.values()]


@pytest.mark.parametrize(
    ("setting", "kinds"), [("forest", {0: "forest", 1: "forest"}), ("1:linear", {1: "linear"}), ("", {})]
)
def test_the_setting_names_clients_and_kinds(setting: str, kinds: dict[int, str]) -> None:
    assert kinds_of(setting, 2) == kinds
    assert written(kinds, 2) == setting


@pytest.mark.parametrize("setting", ["tree", "2:forest", "forest:1", "0:bush"])
def test_a_setting_that_names_nothing_is_refused(setting: str) -> None:
    with pytest.raises(SettingError, match="kinds are constant, linear, forest, boosted"):
        kinds_of(setting, 2)


@pytest.mark.parametrize("options", [{"model": "linear"}, {"model": "trees", "model_options": {"trees": 1}}])
def test_a_model_without_room_is_refused_before_training(options: dict[str, Any]) -> None:
    with pytest.raises(CopflError, match=r"--model trees|larger model: --set model\.trees="):
        copfl.run("levels", sites("class"), own_models="forest", **options)


def test_each_row_is_held_out_once_and_a_single_row_never() -> None:
    y = np.array([0, 1, 0, 1, 0, 1, 1], np.int64)
    x = np.zeros((7, 2), np.float32)
    data = Dataset("mine", Samples(x, y), Samples(x, y), ("no", "yes"), kind=CLASSIFICATION)
    whole = Partition((np.arange(6), np.array([6])), (np.arange(6), np.array([6])), "mine")
    found = folds(whole, data, 0)
    held_out = np.stack([found.held_out(fold, 0) for fold in range(found.number)])
    assert (held_out.sum(0) == 1).all()
    assert not any(found.held_out(fold, 1).any() for fold in range(found.number))
    for fold in range(found.number):
        parts = found.partition(fold)
        assert np.array_equal(np.sort(np.concatenate([parts.train[0], parts.test[0]])), np.arange(6))


def test_sites_with_as_many_rows_hold_out_different_ones_and_their_rivals_the_same() -> None:
    """Rows in the order of time: one fold must not be the same weeks at every site."""
    weeks, sites = 10, 40
    y = np.random.default_rng(0).normal(size=(weeks * sites, 1)).astype(np.float32)
    x = np.tile(np.arange(weeks, dtype=np.float32), sites)[:, None]
    data = Dataset("weeks", Samples(x, y), Samples(x, y), ("y",), kind=REGRESSION)
    rows = tuple(np.split(np.arange(weeks * sites), sites))
    found = folds(Partition(rows, rows, "mine"), data, 0)
    for week in range(weeks):
        at_once = np.bincount([of_site[week] for of_site in found.of], minlength=found.number)
        assert at_once.max() < sites / 2
    effort = Effort(PENALTIES, FEWEST_TREES, FEWEST_TREES, 1.0)
    with patch.object(estimators, "constant", wraps=estimators.constant) as asked:
        site_rivals(SiteRows(x[:weeks], y[:weeks], x[:1], y[:1]), REGRESSION, 1, METRICS["rmse"], effort, 0)
    (problem,), _ = asked.call_args
    assert np.array_equal(estimators.folds_of(weeks, problem.seed), found.of[0])


@pytest.mark.parametrize(
    "layer",
    [
        {"algorithm": {"name": "fedavg"}},
        {"optimizer": {"name": "sgd"}},
        {"model": {"name": "mlp"}},
        {"addons": {"ema": 0.5}},
        {"run": {"participation": 0.5}},
    ],
)
def test_whoever_chooses_how_to_train_gets_it(layer: dict[str, dict[str, Any]]) -> None:
    data = {"data": {"name": "heart"}}
    assert not is_open(complete(data, layer), [data, layer])
    assert is_open(complete(data), [data])


def test_what_one_looks_at_says_nothing_about_how_to_train() -> None:
    looks: dict[str, dict[str, Any]] = {
        "data": {"name": "heart"},
        "task": {"metrics": ["auc"]},
        "run": {"rivals": False},
    }
    assert is_open(complete(looks), [looks])
    assert not is_open(complete(looks), [looks, {"task": {"metrics": ["auc"], "label_smoothing": 0.1}}])


@pytest.mark.usefixtures("quick")
def test_named_rounds_bound_the_candidates_and_do_not_close_the_choice() -> None:
    result = copfl.run(dataset=sites("class", count=10, rows=20), rounds=3)
    assert result.choice is not None
    assert result.choice.federation == "levels"
    assert len(result.records) == 3


@pytest.mark.job
def test_a_named_rate_is_for_the_candidates_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, trying.SLOPES, trying.TREES)
    result = copfl.run(dataset=sites("class", count=3, rows=30), lr=0.002, rounds=2)
    assert result.choice is not None
    assert {"levels", "network"} <= set(result.choice.validated.means)


@pytest.mark.job
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("more", [{"task": {"metrics": ["rmse", "mae"]}}, {"rivals": False}])
def test_what_one_looks_at_has_no_say_in_what_is_trained(more: dict[str, Any]) -> None:
    data = sites("step", rows=60)
    usual, other = copfl.run(dataset=data), copfl.run(dataset=data, **more)
    assert usual.choice is not None
    assert other.choice is not None
    assert as_json(usual.choice) == as_json(other.choice)
    ours, theirs = (result.experiment.run for result in (usual, other))
    assert (ours.algorithm, ours.run.rounds, ours.run.own_models) == (
        theirs.algorithm,
        theirs.run.rounds,
        theirs.run.own_models,
    )


@pytest.mark.job
@pytest.mark.usefixtures("quick")
def test_rivals_that_train_beside_the_methods_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTH_A_PROCESS", 1e-3)
    monkeypatch.setattr(module, "processors", lambda: 3)
    asked: list[int] = []
    beside = rivals.rivals_beside

    def watched(e: Any, plan: Any, processes: int) -> Any:
        asked.append(processes)
        rivals._trained.clear()  # of the run before
        return beside(e, plan, processes)

    monkeypatch.setattr(module, "rivals_beside", watched)
    alone, with_others = (copfl.run(dataset=sites("step", rows=60), workers=workers) for workers in (1, 0))
    assert asked == [0, 2]
    assert alone.choice is not None
    assert with_others.choice is not None
    assert as_json(alone.choice) == as_json(with_others.choice)
    one, other = (tree.leaves(result.client_model(1)) for result in (alone, with_others))
    assert all(map(torch.equal, one, other))
