"""FedPer (Arivazhagan et al. 2019): a shared base, and personal layers on top of it."""

from __future__ import annotations

from copfl.algorithms.fedavg import FedAvg
from copfl.core.optim import Optimizer, Sgd


def fedper(optimizer: Optimizer = Sgd(), epochs: int = 1, personal: tuple[str, ...] = ("head",)) -> FedAvg:
    """FedAvg of everything but the head; name modules in `keeps` for more than one personal layer."""
    return FedAvg(optimizer, epochs, personal=personal)
