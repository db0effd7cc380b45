"""What is known of a federation before anything is trained, from what was chosen and from its data.

`Facts` reads the data at most once, and only if somebody asks for what only the samples say: a run whose
settings are all chosen can be described where its data are not. `DATA_SET_DEFAULTS` is what suits the data sets that
copfl knows by name, without a look at them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from copfl.data.arrays import npz_file
from copfl.data.clients.groups import number_of_groups
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, SURVIVAL, Dataset
from copfl.data.sets import datasets
from copfl.data.sets.hub import PREFIX
from copfl.data.sets.image_folder import image_folder
from copfl.data.sets.pfllib import pfllib
from copfl.data.sets.published import leaf
from copfl.errors import how_to_set
from copfl.models import pretrained
from copfl.models.trees import Trees
from copfl.settings import user_code
from copfl.settings.checking import SettingError
from copfl.settings.components import component, name_of, usual_optimizer
from copfl.settings.data import data_of, data_record, state_of
from copfl.settings.first_choice import Known
from copfl.settings.schema import Run, RunSettings
from copfl.settings.toml import Tables

SMALL_TABLE: Tables = {
    "run": {"rounds": 20, "batch": 16, "clients": 5},
    "partition": {"name": "dirichlet"},
    "model": {"name": "mlp"},
}
READ_FOR_CLIENTS = (npz_file, leaf, pfllib, image_folder)  # the samples say whether there are natural clients
BY_GROUP: Tables = {"partition": {"name": "by_group"}}
# Defaults for a data set: the paper's protocol. The digits' federation is small enough to finish in seconds
# and skewed enough for personalisation to matter. A table [data] names the set: another one does not get its options.
DATA_SET_DEFAULTS: dict[str, Tables] = {
    "digits": {
        "run": {"rounds": 40, "batch": 8},
        "partition": {"name": "classes", "per_client": 3, "train_per_class": 5, "test_per_class": 15},
        "model": {"name": "cnn"},
    },
    "cifar10c": {
        "data": {"name": "cifar10c", "all": True},
        "partition": {"name": "classes", "group_per_client": True},
        "algorithm": {"name": "copfl", "rate": 0.15},
    },
    # At its native 84 pixels a round takes minutes on a CPU; --set data.size=84 selects them.
    "mini_imagenet": {
        "data": {"name": "mini_imagenet", "size": 32},
        "partition": {"name": "classes", "per_client": 10},
    },
    "breast_cancer": SMALL_TABLE,
    "wine": SMALL_TABLE,
    "diabetes": {**SMALL_TABLE, "partition": {"name": "iid"}},
    # Sets with clients by nature: hospitals, domains, persons, writers, roles.
    "heart": {**BY_GROUP, "model": {"name": "mlp"}},
    **dict.fromkeys(("pacs", "office_caltech10", "digits_five", "femnist"), BY_GROUP),
    "uci_har": {**BY_GROUP, "model": {"name": "cnn1d"}},
    "shakespeare": {**BY_GROUP, "model": {"name": "causal_cnn"}},
    "clinc150": {**BY_GROUP, "model": {"name": "embedding"}},
    **{name: {"model": {"name": "embedding"}} for name in ("ag_news", "sst2", "banking77")},
}
# They have the rates of a user's own data.
SMALL_SETS = ("digits", "breast_cancer", "wine", "diabetes", "heart")
LINEAR, WORDS = "linear", "words"  # the models that are a head alone, of numbers and of texts
TREES = "trees"  # the model that has no gradient, and the algorithm that grows it
MOST_KNOWN = 8  # data sets whose facts are kept
SMALL_IMAGE = 64  # pixels a side; cnn up to here, ResNet-18 for larger images


@dataclass(frozen=True)
class Facts:
    """What is known before anything is trained.

    Args:
        tables: What was chosen, one table of each kind.
        passed: By kind, values that a program passed.
        sums_only: Whether the server may see sums of uploads only, whatever the settings.
    """

    tables: Tables
    passed: Mapping[str, Any]
    sums_only: bool = False

    @property
    def data_name(self) -> str:
        """The name of the data set; "" where a program passed one."""
        return "" if "data" in self.passed else str(self.tables["data"].get("name", "digits"))

    @property
    def is_adapted(self) -> bool:
        """Whether only adapters or the head are trained."""
        return bool(self.tables["adapter"]) or self.tables["model"].get("train") == "head"

    @property
    def follows_rule(self) -> bool:
        """Whether a named algorithm trains by the rule: a model from scratch, on a user's own data or a small
        set.

        Published data sets keep the paper's protocol, and pretrained models their own rates. An algorithm that
        declares an optimizer has that.
        """
        if "data" in self.passed:
            is_published = getattr(self.passed["data"], "name", "") in datasets.DATASETS
        else:
            is_published = self.data_name in datasets.DATASETS and self.data_name not in SMALL_SETS
        model = "" if "model" in self.passed else str(self.tables["model"].get("name", ""))
        return not (is_published or self.is_adapted or pretrained.is_pretrained(model))

    def usual_name(self, kind: str) -> str:
        """The name that a kind has where nobody chose one; "" where it is open.

        Args:
            kind: Such as "partition".
        """
        match kind:
            case "data":
                return "digits"
            case "partition":
                return self.usual_partition
            case "model":
                return self.usual_model
            case "optimizer":
                table = self.tables["algorithm"]
                algorithm = self.passed.get("algorithm", table.get("name"))
                if algorithm is not None:
                    usual = usual_optimizer(algorithm, table.get("code"), by_rule=self.follows_rule)
                    return "" if usual is None else name_of("optimizer", usual)
        return ""

    @property
    def usual_partition(self) -> str:
        """The partition where none is given: by natural clients where the data have them, else by class."""
        table, name = self.tables["data"], self.data_name
        if table.get("client"):
            return "by_group"
        # The clients of a table are the column `client`.
        is_read = user_code.is_reference(name) or (is_own(name) and datasets.reader(name) in READ_FOR_CLIENTS)
        if ("data" in self.passed or is_read) and self.of_data:
            return self.of_data.partition
        has_classes = table.get("kind", CLASSIFICATION) == CLASSIFICATION and not _of_tokens(table)
        return "classes" if has_classes else "iid"

    @property
    def usual_model(self) -> str:
        """The model where none is given: by the form of the samples where it is known, else ResNet-18."""
        table = self.tables["data"]
        if _of_tokens(table):
            return "causal_cnn"
        is_survival = bool(table.get("event")) or table.get("kind") == SURVIVAL
        is_named = table.get("text") or (table.get("target") and not is_survival)  # the columns tell the form
        if ("data" in self.passed or (is_own(self.data_name) and not is_named)) and self.of_data:
            return self.of_data.model
        return "embedding" if table.get("text") else "mlp" if table.get("target") else "resnet18"

    @cached_property
    def of_data(self) -> DataFacts | None:
        """What the samples say; None of a value that is read later.

        The data set that a table [data] describes is read again only after its file changed.
        """
        state = None
        if "data" in self.passed:
            dataset = self.passed["data"]
        else:
            record = data_record({"name": "digits", **self.tables["data"]})
            if (state := state_of(record)) in _known:
                return _known[state]
            dataset = data_of(record, keep=True)
        if not isinstance(dataset, Dataset):
            return None
        train, groups, classes = dataset.train, number_of_groups(dataset), len(dataset.classes)
        has_classes = dataset.kind == CLASSIFICATION
        sharers = 0.0
        if groups and train.group is not None and has_classes:
            sharers = len(np.unique(train.group * classes + train.y)) / classes
        partition = "by_group" if dataset.natural else "classes" if has_classes else "iid"
        model = _model_for(dataset)
        facts = DataFacts(model, partition, groups, dataset.kind, len(train), classes, sharers)
        if state is not None:
            if len(_known) == MOST_KNOWN:
                _known.clear()
            _known[state] = facts
        return facts

    @cached_property
    def known(self) -> Known:
        """What the rule of `first_choice` goes by."""
        tables, passed, name = self.tables, self.passed, self.data_name
        # A user's file or folder that is not there is refused later, when the run reads it.
        is_there = "data" in passed or is_own(name) or name in datasets.DATASETS or name.startswith(PREFIX)
        of_data = self.of_data if is_there else None
        run, module = tables["run"], passed.get("model")
        model = getattr(module, "name", "") or tables["model"].get("name")
        if not model and "model" not in passed:
            model = self.usual_name("model")
        model = str(model or "")  # "": of a module without a name
        partition = ""
        if "partition" not in passed:
            partition = str(tables["partition"].get("name") or self.usual_name("partition"))
        by_group = of_data.groups if of_data and partition == "by_group" else 0
        named = run["clients"] if isinstance(run.get("clients"), int) else 0  # other values are refused later
        clients = passed["partition"].clients if "partition" in passed else named or by_group
        clients = clients or RunSettings.clients
        samples = of_data.samples / clients if of_data else math.inf
        sharers = math.inf if of_data is None or "partition" in passed else float(clients)
        if partition in ("classes", "concept_shift"):
            options = component("partition", {**tables["partition"], "name": partition}).options
            samples = float(options["per_client"] * options["train_per_class"])
            sharers = clients * options["per_client"] / of_data.classes if of_data else math.inf
        elif of_data and by_group:
            sharers = of_data.sharers
        return Known(
            of_data.kind if of_data else NEXT_TOKEN if model == "causal_cnn" else CLASSIFICATION,
            samples,
            run["rounds"] if isinstance(run.get("rounds"), int) else RunSettings.rounds,
            model,
            pretrained.is_pretrained(model),
            bool(tables["privacy"] or tables["robust"] or self.sums_only),
            tables["model"].get("train") == "head" or model in (LINEAR, WORDS) or _has_one_layer(module),
            sharers,
            bool(tables["adapter"]),
            run["steps"] if isinstance(run.get("steps"), int) else 0,
        )


def _has_one_layer(model: object) -> bool:
    """Whether the model is a module whose trained parameters are all in one layer."""
    if not hasattr(model, "named_parameters") or isinstance(model, type):
        return False
    return len({name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}) < 2


class DataFacts(NamedTuple):
    """What the samples of a data set say, and the model and the partition that suit them."""

    model: str
    partition: str
    groups: int  # natural clients
    kind: str  # of task
    samples: int  # for training
    classes: int  # or labels, values, tokens
    sharers: float  # natural clients that have a class, a mean over the classes; 0 without clients or classes


# Of the last data sets, by their `state_of`: a comparison completes many runs on the same one.
_known: dict[tuple[str, int], DataFacts] = {}


def _model_for(dataset: Dataset) -> str:
    """The smallest built-in model that fits the samples; a published data set keeps the paper's ResNet-18."""
    x = dataset.train.x
    if dataset.kind == NEXT_TOKEN:
        return "causal_cnn"
    if dataset.kind == SURVIVAL and not isinstance(x, dict) and x.ndim == 2 and x.dtype.kind not in "US":
        return LINEAR
    if isinstance(x, dict) or x.dtype.kind in "US":
        return "resnet18" if isinstance(x, dict) else "embedding"
    if x.ndim == 4 and dataset.name not in datasets.DATASETS and max(x.shape[2:]) <= SMALL_IMAGE:
        return "cnn" if min(x.shape[2:]) >= 4 else "mlp"
    return {2: "mlp", 3: "cnn1d"}.get(x.ndim, "resnet18")


