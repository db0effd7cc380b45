"""Folders and archives of images, <class>/*.png or *.jpg: found in the order of their names, still encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.data import reading
from copfl.errors import DataError


class Picture(NamedTuple):
    split: str
    label: str
    file: str  # its name
    place: str  # where it is, for messages
    read: Callable[[], bytes]


def find_pictures(folder: Path, root: str) -> list[Picture]:
    """The images of root/{train,test}/<class>/ in a folder, or in an archive in it; in the order of their names."""
    if (folder / root).is_dir():
        place = folder / root
        pictures = [p for split in ("train", "test") for p in folder_pictures(place / split, split)]
    else:
        archives = [path for suffix in (".tar.gz", ".tar") if (path := folder / f"{root}{suffix}").is_file()]
        archives += [
            path for path in sorted(folder.glob("*.tar")) if path not in archives and _begins_in(path, root)
        ]
        if not archives:
            raise DataError(
                f"{folder} holds neither {root}/ nor {root}.tar nor another .tar with a folder {root}/"
            )
        place = archives[0]
        pictures = sorted(_archived_pictures(place), key=lambda p: (p.split, p.label, p.file))
    if not pictures:
        raise DataError(f"{place} holds no images; expected {root}/{{train,test}}/<class>/*.png or *.jpg")
    return pictures


def folder_pictures(folder: Path, split: str) -> Iterator[Picture]:
    """The images of folder/<class>/."""
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist")
    for label in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        files = sorted(path for path in label.iterdir() if _is_image(path.name))
        if not files:
            raise DataError(f"{label} holds no images (*.png, *.jpg)")
        for path in files:
            read = partial(reading.read_bytes, path, reading.LARGEST_IMAGE_FILE)
            yield Picture(split, label.name, path.name, str(path), read)


def _archived_pictures(archive: Path) -> Iterator[Picture]:
    """The images of {train,test}/<class>/ in an archive, still encoded, in memory."""
    for member in reading.members(archive):
        split, label, file = ("", "", *PurePosixPath(member.name).parts)[-3:]
        if split in ("train", "test") and _is_image(file):
            raw = reading.read_member(archive, member, reading.LARGEST_IMAGE_FILE)
            yield Picture(split, label, file, f"{archive} ({member.name})", lambda raw=raw: raw)  # type: ignore[misc]


def _begins_in(archive: Path, root: str) -> bool:
    """Whether the first file of an archive lies in the folder `root`; a file that is no archive does not."""
    try:
        first = next(reading.members(archive), None)
    except DataError:
        return False
    return first is not None and PurePosixPath(first.name).parts[0] == root


def _is_image(name: str) -> bool:
    return name.lower().endswith(reading.IMAGE_SUFFIXES) and not name.startswith(".")


def labels_of(pictures: Sequence[Picture], classes: Sequence[str], split: str) -> NDArray[np.int64]:
    """The labels of the pictures of one split, in which every class must occur."""
    number = {label: position for position, label in enumerate(classes)}
    labels = np.array([number[picture.label] for picture in pictures], dtype=np.int64)
    if missing := sorted(set(classes) - {picture.label for picture in pictures}):
        named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise DataError(
            f"{split}/ lacks images of {len(missing)} classes ({named}); both splits must hold every class"
        )
    return labels
