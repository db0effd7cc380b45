"""Data in LEAF's layout: {train,test}/*.json, or one .json file, with the samples of every user.

A file has {"users": [...], "user_data": {USER: {"x": [...], "y": [...]}}}. The users are the natural clients.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from copfl.data import reading
from copfl.data.arrays import from_splits
from copfl.data.samples import NEXT_TOKEN, Dataset
from copfl.errors import DataError, at_least

LARGEST_FILE = 2048 * reading.MIB
Users = tuple[list[Any], list[Any], list[str]]  # x, y and the user of each sample
FEMNIST_CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def is_leaf(place: Path) -> bool:
    """Whether a path is a .json file or a folder with train/*.json."""
    return place.suffix == ".json" or any((place / "train").glob("*.json"))


def leaf(place: Path, *, users: int = 0, kind: str | None = None) -> Dataset:
    """A file or folder in LEAF's layout; `users` takes that many, those with the most samples."""
    name = place.stem if place.is_file() else place.resolve().name
    return from_splits(_parts(place, users), kind=kind, name=name, natural=True)


def femnist(data_dir: Path | None, *, users: int = 0) -> Dataset:
    """FEMNIST of LEAF: 28 x 28 images of 62 characters; the clients are the writers (users=N takes N)"""
    splits = []
    for x, y, user in _parts(_folder(data_dir, "femnist"), users):
        pixels = np.array(x, np.float32).reshape(-1, 28, 28)
        splits.append((np.rint(pixels * 255).astype(np.uint8), np.array(y, np.int64), user))
    return from_splits(splits, classes=FEMNIST_CLASSES, name="femnist", natural=True)


def shakespeare(data_dir: Path | None, *, users: int = 0) -> Dataset:
    """Shakespeare of LEAF: the next character of 80; the clients are the roles (users=N takes N)"""
    parts = _parts(_folder(data_dir, "shakespeare"), users)
    texts = [[x + y for x, y in zip(*part[:2], strict=True)] for part in parts]
    letters = sorted({letter for part in texts for text in part for letter in text})
    number = {letter: n for n, letter in enumerate(letters)}
    splits = []
    for (*_, user), lines in zip(parts, texts, strict=True):
        tokens = np.array([[number[letter] for letter in line] for line in lines], np.int64)
        splits.append((tokens[:, :-1], tokens[:, 1:], user))
    return from_splits(splits, classes=letters, kind=NEXT_TOKEN, name="shakespeare", natural=True)


def _folder(data_dir: Path | None, name: str) -> Path:
    """The folder with train/ and test/, at LEAF's own place for it or directly in the data folder."""
    return reading.found(data_dir, f"leaf/data/{name}/data", f"{name}/data", name)


def _parts(place: Path, users: int) -> list[Users]:
    """Train and test, or all samples of one file, user by user; without users who have no train sample."""
    at_least(0, users=users)
    if place.is_file():
        files: list[Sequence[Path]] = [[place]]
    else:
        files = [sorted((place / split).glob("*.json")) for split in ("train", "test")]
        if not all(files):
            raise DataError(f"{place} lacks train/*.json or test/*.json")
    data = [_user_data(split) for split in files]
    names = sorted(data[0], key=lambda user: (-len(data[0][user]["y"]), user))
    kept = [user for user in names[: users or None] if all(user in split for split in data)]
    return [
        (
            [x for user in kept for x in split[user]["x"]],
            [y for user in kept for y in split[user]["y"]],
            [user for user in kept for _ in split[user]["y"]],
        )
        for split in data
    ]


def _user_data(files: Sequence[Path]) -> dict[str, dict[str, list[Any]]]:
    found: dict[str, dict[str, list[Any]]] = {}
    for path in files:
        with reading.naming(str(path), "LEAF file"):
            content = json.loads(reading.read_bytes(path, LARGEST_FILE))
            users = content["user_data"] if isinstance(content, dict) and "user_data" in content else None
            if not isinstance(users, dict):
                raise DataError(f'{path} has no "user_data": {{USER: {{"x": [...], "y": [...]}}}}')
            for user, samples in users.items():
                if not isinstance(samples, dict) or len(samples.get("x", ())) != len(samples.get("y", "?")):
                    raise DataError(f"{path}: the user {user!r} has not as many x as y")
                if samples["y"]:
                    found[user] = samples
    if not found:
        raise DataError(f"{', '.join(map(str, files))} has no samples")
    return found
