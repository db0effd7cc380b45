"""A folder of images as a data set."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from copfl.data import reading
from copfl.data.arrays import from_splits
from copfl.data.reading import ImageFile
from copfl.data.samples import Dataset
from copfl.errors import COMMAND_LINE, DataError, how_to_set

IMAGE_PATHS = "<class>/*.png or *.jpg; or <client>/<class>/*.png or *.jpg; either may be in train/ and test/"


def image_folder(
    path: Path,
    *,
    size: int | None = None,
    gray: bool = False,
    augment: bool = False,
    skip_corrupt: bool = False,
) -> Dataset:
    """A folder [{train,test}/][<client>/]<class>/*.png|jpg, at one size; without splits a fifth of the images is test.

    Args:
        path: The folder.
        size: Pixels of a side; None: the most frequent size of the images.
        gray: Whether the images are read without colour.
        augment: Whether training images get random crops and flips.
        skip_corrupt: Whether damaged images are left out; else they are an error.
    """
    images, notes = reading.image_files(path, _folders), []
    if skip_corrupt:
        count, images = len(images), reading.intact(images)
        notes = [f"{count - len(images):,} of {count:,} images are corrupt and were skipped"]
    parts, images = _by_split(images)
    clients = sorted({image.client for image in images})
    classes = tuple(sorted({image.label for image in images if image.split != "test"}))
    if nested := next((image for image in images if "/" in image.client), None):
        raise DataError(f"{nested.source} is in too many folders; expected {IMAGE_PATHS}")
    if len(clients) > 1 and not clients[0]:
        shallow, deep = (
            next(image for image in images if bool(image.client) is has) for has in (False, True)
        )
        raise DataError(f"{shallow.source} has no client, {deep.source} has one; expected {IMAGE_PATHS}")
    for folder in sorted((path / parts[0]).glob("[!.]*/")):
        if folder.name not in (clients if any(clients) else classes):
            raise DataError(f"{folder} has no images (*.png, *.jpg)")
    if not classes:
        raise DataError(f"no images; expected {IMAGE_PATHS}")
    if extra := {image.label for image in images} - set(classes):
        raise DataError(f"test/ has a class {min(extra)} which train/ lacks")
    splits = []
    try:
        sizes = Counter(reading.image_size(image.read(), image.source) for image in images)
        shape = sizes.most_common(1)[0][0] if size is None else (size, size)
        for split in parts:
            chosen = [image for image in images if image.split == split]
            labels = np.array([classes.index(image.label) for image in chosen], dtype=np.int64)
            owners = [np.array([image.client for image in chosen])] if any(clients) else []
            splits.append((reading.decode_all(chosen, shape, gray), labels, *owners))
    except DataError as error:
        on_line = COMMAND_LINE in os.environ
        skip = "--skip-corrupt" if on_line else how_to_set("data.skip_corrupt", True)
        raise DataError(f"{error}. Replace it, or leave such images out with {skip}") from error
    resized = len(images) - sizes[shape]
    if resized:
        notes.append(f"{resized:,} of {len(images):,} images resized to {shape[1]} x {shape[0]}")
    name, note = path.resolve().name, "; ".join(notes)
    return from_splits(splits, name=name, classes=classes, augment=augment, note=note)


def _folders(path: PurePosixPath) -> tuple[str, str] | None:
    """The folders above that of an image's class, and its class."""
    *above, label, _ = ("", *path.parts)
    is_hidden = any(name.startswith(".") for name in (*above, label))
    return None if is_hidden or not label else ("/".join(above[1:]), label)


def _by_split(images: Sequence[ImageFile]) -> tuple[tuple[str, ...], list[ImageFile]]:
    """The splits, and their images; the folders above that of an image's class become its split and client."""
    tops = {image.split.partition("/")[0] for image in images}
    if not tops & {"train", "test"}:
        return ("",), [image._replace(split="", client=image.split) for image in images]
    for split, other in (("train", "test"), ("test", "train")):
        if split not in tops:
            raise DataError(
                f"there is a folder {other}/ but none {split}/ with images; expected {IMAGE_PATHS}"
            )
    in_splits = [(image, *image.split.partition("/")) for image in images]
    return ("train", "test"), [
        image._replace(split=split, client=client)
        for image, split, _, client in in_splits
        if split in ("train", "test")
    ]
