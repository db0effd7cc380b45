"""What comes from outside, one function each: bytes in, nothing out, and nothing raised but a CopflError.

A target may also look at what was accepted: a file whose checksum somebody else wrote must hold what that one wrote,
samples must be finite, labels must have a class. What is not so is an AssertionError, a failure as any other.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import pickle
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from copfl.flower.folder import Folder

from copfl import wire
from copfl.comparison import entries
from copfl.core import tree
from copfl.data import datasets, reading
from copfl.data.arrays import from_arrays
from copfl.data.federation import Federation
from copfl.data.partition import SCHEMES, Partition
from copfl.data.samples import Dataset
from copfl.engine import checkpoint
from copfl.errors import CopflError
from copfl.experiment import config, records, settings
from copfl.experiment.inference import Trained, load
from copfl.flower import node, server
from copfl.flower.registry import Registry
from copfl.flower.settings import settings_of
from copfl.report import run_data
from copfl.wire import Head, Packet


class Target(NamedTuple):
    """An outside input: what reads it, and good examples to start from."""

    one: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    share: float  # of the cases of a run over all targets


@functools.cache
def home() -> Path:
    """A folder of this process, in memory where there is such a place."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.TemporaryDirectory(prefix="copfl-fuzz-", dir=place)
    _kept.append(folder)  # removed when the process ends
    return Path(folder.name)


_kept: list[Any] = []


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees hold the same bits."""
    return all(torch.equal(left, right) for left, right in zip(tree.leaves(a), tree.leaves(b), strict=True))


def put(name: str, content: bytes) -> Path:
    path = home() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")  # as the command line gives what is no UTF-8


class Draw:
    """Numbers and choices out of bytes; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self.rest = io.BytesIO(data)

    def number(self, below: int) -> int:
        return int.from_bytes(self.rest.read(2), "little") % below

    def choice(self, options: Any) -> Any:
        return options[self.number(len(options))]


# -- words: --set, run files, entries of a comparison, a Flower run config ---------------------------------------------


def set_option(data: bytes) -> None:
    table, key, value = config.setting(text_of(data))
    resolved({table: {key: value}})


def run_file(data: bytes) -> None:
    resolved(config.read_file(put("run.toml", data)))


def resolved(tables: dict[str, dict[str, Any]]) -> None:
    """What run.toml would say must be TOML that says the same."""
    found = settings.resolve([tables], {})
    again = config.read_toml(config.as_toml(found), "run.toml")
    plain = {kind: {k: v for k, v in table.items() if v is not None} for kind, table in found.items()}
    # As text, because nan is not equal to itself.
    assert repr(_lists(again)) == repr(_lists(plain)), "run.toml does not say what was chosen"


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(part) for key, part in value.items()}
    return [_lists(part) for part in value] if isinstance(value, list | tuple) else value


SETTINGS = (
    "copfl.rate=0.15", "run.threads=2", "optimizer.lr=1e-3", "optimizer.name=adam", "mlp.width=4", "model.name=mlp",
    "algorithm.name=fedprox", "partition.name=dirichlet", "partition.per_client=3", "data.name=digits", "run.seed=7",
    "run.participation=0.5", "run.store=disk", "classes.train_per_class=[1, 2]", "data.dir='a b'", "run.clients=0x10",
    "copfl.merge=union", "robust.name=clip", "attack.name=noise", "run.device=cuda:0", "cnn.width=-1", "run.batch=8",
)  # fmt: skip


def run_files() -> list[bytes]:
    chosen: list[dict[str, dict[str, Any]]] = [
        {}, {"algorithm": {"name": "fedavg"}}, {"algorithm": {"name": "apfl"}, "model": {"name": "mlp"}},
        {"partition": {"name": "dirichlet"}, "run": {"clients": 3}},
    ]  # fmt: skip
    return [config.as_toml(settings.resolve([tables], {})).encode() for tables in chosen]


