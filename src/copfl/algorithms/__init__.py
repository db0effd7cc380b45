"""The registry, by hand: a name and the factory whose keyword arguments are the algorithm's configuration."""

from __future__ import annotations

from collections.abc import Callable

from copfl.algorithms.algorithm import Algorithm, AnyAlgorithm, Figures, Turn
from copfl.algorithms.copfl import COPFL, copfl
from copfl.algorithms.fedavg import FedAvg, fedavg
from copfl.algorithms.local import local

ALGORITHMS: dict[str, Callable[..., AnyAlgorithm]] = {
    "copfl": copfl,
    "fedavg": fedavg,
    "local": local,
}

__all__ = ["ALGORITHMS", "COPFL", "Algorithm", "AnyAlgorithm", "FedAvg", "Figures", "Turn", "copfl", "fedavg", "local"]
