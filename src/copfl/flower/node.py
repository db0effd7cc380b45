"""One client on its own machine: its data, its record on disk, and its answer to the server. Knows nothing of Flower.

The record after each round is a file of its own. The server says which of the client's uploads it counted last, and the
client starts from the record it had after that one: so a round that is repeated after a crash is trained once, and a
reply that came too late has never been. At most two records are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from copfl import wire
from copfl.core import tree
from copfl.core.algorithm import evaluate
from copfl.core.batches import plan
from copfl.core.task import Data
from copfl.data.datasets import load
from copfl.data.samples import Dataset, Samples
from copfl.errors import DataError, RunError, UsageError, WireError
from copfl.flower.files import write
from copfl.flower.identity import known_client, state_dir
from copfl.flower.settings import Settings, own_function
from copfl.wire import Head, Packet


class Holding(NamedTuple):
    """One node's samples."""

    train: Data
    test: Data


def holding(settings: Settings, node_config: Mapping[str, Any]) -> Holding:
    """The data that the node's own configuration names: a .npz file, a folder of images, or the user's function."""
    source = node_config.get("data")
    if not isinstance(source, str) or not source:
        raise UsageError(
            """the node names no data; start it with --node-config 'data="/path/of/data.npz" ...'"""
        )
    if ":" in source and not Path(source).exists():
        dataset = own_function("data", source)(dict(node_config))
        if not isinstance(dataset, Dataset):
            raise UsageError(
                f'data="{source}" must give a copfl.data.samples.Dataset, not {type(dataset).__name__}'
            )
    else:
        dataset = load(source)
    return Holding(*(_fitted(settings, dataset, part) for part in (dataset.train, dataset.test)))


def _fitted(settings: Settings, dataset: Dataset, part: Samples) -> Data:
    """One split as tensors, its labels numbered as the federation numbers them."""
    if tuple(part.x.shape[1:]) != settings.shape:
        raise DataError(f"a sample is {list(part.x.shape[1:])}, the federation's are {list(settings.shape)}")
    y = torch.from_numpy(part.y)
    if settings.classes and not all(name.isdigit() for name in dataset.classes):
        if strange := sorted(set(dataset.classes) - set(settings.classes)):
            raise DataError(
                f"the federation has no class {strange[0]!r}; known: {', '.join(settings.classes)}"
            )
        y = torch.tensor([settings.classes.index(name) for name in dataset.classes])[y]
    if int(y.max()) >= settings.task.classes:
        raise DataError(
            f"there is a label {int(y.max())}, but the federation has {settings.task.classes} classes"
        )
    return Data(torch.from_numpy(part.x), y, torch.tensor(len(y)))


# -- the record on disk ------------------------------------------------------------------------------------------------


class Records:
    """The client's records of one run, in the node's own folder."""

    def __init__(self, state_dir: Path, run: str) -> None:
        self.folder = state_dir / run

    def rounds(self) -> list[int]:
        """The rounds of which a record is there, sorted."""
        found = (re.fullmatch(r"round-(\d+)\.copfl", p.name) for p in self.folder.glob("round-*.copfl"))
        return sorted(int(match[1]) for match in found if match)

    def load(self, head: Head, like: Any) -> Any:
        """The record after that round."""
        path = self._path(head.round)
        try:
            return wire.decode(wire.from_bytes(path.read_bytes()), like, head, finite=False).record
        except (OSError, WireError) as error:
            raise RunError(
                f"{path} cannot be used: {error}; restore the node's folder from a copy"
            ) from error

    def save(self, head: Head, record: Any, keep: int) -> None:
        """Writes the record after this round; of the others, only the one of round `keep` stays."""
        write(self._path(head.round), wire.to_bytes(wire.encode(record, head)))
        for other in self.rounds():
            if other not in (head.round, keep):
                self._path(other).unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.copfl"


# -- its answer --------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What the server sent, checked."""

    head: Head
    down: Any
    about: dict[str, Any]


def asked(settings: Settings, node_config: Mapping[str, Any], packet: Packet) -> Asked:
    """The server's message; WireError if it is for another model or another client."""
    said = wire.opened_head(packet)
    run, round, client = (said.get(name) for name in ("run", "round", "client"))
    if type(run) is not str or type(round) is not int or type(client) is not int:
        raise WireError("it does not say its run, round and client")
    if not 0 <= round < 2**63:
        raise WireError(f"it is of round {round}; rounds count from 0")
    mine = known_client(node_config, run)
    head = Head("down", run, settings.layout, round, client if mine < 0 else mine)
    clients = max(settings.clients, 1)
    server = settings.algorithm.server_init(settings.task, clients)
    like = tree.row(settings.algorithm.downlink(server, torch.tensor([min(client, clients - 1)])), 0)
    opened = wire.decode(packet, like, head)
    about = opened.about
    if any(type(about.get(name, 0)) is not int for name in ("counted", "turns")) or not isinstance(
        about.get("holds", {}), dict
    ):
        raise WireError("what it says about itself is not what copfl's servers say")
    return Asked(head, opened.record, opened.about)


