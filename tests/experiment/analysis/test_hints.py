"""Hints: what can be trained, but will hardly learn."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import copfl
from copfl.core.task import task_of
from copfl.data import arrays
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.schemes import SCHEMES
from copfl.data.samples import Dataset, Samples
from copfl.errors import CopflWarning
from copfl.experiment.analysis.hints import hints, padding, regrouped
from copfl.measures.metrics import METRICS
from tests.commands import called


def data(scale: float = 1.0, dtype: Any = np.float32) -> Dataset:
    x: Any = np.random.default_rng(0).uniform(0, scale, (40, 1, 4, 4)).astype(dtype)
    return arrays.from_arrays(x, np.arange(40) % 3)


def net(*last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3), *last)


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ([], ""),
        ([nn.Softmax(1)], "ends in a softmax"),
        ([nn.Sigmoid()], "ends in a sigmoid"),
        ([nn.LogSoftmax(1)], ""),  # the loss of log-probabilities is that of their logits
    ],
)
def test_probabilities_in_place_of_logits(last: list[nn.Module], found: str) -> None:
    sentences = hints(task_of(net(*last), 3), data())
    assert len(sentences) == bool(found)
    assert all(found in sentence for sentence in sentences)


def test_unscaled_inputs() -> None:
    task = task_of(net(), 3)
    (sentence,) = hints(task, data(255))
    assert "values reach 25" in sentence
    assert "standard deviation of up to" in sentence
    assert not hints(task, data(255, np.uint8))  # pixels, which are scaled
    assert "not scaled" in hints(task, data(2, np.uint8))[0]  # flags, which are divided by 255 too
    assert not hints(task, data(60))  # a standard deviation of 60 / sqrt(12), below 20


def test_skewed_classes_where_accuracy_judges() -> None:
    rare = dataclasses.replace(data(), train=dataclasses.replace(data().train, y=np.repeat([0, 1], [30, 4])))
    (sentence,) = hints(task_of(net(), 3), rare)
    assert sentence.startswith("88 % of the samples are 0, and a model that always answers so")
    assert "balanced accuracy (task={'metrics': 'balanced_accuracy,accuracy'}) or the AUC" in sentence
    assert not hints(task_of(net(), 3, metrics=(METRICS["balanced_accuracy"],)), rare)


def test_a_hint_is_a_warning_once_and_never_an_error() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = copfl.run(
            "fedavg", data(255), model=net(nn.Softmax(1)), clients=2, rounds=1, partition="iid"
        )
    assert [str(one.message) for one in caught if one.category is CopflWarning] == result.warnings
    assert len(result.warnings) == 2


def test_the_command_names_the_model_its_size_and_the_rate_and_prints_a_hint_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=rng.normal(0, 99, (40, 5)).astype(np.float32), y=np.arange(40) % 2)
    words = ("--dataset", tmp_path / "mine.npz", "--rounds", 1, "--clients", 2, "--partition", "iid")
    done = called(capsys, "run", *words, "--algorithm", "fedavg", "--verbose", "--out", tmp_path / "run")
    # 5 * 64 + 64, 64 * 64 + 64 and 64 * 2 + 2
    assert "Model: mlp with 4,674 parameters; optimizer adam, learning rate 0.003." in done.out
    assert done.err.count("the inputs are not scaled") == 1


@pytest.mark.parametrize(
    ("longest", "max_length", "found"),
    [(60, 0, "95% have at most 20; --set model.max_length=20"), (60, 40, ""), (24, 0, "")],
)
def test_sentences_that_are_mostly_padding(longest: int, max_length: int, found: str) -> None:
    lengths = np.array([20] * 99 + [longest])
    mask = (np.arange(longest) < lengths[:, None]).astype(np.int64)
    sentences = arrays.from_arrays({"input_ids": mask, "attention_mask": mask}, np.arange(100) % 3)
    short = dataclasses.replace(
        sentences, train=dataclasses.replace(sentences.train, x={"attention_mask": mask})
    )
    hint = padding(short, max_length)
    assert found in hint
    assert bool(hint) == bool(found)


@pytest.mark.parametrize(
    ("clients", "said"), [(2, "joined to 2 clients"), (5, "divided among 5 clients"), (3, "")]
)
def test_sites_that_are_no_clients_are_said(clients: int, said: str) -> None:
    group = np.repeat(np.arange(3), 20)
    samples = Samples(np.zeros((60, 2), np.float32), group % 2, group)
    dataset = Dataset("sites", samples, samples, ("no", "yes"), groups=("A", "B", "C"))
    federation = FederatedData(dataset, SCHEMES["by_group"](dataset, clients, 0))
    found = regrouped(federation)
    assert [said in text for text in found] == ([True] if said else [])
