"""FedAvg (McMahan et al. 2017): every client trains the same model, the server averages."""

from dataclasses import dataclass

from copfl.parts.averaging import Averaging


@dataclass(frozen=True)
class FedAvg(Averaging):
    """The mean of all models, weighted by their numbers of samples, or equally: `weights`."""

    fine_tuned = True
