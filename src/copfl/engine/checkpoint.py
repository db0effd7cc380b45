"""A simulation's whole state in one file with a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from copfl.core import tree
from copfl.errors import RunError
from copfl.files import write_with


def save(path: Path, trees: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Writes the trees, and `about`, what a reader must know of them, as one safetensors file with a checksum."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {
        f"{name}:{place}": t.detach().cpu().contiguous()
        for name, part in trees.items()
        for place, t in tree.named(part)
    }
    text = json.dumps(dict(about), sort_keys=True)
    # One entry: safetensors writes several in any order, and the same state should be the same bytes.
    head = {"copfl": json.dumps([text, _checksum(tensors, text)])}

    def write(part: Path) -> None:
        try:
            save_file(tensors, part, head)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    write_with(path, write)


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load(
    path: Path, like: Mapping[str, Any], renamed: Callable[[str], str] = str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trees, shaped and placed as in `like`, and `about`; a file that does not fit is refused by name.

    `renamed` is applied to the names of tensors that `like` does not have.
    """
    tensors, about = read(path)
    result: dict[str, Any] = {}
    for name, part in like.items():
        expected = dict(tree.named(part))
        found = {key.split(":", 1)[1]: t for key, t in tensors.items() if key.startswith(f"{name}:")}
        found = {key if key in expected else renamed(key): t for key, t in found.items()}
        if found.keys() != expected.keys():
            odd = sorted(found.keys() ^ expected.keys())
            raise RunError(f"{path} is not a checkpoint of this run: {name} differs in {', '.join(odd[:5])}")
        for place, t in expected.items():
            if found[place].shape != t.shape or found[place].dtype != t.dtype:
                raise RunError(
                    f"{path} is not a checkpoint of this run: {name}.{place} is {found[place].dtype} "
                    f"{list(found[place].shape)}, expected {t.dtype} {list(t.shape)}"
                )
        result[name] = tree.rebuild(part, [found[place].to(t.device) for place, t in expected.items()])
    return result, about


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name and `about`, out of one file."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise RunError(
            f"there is no checkpoint at {path}; the run ended before its first one, so start it again"
        )
    try:
        with safe_open(path, framework="pt") as file:
            text, checksum = json.loads((file.metadata() or {})["copfl"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        about: dict[str, Any] = json.loads(text)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunError(
            f"{path} is damaged ({error}); restore it from a copy, or start the run again"
        ) from error
    if checksum != _checksum(tensors, text):
        raise RunError(
            f"{path} is damaged (its checksum differs); restore it from a copy, or start the run again"
        )
    return tensors, about


def peek(path: Path, name: str) -> tuple[Tensor | None, dict[str, Any]]:
    """One tensor, None where there is none of this name, and `about`; quick, as nothing else is read or checked."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, Any] = json.loads(json.loads((file.metadata() or {})["copfl"])[0])
            return file.get_tensor(name) if name in file.keys() else None, about  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunError(
            f"{path} is damaged ({error}); restore it from a copy, or start the run again"
        ) from error
