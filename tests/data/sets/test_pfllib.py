"""Folders of PFLlib: their clients and splits as they are, and pickles that nobody runs."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from copfl.data import reading
from copfl.data.sets.datasets import load
from copfl.errors import DataError
from copfl.experiment.preparation import prepare
from copfl.settings.complete import complete
from tests.slow import SLOW

SIZES = {0: (6, 3), 1: (4, 2), 10: (5, 1), 2: (3, 2)}  # of the clients, in train and test


def write(folder: Path, split: str, client: int, **arrays: Any) -> Path:
    """A file as PFLlib's scripts write it."""
    (folder / split).mkdir(parents=True, exist_ok=True)
    path = folder / split / f"{client}.npz"
    with path.open("wb") as file:
        np.savez_compressed(file, data=arrays)  # type: ignore[arg-type]
    return path


def samples(client: int, count: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng((client, seed))
    return {"x": rng.normal(size=(count, 3)).astype(np.float32), "y": np.arange(count) % 3}


def make(folder: Path) -> Path:
    for client, counts in SIZES.items():
        for seed, (split, count) in enumerate(zip(("train", "test"), counts, strict=True)):
            write(folder, split, client, **samples(client, count, seed))
    (folder / "config.json").write_text('{"num_clients": 4}')
    return folder


def test_clients_and_splits_are_as_they_are(tmp_path: Path) -> None:
    dataset = load(make(tmp_path / "mine"))
    assert (dataset.name, dataset.groups, dataset.natural) == ("mine", ("0", "1", "2", "10"), True)
    for seed, part in enumerate((dataset.train, dataset.test)):
        for place, client in enumerate((0, 1, 2, 10)):
            own = part.take(np.asarray(part.group) == place)
            expected = samples(client, SIZES[client][seed], seed)
            np.testing.assert_array_equal(own.x, expected["x"])
            np.testing.assert_array_equal(own.y, expected["y"])


def test_a_run_has_these_clients(tmp_path: Path) -> None:
    settings = {"algorithm": {"name": "fedavg"}, "data": {"name": str(make(tmp_path / "mine"))}}
    partition = prepare(complete(settings)).federation.partition
    assert [len(rows) for rows in partition.train] == [6, 4, 3, 5]
    assert [len(rows) for rows in partition.test] == [3, 2, 2, 1]


def test_a_client_without_test_samples_trains(tmp_path: Path) -> None:
    write(make(tmp_path), "test", 1, x=np.zeros((0, 3), np.float32), y=np.zeros(0, np.int64))
    dataset = load(tmp_path)
    assert (np.bincount(dataset.test.group, minlength=4) == [3, 0, 2, 1]).all()  # type: ignore[arg-type]


ARRAYS = {
    "float32": np.arange(12, dtype=np.float32).reshape(2, 2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big endian": np.arange(4, dtype=">i4"),
    "bytes": np.arange(4, dtype=np.uint8).reshape(2, 2),
    "bools": np.array([True, False]),
    "half": np.arange(3, dtype=np.float16),
    "empty": np.zeros((0, 4), np.int64),
    "a number": np.array(3.0),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_read_as_numpy_reads_them(name: str, tmp_path: Path) -> None:
    found = reading.pickled_npz(write(tmp_path, "train", 0, x=ARRAYS[name]), "data")["x"]
    np.testing.assert_array_equal(found, ARRAYS[name])
    assert found.dtype == ARRAYS[name].dtype.newbyteorder("=")
    assert found.flags.c_contiguous


class Payload:
    """Calls a function when it is unpickled."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


@pytest.mark.parametrize("call", [os.mkdir, eval, np.fromfile, np.frombuffer, getattr])
@pytest.mark.parametrize("where", ["x", "beside x", "in place of all"])
def test_a_malicious_pickle_is_refused_and_does_nothing(call: Any, where: str, tmp_path: Path) -> None:
    make(tmp_path)
    trap = tmp_path / "trap"
    argument = f"__import__('os').mkdir({str(trap)!r})" if call is eval else str(trap)
    payload: Any = Payload(call, argument)
    arrays = samples(0, 6, 0)
    if where == "x":
        arrays["x"] = payload
    elif where == "beside x":
        arrays["more"] = [payload]
    path = write(tmp_path, "train", 0, **arrays)
    if where == "in place of all":
        with path.open("wb") as file:
            np.savez_compressed(file, data=np.array(payload, dtype=object))
    with pytest.raises(DataError, match=r"is refused: its pickle names \S+, which no data file needs"):
        load(tmp_path)
    assert not trap.exists()


def with_pickle(folder: Path, raw: bytes) -> Path:
    """A folder of which one file has this pickle."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": ()})
    with zipfile.ZipFile(make(folder) / "train" / "0.npz", "w") as archive:
        archive.writestr("data.npy", header.getvalue() + raw)
    return folder


HOSTILE = {
    "a memo of gigabytes": b"\x80\x04r\xff\xff\xff\x7f.",
    "attributes of a class": b"\x80\x02cnumpy\ndtype\n(N}U\x0c__setstate__Nstb.",
    "a persistent name": b"\x80\x04Psecret\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "nothing": b"",
    "a name of several lines": b"\x80\x02cnumpy\n" + b"evil\x1b[2J\rname\n.",
    "a cut pickle": pickle.dumps(np.arange(100))[:-30],
    "a number": pickle.dumps(3),
    "a dictionary": pickle.dumps({"x": 1}),
    "an array of numbers": pickle.dumps(np.arange(3), 4),
    "a list of an array": pickle.dumps(np.array([np.arange(3), None], dtype=object), 4),
    "other keys": pickle.dumps(np.array({1: np.arange(3)}, dtype=object), 4),
    "a record of texts": pickle.dumps(np.array({"x": np.array(["a"]), "y": np.arange(1)}, dtype=object), 4),
    "no array": pickle.dumps(np.array({"x": [1, 2], "y": np.arange(2)}, dtype=object), 4),
    "no y": pickle.dumps(np.array({"x": np.arange(2)}, dtype=object), 4),
    "two lengths": pickle.dumps(np.array({"x": np.arange(2), "y": np.arange(3)}, dtype=object), 4),
    "another sample": pickle.dumps(np.array({"x": np.zeros((2, 9)), "y": np.arange(2)}, dtype=object), 4),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_other_pickles_are_errors_of_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(with_pickle(tmp_path, HOSTILE[name]))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_an_array_must_have_the_bytes_of_its_shape(tmp_path: Path) -> None:
    array = np.arange(8, dtype=np.int64)
    raw = pickle.dumps(np.array({"x": array, "y": array}, dtype=object), 4)
    assert raw.count(b"K\x08\x85") == 1  # the second shape is a reference to an equal one, or the same
    with pytest.raises(DataError, match="'x' is no array of numbers"):
        load(with_pickle(tmp_path, raw.replace(b"K\x08\x85", b"K\x09\x85")))


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MIB", 1)
    write(make(tmp_path), "train", 0, x=np.zeros((10_000, 30)), y=np.zeros(10_000))
    with pytest.raises(DataError, match=r"would unpack to [\d,]+ bytes"):
        load(tmp_path)


def test_small_bombs_in_many_files_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them fits into memory, and all of them do not."""
    monkeypatch.setattr(reading, "MIB", 128)
    folder = make(tmp_path)
    for client in SIZES:
        write(folder, "train", client, x=np.zeros((12_000, 1)), y=np.zeros(1))
    with pytest.raises(DataError, match=rf"{tmp_path} would unpack to [\d,]+ bytes"):
        load(tmp_path)


def test_pipes_and_two_files_of_a_client(tmp_path: Path) -> None:
    folder = make(tmp_path)
    os.mkfifo(folder / "train" / "7.npz")  # whoever opens it waits for ever
    assert len(load(folder).groups) == 4
    (folder / "train" / "01.npz").write_bytes((folder / "train" / "1.npz").read_bytes())
    with pytest.raises(DataError, match=r"has two files of one client, 01\.npz among them"):
        load(folder)


SHAPES = [(0, 2**62), (0, 2**70), (1,) * 70, (0,) * 70, (2**31, 0, 2**31), (True, 1), (-1, -1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_that_no_array_has(shape: tuple[int, ...]) -> None:
    kind = SimpleNamespace(arguments=("f8", 0, 1), state=(3, "<"))
    content = b"" if 0 in shape else bytes(8)
    record = SimpleNamespace(state=(1, shape, kind, False, content))
    with pytest.raises(DataError, match="is no array of numbers"):
        reading.pickled_array(record, "x")


def read_or_refused(path: Path) -> list[Any] | str:
    """The arrays, or why they are refused; no other error is expected."""
    try:
        return list(reading.pickled_npz(path, "data").values())
    except DataError as error:
        return str(error)


def test_random_pickles_are_read_or_refused(tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "0.npz"
    content = np.array({"x": np.arange(6.0).reshape(2, 3), "y": np.arange(2)}, dtype=object)
    originals = [pickle.dumps(content, protocol) for protocol in (2, 3, 4)]
    for _ in range(1000 if SLOW else 300):
        raw = bytearray(draw.choice(originals))
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(raw))
            raw[place : place + draw.choice([0, 1, 3])] = draw.randbytes(draw.choice([0, 1, 3]))
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": ()})
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data.npy", header.getvalue() + raw)
        found = read_or_refused(path)
        if isinstance(found, str):
            assert "\n" not in found
        else:
            assert all(isinstance(array, np.ndarray) for array in found)


def test_what_a_folder_lacks_is_said(tmp_path: Path) -> None:
    (make(tmp_path) / "test" / "10.npz").unlink()
    with pytest.raises(DataError, match=r"lacks test/10\.npz; each client has a file in train/ and in test/"):
        load(tmp_path)
    np.savez(tmp_path / "train" / "10.npz", other=np.arange(3))
    np.savez(tmp_path / "test" / "10.npz", data=np.arange(3))
    with pytest.raises(DataError, match='lacks the entry "data"'):
        load(tmp_path)
    np.savez(tmp_path / "train" / "10.npz", data=np.arange(3))
    with pytest.raises(DataError, match=r"is an array \[3\] of int64; a dictionary was expected"):
        load(tmp_path)
