"""One client on its own machine: its data, its local update, and its answer to the server. Without Flower.

The record after each round is a file. The server names the last upload of this client that it counted, and
the client starts from the record after that one. So a round that is repeated after a crash counts once, and
an upload that arrived too late has no effect.
"""

import copy
import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from copfl import wire
from copfl.core import tree
from copfl.core.algorithm import ClientOutput, next_message, received, traits
from copfl.core.batches import plan
from copfl.core.evaluation import is_evaluated, primary_metrics
from copfl.core.front import of_one_client
from copfl.core.halves import loss_with
from copfl.core.task import Data, Plan, Task
from copfl.data.columns import Table
from copfl.data.contract import Contract
from copfl.data.contract_check import check_table
from copfl.data.datasets import load
from copfl.data.federation import tensors
from copfl.data.partition import validation_part
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, Dataset, Samples, shape_of
from copfl.data.table_files import READERS, read_table
from copfl.errors import DataError, RunError, UsageError, WireError, raised_as
from copfl.experiment.bundle.description import Description
from copfl.experiment.models import tokenized
from copfl.experiment.preparation import device_of
from copfl.flower import node_halves, node_rounds, node_run
from copfl.flower.halves import HALVES, LOSSES
from copfl.flower.known_data import FOLDER, Hashes, KnownData, cells_of, hashes_of
from copfl.flower.ledger import SUM, UPLOAD, Ledger, Release
from copfl.flower.node_bundle import description_of, kept_score, write_bundle
from copfl.flower.node_evaluation import Measured, is_best, measure, scores_of
from copfl.flower.node_message import NodeConfig, head_of, node_policy
from copfl.flower.policy.refusal import PolicyError, Refusal
from copfl.flower.private_node import SecretNoise, enter_upload, sum_noise, upload_noise, with_key
from copfl.flower.registry import known_client, state_dir
from copfl.flower.secure_sum import SMALLEST_COHORT
from copfl.flower.settings import Settings
from copfl.flower.state import ClientRecords, write_json
from copfl.flower.transport import Field
from copfl.settings import user_code
from copfl.wire import Head, Packet

T = TypeVar("T")
NO_HALVES = "it is about halves of the clients, and the run does not measure the benefit"


class NodeData(NamedTuple):
    train: Data
    test: Data
    samples: Hashes  # of those for training
    task: Task  # what is trained on the samples: the model, or its tail, where they are features of its frozen front
    bundled: Description | None = None  # of the model that is trained on them, for its bundle
    validation: Data | None = None  # samples that it does not train on; None: it trains on all
    left_out: int = 0  # rows of its table that lack a value which the data contract asks for


LoadData = Callable[[Settings, NodeConfig], NodeData]


def node_data(settings: Settings, node_config: NodeConfig) -> NodeData:
    """The data that the node's configuration names: a table, an .npz file, an image folder, or "module:function"."""
    source = node_config.get("data")
    if not isinstance(source, str) or not source:
        raise UsageError("""the node has no data; set --node-config 'data="/path/of/data.npz" ...'""")
    if not user_code.is_reference(source) or Path(source).exists():
        dataset, samples, left_out = _of_file(settings, Path(source), node_config)
    else:
        try:
            dataset = user_code.as_dataset(user_code.attribute("data", source)(dict(node_config)))
        except Exception as error:  # it may describe samples: a DataError stays on the node
            raise DataError(f'data="{source}" failed: {type(error).__name__}: {error}') from error
        samples, left_out = hashes_of(dataset.train.x), 0
    device = node_device(node_config)
    dataset = tokenized(dataset, settings.run.model)
    bundled = description_of(settings, dataset)
    train, test = (_fitted(settings, dataset, part) for part in (dataset.train, dataset.test))
    splits: Sequence[Data] = tuple(
        moved(split, device) for split in (*_trained_and_held_out(settings, node_config, train), test)
    )
    task = settings.task if device.type == "cpu" else task_on(settings.task, device)
    if not (settings.federation.augment or traits(settings.algorithm).cut):
        task, splits = of_one_client(task, splits)
    train, *validation, test = splits
    return NodeData(train, test, samples, task, bundled, validation[0] if validation else None, left_out)


