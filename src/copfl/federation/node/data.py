"""A node's data: read as its configuration says, numbered as in the federation, and on the node's device.

`resident` keeps them between messages, `report` reads them again. What is wrong with them is a `DataError`, whose
text stays on the node: the server learns only that there is one.
"""

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from copfl import __version__
from copfl.core import tree
from copfl.core.algorithm import traits
from copfl.core.front import of_one_client
from copfl.core.task import Data, Task
from copfl.data.clients.federation import tensors
from copfl.data.clients.partition import validation_part
from copfl.data.contract.check import check_table
from copfl.data.contract.contract import Contract
from copfl.data.copies import Hashes
from copfl.data.held_out import Sides
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, SURVIVAL, Dataset, Samples, shape_of
from copfl.data.sets.datasets import load
from copfl.data.tables.columns import DataTable
from copfl.data.tables.files import READERS, read_table
from copfl.errors import DataError, UsageError, raised_as
from copfl.experiment.bundle.base import portable
from copfl.experiment.bundle.description import Description, Origin, Output
from copfl.experiment.bundle.writing import input_of
from copfl.experiment.models.client_models import TRAINED
from copfl.experiment.models.network import tokenized
from copfl.experiment.preparation import device_of
from copfl.federation.node.known_data import cells_of, hashes_of
from copfl.federation.node.node import Node
from copfl.federation.node.remembered_rows import remembered
from copfl.federation.protocol.settings import TrainingSettings
from copfl.settings import user_code
from copfl.settings.schema import table_of

T = TypeVar("T")


class NodeData(NamedTuple):
    """A node's samples, as tensors on its device."""

    train: Data
    test: Data
    samples: Hashes  # of those for training
    task: Task  # what is trained on the samples: the model, or its tail, where they are features of its front
    bundled: Description | None = None  # of the model that is trained on them, for its bundle
    validation: Data | None = None  # samples that it does not train on; None: it trains on all
    left_out: int = 0  # rows of its table that lack a value which the data contract asks for
    # What belongs together of the training samples, and then of the validation samples.
    unit: NDArray[np.int64] | None = None


LoadData = Callable[[TrainingSettings, Node], NodeData]


def node_data(settings: TrainingSettings, node: Node) -> NodeData:
    """The data that the node's configuration names: a table, an .npz file, a folder, or "module:function".

    Args:
        settings: The federation's.
        node: The one whose owner named the data.
    """
    config, source = node.config, node.config.data
    if not source:
        raise UsageError("""the node has no data; set --node-config 'data="/path/of/data.npz" ...'""")
    if not user_code.is_reference(source) or Path(source).exists():
        dataset, samples, left_out = _of_file(settings, node, Path(source))
    else:
        try:
            dataset = user_code.as_dataset(user_code.attribute("data", source)(dict(config.options)))
        except Exception as error:  # it may describe samples: a DataError stays on the node
            raise DataError(f'data="{source}" failed: {type(error).__name__}: {error}') from error
        samples, left_out = hashes_of(dataset.train.x), 0
    with raised_as(UsageError, f"device={config.device} cannot be used: {{}}", UsageError):
        device = device_of(config.device)  # an error if this machine does not have it
    dataset = tokenized(dataset, settings.run.model)
    bundled = description_of(settings, dataset)
    train, test = (_fitted(settings, dataset, split) for split in (dataset.train, dataset.test))
    sides = _sides(settings, config.client, train, dataset.train)
    splits: Sequence[Data] = tuple(moved(split, device) for split in (*_on_sides(train, sides), test))
    task = settings.task if device.type == "cpu" else task_on(settings.task, device)
    if not (settings.federation.augment or traits(settings.algorithm).cut):
        task, splits = of_one_client(task, splits)
    train, *validation, test = splits
    unit = dataset.train.unit
    if unit is not None and sides is not None:
        unit = np.concatenate([unit[side] for side in sides])
    held_out = validation[0] if validation else None
    return NodeData(train, test, samples, task, bundled, held_out, left_out, unit)


def _sides(settings: TrainingSettings, client: int, data: Data, samples: Samples) -> Sides | None:
    """Which samples are trained on, and which are for validation, as in the simulation; None: there are none."""
    run, has_classes = settings.run.run, settings.task.criterion.kind == CLASSIFICATION
    if not run.validation:
        return None
    labels = data.y.numpy() if has_classes else np.zeros(len(data.y), np.int64)
    sides = validation_part(samples, labels, run.validation, run.seed, client)
    return sides if sides.test.any() else None  # of a single sample


def _on_sides(data: Data, sides: Sides | None) -> tuple[Data, ...]:
    """The samples of each side; all of them where there are no sides."""
    if sides is None:
        return (data,)
    masks = map(torch.from_numpy, sides)
    chosen = (tree.each(lambda t, mask=mask: t[mask], (data.x, data.y)) for mask in masks)
    return tuple(Data(x, y, torch.tensor(len(y))) for x, y in chosen)


