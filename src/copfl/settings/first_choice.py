"""What is trained where nobody names an algorithm: the rule that studies/defaults found.

It uses only what is known before training. FedPAC with FedExP's step of the server was rarely far from the best.
The batch size and the learning rate follow from the number of samples that a client has, and sees in all rounds.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, Dataset
from copfl.models import pretrained
from copfl.settings.components import component
from copfl.settings.schema import RunSettings
from copfl.settings.toml import Tables
from copfl.settings.usual import (
    SMALL_SETS,
    Usual,
    is_own,
    usual_model,
    usual_of,
    usual_of_table,
    usual_partition,
)

FEW_SAMPLES = 200  # of a client: in batches of 32 a round would have too few steps
SHORT_RUN = 3_200  # samples that a client sees in all rounds: with a small rate it would not get far
TEXT_MODELS = ("embedding", "causal_cnn")  # a word's embedding is seldom trained, and wants a larger rate


class Known(NamedTuple):
    """What is known of a federation before anything is trained."""

    kind: str  # of task, see copfl.data.samples
    samples: float  # of a client for training, a mean; infinite where it is not known
    rounds: int
    model: str
    pretrained: bool = False
    sums_only: bool = False  # the server may see sums of uploads only, as with privacy
    head_only: bool = False  # there is no body that could be shared beside a personal head


class FirstChoice(NamedTuple):
    """An algorithm with all that its training needs."""

    algorithm: str
    options: dict[str, float]
    server: str
    lr: float  # of Adam
    schedule: str  # of the learning rate over the rounds
    batch: int

    @property
    def layer(self) -> Tables:
        """The settings, as in run.toml."""
        return {
            "algorithm": {"name": self.algorithm, **self.options},
            "optimizer": {"name": "adam", "lr": self.lr},
            "server": {"name": self.server},
            "addons": {} if self.schedule == "constant" else {"lr_schedule": self.schedule},
            "run": {"batch": self.batch},
        }


def first_choice(known: Known) -> FirstChoice:
    """What to train first.

    Args:
        known: The federation.
    """
    batch = 16 if known.pretrained else 8 if known.samples < FEW_SAMPLES else 32
    lr, schedule = 1e-3, "constant"
    if known.model in TEXT_MODELS:
        lr, schedule = 1e-2, "cosine"
    elif known.rounds * known.samples < SHORT_RUN and not known.pretrained:
        lr = 3e-3
    if known.head_only:
        return FirstChoice("fedavg_ft", {}, "mean" if known.sums_only else "fedexp", lr, schedule, batch)
    if known.kind != CLASSIFICATION:
        return FirstChoice("fedper", {}, "fedexp", lr, schedule, batch)  # FedPAC needs classes
    if known.sums_only:
        return FirstChoice("fedper", {}, "mean", lr, schedule, batch)  # FedPAC needs single uploads
    return FirstChoice("fedpac", {"head_speed": 3.0}, "fedexp", lr, schedule, batch)


def known_of(tables: Tables, passed: Mapping[str, Any], sums_only: bool = False) -> Known:
    """What is known of a federation before anything is trained, without reading a published data set.

    Args:
        tables: One of each kind, from all layers.
        passed: By kind, values that a program passed.
        sums_only: Whether the server may see sums of uploads only, whatever the settings.
    """
    table, run, dataset = tables["data"], tables["run"], passed.get("data")
    name = str(table.get("name", "digits"))
    model = str(
        getattr(passed.get("model"), "name", "")
        or tables["model"].get("name")
        or ("" if "model" in passed else usual_model(table, dataset))
    )
    partition = (
        ""
        if "partition" in passed
        else str(tables["partition"].get("name") or usual_partition(table, dataset))
    )
    usual: Usual | None = None
    if isinstance(dataset, Dataset):
        usual = usual_of(dataset)
    elif "data" not in passed and (is_own(name) or name in SMALL_SETS):
        usual = usual_of_table(table)
    if partition in ("classes", "concept_shift"):
        options = component("partition", {**tables["partition"], "name": partition}).options
        samples = float(options["per_client"] * options["train_per_class"])
    elif usual is None:
        samples = math.inf
    else:
        by_group = usual.groups if partition == "by_group" else 0
        clients = passed["partition"].clients if "partition" in passed else run.get("clients") or by_group
        samples = usual.samples / (clients or RunSettings.clients)
    return Known(
        usual.kind if usual else NEXT_TOKEN if model == "causal_cnn" else CLASSIFICATION,
        samples,
        run["rounds"] if isinstance(run.get("rounds"), int) else RunSettings.rounds,
        model,
        pretrained.is_pretrained(model),
        bool(tables["privacy"] or tables["robust"] or sums_only),
        tables["model"].get("train") == "head" or _has_one_layer(passed.get("model")),
    )


def _has_one_layer(model: object) -> bool:
    """Whether the model is a module whose trained parameters are all in one layer."""
    if not hasattr(model, "named_parameters") or isinstance(model, type):
        return False
    return len({name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}) < 2
