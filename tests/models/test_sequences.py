"""The small models of sequences: what they see, and the same result in every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl.errors import UsageError
from copfl.models import build
from copfl.models.networks import Words
from copfl.models.text import HashedWords, WordsAndPairs


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


def test_words_and_pairs_of_a_text_are_there_once() -> None:
    tokenizer = WordsAndPairs(1000, 500)
    good, not_good, repeated = (
        row[row > 0] for row in tokenizer(["good", "not good", "Good good GOOD"])["input_ids"]
    )
    assert len(not_good) == 3  # two words and a pair
    assert good[0] in not_good
    assert (not_good > 1000).tolist() == [False, False, True]
    assert not_good.max() <= 1500
    assert repeated.tolist() == [good[0], repeated[1]]  # a word, and the pair of it with itself
    order = tokenizer(["bad not good", "good not bad"])["input_ids"]
    assert order[0, :3].tolist() == order[1, :3].tolist()
    assert not set(order[0, 3:]) & set(order[1, 3:])
    assert tokenizer(["", "a"])["attention_mask"].tolist() == [[0], [1]]
    words = WordsAndPairs(1000, 0)(["not good"])["input_ids"]
    assert sorted(words[0]) == sorted(not_good[:2])
    assert (WordsAndPairs(1000, 500, 2)(["not good at all"])["input_ids"] == not_good).all()


def test_pairs_count_half_as_much_as_words() -> None:
    model = build("words", (5,), 2, 0, words=9, pairs=9)
    assert isinstance(model, Words)
    weights = model.weights(torch.tensor([[1, 4, 9, 10, 18, 0], [2, 0, 0, 0, 0, 0], [0] * 6]))
    half = 0.5 / 2**0.5
    expected = torch.tensor([[3**-0.5] * 3 + [half] * 2 + [0.0], [1.0] + [0.0] * 5, [0.0] * 6])
    torch.testing.assert_close(weights, expected)
    with pytest.raises(UsageError, match="pairs=-1"):
        build("words", (5,), 2, 0, pairs=-1)


RNG = np.random.default_rng(0)
WORDS = [["good great fine", "bad poor sad"][n % 2] + f" film {n}" for n in range(60)]
DATA: dict[str, Any] = {
    "cnn1d": (RNG.normal(size=(60, 3, 16)).astype(np.float32), np.arange(60) % 2),
    "embedding": {"x": WORDS, "y": ["pos", "neg"] * 30},
    "words": {"x": WORDS, "y": ["pos", "neg"] * 30},
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