def entry(data: bytes) -> None:
    for found in entries.entries_of([text_of(data)]):
        settings.resolve(entries.layers(found, {}), {})


def seeds(data: bytes) -> None:
    assert len(entries.seeds_of(text_of(data))) < 10**6


def grid(data: bytes) -> None:
    entries.grid_of(entries.values_of([text_of(data)], "--over"), "--over")


def compare_file(data: bytes) -> None:
    for found in entries.read_file(put("compare.toml", data)).entries:
        settings.resolve(entries.layers(found, {}), {})


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
    """A run config, as `flwr run` hands it over: a flat table of TOML values."""
    import tomllib

    try:
        config = tomllib.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return  # Flower reads it, not we
    flat = {k: v for k, v in config.items() if isinstance(v, str | int | float | bool)}
    settings_of(flat)


FLOWER_CONFIG = b"""run = "a"
rounds = 2
clients = 3
participation = 0.5
min-replies = 1
deadline = 5
wire = "bf16"
algorithm = "copfl"
model = "mlp"
shape = "1,8,8"
classes = "a,b,c"
mean = "0.5"
"optimizer.lr" = 0.01
"options.rate" = 0.2
"model-options.width" = 4
"""


# -- data --------------------------------------------------------------------------------------------------------------


def sound(dataset: Dataset) -> None:
    """What a data set promises."""
    for split in (dataset.train, dataset.test):
        assert len(split.x) == len(split.y) > 0, "there are samples, and each has a label"
        assert split.y.dtype == np.int64, "labels are int64"
        assert split.y.min() >= 0, "labels begin at 0"
        assert split.y.max() < len(dataset.classes), "every label has a class"
        if split.x.dtype.kind == "f":
            assert np.isfinite(split.x).all(), "samples are finite"
    assert all(math.isfinite(v) and v > 0 for v in dataset.std), "samples can be normalised"


def npz(data: bytes) -> None:
    sound(datasets.load(put("data.npz", data)))


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
    array = reading.map_npy(put("data.npy", data))
    assert array.size < 2**24, "no more than the file holds"


def npy_files() -> list[bytes]:
    result = []
    for array in (np.arange(6, dtype=np.uint8).reshape(2, 3), np.zeros(3, np.float64)):
        file = io.BytesIO()
        np.save(file, array)
        result.append(file.getvalue())
    return result


def arrays(data: bytes) -> None:
    """Arrays of any dtype and shape, split among clients in any of the ways there are."""
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
    sound(dataset)
    name, clients = draw.choice(sorted(SCHEMES)), draw.choice((1, 2, 3, 10))
    options: dict[str, Any] = {}
    if draw.number(2):
        known = config.keywords_of(SCHEMES[name], ("dataset", "clients", "seed"))
        if known:
            options = {
                draw.choice(sorted(known)): draw.choice((0, 1, 2, 0.5, -1, 1e-9, 10**9, True, "a", None))
            }
            options = config.checked(name, SCHEMES[name], options)
    split = SCHEMES[name](dataset, clients, draw.number(1000), **options)
    federation = Federation(dataset, split)
    assert federation.clients == clients
    assert all(federation.train.sizes > 0), "every client has something to train on"


def image(data: bytes) -> None:
    reading.image_size(data, "it")
    pixels = reading.decode(data, "it", (4, 4))
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
    """Two classes, of which one image is the given bytes."""
    good = _first_image()
    for label in ("a", "b"):
        for number in range(5):
            path = home() / "folder" / label / f"{number}.png"
            if not path.exists():
                put(f"folder/{label}/{number}.png", good)
    put("folder/b/2.png", data)
    sound(datasets.load(home() / "folder"))


@functools.cache
def _first_image() -> bytes:
    return image_files()[0]


def archive(data: bytes) -> None:
    path = put("data.tar", data)
    for member in reading.members(path):
        member.read(2**16)


