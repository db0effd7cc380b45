"""Data sets by name, from files in a data folder: found, verified and loaded as arrays. User data: arrays.py.

The same files give the same samples in the same order.
"""

import functools
import hashlib
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.data import reading
from copfl.data.arrays import npz_file, statistics
from copfl.data.held_out import held_out, rank_within_class
from copfl.data.reading import ImageFile, existing
from copfl.data.samples import Dataset, Samples, shown
from copfl.data.sets import overview, pfllib, published
from copfl.data.sets.corruptions import CORRUPTIONS, Images, corrupt
from copfl.data.sets.download import TABLE, advice
from copfl.data.sets.hub import PREFIX, hub_dataset
from copfl.data.sets.image_folder import image_folder
from copfl.data.tables.files import READERS
from copfl.data.tables.tables import table_file
from copfl.errors import DataError, UsageError, unknown

REMEDIES = {
    (".gz", ".zip", ".bz2", ".xz", ".zst", ".tar"): "unpack it",
    (".xlsx", ".xls", ".ods"): "save the sheet as CSV UTF-8",
}
OTHER_KINDS = "an .npz file with x and y, a folder of images, LEAF's .json, or PFLlib's train/ and test/"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CINIC_MEAN, CINIC_STD = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_MD5, CIFAR100_MD5 = (TABLE[name]["members"] for name in ("cifar10", "cifar100"))


def reader(name: str) -> Callable[..., Dataset]:
    """The function that reads the named data set, or the user's: a file, a folder, or hf:NAME.

    Its keyword arguments are the options of the data set.
    """
    path, exists = Path(name), os.path.exists(name)
    if name in DATASETS:
        return DATASETS[name]
    if name.startswith(PREFIX):
        return hub_dataset
    if exists and published.is_leaf(path):
        if path.is_file() and _is_list(path):
            raise DataError(
                f"{path} is a list in JSON, and not LEAF's; a table is .jsonl, an object per line"
            )
        return published.leaf
    if pfllib.is_pfllib(path):
        return pfllib.pfllib
    if os.path.isdir(name):
        return image_folder
    if exists and path.suffix == ".npz":
        return npz_file
    if exists and path.suffix.lower() in READERS:
        return table_file
    if exists or len(path.parts) > 1 or path.suffix:
        wrong = "is not a file of a known kind" if exists else "does not exist"
        remedy = next((f"{what}, or " for ends, what in REMEDIES.items() if path.suffix.lower() in ends), "")
        raise DataError(f"{path} {wrong}; {remedy}give a table ({', '.join(READERS)}), {OTHER_KINDS}")
    raise unknown("data set", name, DATASETS)


def _is_list(path: Path) -> bool:
    """Whether a JSON file has a list, by its begin."""
    with reading.data_errors(str(path)), path.open("rb") as file:
        return file.read(1000).lstrip().startswith(b"[")


def load(name_or_path: str | Path, data_dir: Path | None = None, **options: Any) -> Dataset:
    """The named data set, or the user's.

    Args:
        name_or_path: A name of `copfl list datasets`, a file, a folder, or hf:NAME.
        data_dir: The folder of published data sets; None: the environment variable COPFL_DATA.
        options: Of its reader, such as `target="label"` of a table.
    """
    name = str(name_or_path)
    read = reader(name)
    for option, most in (("severity", 5), ("size", reading.LARGEST_IMAGE_SIDE)):
        if not 1 <= options.get(option, 1) <= most:
            raise UsageError(f"{option}={options[option]} must be from 1 to {most:,}")
    location: Any = data_dir if name in DATASETS else name if name.startswith(PREFIX) else Path(name)
    try:
        return read(location, **options)
    except DataError as error:
        whose = "" if str(error).startswith(name) else f"{name}: "
        raise DataError(f"{whose}{error}{f'. {advice(name)}' if name in DATASETS else ''}") from error


def check(name_or_path: str | Path, data_dir: Path | None = None, **options: Any) -> str:
    """A line about the data set: sizes, classes, groups, notes. All files are read and checked.

    Args:
        name_or_path: As of `load`.
        data_dir: As of `load`.
        options: As of `load`.
    """
    dataset = load(name_or_path, data_dir, **options)
    sizes = f"{len(dataset.train):,} train and {len(dataset.test):,} test samples"
    facts = [f"{dataset.name}: {sizes}", shown(dataset.train.x), overview.targets(dataset)]
    facts += [f"{len(dataset.groups)} groups"] if dataset.groups else []
    return ". ".join(filter(None, (", ".join(facts), dataset.note, *dataset.warnings)))


