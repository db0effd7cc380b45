"""Published image sets in their own layouts; those of several domains have one natural client per domain."""

from __future__ import annotations

import gzip
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.data import reading
from copfl.data.arrays import from_arrays
from copfl.data.samples import Dataset
from copfl.errors import DataError

FASHION = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
]
IDX_LIMIT, MAT_LIMIT = 64 * reading.MIB, 2048 * reading.MIB
DIGIT_DOMAINS = ("mnist", "mnist_m", "svhn", "syn", "usps")


def fashion_mnist(data_dir: Path | None) -> Dataset:
    """Fashion-MNIST: 70,000 gray images of clothes, 28 x 28, 10 classes"""
    place = reading.found(data_dir, "fashion_mnist", "FashionMNIST/raw", "FashionMNIST")
    train, test = (
        (_idx(place, f"{split}-images-idx3-ubyte", 3), _idx(place, f"{split}-labels-idx1-ubyte", 1))
        for split in ("train", "t10k")
    )
    return from_arrays(*train, *test, classes=FASHION, name="fashion_mnist", augment=True)


def _idx(place: Path, name: str, sides: int) -> NDArray[np.uint8]:
    """The array of an IDX file of bytes, compressed or not."""
    path = next((p for p in (place / f"{name}.gz", place / name) if p.is_file()), None)
    if path is None:
        raise DataError(f"{place} lacks {name}.gz")
    raw = reading.read_bytes(path, IDX_LIMIT)
    with reading.naming(str(path), "IDX file"):
        if path.suffix == ".gz":
            with gzip.open(io.BytesIO(raw)) as file:
                raw = file.read(IDX_LIMIT)
        shape = np.frombuffer(raw, ">i4", sides, offset=4).tolist()
        if raw[:4] != bytes([0, 0, 8, sides]) or len(raw) - 4 - 4 * sides != int(np.prod(shape)):
            raise DataError(f"{path} is not an IDX file of bytes with {sides} axes, or is incomplete")
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * sides).reshape(shape).copy()


def svhn(data_dir: Path | None) -> Dataset:
    """SVHN: 99,289 colour images of house numbers, 32 x 32, 10 classes"""
    place = reading.found(data_dir, "svhn", "SVHN")
    train, test = (_svhn(place / f"{split}_32x32.mat") for split in ("train", "test"))
    return from_arrays(*train, *test, name="svhn", classes="0123456789")