def _trained_and_held_out(settings: Settings, node_config: NodeConfig, data: Data) -> tuple[Data, ...]:
    """The samples to train on and, where the run has some, those for validation: as in the simulation."""
    run, has_classes = settings.run.run, settings.task.criterion.kind == CLASSIFICATION
    if not run.validation:
        return (data,)
    labels = data.y.numpy() if has_classes else np.zeros(len(data.y), np.int64)
    held_out = torch.from_numpy(validation_part(labels, run.validation, run.seed, int(node_config["client"])))
    if not held_out.any():  # of a single sample
        return (data,)
    parts = (tree.each(lambda t, kept=kept: t[kept], (data.x, data.y)) for kept in (~held_out, held_out))
    return tuple(Data(x, y, torch.tensor(len(y))) for x, y in parts)


def _of_file(settings: Settings, path: Path, node_config: NodeConfig) -> tuple[Dataset, Hashes, int]:
    """The data of a file or folder, hashes of its samples on disk, and how many rows the contract leaves out.

    A table's columns become numbers as the federation agreed. Which rows it has does not depend on that: a server that
    proposes other encoders, or other columns, asks for the same data.
    """
    samples, suffix = settings.federation.samples, path.suffix.lower()
    if suffix not in READERS or suffix == ".txt":
        dataset = load(path)
        return dataset, hashes_of(dataset.train.x), 0
    if not samples.contract:
        raise DataError(
            f"{path.name} is a table, and the federation has no data contract; its app must be made with "
            "`copfl federate init --contract FILE`, or `--dataset TABLE --target COLUMN`"
        )
    test = node_config.get("test")
    if test is not None and not isinstance(test, str):
        raise UsageError("test must be the path of a file with test rows")
    files = [path, *([] if test is None else [Path(test).expanduser()])]
    tables, contract = [read_table(file) for file in files], Contract.read(samples.contract)
    log_problems(contract, tables[0])
    dataset = contract.encoders.dataset_of(tables, path.stem, samples.kind)
    used = len(dataset.train.y) + (len(dataset.test.y) if test is None else 0)
    return dataset, hashes_of(cells_of(tables[0])), len(tables[0]) - used


def log_problems(contract: Contract, table: Table) -> None:
    """Tells the node's owner, and nobody else, in which the table differs from the contract.

    The node does not refuse: a coordinator that proposes one range after another would learn the largest value.
    """
    for problem in check_table(contract, table).problems:
        logging.getLogger("flwr").warning("copfl: this node's data differ from the contract: %s", problem)


def node_device(node_config: NodeConfig) -> torch.device:
    """The device on which this node trains: its CPU, unless its configuration names a GPU."""
    name = str(node_config.get("device", "cpu"))
    with raised_as(UsageError, f"device={name} cannot be used: {{}}", UsageError):
        return device_of(name)


def task_on(task: Task, device: torch.device) -> Task:
    """The task with all its tensors on the device."""
    module = copy.deepcopy(task.module).to(device)
    tensors = {name: moved(getattr(task, name), device) for name in ("initial", "mean", "std", "public")}
    return dataclasses.replace(task, module=module, **tensors)


def moved(record: T, device: torch.device) -> T:
    """The record with all its tensors on the device."""
    return tree.each(lambda tensor: tensor.to(device), record)


def _fitted(settings: Settings, dataset: Dataset, split: Samples) -> Data:
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
        if kind != NEXT_TOKEN and outputs != classes:
            raise DataError(f"a sample has {outputs} targets, the federation's have {classes}")
        return Data(tensors(split.x), y, torch.tensor(len(y)))
    known = settings.federation.samples.names or tuple(map(str, range(classes)))
    unknown = sorted(set(dataset.classes) - set(known))
    if unknown and not all(name.isdecimal() for name in dataset.classes):
        raise DataError(
            f"the federation has no class {unknown[0]!r}; known: {settings.federation.samples.names}"
        )
    numbers = [int(name) if unknown else known.index(name) for name in dataset.classes]
    if max(numbers) >= classes:
        raise DataError(f"there is a label {max(numbers)}, but the federation has {classes} classes")
    y = torch.tensor(numbers)[torch.from_numpy(split.y)]
    return Data(tensors(split.x), y, torch.tensor(len(y)))


def numbered(node_config: NodeConfig, head: Head) -> NodeConfig:
    """The node's configuration with the number that the client has in this run."""
    return {**node_config, "client": head.client}


