"""Policies as files: read for every message, written for the owner.

`policy_of` is a node's, `server_policy` the server's. Without a file a node has the default policy, which allows
copfl's own names and signed proposals; a server allows unsigned runs too, because nodes have their own say.
"""

import dataclasses
import json
import os
import shlex
import stat
import tomllib
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from copfl.errors import UsageError, raised_as, unknown
from copfl.federation.policy.record import OPEN, Policy
from copfl.federation.policy.refusal import shown
from copfl.files import write_bytes
from copfl.settings.toml import written

FILE = "policy.toml"  # in the folder of a server's app, or in a node's state-dir
VARIABLE = "COPFL_POLICY"  # the path of a server's policy, if it is another file
STRICT = Path(__file__).parent / "strict.txt"


def read_policy(path: Path) -> Policy:
    """The policy in a TOML file; UsageError names a line that is none, or of another type."""
    with raised_as(UsageError, f"the policy {path} cannot be read: {{}}", OSError):
        content, mode = path.read_bytes(), path.stat().st_mode
        if mode & (
            stat.S_IWGRP | stat.S_IWOTH
        ):  # as ssh has it for its settings: who reads it can do nothing
            raise UsageError(
                f"others on this machine can write the policy {path}, whose mode is {mode & 0o777:04o}: "
                f"`chmod go-w {shlex.quote(str(path))}`, after you have read it"
            )
    return _parsed(path, content)


@lru_cache(maxsize=8)  # a node reads it for every message
def _parsed(path: Path, content: bytes) -> Policy:
    with raised_as(UsageError, f"the policy {path} is not valid TOML: {{}}", ValueError, RecursionError):
        table = tomllib.loads(content.decode())
    with raised_as(UsageError, f"the policy {path}: {{}}", UsageError):
        return policy_from(table)


def policy_from(table: Mapping[str, Any]) -> Policy:
    """The policy that a table describes, such as `policy_table` gives."""
    policy: Policy = _record(Policy, table, "")
    return policy


def _record(kind: Any, table: Any, title: str) -> Any:
    """The record that a table describes."""
    if not isinstance(table, dict):
        raise UsageError(f"{title} must be a table")
    hints = typing.get_type_hints(kind)
    for name in table:
        if name not in hints:
            raise unknown(f"line in {title or 'the policy'}", name, hints)
    values = {
        name: _value(hints[name], value, f"{title}.{name}".lstrip(".")) for name, value in table.items()
    }
    needed = [name for name in getattr(kind, "_fields", ()) if name not in kind._field_defaults]
    if missing := [name for name in needed if name not in values]:
        raise UsageError(f"{title} needs {missing[0]}")
    return kind(**values)


def _value(hint: Any, value: Any, line: str) -> Any:
    """The value as the type of a record's field."""
    if isinstance(hint, types.GenericAlias):
        if not isinstance(value, list):
            raise UsageError(f"{line} must be a list")
        return tuple(_value(hint.__args__[0], entry, line) for entry in value)
    if hint in (Path, Path | None) and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) in (int, float):
        return float(value)
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return _record(hint, value, line)
    if hint not in (bool, int, str) or type(value) is not hint:
        raise UsageError(f"{line}={shown(value)} must be {getattr(hint, '__name__', hint)}")
    return value


def policy_of(named: Path | None, state_dir: Path) -> Policy:
    """A node's policy: the file that its owner named, or else the one in its state-dir.

    Args:
        named: The owner's choice; None: there is none.
        state_dir: The node's folder.
    """
    path = (named or state_dir / FILE).expanduser()
    return read_policy(path) if named or path.exists() else Policy()


def server_policy() -> Policy:
    """The policy of a server: the file that COPFL_POLICY names, or the one in the folder of its SuperLink."""
    named = os.environ.get(VARIABLE)
    path = Path(named) if named else Path(FILE)
    return read_policy(path) if named or path.exists() else OPEN  # nodes have their own say


def write_policy(path: Path, policy: Policy) -> Path:
    """Writes what differs from the usual policy, readable by its owner alone.

    Args:
        path: The file.
        policy: What it says.
    """
    usual, table = dataclasses.asdict(Policy()), policy_table(policy)
    path.parent.mkdir(parents=True, exist_ok=True)
    changed = {line: value for line, value in table.items() if value and value != usual[line]}
    write_bytes(path, written(changed).encode(), private=True)
    return path


def policy_table(policy: Policy) -> dict[str, Any]:
    """The lines of a policy as numbers, texts, lists and tables."""
    entered = {
        title: [
            {name: str(value) for name, value in entry._asdict().items() if value not in (None, "")}
            for entry in getattr(policy, title)
        ]
        for title in ("code", "bases", "files")
    }
    return dataclasses.asdict(policy) | entered


def strict() -> str:
    """The text of a policy that allows little, with a comment on every line."""
    usual = dataclasses.asdict(Policy())
    names = {line: json.dumps(value) for line, value in usual.items() if isinstance(value, tuple)}
    return STRICT.read_text().format(**names)


def write_strict(path: Path) -> None:
    """Writes the strict policy as a new file of its owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, strict().encode(), private=True)