def _svhn(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images and labels; the digit 0 is stored as 10."""
    content = _mat(path, "X", "y")
    return content["X"].transpose(3, 0, 1, 2), content["y"].reshape(-1).astype(np.int64) % 10


def _mat(path: Path, *names: str) -> Mapping[str, Any]:
    """The arrays of a Matlab file."""
    from scipy.io import loadmat

    with reading.naming(str(path), ".mat file"):
        content = loadmat(io.BytesIO(reading.read_bytes(path, MAT_LIMIT)), variable_names=names)
        if missing := [name for name in names if name not in content]:
            raise DataError(f"{path} lacks the array {missing[0]}")
        return dict(content)


def tiny_imagenet(data_dir: Path | None, *, size: int = 64) -> Dataset:
    """Tiny-ImageNet: 110,000 images of 200 classes, 64 x 64 or size=32, ...; its val split is test"""
    place = reading.found(data_dir, "tiny-imagenet-200", "tiny-imagenet-200.zip")
    labels: dict[str, str] = {}
    for member in reading.members(place):
        if PurePosixPath(member.name).name == "val_annotations.txt":
            rows = member.read(reading.MIB).decode().splitlines()
            labels = {file: label for file, label, *_ in (row.split("\t") for row in rows if "\t" in row)}
    if not labels:
        raise DataError(f"{place} lacks val/val_annotations.txt")

    def locate(path: PurePosixPath) -> tuple[str, str] | None:
        if "train" in path.parts:  # train/<label>/images/<file>
            return "train", path.parts[path.parts.index("train") + 1]
        return ("val", labels[path.name]) if "val" in path.parts and path.name in labels else None

    images = reading.image_files(place, locate)
    classes = sorted({image.label for image in images})
    content: dict[str, Any] = {}
    for suffix, split in (("", "train"), ("_test", "val")):
        chosen = [image for image in images if image.split == split]
        if not chosen:
            raise DataError(f"{place} has no images in {split}/")
        content[f"x{suffix}"] = reading.decode_all(chosen, (size, size))
        content[f"y{suffix}"] = np.array([image.label for image in chosen])
    return from_arrays(**content, classes=classes, name="tiny_imagenet", augment=True)


def pacs(data_dir: Path | None, *, size: int = 64) -> Dataset:
    """PACS: 9,991 images of 7 classes in 4 domains (photo, art, cartoon, sketch), the clients; size=64"""
    return _domains(data_dir, "pacs", ("PACS", "PACS.zip"), size)


def office_caltech10(data_dir: Path | None, *, size: int = 64) -> Dataset:
    """Office-Caltech-10: 2,533 images of 10 classes in 4 domains, the clients; size=64"""
    return _domains(data_dir, "office_caltech10", ("office_caltech_10", "office_caltech_10.zip"), size)


def _domains(data_dir: Path | None, name: str, places: Sequence[str], size: int) -> Dataset:
    """Images in <domain>/<class>/, with a fifth of each domain's images as its test samples."""
    place = reading.found(data_dir, *places)
    images = [image for image in reading.image_files(place) if image.split]
    if len({image.split for image in images}) < 2:
        raise DataError(f"{place} has no images of several domains; expected <domain>/<class>/*.jpg")
    x = reading.decode_all(images, (size, size))
    y, group = (np.array([getattr(image, key) for image in images]) for key in ("label", "split"))
    return replace(from_arrays(x, y, group=group, name=name), natural=True)


def digits_five(data_dir: Path | None) -> Dataset:
    """Digits-Five: digits of 5 domains (MNIST, MNIST-M, SVHN, synthetic, USPS), the clients; 32 x 32

    From its Matlab files. All images are in colour; those of 28 x 28 have a border of two pixels.
    """
    place = reading.found(data_dir, "Digit-Five", "DigitFive", "digits_five")
    mnist = _mat(place / "mnist_data.mat", "train_32", "test_32", "label_train", "label_test")
    colour = _mat(place / "mnistm_with_label.mat", "train", "test", "label_train", "label_test")
    synthetic = _mat(place / "syn_number.mat", "train_data", "test_data", "train_label", "test_label")
    usps = _mat(place / "usps_28x28.mat", "dataset")["dataset"]
    content: dict[str, Any] = {}
    for suffix, split, row in (("", "train", 0), ("_test", "test", 1)):
        domains = [
            (mnist[f"{split}_32"], mnist[f"label_{split}"].argmax(axis=1)),
            (colour[split], colour[f"label_{split}"].argmax(axis=1)),
            _svhn(place / f"svhn_{split}_32x32.mat"),
            (synthetic[f"{split}_data"], synthetic[f"{split}_label"]),
            (np.rint(usps[row, 0][:, 0] * 255), usps[row, 1]),
        ]
        content[f"x{suffix}"] = np.concatenate([_colour_32(images) for images, _ in domains])
        content[f"y{suffix}"] = np.concatenate([labels.reshape(-1) % 10 for _, labels in domains]).astype(
            np.int64
        )
        sizes = [len(images) for images, _ in domains]
        content[f"group{suffix}"] = np.repeat(np.arange(len(domains)), sizes)
    made = from_arrays(**content, classes="0123456789", groups=DIGIT_DOMAINS, name="digits_five")
    return replace(made, natural=True)


def _colour_32(images: NDArray[Any]) -> NDArray[np.uint8]:
    """Images [n, side, side(, 1 or 3)] as uint8 [n, 3, 32, 32]."""
    images = images.astype(np.uint8)
    images = images[..., None] if images.ndim == 3 else images
    border = (32 - images.shape[1]) // 2
    images = np.pad(images, ((0, 0), (border, border), (border, border), (0, 0)))
    return np.ascontiguousarray(np.repeat(images, 3 // images.shape[3], axis=3).transpose(0, 3, 1, 2))
