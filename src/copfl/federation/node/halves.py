"""What a node answers about the halves of a round: its losses with both models."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch

from copfl import wire
from copfl.core.halves import loss_with
from copfl.errors import WireError
from copfl.federation.node import halves_memory
from copfl.federation.node.data import LoadData, NodeData, moved
from copfl.federation.node.message import head_of, message_like
from copfl.federation.node.node import Node
from copfl.federation.node.records import ClientRecords
from copfl.federation.protocol.halves import HALVES, LOSSES
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.settings import Settings
from copfl.wire import Packet

NO_HALVES = "it is about halves of the clients, and the run does not measure the benefit"


def compare_halves(settings: Settings, node: Node, packet: Packet, load_data: LoadData) -> Packet:
    """The client's losses with the models of both halves; in secure aggregation only whether it has them."""
    if not settings.run.run.benefit:
        raise WireError(NO_HALVES)
    head = head_of(settings, node, packet)._replace(kind=HALVES)
    like = message_like(settings, head.client)
    models = wire.decode(packet, (like, like), head).record
    records = ClientRecords(node.folder, head.run)
    known, message = halves_memory.read(records.folder), hashlib.sha256(packet.body).hexdigest()
    found = known.get(head.round)
    if found is not None and found.message != message:
        raise WireError(
            f"this node has compared the halves of round {head.round + 1}, and is asked to compare other "
            "models: it gives two losses a round"
        )
    if found is None:
        if head.round not in records.rounds():
            raise WireError(f"this node has not trained in round {head.round + 1}")
        client = records.load(head._replace(kind="client"), settings.algorithm.client_init(settings.task))
        data = load_data(settings, node.numbered(head.client))
        least = node.policy.statistics.smallest_count
        found = halves_memory.Losses(message, *_losses(settings, data, client, models, least))
        earlier = {round: losses for round, losses in known.items() if round < head.round}
        halves_memory.write(records.folder, earlier | {head.round: found})
    losses = [wire.plain(found.first), wire.plain(found.second)]
    is_secure = settings.federation.secure.aggregation
    answer = {Field.COMPARED: None not in losses} if is_secure else {Field.LOSSES: losses}
    return wire.encode((), head._replace(kind=LOSSES), about=answer)


def _losses(
    settings: Settings, data: NodeData, client: object, models: Sequence[object], least: int
) -> list[float]:
    """On the validation samples where the run has such, else on those for training: as in the simulation.

    Not on fewer than `least`: with run.validation near zero they would be of one row, which run.seed chooses.

    With secure aggregation a loss that is not finite makes both zero. Otherwise the server, which may send
    any models, would learn whether it is: with a model that is nearly infinite for one class, how many
    samples a node has of it.
    """
    samples = data.validation if settings.run.run.validation else data.train
    if samples is None or int(samples.size) < max(least, 1):
        return [math.nan, math.nan]
    with torch.no_grad():
        record, *received = moved((client, *models), data.task.device)
        found = [float(loss_with(settings.algorithm, data.task, record, down, samples)) for down in received]
    is_hidden = settings.federation.secure.aggregation and not np.isfinite(found).all()
    return [0.0, 0.0] if is_hidden else found
