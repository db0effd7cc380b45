"""The registry, by hand: a name and the factory whose keyword arguments are the algorithm's configuration."""

from __future__ import annotations

from collections.abc import Callable

from copfl.algorithms.apfl import APFL, apfl
from copfl.algorithms.copfl import COPFL, copfl
from copfl.algorithms.ditto import Ditto, ditto
from copfl.algorithms.fedala import FedALA, fedala
from copfl.algorithms.fedavg import FedAvg, fedavg
from copfl.algorithms.fedavg_ft import FedAvgFT, fedavg_ft
from copfl.algorithms.fedbabu import FedBABU, fedbabu
from copfl.algorithms.fedbn import fedbn
from copfl.algorithms.fedcalm import FedCALM, fedcalm
from copfl.algorithms.fedce import FedCE, fedce
from copfl.algorithms.fedpac import FedPAC, fedpac
from copfl.algorithms.fedper import fedper
from copfl.algorithms.fedpoe import FedPOE, fedpoe
from copfl.algorithms.fedprox import FedProx, fedprox
from copfl.algorithms.fedrep import FedRep, fedrep
from copfl.algorithms.fedselect import FedSelect, fedselect
from copfl.algorithms.ktpfl import KTpFL, ktpfl
from copfl.algorithms.lg_fedavg import lg_fedavg
from copfl.algorithms.local import local
from copfl.algorithms.perfedavg import PerFedAvg, perfedavg
from copfl.algorithms.pfedme import PFedMe, pfedme
from copfl.algorithms.splitnn import SplitNN, splitnn
from copfl.core.algorithm import Algorithm, AnyAlgorithm, ClientOutput, Metrics

ALGORITHMS: dict[str, Callable[..., AnyAlgorithm]] = {
    "apfl": apfl,
    "copfl": copfl,
    "ditto": ditto,
    "fedala": fedala,
    "fedavg": fedavg,
    "fedavg_ft": fedavg_ft,
    "fedbabu": fedbabu,
    "fedbn": fedbn,
    "fedcalm": fedcalm,
    "fedce": fedce,
    "fedpac": fedpac,
    "fedper": fedper,
    "fedpoe": fedpoe,
    "fedprox": fedprox,
    "fedrep": fedrep,
    "fedselect": fedselect,
    "ktpfl": ktpfl,
    "lg_fedavg": lg_fedavg,
    "local": local,
    "perfedavg": perfedavg,
    "pfedme": pfedme,
    "splitnn": splitnn,
}

__all__ = [
    "ALGORITHMS",
    "APFL",
    "COPFL",
    "Algorithm",
    "AnyAlgorithm",
    "ClientOutput",
    "Ditto",
    "FedALA",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedCALM",
    "FedCE",
    "FedPAC",
    "FedPOE",
    "FedProx",
    "FedRep",
    "FedSelect",
    "KTpFL",
    "Metrics",
    "PFedMe",
    "PerFedAvg",
    "SplitNN",
    "apfl",
    "copfl",
    "ditto",
    "fedala",
    "fedavg",
    "fedavg_ft",
    "fedbabu",
    "fedbn",
    "fedcalm",
    "fedce",
    "fedpac",
    "fedper",
    "fedpoe",
    "fedprox",
    "fedrep",
    "fedselect",
    "ktpfl",
    "lg_fedavg",
    "local",
    "perfedavg",
    "pfedme",
    "splitnn",
]
