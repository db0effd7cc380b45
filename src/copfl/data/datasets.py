"""Data sets by name, from a folder the user names: found, verified, loaded as arrays. One's own are in arrays.py.

Nothing is left to chance: the same files give the same samples in the same order.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.data import reading
from copfl.data.arrays import (
    check_flag,
    check_whole,
    held_out,
    image_folder,
    npz_file,
    rank_within_class,
    statistics,
)
from copfl.data.arrays import from_arrays as from_arrays  # these two are asked for here, too
from copfl.data.arrays import from_torch as from_torch
from copfl.data.corruptions import CORRUPTIONS, Images, corrupt
from copfl.data.download import advice
from copfl.data.images import find_pictures, labels_of
from copfl.data.samples import Dataset, Samples
from copfl.errors import DataError, unknown

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CINIC_MEAN, CINIC_STD = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow"}  # where the name to import is not the name to install


class Source(NamedTuple):
    """A named data set: its loader, (data folder, options) -> Dataset, and a line about it."""

    load: Callable[..., Dataset]
    line: str


def load(name_or_path: str | Path, data_dir: Path | None = None, **options: Any) -> Dataset:
    """The named data set, or one's own: the path of a .npz file or of a folder of images."""
    name = str(name_or_path)
    if name in DATASETS:
        loader, place, how = DATASETS[name].load, data_dir, f". {advice(name)}"
    elif os.path.isdir(path := Path(name_or_path)):  # which does not mind names that no file can have
        loader, place, how = image_folder, path, ""
    elif path.suffix == ".npz" and os.path.exists(path):
        loader, place, how = npz_file, path, ""
    elif os.path.exists(path) or len(path.parts) > 1 or path.suffix:
        found = "is neither a .npz file nor a folder" if os.path.exists(path) else "does not exist"
        raise DataError(
            f"{path} {found}; data of your own is a .npz file with x and y, or a folder of images"
        )
    else:
        raise unknown("data set", name, DATASETS)
    _check_options(name, loader, options)
    try:
        return loader(place, **options)
    except DataError as why:
        raise DataError(f"{name}: {why}{how}") from why
    except ImportError as why:
        module = (why.name or "").partition(".")[0]
        raise DataError(
            f"{name} needs a package that is not installed: pip install {PACKAGES.get(module, module)}"
        ) from why


def describe() -> dict[str, str]:
    """A line about every named data set."""
    return {name: source.line for name, source in DATASETS.items()}


def check(name_or_path: str | Path, data_dir: Path | None = None, **options: Any) -> str:
    """What was found: sizes, classes, groups and what is missing. Everything is read; damage raises DataError."""
    found = load(name_or_path, data_dir, **options)
    shape = " x ".join(str(side) for side in found.train.x.shape[1:])
    facts = [
        f"{found.name}: {len(found.train):,} train and {len(found.test):,} test samples",
        f"{found.train.x.dtype} {shape}",
        f"{len(found.classes)} classes",
    ]
    if found.groups:
        facts.append(f"{len(found.groups)} groups")
    return ", ".join(facts) + (f". {found.note}" if found.note else "")


# The published sets


