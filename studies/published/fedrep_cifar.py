"""FedRep's table of CIFAR-10: 100 clients with 2 or 5 classes each (Collins et al., ICML 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from studies.published.cifar import by_classes
from studies.published.table import Federation, Row, Settings, Table

GLOBAL, TUNED = "accuracy_global", "accuracy"
HEAD_EPOCHS = 10  # of FedRep, and of the last training of every client


class Network(nn.Module):
    """Two convolutions of 5 x 5 and three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Conv2d(3, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        dense = [nn.Linear(64 * 25, 120), nn.ReLU(), nn.Linear(120, 64), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Flatten(), *dense)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def federations(classes: int, data_dir: Path | None) -> Mapping[str, Federation]:
    return {"": by_classes(data_dir, clients=100, classes=classes, train=500, test=100)}


def method(name: str, **options: Any) -> Settings:
    return {"algorithm": {"name": name, **options}}


def rows(body_epochs: int, published: Mapping[str, float]) -> tuple[Row, ...]:
    """The rows that the table has.

    Args:
        body_epochs: Of FedRep.
        published: The numbers by method.
    """
    every = (
        ("FedAvg", method("fedavg"), GLOBAL),
        ("FedAvg with fine-tuning", method("fedavg_ft", tune_epochs=HEAD_EPOCHS, tune="head"), TUNED),
        ("FedPer", method("fedper", epochs=HEAD_EPOCHS), TUNED),
        ("LG-FedAvg", method("lg_fedavg", epochs=HEAD_EPOCHS), TUNED),
        ("Ditto", method("ditto"), TUNED),
        ("Per-FedAvg", method("perfedavg"), TUNED),
        ("APFL", method("apfl"), TUNED),
        ("SCAFFOLD", method("scaffold"), GLOBAL),
        ("local", method("local", epochs=HEAD_EPOCHS), TUNED),
        ("FedRep", method("fedrep", head_epochs=HEAD_EPOCHS, epochs=body_epochs), TUNED),
    )
    return tuple(Row(name, published[name], how, metric) for name, how, metric in every if name in published)


def table(classes: int, body_epochs: int, published: Mapping[str, float]) -> Table:
    return Table(
        title=f"FedRep, CIFAR-10, 100 clients with {classes} classes each: mean accuracy",
        source="Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021, "
        "table 1",
        federations=partial(federations, classes),
        settings={
            "task": {"metrics": ["accuracy"]},
            "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.5, "weight_decay": 1e-4},
            "run": {"rounds": 100, "participation": 0.1, "batch": 10, "engine": "auto", "chunk": 10},
        },
        rows=rows(body_epochs, published),
        seeds=1,
        tolerance="which images each client has, initial weights and the order of the batches",
        unsaid="the epochs of the methods beside FedRep and FedAvg, and their own options (here ten epochs where a "
        "part is personal, and copfl's defaults); after the last round a client trains its head alone there, and here "
        "as in every other round; weights alone decay there, and biases too here",
        model=Network,
    )


TWO = table(
    2,
    1,
    {
        "FedAvg": 0.427,
        "FedAvg with fine-tuning": 0.877,
        "FedPer": 0.871,
        "LG-FedAvg": 0.841,
        "Ditto": 0.854,
        "Per-FedAvg": 0.823,
        "APFL": 0.838,
        "SCAFFOLD": 0.377,
        "local": 0.898,
        "FedRep": 0.877,
    },
)
FIVE = table(
    5,
    5,
    {
        "FedAvg": 0.518,
        "FedAvg with fine-tuning": 0.737,
        "FedPer": 0.738,
        "Ditto": 0.703,
        "local": 0.707,
        "FedRep": 0.757,
    },
)
