"""The digits of every tool: 1,000 clients with 20 digits each; 100 clients take part in a round."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

CLIENTS, PARTICIPANTS, SIZE, BATCH, RATE = 1000, 100, 20, 8, 0.1


def samples(clients: int = CLIENTS) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [clients * SIZE, 1, 8, 8] and labels; those of client n start at n * SIZE."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = np.random.default_rng(0).integers(0, len(digits.target), clients * SIZE)
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    return images[chosen], digits.target[chosen].astype(np.int64)


def tensors() -> tuple[Tensor, Tensor]:
    """Normalised images [clients, SIZE, 1, 8, 8] and labels [clients, SIZE]."""
    x, y = samples()
    normalised = (torch.from_numpy(x).float() / 255 - 0.5) / 0.25
    return normalised.view(CLIENTS, SIZE, 1, 8, 8), torch.from_numpy(y).view(CLIENTS, SIZE)


def net() -> nn.Module:
    """copfl's small CNN in plain PyTorch."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
