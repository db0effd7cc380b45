"""LG-FedAvg (Liang et al. 2020): each client has a representation of its own, the classifier is shared."""

from __future__ import annotations

from dataclasses import dataclass, field

from copfl.core.optim import Optimizer, Sgd
from copfl.errors import at_least
from copfl.parts import averaging


@dataclass(frozen=True)
class LGFedAvg:
    """FedAvg of the head alone; to share more layers, name the modules in `personal` instead of the body.

    The batch-norm statistics belong to the body: they are personal even where the task would average them.
    """

    # Paper: starts from a model that FedAvg trained first; here from scratch, as FedPAC and PFLlib run it.
    optimizer: Optimizer = field(default_factory=Sgd)
    epochs: int = 1
    personal: tuple[str, ...] = ("body", "buffers")

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
