"""One client on its own machine: its data, its local update, and its answer to the server. Without Flower.

The record after each round is a file. The server names the last upload of this client that it counted, and
the client starts from the record after that one. So a round that is repeated after a crash counts once, and
an upload that arrived too late has no effect.
"""

import dataclasses
import hashlib
import logging
from typing import Any, NamedTuple

import torch

from copfl import wire
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, ClientOutput, next_plan
from copfl.core.evaluation import is_evaluated
from copfl.core.task import Data, Plan
from copfl.data.samples import CLASSIFICATION, SURVIVAL
from copfl.errors import DataError, WireError
from copfl.experiment.bundle.description import TEST
from copfl.experiment.probabilities import of_client
from copfl.experiment.survival import hazard_of
from copfl.federation.node import choice, halves, measured_rounds, remembered_run
from copfl.federation.node.bundle import kept_score, write_bundle
from copfl.federation.node.choice import HeldOut
from copfl.federation.node.data import LoadData, NodeData, moved, node_data
from copfl.federation.node.evaluation import MeasuredModels, is_best, measure, scores_of
from copfl.federation.node.few_rows import counted_rows
from copfl.federation.node.incoming import decode, head_of, message_like
from copfl.federation.node.known_data import KnownData
from copfl.federation.node.ledger import SUM, UPLOAD, Ledger, Release
from copfl.federation.node.node import CLIENT, Node
from copfl.federation.node.records import ClientRecords
from copfl.federation.node.secure_memory import RememberedSum, SumMemory, objective_of, rows_of
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.federation.protocol.choice import NEVER, InFolds
from copfl.federation.protocol.files import write_json
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.noise import SecretNoise, enter_upload, sum_noise, upload_noise, with_key
from copfl.federation.protocol.secure_sum import SMALLEST_COHORT
from copfl.federation.protocol.settings import TrainingSettings
from copfl.wire import Head, Packet


class TrainedUpdate(NamedTuple):
    """A client's local update of one round, before anything of it is stored or sent."""

    head: Head
    about: dict[str, Any]  # the fields of the server's message
    records: ClientRecords
    client: Any  # its record before
    output: ClientOutput | None  # None: the training failed
    failure: Exception | None  # why it did: for the node's owner
    measured: MeasuredModels  # with what stays at the node
    note: str
    noised: str  # the name of the upload in the ledger; empty: it has no noise
    settings: TrainingSettings
    data: NodeData
    samples: str  # the data, as `KnownData` names them

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """Those that may leave."""
        return self.measured.tested | ({} if self.output is None else self.output.metrics)

    def save(self, node: Node) -> None:
        """Writes the client's record, and the bundle of the model that was measured."""
        write_json(self.records.folder / CLIENT, {"client": self.head.client})
        if self.settings.federation.session.rollback:
            halves.forget(self.records.folder, self.head.round)
        head, counted = self.head._replace(kind="client"), int(self.about.get(Field.COUNTED, -1))
        # After a failure the record stays as it was: whether there is one does not depend on the data.
        self.records.save(head, self.client if self.output is None else self.output.client, keep=counted)
        numbered = node.numbered(self.head.client)
        remembered_run.remember(self.records.folder, self.settings, numbered, self.samples)
        measured_rounds.enter(self.records.folder, self.head.round, self.measured)
        if not (self.output and self.measured.tested and node.config.bundle and self.data.bundled):
            return
        run, primary = self.settings.run.run, self.settings.task.metrics[0]
        if run.select == "last" or is_best(primary, self.measured, kept_score(self.records.folder, primary)):
            scores = scores_of(self.data.task.metrics, self.measured, self.data.test, self.data.validation)
            bundled, task = self.data.bundled, self.data.task
            if task.criterion.kind == CLASSIFICATION:
                held_out = self.data.test, self.data.validation
                train = self.data.train.y[: int(self.data.train.size)].cpu().numpy()
                worth = of_client(task, self.output.trained, train, *held_out, run.temperature)
                scores += worth.scores(TEST, [metric.name for metric in task.metrics])
                output = dataclasses.replace(bundled.output, temperature=worth.temperature)
                bundled = dataclasses.replace(bundled, output=output)
            if task.criterion.kind == SURVIVAL:
                hazard = hazard_of(task, self.output.trained, self.data.train)
                output = dataclasses.replace(bundled.output, hazard=hazard)
                bundled = dataclasses.replace(bundled, output=output)
            model = self.output.trained
            write_bundle(self.records.folder, self.settings, bundled, self.head, model, scores, run.select)


