"""FedBN (Li et al. 2021): the normalisation layers stay with the client, everything else is averaged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from copfl.core.optim import Optimizer, Sgd
from copfl.errors import at_least
from copfl.parts import averaging


@dataclass(frozen=True)
class FedBN:
    """FedAvg of everything but the normalisation layers: their scale and shift, and their statistics.

    The statistics are personal even where the task would average them. Without such layers this is FedAvg.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1

    personal: ClassVar[tuple[str, ...]] = ("norms", "buffers")
    total_epochs = property(averaging.total_epochs)
    server_init = averaging.server_init
    client_init = averaging.client_init
    downlink = averaging.downlink
    personal_model = averaging.personal_model
    client_update = averaging.client_update
    summand = averaging.summand
    server_update = averaging.server_update

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs)
