"""The built-in models, and pretrained ones of other libraries; any other nn.Module works as well."""

from __future__ import annotations

from copfl.models import networks
from copfl.models.networks import MLP, MODELS, Block, Model, ResNet18, SmallCNN, build, pruned

__all__ = ["MLP", "MODELS", "Block", "Model", "ResNet18", "SmallCNN", "build", "describe", "pruned"]

SOURCES = {
    "hf:NAME": "a model of transformers: a folder, or a name at the Hugging Face hub",
    "timm:NAME": "an image classifier of timm",
    "torchvision:NAME": "an image classifier of torchvision",
}


def describe() -> dict[str, str]:
    """One line per model and per source of pretrained ones."""
    return networks.describe() | SOURCES
