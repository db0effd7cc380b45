"""Trees as JSON: XGBoost's predictions are the bundle's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl.algorithms import Trees
from copfl.errors import UsageError
from copfl.experiment.export import formats

xgboost = pytest.importorskip("xgboost", reason="the wheel without a GPU is not for macOS")

TREES: dict[str, Any] = {
    "model": "trees",
    "model_options": {"trees": 5, "depth": 2},
    "partition": "iid",
    "clients": 2,
    "rivals": False,
    "local_baseline": False,
}


def samples(kind: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    y: Any = {
        "values": 1000 + 50 * np.abs(x[:, 0]) + x[:, 1],
        "two classes": (x[:, 0] > 0.2).astype(np.int64),
        "three classes": np.digitize(x[:, 0], [-0.5, 0.5]),
        "labels": (x[:, :2] > 0).astype(np.float32),
    }[kind]
    task = {"values": "regression", "labels": "multilabel"}.get(kind, "classification")
    return {"x": x, "y": y, "kind": task}


@pytest.mark.parametrize("kind", ["values", "two classes", "three classes", "labels"])
def test_xgboost_predicts_as_the_bundle(kind: str, tmp_path: Path) -> None:
    copfl.run(Trees(own=2, own_penalty=0.5, least=3), samples(kind), **TREES, out=tmp_path / "run")
    bundle = copfl.load(tmp_path / "run", 1)
    (path,) = formats.write(bundle, "json", tmp_path / "trees.json")
    x = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
    found = xgboost.Booster(model_file=path).predict(xgboost.DMatrix(x))
    expected = bundle.predict(x) if kind == "values" else bundle.predict_proba(x)
    if kind == "two classes":
        expected = expected[:, 1]
    assert np.ptp(found) > 0
    assert found.reshape(len(x), -1) == pytest.approx(np.reshape(expected, (len(x), -1)), rel=1e-5, abs=1e-6)
    assert json.loads(path.read_text())["learner"]["attributes"]["copfl"].startswith("{")


@pytest.mark.usefixtures("one_onnx_table")
def test_onnx_predicts_as_the_bundle_with_trees_of_each_class_and_of_the_site(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is an extra, copfl[onnx]")
    pytest.importorskip("onnxscript", reason="onnxscript is an extra, copfl[onnx]")
    own = Trees(own=2, own_penalty=0.5, own_rate=0.5, least=3)
    copfl.run(own, samples("three classes"), **TREES, out=tmp_path / "run")
    bundle = copfl.load(tmp_path / "run", 1)
    assert isinstance(bundle.model, torch.Tensor)
    values = bundle.task.layout.split(bundle.model[: bundle.task.d])["ensemble.value"]
    assert values.shape == (15, 7, 3)  # five trees of each class
    assert (values[-6:] != 0).any()  # some are the site's own
    (path,) = formats.write(bundle, "onnx", tmp_path / "trees.onnx")
    x = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert session.run(["probabilities"], {"x": x})[0] == pytest.approx(bundle.predict_proba(x), abs=1e-6)


def test_other_models_are_refused(tmp_path: Path) -> None:
    copfl.run(
        "fedavg", samples("values"), model="mlp", clients=2, partition="iid", rounds=1, out=tmp_path / "run"
    )
    with pytest.raises(UsageError, match="JSON is for boosted trees"):
        formats.write(copfl.load(tmp_path / "run", 1), "json", tmp_path / "trees.json")