def answer(settings: Settings, node_config: Mapping[str, Any], packet: Packet) -> Packet:
    """One turn: the message in, the client's record written, the upload out."""
    head, down, about = asked(settings, node_config, packet)
    algorithm, task = settings.algorithm, settings.task
    data = holding(settings, node_config)
    records = Records(state_dir(node_config), head.run)
    client, note = _record(settings, records, head, int(about.get("counted", -1)))
    size = int(data.train.size)
    order = plan(
        settings.seed, head.round, [head.client], [size],
        batch=settings.batch, epochs=algorithm.total_epochs, augment=settings.augment,
    )  # fmt: skip
    with torch.no_grad():
        turn = algorithm.client_update(task, client, down, data.train, tree.row(order, 0))
        # The record counts too: a client that shares little or nothing can break without its upload showing it.
        if not tree.finite((turn.client, turn.upload)):
            raise WireError(
                "its training diverged: its model or its upload is not finite. Nothing was sent, its state is as before"
            )
        looked = evaluate(algorithm, task, client, down, turn.trained, data.test) if about.get("look") else {}
    write(records.folder / "client.json", json.dumps({"client": head.client}).encode())
    records.save(head._replace(kind="client"), turn.client, keep=int(about.get("counted", -1)))
    metrics = {name: wire.plain(float(value)) for name, value in (turn.metrics | looked).items()}
    told = {"note": note, "figures": metrics if node_config.get("figures", True) else {}}
    masks = [
        t for t in tree.leaves(client) if t.dtype == torch.bool
    ]  # among them the one that the server holds
    return wire.encode(
        turn.upload,
        head._replace(kind="upload"),
        settings.wire,
        holds=about.get("holds"),
        known=masks,
        about=told,
    )


def _record(settings: Settings, records: Records, head: Head, counted: int) -> tuple[Any, str]:
    """The record to start from: the one after the upload that the server counted last. And what is odd about it."""
    fresh = settings.algorithm.client_init(settings.task)
    there = records.rounds()
    if there and there[-1] > head.round:
        raise RunError(
            f"this node has already taken part in round {there[-1] + 1} of run {head.run}, and is asked for round "
            f"{head.round + 1}: the message is old, or the server lost rounds. Restore the server's newer checkpoint"
        )
    if counted < 0:
        return fresh, ""
    if counted not in there:
        return fresh, f"began anew: it has no record of round {counted + 1}; is its state-dir the one it had?"
    return records.load(head._replace(kind="client", round=counted), fresh), ""


def personalise(settings: Settings, node_config: Mapping[str, Any], packet: Packet) -> Packet:
    """A newcomer's turns: the shared model in, trained on its own data alone; out go two accuracies, no weights."""
    if (mine := known_client(node_config, "")) >= 0:
        raise WireError(f"this node is client {mine}; only a newcomer, that is nobody yet, can join")
    head, down, about = asked(settings, node_config, packet)
    algorithm, task = settings.algorithm, settings.task
    data, turns = holding(settings, node_config), int(about["turns"])
    client, trained = algorithm.client_init(task), None
    with torch.no_grad():
        before = algorithm.personal_model(task, client, down)
        for turn in range(turns):
            order = plan(
                settings.seed, head.round + turn, [head.client], [int(data.train.size)],
                batch=settings.batch, epochs=algorithm.total_epochs, augment=settings.augment,
            )  # fmt: skip
            done = algorithm.client_update(task, client, down, data.train, tree.row(order, 0))
            client, trained = done.client, done.trained
        accuracies = [
            float(task.evaluate(w, data.test)[1]) for w in (before, before if trained is None else trained)
        ]
    records = Records(state_dir(node_config), head.run)
    records.save(head._replace(kind="client"), client, keep=head.round)
    if isinstance(trained, torch.Tensor):
        model = wire.encode({"w": trained}, head._replace(kind="model"))
        write(records.folder / "personal.copfl", wire.to_bytes(model))
    told = {
        "accuracy_before": accuracies[0],
        "accuracy_after": accuracies[1],
        "samples": int(data.train.size),
    }
    return wire.encode((), head._replace(kind="newcomer"), about=told)
