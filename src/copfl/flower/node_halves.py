"""A client's part in the benefit: its losses with the models of two halves of the clients, once a round."""

import hashlib
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch

from copfl import wire
from copfl.core.halves import loss_with
from copfl.errors import RunError, WireError, raised_as
from copfl.flower import node
from copfl.flower.halves import HALVES, LOSSES
from copfl.flower.node import LoadData, NodeData
from copfl.flower.node_message import NodeConfig, head_of
from copfl.flower.registry import state_dir
from copfl.flower.settings import Settings
from copfl.flower.state import ClientRecords, write_json
from copfl.flower.transport import Field
from copfl.wire import Packet

FILE = "halves.json"  # in the run's folder in the state-dir
UNASKED = "it is about halves of the clients, and the run does not measure the benefit"


class Losses(NamedTuple):
    """What a node found in one round; nan where it has no samples or the loss is not finite."""

    message: str  # the SHA-256 of both models
    first: float
    second: float

    @property
    def difference(self) -> float:
        """Positive: the first half's model is better."""
        return self.second - self.first


def compare(settings: Settings, node_config: NodeConfig, packet: Packet, load_data: LoadData) -> Packet:
    """The client's losses with the models of both halves; with secure aggregation only whether it has them."""
    if not settings.run.run.benefit:
        raise WireError(UNASKED)
    head = head_of(settings, node_config, packet)._replace(kind=HALVES)
    like = node.message_like(settings, head.client)
    models = wire.decode(packet, (like, like), head).record
    records = ClientRecords(state_dir(node_config), head.run)
    known, message = read(records.folder), hashlib.sha256(packet.body).hexdigest()
    found = known.get(head.round)
    if found is not None and found.message != message and not settings.federation.session.rollback:
        raise WireError(
            f"this node has compared the halves of round {head.round + 1}, and is asked to compare other models: "
            "it gives two losses a round"
        )
    if found is None or found.message != message:
        if head.round not in records.rounds():
            raise WireError(f"this node has not trained in round {head.round + 1}")
        client = records.load(head._replace(kind="client"), settings.algorithm.client_init(settings.task))
        data = load_data(settings, node.numbered(node_config, head))
        first, second = (_loss(settings, data, client, down) for down in models)
        found = Losses(message, first, second)
        earlier = {round: losses for round, losses in known.items() if round < head.round}
        _write(records.folder, earlier | {head.round: found})
    losses = [wire.plain(found.first), wire.plain(found.second)]
    is_secure = settings.federation.secure.aggregation
    answer = {Field.COMPARED: None not in losses} if is_secure else {Field.LOSSES: losses}
    return wire.encode((), head._replace(kind=LOSSES), about=answer)


def _loss(settings: Settings, data: NodeData, client: object, down: object) -> float:
    """On the validation samples where the run has such, else on those for training: as in the simulation."""
    samples = data.validation if settings.run.run.validation else data.train
    if samples is None:
        return math.nan
    with torch.no_grad():
        record, received = node.moved((client, down), data.task.device)
        return float(loss_with(settings.algorithm, data.task, record, received, samples))


# -- the file ------------------------------------------------------------------------------------------------


def read(folder: Path) -> dict[int, Losses]:
    """What this node found, by round, from 0."""
    path = folder / FILE
    damaged = f"{FILE} cannot be used: {{}}; restore the node's state-dir"
    with raised_as(RunError, damaged, OSError, ValueError, TypeError, AttributeError):
        stored = json.loads(path.read_text()) if path.exists() else {}
        return {
            int(round): Losses(str(message), *map(_number, pair))
            for round, (message, *pair) in stored.items()
        }


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _write(folder: Path, found: dict[int, Losses]) -> None:
    content = {
        str(round): [losses.message, wire.plain(losses.first), wire.plain(losses.second)]
        for round, losses in found.items()
    }
    write_json(folder / FILE, content)