def archives() -> list[bytes]:
    result = []
    for how in ("w", "w:gz", "w:xz", "w:bz2"):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode=how) as archive:
            for name, content in (("a/train/cat/1.png", b"12345"), ("a/" + "x" * 120, b"6" * 600)):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        result.append(file.getvalue())
    return result


def cifar_batch(data: bytes) -> None:
    x, y = datasets._cifar_batch(data, "it")
    assert len(x) == len(y) > 0
    assert y.max() < 10


def cifar_batches() -> list[bytes]:
    """Batches as numpy of Python 2 pickled them, without asking numpy to do it."""
    pixels = bytes(range(256)) * 12

    class Names(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return None

    body = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89T"
        + len(pixels).to_bytes(4, "little")
        + pixels
        + b"tbU\x06labelsq\x08]q\x09K\x03au."
    )
    return [body, pickle.dumps({b"data": None, b"labels": [1]}, 2), pickle.dumps(os.getcwd, 2)]


# -- files of a run ----------------------------------------------------------------------------------------------------


@functools.cache
def run_home() -> Path:
    """The folder of a small finished run."""
    import copfl

    path = home() / "finished"
    copfl.run(
        "copfl",
        model="mlp",
        clients=2,
        rounds=2,
        mlp={"width": 4},
        out=path,
        engine="sequential",
        mkldnn="off",
    )
    return path


def partition_file(data: bytes) -> None:
    found = Partition.load(put("partition.json", data))
    assert found.fingerprint == _good_partition(), "a partition that was changed has another fingerprint"


@functools.cache
def _good_partition() -> str:
    return Partition.load(run_home() / "partition.json").fingerprint


@functools.cache
def like() -> dict[str, Any]:
    """A small state, as a checkpoint holds it."""
    record = {"w": torch.arange(6.0), "mask": torch.tensor([True, False, True])}
    return {"server": record, "clients": {"place": torch.zeros(2, dtype=torch.int8)}, "held": None}


def checkpoint_file(data: bytes) -> None:
    path = put("state.safetensors", data)
    checkpoint.peek(path, "server:mask")
    trees, about = checkpoint.load(path, like())
    assert about == {"round": 3}
    assert same_bits(trees, like()), "what was changed has another checksum"


def checkpoint_files() -> list[bytes]:
    path = home() / "good.safetensors"
    checkpoint.save(path, like(), {"round": 3})
    return [path.read_bytes()]


@functools.cache
def trained() -> Trained:
    return load(run_home())


def model_file(data: bytes) -> None:
    trained()
    put("finished/models/client-0001.safetensors", data)
    model = trained().client(1)
    trained().answers(model, np.zeros((1, 1, 8, 8), np.uint8))


@functools.cache
def model_files() -> list[bytes]:
    import copfl

    path = home() / "mixture"
    copfl.run(
        "apfl",
        model="mlp",
        clients=2,
        rounds=1,
        mlp={"width": 4},
        out=path,
        engine="sequential",
        mkldnn="off",
    )
    places = (run_home() / "models" / "client-0000.safetensors", path / "models" / "client-0000.safetensors")
    return [place.read_bytes() for place in places]


def rounds_file(data: bytes) -> None:
    """The lines, and what a report makes of them."""
    path = put("rounds/rounds.jsonl", data)
    found = records.read(path)
    for record in found:
        for name in record["per_client"]:
            records.table([record], name, 2)


def report(data: bytes) -> None:
    """The page of a run, one of whose files is not as it was."""
    from copfl.report import page

    which = ("rounds.jsonl", "timing.jsonl", "environment.json", "partition.json", "run.toml")
    name, content = which[data[0] % len(which)] if data else which[0], data[1:]
    path = run_home() / name
    good = path.read_bytes()
    try:
        path.write_bytes(content)
        page.update(run_data.read_all([run_home()]))
    finally:
        path.write_bytes(good)


