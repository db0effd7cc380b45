"""Every data set from small files in its published layout, damage of every kind, and the real files where they are.

The tests of the published files run if the environment variable COPFL_DATA names a folder with them.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from copfl.data import reading
from copfl.data.samples import Dataset
from copfl.data.sets import datasets
from copfl.data.sets.corruptions import CORRUPTIONS
from copfl.data.sets.datasets import CIFAR_CLASSES, DATASETS, check, load
from copfl.errors import DataError, UsageError
from copfl.settings.data import data_of, data_record
from tests.data.files import Payload, assert_well_formed, saved, write_image

REAL = Path(os.environ.get("COPFL_DATA", "/nonexistent"))


def needs(*alternatives: str) -> pytest.MarkDecorator:
    there = any((REAL / name).exists() for name in alternatives)
    return pytest.mark.skipif(
        not there, reason=f"COPFL_DATA names no folder with {' or '.join(alternatives)}"
    )


# Files in the published layouts


def cifar_pickle(data: NDArray[np.uint8], labels: list[int]) -> bytes:
    """A batch as Python 2 and its numpy pickled it: the opcodes of the published files, written by hand."""

    def string(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
        + number(0)
        + b"\x85"
        + string(b"b")
        + b"tR"
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
    """CIFAR-10-C in small: pixel (0, 0) encodes the base image, (0, 1) the corruption, (0, 2) the severity."""
    (folder / "CIFAR-10-C").mkdir(parents=True)
    for number, name in enumerate(CORRUPTIONS):
        array = np.zeros((5 * bases, 32, 32, 3), np.uint8)
        array[:, 0, 0, 0] = np.tile(np.arange(bases), 5)
        array[:, 0, 1] = number
        array[:, 0, 2] = np.repeat(np.arange(1, 6), bases)[:, None]
        np.save(folder / "CIFAR-10-C" / f"{name}.npy", array)
    np.save(folder / "CIFAR-10-C" / "labels.npy", np.tile(np.arange(bases) % 3, 5))
    return folder


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
                write_image(
                    folder / "mini-imagenet" / split / label / f"{label}{i}.jpg", (size, size), (40 * i, 0, 0)
                )
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


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    found, published = load("digits"), load_digits()
    everything = np.concatenate([found.train.x, found.test.x]).reshape(-1, 64)
    labelled = np.column_stack([everything, np.concatenate([found.train.y, found.test.y])])
    expected = np.column_stack([np.rint(published.data * (255 / 16)), published.target])
    assert sorted(labelled.tolist()) == sorted(expected.tolist())


# CIFAR-10


def test_cifar10_loads_what_is_there(tmp_path: Path) -> None:
    found = load("cifar10", make_cifar(tmp_path), verify=False)
    assert_well_formed(found)
    data, labels = cifar_images(40, 1)
    assert found.train.x.shape == (80, 3, 32, 32)
    assert found.train.y[:40].tolist() == labels
    assert (
        found.train.x[7, 1, 2, 5] == data[7, 1024 + 2 * 32 + 5]
    )  # planes of red, green, blue; rows; columns
    assert found.classes == CIFAR_CLASSES
    assert found.augment
    assert found.note == "2 of 5 train batches: 80 images; checksums not verified"


@pytest.mark.parametrize(
    ("archive", "mode"), [("cifar-10-python.tar.gz", "w:gz"), ("cifar-10-python.tar", "w")]
)
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
    with pytest.raises(DataError, match="name one with data_dir='DIR' or in COPFL_DATA"):
        load("cifar10")
    with pytest.raises(DataError, match="nowhere does not exist"):
        load("cifar10", tmp_path / "nowhere")
    for name in ("cifar10", "cifar10c", "cinic10"):
        with pytest.raises(DataError, match=rf"has neither.*copfl data get {name.rstrip('c')}"):
            load(name, tmp_path)
    with pytest.raises(DataError, match=r"has neither mini-imagenet/.*no open address"):
        load("mini_imagenet", tmp_path)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call", [os.mkdir, eval, np.fromfile, np.save])
def test_a_malicious_pickle_is_refused_and_does_nothing(
    tmp_path: Path, protocol: int, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cifar(tmp_path)
    trap = tmp_path / "trap"
    argument = f"__import__('os').mkdir({str(trap)!r})" if call is eval else str(trap)
    payload = Payload(call, argument, 0) if call is np.save else Payload(call, argument)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(
        pickle.dumps({b"data": payload}, protocol)
    )
    with pytest.raises(DataError, match="refused: its pickle names"):
        load("cifar10", tmp_path, verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-batches-py"]


def test_a_pickle_of_keys_without_end_is_refused() -> None:
    """The hash of 60 pairs of pairs has 2^60 steps, in 250 bytes; and so has the comparison of such sets."""
    pairs = b"".join(b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(60))
    with pytest.raises(DataError, match="not a readable pickle"):
        reading.unpickle(b"\x80\x02}K\x01\x85q\x00" + pairs + b"K\x01s.", "attack")
    with pytest.raises(DataError, match="has a set"):
        reading.unpickle(pickle.dumps({b"data": {1, 2}}, 4), "attack")


def test_a_pickle_cannot_change_the_reader() -> None:
    # BUILD with a pair sets attributes on any object, here on the substitute of numpy.dtype
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
        (pickle.dumps([1]), "contains a list"),
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


@pytest.mark.parametrize(
    ("archive", "mode"), [("cifar-10-python.tar.gz", "w:gz"), ("cifar-10-python.tar", "w")]
)
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
    with pytest.raises(
        DataError, match=r"cifar-10-python\.tar is not a readable tar archive: invalid header at byte"
    ):
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
    with pytest.raises(
        DataError, match=r"cifar-10-python\.tar is not a readable tar archive: .* bytes of name"
    ):
        load("cifar10", tmp_path, verify=False)
    (tmp_path / "cifar-10-python.tar").write_bytes(b"no archive")
    with pytest.raises(
        DataError, match=r"cifar-10-python\.tar is not a readable tar archive: [^\n]*\. It is damaged"
    ):
        load("cifar10", tmp_path, verify=False)


# CIFAR-10-C


def test_cifar10c_made_has_every_corruption_equally_often_in_every_class(tmp_path: Path) -> None:
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
    with pytest.raises(
        DataError, match=r"cat/n02_7\.png is an image of 33 x 32 pixels; 32 x 32 were expected"
    ):
        load("cinic10", tmp_path)
    write_image(cat)
    write_image(tmp_path / "CINIC-10" / "train" / "catt" / "x.png")
    with pytest.raises(DataError, match="has a class catt"):
        load("cinic10", tmp_path)


def test_cinic10_names_a_missing_class_and_split(tmp_path: Path) -> None:
    for label in CIFAR_CLASSES:
        write_image(tmp_path / "CINIC-10" / "train" / label / "x.png")
    with pytest.raises(
        DataError, match=r"test/ lacks images of 10 classes \(airplane, automobile, bird, ...\)"
    ):
        load("cinic10", tmp_path)
    for label in CIFAR_CLASSES[1:]:
        write_image(tmp_path / "CINIC-10" / "test" / label / "x.png")
    with pytest.raises(DataError, match=r"test/ lacks images of 1 classes \(airplane\)"):
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
    assert (
        np.abs(found.train.x[:, 0, 0, 0].astype(int) - np.tile([0, 40, 80], 3)).max() <= 3
    )  # JPEG is not exact
    assert found.note == f"9 train, 6 test images (of 50,000 and 10,000), 3 classes, {size} x {size} pixels"


def test_mini_imagenet_wants_all_classes_in_both_splits(tmp_path: Path) -> None:
    make_mini(tmp_path)
    write_image(tmp_path / "mini-imagenet" / "test" / "n09" / "x.jpg")
    with pytest.raises(DataError, match=r"train/ lacks images of 1 classes \(n09\).*every class"):
        load("mini_imagenet", tmp_path)


def test_an_archive_without_images(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "mini-imagenet.tar", "w"):
        pass
    with pytest.raises(DataError, match=r"mini-imagenet.tar has no images; expected"):
        load("mini_imagenet", tmp_path)


# The registry


def test_names_and_options_are_suggested(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='did you mean "cifar10"'):
        load("cifar_10")
    with pytest.raises(UsageError, match=r'data.sizee=32 is no setting; did you mean "size"'):
        data_of(data_record({"name": "mini_imagenet", "sizee": 32}))
    with pytest.raises(UsageError, match=r"data.size=3 is no setting; allowed are none"):
        data_of(data_record({"name": "digits", "size": 3}))
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
    with pytest.raises(UsageError, match=f"{next(iter(options))}=.* must be "):
        data_of(data_record({"name": name, "dir": str(tmp_path), **options}))


def test_check(tmp_path: Path) -> None:
    assert check("digits") == "digits: 1,262 train and 535 test samples, uint8 [1, 8, 8], 10 classes"
    assert check("cinic10", make_cinic(tmp_path)).endswith(
        "2 groups. CINIC-style: 20 train, 20 test images, not the published CINIC-10"
    )
    with pytest.raises(DataError, match="copfl data get cifar10"):
        check("cifar10", tmp_path)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    datasets._digits.cache_clear()  # a process that has read them needs it no more
    with pytest.raises(DataError, match="pip install scikit-learn"):
        load("digits")


def test_importing_needs_numpy_alone() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'sklearn', 'PIL', 'scipy'])); "
        "import copfl.data.sets.datasets, copfl.data.sets.download"
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


@needs("banking77")
def test_real_banking77() -> None:
    found = load("banking77", REAL)
    assert (len(found.train), len(found.test), len(found.classes)) == (10_003, 3_080, 77)


@needs("clinc150")
def test_real_clinc150() -> None:
    found = load("clinc150", REAL)
    assert (len(found.train), len(found.test), len(found.classes)) == (18_000, 4_500, 150)
    assert (len(found.groups), found.natural) == (10, True)
    assert found.train.group is not None
    assert set(np.bincount(found.train.group)) == {1800}


def test_the_registry_is_whole() -> None:
    assert len(DATASETS) == 23
    assert all(name == read.__name__ for name, read in DATASETS.items())