def train(settings: TrainingSettings, node: Node, packet: Packet, load_data: LoadData) -> TrainedUpdate:
    """The client's local update for one round. What is stored or sent of it is the caller's, see `TrainedUpdate.save`.

    1. The message is decoded, and the record is read from which the client starts.
    2. The node notes what it was asked, before anything is computed: it trains on one model in a round.
    3. Its data are loaded, and the algorithm gets the key of the node's noise.
    4. It trains, and measures its models. A failure is passed on as it is: its text may describe samples.
    5. The release is entered into the ledger: before it leaves, and also if the caller adds it to a sum. It is a
       PolicyError if its epsilon is too much.

    Args:
        settings: The federation's.
        node: The one that is asked.
        packet: The server's message, with the model.
        load_data: Reads the node's data.
    """
    head, down, fields = decode(settings, node, packet)
    if head.round == settings.federation.rounds:  # new clients are fitted then, and nobody trains
        raise WireError(f"it is of round {head.round}, and the run has {head.round} rounds")
    records, counted = ClientRecords(node.folder, head.run), int(fields.get(Field.COUNTED, -1))
    # Members of a secure sum are in it from the first round on: a run that begins later would begin with any model.
    if head.round == 0 or (settings.federation.secure.aggregation and not records.has_been_asked):
        _require_first_model(settings, node, head, down)
    client, note = start_of(settings, records, head, counted)
    records.ask(head.round, packet.body, counted, may_return=settings.federation.session.rollback)
    data = load_data(settings, node.numbered(head.client))
    algorithm, task = settings.algorithm, data.task
    if isinstance(algorithm, SecretNoise):
        algorithm = with_key(algorithm, records.folder, head.round, (down, torch.tensor(counted)))
    with torch.no_grad():
        client, down = moved((client, down), task.device)
        output: ClientOutput | None = None
        failure: Exception | None = None
        measured = MeasuredModels({}, {})
        try:
            is_first = not records.rounds()
            held = None
            if settings.federation.choice.names:
                held = _held_out(settings, node, data, is_first=is_first)
                counted_data = data._replace(train=held.train)
            else:
                counted_data = data._replace(train=_that_count(settings, node, data, is_first=is_first))
            if held is not None and isinstance(algorithm, InFolds):
                algorithm = dataclasses.replace(algorithm, of=torch.from_numpy(held.of))
            batches = plan_of(settings, algorithm, client, head, counted_data)
            updated = algorithm.client_update(task, client, down, counted_data.train, batches)
            _log_gpu(task.device, head.round)
            # The record is checked too: an algorithm that shares little may diverge without effect on its upload.
            if not tree.finite((updated.client, updated.upload)):
                raise WireError(
                    "its training diverged: its model or its upload is not finite; nothing was sent"
                )
            if is_evaluated(head.round, settings.federation.rounds, settings.run.run.eval_every):
                if held is not None and isinstance(algorithm, InFolds):
                    models = updated.client, down
                    name = KnownData(node.memory).name_of(data.samples)
                    found = choice.measured(algorithm, node, task, models, held, data, settings, name)
                    measured, data = MeasuredModels(found, {}), data._replace(bundled=None)
                else:
                    records_of = client, down, updated.client, updated.trained
                    measured = measure(algorithm, task, *records_of, data.test, data.validation)
            output = updated
        except Exception as error:  # its text may describe samples
            if isinstance(algorithm, SecretNoise):  # without an upload there would be less noise in a sum
                raise
            failure = error
        noised = ""
        if output is not None and isinstance(algorithm, SecretNoise):
            noised = enter_upload(records.folder, output.upload)
        client, output, measured = moved((client, output, measured), torch.device("cpu"))
    samples = KnownData(node.memory).name_of(data.samples)
    release = Release(samples, head.run, head.round, noise=0.0)
    if isinstance(settings.algorithm, SecretNoise) and not reports_metrics(settings, node):
        noise, where = upload_noise(settings.algorithm), UPLOAD
        if settings.federation.secure.aggregation:  # others may reveal a sum of so few, if this node is lost
            fewest = max(settings.rules.threshold, SMALLEST_COHORT)
            noise, where = sum_noise(settings.algorithm, fewest), SUM
        release = release._replace(noise=noise, clip=settings.algorithm.clip, place=where, value=noised)
    Ledger(node.memory).enter(release, node.policy.privacy)
    return TrainedUpdate(
        head, fields, records, client, output, failure, measured, note, noised, settings, data, samples
    )