def report_files() -> list[bytes]:
    names = ("rounds.jsonl", "timing.jsonl", "environment.json", "partition.json", "run.toml")
    return [bytes([place]) + (run_home() / name).read_bytes() for place, name in enumerate(names)]


# -- messages ----------------------------------------------------------------------------------------------------------


@functools.cache
def federation() -> Any:
    return settings_of(
        {
            "run": "f",
            "clients": 3,
            "rounds": 9,
            "model": "mlp",
            "model-options.width": 2,
            "shape": "1,3,3",
            "classes": "2",
        }
    )


@functools.cache
def upload() -> Any:
    return server.upload_like(federation())


def packet_of(data: bytes) -> tuple[Packet, bool]:
    """A packet, and whether its checksum was made anew, as anybody can who means ill."""
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


def upload_message(data: bytes) -> None:
    """At the server: taken into the round and written down, or named and left out."""
    packet, signed = packet_of(data)
    given, good = federation(), federation().algorithm
    state = server.State(good.server_init(given.task, 3))
    now, folder = server.Round(0), Folder(str(home()), "f", goes_on=True)
    folder._held[1] = {}
    server._take(given, folder, state, now, upload(), 1, packet, "")
    if not signed:
        kept = now.total.w
        assert torch.equal(kept, good.summand(given.task, state.server, torch.tensor(1), upload()).w.double())
    with torch.no_grad():
        state.server, figures = good.server_update(given.task, state.server, now.total)
    assert tree.finite(state.server), "the server stays finite"
    record = server._record(now, figures, 1.0)
    line = json.dumps(record)
    assert len(line) < 10**6, "a line does not grow without bound"
    wire.encode(
        state.server, server.head_of(given, folder, "server", 1), about={"counted": {}, "record": record}
    )


def uploads() -> list[bytes]:
    given = federation()
    head = Head("upload", "f", given.layout, 0, 1)
    told = {"note": "began anew", "figures": {"loss": 0.5, "weight": 1.0, "accuracy": None}}
    good = wire.to_bytes(wire.encode(upload(), head, "fp32", about=told))
    huge = wire.to_bytes(wire.encode(upload(), head, "fp32", about={"note": "", "figures": {"loss": 1e308}}))
    return [b"S" + good, b"-" + good, b"S" + huge]


def down_message(data: bytes) -> None:
    """At a node: a turn, or a refusal."""
    packet, _ = packet_of(data)
    node.answer(federation(), node_config(), packet)
    for path in (home() / "state").rglob("round-*.copfl"):
        path.unlink()


@functools.cache
def node_config() -> dict[str, Any]:
    x, y = np.zeros((12, 1, 3, 3), np.uint8), np.arange(12) % 2
    np.savez(home() / "node.npz", x=x, y=y)
    return {"client": 1, "data": str(home() / "node.npz"), "state-dir": str(home() / "state")}


def downs() -> list[bytes]:
    given = federation()
    start = given.algorithm.server_init(given.task, 3)
    down = tree.row(given.algorithm.downlink(start, torch.tensor([1])), 0)
    about = {"counted": -1, "holds": {"shared": "0" * 16}, "look": True}
    packet = wire.encode(down, Head("down", "f", given.layout, 0, 1), "fp32", about=about)
    return [b"S" + wire.to_bytes(packet), b"-" + wire.to_bytes(packet)]


def greeting(data: bytes) -> None:
    """What a node says when it is asked who it is."""
    registry = Registry("f", 3, lambda text: None)
    registry._heard(7, text_of(data), "")
    assert set(registry.nodes) <= {0, 1, 2}


def refusal(data: bytes) -> None:
    """What a node says instead of an upload."""
    given = federation()
    folder = Folder(str(home()), "f", goes_on=True)
    state = server.State(given.algorithm.server_init(given.task, 3))
    packet = Packet('{"refused"' + data.decode("utf-8", "replace"), b"")
    try:
        server._take(given, folder, state, server.Round(0), upload(), 1, packet, "")
    except CopflError:
        return
    raise AssertionError("a refusal is not taken for an upload")


