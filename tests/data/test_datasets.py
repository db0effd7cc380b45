"""Every data set from small files in its published layout, damage of every kind, and the real files where they are.

The tests of the real files run where the environment variable COPFL_DATA names a folder that holds them.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from copfl.data import datasets, reading
from copfl.data.corruptions import CORRUPTIONS
from copfl.data.datasets import (
    CIFAR_CLASSES,
    DATASETS,
    check,
    describe,
    from_arrays,
    from_torch,
    held_out,
    load,
    rank_within_class,
)
from copfl.data.samples import Dataset
from copfl.errors import CopflError, DataError, UsageError

REAL = Path(os.environ.get("COPFL_DATA", "/nonexistent"))


def needs(*alternatives: str) -> pytest.MarkDecorator:
    there = any((REAL / name).exists() for name in alternatives)
    return pytest.mark.skipif(not there, reason=f"COPFL_DATA names no folder with {' or '.join(alternatives)}")


# Files in the published layouts


def cifar_pickle(data: NDArray[np.uint8], labels: list[int]) -> bytes:
    """A batch as Python 2 and its numpy pickled it: the opcodes of the published files, written by hand."""

    def string(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + number(0) + b"\x85" + string(b"b") + b"tR"
        b"(" + number(1) + b"".join(number(side) for side in data.shape) + b"\x86"
        b"cnumpy\ndtype\n(" + string(b"u1") + number(0) + number(1) + b"tR"
        b"(" + number(3) + string(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
        b"\x89" + string(data.tobytes()) + b"tb"
    )
    items = string(b"data") + array + string(b"labels") + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + items + b"u."


def cifar_images(n: int, seed: int) -> tuple[NDArray[np.uint8], list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3072)).astype(np.uint8), [i % 10 for i in range(n)]


def make_cifar(folder: Path, n: int = 40, batches: tuple[int, ...] = (1, 2)) -> Path:
    batch = folder / "cifar-10-batches-py"
    batch.mkdir(parents=True)
    for number in batches:
        (batch / f"data_batch_{number}").write_bytes(cifar_pickle(*cifar_images(n, number)))
    (batch / "test_batch").write_bytes(cifar_pickle(*cifar_images(n, 99)))
    return folder


def make_cifar10c(folder: Path, bases: int = 60) -> Path:
    """CIFAR-10-C in small: pixel (0, 0) tells the base image, (0, 1) the corruption, (0, 2) the severity."""
    (folder / "CIFAR-10-C").mkdir(parents=True)
    for number, name in enumerate(CORRUPTIONS):
        array = np.zeros((5 * bases, 32, 32, 3), np.uint8)
        array[:, 0, 0, 0] = np.tile(np.arange(bases), 5)
        array[:, 0, 1] = number
        array[:, 0, 2] = np.repeat(np.arange(1, 6), bases)[:, None]
        np.save(folder / "CIFAR-10-C" / f"{name}.npy", array)
    np.save(folder / "CIFAR-10-C" / "labels.npy", np.tile(np.arange(bases) % 3, 5))
    return folder


def write_image(path: Path, size: tuple[int, int] = (32, 32), colour: Any = (10, 20, 30), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def make_cinic(folder: Path) -> Path:
    for number, label in enumerate(CIFAR_CLASSES):
        for split in ("train", "test"):
            write_image(folder / "CINIC-10" / split / label / "cifar10-train-1.png", colour=(number, 0, 0))
            write_image(folder / "CINIC-10" / split / label / "n02_7.png", colour=(number, 1, 0))
    return folder


def make_mini(folder: Path, size: int = 84) -> Path:
    for label in ("n01", "n02", "n03"):
        for split, count in (("train", 3), ("test", 2)):
            for i in range(count):
                write_image(folder / "mini-imagenet" / split / label / f"{label}{i}.jpg", (size, size), (40 * i, 0, 0))
    return folder


def packed(folder: Path, name: str, archive: str, mode: str = "w") -> Path:
    """folder/name moved into an archive, members in the opposite order of their names."""
    with tarfile.open(folder / archive, mode) as tar:  # type: ignore[call-overload]
        for path in sorted((folder / name).rglob("*"), reverse=True):
            if path.is_file():
                tar.add(path, path.relative_to(folder).as_posix())
    return folder / archive


def same(a: Dataset, b: Dataset) -> bool:
    return all(
        (p.x == q.x).all()
        and (p.y == q.y).all()
        and (p.group is None or (q.group is not None and (p.group == q.group).all()))
        for p, q in ((a.train, b.train), (a.test, b.test))
    )


def assert_well_formed(found: Dataset) -> None:
    for part in (found.train, found.test):
        assert len(part) > 0
        assert len(part.x) == len(part.y)
        assert part.y.dtype == np.int64
        assert part.x.flags.c_contiguous
        assert part.x.flags.writeable  # torch warns of arrays that are not
        assert 0 <= part.y.min() <= part.y.max() < len(found.classes)
        assert (part.group is None) == (found.groups == ())
        if part.group is not None:
            assert part.group.shape == part.y.shape
            assert 0 <= part.group.min() <= part.group.max() < len(found.groups)
    assert len(found.mean) == len(found.std)
    if found.mean:
        assert found.train.x.shape[1] == len(found.mean)


# The fixed split


def test_rank_within_class() -> None:
    assert rank_within_class(np.array([2, 0, 2, 2, 0, 1])).tolist() == [0, 0, 1, 2, 1, 0]


def test_held_out_is_even_in_every_class() -> None:
    assert held_out(np.zeros(10, np.int64), 1, 5).tolist() == [False] * 4 + [True] + [False] * 4 + [True]
    assert held_out(np.zeros(10, np.int64), 3, 10).sum() == 3
    y = np.array([0, 1] * 10)
    assert held_out(y, 1, 2)[y == 0].tolist() == held_out(y, 1, 2)[y == 1].tolist() == [False, True] * 5


# digits


def test_digits() -> None:
    found = load("digits")
    assert_well_formed(found)
    assert len(found.train) + len(found.test) == 1797
    assert found.train.x.shape[1:] == (1, 8, 8)
    assert found.train.x.min() == 0
    assert found.train.x.max() == 255
    per_class = np.bincount(found.train.y) + np.bincount(found.test.y)
    assert (np.bincount(found.test.y) == per_class * 3 // 10).all()
    assert found.mean[0] == pytest.approx(found.train.x.mean() / 255, abs=1e-5)
    assert found.std[0] == pytest.approx(found.train.x.std() / 255, abs=1e-5)
    np.random.seed(1)  # noqa: NPY002
    assert same(found, load("digits"))


# CIFAR-10


def test_cifar10_loads_what_is_there(tmp_path: Path) -> None:
    found = load("cifar10", make_cifar(tmp_path), verify=False)
    assert_well_formed(found)
    data, labels = cifar_images(40, 1)
    assert found.train.x.shape == (80, 3, 32, 32)
    assert found.train.y[:40].tolist() == labels
    assert found.train.x[7, 1, 2, 5] == data[7, 1024 + 2 * 32 + 5]  # planes of red, green, blue; rows; columns
    assert found.classes == CIFAR_CLASSES
    assert found.augment
    assert found.note == "2 of 5 train batches: 80 images; checksums not verified"


@pytest.mark.parametrize(("archive", "mode"), [("cifar-10-python.tar.gz", "w:gz"), ("cifar-10-python.tar", "w")])
def test_cifar10_from_an_archive(tmp_path: Path, archive: str, mode: str) -> None:
    make_cifar(tmp_path / "a")
    (tmp_path / "b").mkdir()
    packed(tmp_path / "a", "cifar-10-batches-py", archive, mode).rename(tmp_path / "b" / archive)
    assert same(load("cifar10", tmp_path / "a", verify=False), load("cifar10", tmp_path / "b", verify=False))


def test_cifar10_verifies(tmp_path: Path) -> None:
    make_cifar(tmp_path)
    with pytest.raises(
        DataError, match=r"data_batch_1 \(.* bytes\) has md5 .* instead of c99c.*copfl data get cifar10"
    ):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("missing", ["test_batch", "data_batch_1"])
def test_cifar10_names_a_missing_batch(tmp_path: Path, missing: str) -> None:
    make_cifar(tmp_path, batches=(1,))
    (tmp_path / "cifar-10-batches-py" / missing).unlink()
    with pytest.raises(DataError, match=f"lacks {missing}"):
        load("cifar10", tmp_path, verify=False)


def test_no_folder_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data-dir"):
        load("cifar10")
    with pytest.raises(DataError, match="nowhere does not exist"):
        load("cifar10", tmp_path / "nowhere")
    for name in ("cifar10", "cifar10c", "cinic10"):
        with pytest.raises(DataError, match=rf"holds neither.*copfl data get {name.rstrip('c')}"):
            load(name, tmp_path)
    with pytest.raises(DataError, match=r"holds neither mini-imagenet/.*no open address"):
        load("mini_imagenet", tmp_path)


class Payload:
    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call", [os.mkdir, eval, np.fromfile, np.save])
def test_a_malicious_pickle_is_refused_and_does_nothing(
    tmp_path: Path, protocol: int, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cifar(tmp_path)
    trap = tmp_path / "trap"
    argument = f"__import__('os').mkdir({str(trap)!r})" if call is eval else str(trap)
    payload = Payload(call, argument, 0) if call is np.save else Payload(call, argument)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps({b"data": payload}, protocol))
    with pytest.raises(DataError, match="refused: its pickle asks for"):
        load("cifar10", tmp_path, verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-batches-py"]


def test_a_pickle_cannot_change_the_reader() -> None:
    # BUILD with a pair sets attributes on any object, here on what stands for numpy.dtype
    attack = b"\x80\x02cnumpy\ndtype\n(N}U\x0c__setstate__Nstb."
    with pytest.raises(DataError):
        reading.unpickle(attack, "attack")
    data, labels = cifar_images(3, 0)
    content = reading.unpickle(cifar_pickle(data, labels), "batch")
    assert (reading.pickled_bytes(content[b"data"], 3072, "batch") == data).all()


def batch_with(**changes: Any) -> bytes:
    data, labels = cifar_images(20, 1)
    return cifar_pickle(changes.get("data", data), changes.get("labels", labels))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a readable pickle"),
        (b"\x80\x02", "not a readable pickle"),
        (b"no pickle at all", "not a readable pickle"),
        (batch_with()[:-5000], "not a readable pickle"),
        (pickle.dumps([1]), "holds a list"),
        (pickle.dumps({}), "no image array"),
        (batch_with(data=np.zeros((20, 3000), np.uint8)), r"uint8 \[n, 3072\]"),
        (batch_with(data=np.zeros((20, 3072), np.uint16)), r"uint8 \[n, 3072\]"),
        (batch_with(labels=[10] * 20), "labels from 0 to 9"),
        (batch_with(labels=[-1] * 20), "labels from 0 to 9"),
        (batch_with(labels=[1] * 19), "20 images and 19 labels"),
        (batch_with(data=np.zeros((0, 3072), np.uint8), labels=[]), "0 images"),
    ],
)
def test_a_damaged_batch_is_named(tmp_path: Path, raw: bytes, message: str) -> None:
    make_cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(raw)
    with pytest.raises(DataError, match=f"data_batch_2 .*{message}"):
        load("cifar10", tmp_path, verify=False)


@pytest.mark.parametrize(("archive", "mode"), [("cifar-10-python.tar.gz", "w:gz"), ("cifar-10-python.tar", "w")])
def test_a_truncated_archive_is_always_noticed(tmp_path: Path, archive: str, mode: str) -> None:
    make_cifar(tmp_path / "a", n=10)
    path = packed(tmp_path / "a", "cifar-10-batches-py", archive, mode)
    path.rename(tmp_path / archive)
    whole = (tmp_path / archive).read_bytes()
    end = len(whole.rstrip(b"\0")) if mode == "w" else len(whole)
    for cut in [0, 1, 511, 512, 513, *range(1024, end, 1024 * 7 + 512)]:
        (tmp_path / archive).write_bytes(whole[:cut])
        with pytest.raises(DataError, match="cifar-10-python"):
            load("cifar10", tmp_path, verify=False)


def test_a_damaged_header_inside_an_archive_is_no_end(tmp_path: Path) -> None:
    make_cifar(tmp_path / "a", n=10)
    path = packed(tmp_path / "a", "cifar-10-batches-py", "cifar-10-python.tar")
    raw = bytearray(path.read_bytes())
    second = raw.index(b"cifar-10-batches-py/data_batch_2")
    raw[second + 148 : second + 156] = b"9999999\0"  # its checksum
    (tmp_path / "cifar-10-python.tar").write_bytes(raw)
    with pytest.raises(DataError, match=r"cifar-10-python\.tar cannot be read: invalid header at byte"):
        load("cifar10", tmp_path, verify=False)


def test_links_in_an_archive_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    with tarfile.open(tmp_path / "cifar-10-python.tar", "w") as tar:
        for name, kind in (("data_batch_1", tarfile.SYMTYPE), ("test_batch", tarfile.LNKTYPE)):
            link = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            link.type, link.linkname = kind, "../secret"
            tar.addfile(link)
    with pytest.raises(DataError, match="lacks data_batch_1"):
        load("cifar10", tmp_path, verify=False)


def test_an_archive_that_claims_much_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
    info.size = 10**12
    (tmp_path / "cifar-10-python.tar").write_bytes(info.tobuf() + bytes(10240))
    with pytest.raises(DataError, match="1,000,000,000,000 bytes; at most"):
        load("cifar10", tmp_path, verify=False)
    name = tarfile.TarInfo("long")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 10**12
    first = tarfile.TarInfo("first").tobuf()
    (tmp_path / "cifar-10-python.tar").write_bytes(first + name.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    with pytest.raises(DataError, match=r"cifar-10-python\.tar cannot be read: .* bytes of name"):
        load("cifar10", tmp_path, verify=False)
    (tmp_path / "cifar-10-python.tar").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"cifar-10-python\.tar cannot be read: [^\n]*\. The file is damaged"):
        load("cifar10", tmp_path, verify=False)


# CIFAR-10-C


def test_cifar10c_made_gives_every_corruption_its_share_of_every_class(tmp_path: Path) -> None:
    make_cifar(tmp_path, n=300)
    clean, found = load("cifar10", tmp_path, verify=False), load("cifar10c", tmp_path, verify=False)
    assert_well_formed(found)
    assert found.groups == tuple(CORRUPTIONS)
    assert "made from CIFAR-10, severity 3" in found.note
    for base, part in ((clean.train, found.train), (clean.test, found.test)):
        assert part.group is not None
        assert (part.y == base.y).all()  # sample i is base image i
        assert (part.x != base.x).any(axis=(1, 2, 3)).all()
        for label in range(10):
            counts = np.bincount(part.group[part.y == label], minlength=15)
            assert (counts == np.sum(part.y == label) // 15).all()


def test_cifar10c_made_is_deterministic_and_severity_matters(tmp_path: Path) -> None:
    make_cifar(tmp_path)
    first = load("cifar10c", tmp_path, verify=False)
    np.random.seed(3)  # noqa: NPY002
    assert same(first, load("cifar10c", tmp_path, verify=False))
    assert not same(first, load("cifar10c", tmp_path, severity=4, verify=False))


def test_cifar10c_made_with_all(tmp_path: Path) -> None:
    make_cifar(tmp_path, n=20)
    found = load("cifar10c", tmp_path, all=True, verify=False)
    assert_well_formed(found)
    assert found.train.group is not None
    assert len(found.train) == 15 * 40
    assert (np.bincount(found.train.group) == 40).all()


def decoded(samples: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Base image, corruption and severity of every sample that `make_cifar10c` wrote."""
    return samples.x[:, 0, 0, 0], samples.x[:, 0, 0, 1], samples.x[:, 0, 0, 2]


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("severity", [1, 5])
def test_cifar10c_published_is_split_by_base_image(tmp_path: Path, every: bool, severity: int) -> None:
    found = load("cifar10c", make_cifar10c(tmp_path), severity=severity, all=every)
    assert_well_formed(found)
    bases = []
    for part in (found.train, found.test):
        base, corruption, level = decoded(part)
        assert (level == severity).all()
        assert part.group is not None
        assert (part.group == corruption).all()
        assert (part.y == base % 3).all()
        assert len(part) == 30 * (15 if every else 1)
        assert len(set(zip(base, corruption, strict=True))) == len(part)
        bases.append(set(base.tolist()))
    assert bases[0] & bases[1] == set()
    assert len(bases[0] | bases[1]) == 60
    assert found.note.startswith("CIFAR-10-C-style: 60 base images")


