"""The table [task]: objective, metrics, and the user's own functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score, root_mean_squared_error

import copfl
from copfl.core.task import task_of
from copfl.data.samples import Dataset, Samples
from copfl.errors import UsageError
from copfl.experiment.result import Result
from copfl.experiment.tasks import build_task
from copfl.settings import schema
from copfl.settings.task import task_record as completed

QUICK: dict[str, Any] = {"rounds": 2, "model": "mlp", "engine": "sequential", "rivals": False}
OWN = """
import numpy as np

def weighted(outputs, targets):
    return 3 * ((outputs - targets) ** 2).mean(1)

def one_number(outputs, targets):
    return ((outputs - targets) ** 2).mean()

def largest_error(predictions, targets):
    return float(np.abs(predictions.ravel() - targets.ravel()).max())

largest_error.higher_is_better = False

def text(predictions, targets):
    return "good"
"""


def multilabel() -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 6)).astype(np.float32)
    y = (x[:, :3] + x[:, 3:] > 0.3).astype(np.float32)
    parts = Samples(x[:120], y[:120]), Samples(x[120:], y[120:])
    return Dataset("labels", *parts, ("a", "b", "c"), kind="multilabel")


def predictions(result: Result, client: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The global model's predictions of a client's test samples before its last local update, and the targets."""
    federation, task = result.experiment.federation, result.experiment.task
    test = federation.partition.test[client]
    samples = federation.dataset.test.take(test)
    again = copfl.run("fedavg", federation.dataset, **QUICK | {"rounds": 1}, clients=federation.clients)
    w = again.state.server.w
    with torch.no_grad():
        found = task.predict(w, torch.from_numpy(samples.x))
    found = found.exp() if task.criterion.kind == "classification" else found
    return found.double().numpy(), samples.y


@pytest.mark.job
def test_metrics_of_a_run_are_those_of_scikit_learn_on_its_predictions() -> None:
    def rmse(y: Any, p: Any) -> float:
        return float(root_mean_squared_error(y.reshape(p.shape), p))

    def macro_f1(y: Any, p: Any) -> float:
        return float(f1_score(y, p > 0.5, average="macro", zero_division=np.nan))

    diabetes = copfl.run("fedavg", "diabetes", **QUICK).experiment.federation.dataset
    for data, name, function in ((diabetes, "rmse", rmse), (multilabel(), "macro_f1", macro_f1)):
        result = copfl.run("fedavg", data, **QUICK, clients=4)
        assert result.primary.name == name
        for client in range(4):
            p, y = predictions(result, client)
            assert result.metric(f"{name}_global")[-1, client] == pytest.approx(function(y, p), abs=1e-12)


@pytest.mark.job
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_under_concept_shift_metrics_on_the_host_use_the_clients_own_labels(model: str) -> None:
    """With as many test samples of each class, balanced accuracy is accuracy; F1 of perfect answers is 1."""
    result = copfl.run(
        "local", "digits", model=model, clients=4, rounds=8, optimizer={"name": "adam", "lr": 0.01},
        partition="concept_shift", partition_options={"per_client": 3, "train_per_class": 20, "test_per_class": 10},
        task={"metrics": ["balanced_accuracy", "accuracy", "macro_f1", "auc"]},
    )  # fmt: skip
    accuracy = result.latest("accuracy")
    assert accuracy.min() > 0.8
    np.testing.assert_allclose(result.latest("balanced_accuracy"), accuracy, atol=1e-6)
    np.testing.assert_allclose(result.latest("macro_f1"), accuracy, atol=0.05)
    assert result.latest("auc").min() > 0.9


def test_auc_of_one_class_is_missing_and_not_zero() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    group = np.repeat(np.arange(4), 20)
    y[group == 0] = 1
    samples = Samples(x, y, group)
    data = Dataset("two", samples, samples, ("no", "yes"), groups=("a", "b", "c", "d"))
    result = copfl.run("fedavg", data, **QUICK, task={"metrics": ["auc", "accuracy"]})
    assert result.primary.name == "auc"
    auc, accuracy = result.metric("auc")[-1], result.metric("accuracy")[-1]
    assert np.isnan(auc).tolist() == [True, False, False, False]
    assert not np.isnan(accuracy).any()
    assert result.records[-1]["mean"]["auc"] == pytest.approx(auc[1:].mean())
    p, targets = predictions(result, 1)
    right = roc_auc_score(targets, p[:, 1])
    assert result.metric("auc_global")[-1, 1] == pytest.approx(right, abs=1e-12)


