"""What suits a data set where nothing is set: its defaults, its model and its partition."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from copfl.data.arrays import npz_file
from copfl.data.clients.groups import number_of_groups
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, Dataset
from copfl.data.sets import datasets
from copfl.data.sets.hub import PREFIX
from copfl.data.sets.image_folder import image_folder
from copfl.data.sets.published import leaf
from copfl.settings import user_code
from copfl.settings.data import data_record, look_at, state_of
from copfl.settings.schema import record_of
from copfl.settings.toml import Tables

SMALL_TABLE: Tables = {
    "run": {"rounds": 20, "batch": 16, "clients": 5},
    "partition": {"name": "dirichlet"},
    "model": {"name": "mlp"},
}
READ_FOR_CLIENTS = (npz_file, leaf, image_folder)  # the samples say whether there are natural clients
BY_GROUP: Tables = {"partition": {"name": "by_group"}}
# Defaults for a data set: the paper's protocol. The digits' federation is small enough to finish in seconds
# and skewed enough for personalisation to matter.
DEFAULTS: dict[str, Tables] = {
    "digits": {
        "run": {"rounds": 40, "batch": 8},
        "partition": {"name": "classes", "per_client": 3, "train_per_class": 5, "test_per_class": 15},
        "model": {"name": "cnn"},
    },
    "cifar10c": {
        "data": {"all": True},
        "partition": {"name": "classes", "group_per_client": True},
        "algorithm": {"name": "copfl", "rate": 0.15},
    },
    # At its native 84 pixels a round takes minutes on a CPU; --set data.size=84 selects them.
    "mini_imagenet": {"data": {"size": 32}, "partition": {"name": "classes", "per_client": 10}},
    "breast_cancer": SMALL_TABLE,
    "wine": SMALL_TABLE,
    "diabetes": {**SMALL_TABLE, "partition": {"name": "iid"}},
    # Sets with clients by nature: hospitals, domains, persons, writers, roles.
    "heart": {**BY_GROUP, "run": {"rounds": 20}, "model": {"name": "mlp"}},
    **dict.fromkeys(("pacs", "office_caltech10", "digits_five", "femnist"), BY_GROUP),
    "uci_har": {**BY_GROUP, "model": {"name": "cnn1d"}},
    "shakespeare": {**BY_GROUP, "model": {"name": "causal_cnn"}},
    "clinc150": {**BY_GROUP, "model": {"name": "embedding"}},
    **{name: {"model": {"name": "embedding"}} for name in ("ag_news", "sst2", "banking77")},
}
SMALL_SETS = (
    "digits",
    "breast_cancer",
    "wine",
    "diabetes",
    "heart",
)  # they have the rates of a user's own data
SMALL_IMAGE = 64  # pixels a side; cnn up to here, ResNet-18 for larger images


def defaults_of(name: str) -> Tables:
    """The lowest layer of settings: what suits the data set with this name."""
    tables = {kind: dict(table) for kind, table in DEFAULTS.get(name, {}).items()}
    return {**tables, "data": {"name": name, **tables["data"]}} if "data" in tables else tables


class Usual(NamedTuple):
    """The settings of a run on a data set where none are given, and what they follow from."""

    model: str
    partition: str
    groups: int  # natural clients
    kind: str  # of task
    samples: int  # for training
    classes: int  # or labels, values, tokens
    sharers: float  # natural clients that have a class, a mean over the classes; 0 without clients or classes


def usual_of(dataset: Dataset) -> Usual:
    """What suits these samples."""
    by_target = "classes" if dataset.kind == CLASSIFICATION else "iid"
    partition = "by_group" if dataset.natural else by_target
    groups, classes, train = number_of_groups(dataset), len(dataset.classes), dataset.train
    sharers = 0.0
    if groups and train.group is not None and dataset.kind == CLASSIFICATION:
        sharers = len(np.unique(train.group * classes + train.y)) / classes
    return Usual(_model_for(dataset), partition, groups, dataset.kind, len(train), classes, sharers)


def usual_of_table(table: Mapping[str, Any]) -> Usual:
    """`usual_of` the data set that a table [data] describes; it is read again only after its file changed."""
    return _read_once(*state_of(data_record({"name": "digits", **table})))


@lru_cache(maxsize=8)  # a run asks several times, and a comparison completes many runs on the same data
def _read_once(table: str, written: int) -> Usual:
    return usual_of(look_at(record_of("data", json.loads(table))))


def usual_partition(table: Mapping[str, Any], dataset: object = None) -> str:
    """The partition where none is given: by natural clients where the data has them, else by class.

    Args:
        table: The table [data].
        dataset: The data set, if a program passed one.
    """
    if isinstance(dataset, Dataset):
        return usual_of(dataset).partition
    name = str(table.get("name", "digits"))
    if table.get("client"):
        return "by_group"
    # The clients of a table are the column `client`.
    if is_own(name) and (user_code.is_reference(name) or datasets.reader(name) in READ_FOR_CLIENTS):
        return usual_of_table(table).partition
    return "iid" if table.get("kind", CLASSIFICATION) != CLASSIFICATION or _of_tokens(table) else "classes"


def usual_model(table: Mapping[str, Any], dataset: object = None) -> str:
    """The model where none is given: by the form of the samples where it is known, else ResNet-18.

    Args:
        table: The table [data].
        dataset: The data set, if a program passed one.
    """
    if isinstance(dataset, Dataset):
        return _model_for(dataset)
    if _of_tokens(table):
        return "causal_cnn"
    if is_own(str(table.get("name", "digits"))) and not table.get("text") and not table.get("target"):
        return usual_of_table(table).model
    return "embedding" if table.get("text") else "mlp" if table.get("target") else "resnet18"


def _model_for(dataset: Dataset) -> str:
    """The smallest built-in model that fits the samples; a published data set keeps the paper's ResNet-18."""
    x = dataset.train.x
    if dataset.kind == NEXT_TOKEN:
        return "causal_cnn"
    if isinstance(x, dict) or x.dtype.kind in "US":
        return "resnet18" if isinstance(x, dict) else "embedding"
    if x.ndim == 4 and dataset.name not in datasets.DATASETS and max(x.shape[2:]) <= SMALL_IMAGE:
        return "cnn" if min(x.shape[2:]) >= 4 else "mlp"
    return {2: "mlp", 3: "cnn1d"}.get(x.ndim, "resnet18")


def is_own(name: str) -> bool:
    """Whether the name is of a user's file, folder or function."""
    return name not in datasets.DATASETS and (os.path.exists(name) or user_code.is_reference(name))


def is_absent(name: str) -> bool:
    """Whether the name is of a user's file or folder that is not there, which a run refuses later."""
    return not (is_own(name) or name in datasets.DATASETS or name.startswith(PREFIX))


def _of_tokens(table: Mapping[str, Any]) -> bool:
    """Whether a file has texts whose next token is predicted."""
    usual = NEXT_TOKEN if str(table.get("name", "")).endswith(".txt") else ""
    return str(table.get("kind", usual)) == NEXT_TOKEN