def digits(data_dir: Path | None) -> Dataset:
    """1,797 handwritten digits, 8 x 8, 10 classes; comes with scikit-learn, needs no files

    The file is read without scikit-learn, whose import takes a second. Three samples in ten are test.
    """
    x, y = _digits()
    samples, test = Samples(x, y), held_out(y, 3, 10)
    mean, std = statistics(x[~test])
    classes = tuple("0123456789")
    return Dataset("digits", samples.take(~test), samples.take(test), classes, mean=mean, std=std)


@functools.cache
def _digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images and their classes; read once, as one process may make many runs of them."""
    package = importlib.util.find_spec("sklearn")
    folders = (package and package.submodule_search_locations) or ()
    files = [path for folder in folders if (path := Path(folder, "datasets/data/digits.csv.gz")).is_file()]
    if not files:
        raise DataError("scikit-learn is not installed")
    table = np.loadtxt(files[0], delimiter=",")  # [1797, 65]: 64 pixels from 0 to 16, and the class
    x = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return x, table[:, -1].astype(np.int64)


def cifar10(data_dir: Path | None, *, verify: bool = True) -> Dataset:
    """CIFAR-10: 60,000 colour images, 32 x 32, 10 classes

    From its Python batches, as many as there are. Without `verify`, other files of that form are accepted.
    """
    names = ("cifar-10-batches-py", "cifar-10-python.tar.gz", "cifar-10-python.tar")
    location, files = _cifar_files(data_dir, names, CIFAR_MD5, verify)
    train = [name for name in CIFAR_MD5 if name in files and name != "test_batch"]
    if not train or "test_batch" not in files:
        raise DataError(f"{location} lacks {'test_batch' if train else 'data_batch_1 to data_batch_5'}")
    batches = [
        _cifar_batch(files[name], f"{location}/{name}", b"labels", 10) for name in (*train, "test_batch")
    ]
    x, y = (np.concatenate(parts) for parts in zip(*batches[:-1], strict=True))
    notes = [f"{len(train)} of 5 train batches: {len(y):,} images"] if len(train) < 5 else []
    notes += [] if verify else ["checksums not verified"]
    return _colour_images("cifar10", Samples(x, y), Samples(*batches[-1]), note="; ".join(notes))


def cifar100(data_dir: Path | None, *, verify: bool = True) -> Dataset:
    """CIFAR-100: 60,000 colour images, 32 x 32, 100 classes

    Without `verify`, other files of that form are accepted.
    """
    names = ("cifar-100-python", "cifar-100-python.tar.gz", "cifar-100-python.tar")
    location, files = _cifar_files(data_dir, names, CIFAR100_MD5, verify)
    if missing := [name for name in CIFAR100_MD5 if name not in files]:
        raise DataError(f"{location} lacks {missing[0]}")
    train, test = (
        Samples(*_cifar_batch(files[name], f"{location}/{name}", b"fine_labels", 100))
        for name in ("train", "test")
    )
    labels = reading.unpickle(files["meta"], f"{location}/meta").get(b"fine_label_names")
    if not isinstance(labels, list) or len(labels) != 100 or not all(isinstance(n, bytes) for n in labels):
        raise DataError(f"{location}/meta has no list of 100 names")
    classes = tuple(label.decode("utf-8", "replace") for label in labels)
    note = "" if verify else "checksums not verified"
    return _colour_images("cifar100", train, test, classes=classes, note=note)


def _cifar_files(
    data_dir: Path | None, names: Sequence[str], checksums: dict[str, str], verify: bool
) -> tuple[Path, dict[str, bytes]]:
    """The folder or archive of a CIFAR set, and its files, verified."""
    location = reading.first_existing(data_dir, *names)
    files = {
        name: member.read(256 * reading.MIB)
        for member in reading.members(location)
        if (name := PurePosixPath(member.name).name) in checksums
    }
    for name in [name for name in checksums if verify and name in files]:
        md5 = hashlib.md5(files[name], usedforsecurity=False).hexdigest()
        if md5 != checksums[name]:
            mismatch = (
                f"{location}/{name} ({len(files[name]):,} bytes) has md5 {md5} instead of {checksums[name]}"
            )
            raise DataError(f"{mismatch}: it is damaged, incomplete or not the published file; delete it")
    return location, files


def _colour_images(name: str, train: Samples, test: Samples, **fields: Any) -> Dataset:
    """A data set with CIFAR's classes, ImageNet's normalisation and random crops, or with these fields."""
    usual = {"classes": CIFAR_CLASSES, "mean": IMAGENET_MEAN, "std": IMAGENET_STD, "augment": True}
    return Dataset(name, train, test, **{**usual, **fields})


def _cifar_batch(
    raw: bytes, source: str, key: bytes, classes: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images [n, 3, 32, 32] and labels of one batch."""
    content = reading.unpickle(raw, source)
    images = reading.pickled_bytes(content.get(b"data"), 3072, source)
    labels = content.get(key)
    if not isinstance(labels, list) or not all(type(n) is int and 0 <= n < classes for n in labels):
        raise DataError(f"{source} has no list of labels from 0 to {classes - 1}")
    if len(labels) != len(images) or not labels:
        raise DataError(f"{source} has {len(images):,} images and {len(labels):,} labels")
    return images.reshape(-1, 3, 32, 32).copy(), np.array(labels, dtype=np.int64)


