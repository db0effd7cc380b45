"""A folder of images as a data set."""

import os
from collections import Counter
from pathlib import Path

import numpy as np

from copfl.data import reading
from copfl.data.arrays import from_splits
from copfl.data.samples import Dataset
from copfl.errors import COMMAND_LINE, DataError, how_to_set


def image_folder(
    path: Path,
    *,
    size: int | None = None,
    gray: bool = False,
    augment: bool = False,
    skip_corrupt: bool = False,
) -> Dataset:
    """A folder [{train,test}/]<class>/*.png|jpg, at one size; without splits every fifth image is test.

    Args:
        path: The folder.
        size: Pixels of a side; None: the most frequent size of the images.
        gray: Whether the images are read without colour.
        augment: Whether training images get random crops and flips.
        skip_corrupt: Whether damaged images are left out; else they are an error.
    """
    images, notes = reading.image_files(path), []
    if skip_corrupt:
        count, images = len(images), reading.intact(images)
        notes = [f"{count - len(images):,} of {count:,} images are corrupt and were skipped"]
    named_splits = {image.split for image in images}
    parts = ("train", "test") if named_splits >= {"train", "test"} else ("",)
    images = [image for image in images if image.split in parts]
    classes = tuple(sorted({image.label for image in images if image.split != "test"}))
    for folder in sorted((path / parts[0]).glob("[!.]*/")):
        if folder.name not in classes:
            raise DataError(f"{folder} has no images (*.png, *.jpg)")
    if not classes:
        raise DataError("no images; expected <class>/*.png or *.jpg, or {train,test}/<class>/*.png or *.jpg")
    if extra := {image.label for image in images} - set(classes):
        raise DataError(f"test/ has a class {min(extra)} which train/ lacks")
    splits = []
    try:
        sizes = Counter(reading.image_size(image.read(), image.source) for image in images)
        shape = sizes.most_common(1)[0][0] if size is None else (size, size)
        for split in parts:
            chosen = [image for image in images if image.split == split]
            labels = np.array([classes.index(image.label) for image in chosen], dtype=np.int64)
            splits.append((reading.decode_all(chosen, shape, gray), labels))
    except DataError as error:
        on_line = COMMAND_LINE in os.environ
        skip = "--skip-corrupt" if on_line else how_to_set("data.skip_corrupt", True)
        raise DataError(f"{error}. Replace it, or leave such images out with {skip}") from error
    resized = len(images) - sizes[shape]
    if resized:
        notes.append(f"{resized:,} of {len(images):,} images resized to {shape[1]} x {shape[0]}")
    name, note = path.resolve().name, "; ".join(notes)
    return from_splits(splits, name=name, classes=classes, augment=augment, note=note)
