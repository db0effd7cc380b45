"""FedPer (Arivazhagan et al. 2019): a shared base, and personal layers on top of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from copfl.core.optim import Optimizer, Sgd
from copfl.errors import at_least
from copfl.parts import averaging


@dataclass(frozen=True)
class FedPer:
    """FedAvg of everything but the head; name modules in `personal` for more than one personal layer."""

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    personal: tuple[str, ...] = ("head",)

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
