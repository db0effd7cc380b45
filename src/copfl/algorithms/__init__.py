"""The registry: the algorithms by name. The fields of each dataclass are its options."""

from copfl.algorithms.apfl import APFL as APFL
from copfl.algorithms.copfl import COPFL as COPFL
from copfl.algorithms.ditto import Ditto as Ditto
from copfl.algorithms.fedala import FedALA as FedALA
from copfl.algorithms.fedavg import FedAvg as FedAvg
from copfl.algorithms.fedavg_ft import FedAvgFT as FedAvgFT
from copfl.algorithms.fedbabu import FedBABU as FedBABU
from copfl.algorithms.fedbn import FedBN as FedBN
from copfl.algorithms.fedcalm import FedCALM as FedCALM
from copfl.algorithms.fedce import FedCE as FedCE
from copfl.algorithms.feddbe import FedDBE as FedDBE
from copfl.algorithms.feddpa import FedDPA as FedDPA
from copfl.algorithms.fedex_lora import FedExLoRA as FedExLoRA
from copfl.algorithms.fedpac import FedPAC as FedPAC
from copfl.algorithms.fedper import FedPer as FedPer
from copfl.algorithms.fedpoe import FedPOE as FedPOE
from copfl.algorithms.fedprox import FedProx as FedProx
from copfl.algorithms.fedrep import FedRep as FedRep
from copfl.algorithms.fedrod import FedRoD as FedRoD
from copfl.algorithms.fedsa_lora import FedSALoRA as FedSALoRA
from copfl.algorithms.fedselect import FedSelect as FedSelect
from copfl.algorithms.ffa_lora import FFALoRA as FFALoRA
from copfl.algorithms.flex_lora import FlexLoRA as FlexLoRA
from copfl.algorithms.gpfl import GPFL as GPFL
from copfl.algorithms.ifca import IFCA as IFCA
from copfl.algorithms.knn_per import KNNPer as KNNPer
from copfl.algorithms.ktpfl import KTpFL as KTpFL
from copfl.algorithms.levels import Levels as Levels
from copfl.algorithms.lg_fedavg import LGFedAvg as LGFedAvg
from copfl.algorithms.local import Local as Local
from copfl.algorithms.mr_mtl import MRMTL as MRMTL
from copfl.algorithms.perfedavg import PerFedAvg as PerFedAvg
from copfl.algorithms.pfedme import PFedMe as PFedMe
from copfl.algorithms.player_fl import PLayerFL as PLayerFL
from copfl.algorithms.potara import Potara as Potara
from copfl.algorithms.reads import Reads as Reads
from copfl.algorithms.scaffold import Scaffold as Scaffold
from copfl.algorithms.splitnn import SplitNN as SplitNN
from copfl.algorithms.trees import Trees as Trees
from copfl.algorithms.wide_levels import WideLevels as WideLevels

# Every class above, by the name of its file.
CLASSES = [value for value in list(globals().values()) if isinstance(value, type)]
ALGORITHMS: dict[str, type] = {one.__module__.rpartition(".")[2]: one for one in CLASSES}
