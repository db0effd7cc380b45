"""FedAvg (McMahan et al. 2017): every client trains the same model, the server averages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from copfl.core.optim import Optimizer, Sgd
from copfl.errors import at_least
from copfl.parts import averaging


@dataclass(frozen=True)
class FedAvg:
    """The mean of all models, weighted by their numbers of samples."""

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1

    personal: ClassVar[tuple[str, ...]] = ()
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