def _require_first_model(settings: TrainingSettings, node: Node, head: Head, down: Any) -> None:
    """PolicyError if a run does not begin here with the model of its settings and its seed, where the owner asks.

    Args:
        settings: The federation's.
        node: The one that is asked.
        head: Of the server's message.
        down: Its record.
    """
    if not node.policy.first_model:
        return
    narrow = torch.finfo(wire.WIRES[settings.federation.network.wire]).eps
    with torch.no_grad():
        pairs = zip(tree.leaves(down), tree.leaves(message_like(settings, head.client)), strict=True)
    for sent, own in pairs:
        # Other processors round otherwise.
        most = (narrow + 1e-6) * float(own.abs().max()) if own.is_floating_point() and own.numel() else 0.0
        if not bool(((sent.double() - own.double()).abs() <= most).all()):
            why = (
                "the server's first model is not the one that the settings and the seed of the proposal give"
            )
            if head.round:
                why = f"this node has seen no earlier round of run {head.run}, and {why}; begin a new run"
            raise PolicyError((Refusal("first_model", why),), "request")


def _held_out(settings: TrainingSettings, node: Node, data: NodeData, *, is_first: bool) -> HeldOut:
    """The training rows that count where folds are held out; DataError if none do.

    Args:
        settings: The federation's.
        node: The one that is asked.
        data: The node's.
        is_first: Whether its owner is told, as in the first round.
    """
    held = choice.held_out(settings, node, data)
    if is_first and (held.left_out or (held.of == NEVER).any()):
        logging.getLogger("flwr").warning(
            "copfl: of this node's %d training rows %d do not count, and %d are never held out to choose a method: "
            "fewer than %d rows are like them [least_rows]",
            *(int(data.train.size), held.left_out, int((held.of == NEVER).sum()), node.policy.least_rows),
        )
    if not int(held.train.size):
        raise DataError("none of its training rows count: too few rows are like each other [least_rows]")
    return held


def _that_count(settings: TrainingSettings, node: Node, data: NodeData, *, is_first: bool) -> Data:
    """The training rows that count by the owner's policy; DataError if none do.

    Args:
        settings: The federation's.
        node: The one that is asked.
        data: The node's.
        is_first: Whether its owner is told, as in the first round.
    """
    least = node.policy.least_rows
    has_products = settings.run.algorithm.name == "levels"
    criterion = settings.task.criterion
    train, left_out, merged = counted_rows(criterion, data.train, least, has_products=has_products)
    if is_first and (left_out or merged):
        logging.getLogger("flwr").warning(
            "copfl: %d of this node's %d training rows do not count, and %d intervals are merged with others: fewer "
            "than %d rows are like them [least_rows]",
            *(left_out, int(data.train.size), merged, least),
        )
    if not int(train.size):
        raise DataError(f"none of its training rows count: no target is that of {least} rows [least_rows]")
    return train