def cifar10c(data_dir: Path | None, *, severity: int = 3, all: bool = False, verify: bool = True) -> Dataset:
    """CIFAR-10 under 15 corruptions, the groups; published or made from CIFAR-10 (severity=1..5, all=true)

    Every image is under one corruption, or with `all` under each. The published CIFAR-10-C has test images
    only, and is split by base image, half and half. If it is absent, the corruptions are made from CIFAR-10.
    No base image is in both splits. Without `verify`, other files of that form are accepted.
    """
    if published := existing(data_dir, "CIFAR-10-C", "CIFAR-10-C.tar"):
        arrays, y = _published_corruptions(published[0])
        is_test = held_out(y, 1, 2)
        bases = [np.flatnonzero(~is_test), np.flatnonzero(is_test)]
        labels = [y[base] for base in bases]
        note = "the published CIFAR-10-C" if len(y) == 10_000 else f"CIFAR-10-C-style: {len(y):,} base images"
        note += f", severity {severity}, split by base image"

        def images(split: int, kind: int, chosen: NDArray[np.intp]) -> Images:
            return arrays[kind][(severity - 1) * len(y) + bases[split][chosen]]

    else:
        clean, names = cifar10(data_dir, verify=verify), tuple(CORRUPTIONS)
        labels = [clean.train.y, clean.test.y]
        note = f"made from CIFAR-10, severity {severity}, with drawn frost; not the published CIFAR-10-C"
        note += f"; {clean.note}" if clean.note else ""

        def images(split: int, kind: int, chosen: NDArray[np.intp]) -> Images:
            rng = np.random.default_rng([split, kind, severity])
            pixels = (clean.train, clean.test)[split].x[chosen].astype(np.uint8, copy=False)
            return corrupt(pixels.transpose(0, 2, 3, 1), names[kind], severity, rng)

    train, test = (_corrupted(y, all, functools.partial(images, split)) for split, y in enumerate(labels))
    groups = {"groups": tuple(CORRUPTIONS), "groups_are_clients": False}
    return _colour_images("cifar10c", train, test, **groups, note=note)


def _published_corruptions(location: Path) -> tuple[list[Images], NDArray[np.int64]]:
    """The arrays of CIFAR-10-C, left on disk, in the order of CORRUPTIONS, and the base images' labels."""
    names = (*CORRUPTIONS, "labels")
    arrays = {
        name: reading.map_npy(member.path, member.offset, member.size)
        for member in reading.members(location)
        if (name := PurePosixPath(member.name).stem) in names
    }
    if missing := [name for name in names if name not in arrays]:
        raise DataError(f"{location} lacks {', '.join(f'{name}.npy' for name in missing)}")
    labels, expected = (
        arrays["labels"],
        "int64 [50000], the labels 0 to 9 of the base images, five times over",
    )
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) % 5 or not len(labels):
        raise DataError(
            f"labels.npy in {location} is {labels.dtype} {list(labels.shape)}; expected {expected}"
        )
    by_severity = labels.astype(np.int64).reshape(5, -1)
    if (by_severity != by_severity[0]).any() or by_severity.min() < 0 or by_severity.max() > 9:
        raise DataError(f"labels.npy in {location} has other labels; expected {expected}")
    shape = (len(labels), 32, 32, 3)
    for name in CORRUPTIONS:
        if arrays[name].dtype != np.uint8 or arrays[name].shape != shape:
            actual = f"{arrays[name].dtype} {list(arrays[name].shape)}"
            raise DataError(f"{name}.npy in {location} is {actual}; uint8 {list(shape)} was expected")
    return [arrays[name].view(np.uint8) for name in CORRUPTIONS], by_severity[0]


