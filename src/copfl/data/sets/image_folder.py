"""A folder of images as a data set.

`datasets.load` comes here with the path of a folder.
"""

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

SPLITS = ("train", "test")  # in small or capital letters
IMAGE_PATHS = (
    "<class>/*.png or *.jpg; or <client>/<class>/*.png or *.jpg; either may be in train/ and test/, and a "
    "client may have these itself"
)
OTHER_FORMATS = (".bmp", ".dcm", ".gif", ".heic", ".jfif", ".tif", ".tiff", ".webp")
ARCHIVERS_FOLDER = "__MACOSX"  # beside the images in archives that a Mac made; it has none


def image_folder(
    path: Path,
    *,
    size: int | None = None,
    gray: bool = False,
    augment: bool = False,
    skip_corrupt: bool = False,
) -> Dataset:
    """A folder [{train,test}/][<client>/]<class>/*.png|jpg, at one size; without splits a fifth of the images is test.

    Images are upright, as a camera notes it. A note counts those that are left out: hidden ones, of other
    formats, or in no folder of a class.

    Args:
        path: The folder.
        size: Pixels of a side; None: the most frequent size of the images.
        gray: Whether the images are read without colour.
        augment: Whether training images get random crops and flips.
        skip_corrupt: Whether damaged images are left out; else they are an error.
    """
    images = reading.image_files(path, _folders)
    unread = _left_out(path, any(_split_of(image.split) for image in images))
    notes, but = ([unread], f"; {unread}") if unread else ([], "")
    if skip_corrupt:
        count, images = len(images), reading.intact(images)
        notes.insert(0, f"{count - len(images):,} of {count:,} images are corrupt and were skipped")
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
    used = {folder for image in images for folder in Path(image.source).parents}
    in_train = [folder for folder in path.glob("*/") if folder.name.lower() == "train"]
    for folder in sorted(child for parent in in_train or [path] for child in parent.glob("[!.]*/")):
        if folder not in used and folder.name != ARCHIVERS_FOLDER:
            raise DataError(f"{folder} has no images (*.png, *.jpg){but}")
    if not classes:
        raise DataError(f"no images; expected {IMAGE_PATHS}{but}")
    if extra := {image.label for image in images} - set(classes):
        raise DataError(f"test/ has a class {min(extra)} which train/ lacks")
    splits = []
    try:
        sizes = Counter(reading.image_size(image.read(), image.source, upright=True) for image in images)
        shape = sizes.most_common(1)[0][0] if size is None else (size, size)
        for split in parts:
            chosen = [image for image in images if image.split == split]
            labels = np.array([classes.index(image.label) for image in chosen], dtype=np.int64)
            owners = [np.array([image.client for image in chosen])] if any(clients) else []
            pixels = reading.decode_all(chosen, shape, gray, upright=True)
            splits.append((pixels, labels, *owners))
    except DataError as error:
        on_line = COMMAND_LINE in os.environ
        skip = "--skip-corrupt" if on_line else how_to_set("data.skip_corrupt", True)
        raise DataError(f"{error}. Replace it, or leave such images out with {skip}") from error
    resized = len(images) - sizes[shape]
    if resized:
        notes.append(f"{resized:,} of {len(images):,} images resized to {shape[1]} x {shape[0]}")
    name, note = path.resolve().name, "; ".join(notes)
    return from_splits(splits, name=name, classes=classes, augment=augment, note=note)


def _is_hidden(path: PurePosixPath) -> bool:
    return any(name.startswith(".") or name == ARCHIVERS_FOLDER for name in path.parts)


def _folders(path: PurePosixPath) -> tuple[str, str] | None:
    """The folders above the folder of an image's class, and its class."""
    *above, label, _ = ("", *path.parts)
    return None if _is_hidden(path) or not label else ("/".join(above[1:]), label)


def _left_out(path: Path, has_splits: bool) -> str:
    """How many images of the folder are not read, why, and the first of each kind; "" if all are."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for member in reading.members(path):
        if reason := _why_not(PurePosixPath(member.name), has_splits):
            first.setdefault(reason, member.name)
            counts[reason] += 1
    kinds = [f"{count:,} {reason} ({first[reason]})" for reason, count in counts.items()]
    return f"images that are left out: {', '.join(kinds)}" if kinds else ""


def _why_not(path: PurePosixPath, has_splits: bool) -> str:
    """Why an image in the folder is not read; "" if it is, or is none."""
    suffix = path.suffix.lower()
    if suffix not in (*reading.IMAGES, *OTHER_FORMATS) or path.name.startswith("._"):  # of a Mac's Finder
        return ""
    if _is_hidden(path):
        return "in hidden files or folders"
    if suffix in OTHER_FORMATS:
        return "neither PNG nor JPEG"
    if len(path.parts) == 1:
        return "in no folder of a class"
    return "in neither train/ nor test/" if has_splits and not _split_of(str(path.parent.parent)) else ""


def _split_of(folders: str) -> str:
    """The first of these folders that is called train or test; "" if none is."""
    return next((name for name in folders.split("/") if name.lower() in SPLITS), "")


def _by_split(images: Sequence[ImageFile]) -> tuple[tuple[str, ...], list[ImageFile]]:
    """The splits, and their images; the folders above the folder of an image's class become its split and client."""
    names = [_split_of(image.split) for image in images]
    if not any(names):
        return ("",), [image._replace(split="", client=image.split) for image in images]
    present = {name.lower() for name in names}
    for split, other in (SPLITS, SPLITS[::-1]):
        if split not in present:
            raise DataError(
                f"there is a folder {other}/ but none {split}/ with images; expected {IMAGE_PATHS}"
            )
    return SPLITS, [
        image._replace(split=name.lower(), client=_without(image.split, name))
        for image, name in zip(images, names, strict=True)
        if name
    ]


def _without(folders: str, name: str) -> str:
    """The folders but the first of this name."""
    names = folders.split("/")
    names.remove(name)
    return "/".join(names)
