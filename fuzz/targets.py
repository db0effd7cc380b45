"""One function per reader of foreign input. It takes bytes and may raise only a CopflError.

A target also checks the accepted input: a file with a checksum must have its original content, samples must
be finite, every label must have a class. A violation raises AssertionError and counts as a failure.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import pickle
import re
import shutil
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from copfl import wire
from copfl.comparison.rows import entries, entry_file, entry_settings, spaces
from copfl.core import tree
from copfl.core.algorithm import received
from copfl.data import reading
from copfl.data.arrays import from_arrays
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.clients.schemes import SCHEMES
from copfl.data.samples import Dataset
from copfl.data.sets import datasets
from copfl.engine import checkpoint
from copfl.errors import CopflError
from copfl.experiment import reading as run_reading
from copfl.experiment import records
from copfl.experiment.loading import load
from copfl.federation.node import audit_log, update
from copfl.federation.node.node import Node
from copfl.federation.node.records import ClientRecords
from copfl.federation.policy.record import Policy
from copfl.federation.protocol import chained_log, proposal
from copfl.federation.protocol.events import silent
from copfl.federation.protocol.keys import SigningKey, new_key
from copfl.federation.protocol.messages import Content, Field, Reply
from copfl.federation.protocol.node_config import NodeConfig
from copfl.federation.protocol.proposal import Member, SignedProposal
from copfl.federation.protocol.round_record import RoundRecord
from copfl.federation.protocol.settings import TrainingSettings, settings_of
from copfl.federation.server.exchange import ServerRound
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.registry import Registry
from copfl.federation.server.rounds import TrainingServer, _record, new_server
from copfl.settings import toml
from copfl.settings.checking import checked, parameters_of
from copfl.settings.complete import complete
from copfl.wire import Head, Packet


class Target(NamedTuple):
    """A reader of foreign input, and valid examples to start from."""

    read: Callable[[bytes], None]
    examples: Callable[[], list[bytes]]
    weight: float  # its part of the cases in a run over all targets


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Of this process, in memory where possible; removed when the process ends."""
    shared = "/dev/shm"
    parent = shared if os.access(shared, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="copfl-fuzz-", dir=parent)


def scratch() -> Path:
    """The temporary folder of this process."""
    return Path(_temporary().name)


def equal(a: Any, b: Any) -> bool:
    """Whether two trees are equal bit for bit."""
    return all(torch.equal(left, right) for left, right in zip(tree.leaves(a), tree.leaves(b), strict=True))


def write(name: str, content: bytes) -> Path:
    """The path of a temporary file with this content."""
    path = scratch() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")  # as Python decodes arguments that are not UTF-8


class Draw:
    """Numbers and choices taken from bytes; zeros after the last byte."""

    def __init__(self, data: bytes) -> None:
        self.rest = io.BytesIO(data)

    def number(self, below: int) -> int:
        return int.from_bytes(self.rest.read(2), "little") % below

    def choice(self, options: Any) -> Any:
        return options[self.number(len(options))]


# Settings: --set, run files, entries of a comparison, a Flower run config


def set_option(data: bytes) -> None:
    table, key, value = toml.assignment(text_of(data))
    check_tables({table: {key: value}})


def run_file(data: bytes) -> None:
    check_tables(toml.read_file(write("run.toml", data)))


def check_tables(tables: dict[str, dict[str, Any]]) -> None:
    """Resolves the tables; the run.toml of the result must be read back unchanged."""
    resolved = complete(tables).tables()
    again = toml.read(toml.written(resolved).encode(), "run.toml")
    expected = {kind: {k: v for k, v in table.items() if v is not None} for kind, table in resolved.items()}
    # As text, because nan is not equal to itself.
    assert repr(_lists(again)) == repr(_lists(expected)), "run.toml has other settings"


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(part) for key, part in value.items()}
    return [_lists(part) for part in value] if isinstance(value, list | tuple) else value


