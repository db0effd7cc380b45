"""The registry: the algorithms by name. The fields of each dataclass are its options."""

from __future__ import annotations

from copfl.algorithms.apfl import APFL
from copfl.algorithms.copfl import COPFL
from copfl.algorithms.ditto import Ditto
from copfl.algorithms.fedala import FedALA
from copfl.algorithms.fedavg import FedAvg
from copfl.algorithms.fedavg_ft import FedAvgFT
from copfl.algorithms.fedbabu import FedBABU
from copfl.algorithms.fedbn import FedBN
from copfl.algorithms.fedcalm import FedCALM
from copfl.algorithms.fedce import FedCE
from copfl.algorithms.fedpac import FedPAC
from copfl.algorithms.fedper import FedPer
from copfl.algorithms.fedpoe import FedPOE
from copfl.algorithms.fedprox import FedProx
from copfl.algorithms.fedrep import FedRep
from copfl.algorithms.fedselect import FedSelect
from copfl.algorithms.ktpfl import KTpFL
from copfl.algorithms.lg_fedavg import LGFedAvg
from copfl.algorithms.local import Local
from copfl.algorithms.perfedavg import PerFedAvg
from copfl.algorithms.pfedme import PFedMe
from copfl.algorithms.splitnn import SplitNN

ALGORITHMS: dict[str, type] = {
    "apfl": APFL,
    "copfl": COPFL,
    "ditto": Ditto,
    "fedala": FedALA,
    "fedavg": FedAvg,
    "fedavg_ft": FedAvgFT,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "fedcalm": FedCALM,
    "fedce": FedCE,
    "fedpac": FedPAC,
    "fedper": FedPer,
    "fedpoe": FedPOE,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "fedselect": FedSelect,
    "ktpfl": KTpFL,
    "lg_fedavg": LGFedAvg,
    "local": Local,
    "perfedavg": PerFedAvg,
    "pfedme": PFedMe,
    "splitnn": SplitNN,
}

__all__ = [
    "ALGORITHMS",
    "APFL",
    "COPFL",
    "Ditto",
    "FedALA",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedBN",
    "FedCALM",
    "FedCE",
    "FedPAC",
    "FedPOE",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSelect",
    "KTpFL",
    "LGFedAvg",
    "Local",
    "PFedMe",
    "PerFedAvg",
    "SplitNN",
]
