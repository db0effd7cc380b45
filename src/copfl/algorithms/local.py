"""Local training: nobody shares anything. The floor that every federation has to beat."""

from __future__ import annotations

from copfl.algorithms.fedavg import FedAvg
from copfl.core.optim import Optimizer, Sgd


def local(optimizer: Optimizer = Sgd(), epochs: int = 1) -> FedAvg:
    """Each client trains its own model on its own data; what travels is empty."""
    return FedAvg(optimizer, epochs, personal=("head", "body", "buffers"))