SETTINGS = (
    "algorithm.rate=0.15",
    "run.threads=2",
    "optimizer.lr=1e-3",
    "optimizer.name=adam",
    "model.width=4",
    "model.name=mlp",
    "algorithm.name=fedprox",
    "partition.name=dirichlet",
    "partition.per_client=3",
    "data.name=digits",
    "run.seed=7",
    "run.participation=0.5",
    "run.store=disk",
    "partition.train_per_class=[1, 2]",
    "data.dir='a b'",
    "run.clients=0x10",
    "algorithm.merge=union",
    "robust.name=clip",
    "attack.name=noise",
    "run.device=cuda:0",
    "model.width=-1",
    "run.batch=8",
)


def run_files() -> list[bytes]:
    chosen: list[dict[str, dict[str, Any]]] = [
        {},
        {"algorithm": {"name": "fedavg"}},
        {"algorithm": {"name": "apfl"}, "model": {"name": "mlp"}},
        {"partition": {"name": "dirichlet"}, "run": {"clients": 3}},
    ]
    return [toml.written(complete(tables).tables()).encode() for tables in chosen]


def entries_text(data: bytes) -> None:
    for entry in entries.entries_of([text_of(data)]):
        complete(*entry_settings.row_settings(entry, {}, keeps_state=True).layers)


def seeds(data: bytes) -> None:
    assert len(entries.seeds_of(text_of(data))) < 10**6


def grid(data: bytes) -> None:
    spaces.grid_of(spaces.tried_values([text_of(data)], "--over"), "--over")


def compare_file(data: bytes) -> None:
    for entry in entry_file.read_file(write("compare.toml", data)).entries:
        complete(*entry_settings.row_settings(entry, {}, keeps_state=True).layers)


COMPARE_FILE = b"""[compare]
seeds = [0, 1]
tune = {lr = [0.1, 0.01]}
last = 3

[[entry]]
name = "copfl"
label = "ours"
settings = { rate = 0.1, optimizer = { name = "adam", lr = 0.01 } }

[[entry]]
name = "fedavg"

[run]
rounds = 3
"""


def flower_config(data: bytes) -> None:
    """A run config, as `flwr run` passes it: flat keys with a dot, and plain values."""
    try:
        content = tomllib.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return  # Flower reads the file and reports this error
    tables = {title: table for title, table in content.items() if isinstance(table, dict)}
    flat = {f"{title}.{key}": value for title, table in tables.items() for key, value in table.items()}
    settings_of({path: v for path, v in flat.items() if isinstance(v, str | int | float | bool)})


FLOWER_CONFIG = b"""session.run = "a"
run.rounds = 2
run.clients = 3
run.participation = 0.5
network.min_replies = 1
network.deadline = 5
network.wire = "bf16"
algorithm.name = "copfl"
algorithm.rate = 0.2
model.name = "mlp"
model.width = 4
samples.shape = "[1, 8, 8]"
samples.classes = '["a", "b", "c"]'
samples.mean = "[0.5]"
optimizer.lr = 0.01
"""


# Data


def check_dataset(dataset: Dataset) -> None:
    """The invariants of a data set."""
    for split in (dataset.train, dataset.test):
        assert len(split.x) == len(split.y) > 0, "there are samples, and each has a label"
        if dataset.kind == "classification":
            assert split.y.dtype == np.int64, "labels are int64"
            assert split.y.min() >= 0, "labels start at 0"
            assert split.y.max() < len(dataset.classes), "every label has a class"
        if split.x.dtype.kind == "f":
            assert np.isfinite(split.x).all(), "samples are finite"
    assert all(math.isfinite(v) and v > 0 for v in dataset.std), "samples can be normalised"


def npz(data: bytes) -> None:
    check_dataset(datasets.load(write("data.npz", data)))


