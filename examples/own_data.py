"""Your own data and models: a table with an MLP, texts with a bag of embeddings, images with a CNN.

    python examples/own_data.py                                                         all three, in half a minute
    cd examples && copfl run -d own_data:wine -m own_data:Net -n 5 -r 20 --lr 0.01      one of them, as a command

Data are arrays: x of any shape and type that the model accepts, y integer labels from 0. A model is any nn.Module that
returns one logit per class. If its constructor has parameters called `shape` and `classes`, copfl passes the values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

import copfl

Arrays = tuple[NDArray[np.generic], NDArray[np.int64]]


# 1. A table: 178 wines, 13 measurements each, from 3 growers.


def wine() -> Arrays:
    from sklearn.datasets import load_wine

    x, y = load_wine(return_X_y=True)
    return ((x - x.mean(0)) / x.std(0)).astype(np.float32), y.astype(np.int64)


class Net(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(shape[0], width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


# 2. Texts: sentences about food, the sea or machines, as the indices of their words; 0 is padding.

WORDS = {
    0: ["bread", "butter", "soup", "salt", "bake", "taste", "kitchen", "plate", "sweet", "oven"],
    1: ["wave", "tide", "sail", "harbour", "salt", "storm", "gull", "deck", "anchor", "plate"],
    2: ["gear", "piston", "bolt", "oil", "engine", "lever", "plate", "valve", "oven", "motor"],
}
VOCABULARY = sorted({word for words in WORDS.values() for word in words})


def texts(count: int = 600, length: int = 8) -> Arrays:
    rng = np.random.default_rng(0)
    y = rng.integers(0, len(WORDS), count)
    x = np.zeros((count, length), np.int64)
    for row, topic in zip(x, y, strict=True):
        for place in range(rng.integers(3, length + 1)):
            on_topic = rng.random() < 0.5
            word = rng.choice(WORDS[int(topic)] if on_topic else VOCABULARY)
            row[place] = 1 + VOCABULARY.index(word)
    return x, y


class BagOfWords(nn.Module):
    """The mean of the words' embeddings, and a Linear."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY) + 1, width, padding_idx=0)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        valid = (x > 0).unsqueeze(-1)
        mean = (self.embedding(x) * valid).sum(1) / valid.sum(1).clamp(min=1)
        logits: Tensor = self.head(mean)
        return logits


# 3. Images: uint8, [n, height, width] or with channels; copfl normalises them.


def digits() -> Arrays:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8), y.astype(np.int64)


class MyCNN(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(shape[0], 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(x))
        return logits


def main(rounds: int = 20) -> dict[str, float]:
    """The accuracy of each, in percent."""
    few = {"per_client": 2, "train_per_class": 10, "test_per_class": 10}
    mamo = {"name": "mamo", "lr": 0.01}
    common: dict[str, Any] = {
        "clients": 5,
        "rounds": rounds,
        "batch": 8,
        "optimizer": mamo,
        "partition_options": few,
    }
    results = {
        "wine": copfl.run("copfl", wine(), model=Net, **common),
        "texts": copfl.run("copfl", texts(), model=BagOfWords, **common),
        "digits": copfl.run("copfl", digits(), model=MyCNN, **common),
    }
    return {name: 100 * float(result.accuracy[-1].mean()) for name, result in results.items()}


if __name__ == "__main__":
    for name, accuracy in main().items():
        print(f"{name:8} {accuracy:5.1f} %")