def test_cifar10c_from_its_archive(tmp_path: Path) -> None:
    make_cifar10c(tmp_path / "a")
    (tmp_path / "b").mkdir()
    packed(tmp_path / "a", "CIFAR-10-C", "CIFAR-10-C.tar").rename(tmp_path / "b" / "CIFAR-10-C.tar")
    assert same(load("cifar10c", tmp_path / "a"), load("cifar10c", tmp_path / "b"))


def saved(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("file", "raw", "message"),
    [
        ("fog", None, "lacks fog.npy"),
        ("labels", None, "lacks labels.npy"),
        ("fog", saved(np.zeros((300, 3, 32, 32), np.uint8)), r"expected"),
        ("fog", saved(np.zeros((300, 32, 32, 3), np.float32)), r"expected"),
        ("fog", saved(np.zeros((300, 32, 32, 3), np.uint8))[:-7], "claims"),
        ("fog", saved(np.zeros((3, 32, 32, 3), object)), "Python objects"),
        ("fog", b"\x93NUMPY\x01\x00v\x00garbage", "damaged"),
        ("fog", b"", "damaged"),
        ("labels", saved(np.arange(300) % 7), "five times over"),
        ("labels", saved(np.full(300, 10)), "five times over"),
        ("labels", saved(np.zeros(300)), "labels.npy"),
        ("labels", saved(np.zeros((0,), np.int64)), "labels.npy"),
    ],
)
def test_a_damaged_cifar10c_is_named(tmp_path: Path, file: str, raw: bytes | None, message: str) -> None:
    path = make_cifar10c(tmp_path) / "CIFAR-10-C" / f"{file}.npy"
    path.unlink() if raw is None else path.write_bytes(raw)
    with pytest.raises(DataError, match=f"(?s){file}.*{message}|{message}.*{file}|{message}"):
        load("cifar10c", tmp_path)