def npz_files() -> list[bytes]:
    rng = np.random.default_rng(0)
    result = []
    for x, y in (
        (rng.integers(0, 256, (12, 4, 4), dtype=np.uint8), np.arange(12) % 2),
        (rng.normal(size=(10, 3)).astype(np.float32), np.zeros(10, np.int64)),
        (rng.integers(0, 256, (10, 3, 2, 2), dtype=np.uint8), np.arange(10) % 3),
    ):
        file = io.BytesIO()
        np.savez(file, x=x, y=y)
        result.append(file.getvalue())
    return result


def npy(data: bytes) -> None:
    array = reading.map_npy(write("data.npy", data))
    assert array.size < 2**24, "the array is not larger than the file"


def npy_files() -> list[bytes]:
    result = []
    for array in (np.arange(6, dtype=np.uint8).reshape(2, 3), np.zeros(3, np.float64)):
        file = io.BytesIO()
        np.save(file, array)
        result.append(file.getvalue())
    return result


def arrays(data: bytes) -> None:
    """Arrays of any dtype and shape, partitioned by any scheme."""
    draw = Draw(data)
    kinds = ("u1", "f4", "f8", "i8", "i4", "f2", "b1", "c8", "U2", "O", "M8[s]", "V3", ">f4", "u8")
    given: dict[str, Any] = {}
    count = draw.choice((0, 1, 2, 5, 6, 10, 20, 41))
    for part in ("x", "y", *(("x_test", "y_test") if draw.number(3) == 0 else ())):
        n = count if draw.number(8) else draw.choice((0, 1, 3))
        if part.startswith("x"):
            shape = (n, *(draw.choice((1, 2, 3, 4, 0, 7)) for _ in range(draw.number(4))))
            array = np.resize(np.frombuffer(draw.rest.read(64) or b"\0", np.uint8), shape).astype(np.float64)
            if draw.number(6) == 0 and array.size:
                array.flat[draw.number(array.size)] = draw.choice((np.nan, np.inf, 1e300, -1e300))
            kind = "u1" if draw.number(3) else draw.choice(kinds)
        else:
            array = np.resize(np.frombuffer(draw.rest.read(16) or b"\0", np.uint8), n).astype(np.float64)
            array = np.mod(array, draw.choice((1, 2, 3, 10, 256)))
            if draw.number(8) == 0 and array.size:
                array.flat[draw.number(array.size)] = draw.choice((-1, 70_000, 2**62))
            kind = "i8" if draw.number(4) else draw.choice(kinds)
        try:
            with np.errstate(all="ignore"):
                given[part] = array.astype(kind)
        except (TypeError, ValueError):  # numpy has no such conversion
            given[part] = array
    if draw.number(6) == 0:
        given["group"] = np.arange(count) % draw.choice((1, 2, 5))
    dataset = from_arrays(**given)
    check_dataset(dataset)
    name, clients = draw.choice(sorted(SCHEMES)), draw.choice((1, 2, 3, 10))
    options: dict[str, Any] = {}
    if draw.number(2):
        known = parameters_of(SCHEMES[name], ("dataset", "clients", "seed"))
        if known:
            options = {
                draw.choice(sorted(known)): draw.choice((0, 1, 2, 0.5, -1, 1e-9, 10**9, True, "a", None))
            }
            options = checked("partition", SCHEMES[name], options)
    split = SCHEMES[name](dataset, clients, draw.number(1000), **options)
    federation = FederatedData(dataset, split)
    assert federation.clients == clients
    assert all(federation.train.sizes > 0), "every client has training samples"


def image(data: bytes) -> None:
    reading.image_size(data, "the file")
    pixels = reading.decode(data, "the file", (4, 4))
    assert pixels.shape == (3, 4, 4)


def image_files() -> list[bytes]:
    from PIL import Image

    result = []
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    for kind, mode in (
        ("PNG", "RGB"),
        ("JPEG", "RGB"),
        ("PNG", "L"),
        ("PNG", "P"),
        ("PNG", "RGBA"),
        ("JPEG", "CMYK"),
    ):
        file = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(file, kind)
        result.append(file.getvalue())
    return result