def _log_gpu(device: torch.device, round: int) -> None:
    """Tells the node's owner that a GPU trained, and the most memory that it has needed."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**20
        name = torch.cuda.get_device_name(device)
        logging.getLogger("flwr").info(
            "copfl: round %d was trained on %s; at most %.1f MiB of its memory", round + 1, name, peak
        )


def reports_metrics(settings: TrainingSettings, node: Node) -> bool:
    """Whether the node sends its metrics: by default, unless uploads are noised, because metrics are not.

    The policy has the last word. They have no noise, so none leave where it limits epsilon.

    Args:
        settings: The federation's.
        node: The one that is asked.
    """
    is_secure, chosen = settings.federation.secure.aggregation, node.config.metrics
    may_leave = {"all": True, "sums": is_secure, "none": False}[node.policy.reports]
    is_wanted = not settings.run.privacy if chosen is None else chosen
    return may_leave and is_wanted and not node.policy.privacy.lifetime_epsilon


def local_update(
    settings: TrainingSettings, node: Node, packet: Packet, load_data: LoadData = node_data
) -> Packet:
    """The client's upload for one round; its record is written before.

    If the data have been in a secure sum, it counts as a sum of one.

    Args:
        settings: The federation's.
        node: The one that is asked.
        packet: The server's message, with the model.
        load_data: Reads the node's data.
    """
    memory = SumMemory(node.memory)
    alone: RememberedSum | None = None
    if not memory.is_empty:
        head = head_of(settings, node, packet)
        data = load_data(settings, node.numbered(head.client))
        identity = frozenset([node.identity(node.key.public)])
        rows, objective = rows_of(settings.federation, head.client), objective_of(settings.federation)
        alone = RememberedSum(memory.name_of(data.samples), identity, rows, objective, frozenset())
        memory.history(alone.samples).expect(alone, node.config.cohort_changes)  # before it trains
    trained = train(settings, node, packet, load_data if alone is None else lambda *_: data)
    if trained.output is None:
        # The server sees whether an upload is finite; any other text may describe samples.
        if isinstance(trained.failure, WireError):
            raise trained.failure
        raise DataError(f"its training failed: {trained.failure!r}")
    trained.save(node)
    metrics = trained.metrics if reports_metrics(settings, node) else {}
    reported = {name: wire.plain(float(value)) for name, value in metrics.items()}
    upload = wire.encode(
        trained.output.upload,
        trained.head._replace(kind="upload"),
        settings.federation.network.wire,
        receiver_masks=trained.about.get(Field.KNOWN_MASKS),
        # The server has one of these masks.
        known=[t for t in tree.leaves(trained.client) if t.dtype == torch.bool],
        about={Field.NOTE: trained.note, Field.METRICS: reported},
    )
    if alone is not None and memory.history(alone.samples):
        memory.remember(alone._replace(uploads=frozenset([hashlib.sha256(upload.body).hexdigest()])))
    return upload


def plan_of(
    settings: TrainingSettings, algorithm: AnyAlgorithm, client: Any, head: Head, data: NodeData
) -> Plan:
    """The client's batches of one round.

    Args:
        settings: The federation's.
        algorithm: Its algorithm, or the one that trains alone.
        client: The client's record before the round.
        head: Of the message that asks for the round.
        data: The node's.
    """
    order = next_plan(
        algorithm,
        data.task.probed(data.train),
        tree.repeat(client, 1),
        head.round,
        [head.client],
        [int(data.train.size)],
        seed=settings.run.run.seed,
        batch=settings.run.run.batch,
        augment=settings.federation.augment,
    )
    return tree.row(order, 0)


def start_of(settings: TrainingSettings, records: ClientRecords, head: Head, counted: int) -> tuple[Any, str]:
    """The record after the last counted upload, and a note if it is missing.

    Args:
        settings: The federation's.
        records: The client's.
        head: Of the server's message.
        counted: The last round of this client that the server counted; -1: none.
    """
    initial, rounds = settings.algorithm.client_init(settings.task), records.rounds()
    if counted < 0:
        return initial, ""
    if counted not in rounds:
        return initial, f"started again: it has no record of round {counted + 1}; was its state-dir changed?"
    return records.load(head._replace(kind="client", round=counted), initial), ""