# CINIC-10 and Mini-ImageNet


@pytest.mark.parametrize("archive", [None, "CINIC-10.tar", "some-other-name.tar"])
def test_cinic10(tmp_path: Path, archive: str | None) -> None:
    make_cinic(tmp_path / "a")
    folder = tmp_path / "a"
    if archive:
        folder = tmp_path / "b"
        folder.mkdir()
        (folder / "a-damaged-neighbour.tar").write_bytes(b"no archive")
        packed(tmp_path / "a", "CINIC-10", archive).rename(folder / archive)
    found = load("cinic10", folder)
    assert_well_formed(found)
    assert found.groups == ("cifar", "imagenet")
    assert found.train.group is not None
    assert (found.train.x[:, 0, 0, 0] == found.train.y).all()
    assert (found.train.x[:, 1, 0, 0] == found.train.group).all()
    assert found.note == "CINIC-style: 20 train, 20 test images, not the published CINIC-10"


def test_cinic10_published_archive_has_no_outer_folder(tmp_path: Path) -> None:
    make_cinic(tmp_path / "a")
    with tarfile.open(tmp_path / "CINIC-10.tar.gz", "w:gz") as tar:
        for split in ("train", "test"):
            tar.add(tmp_path / "a" / "CINIC-10" / split, f"./{split}")
    assert same(load("cinic10", tmp_path), load("cinic10", tmp_path / "a"))