def image_folder(data: bytes) -> None:
    """Two classes of five images, one of which is the input."""
    write(f"{_image_folder().name}/b/2.png", data)
    check_dataset(datasets.load(_image_folder()))


@functools.cache
def _image_folder() -> Path:
    valid = image_files()[0]
    paths = [write(f"folder/{label}/{number}.png", valid) for label in ("a", "b") for number in range(5)]
    return paths[0].parents[1]


def archive(data: bytes) -> None:
    path = write("data.tar", data)
    for member in reading.members(path):
        member.read(2**16)


def archives() -> list[bytes]:
    result = []
    for mode in ("w", "w:gz", "w:xz", "w:bz2"):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode=mode) as archive:
            for name, content in (("a/train/cat/1.png", b"12345"), ("a/" + "x" * 120, b"6" * 600)):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        result.append(file.getvalue())
    return result


def cifar_batch(data: bytes) -> None:
    x, y = datasets._cifar_batch(data, "the file", b"labels", 10)
    assert len(x) == len(y) > 0
    assert y.max() < 10


def cifar_batches() -> list[bytes]:
    """Batches as numpy of Python 2 pickled them, written without numpy."""
    pixels = bytes(range(256)) * 12
    body = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04"
        b"K\x00\x85U\x01b\x87Rq\x05(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(pixels).to_bytes(4, "little")
        + pixels
        + b"tbU\x06labelsq\x08]q\x09K\x03au."
    )
    return [body, pickle.dumps({b"data": None, b"labels": [1]}, 2), pickle.dumps(os.getcwd, 2)]


# Files of a run


@functools.cache
def finished_run(algorithm: str = "copfl", rounds: int = 2) -> Path:
    """The folder of a small finished run."""
    import copfl

    path = scratch() / algorithm
    copfl.run(
        algorithm,
        model="mlp",
        clients=2,
        rounds=rounds,
        model_options={"width": 4},
        out=path,
        engine="sequential",
    )
    return path


def partition_file(data: bytes) -> None:
    partition = Partition.load(write("partition.json", data))
    assert partition.fingerprint == _original_fingerprint(), "a changed partition has another fingerprint"


@functools.cache
def _original_fingerprint() -> str:
    return Partition.load(finished_run() / "partition.json").fingerprint


@functools.cache
def small_state() -> dict[str, Any]:
    """The trees of a small checkpoint."""
    record = {"w": torch.arange(6.0), "mask": torch.tensor([True, False, True])}
    return {"server": record, "clients": {"position": torch.zeros(2, dtype=torch.int8)}, "empty": None}


def checkpoint_file(data: bytes) -> None:
    path = write("state.safetensors", data)
    checkpoint.peek(path, re.compile("server:mask"))
    trees, about = checkpoint.load(path, small_state())
    assert about == {"round": 3}
    assert equal(trees, small_state()), "changed content has another checksum"


def checkpoint_files() -> list[bytes]:
    path = scratch() / "valid.safetensors"
    checkpoint.save(path, small_state(), {"round": 3})
    return [path.read_bytes()]


def model_file(data: bytes) -> None:
    (finished_run() / "models" / "client-0001" / "weights.safetensors").write_bytes(data)
    load(finished_run(), 1).predict(np.zeros((1, 1, 8, 8), np.uint8))


@functools.cache
def model_files() -> list[bytes]:
    """A model, and a mixture of models."""
    runs = finished_run(), finished_run("apfl", 1)
    return [(run / "models" / "client-0000" / "weights.safetensors").read_bytes() for run in runs]


def rounds_file(data: bytes) -> None:
    """The records, and the tables of their metrics."""
    for record in records.read(write("rounds/rounds.jsonl", data)):
        for name in record["per_client"]:
            records.table([record], name, 2)


REPORTED = ("rounds.jsonl", "timing.jsonl", "environment.json", "partition.json", "run.toml")


