"""Folders of somebody who wants to run code, and what watches whether any is run."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import copfl
from tests.slow import SLOW

# Modules that nothing of copfl needs: the attacker's in the current folder, of the standard library and installed.
BAIT = ("evilmod", "evilpkg", "antigravity", "this", "turtledemo", "pip", "mypy")
PROGRAM = (
    "from pathlib import Path\nPath({mark!r}).write_text('run')\nclass Net: pass\ndef f(*a, **k): pass\n"
)
COMMANDS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "socket.connect",
    "pty.spawn",
)
LIBRARIES = tuple(
    str(Path(place).resolve())
    for place in {
        *sysconfig.get_paths().values(),
        sys.prefix,
        sys.base_prefix,
        str(Path(copfl.__file__).parents[2]),
    }
)
SYSTEM = ("/proc", "/sys", "/dev", "/etc/localtime", "/usr/share/zoneinfo", "/usr/lib", "/lib")


class Watch:
    """What Python reports while a block is entered: imports, code that is executed, programs and files."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] | None = None
        sys.addaudithook(self._hook)  # for ever: it can only be switched off

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.seen is None:
            return
        if event in COMMANDS or event == "import":
            self.seen.append((event, str(args[0])))
        elif event == "exec":
            self.seen.append((event, str(getattr(args[0], "co_filename", args[0]))))
        elif event == "open" and isinstance(args[0], str | bytes):
            self.seen.append((event, os.fsdecode(args[0])))

    @contextlib.contextmanager
    def on(self) -> Iterator[list[tuple[str, str]]]:
        found: list[tuple[str, str]] = []
        self.seen = found
        before = {*sys.modules}
        try:
            yield found
        finally:
            self.seen = None
            # An import statement is reported, and importlib.import_module is not.
            found += [("import", name) for name in sys.modules.keys() - before]


WATCH = Watch()


def forbidden(seen: Sequence[tuple[str, str]], *folders: Path) -> list[tuple[str, str]]:
    """What opening a folder may not do: import bait, start a program, connect, or read and execute elsewhere."""
    readable = (*LIBRARIES, *SYSTEM, *(str(folder.resolve()) for folder in folders))

    def is_wrong(event: str, what: str) -> bool:
        if event in COMMANDS:
            return True
        if event == "import":
            return what.partition(".")[0] in BAIT
        if event == "exec":  # "<string>" and the like: dataclasses, namedtuples, templates
            return not what.startswith(("<", *LIBRARIES)) and not os.path.realpath(what).startswith(LIBRARIES)
        return os.path.isabs(what) and not os.path.realpath(what).startswith(readable)

    return [one for one in seen if is_wrong(*one)]


def bait(folder: Path) -> Path:
    """A folder with the attacker's modules; the result is the file that exists once one of them was run."""
    mark = folder.parent / "was-run"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evilpkg").mkdir(exist_ok=True)
    for name in ("evilmod.py", "evilpkg/__init__.py", "evilpkg/sub.py"):
        (folder / name).write_text(PROGRAM.format(mark=str(mark)))
    return mark


# Random changes of a file

COUNT = 1000 if SLOW else 50  # versions of each file; the rare ones are found every night, with COPFL_SLOW=1

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    3,
    2**31,
    10**30,
    1e308,
    float("nan"),
    "",
    "x",
    "evilmod:Net",
    "subprocess:run",
    "../../../etc",
    "/etc/passwd",
    "\x1b[31mred\x07",
    "\u202egnp.exe",
    [],
    {},
    [[]],
    {"name": "evilmod:f"},
    ["evilmod:f"],
)


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a document."""
    items: Any = content.items() if isinstance(content, dict) else enumerate(content)
    found = []
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, dict | list) and len(value) < 50:
            found += places(value, (*path, key))
    return found


def mutated(content: Any, rng: random.Random) -> Any:
    """The same object, with one to three values replaced, removed, repeated or added."""
    changed = content
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        options = places(changed)
        if not options:
            break
        *path, last = rng.choice(options)
        holder = changed
        for key in path:
            holder = holder[key]
        kind = rng.random()
        if kind < 0.75:
            holder[last] = copy.deepcopy(rng.choice(VALUES))
        elif kind < 0.9:
            del holder[last]
        elif isinstance(holder, dict):
            holder[rng.choice(("code", "value", "name", "extra", "\x1b]0;t\x07"))] = copy.deepcopy(
                rng.choice(VALUES)
            )
        else:
            holder.append(holder[last])
    return changed


def garbled(content: bytes, rng: random.Random) -> bytes:
    """The bytes of a file, with some changed, cut off or repeated."""
    result = bytearray(content)
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(result) + 1)
        match rng.randrange(4):
            case 0:
                result[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del result[at : at + rng.randrange(40)]
            case 2:
                result[at:at] = rng.choice(
                    (b"[" * 5000, b'{"a":' * 3000, b"\x00", b"9" * 5000, b"\xff\xfe", b'"', b"nan")
                )
            case _:
                result[at:at] = result[at : at + rng.randrange(60)]
    return bytes(result)


def versions(
    original: bytes, write: Callable[[Any], str], read: Callable[[str], Any], count: int
) -> Iterator[bytes]:
    """So many changed versions of a file: four fifths are still documents of its format."""
    rng = random.Random(20261118)
    for n in range(count):
        if n % 5:
            try:
                yield write(mutated(read(original.decode()), rng)).encode("utf-8", "surrogatepass")
                continue
            except (TypeError, ValueError):  # what the format cannot express
                pass
        yield garbled(original, rng)


def json_versions(original: bytes, count: int) -> Iterator[bytes]:
    return versions(original, json.dumps, json.loads, count)
