"""The images of every tool: 10 clients with 100 images of 32x32, all of them in each round; ResNet-18."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

# A Python that has the other tools need not have copfl; its ResNet-18 is a plain torch module.
sys.path.append(str(Path(__file__).parents[1] / "src"))

from common import MEAN, STD, random_images

from copfl import models

CLIENTS, PARTICIPANTS, SIZE, BATCH, RATE = 10, 10, 100, 32, 0.1


def tensors() -> tuple[Tensor, Tensor]:
    """Normalised images [clients, SIZE, 3, 32, 32] and labels [clients, SIZE]."""
    x, y = random_images(CLIENTS, SIZE)
    normalised = (torch.from_numpy(x).float() / 255 - MEAN) / STD
    return normalised.view(CLIENTS, SIZE, 3, 32, 32), torch.from_numpy(y).view(CLIENTS, SIZE)


def net() -> nn.Module:
    """copfl's ResNet-18."""
    return models.build("resnet18", (3, 32, 32), 10, 0)