def digits(data_dir: Path | None) -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, which need no files; three in ten are test."""
    table = _digits_table()
    x = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    y = table[:, -1].astype(np.int64)
    test = held_out(y, 3, 10)
    mean, std = statistics(x[~test])
    return Dataset(
        "digits",
        Samples(x[~test], y[~test]),
        Samples(x[test], y[test]),
        classes=tuple(str(digit) for digit in range(10)),
        mean=mean,
        std=std,
    )


def _digits_table() -> NDArray[np.float64]:  # [1797, 65]
    """Each digit's 64 pixels, 0 to 16, and its class: scikit-learn's own file, as importing it all takes a second."""
    found = importlib.util.find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder, "datasets", "data", "digits.csv.gz")).is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # one that keeps the file elsewhere

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


def cifar10(data_dir: Path | None, *, verify: bool = True) -> Dataset:
    """CIFAR-10 from its Python batches, those that are there. Without `verify`, other files of the same form do."""
    check_flag("verify", verify)
    place, files = _cifar_files(_existing(data_dir))
    train = [name for name in files if name != "test_batch"]
    if not train or "test_batch" not in files:
        raise DataError(f"{place} lacks {'test_batch' if train else 'data_batch_1 to data_batch_5'}")
    if verify:
        for name, raw in files.items():
            found = hashlib.md5(raw, usedforsecurity=False).hexdigest()
            if found != CIFAR_MD5[name]:
                raise DataError(
                    f"{place}/{name} ({len(raw):,} bytes) has md5 {found} instead of {CIFAR_MD5[name]}: it is damaged, "
                    "incomplete or not the published file; delete it"
                )
    batches = {name: _cifar_batch(raw, f"{place}/{name}") for name, raw in files.items()}
    x, y = (np.concatenate(parts) for parts in zip(*(batches[name] for name in train), strict=True))
    notes = [] if len(train) == 5 else [f"{len(train)} of 5 train batches: {len(y):,} images"]
    return Dataset(
        "cifar10",
        Samples(x, y),
        Samples(*batches["test_batch"]),
        classes=CIFAR_CLASSES,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augment=True,
        note="; ".join([*notes, *([] if verify else ["checksums not verified"])]),
    )


def cifar10c(data_dir: Path | None, *, severity: int = 3, all: bool = False, verify: bool = True) -> Dataset:
    """CIFAR-10 under fifteen corruptions, which are the groups: one corruption per image, or `all` for all of them.

    The published CIFAR-10-C, corrupted test images only, is split by base image, half and half; where it is absent the
    corruptions are made from CIFAR-10, train from train and test from test. No base image is in both.
    """
    check_whole("severity", severity, 1, 5)
    check_flag("all", all)
    folder = _existing(data_dir)
    if (folder / "CIFAR-10-C").is_dir() or (folder / "CIFAR-10-C.tar").is_file():
        arrays, y = _published_corruptions(folder)
        held = held_out(y, 1, 2)

        def stored(base: NDArray[np.intp], kind: int, chosen: NDArray[np.intp]) -> Images:
            return arrays[kind][(severity - 1) * len(y) + base[chosen]]

        train, test = (
            _one_sample_per_corruption(y[base], all, partial(stored, base))
            for base in (np.flatnonzero(~held), np.flatnonzero(held))
        )
        note = f"the published CIFAR-10-C, severity {severity}, split by base image"
        if len(y) != 10_000:
            note = f"CIFAR-10-C-style: {len(y):,} base images, severity {severity}, split by base image"
    else:
        clean = cifar10(data_dir, verify=verify)
        names = tuple(CORRUPTIONS)

        def made(base: Samples, split: int, kind: int, chosen: NDArray[np.intp]) -> Images:
            rng = np.random.default_rng([split, kind, severity])
            images = base.x[chosen].transpose(0, 2, 3, 1).astype(np.uint8, copy=False)
            return corrupt(images, names[kind], severity, rng)

        train, test = (
            _one_sample_per_corruption(base.y, all, partial(made, base, split))
            for split, base in enumerate((clean.train, clean.test))
        )
        note = f"made from CIFAR-10, severity {severity}, with drawn frost; not the published CIFAR-10-C"
        note = "; ".join(filter(None, (note, clean.note)))
    return Dataset(
        "cifar10c",
        train,
        test,
        classes=CIFAR_CLASSES,
        groups=tuple(CORRUPTIONS),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augment=True,
        note=note,
    )


def cinic10(data_dir: Path | None) -> Dataset:
    """CINIC-10, or any set in its layout; the groups are the two sources of its images."""
    pictures = find_pictures(_existing(data_dir), "CINIC-10")
    if strange := {picture.label for picture in pictures} - set(CIFAR_CLASSES):
        raise DataError(f"CINIC-10 holds a class {min(strange)}; the classes are {', '.join(CIFAR_CLASSES)}")
    splits = []
    for split in ("train", "test"):
        chosen = [picture for picture in pictures if picture.split == split]
        source = np.array([not picture.file.startswith("cifar10-") for picture in chosen], dtype=np.int64)
        x = reading.decode_all([(p.place, p.read) for p in chosen], (32, 32), resize=False)
        splits.append(Samples(x, labels_of(chosen, CIFAR_CLASSES, split), source))
    train, test = splits
    counts = Counter((picture.split, picture.label) for picture in pictures)
    as_published = all(count == 9000 for count in counts.values())
    style = f"CINIC-style: {len(train):,} train, {len(test):,} test images, not the published CINIC-10"
    return Dataset(
        "cinic10",
        train,
        test,
        classes=CIFAR_CLASSES,
        groups=("cifar", "imagenet"),
        mean=CINIC_MEAN,
        std=CINIC_STD,
        augment=True,
        note="" if as_published else style,
    )


def mini_imagenet(data_dir: Path | None, *, size: int = 84) -> Dataset:
    """Mini-ImageNet as a 100-way classification set, brought to `size` x `size` pixels."""
    check_whole("size", size, 8, 1024)
    pictures = find_pictures(_existing(data_dir), "mini-imagenet")
    classes = tuple(sorted({picture.label for picture in pictures}))
    splits = []
    for split in ("train", "test"):
        chosen = [picture for picture in pictures if picture.split == split]
        labels = labels_of(chosen, classes, split)
        splits.append(Samples(reading.decode_all([(p.place, p.read) for p in chosen], (size, size)), labels))
    train, test = splits
    part = "" if (len(train), len(test)) == (50_000, 10_000) else " (of 50,000 and 10,000)"
    return Dataset(
        "mini_imagenet",
        train,
        test,
        classes=classes,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augment=True,
        note=f"{len(train):,} train, {len(test):,} test images{part}, {len(classes)} classes, {size} x {size} pixels",
    )


DATASETS = {
    "digits": Source(
        digits, "1,797 handwritten digits, 8 x 8, 10 classes; comes with scikit-learn, needs no files"
    ),
    "cifar10": Source(cifar10, "CIFAR-10: 60,000 colour images, 32 x 32, 10 classes"),
    "cifar10c": Source(
        cifar10c,
        "CIFAR-10 under 15 corruptions, the groups; published or made from CIFAR-10 (severity=1..5, all=true)",
    ),
    "cinic10": Source(cinic10, "CINIC-10: 32 x 32, 10 classes, from CIFAR-10 and ImageNet, the groups"),
    "mini_imagenet": Source(mini_imagenet, "Mini-ImageNet: 100 classes, 84 x 84 or size=32, 64, ..."),
}


# CIFAR-10 and its corruptions


def _cifar_files(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """Where the batches were found, and their contents by name."""
    limit = 64 * reading.MIB
    unpacked = folder / "cifar-10-batches-py"
    if unpacked.is_dir():
        there = [name for name in CIFAR_MD5 if (unpacked / name).is_file()]
        return unpacked, {name: reading.read_bytes(unpacked / name, limit) for name in there}
    for packed in (folder / "cifar-10-python.tar.gz", folder / "cifar-10-python.tar"):
        if packed.is_file():
            files = {
                name: reading.read_member(packed, member, limit)
                for member in reading.members(packed)
                if (name := PurePosixPath(member.name).name) in CIFAR_MD5
            }
            return packed, {name: files[name] for name in CIFAR_MD5 if name in files}
    raise DataError(f"{folder} holds neither cifar-10-batches-py/ nor cifar-10-python.tar.gz")


def _cifar_batch(raw: bytes, source: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images [n, 3, 32, 32] and labels of one batch."""
    content = reading.unpickle(raw, source)
    images = reading.pickled_bytes(content.get(b"data"), 3072, source)
    labels = content.get(b"labels")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise DataError(f"{source} holds no list of labels from 0 to 9")
    if len(labels) != len(images) or not labels:
        raise DataError(f"{source} holds {len(images):,} images and {len(labels):,} labels")
    return images.reshape(-1, 3, 32, 32).copy(), np.array(labels, dtype=np.int64)


