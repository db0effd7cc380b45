"""The built-in models, and pretrained ones of other libraries; any other nn.Module works as well."""

from copfl.models.networks import MLP, MODELS, SOURCES, ResNet18, SmallCNN, build, pruned

__all__ = ["MLP", "MODELS", "SOURCES", "ResNet18", "SmallCNN", "build", "pruned"]
