"""The small models of sequences: what they see, and the same result in every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl.errors import UsageError
from copfl.models import build
from copfl.models.text import HashedWords


def test_a_causal_model_sees_no_later_token() -> None:
    model = build("causal_cnn", (12,), 7, 0, width=8, layers=3)
    x = torch.randint(0, 7, (2, 12))
    changed = x.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 7
    assert model(x).shape == (2, 12, 7)
    assert torch.equal(model(x)[:, :8], model(changed)[:, :8])
    assert not torch.equal(model(x)[:, 8], model(changed)[:, 8])


def test_padding_does_not_count_in_the_mean_of_embeddings() -> None:
    model = build("embedding", (4,), 3, 0, words=20, width=8)
    short, padded = torch.tensor([[3, 5]]), torch.tensor([[3, 5, 0, 0]])
    assert torch.allclose(model(short), model(padded))
    assert torch.allclose(model(short), model(padded, torch.tensor([[1, 1, 0, 0]])))


def test_signals_need_channels_and_steps() -> None:
    assert build("cnn1d", (9, 128), 6, 0)(torch.zeros(2, 9, 128)).shape == (2, 6)
    with pytest.raises(UsageError, match=r"cnn1d needs signals \[channels, steps\]"):
        build("cnn1d", (3, 8, 8), 6, 0)


def test_hashed_words() -> None:
    tokens = HashedWords(1000)(["Hello, world", "hello", ""])
    assert tokens["input_ids"].shape == (3, 3)
    assert tokens["input_ids"][0, 0] == tokens["input_ids"][1, 0] > 0
    assert tokens["attention_mask"].sum(axis=1).tolist() == [3, 1, 0]
    assert HashedWords(1000, 2)(["a b c d"])["input_ids"].shape == (1, 2)
    assert (HashedWords(1000)(["hello"])["input_ids"] == tokens["input_ids"][1, :1]).all()


RNG = np.random.default_rng(0)
WORDS = [["good great fine", "bad poor sad"][n % 2] + f" film {n}" for n in range(60)]
DATA: dict[str, Any] = {
    "cnn1d": (RNG.normal(size=(60, 3, 16)).astype(np.float32), np.arange(60) % 2),
    "embedding": {"x": WORDS, "y": ["pos", "neg"] * 30},
}


@pytest.mark.job
@pytest.mark.parametrize("model", DATA)
def test_every_engine_gives_the_same_result(model: str) -> None:
    options: dict[str, Any] = {
        "model": model,
        "clients": 2,
        "rounds": 2,
        "partition": "iid",
        "precision": "fp64",
    }
    results = [
        copfl.run("fedavg", DATA[model], engine=engine, **options) for engine in ("sequential", "vmap")
    ]
    assert np.allclose(results[0].metric("loss"), results[1].metric("loss"), rtol=1e-9)
    assert np.isfinite(results[0].accuracy).all()