def decode(settings: Settings, node_config: NodeConfig, packet: Packet) -> tuple[Head, Any, dict[str, Any]]:
    """The head, record and fields of the server's message; WireError if for another model or client."""
    head = head_of(settings, node_config, packet)
    opened = wire.decode(packet, message_like(settings, head.client), head)
    is_int = all(type(opened.about.get(name, 0)) is int for name in (Field.COUNTED, Field.UPDATES))
    if not is_int or not isinstance(opened.about.get(Field.KNOWN_MASKS, {}), dict):
        raise WireError("its fields are not those that a copfl server sends")
    return head, opened.record, opened.about


def message_like(settings: Settings, client: int) -> Any:
    """The structure of the server's messages to a client."""
    clients = settings.federation.clients
    server = settings.algorithm.server_init(settings.task, clients)
    return received(settings.algorithm, server, torch.tensor(min(max(client, 0), clients - 1)))


class Trained(NamedTuple):
    """A client's local update of one round, before anything of it is stored or sent."""

    head: Head
    about: dict[str, Any]  # the fields of the server's message
    records: ClientRecords
    client: Any  # its record before
    output: ClientOutput
    metrics: dict[str, torch.Tensor]
    measured: Measured  # with what stays at the node
    note: str
    noised: str  # the name of the upload in the ledger; empty: it has no noise
    settings: Settings
    data: NodeData

    def save(self, node_config: NodeConfig) -> None:
        """Writes the client's record, and the bundle of the model that was measured."""
        write_json(self.records.folder / "client.json", {"client": self.head.client})
        if self.settings.federation.session.rollback:
            node_halves.forget(self.records.folder, self.head.round)
        head, counted = self.head._replace(kind="client"), int(self.about.get(Field.COUNTED, -1))
        self.records.save(head, self.output.client, keep=counted)
        samples = KnownData(state_dir(node_config) / FOLDER).name_of(self.data.samples)
        node_run.remember(self.records.folder, self.settings, dict(node_config), self.head.client, samples)
        node_rounds.enter(self.records.folder, self.head.round, self.measured)
        if not (self.measured.tested and node_config.get("bundle", True) and self.data.bundled):
            return
        run, primary = self.settings.run.run, self.settings.task.metrics[0]
        if run.select == "last" or is_best(primary, self.measured, kept_score(self.records.folder, primary)):
            scores = scores_of(self.data.task.metrics, self.measured, self.data.test, self.data.validation)
            what = self.settings, self.data.bundled, self.head, self.output.trained, scores
            write_bundle(self.records.folder, *what, select=run.select)


def train(settings: Settings, node_config: NodeConfig, packet: Packet, load_data: LoadData) -> Trained:
    """The client's local update for one round."""
    head, down, about = decode(settings, node_config, packet)
    if (
        head.round == settings.federation.rounds
    ):  # after the last one new clients are fitted, and nobody trains
        raise WireError(f"it is of round {head.round}, and the run has {head.round} rounds")
    data = load_data(settings, numbered(node_config, head))
    algorithm, task = settings.algorithm, data.task
    records, counted = ClientRecords(state_dir(node_config), head.run), int(about.get(Field.COUNTED, -1))
    client, note = _start(settings, records, head, counted)
    if isinstance(algorithm, SecretNoise):
        algorithm = with_key(algorithm, records.folder, head.round, (down, torch.tensor(counted)))
    with torch.no_grad():
        client, down = moved((client, down), task.device)
        batches = moved(plan_of(settings, head, data), task.device)
        output = algorithm.client_update(task, client, down, data.train, batches)
        _log_gpu(task.device, head.round)
        # The record is checked too: an algorithm that shares little may diverge without effect on its upload.
        if not tree.finite((output.client, output.upload)):
            raise WireError("its training diverged: its model or its upload is not finite; nothing was sent")
        noised = enter_upload(records.folder, output.upload) if isinstance(algorithm, SecretNoise) else ""
        here = Measured({}, {})
        if is_evaluated(head.round, settings.federation.rounds, settings.run.run.eval_every):
            models = client, down, output.client, output.trained
            here = measure(algorithm, task, *models, data.test, data.validation)
        metrics = output.metrics | here.tested
        client, output, metrics, here = moved((client, output, metrics, here), torch.device("cpu"))
    _enter_release(settings, node_config, head, data.samples, noised)
    return Trained(head, about, records, client, output, metrics, here, note, noised, settings, data)