def _published_corruptions(folder: Path) -> tuple[list[Images], NDArray[np.int64]]:
    """The arrays of CIFAR-10-C, left on disk, in the order of CORRUPTIONS, and the labels of the base images."""
    wanted = [*CORRUPTIONS, "labels"]
    unpacked, packed = folder / "CIFAR-10-C", folder / "CIFAR-10-C.tar"
    if unpacked.is_dir():
        place = unpacked
        there = [name for name in wanted if (unpacked / f"{name}.npy").is_file()]
        found = {name: reading.map_npy(unpacked / f"{name}.npy") for name in there}
    else:
        place = packed
        found = {
            name: reading.map_npy(packed, member.offset, member.size)
            for member in reading.members(packed)
            if (name := PurePosixPath(member.name).name.removesuffix(".npy")) in wanted
        }
    if missing := [name for name in wanted if name not in found]:
        raise DataError(f"{place} lacks {', '.join(f'{name}.npy' for name in missing)}")
    labels = found["labels"]
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) % 5 or not len(labels):
        raise DataError(
            f"labels.npy in {place} is {labels.dtype} {list(labels.shape)}; int64 [50000] was expected"
        )
    by_severity = labels.astype(np.int64).reshape(5, -1)
    if (by_severity != by_severity[0]).any() or by_severity.min() < 0 or by_severity.max() > 9:
        raise DataError(
            f"labels.npy in {place} must hold the labels of the base images, 0 to 9, five times over"
        )
    arrays: list[Images] = []
    for name in CORRUPTIONS:
        array = found[name]
        if array.dtype != np.uint8 or array.shape != (len(labels), 32, 32, 3):
            given = f"{array.dtype} {list(array.shape)}"
            raise DataError(
                f"{name}.npy in {place} is {given}; uint8 [{len(labels)}, 32, 32, 3] was expected"
            )
        arrays.append(array.view(np.uint8))
    return arrays, by_severity[0]


