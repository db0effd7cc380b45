"""Small models of transformers, saved as that library saves them, and sentences for them."""

from __future__ import annotations

import functools
import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from copfl.data.samples import Dataset, Samples
from tests import vision as vision  # before peft: it must be able to import torchvision

with warnings.catch_warnings(action="ignore"):  # of the libraries, about what they import
    peft: Any = importlib.import_module("peft")
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")

SPECIAL = ["[PAD]", "[UNK]"]
WORDS = [
    "card",
    "lost",
    "found",
    "balance",
    "how",
    "is",
    "my",
    "where",
    "money",
    "top",
    "up",
    "a",
    "the",
    "not",
    "yes",
]
CLASSES = ("card", "balance", "money")
BERT = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 16}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}


def save_tokenizer(folder: Path, words: list[str] = WORDS) -> None:
    """A tokenizer that splits at spaces."""
    plain = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate([*SPECIAL, *words])}, unk_token="[UNK]")
    )
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    fast.model_max_length = 16
    fast.save_pretrained(folder)


def bert(kind: str = "BertModel", seed: int = 0, **options: Any) -> Any:
    """A BERT of two layers with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, kind)(transformers.BertConfig(**{**BERT, **LAYERS, **options}))


@functools.lru_cache
def _saved(parent: Path, kind: str, seed: int) -> Path:
    folder = parent / f"{kind}-{seed}"
    bert(kind, seed).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def base(parent: Path, kind: str = "BertModel", seed: int = 0) -> Path:
    """The folder of a model with its tokenizer, below `parent`."""
    return _saved(parent, kind, seed)


def sentences(count: int = 60, seed: int = 0) -> Dataset:
    """Sentences that contain the name of their class among other words."""
    rng = np.random.default_rng(seed)

    def split(n: int) -> Samples:
        y = np.arange(n) % len(CLASSES)
        texts: list[str] = []
        for label in y:
            words = list(rng.choice(WORDS[4:8], rng.integers(1, 6)))
            words.insert(int(rng.integers(len(words) + 1)), CLASSES[label])
            texts.append(" ".join(words))
        x: NDArray[np.str_] = np.array(texts)
        return Samples(x, y.astype(np.int64))

    return Dataset("sentences", split(count), split(count // 2), CLASSES)
