"""FedBN (Li et al. 2021): the normalisation layers stay with the client, everything else is averaged."""

from __future__ import annotations

from copfl.algorithms.fedavg import FedAvg
from copfl.core.optim import Optimizer, Sgd


def fedbn(optimizer: Optimizer = Sgd(), epochs: int = 1) -> FedAvg:
    """FedAvg of everything but the norms, their scale and shift as well as their statistics.

    The statistics stay at home even where the task would average them. A model without norms makes this FedAvg.
    """
    return FedAvg(optimizer, epochs, personal=("norms", "buffers"))