@pytest.mark.job
def test_every_engine_gives_the_same_metrics() -> None:
    settings = {**QUICK, "clients": 5, "task": {"metrics": ["rmse", "mae", "r2"]}}
    one = copfl.run("fedavg", "diabetes", **settings)
    for chunk in (2, 5):
        other = copfl.run("fedavg", "diabetes", **{**settings, "engine": "vmap", "chunk": chunk})
        for name in ("rmse", "mae_before", "r2_global"):
            np.testing.assert_allclose(other.metric(name), one.metric(name), rtol=1e-4)


def test_accuracy_alone_collects_no_predictions() -> None:
    result = copfl.run("fedavg", "digits", **QUICK, clients=2)
    assert not result.experiment.run.task
    names = result.records[-1]["per_client"].keys()
    assert {name for name in names if name.startswith("accuracy")} == {
        "accuracy",
        "accuracy_before",
        "accuracy_global",
    }
    assert not any("predictions" in name for name in names)


def test_own_objective_and_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    table = {"loss": "own_task:weighted", "metrics": ["own_task:largest_error", "rmse"]}
    result = copfl.run("fedavg", "diabetes", **QUICK, task=table, out=tmp_path / "run")
    assert (result.primary.name, result.primary.higher_is_better) == ("largest_error", False)
    assert (result.metric("largest_error") >= result.metric("rmse")).all()
    usual = copfl.run("fedavg", "diabetes", **QUICK)
    first = [run.metric("loss")[0] for run in (result, usual)]
    assert (first[0] > 1.5 * first[1]).all()
    copfl.resume(tmp_path / "run", rounds=3, code="own_task")
    for wrong, message in (
        ({"loss": "own_task:one_number"}, r"returned \[\] for 2 samples"),
        ({"metrics": ["own_task:text"]}, "must return a number"),
        ({"loss": "own_task:nothing"}, "nothing"),
    ):
        with pytest.raises(UsageError, match=message):
            copfl.run("fedavg", "diabetes", **QUICK, task=wrong)


@pytest.mark.parametrize(
    ("table", "kind", "message"),
    [
        ({"loss": "huber"}, "classification", "task.loss='huber' is not defined for classification"),
        ({"loss": "hubert"}, "regression", "huber"),
        ({"metrics": "auc"}, "regression", "not defined for regression"),
        ({"metrics": "acuracy"}, "classification", "accuracy"),
        ({"metrics": "auc,auc"}, "classification", "named twice"),
        ({"delta": 2.0}, "classification", "task.delta=2.0 is no option of a classification task"),
        ({"label_smoothing": 0.1}, "regression", "label_smoothing=0.1 is no option"),
        ({"smoothing": 0.1}, "classification", "label_smoothing"),
    ],
)
def test_bad_settings_are_refused(table: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_task(completed(table), kind)


def test_class_weights_must_fit_the_classes() -> None:
    with pytest.raises(UsageError, match="class_weights has 2 numbers for 10 classes"):
        copfl.run("fedavg", "digits", **QUICK, task={"class_weights": [1, 2]})


def test_a_regression_is_trained_on_standardised_targets_and_evaluated_in_units() -> None:
    criterion = build_task(schema.Task(), "regression", ((100.0,), (20.0,)))[0]
    outputs, y = torch.tensor([[0.0], [1.0]]), torch.tensor([100.0, 140.0])
    assert criterion.losses(outputs, y).tolist() == [0.0, 1.0]
    assert criterion.predictions(outputs).flatten().tolist() == [100.0, 120.0]
    assert criterion.test_losses(criterion.predictions(outputs), y).tolist() == [0.0, 1.0]
    two = build_task(completed({"loss": "absolute"}), "regression", ((0.0, 10.0), (1.0, 5.0)))[0]
    assert two.losses(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 10.0]])).tolist() == [0.5]
    assert two.predictions(torch.tensor([[1.0, 1.0]])).tolist() == [[1.0, 15.0]]
    assert task_of(torch.nn.Linear(2, 1), 1, criterion=criterion).metrics[0].name == "rmse"
