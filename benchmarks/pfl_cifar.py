"""Table 1 of pfl-research (Granqvist et al., NeurIPS 2024), for every tool: CIFAR-10 IID, 1,000 clients of 50 images,
50 of them in a round, one epoch, batches of 10, SGD with rate 0.1, a CNN of two convolutions.

The images are noise, which takes as long; evaluations are left out, there and here.
"""

from __future__ import annotations

import torch
from common import MEAN, STD, random_images
from torch import Tensor, nn

CLIENTS, PARTICIPANTS, SIZE, BATCH, RATE = 1000, 50, 50, 10, 0.1


def tensors() -> tuple[Tensor, Tensor]:
    """Normalised images [clients, SIZE, 3, 32, 32] and labels [clients, SIZE]."""
    x, y = random_images(CLIENTS, SIZE)
    normalised = (torch.from_numpy(x).float() / 255 - MEAN) / STD
    return normalised.view(CLIENTS, SIZE, 3, 32, 32), torch.from_numpy(y).view(CLIENTS, SIZE)


def net() -> nn.Module:
    """A network of the shapes of pfl-research's `simple_cnn`: 1.6 million parameters, with its dropout."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
    hidden = nn.Linear(64 * 14 * 14, 128), nn.ReLU()
    return nn.Sequential(
        *convolutions, nn.Dropout(0.25), nn.Flatten(), *hidden, nn.Dropout(0.5), nn.Linear(128, 10)
    )
