"""The reader of folders that somebody else may have written: data, inside the folder, in printable text.

Every command that opens a model, a run, a comparison, a record or a node's folder reads its JSON, TOML and
paths here. Code is never among what is read: see `copfl.settings.named_code`.
"""

import contextlib
import json
import os
import tomllib
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from copfl.errors import RunError, raised_as, to_resume

T = TypeVar("T")

MOST_BYTES = 2**30  # of one file; the partition of a hundred million samples has fewer
MOST_DEPTH = 64  # lists and tables within each other
MOST_BITS = 1024  # of a whole number; Python refuses to print larger ones
# Controls, surrogates, separators of lines and paragraphs, and invisible characters: those that move a cursor,
# begin a line or reverse a text. The two joiners are letters' spelling in Persian and Indic scripts.
CATEGORIES, JOINERS = ("Cc", "Cs", "Cf", "Zl", "Zp"), "\u200c\u200d"

# What content of another type or shape than copfl writes leads to, where it is used.
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def printable(text: str) -> str:
    r"""The text with every character that a terminal obeys, instead of showing it, as "\x1b"."""
    if text.isprintable():
        return text
    return "".join(
        ascii(c)[1:-1] if unicodedata.category(c) in CATEGORIES and c not in JOINERS else c for c in text
    )


def printable_lines(text: str) -> str:
    """The text of a file, each of its lines printable."""
    return "\n".join(map(printable, text.split("\n")))


def cleaned(content: Any) -> Any:
    """What a JSON or TOML file has, with printable texts; ValueError where it is deeper than any of copfl's."""
    return _cleaned(content, MOST_DEPTH)


def require_shallow(content: Any, depth: int = MOST_DEPTH) -> None:
    """ValueError where lists and tables are deeper within each other than any of copfl's."""
    if isinstance(content, dict | list):
        if not depth:
            raise ValueError(f"it is deeper than {MOST_DEPTH} levels")
        for item in content.values() if isinstance(content, dict) else content:
            require_shallow(item, depth - 1)


def _cleaned(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"a whole number has more than {MOST_BITS} bits")
    if not isinstance(value, dict | list):
        return value
    if not depth:
        raise ValueError(f"it is deeper than {MOST_DEPTH} levels")
    if isinstance(value, list):
        if all(type(item) in (int, float) for item in value):  # the samples of a client, in millions
            return value
        return [_cleaned(item, depth - 1) for item in value]
    return {printable(key): _cleaned(item, depth - 1) for key, item in value.items()}


def _parsed(parse: Callable[[str], Any], text: str | bytes) -> Any:
    try:
        return cleaned(parse(text.decode() if isinstance(text, bytes) else text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_of(text: str | bytes) -> Any:
    """The content of JSON text; ValueError for anything else."""
    return _parsed(json.loads, text)


def toml_of(text: str | bytes) -> dict[str, Any]:
    """The content of TOML text; ValueError for anything else."""
    content: dict[str, Any] = _parsed(tomllib.loads, text)
    return content


def read_bytes(path: Path) -> bytes:
    """The content of a plain file; OSError where it is none, such as a pipe that never ends."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(f"{path} is no file")
    if path.exists() and path.stat().st_size > MOST_BYTES:
        raise OSError(f"{path} has more than {MOST_BYTES:,} bytes")
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """The content of a JSON file; OSError or ValueError where it cannot be read."""
    return json_of(read_bytes(path))


def of_run(path: Path, parse: Callable[[Any], T]) -> T | None:
    """What a file of JSON in a run folder says, None where there is no file; RunError if it is damaged.

    Args:
        path: The file, which a run writes again.
        parse: Makes the value of its content.
    """
    if not path.is_file():
        return None
    damaged = f"cannot read {path} ({{}}); delete it, and {to_resume(path.parent)} makes it again"
    with raised_as(RunError, damaged, OSError, *DAMAGE):
        return parse(read_json(path))


def inside(folder: Path, path: Path) -> Path:
    """The path, if it and every file below it are in the folder, also after links; RunError if not.

    Args:
        folder: What was sent.
        path: A file or folder of it.
    """
    root = folder.resolve()
    # A plain file or folder of a place inside is inside; what else there is may lead anywhere.
    for place in (path, *_neither_file_nor_folder(path)):
        if not place.resolve().is_relative_to(root):
            raise RunError(f"{place} leads out of {folder}, to {place.resolve()}; take a complete copy")
        if place.exists() and not (place.is_file() or place.is_dir()):
            raise RunError(f"{place} is no file, but a pipe or a device; take a complete copy")
    return path


def _neither_file_nor_folder(path: Path) -> Iterator[Path]:
    """What is below a folder and is a link, a pipe or a device; links are not followed."""
    folders = [path] if path.is_dir() else []
    while folders:
        with contextlib.suppress(PermissionError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)
