"""Table 1 of pfl-research (Granqvist et al., NeurIPS 2024), for every tool: CIFAR-10 IID, 1,000 clients of 50 images,
50 of them in a round, one epoch, batches of 10, SGD with rate 0.1, a CNN of two convolutions.

The folder of COPFL_DATA has the images: one client for each 50 of them, so 200 if it has one of the five training
files. Without it they are noise, which takes as long. No round is evaluated, there and here.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# A Python that has the other tools need not have copfl; its reader of CIFAR-10 needs torch and numpy only.
sys.path.append(str(Path(__file__).parents[1] / "src"))

from common import MEAN, STD, random_images

MOST, PARTICIPANTS, SIZE, BATCH, RATE = 1000, 50, 50, 10, 0.1
TESTED = 2000  # images


@functools.cache
def images() -> dict[str, tuple[Any, Any]]:
    """Images uint8 [clients * SIZE, 3, 32, 32] in an order of chance and labels, "train"; "test" if they are real."""
    if not os.environ.get("COPFL_DATA"):
        return {"train": random_images(MOST, SIZE)}
    from copfl.data.sets import datasets

    found = datasets.load("cifar10", Path(os.environ["COPFL_DATA"]))
    order = np.random.default_rng(0).permutation(len(found.train.y))[: MOST * SIZE]
    order = order[: len(order) // SIZE * SIZE]
    return {
        "train": (found.train.x[order], found.train.y[order]),
        "test": (found.test.x[:TESTED], found.test.y[:TESTED]),
    }


def normalised(x: Any) -> Tensor:
    """Images as the network takes them."""
    return (torch.from_numpy(np.asarray(x)).float() / 255 - MEAN) / STD


def tensors() -> tuple[Tensor, Tensor]:
    """Normalised images [clients, SIZE, 3, 32, 32] and labels [clients, SIZE]."""
    x, y = images()["train"]
    return normalised(x).view(-1, SIZE, 3, 32, 32), torch.from_numpy(y).view(-1, SIZE)


def net() -> nn.Module:
    """A network of the shapes of pfl-research's `simple_cnn`: 1.6 million parameters, with its dropout."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
    hidden = nn.Linear(64 * 14 * 14, 128), nn.ReLU()
    return nn.Sequential(
        *convolutions, nn.Dropout(0.25), nn.Flatten(), *hidden, nn.Dropout(0.5), nn.Linear(128, 10)
    )


@torch.no_grad()
def accuracy(model: nn.Module) -> float | None:
    """On the test images; None of noise."""
    if "test" not in images():
        return None
    x, y = images()["test"]
    model.eval()
    right = [
        int((model(normalised(x[i : i + 500])).argmax(1).numpy() == y[i : i + 500]).sum())
        for i in range(0, len(y), 500)
    ]
    return sum(right) / len(y)