def test_cinic10_names_what_is_wrong(tmp_path: Path) -> None:
    make_cinic(tmp_path)
    cat = tmp_path / "CINIC-10" / "train" / "cat" / "n02_7.png"
    whole = cat.read_bytes()
    cat.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cat/n02_7\.png is not a readable PNG"):
        load("cinic10", tmp_path)
    write_image(cat, (33, 32))
    with pytest.raises(DataError, match=r"cat/n02_7\.png is an image of 33 x 32 pixels; 32 x 32 were expected"):
        load("cinic10", tmp_path)
    write_image(cat)
    write_image(tmp_path / "CINIC-10" / "train" / "catt" / "x.png")
    with pytest.raises(DataError, match="holds a class catt"):
        load("cinic10", tmp_path)


def test_cinic10_names_a_missing_class_and_split(tmp_path: Path) -> None:
    for label in CIFAR_CLASSES[1:]:
        write_image(tmp_path / "CINIC-10" / "train" / label / "x.png")
    with pytest.raises(DataError, match=r"CINIC-10/test does not exist"):
        load("cinic10", tmp_path)
    for label in CIFAR_CLASSES:
        write_image(tmp_path / "CINIC-10" / "test" / label / "x.png")
    with pytest.raises(DataError, match=r"train/ lacks images of 1 classes \(airplane\)"):
        load("cinic10", tmp_path)