def report(data: bytes) -> None:
    """The page of a run with one changed file; the first byte selects the file."""
    from copfl.report import document, page

    path = finished_run() / REPORTED[(data[0] if data else 0) % len(REPORTED)]
    original = path.read_bytes()
    try:
        path.write_bytes(data[1:])
        document.render(page.document_of(run_reading.read_all([finished_run()])))
    finally:
        path.write_bytes(original)


def report_files() -> list[bytes]:
    return [bytes([n]) + (finished_run() / name).read_bytes() for n, name in enumerate(REPORTED)]


# Messages and the files of a federation


@functools.cache
def federation() -> TrainingSettings:
    """The settings of a small federation."""
    return settings_of(
        {
            "session.run": "f",
            "run.clients": 3,
            "run.rounds": 9,
            "model.name": "mlp",
            "model.width": 2,
            "samples.shape": [1, 3, 3],
            "samples.classes": 2,
        }
    )


class OneNode:
    """A transport to one node, which answers every message with the same content."""

    def __init__(self, content: Content) -> None:
        self.content = content

    def nodes(self) -> list[int]:
        return [7]

    def send(self, node: int, request: str, content: Content, seconds: float) -> str:
        return "message"

    def replies(self, message_ids: Collection[str]) -> list[Reply]:
        return [Reply(message_id, self.content) for message_id in message_ids]


@functools.cache
def flower_server() -> TrainingServer:
    folder = ServerFolder(str(scratch()), "f", resume=True)
    return new_server(federation(), OneNode(("", b"")), folder)


def packet_of(data: bytes) -> tuple[Packet, bool]:
    """The packet after the first byte; S: with a new checksum, as a malicious sender would compute."""
    packet = wire.from_bytes(data[1:])
    if data[:1] != b"S":
        return packet, False
    try:
        head = json.loads(packet.head)
        head.pop("sha256", None)
        signed = wire._canonical({**head, "sha256": wire._checksum(head, packet.body)})
    except (ValueError, TypeError, AttributeError, RecursionError, CopflError):
        return packet, False
    return Packet(signed, packet.body), True


def receive(packet: Packet) -> ServerRound:
    """A round of the server with the reply of client 1, of which the server has no mask."""
    shutil.rmtree(scratch() / "f" / "masks", ignore_errors=True)
    now = ServerRound(0)
    flower_server().add(now, 1, Packet(*Reply("message", packet).checked()))
    return now


def upload_message(data: bytes) -> None:
    """At the server: added to the round and recorded, or refused with a reason."""
    packet, signed = packet_of(data)
    server = flower_server()
    algorithm, task = server.algorithm, server.task
    now = receive(packet)
    if not signed:
        original = algorithm.summand(task, server.state, torch.tensor(1), server.upload)
        assert torch.equal(now.total.w, original.w.double()), "changed content has another checksum"
    with torch.no_grad():
        state, metrics = algorithm.server_update(task, server.state, tree.narrow(now.total, now.dtypes))
    assert tree.finite(state), "the server stays finite"
    record = _record(now, "accuracy", metrics, 1.0).as_json()
    assert RoundRecord.of(json.loads(json.dumps(record))).as_json() == record, "what is written is read"
    assert len(json.dumps(record)) < 10**6, "the size of a line is bounded"
    wire.encode(state, server.exchange.head("server", 1), about={Field.COUNTED: {}, "record": record})


def uploads() -> list[bytes]:
    upload, head = flower_server().upload, flower_server().exchange.head("upload", 0, 1)
    metrics = {"loss": 0.5, "weight": 1.0, "accuracy": None}
    about = {Field.NOTE: "started again", Field.METRICS: metrics}
    valid = wire.to_bytes(wire.encode(upload, head, "fp32", about=about))
    about = {Field.NOTE: "", Field.METRICS: {"loss": 1e308}}
    large = wire.to_bytes(wire.encode(upload, head, "fp32", about=about))
    return [b"S" + valid, b"-" + valid, b"S" + large]