def _of_file(settings: TrainingSettings, node: Node, path: Path) -> tuple[Dataset, Hashes, int]:
    """The data of a file or folder, hashes of its samples on disk, and how many rows the contract leaves out.

    A table's columns become numbers as the federation agreed. Which rows it has does not depend on that: a
    server that proposes other encoders, or other columns, asks for the same data.
    """
    samples, suffix, test = settings.federation.samples, path.suffix.lower(), node.config.test
    if suffix not in READERS or suffix == ".txt":
        is_survival = samples.kind == SURVIVAL and suffix == ".npz"  # which arrays alone do not tell
        dataset = load(path, kind=SURVIVAL) if is_survival else load(path)
        if samples.contract and (contract := Contract.read(samples.contract)).is_encoded(dataset):
            dataset = dataclasses.replace(dataset, table=contract.encoders)  # its model takes rows of a table
        return dataset, hashes_of(dataset.train.x), 0
    if not samples.contract:
        raise DataError(
            f"{path.name} is a table, and the federation has no data contract; its app must be made with "
            "`copfl federate init --contract FILE`, or `--dataset TABLE --target COLUMN`"
        )
    files = [path, *([] if test is None else [test])]
    tables, contract = [read_table(file) for file in files], Contract.read(samples.contract)
    log_problems(contract, tables[0])
    chosen = remembered(node, contract, tables, settings.federation.secure.aggregation)
    dataset = contract.encoders.dataset_of(chosen.tables, path.stem, samples.kind, chosen.leave_out)
    used = len(dataset.train.y) + (len(dataset.test.y) if test is None else 0)
    return dataset, hashes_of(cells_of(tables[0])), len(tables[0]) - used


def log_problems(contract: Contract, table: DataTable) -> None:
    """Tells the node's owner, and nobody else, how the table differs from the contract.

    The node does not refuse: a coordinator that proposes one range after another would learn the largest
    value.

    Args:
        contract: The federation's.
        table: The node's.
    """
    for problem in check_table(contract, table).problems:
        logging.getLogger("flwr").warning("copfl: this node's data differ from the contract: %s", problem)


def task_on(task: Task, device: torch.device) -> Task:
    """The task with all its tensors on the device.

    Args:
        task: What is trained.
        device: The node's.
    """
    module = copy.deepcopy(task.module).to(device)
    tensors = {name: moved(getattr(task, name), device) for name in ("initial", "mean", "std", "public")}
    return dataclasses.replace(task, module=module, **tensors)


def moved(record: T, device: torch.device) -> T:
    """The record with all its tensors on the device.

    Args:
        record: Tensors, in records and tuples.
        device: Where they go.
    """
    return tree.each(lambda tensor: tensor.to(device), record)


def _fitted(settings: TrainingSettings, dataset: Dataset, split: Samples) -> Data:
    """One split as tensors, its labels numbered as in the federation."""
    shape, classes = shape_of(split.x), settings.task.classes
    if tuple(shape) != tuple(settings.shape):  # of sentences the names of the arrays; their length is free
        raise DataError(f"a sample has shape {list(shape)}, the federation's have {list(settings.shape)}")
    if dataset.kind != (kind := settings.task.criterion.kind):
        differ = f"the targets are for {dataset.kind}, the federation's for {kind}"
        raise DataError(f"{differ}; set samples.kind={dataset.kind} in the federation, or choose other data")
    if kind != CLASSIFICATION:
        y = tensors(split.y)
        outputs = 1 if y.dim() == 1 else y.shape[1]
        if kind not in (NEXT_TOKEN, SURVIVAL) and outputs != classes:
            raise DataError(f"a sample has {outputs} targets, the federation's have {classes}")
        return Data(tensors(split.x), y, torch.tensor(len(y)))
    agreed_classes = settings.federation.samples.names or tuple(map(str, range(classes)))
    foreign_classes = sorted(set(dataset.classes) - set(agreed_classes))
    if foreign_classes and not all(name.isdecimal() for name in dataset.classes):
        raise DataError(
            f"the federation has no class {foreign_classes[0]!r}; known: {settings.federation.samples.names}"
        )
    numbers = [int(name) if foreign_classes else agreed_classes.index(name) for name in dataset.classes]
    if max(numbers) >= classes:
        raise DataError(f"there is a label {max(numbers)}, but the federation has {classes} classes")
    y = torch.tensor(numbers)[torch.from_numpy(split.y)]
    return Data(tensors(split.x), y, torch.tensor(len(y)))


def description_of(settings: TrainingSettings, dataset: Dataset) -> Description:
    """What every bundle of this node says about its model, without the round and the scores.

    Args:
        settings: The federation's.
        dataset: The node's.
    """
    run, samples, task = settings.run, settings.federation.samples, settings.task
    model = table_of(run.model)
    table = dataset.table
    return Description(
        model=portable(model),
        adapter=table_of(run.adapter),
        task=table_of(run.task),
        seed=run.run.seed,
        dtype=str(task.initial.dtype).removeprefix("torch."),
        input=input_of(dataset, task, model),
        output=Output(
            samples.kind,
            samples.outputs,
            samples.names_of_outputs(dataset.classes),
            () if table is None else table.targets,
            *samples.scale,
        ),
        origin=Origin(
            f"{run.algorithm.title} in a federation",
            dataset.name,
            TRAINED,
            settings.federation.rounds,
            settings.federation.clients,
            note=dataset.note,
        ),
        copfl=__version__,
    )