@pytest.mark.parametrize("size", [84, 32])
@pytest.mark.parametrize("archived", [False, True])
def test_mini_imagenet(tmp_path: Path, size: int, archived: bool) -> None:
    make_mini(tmp_path / "a")
    folder = tmp_path / "a"
    if archived:
        folder = tmp_path / "b"
        folder.mkdir()
        packed(tmp_path / "a", "mini-imagenet", "mini-imagenet.tar").rename(folder / "mini-imagenet.tar")
    found = load("mini_imagenet", folder, size=size)
    assert_well_formed(found)
    assert found.classes == ("n01", "n02", "n03")
    assert found.train.x.shape == (9, 3, size, size)
    assert found.train.y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert np.abs(found.train.x[:, 0, 0, 0].astype(int) - np.tile([0, 40, 80], 3)).max() <= 3  # JPEG is not exact
    assert found.note == f"9 train, 6 test images (of 50,000 and 10,000), 3 classes, {size} x {size} pixels"


def test_mini_imagenet_wants_all_classes_in_both_splits(tmp_path: Path) -> None:
    make_mini(tmp_path)
    write_image(tmp_path / "mini-imagenet" / "test" / "n09" / "x.jpg")
    with pytest.raises(DataError, match=r"train/ lacks images of 1 classes \(n09\).*every class"):
        load("mini_imagenet", tmp_path)


def test_an_archive_without_images(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "mini-imagenet.tar", "w"):
        pass
    with pytest.raises(DataError, match=r"mini-imagenet.tar holds no images; expected"):
        load("mini_imagenet", tmp_path)


# One's own: .npz


def arrays(n: int = 20) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"x": rng.random((n, 4)).astype(np.float32), "y": np.arange(n) % 2}


def test_npz_without_a_test_part(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **arrays(), group=np.arange(20) % 5)
    found = load(tmp_path / "mine.npz")
    assert_well_formed(found)
    assert (len(found.train), len(found.test)) == (16, 4)
    assert np.bincount(found.test.y).tolist() == [2, 2]
    assert found.train.x.dtype == np.float32
    assert found.mean == ()
    assert found.name == "mine"
    assert found.groups == ("0", "1", "2", "3", "4")
    assert set(found.train.x[:, 0]) & set(found.test.x[:, 0]) == set()