def down_message(data: bytes) -> None:
    """At a node: an upload, or a refusal."""
    packet, _ = packet_of(data)
    try:
        update.local_update(federation(), node(), packet)
    finally:
        shutil.rmtree(scratch() / "state", ignore_errors=True)


@functools.cache
def node() -> Node:
    path = scratch() / "node.npz"
    np.savez(path, x=np.zeros((12, 1, 3, 3), np.uint8), y=np.arange(12) % 2)
    config = NodeConfig.parse({"client": 1, "data": str(path), "state-dir": str(scratch() / "state")})
    return Node(config, Policy())


def downs() -> list[bytes]:
    server = flower_server()
    down = received(server.algorithm, server.state, torch.tensor(1))
    about = {Field.COUNTED: -1, Field.KNOWN_MASKS: {"shared": "0" * 16}}
    content = wire.to_bytes(wire.encode(down, server.exchange.head("down", 0, 1), "fp32", about=about))
    return [b"S" + content, b"-" + content]


def greeting(data: bytes) -> None:
    """A node's answer to the request for its client number."""
    registry, transport = Registry("f", 3, silent), OneNode((text_of(data), b""))
    registry.refresh(transport)
    assert set(registry.nodes) <= {0, 1, 2}


def refusal(data: bytes) -> None:
    """A node's error message in place of an upload."""
    try:
        receive(Packet(f'{{"{Field.REFUSED}"' + data.decode("utf-8", "replace"), b""))
    except CopflError:
        return
    raise AssertionError("a refusal is counted as an upload")


def server_files(data: bytes) -> None:
    """The server's checkpoint, its lines and a client's mask, as a server that starts again reads them."""
    changed, content = (data[0] % 3 if data else 0), data[1:]
    write("g/server.copfl", content if changed == 0 else _server_checkpoint())
    write("g/rounds.jsonl", content if changed == 1 else b"")
    write("g/masks/1.copfl", content if changed == 2 else b"")
    folder, server = ServerFolder(str(scratch()), "g", resume=True), flower_server()
    folder.masks(1, server.upload)
    opened, round = folder.load(server.state, _checkpoint_head)
    assert round == 1
    assert equal(opened.record, server.state), "changed content has another checksum"


def _checkpoint_head(round: int) -> Head:
    return Head("server", "g", federation().layout, round, -1)


@functools.cache
def _server_checkpoint() -> bytes:
    about = {Field.COUNTED: {"1": 0}, "record": {"round": 1}}
    return wire.to_bytes(wire.encode(flower_server().state, _checkpoint_head(1), about=about))


def server_file_examples() -> list[bytes]:
    pieces = wire.pieces(flower_server().upload)
    masks = {path: piece.personal for path, piece in pieces if isinstance(piece, tree.Masked)}
    mask = wire.to_bytes(wire.encode(masks, Head("masks", "g", "", 0, 1)))
    return [b"\0" + _server_checkpoint(), b'\1{"round":0}\n{"round":1}\n', b"\2" + mask]


def client_record(data: bytes) -> None:
    """A node's record, as it reads it after a restart."""
    write("h/f/round-000000.copfl", data)
    initial = federation().algorithm.client_init(federation().task)
    record = ClientRecords(scratch() / "h", "f").load(_record_head(), initial)
    assert equal(record, initial), "changed content has another checksum"


def client_records() -> list[bytes]:
    initial = federation().algorithm.client_init(federation().task)
    return [wire.to_bytes(wire.encode(initial, _record_head()))]


def _record_head() -> Head:
    return Head("client", "f", federation().layout, 0, 1)


def proposal_file(data: bytes) -> None:
    """A proposal, as a node reads it: any content that is accepted says what was signed."""
    read = proposal.read(data)
    assert read.proposal == proposal_example().proposal, "a changed document has no valid signature"


