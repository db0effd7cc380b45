"""The federation that all tools are given: 1,000 clients with 20 digits each, of which 100 take part in a round."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

CLIENTS, PARTICIPANTS, SIZE, BATCH, RATE = 1000, 100, 20, 8, 0.1


def holdings(clients: int = CLIENTS) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [clients * SIZE, 1, 8, 8] and labels; client n has SIZE of them from n * SIZE on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = np.random.default_rng(0).integers(0, len(digits.target), clients * SIZE)
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    return images[chosen], digits.target[chosen].astype(np.int64)


def tensors(clients: int = CLIENTS) -> tuple[Tensor, Tensor]:
    """Images as the model takes them [clients, SIZE, 1, 8, 8], and labels [clients, SIZE]."""
    x, y = holdings(clients)
    numbers = (torch.from_numpy(x).float() / 255 - 0.5) / 0.25
    return numbers.view(clients, SIZE, 1, 8, 8), torch.from_numpy(y).view(clients, SIZE)


def net() -> nn.Module:
    """copfl's small CNN in plain PyTorch."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