def test_npz_with_a_test_part_of_images(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (10, 6, 5, 3)).astype(np.uint8)
    y = np.arange(10, dtype=np.uint8) % 3
    np.savez_compressed(tmp_path / "mine.npz", x=x, y=y, x_test=x[:3], y_test=y[:3])
    found = load(str(tmp_path / "mine.npz"), augment=True)
    assert_well_formed(found)
    assert found.train.x.shape == (10, 3, 6, 5)
    assert (found.train.x[4, 2] == x[4, :, :, 2]).all()
    assert found.mean == pytest.approx(x.mean(axis=(0, 1, 2)) / 255, abs=1e-5)
    assert found.std == pytest.approx(x.std(axis=(0, 1, 2)) / 255, abs=1e-5)
    assert found.augment


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.full((20, 4), np.nan)}, "x holds NaN or infinity, first in sample 0"),
        ({"x": np.zeros((20, 4), complex)}, "x has dtype complex128"),
        ({"x": np.zeros((20, 4), "U3")}, "x has dtype <U3"),
        ({"x": np.zeros(20)}, r"x has shape \[20\]"),
        ({"x": np.zeros((0, 4)), "y": np.zeros(0, int)}, "x is empty"),
        ({"x": np.zeros((19, 4))}, r"y has shape \[20\], but there are 19 samples"),
        ({"y": np.zeros((20, 1), int)}, r"y has shape \[20, 1\]"),
        ({"y": np.zeros(20)}, r"y has dtype float64; whole numbers were expected: y.astype"),
        ({"y": np.full(20, -1)}, "y holds -1"),
        ({"y": np.full(20, 10**12)}, "y holds 1000000000000"),
        ({"group": np.zeros(3, int)}, r"group has shape \[3\]"),
        ({"x_test": np.zeros((3, 4))}, "x_test and y_test must be given together"),
        ({"x_test": np.zeros((3, 5)), "y_test": np.zeros(3, int)}, "they must be alike"),
        ({"x_test": np.zeros((3, 4)), "y_test": np.zeros(3, int), "group": np.zeros(20, int)}, "group_test"),
        ({"labels": np.zeros(20)}, "holds an array labels; known are x, y"),
        ({"x": np.zeros((2, 4)), "y": np.array([0, 1])}, "too few samples"),
    ],
)
def test_npz_names_what_is_wrong(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "mine.npz", **{**arrays(), **changes})
    with pytest.raises(DataError, match=rf"mine\.npz: .*{message}"):
        load(tmp_path / "mine.npz")


def test_npz_without_y_with_objects_or_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((3, 2)))
    with pytest.raises(DataError, match="lacks the array y; it holds x"):
        load(path)
    np.savez(path, x=np.array([[Payload(os.mkdir, str(tmp_path / "trap"))]]), y=np.array([0]))
    with pytest.raises(DataError, match=r"x\.npy\) holds Python objects"):
        load(path)
    assert not (tmp_path / "trap").exists()
    np.savez(path, x=np.asfortranarray(np.ones((3, 2))), y=np.zeros(3, int))
    with pytest.raises(DataError, match="Fortran order"):
        load(path)
    path.write_bytes(b"no zip file")
    with pytest.raises(DataError, match="damaged or incomplete"):
        load(path)
    with pytest.raises(DataError, match=r"gone\.npz does not exist"):
        load(tmp_path / "gone.npz")
    (tmp_path / "mine.csv").write_text("1,2")
    with pytest.raises(DataError, match=r"neither a \.npz file nor a folder"):
        load(tmp_path / "mine.csv")


def test_a_truncated_or_flipped_npz_never_escapes_as_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, **arrays())
    whole = path.read_bytes()
    for cut in range(0, len(whole), 37):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError):
            load(path)
    for position in range(0, len(whole), 5):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 255]) + whole[position + 1 :])
        with contextlib.suppress(CopflError):
            load(path)


