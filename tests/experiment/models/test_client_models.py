"""The model that was scored is the model that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import copfl
import copfl.errors
from copfl.core.evaluation import primary_metrics
from copfl.core.task import Personal
from copfl.experiment.models.client_models import RECEIVED, TRAINED, Stage, vector_of
from copfl.experiment.personalisation import as_data
from copfl.experiment.preparation import prepare
from copfl.experiment.training import execute
from copfl.settings.complete import complete
from tests.models import tiny
from tests.slow import slow

SMALL: dict[str, Any] = {
    "clients": 3,
    "rounds": 2,
    "model": "cnn",
    "model_options": {"width": 2, "norm": "batch"},
}
SMALL |= {"batch": 64, "engine": "sequential"}
LORA: dict[str, Any] = {
    "adapter": "lora:r=2,targets=query+value",
    "lr": 0.05,
    "clients": 3,
    "rounds": 2,
    "partition": "iid",
}


def scores(result: copfl.Result, model_of: Any) -> list[float]:
    """The primary metric of each client's model on the client's test samples."""
    e = result.experiment
    found = []
    for n in range(e.clients):
        chosen = e.federation.partition.test[n]
        samples = e.federation.dataset.test.take(chosen)
        with torch.no_grad():
            model: Personal = model_of(n)
            found += primary_metrics(e.task, model, [as_data(samples)])
    return found


def trained(name: str, tmp_path: Path, **more: Any) -> copfl.Result:
    """A short run of this algorithm; of those that need an adapter, with one."""
    if not name.endswith("_lora"):
        return copfl.run(name, **{**SMALL, **more})
    options = {"train": "*.base_layer.weight"} if name == "fedex_lora" else {}
    base = tiny.base(tmp_path, "BertForSequenceClassification")
    return copfl.run(name, tiny.sentences(), model=f"hf:{base}", model_options=options, **{**LORA, **more})


def test_each_client_has_the_model_that_was_tuned_for_it() -> None:
    result = copfl.run("fedbabu", **SMALL)
    assert not torch.equal(*map(vector_of, (result.client_model(0), result.client_model(1))))


@pytest.mark.job
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"eval_every": 2},
        {"engine": "vmap", "chunk": 2},
        pytest.param({"workers": 2}, marks=slow),  # the models of workers: engine/test_workers.py
    ],
)
def test_with_few_participants_the_model_is_that_of_the_clients_last_evaluation(
    how: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**SMALL, "clients": 12, "rounds": 5, "participation": 0.17, **how}
    result = copfl.run("fedavg_ft", **settings, out=tmp_path / "run")
    table = result.latest("accuracy")
    known = ~np.isnan(table)
    assert np.array(scores(result, result.client_model))[known].tolist() == table[known].tolist()
    assert 0 < known.sum() < 12
    assert result.kept is not None
    stages = [stage.name for n in range(12) if (stage := result.kept.stage(n)) is not None]
    assert stages == [TRAINED if is_known else RECEIVED for is_known in known]


def test_the_model_before_training_has_a_name() -> None:
    result = copfl.run("fedavg_ft", **SMALL)
    longer = copfl.run("fedavg_ft", **{**SMALL, "rounds": 3})
    before = scores(result, lambda n: result.client_model(n, before_training=True))
    assert before == longer.accuracy_before[2].tolist()


def test_a_stopped_run_keeps_the_models_of_one_that_was_not(tmp_path: Path) -> None:
    settings = {**SMALL, "clients": 6, "participation": 0.34, "checkpoint_every": 2}
    copfl.run("fedavg_ft", **{**settings, "rounds": 5}, out=tmp_path / "whole")
    copfl.run("fedavg_ft", **{**settings, "rounds": 3}, out=tmp_path / "parts")
    copfl.resume(tmp_path / "parts", rounds=5)
    both = [sorted((tmp_path / name / "models").rglob("*.safetensors")) for name in ("whole", "parts")]
    assert [file.read_bytes() for file in both[0]] == [file.read_bytes() for file in both[1]]
    assert len(both[0]) == 7  # and the global model


def test_a_client_that_diverged_has_the_model_it_received() -> None:
    run: dict[str, Any] = {"clients": 3, "rounds": 2, "engine": "sequential"}
    tables: dict[str, dict[str, Any]] = {
        "algorithm": {"name": "fedavg"},
        "optimizer": {"name": "sgd", "lr": 1e30},
        "run": run,
    }
    result = execute(prepare(complete(tables)), None)
    assert np.isnan(result.latest("accuracy")).all()
    assert result.kept is not None
    assert {result.kept.stage(n) for n in range(3)} == {Stage(RECEIVED, 2)}
    for n in range(3):
        assert torch.equal(vector_of(result.client_model(n)), result.experiment.task.initial)


@pytest.mark.job
def test_new_clients_keep_the_models_that_were_fitted_to_them() -> None:
    result = copfl.run("fedper", **SMALL, new_clients=0.34)
    assert result.new_clients is not None
    (new,) = result.new_clients.clients
    assert scores(result, result.client_model)[new] == result.new_clients.accuracy["all"][0]


def test_without_saved_models_there_is_one_error() -> None:
    result = copfl.run("fedavg", **SMALL, save_models=False)
    with pytest.raises(copfl.errors.UsageError, match="the run kept no models, as save_models is off"):
        result.model(0)
    assert isinstance(result.model(0, before_training=True), torch.nn.Module)
