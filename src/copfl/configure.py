"""From names and keyword arguments, as people write them, to values: checked against the signatures they are for."""

from __future__ import annotations

import dataclasses
import inspect
import math
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from copfl.errors import UsageError, unknown
from copfl.optim import Adam, Optimizer, Sgd
from copfl.parts.mamo import Mamo

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "mamo": Mamo, "sgd": Sgd}


def keywords_of(factory: Callable[..., Any], skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keyword arguments a factory takes, with their defaults."""
    parameters = inspect.signature(factory).parameters
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: p.default for name, p in parameters.items() if name not in skip and p.kind not in kinds}


def checked(
    what: str, factory: Callable[..., Any], given: Mapping[str, Any], skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The given keywords with the types that the factory wants; a misspelt or misfit one is an error that names it."""
    known = keywords_of(factory, skip)
    hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    result = {}
    for name, value in given.items():
        if name not in known:
            raise unknown(f"{what} option", name, known)
        result[name] = _fit(f"{what}.{name}", value, hints.get(name, Any))
    return result


def _fit(name: str, value: Any, hint: Any) -> Any:
    options = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    for option in options:
        if option is Any or (option is type(None) and value is None):
            return value
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            if math.isnan(value):
                raise UsageError(f"{name}={value} is not a number")
            return float(value)
        if option in (int, bool, str) and type(value) is option:
            return value
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(value)
    names = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise UsageError(f"{name}={value!r} must be of type {names}")


def algorithm_of(
    registry: Mapping[str, Callable[..., Any]], name: str, given: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> Any:
    """The algorithm by name, with its own keywords and with the optimizer that another table describes."""
    if name not in registry:
        raise unknown("algorithm", name, registry)
    factory = registry[name]
    keywords = checked(name, factory, given, skip=("optimizer",))
    if optimizer:
        keywords["optimizer"] = optimizer_of(factory, optimizer)
    return factory(**keywords)


def optimizer_of(factory: Callable[..., Any], given: Mapping[str, Any]) -> Optimizer:
    """The optimizer that `given` describes; without a name, the algorithm's own with these numbers changed."""
    default = keywords_of(factory)["optimizer"]
    name = given.get("name", type(default).__name__.lower())
    if name not in OPTIMIZERS:
        raise unknown("optimizer", str(name), OPTIMIZERS)
    numbers = checked(str(name), OPTIMIZERS[name], {k: v for k, v in given.items() if k != "name"})
    if type(default).__name__.lower() == name:
        return typing.cast(Optimizer, dataclasses.replace(default, **numbers))
    return OPTIMIZERS[name](**numbers)


def setting(text: str) -> tuple[str, str, Any]:
    """("copfl", "rate", 0.15) out of "copfl.rate=0.15"; the value is read as TOML, or else as a plain word."""
    path, equals, value = text.partition("=")
    table, dot, key = path.strip().partition(".")
    if not (equals and dot and table and key):
        raise UsageError(f'--set "{text}" must look like TABLE.KEY=VALUE, such as --set copfl.rate=0.15')
    try:
        return table, key, tomllib.loads(f"v = {value.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        return table, key, value.strip()


def as_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The tables as TOML text."""
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text) + '"'


def read_toml(text: str, source: str) -> dict[str, dict[str, Any]]:
    """The tables of a run file."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not valid TOML: {error}") from error
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(
                f'{source}: "{name}" stands outside any table; a run file has tables such as [run] and [algorithm]'
            )
    return tables
