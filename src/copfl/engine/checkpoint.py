"""A simulation's whole state in one safetensors file with a checksum.

A run folder writes and reads it; the report looks into it.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from copfl import foreign, wire
from copfl.core import tree
from copfl.errors import RunError, WireError
from copfl.files import write_with

UNKNOWN = "0" * 64  # a checksum until it is computed


def save(path: Path, trees: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Writes the trees and `about`, small facts that identify them.

    Args:
        path: Of the file.
        trees: Records of tensors by name.
        about: Small facts that identify them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {
        f"{name}:{key}": t.detach().cpu().contiguous()
        for name, record in trees.items()
        for key, t in tree.named(record)
    }
    tensors = wire.separate(tensors)
    text = json.dumps(dict(about), sort_keys=True)
    # One entry: safetensors writes several in any order, and the same state should be the same bytes.
    head = {"copfl": json.dumps([text, UNKNOWN])}
    with ThreadPoolExecutor(1) as thread:  # the checksum takes as long as the disk
        checksum = thread.submit(_checksum, tensors, text)

        def write(temporary: Path) -> None:
            try:
                save_file(tensors, temporary, head)
            except SafetensorError as error:
                raise OSError(str(error)) from error
            _fill_in(temporary, checksum.result())

        write_with(path, write)


def _fill_in(path: Path, checksum: str) -> None:
    """Writes the checksum to its place in the head of the file."""
    with path.open("r+b") as file:
        head = file.read(int.from_bytes(file.read(8), "little"))
        file.seek(8 + head.index(f'\\"{UNKNOWN}\\"]'.encode()) + 2)
        file.write(checksum.encode())


def load(path: Path, like: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trees, with the shapes and devices of `like`, and `about`; RunError where the file does not fit.

    Args:
        path: Of the file.
        like: Records by name, with the shapes and devices that are expected.
    """
    tensors, about = read(path)
    result: dict[str, Any] = {}
    for name, record in like.items():
        expected = dict(tree.named(record))
        stored = {key.removeprefix(f"{name}:"): t for key, t in tensors.items() if key.startswith(f"{name}:")}
        try:
            values = [
                wire.take(stored, key_of_value, t.shape, t.dtype).to(t.device)
                for key_of_value, t in expected.items()
            ]
            wire.refuse_rest(stored)
        except WireError as error:
            raise RunError(f"{path} is not a checkpoint of this run: in {name}, {error}") from error
        result[name] = tree.rebuild(record, values)
    return result, about


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name and `about`, after the checksum was compared."""
    if not path.is_file():
        raise RunError(
            f"there is no checkpoint at {path}; the run ended before its first one, so start it again"
        )
    with _opened(path) as (file, text, checksum):
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        if checksum != _checksum(tensors, text):
            raise ValueError("its checksum differs")
        return tensors, foreign.json_of(text)


def peek(path: Path, name: re.Pattern[str] | None = None) -> tuple[Tensor | None, dict[str, Any]]:
    """The tensor of this name, None where it is missing, and `about`; nothing else is read or compared.

    Args:
        path: Of the file.
        name: A pattern; the first tensor whose name fits is read. None: no tensor is.
    """
    with _opened(path) as (file, text, _):
        names = [key for key in file.keys() if name is not None and name.fullmatch(key)]  # noqa: SIM118
        return file.get_tensor(names[0]) if names else None, foreign.json_of(text)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, str, str]]:
    """The file, the text of `about` and the checksum; RunError if something in it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            text, checksum = foreign.json_of((file.metadata() or {})["copfl"])
            yield file, text, checksum
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunError(
            f"{path} is damaged ({error}); restore it from a copy, or start the run again"
        ) from error


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
