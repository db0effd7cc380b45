"""A custom model and custom data, for what copfl does not have.

name = "federated.custom:model"     in pyproject.toml, [tool.flwr.app.config.model]; policy.toml must allow it
data="federated.custom:data"        in a node's --node-config
"""

import math

import numpy as np
from torch import nn

from copfl.data.arrays import from_arrays
from copfl.data.samples import Dataset


def model(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Any module that maps a batch of samples to logits. Every node builds it with the same seed."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.ReLU(), nn.Linear(64, classes))


def data(node_config: dict[str, object]) -> Dataset:
    """This node's samples: x [n, ...], y [n]. They never leave the node."""
    with np.load(str(node_config["path"])) as arrays:
        return from_arrays(arrays["x"], arrays["y"], name="custom")
