"""The images that all tools are given: 10 clients with 100 of 32x32, all of them in every round, for ResNet-18."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

CLIENTS, PARTICIPANTS, SIZE, BATCH, RATE = 10, 10, 100, 32, 0.1


def holdings(clients: int = CLIENTS) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [clients * SIZE, 3, 32, 32], of noise, and labels; client n has SIZE of them from n * SIZE on."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * SIZE, 3, 32, 32), dtype=np.uint8)
    return x, rng.integers(0, 10, len(x))


def tensors(clients: int = CLIENTS) -> tuple[Tensor, Tensor]:
    """Images as the model takes them [clients, SIZE, 3, 32, 32], and labels [clients, SIZE]."""
    x, y = holdings(clients)
    numbers = (torch.from_numpy(x).float() / 255 - 0.5) / 0.25
    return numbers.view(clients, SIZE, 3, 32, 32), torch.from_numpy(y).view(clients, SIZE)


def net() -> nn.Module:
    """copfl's ResNet-18, a plain torch module; a Python that has other tools need not have copfl."""
    sys.path.append(str(Path(__file__).parents[1] / "src"))
    from copfl import models

    return models.build("resnet18", (3, 32, 32), 10, 0)
