"""Local training: nothing is shared. The lower bound that every federation has to exceed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from copfl.core.optim import Optimizer, Sgd
from copfl.errors import at_least
from copfl.parts import averaging


@dataclass(frozen=True)
class Local:
    """Each client trains a model of its own on its own data; the messages are empty."""

    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1

    personal: ClassVar[tuple[str, ...]] = ("head", "body", "buffers")
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