def _log_gpu(device: torch.device, round: int) -> None:
    """Tells the node's owner that a GPU trained, and the most memory that it has needed."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**20
        name = torch.cuda.get_device_name(device)
        logging.getLogger("flwr").info(
            "copfl: round %d was trained on %s; at most %.1f MiB of its memory", round + 1, name, peak
        )


def _enter_release(
    settings: Settings, node_config: NodeConfig, head: Head, samples: Hashes, noised: str
) -> None:
    """Writes the upload into the node's ledger, before it leaves; PolicyError if it costs too much epsilon."""
    folder = state_dir(node_config) / FOLDER
    release = Release(KnownData(folder).name_of(samples), head.run, head.round, noise=0.0)
    if isinstance(settings.algorithm, SecretNoise) and not reports_metrics(settings, node_config):
        noise, place = upload_noise(settings.algorithm), UPLOAD
        if settings.federation.secure.aggregation:  # others may reveal a sum of so few, if this node is lost
            fewest = max(settings.rules.threshold, SMALLEST_COHORT)
            noise, place = sum_noise(settings.algorithm, fewest), SUM
        release = release._replace(noise=noise, clip=settings.algorithm.clip, place=place, value=noised)
    Ledger(folder).enter(release, node_policy(node_config).privacy)


def reports_metrics(settings: Settings, node_config: NodeConfig) -> bool:
    """Whether the node sends its metrics: by default, unless uploads are noised, because metrics are not.

    The policy has the last word. They have no noise, so none leave where it limits epsilon.
    """
    policy, is_secure = node_policy(node_config), settings.federation.secure.aggregation
    may_leave = {"all": True, "sums": is_secure, "none": False}[policy.reports]
    is_wanted = bool(node_config.get("metrics", not settings.run.privacy))
    return may_leave and is_wanted and not policy.privacy.lifetime_epsilon


def local_update(
    settings: Settings, node_config: NodeConfig, packet: Packet, load_data: LoadData = node_data
) -> Packet:
    """The client's upload for one round; its record is written before."""
    trained = train(settings, node_config, packet, load_data)
    trained.save(node_config)
    metrics = trained.metrics if reports_metrics(settings, node_config) else {}
    reported = {name: wire.plain(float(value)) for name, value in metrics.items()}
    return wire.encode(
        trained.output.upload,
        trained.head._replace(kind="upload"),
        settings.federation.network.wire,
        receiver_masks=trained.about.get(Field.KNOWN_MASKS),
        # The server has one of these masks.
        known=[t for t in tree.leaves(trained.client) if t.dtype == torch.bool],
        about={Field.NOTE: trained.note, Field.METRICS: reported},
    )


def compare_halves(
    settings: Settings, node_config: NodeConfig, packet: Packet, load_data: LoadData
) -> Packet:
    """The client's losses with the models of both halves; with secure aggregation only whether it has them."""
    if not settings.run.run.benefit:
        raise WireError(NO_HALVES)
    head = head_of(settings, node_config, packet)._replace(kind=HALVES)
    like = message_like(settings, head.client)
    models = wire.decode(packet, (like, like), head).record
    records = ClientRecords(state_dir(node_config), head.run)
    known, message = node_halves.read(records.folder), hashlib.sha256(packet.body).hexdigest()
    found = known.get(head.round)
    if found is not None and found.message != message:
        raise WireError(
            f"this node has compared the halves of round {head.round + 1}, and is asked to compare other models: "
            "it gives two losses a round"
        )
    if found is None:
        if head.round not in records.rounds():
            raise WireError(f"this node has not trained in round {head.round + 1}")
        client = records.load(head._replace(kind="client"), settings.algorithm.client_init(settings.task))
        data = load_data(settings, numbered(node_config, head))
        least = node_policy(node_config).statistics.smallest_count
        found = node_halves.Losses(message, *_losses(settings, data, client, models, least))
        earlier = {round: losses for round, losses in known.items() if round < head.round}
        node_halves.write(records.folder, earlier | {head.round: found})
    losses = [wire.plain(found.first), wire.plain(found.second)]
    is_secure = settings.federation.secure.aggregation
    answer = {Field.COMPARED: None not in losses} if is_secure else {Field.LOSSES: losses}
    return wire.encode((), head._replace(kind=LOSSES), about=answer)


