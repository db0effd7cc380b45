"""Bundles of trees that somebody else wrote: circles, ways without end, places outside; each command ends at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import copfl
from copfl import foreign
from copfl.errors import UsageError
from copfl.models import build
from copfl.models.trees import MOST_QUESTIONS
from tests.commands import called

Capture = pytest.CaptureFixture[str]
Tensors = dict[str, torch.Tensor]
DEEP = 62  # questions: 2^62 ways, if both answers of each lead to the next one
WEIGHTS = "weights.safetensors"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    options: dict[str, Any] = {"model": "trees", "clients": 2, "partition": "iid", "rounds": 3}
    options |= {"model_options": {"trees": 2, "depth": 5}, "engine": "sequential"}
    copfl.run("trees", {"x": x, "y": 50 * x[:, 0], "kind": "regression"}, **options, out=folder / "run")
    copfl.load(folder / "run", 0).save(folder / "bundle")
    np.savez(folder / "new.npz", x=x)
    return folder / "bundle"


def circle(tensors: Tensors) -> None:
    tensors["ensemble.left"][:, 0] = 1
    tensors["ensemble.left"][:, 1] = 0


def every_way(tensors: Tensors) -> None:
    for side in ("left", "right"):
        tensors[f"ensemble.{side}"][:, :DEEP] = torch.arange(1.0, DEEP + 1)
    tensors["ensemble.threshold"][:] = 0


def at(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors["ensemble.threshold"][:, 0] = 0  # a question whose answers are not all alike
        tensors[f"ensemble.{name}"][:, 0] = value

    return change


HOSTILE: dict[str, Callable[[Tensors], None]] = {
    "a circle": circle,
    "every way": every_way,
    **{
        f"{name} {value:g}": at(name, value)
        for name in ("left", "right", "feature")
        for value in (float("nan"), float("inf"), -1.0, 3e9, 63.0)
    },
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_tree(attack: str, bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(bundle, tmp_path / "sent")
    tensors = load_file(folder / WEIGHTS)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        about = file.metadata()
    HOSTILE[attack](tensors)
    save_file(tensors, folder / WEIGHTS, about)
    for words in (
        ("predict", folder, "--data", bundle.parent / "new.npz"),
        ("export", folder, "--format", "json", "--out", tmp_path / "trees.json"),
    ):
        answer = called(capsys, *words)
        assert answer.code in (0, 2), answer.err
        assert "Traceback" not in answer.err
        assert answer.err == foreign.printable_lines(answer.err)
    assert not (tmp_path / "trees.json").exists()


def test_a_good_tree_is_exported(bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    assert called(capsys, "export", bundle, "--format", "json", "--out", tmp_path / "trees.json").code == 0


@pytest.mark.parametrize("depth", [65, MOST_QUESTIONS + 1, 10**15])
def test_a_depth_without_end_is_refused(depth: int, bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    """Each question is a step for all rows, and the weights are the same for any depth."""
    folder = shutil.copytree(bundle, tmp_path / "sent")
    content = json.loads((folder / "bundle.json").read_text())
    content["model"] |= {"depth": depth, "nodes": 63}  # as depth=5 has
    (folder / "bundle.json").write_text(json.dumps(content))
    answer = called(capsys, "predict", folder, "--data", bundle.parent / "new.npz")
    assert (answer.code, f"depth={depth} is too deep" in answer.err) == (2, True), answer.err


def test_layers_without_end_are_refused() -> None:
    """They were made one by one, before anything was compared with the size of a file."""
    with torch.device("meta"), pytest.raises(UsageError, match="at most 32"):
        build("causal_cnn", (5,), 3, 0, width=1, layers=10**9)