def npy_claiming(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(16)


@pytest.mark.parametrize("shape", ["(1000000000000, 4)", "(-1, -4)", "(0, -1)", "(5, 1)", "('a',)", "(2.0, 2)"])
def test_npz_with_a_shape_it_does_not_hold(tmp_path: Path, shape: str) -> None:
    with zipfile.ZipFile(tmp_path / "mine.npz", "w") as archive:
        archive.writestr("x.npy", npy_claiming(shape))
        archive.writestr("y.npy", saved(np.zeros(4, int)))
    with pytest.raises(DataError, match=r"mine\.npz"):
        load(tmp_path / "mine.npz")


def test_npz_that_unpacks_to_far_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MIB", 1)
    np.savez_compressed(tmp_path / "mine.npz", x=np.zeros((10**6, 4), np.uint8), y=np.zeros(10**6, np.int8))
    with pytest.raises(DataError, match=r"would unpack to 5,000,.* bytes"):
        load(tmp_path / "mine.npz")


# One's own: folders of images


def test_folder_of_classes(tmp_path: Path) -> None:
    for number, label in enumerate(("bee", "ant")):
        for i in range(5):
            write_image(tmp_path / "zoo" / label / f"{i}.png", (6, 4), (number, i, 0))
    (tmp_path / "zoo" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "zoo" / ".hidden").mkdir()
    found = load(tmp_path / "zoo")
    assert_well_formed(found)
    assert found.classes == ("ant", "bee")
    assert found.train.x.shape == (8, 3, 4, 6)
    assert (found.train.x[:, 0, 0, 0] == 1 - found.train.y).all()
    assert found.test.x[:, 1, 0, 0].tolist() == [4, 4]
    assert found.name == "zoo"


def test_folder_with_splits_and_several_sizes(tmp_path: Path) -> None:
    for label in ("a", "b"):
        write_image(tmp_path / "train" / label / "0.png", (8, 8))
        write_image(tmp_path / "train" / label / "1.JPG", (8, 8))
        write_image(tmp_path / "train" / label / "2.jpeg", (20, 30))
        write_image(tmp_path / "test" / label / "0.png", (4, 4), 77, "L")
    found = load(tmp_path)
    assert found.train.x.shape == (6, 3, 8, 8)
    assert found.test.x.shape == (2, 3, 8, 8)
    assert (found.test.x == 77).all()
    assert found.note == "4 of 8 images resized to 8 x 8"
    assert load(tmp_path, size=5, gray=True).train.x.shape == (6, 1, 5, 5)
    write_image(tmp_path / "test" / "c" / "0.png")
    with pytest.raises(DataError, match="test/ holds a class c which train/ lacks"):
        load(tmp_path)


@pytest.mark.parametrize(("mode", "colour"), [("L", 9), ("LA", (9, 0)), ("RGBA", (9, 9, 9, 0)), ("1", 1), ("P", 3)])
def test_modes_of_images(tmp_path: Path, mode: str, colour: Any) -> None:
    for i in range(5):
        write_image(tmp_path / "a" / f"{i}.png", (4, 4), colour, mode)
    assert load(tmp_path).train.x.shape == (4, 3, 4, 4)


def test_palette_with_transparency_does_not_warn(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 50, 60, 70])
    (tmp_path / "a").mkdir()
    for i in range(5):
        image.save(tmp_path / "a" / f"{i}.png", transparency=b"\x00\x80")
    assert load(tmp_path).train.x[0, :, 0, 0].tolist() == [50, 60, 70]


def test_folders_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images; expected <class>"):
        load(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no images"):
        load(tmp_path)
    (tmp_path / "empty" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    with pytest.raises(DataError, match=r"broken\.png is not a readable PNG or JPEG image"):
        load(tmp_path)
    write_image(tmp_path / "empty" / "broken.png", (5000, 1))
    with pytest.raises(DataError, match=r"broken\.png is an image of 5,000 x 1 pixels; at most 4,096"):
        load(tmp_path)
    write_image(tmp_path / "empty" / "broken.png", (4, 4), 7000, "I;16")
    with pytest.raises(DataError, match=r"broken\.png has pixels of mode I.*; 8 bits per channel"):
        load(tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "empty" / "broken.png", "BMP")  # not what it says it is
    with pytest.raises(DataError, match=r"broken\.png is not a readable PNG or JPEG"):
        load(tmp_path)


def png_claiming(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    raw = bytearray(file.getvalue())
    raw[16:24] = struct.pack(">II", width, height)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    return bytes(raw)


@pytest.mark.parametrize("side", [4097, 12_000, 2**31 - 1])
def test_a_pixel_bomb_is_refused_by_its_header(side: int) -> None:
    with pytest.raises(DataError, match="bomb"):
        reading.decode(png_claiming(side, side), "bomb", (32, 32))


# One's own: torch and arrays


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, pairs: list[Any], classes: list[str] | None = None) -> None:
        self.pairs = pairs
        if classes:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        return self.pairs[index]


def test_from_torch_tensors() -> None:
    train = torch.utils.data.TensorDataset(torch.rand(10, 3, 4, 4), torch.arange(10) % 2)
    found = from_torch(train, train, name="mine")
    assert_well_formed(found)
    assert found.train.x.shape == (10, 3, 4, 4)
    assert found.train.x.dtype == np.float32
    assert found.mean == ()
    assert (found.name, found.classes) == ("mine", ("0", "1"))


def test_from_torch_pictures() -> None:
    pairs = [(Image.new("RGB", (6, 4), (i, 0, 0)), i % 2) for i in range(10)]
    found = from_torch(Pairs(pairs, ["even", "odd"]), augment=True)
    assert_well_formed(found)
    assert found.train.x.shape == (8, 3, 4, 6)
    assert found.train.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert found.classes == ("even", "odd")


def test_from_torch_without_length() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return ((np.full((4, 4), i, np.uint8), np.int64(0)) for i in range(5))

    assert from_torch(Stream()).train.x.shape == (4, 1, 4, 4)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "train set is empty"),
        ([1], "item 0 of the train set is no pair"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], r"item 1 of the train set has shape \[3\], the first \[2\]"),
        ([(torch.zeros(2), 0.5)], "item 0 of the train set is no pair"),
        ([(torch.zeros(2), torch.tensor([0.0, 1.0]))], "whole number"),
        ([(torch.zeros(2, dtype=torch.bfloat16), 0)], "item 0"),
        ([(torch.full((2,), torch.nan), 0)], "NaN"),
        ([(torch.zeros(2), -1)], "y holds -1"),
    ],
)
def test_from_torch_names_what_is_wrong(pairs: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_torch(Pairs(pairs))


def test_from_arrays_names() -> None:
    x, y = np.zeros((4, 2)), np.array([0, 1, 2, 0])
    found = from_arrays(x, y, x, y, group=[0, 0, 1, 1], group_test=[1, 1, 0, 0], groups=["w", "e"], classes="abc")
    assert_well_formed(found)
    assert found.classes == ("a", "b", "c")
    assert found.groups == ("w", "e")
    with pytest.raises(DataError, match="there is a label 2, but only 2 names"):
        from_arrays(x, y, x, y, classes=["a", "b"])
    with pytest.raises(DataError, match="must be arrays"):
        from_arrays([[1, 2], [3]], [0, 0])


def test_a_constant_channel_keeps_a_deviation_of_one() -> None:
    found = from_arrays(np.full((5, 4, 4), 51, np.uint8), np.zeros(5, int))
    assert (found.mean, found.std) == ((0.2,), (1.0,))


# The registry


def test_names_and_options_are_suggested(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='did you mean "cifar10"'):
        load("cifar_10")
    with pytest.raises(UsageError, match='no option of data set mini_imagenet "sizee"; did you mean "size"'):
        load("mini_imagenet", tmp_path, sizee=32)
    with pytest.raises(UsageError, match="Known: none"):
        load("digits", size=3)
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "no" / "such")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cifar10c", {"severity": 0}),
        ("cifar10c", {"severity": 6}),
        ("cifar10c", {"severity": "3"}),
        ("cifar10c", {"all": 1}),
        ("cifar10", {"verify": "no"}),
        ("mini_imagenet", {"size": 0}),
        ("mini_imagenet", {"size": 32.0}),
        ("mini_imagenet", {"size": True}),
    ],
)
def test_misfit_options(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))} is"):
        load(name, tmp_path, **options)


