"""LG-FedAvg (Liang et al. 2020): everybody has its own representation, the classifier on top is shared."""

from __future__ import annotations

from copfl.algorithms.fedavg import FedAvg
from copfl.core.optim import Optimizer, Sgd


def lg_fedavg(
    optimizer: Optimizer = Sgd(), epochs: int = 1, personal: tuple[str, ...] = ("body", "buffers")
) -> FedAvg:
    """FedAvg of the head alone; to share more layers, name the modules that it `keeps` instead of the body.

    The statistics belong to the body: they stay at home even where the task would average them.
    """
    # Paper: starts from a model that FedAvg trained first; here from scratch, as FedPAC and PFLlib run it.
    return FedAvg(optimizer, epochs, personal=personal)
