"""FedBN (Li et al. 2021): the normalisation layers stay with the client, everything else is averaged."""

from dataclasses import dataclass

from copfl.parts.averaging import Averaging


@dataclass(frozen=True)
class FedBN(Averaging):
    """FedAvg of everything but the normalisation layers: their scale and shift, and their statistics.

    The statistics are personal even where the task would average them. Without such layers this is FedAvg.
    """

    # Paper: covers batch norm alone; here group and layer norms are personal too. The released code averages
    # evenly; weights="equal" restores it.
    personal = ("norms", "buffers")
    fine_tuned = True
