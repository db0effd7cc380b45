"""Texts of a file whose next token is predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.core.criteria import PADDING
from copfl.data.sets.datasets import load
from copfl.errors import DataError, UsageError
from copfl.experiment.models.network import tokenized
from copfl.models.text import Bytes
from copfl.settings.schema import Model
from tests.models.tiny import BERT, save_tokenizer, transformers

LINES = ["how is my card", "where is the money", "my card is lost", "the balance is up"] * 4


@pytest.fixture
def plays(tmp_path: Path) -> Path:
    path = tmp_path / "plays.jsonl"
    rows = [{"role": f"r{n % 2}", "line": line} for n, line in enumerate(LINES)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_bytes_of_texts() -> None:
    found = Bytes(max_length=3)(["abcd", "", "é"])
    assert found["input_ids"].tolist() == [[97, 98, 99], [0, 0, 0], [195, 169, 0]]
    assert found["attention_mask"].sum(1).tolist() == [3, 0, 2]


def test_the_target_is_the_next_token_and_padding_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("ab\n\nabc\n" * 5)
    data = tokenized(load(path), Model(name="causal_cnn"))
    rows = {(tuple(x), tuple(y)) for x, y in zip(data.train.x["input_ids"], data.train.y, strict=True)}
    assert rows == {((97, 98), (98, PADDING)), ((97, 98), (98, 99))}
    assert (data.kind, len(data.classes)) == ("next_token", 256)


def test_roles_are_clients_and_perplexity_falls(plays: Path) -> None:
    options = {"text": "line", "client": "role", "kind": "next_token"}
    how: dict[str, Any] = {"rounds": 6, "batch": 4, "lr": 0.01, "optimizer": "adam", "epochs": 2}
    found = copfl.run("fedavg", plays, data_options=options, **how, model_options={"width": 16, "layers": 2})
    curve = found.metric("perplexity").mean(1)
    assert found.experiment.clients == 2
    assert curve[-1] < curve[0] / 2


def test_a_language_model_of_transformers(plays: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    config = transformers.GPT2Config(
        vocab_size=BERT["vocab_size"], n_positions=16, n_embd=16, n_layer=1, n_head=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    options = {"text": "line", "client": "role", "kind": "next_token"}
    found = copfl.run("fedavg", plays, model=f"hf:{folder}", data_options=options, rounds=1, batch=8)
    data = found.experiment.federation.dataset
    assert data.train.y.shape[1] == data.train.x["input_ids"].shape[1] == 3
    assert np.isfinite(found.metric("perplexity")).all()


def test_what_does_not_fit_is_refused(plays: Path) -> None:
    with pytest.raises(DataError, match="name the column of the texts with text='COLUMN'"):
        load(plays, kind="next_token")
    with pytest.raises(DataError, match="leave out the target role"):
        load(plays, kind="next_token", text="line", target="role")
    with pytest.raises(UsageError, match="does not predict the next token; take model='causal_cnn'"):
        tokenized(load(plays, kind="next_token", text="line"), Model(name="embedding", options={"words": 9}))