def _one_sample_per_corruption(
    y: NDArray[np.int64], every: bool, images: Callable[[int, NDArray[np.intp]], Images]
) -> Samples:
    """The base images with labels y, each under one corruption, equally many of a class under each, or under `every`.

    `images(corruption, base)` gives the chosen base images under a corruption.
    """
    if every:
        base = np.tile(np.arange(len(y)), len(CORRUPTIONS))
        group = np.repeat(np.arange(len(CORRUPTIONS)), len(y))
    else:
        base, group = np.arange(len(y)), rank_within_class(y) % len(CORRUPTIONS)
    x = np.empty((len(base), 3, 32, 32), dtype=np.uint8)

    def put(corruption: int) -> None:
        chosen = group == corruption
        x[chosen] = images(corruption, base[chosen]).transpose(0, 3, 1, 2)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy lets go of the interpreter lock in its loops
        for _ in pool.map(put, range(len(CORRUPTIONS))):
            pass
    return Samples(x, y[base], group)


# What is given, checked


def _existing(data_dir: Path | None) -> Path:
    """The data folder, if there is one."""
    if data_dir is None:
        raise DataError("no data folder was given; name one with --data-dir DIR or in COPFL_DATA")
    if not data_dir.is_dir():
        raise DataError(f"the data folder {data_dir} does not exist")
    return data_dir


def _check_options(name: str, loader: Callable[..., Dataset], options: dict[str, Any]) -> None:
    known = [option for option in inspect.signature(loader).parameters if option not in ("data_dir", "path")]
    for option in options:
        if option not in known:
            raise unknown(f"option of data set {name}", option, known)