def test_describe_and_check(tmp_path: Path) -> None:
    assert describe().keys() == DATASETS.keys()
    assert all("\n" not in line and len(line) < 120 for line in describe().values())
    assert check("digits") == "digits: 1,262 train and 535 test samples, uint8 1 x 8 x 8, 10 classes"
    assert check("cinic10", make_cinic(tmp_path)).endswith(
        "2 groups. CINIC-style: 20 train, 20 test images, not the published CINIC-10"
    )
    with pytest.raises(DataError, match="copfl data get cifar10"):
        check("cifar10", tmp_path)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        load("digits")


def test_importing_needs_numpy_alone() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'sklearn', 'PIL', 'scipy'])); "
        "import copfl.data.datasets, copfl.data.download"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The real files


@needs("cifar-10-batches-py", "cifar-10-python.tar.gz")
def test_real_cifar10() -> None:
    found = load("cifar10", REAL)
    assert_well_formed(found)
    assert len(found.train) % 10_000 == 0
    assert np.bincount(found.test.y).tolist() == [1000] * 10
    assert found.test.y[:4].tolist() == [3, 8, 8, 0]  # cat, ship, ship, airplane
    mean = found.test.x.mean(axis=(0, 2, 3)) / 255
    assert mean == pytest.approx([0.494, 0.485, 0.450], abs=0.002)


@needs("cifar-10-batches-py", "cifar-10-python.tar.gz", "CIFAR-10-C", "CIFAR-10-C.tar")
def test_real_cifar10c() -> None:
    found = load("cifar10c", REAL)
    assert_well_formed(found)
    for part in (found.train, found.test):
        assert part.group is not None
        for label in range(10):
            assert np.ptp(np.bincount(part.group[part.y == label], minlength=15)) <= 1


@needs("CINIC-10", "CINIC-10.tar.gz", "cinic-10-style.tar")
def test_real_cinic10() -> None:
    found = load("cinic10", REAL)
    assert_well_formed(found)
    assert found.train.group is not None
    assert np.unique(found.train.group).tolist() == [0, 1]


@needs("mini-imagenet", "mini-imagenet.tar")
def test_real_mini_imagenet() -> None:
    found = load("mini_imagenet", REAL, size=32)
    assert_well_formed(found)
    assert len(found.classes) == 100
    assert np.ptp(np.bincount(found.train.y)) == 0


def test_the_registry_is_whole() -> None:
    assert list(DATASETS) == ["digits", "cifar10", "cifar10c", "cinic10", "mini_imagenet"]
    assert all(callable(getattr(datasets, name)) for name in DATASETS)
