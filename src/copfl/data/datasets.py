"""Data sets by name, from a folder the user names, and data of one's own: found, verified, loaded as arrays.

Nothing is left to chance: the same files give the same samples in the same order.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from copfl.data import reading
from copfl.data.corruptions import CORRUPTIONS, Images, corrupt
from copfl.data.download import advice
from copfl.data.samples import Dataset, Samples
from copfl.errors import DataError, UsageError, unknown

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
MOST_CLASSES = 2**16  # a label beyond is taken for a mistake
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
        raise DataError(f"{path} {found}; data of your own is a .npz file with x and y, or a folder of images")
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
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    y = bunch.target.astype(np.int64)
    test = held_out(y, 3, 10)
    mean, std = _statistics(x[~test])
    return Dataset(
        "digits",
        Samples(x[~test], y[~test]),
        Samples(x[test], y[test]),
        classes=tuple(str(digit) for digit in range(10)),
        mean=mean,
        std=std,
    )


def cifar10(data_dir: Path | None, *, verify: bool = True) -> Dataset:
    """CIFAR-10 from its Python batches, those that are there. Without `verify`, other files of the same form do."""
    _check_flag("verify", verify)
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
    _check_whole("severity", severity, 1, 5)
    _check_flag("all", all)
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
    pictures = _find_pictures(_existing(data_dir), "CINIC-10")
    if strange := {picture.label for picture in pictures} - set(CIFAR_CLASSES):
        raise DataError(f"CINIC-10 holds a class {min(strange)}; the classes are {', '.join(CIFAR_CLASSES)}")
    splits = []
    for split in ("train", "test"):
        chosen = [picture for picture in pictures if picture.split == split]
        source = np.array([not picture.file.startswith("cifar10-") for picture in chosen], dtype=np.int64)
        x = reading.decode_all([(p.place, p.read) for p in chosen], (32, 32), resize=False)
        splits.append(Samples(x, _labels(chosen, CIFAR_CLASSES, split), source))
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
    _check_whole("size", size, 8, 1024)
    pictures = _find_pictures(_existing(data_dir), "mini-imagenet")
    classes = tuple(sorted({picture.label for picture in pictures}))
    splits = []
    for split in ("train", "test"):
        chosen = [picture for picture in pictures if picture.split == split]
        labels = _labels(chosen, classes, split)
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
    "digits": Source(digits, "1,797 handwritten digits, 8 x 8, 10 classes; comes with scikit-learn, needs no files"),
    "cifar10": Source(cifar10, "CIFAR-10: 60,000 colour images, 32 x 32, 10 classes"),
    "cifar10c": Source(
        cifar10c, "CIFAR-10 under 15 corruptions, the groups; published or made from CIFAR-10 (severity=1..5, all=true)"
    ),
    "cinic10": Source(cinic10, "CINIC-10: 32 x 32, 10 classes, from CIFAR-10 and ImageNet, the groups"),
    "mini_imagenet": Source(mini_imagenet, "Mini-ImageNet: 100 classes, 84 x 84 or size=32, 64, ..."),
}


# Data of one's own


def npz_file(path: Path, *, augment: bool = False) -> Dataset:
    """A .npz file with x and y, and where it has them x_test and y_test, group and group_test; see `from_arrays`."""
    _check_flag("augment", augment)
    arrays: dict[str, Any] = dict(reading.npz_arrays(path))
    allowed = ("x", "y", "x_test", "y_test", "group", "group_test")
    if missing := [name for name in ("x", "y") if name not in arrays]:
        raise DataError(f"the file lacks the array {missing[0]}; it holds {', '.join(arrays) or 'nothing'}")
    if strange := [name for name in arrays if name not in allowed]:
        raise DataError(f"the file holds an array {strange[0]}; known are {', '.join(allowed)}")
    return from_arrays(**arrays, name=path.stem, augment=augment)


def image_folder(path: Path, *, size: int | None = None, gray: bool = False, augment: bool = False) -> Dataset:
    """A folder <class>/*.png|jpg, of which every fifth is test, or {train,test}/<class>/*.png|jpg, all at one size."""
    if size is not None:
        _check_whole("size", size, 1, reading.LARGEST_IMAGE_SIDE)
    _check_flag("gray", gray)
    _check_flag("augment", augment)
    split = (path / "train").is_dir() and (path / "test").is_dir()
    roots = {"train": path / "train", "test": path / "test"} if split else {"": path}
    pictures = [picture for name, root in roots.items() for picture in _folder_pictures(root, name)]
    classes = tuple(sorted({picture.label for picture in pictures if picture.split != "test"}))
    if not classes:
        raise DataError("no images; expected <class>/*.png or *.jpg, or {train,test}/<class>/*.png or *.jpg")
    if strange := {picture.label for picture in pictures} - set(classes):
        raise DataError(f"test/ holds a class {min(strange)} which train/ lacks")
    sizes = Counter(reading.image_size(p.read(), p.place) for p in pictures)
    shape = sizes.most_common(1)[0][0] if size is None else (size, size)
    arrays: dict[str, Any] = {}
    for name in roots:
        chosen = [picture for picture in pictures if picture.split == name]
        suffix = "_test" if name == "test" else ""
        arrays[f"x{suffix}"] = reading.decode_all([(p.place, p.read) for p in chosen], shape, gray)
        arrays[f"y{suffix}"] = np.array([classes.index(picture.label) for picture in chosen], dtype=np.int64)
    resized = len(pictures) - sizes[shape]
    note = f"{resized:,} of {len(pictures):,} images resized to {shape[1]} x {shape[0]}" if resized else ""
    return from_arrays(**arrays, name=path.resolve().name, classes=classes, augment=augment, note=note)


def from_torch(train: Any, test: Any = None, *, name: str = "torch", augment: bool = False) -> Dataset:
    """Any torch Dataset of (x, y) items as arrays; without `test`, every fifth sample of a class is test.

    Every item is asked for once: give it no random transform, and set `augment` for random crops and flips.
    """
    x, y = _torch_arrays(train, "train")
    x_test, y_test = (None, None) if test is None else _torch_arrays(test, "test")
    classes = getattr(train, "classes", None)  # as torchvision's sets name them
    return from_arrays(x, y, x_test, y_test, name=name, classes=classes, augment=augment)


def from_arrays(
    x: ArrayLike,
    y: ArrayLike,
    x_test: ArrayLike | None = None,
    y_test: ArrayLike | None = None,
    *,
    group: ArrayLike | None = None,
    group_test: ArrayLike | None = None,
    classes: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    name: str = "arrays",
    augment: bool = False,
    note: str = "",
) -> Dataset:
    """Arrays as a data set; without a test part, every fifth sample of a class is test.

    uint8 images may be [n, h, w], [n, h, w, channels] or [n, channels, h, w]; they are normalised by the mean and
    deviation of the train images. Anything else is used as it is.
    """
    if (x_test is None) != (y_test is None):
        raise DataError("x_test and y_test must be given together")
    if x_test is not None and (group is None) != (group_test is None):
        raise DataError("group and group_test must be given together")
    train = _checked(x, y, group, "")
    if x_test is not None and y_test is not None:
        test = _checked(x_test, y_test, group_test, "_test")
    else:
        held = held_out(train.y, 1, 5)
        if not held.any():
            raise DataError("too few samples to hold a test part back: give x_test and y_test, or five of one class")
        train, test = _taken(train, ~held), _taken(train, held)
        note = "; ".join(filter(None, (note, f"every fifth sample of a class is test: {len(test):,}")))
    if (train.x.shape[1:], train.x.dtype) != (test.x.shape[1:], test.x.dtype):
        ours, theirs = (f"{part.x.dtype} {list(part.x.shape[1:])}" for part in (train, test))
        raise DataError(f"a sample of x is {ours}, one of x_test is {theirs}; they must be alike")
    is_image = train.x.dtype == np.uint8 and train.x.ndim == 4
    mean, std = _statistics(train.x) if is_image else ((), ())
    return Dataset(
        name,
        train,
        test,
        classes=_names(classes, "label", train.y, test.y),
        groups=() if train.group is None or test.group is None else _names(groups, "group", train.group, test.group),
        mean=mean,
        std=std,
        augment=augment,
        note=note,
    )


def held_out(y: NDArray[np.int64], part: int, whole: int) -> NDArray[np.bool_]:
    """Which samples are test: `part` of every `whole` successive samples of a class, evenly spread."""
    rank = rank_within_class(y)
    held: NDArray[np.bool_] = (rank + 1) * part // whole > rank * part // whole
    return held


def rank_within_class(y: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every sample, how many samples of its class precede it."""
    order = np.argsort(y, kind="stable")
    rank = np.empty(len(y), dtype=np.int64)
    rank[order] = np.arange(len(y)) - np.searchsorted(y[order], y[order])
    return rank


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
        raise DataError(f"labels.npy in {place} is {labels.dtype} {list(labels.shape)}; int64 [50000] was expected")
    by_severity = labels.astype(np.int64).reshape(5, -1)
    if (by_severity != by_severity[0]).any() or by_severity.min() < 0 or by_severity.max() > 9:
        raise DataError(f"labels.npy in {place} must hold the labels of the base images, 0 to 9, five times over")
    arrays: list[Images] = []
    for name in CORRUPTIONS:
        array = found[name]
        if array.dtype != np.uint8 or array.shape != (len(labels), 32, 32, 3):
            given = f"{array.dtype} {list(array.shape)}"
            raise DataError(f"{name}.npy in {place} is {given}; uint8 [{len(labels)}, 32, 32, 3] was expected")
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


# Folders and archives of images


class _Picture(NamedTuple):
    split: str
    label: str
    file: str  # its name
    place: str  # where it is, for messages
    read: Callable[[], bytes]


def _find_pictures(folder: Path, root: str) -> list[_Picture]:
    """The images of root/{train,test}/<class>/ in a folder, or in an archive in it; in the order of their names."""
    if (folder / root).is_dir():
        place = folder / root
        pictures = [p for split in ("train", "test") for p in _folder_pictures(place / split, split)]
    else:
        archives = [path for suffix in (".tar.gz", ".tar") if (path := folder / f"{root}{suffix}").is_file()]
        archives += [path for path in sorted(folder.glob("*.tar")) if path not in archives and _begins_in(path, root)]
        if not archives:
            raise DataError(f"{folder} holds neither {root}/ nor {root}.tar nor another .tar with a folder {root}/")
        place = archives[0]
        pictures = sorted(_archived_pictures(place), key=lambda p: (p.split, p.label, p.file))
    if not pictures:
        raise DataError(f"{place} holds no images; expected {root}/{{train,test}}/<class>/*.png or *.jpg")
    return pictures


def _folder_pictures(folder: Path, split: str) -> Iterator[_Picture]:
    """The images of folder/<class>/."""
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist")
    for label in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        files = sorted(path for path in label.iterdir() if _is_image(path.name))
        if not files:
            raise DataError(f"{label} holds no images (*.png, *.jpg)")
        for path in files:
            read = partial(reading.read_bytes, path, reading.LARGEST_IMAGE_FILE)
            yield _Picture(split, label.name, path.name, str(path), read)


def _archived_pictures(archive: Path) -> Iterator[_Picture]:
    """The images of {train,test}/<class>/ in an archive, still encoded, in memory."""
    for member in reading.members(archive):
        split, label, file = ("", "", *PurePosixPath(member.name).parts)[-3:]
        if split in ("train", "test") and _is_image(file):
            raw = reading.read_member(archive, member, reading.LARGEST_IMAGE_FILE)
            yield _Picture(split, label, file, f"{archive} ({member.name})", lambda raw=raw: raw)  # type: ignore[misc]


def _begins_in(archive: Path, root: str) -> bool:
    """Whether the first file of an archive lies in the folder `root`; a file that is no archive does not."""
    try:
        first = next(reading.members(archive), None)
    except DataError:
        return False
    return first is not None and PurePosixPath(first.name).parts[0] == root


def _is_image(name: str) -> bool:
    return name.lower().endswith(reading.IMAGE_SUFFIXES) and not name.startswith(".")


def _labels(pictures: Sequence[_Picture], classes: Sequence[str], split: str) -> NDArray[np.int64]:
    """The labels of the pictures of one split, in which every class must occur."""
    number = {label: position for position, label in enumerate(classes)}
    labels = np.array([number[picture.label] for picture in pictures], dtype=np.int64)
    if missing := sorted(set(classes) - {picture.label for picture in pictures}):
        named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise DataError(f"{split}/ lacks images of {len(missing)} classes ({named}); both splits must hold every class")
    return labels


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


def _check_whole(option: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{option} is {value!r}; it must be a whole number from {low} to {high:,}")


def _check_flag(option: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{option} is {value!r}; it must be true or false")


def _checked(x: ArrayLike, y: ArrayLike, group: ArrayLike | None, suffix: str) -> Samples:
    """One split from arrays that may be anything; `suffix` is the end of their names in messages."""
    try:
        x, y = np.asarray(x), np.asarray(y)
        group = None if group is None else np.asarray(group)
    except ValueError as why:
        raise DataError(f"x{suffix} and y{suffix} must be arrays: {why}") from why
    if x.dtype.kind not in "biuf":
        raise DataError(f"x{suffix} has dtype {x.dtype}; numbers were expected")
    if x.ndim < 2:
        raise DataError(f"x{suffix} has shape {list(x.shape)}; [n, ...] with at least two axes was expected")
    if x.size == 0:
        raise DataError(f"x{suffix} is empty, of shape {list(x.shape)}; at least one sample of a value was expected")
    if x.dtype.kind == "f" and not (finite := np.isfinite(x)).all():
        bad = int(np.argwhere(~finite)[0][0])
        raise DataError(f"x{suffix} holds NaN or infinity, first in sample {bad}; every value must be a finite number")
    numbers = _checked_numbers(y, f"y{suffix}", len(x))
    groups = None if group is None else _checked_numbers(group, f"group{suffix}", len(x))
    return Samples(_channels_first(x), numbers, groups)


def _checked_numbers(values: NDArray[Any], what: str, length: int) -> NDArray[np.int64]:
    """Labels or groups [n] as int64."""
    if values.dtype.kind not in "iu":
        raise DataError(f"{what} has dtype {values.dtype}; whole numbers were expected: {what}.astype('int64')")
    if values.shape != (length,):
        raise DataError(f"{what} has shape {list(values.shape)}, but there are {length:,} samples: expected [{length}]")
    if values.min() < 0 or values.max() >= MOST_CLASSES:
        bad = values.min() if values.min() < 0 else values.max()
        raise DataError(f"{what} holds {bad}; numbers from 0 to {MOST_CLASSES - 1:,} were expected")
    return values.astype(np.int64)


def _channels_first(x: NDArray[Any]) -> NDArray[Any]:
    """uint8 images as [n, channels, h, w]; anything else as it is."""
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]
    elif x.dtype == np.uint8 and x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x)


def _names(
    given: Sequence[str] | None, what: str, train: NDArray[np.int64], test: NDArray[np.int64]
) -> tuple[str, ...]:
    """The names of the labels or groups; their numbers where none are given."""
    highest = int(max(train.max(), test.max()))
    if given is None:
        return tuple(str(number) for number in range(highest + 1))
    if highest >= len(given):
        raise DataError(
            f"there is a {what} {highest}, but only {len(given)} names: 0 to {len(given) - 1} were expected"
        )
    return tuple(str(name) for name in given)


def _taken(samples: Samples, chosen: NDArray[np.bool_]) -> Samples:
    group = None if samples.group is None else samples.group[chosen]
    return Samples(samples.x[chosen], samples.y[chosen], group)


def _statistics(x: NDArray[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of every channel of uint8 images, scaled to 0..1."""
    counts = np.stack([np.bincount(x[:, channel].ravel(), minlength=256) for channel in range(x.shape[1])])
    values = np.arange(256) / 255
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ values
    std = np.sqrt(np.maximum(share @ values**2 - mean**2, 0))
    std[std < 1e-6] = 1  # a constant channel stays as it is
    return tuple(mean.round(6).tolist()), tuple(std.round(6).tolist())


def _torch_arrays(dataset: Any, which: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All items (x, y) of a torch Dataset, stacked."""
    import torch

    items = (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__len__") else iter(dataset)
    xs: list[NDArray[Any]] = []
    ys: list[int] = []
    for position, item in enumerate(items):
        try:
            x, y = item
            if isinstance(x, torch.Tensor):
                x = x.detach().cpu().numpy()
            elif hasattr(x, "convert"):  # a Pillow image
                x = np.atleast_3d(x.convert("L" if x.mode in ("1", "L") else "RGB")).transpose(2, 0, 1)
            xs.append(np.asarray(x))
            ys.append(operator.index(y))
        except (TypeError, ValueError) as why:
            raise DataError(f"item {position} of the {which} set is no pair (x, whole number): {why}") from why
        if xs[-1].shape != xs[0].shape:
            shapes = f"{list(xs[-1].shape)}, the first {list(xs[0].shape)}"
            raise DataError(f"item {position} of the {which} set has shape {shapes}; all must be of one shape")
    if not xs:
        raise DataError(f"the {which} set is empty")
    return np.stack(xs), np.array(ys, dtype=np.int64)