@functools.cache
def proposal_example() -> SignedProposal:
    key = SigningKey(new_key())
    members = (Member(0, "north", key.public), Member(1, "south", SigningKey(new_key()).public))
    return proposal.sign({"session.run": "a", "run.rounds": 2, "algorithm": {"rate": 0.2}}, members, (), key)


def audit_file(data: bytes) -> None:
    """A node's audit log, as `copfl site log` prints it."""
    write("i/audit.jsonl", data)
    found = chained_log.verified(scratch() / "i" / "audit.jsonl")
    for line in found.lines if not found.problem else ():
        audit_log.as_text(line)


def audit_files() -> list[bytes]:
    folder = scratch() / "j"
    shutil.rmtree(folder, ignore_errors=True)
    for left in (("number",), ("update", "metrics")):
        audit_log.append(folder, audit_log.AuditEntry("sent", None, None, "a", 1, "train", left, 9, 0.5, ""))
    return [(folder / chained_log.AUDIT).read_bytes()]


def fixed(*texts: str | bytes) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() if isinstance(text, str) else text for text in texts]


GREETINGS = ('{"client": 1}', '{"client": -1}', '{"refused": "no data"}', '{"client": 1e3}')
ENTRIES = (
    "copfl,copfl:score=none",
    "fedavg:optimizer=adam:lr=0.001",
    "fedprox:mu=[0.1]:run.batch=8",
    "local",
)
GRIDS = ("lr=1e-2,1e-3", "copfl.rate=0.05,0.25", "optimizer=adam,sgd", "run.batch=8,'a,b',[1,2]")
ROUND = (
    '{"round":1,"clients":[0,1],"federation":{"shared":0.5},"mean":{"loss":1.0},"left_out":[],'
    '"per_client":{"accuracy":[0.5,null],"loss":[1.0,2.0]}}\n'
)
ROUNDS = (ROUND, ROUND + ROUND.replace('"round":1', '"round":2'))
REFUSALS = (': "no data"}', ": 1}", "", ': {"a": []}}')

TARGETS: dict[str, Target] = {
    "set": Target(set_option, fixed(*SETTINGS), 22),
    "run_file": Target(run_file, run_files, 6),
    "entry": Target(entries_text, fixed(*ENTRIES), 8),
    "seeds": Target(seeds, fixed("0,1,2", "0-4", "7"), 6),
    "grid": Target(grid, fixed(*GRIDS), 6),
    "compare_file": Target(compare_file, fixed(COMPARE_FILE), 3),
    "flower_config": Target(flower_config, fixed(FLOWER_CONFIG), 1),
    "npz": Target(npz, npz_files, 3),
    "npy": Target(npy, npy_files, 5),
    "arrays": Target(arrays, fixed(bytes(range(256)), b"\1\0" * 99, b"\7\3" * 150, b"\5\3" * 99), 6),
    "image": Target(image, image_files, 5),
    "image_folder": Target(image_folder, image_files, 0.5),
    "archive": Target(archive, archives, 4),
    "cifar_batch": Target(cifar_batch, cifar_batches, 8),
    "partition_file": Target(partition_file, lambda: [(finished_run() / "partition.json").read_bytes()], 4),
    "checkpoint_file": Target(checkpoint_file, checkpoint_files, 4),
    "model_file": Target(model_file, model_files, 1),
    "rounds_file": Target(rounds_file, fixed(*ROUNDS), 6),
    "report": Target(report, report_files, 0.1),
    "upload_message": Target(upload_message, uploads, 4),
    "down_message": Target(down_message, downs, 0.5),
    "greeting": Target(greeting, fixed(*GREETINGS), 10),
    "refusal": Target(refusal, fixed(*REFUSALS), 4),
    "proposal_file": Target(proposal_file, lambda: [proposal_example().document], 1),
    "audit_file": Target(audit_file, audit_files, 4),
    "server_files": Target(server_files, server_file_examples, 1.5),
    "client_record": Target(client_record, client_records, 2),
}