def check_model(run: Run, algorithm: object) -> None:
    """SettingError if the algorithm does not train this model, or not all of it.

    Args:
        run: Its model.
        algorithm: The algorithm of the run.
    """
    model = run.model
    is_head = model.name in (LINEAR, WORDS, TREES) or model.train == "head" or _has_one_layer(model.value)
    trains_head = getattr(algorithm, "head_only", False)  # of trees, the linear model beside them
    only, is_trees = getattr(algorithm, "trains", ""), model.name == TREES or isinstance(model.value, Trees)
    if only == TREES and not is_trees:
        raise SettingError(
            "model.name",
            model.name or model.description,
            f"has no trees, and {run.algorithm.name} grows trees; use {TREES}",
        )
    if is_trees and only != TREES and not trains_head:
        raise SettingError(
            "model.name",
            model.name or model.description,
            f"has no gradient to train it by; use {how_to_set('algorithm.name', TREES, '--algorithm')}",
        )
    if trains_head and not is_head:
        raise SettingError(
            "model.name",
            model.name or model.description,
            f"has layers before its last, which {run.algorithm.name or 'the algorithm'} does not train; use "
            f"{LINEAR}, or with a pretrained model {how_to_set('model.train', 'head', '--train')}",
        )


def is_own(name: str) -> bool:
    """Whether the name is of a user's file, folder or function."""
    return name not in datasets.DATASETS and (os.path.exists(name) or user_code.is_reference(name))


def _of_tokens(table: Mapping[str, Any]) -> bool:
    """Whether a file has texts whose next token is predicted."""
    usual = NEXT_TOKEN if str(table.get("name", "")).endswith(".txt") else ""
    return str(table.get("kind", usual)) == NEXT_TOKEN
