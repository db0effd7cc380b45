"""LG-FedAvg (Liang et al. 2020): each client has a representation of its own, the classifier is shared."""

from dataclasses import dataclass

from copfl.parts.averaging import PartlyPersonal


@dataclass(frozen=True)
class LGFedAvg(PartlyPersonal):
    """FedAvg of the head alone; to share more layers, name the modules in `personal` instead of the body.

    The batch-norm statistics belong to the body: they are personal even where the task would average them.
    """

    # Paper: starts from a model that FedAvg trained first; here from scratch, as FedPAC and PFLlib run it.
    # The released code averages evenly; weights="equal" restores it.
    personal: tuple[str, ...] = ("body", "buffers")  # type: ignore[misc]