def _losses(
    settings: Settings, data: NodeData, client: object, models: Sequence[object], least: int
) -> list[float]:
    """On the validation samples where the run has such, else on those for training: as in the simulation.

    Not on fewer than `least`: with run.validation near zero they would be of one row, which run.seed chooses.

    With secure aggregation a loss that is not finite makes both zero. Otherwise the server, which may send any models,
    would learn whether it is: with a model that is nearly infinite for one class, how many samples a node has of it.
    """
    samples = data.validation if settings.run.run.validation else data.train
    if samples is None or int(samples.size) < max(least, 1):
        return [math.nan, math.nan]
    with torch.no_grad():
        record, *received = moved((client, *models), data.task.device)
        found = [float(loss_with(settings.algorithm, data.task, record, down, samples)) for down in received]
    is_hidden = settings.federation.secure.aggregation and not np.isfinite(found).all()
    return [0.0, 0.0] if is_hidden else found


def plan_of(settings: Settings, head: Head, data: NodeData) -> Plan:
    """The client's batches of one round."""
    order = plan(
        settings.run.run.seed,
        head.round,
        [head.client],
        [int(data.train.size)],
        batch=settings.run.run.batch,
        epochs=settings.algorithm.total_epochs,
        augment=settings.federation.augment,
        random=data.task.probed(data.train).random,
    )
    return tree.row(order, 0)


def _start(settings: Settings, records: ClientRecords, head: Head, counted: int) -> tuple[Any, str]:
    """The record after the last counted upload, and a note if it is missing."""
    initial, rounds = settings.algorithm.client_init(settings.task), records.rounds()
    if rounds and rounds[-1] > head.round and not settings.federation.session.rollback:
        raise RunError(
            f"this node has already taken part in round {rounds[-1] + 1} of run {head.run}, and is asked for "
            f"round {head.round + 1}: the message is old, or the server lost rounds; restore its checkpoint, "
            "or resume with rollback=true to set the nodes back"
        )
    if counted < 0:
        return initial, ""
    if counted not in rounds:
        return initial, f"started again: it has no record of round {counted + 1}; was its state-dir changed?"
    return records.load(head._replace(kind="client", round=counted), initial), ""


def personalise(
    settings: Settings, node_config: NodeConfig, packet: Packet, load_data: LoadData = node_data
) -> Packet:
    """A new client's primary metric before and after its local updates. It sends no weights."""
    if (client := known_client(node_config, "")) >= 0:
        raise WireError(f"this node is client {client}; only a new client, without a number, can join")
    head, down, about = decode(settings, node_config, packet)
    policy, updates = node_policy(node_config), int(about.get(Field.UPDATES, 0))
    if not 0 <= updates <= policy.bounds.updates:  # the message has them, whatever the run config had
        raise PolicyError((Refusal("bounds.updates", f"{updates} local updates of a new client"),), "request")
    data = load_data(settings, numbered(node_config, head))
    algorithm, task = settings.algorithm, data.task
    record = algorithm.client_init(task)
    down = moved(down, task.device)
    with torch.no_grad():
        initial = trained = algorithm.personal_model(task, record, down)
        for n in range(updates):
            batches = moved(plan_of(settings, head._replace(round=head.round + n), data), task.device)
            output = algorithm.client_update(task, record, down, data.train, batches)
            record, trained = output.client, output.trained
            down = next_message(algorithm, task, down, output.upload)
        scores = [primary_metrics(task, w, [data.test])[0] for w in (initial, trained)]
        before, after = map(wire.plain, scores)
        record, trained = moved((record, trained), torch.device("cpu"))
    records = ClientRecords(state_dir(node_config), head.run)
    records.save(head._replace(kind="client"), record, keep=head.round)
    known_as = KnownData(state_dir(node_config) / FOLDER).name_of(data.samples)
    node_run.remember(records.folder, settings, dict(node_config), head.client, known_as)
    name = task.metrics[0].name
    if data.bundled is not None:
        after_join = Measured({name: torch.tensor(scores[1], dtype=torch.float64)}, {})
        what = settings, data.bundled, head, trained, scores_of(task.metrics, after_join, data.test)
        write_bundle(records.folder, *what)
    metrics = {f"{name}_before": before, f"{name}_after": after, "samples": int(data.train.size)}
    line = "reports" if policy.reports != "all" else "privacy.lifetime_epsilon"
    if line == "reports" or policy.privacy.lifetime_epsilon:  # they are of this node alone, without noise
        logging.getLogger("flwr").info("copfl: %s, which the policy keeps here [%s]", metrics, line)
        metrics = {}
    else:
        folder = state_dir(node_config) / FOLDER
        release = Release(KnownData(folder).name_of(data.samples), head.run, head.round, noise=0.0)
        Ledger(folder).enter(release, policy.privacy)
    return wire.encode((), head._replace(kind=Field.NEW_CLIENT), about=metrics)