def _corrupted(
    y: NDArray[np.int64], every: bool, images: Callable[[int, NDArray[np.intp]], Images]
) -> Samples:
    """The base images with labels y, each under one corruption (equally often in a class) or `every` one.

    `images(corruption, base)` returns the chosen base images under a corruption.
    """
    base, group = np.arange(len(y)), rank_within_class(y) % len(CORRUPTIONS)
    if every:
        base, group = np.tile(base, len(CORRUPTIONS)), np.repeat(np.arange(len(CORRUPTIONS)), len(y))
    x = np.empty((len(base), 3, 32, 32), dtype=np.uint8)

    def put(corruption: int) -> None:
        chosen = group == corruption
        x[chosen] = images(corruption, base[chosen]).transpose(0, 3, 1, 2)

    reading.in_threads(put, range(len(CORRUPTIONS)))  # numpy releases the interpreter lock in its loops
    return Samples(x, y[base], group)


def cinic10(data_dir: Path | None) -> Dataset:
    """CINIC-10: 32 x 32, 10 classes, from CIFAR-10 and ImageNet, the groups"""
    images = _image_files(data_dir, "CINIC-10")
    if extra := {image.label for image in images} - set(CIFAR_CLASSES):
        raise DataError(f"CINIC-10 has a class {min(extra)}; the classes are {', '.join(CIFAR_CLASSES)}")
    train, test = _image_splits(images, CIFAR_CLASSES, (32, 32), resize=False)
    counts = Counter((image.split, image.label) for image in images)
    note = f"CINIC-style: {len(train):,} train, {len(test):,} test images, not the published CINIC-10"
    note = "" if set(counts.values()) == {9000} else note
    groups = {"groups": ("cifar", "imagenet"), "groups_are_clients": False}
    return _colour_images("cinic10", train, test, **groups, mean=CINIC_MEAN, std=CINIC_STD, note=note)


def mini_imagenet(data_dir: Path | None, *, size: int = 84) -> Dataset:
    """Mini-ImageNet: 100 classes, 84 x 84 or size=32, 64, ..."""
    images = _image_files(data_dir, "mini-imagenet")
    classes = tuple(sorted({image.label for image in images}))
    splits = _image_splits(images, classes, (size, size), resize=True)
    train, test = (Samples(part.x, part.y) for part in splits)
    published = "" if (len(train), len(test)) == (50_000, 10_000) else " (of 50,000 and 10,000)"
    counts = f"{len(train):,} train, {len(test):,} test images{published}, {len(classes)} classes"
    note = f"{counts}, {size} x {size} pixels"
    return _colour_images("mini_imagenet", train, test, classes=classes, note=note)


def _image_files(data_dir: Path | None, root: str) -> list[ImageFile]:
    """The images of root/{train,test}/<class>/ in the data folder, or in an archive in it."""
    places = existing(data_dir, root, f"{root}.tar.gz", f"{root}.tar", "*.tar")
    location = next((p for p in places if p.name.partition(".tar")[0] == root or _begins_in(p, root)), None)
    if location is None:
        raise DataError(f"{data_dir} has neither {root}/ nor {root}.tar nor a .tar with a folder {root}/")
    images = [image for image in reading.image_files(location) if image.split in ("train", "test")]
    if not images:
        raise DataError(f"{location} has no images; expected {root}/{{train,test}}/<class>/*.png or *.jpg")
    return images


def _begins_in(archive: Path, root: str) -> bool:
    """Whether the first file of an archive is in the folder `root`; False for a file that is no archive."""
    try:
        first = next(reading.members(archive), None)
    except DataError:
        return False
    return first is not None and PurePosixPath(first.name).parts[0] == root


def _image_splits(
    images: Sequence[ImageFile], classes: Sequence[str], size: tuple[int, int], resize: bool
) -> list[Samples]:
    """Train and test; both must have every class. The group is 0 for files called cifar10-*, 1 for others."""
    splits = []
    for split in ("train", "test"):
        chosen = [image for image in images if image.split == split]
        if missing := sorted(set(classes) - {image.label for image in chosen}):
            named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            lacking = f"{split}/ lacks images of {len(missing)} classes ({named})"
            raise DataError(f"{lacking}; both splits must have every class")
        y = np.array([classes.index(image.label) for image in chosen], dtype=np.int64)
        group = np.array([not image.file.startswith("cifar10-") for image in chosen], dtype=np.int64)
        splits.append(Samples(reading.decode_all(chosen, size, resize=resize), y, group))
    return splits


DATASETS: dict[str, Callable[..., Dataset]] = {
    read.__name__: read
    for read in (
        digits,
        *(published.breast_cancer, published.wine, published.diabetes, published.heart),
        *(cifar10, cifar10c, cifar100, cinic10, mini_imagenet),
        *(published.fashion_mnist, published.svhn, published.tiny_imagenet),
        *(published.pacs, published.office_caltech10, published.digits_five),
        *(published.femnist, published.shakespeare, published.uci_har),
        *(published.ag_news, published.sst2, published.banking77, published.clinc150),
    )
}