def server_files(data: bytes) -> None:
    """The server's checkpoint, a client's mask and the lines, as a server that begins again finds them."""
    which, content = (data[0] % 3 if data else 0), data[1:]
    folder = Folder(str(home()), "g", goes_on=True)
    good = _server_checkpoint()
    put("g/server.copfl", content if which == 0 else good)
    put("g/rounds.jsonl", content if which == 1 else b"")
    put("g/masks/1.copfl", content if which == 2 else b"")
    given = federation()
    folder.masks(1, upload())
    first = given.algorithm.server_init(given.task, 3)
    opened, round = folder.load(first, lambda round: Head("server", "g", given.layout, round, -1))
    assert round == 1
    assert same_bits(opened.record, first), "what was changed has another checksum"


@functools.cache
def _server_checkpoint() -> bytes:
    given = federation()
    head = Head("server", "g", given.layout, 1, -1)
    about = {"counted": {"1": 0}, "record": {"round": 1}}
    return wire.to_bytes(wire.encode(given.algorithm.server_init(given.task, 3), head, about=about))


def server_seeds() -> list[bytes]:
    masks = {path: piece.personal for path, piece in wire.pieces(upload()) if isinstance(piece, tree.Masked)}
    prints = {path: wire.fingerprint(mask) for path, mask in masks.items()}
    mask = wire.to_bytes(wire.encode(masks, Head("masks", "g", "", 0, 1), about=prints))
    return [b"\0" + _server_checkpoint(), b'\1{"round":0}\n{"round":1}\n', b"\2" + mask]


def client_record(data: bytes) -> None:
    """A node's own record, as it finds it after a restart."""
    given = federation()
    put("h/f/round-000000.copfl", data)
    fresh = given.algorithm.client_init(given.task)
    found = node.Records(home() / "h", "f").load(Head("client", "f", given.layout, 0, 1), fresh)
    assert same_bits(found, fresh), "what was changed has another checksum"


def client_records() -> list[bytes]:
    given = federation()
    fresh = given.algorithm.client_init(given.task)
    return [wire.to_bytes(wire.encode(fresh, Head("client", "f", given.layout, 0, 1)))]


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
    "entry": Target(entry, fixed(*ENTRIES), 8),
    "seeds": Target(seeds, fixed("0,1,2", "0-4", "7"), 6),
    "grid": Target(grid, fixed(*GRIDS), 6),
    "compare_file": Target(compare_file, fixed(COMPARE_FILE), 3),
    "flower_config": Target(flower_config, fixed(FLOWER_CONFIG), 1),
    "npz": Target(npz, npz_files, 3),
    "npy": Target(npy, npy_files, 5),
    "arrays": Target(arrays, fixed(bytes(range(256)), b"\1\0" * 99, os.urandom(0) + b"\7\3" * 150), 6),
    "image": Target(image, image_files, 5),
    "image_folder": Target(image_folder, image_files, 0.5),
    "archive": Target(archive, archives, 4),
    "cifar_batch": Target(cifar_batch, cifar_batches, 8),
    "partition_file": Target(partition_file, lambda: [(run_home() / "partition.json").read_bytes()], 4),
    "checkpoint_file": Target(checkpoint_file, checkpoint_files, 4),
    "model_file": Target(model_file, model_files, 1),
    "rounds_file": Target(rounds_file, fixed(*ROUNDS), 6),
    "report": Target(report, report_files, 0.1),
    "upload_message": Target(upload_message, uploads, 4),
    "down_message": Target(down_message, downs, 0.5),
    "greeting": Target(greeting, fixed(*GREETINGS), 10),
    "refusal": Target(refusal, fixed(*REFUSALS), 4),
    "server_files": Target(server_files, server_seeds, 1.5),
    "client_record": Target(client_record, client_records, 2),
}
