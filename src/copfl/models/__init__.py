"""The built-in models, and pretrained ones of other libraries; any other nn.Module works as well."""

from __future__ import annotations

from copfl.models.networks import MLP, MODELS, Block, Model, ResNet18, SmallCNN, build, describe, pruned

__all__ = ["MLP", "MODELS", "Block", "Model", "ResNet18", "SmallCNN", "build", "describe", "pruned"]
