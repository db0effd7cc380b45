"""kNN-Per's table of CIFAR-10: 200 clients by a Dirichlet distribution (Marfoq et al., ICML 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from studies.published.cifar import by_labels
from studies.published.table import Federation, Row, Settings, Table

GLOBAL, OWN = "accuracy_global", "accuracy"
MOBILENET = {"name": "torchvision:mobilenet_v2", "weights": "default"}


def federations(data_dir: Path | None) -> Mapping[str, Federation]:
    return {"": by_labels(data_dir, clients=200, alpha=0.3, seed=0)}


def method(name: str, **options: Any) -> Settings:
    return {"algorithm": {"name": name, **options}}


# 100 rounds; a 101st shows the common model that they gave, and each client's after its last training.
TABLE = Table(
    title="kNN-Per, CIFAR-10, 200 clients: mean accuracy by test images",
    source="Marfoq et al., Personalized Federated Learning through Local Memorization, ICML 2022, table 2",
    federations=federations,
    settings={
        "model": MOBILENET,
        "task": {"metrics": ["accuracy"]},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.0, "weight_decay": 5e-4},
        "addons": {"lr_schedule": "steps", "lr_rounds": 100},
        "run": {"rounds": 101, "batch": 128, "buffers": "average", "engine": "auto", "chunk": 20},
    },
    rows=(
        Row("local", 0.576, method("local"), OWN),
        Row("FedAvg", 0.728, method("fedavg"), GLOBAL),
        Row("FedAvg+", 0.752, method("fedavg"), OWN),
        Row("Ditto", 0.800, method("ditto"), OWN),
        Row("FedRep", 0.777, method("fedrep"), OWN),
        Row("APFL", 0.789, method("apfl"), OWN),
        Row("kNN-Per", 0.830, method("knn_per", neighbours=10, holdout=0), OWN),
    ),
    seeds=1,
    tolerance="which images each client has, the new head, and the order of the batches",
    unsaid="the rates of methods beside FedAvg and their own options (here FedAvg's rate and copfl's defaults), and on "
    "which samples the weight of the vote is chosen (here on the training samples, each without its own vote). "
    "Images are normalised as the weights were trained. Clustered federated learning (published .733) is left out: "
    "copfl does not have it",
    by_rows=True,
)
