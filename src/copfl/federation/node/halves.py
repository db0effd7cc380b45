"""What a node answers about the halves of a round, and notes of it: its losses with both models.

Only with run.benefit=true, which the owner's policy must allow, and never with secure sums. A node compares one pair
of models in a round: with more, each pair of losses would tell something else of the same samples.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from copfl import wire
from copfl.core.halves import loss_with
from copfl.errors import WireError
from copfl.federation.node.data import LoadData, NodeData, moved
from copfl.federation.node.incoming import head_of, message_like
from copfl.federation.node.node import Node
from copfl.federation.node.records import ClientRecords
from copfl.federation.protocol.files import stored, write_json
from copfl.federation.protocol.halves import HALVES, LOSSES
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.settings import TrainingSettings
from copfl.wire import Packet

FILE = "halves.json"  # in the run's folder in the state-dir


class HalfLosses(NamedTuple):
    """What a node found in one round; nan where it has too few samples, or a loss is not finite."""

    message: str  # the SHA-256 of both models
    first: float
    second: float


def compare_halves(settings: TrainingSettings, node: Node, packet: Packet, load_data: LoadData) -> Packet:
    """The client's losses with the models of both halves.

    Args:
        settings: The federation's.
        node: The one that is asked.
        packet: The server's message, with both models.
        load_data: Reads the node's data.
    """
    if not settings.run.run.benefit:
        raise WireError("it is about halves of the clients, and the run does not measure the benefit")
    head = head_of(settings, node, packet)._replace(kind=HALVES)
    like = message_like(settings, head.client)
    models = wire.decode(packet, (like, like), head).record
    records = ClientRecords(node.folder, head.run)
    earlier_losses, message = read(records.folder), hashlib.sha256(packet.body).hexdigest()
    losses = earlier_losses.get(head.round)
    if losses is not None and losses.message != message:
        raise WireError(
            f"this node has compared the halves of round {head.round + 1}, and is asked to compare other "
            "models: it gives two losses a round"
        )
    if losses is None:
        if head.round not in records.rounds():
            raise WireError(f"this node has not trained in round {head.round + 1}")
        client = records.load(head._replace(kind="client"), settings.algorithm.client_init(settings.task))
        data = load_data(settings, node.numbered(head.client))
        least = node.policy.statistics.smallest_count
        losses = HalfLosses(message, *_losses(settings, data, client, models, least))
        rounds_before = {round: pair for round, pair in earlier_losses.items() if round < head.round}
        _write(records.folder, rounds_before | {head.round: losses})
    two_losses = [wire.plain(losses.first), wire.plain(losses.second)]
    return wire.encode((), head._replace(kind=LOSSES), about={Field.LOSSES: two_losses})


def _losses(
    settings: TrainingSettings, data: NodeData, client: object, models: Sequence[object], least: int
) -> list[float]:
    """On the validation samples where the run has such, else on those for training: as in the simulation.

    Not on fewer than `least`: with run.validation near zero they would be of one row, which run.seed chooses.
    """
    samples = data.validation if settings.run.run.validation else data.train
    if samples is None or int(samples.size) < max(least, 1):
        return [math.nan, math.nan]
    with torch.no_grad():
        record, *received = moved((client, *models), data.task.device)
        return [float(loss_with(settings.algorithm, data.task, record, down, samples)) for down in received]


def read(folder: Path) -> dict[int, HalfLosses]:
    """What this node found, by round, from 0."""
    return stored(
        folder / FILE,
        lambda rounds: {
            int(round): HalfLosses(
                str(message), *(math.nan if loss is None else float(loss) for loss in pair)
            )
            for round, (message, *pair) in rounds.items()
        },
        {},
    )


def forget(folder: Path, round: int) -> None:
    """Removes a round and those after it: the node trains in it again.

    Args:
        folder: The folder of the run, in the node's state-dir.
        round: From 0.
    """
    losses_by_round = read(folder)
    if max(losses_by_round, default=-1) >= round:
        _write(folder, {earlier: losses for earlier, losses in losses_by_round.items() if earlier < round})


def _write(folder: Path, losses_by_round: dict[int, HalfLosses]) -> None:
    content = {
        str(round): [losses.message, wire.plain(losses.first), wire.plain(losses.second)]
        for round, losses in losses_by_round.items()
    }
    write_json(folder / FILE, content)
