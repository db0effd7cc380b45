"""From names and keyword arguments, as people write them, to values: checked against the signatures they are for."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from copfl.core.optim import Adam, Optimizer, Sgd
from copfl.errors import UsageError, unknown
from copfl.experiment.migration import migrated
from copfl.parts.mamo import Mamo
from copfl.wrappers.robust import ROBUST_RULES

Tables = dict[str, dict[str, Any]]  # by title, as in a TOML file

LARGEST = 1e30  # what is set by name must fit into float32, and so must ten times as much
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "mamo": Mamo, "sgd": Sgd}


def keywords_of(factory: Callable[..., Any], skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keyword arguments a factory takes, with their defaults."""
    return {name: default for name, default in _known(_defaults, factory).items() if name not in skip}


# A thousand records are checked against the same dozen signatures, so what was read of one is remembered.


def _known(cached: Any, factory: Callable[..., Any]) -> Mapping[str, Any]:
    """What was found out of the factory, or is now; an object of a user's own may have no hash to remember it by."""
    try:
        hash(factory)
    except TypeError:
        return cached.__wrapped__(factory)  # type: ignore[no-any-return]
    return cached(factory)  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _defaults(factory: Callable[..., Any]) -> Mapping[str, Any]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(factory).parameters.values()
    result = {p.name: p.default for p in parameters if p.kind not in kinds} | _made_defaults(factory)
    for name, part in _known(_parts, factory).items():
        del result[name]
        result |= vars(part)
    return result


def _made_defaults(factory: Any) -> dict[str, Any]:
    """The defaults of a dataclass that a default_factory makes."""
    fields = dataclasses.fields(factory) if dataclasses.is_dataclass(factory) else ()
    return {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}


@lru_cache(maxsize=256)
def _parts(factory: Callable[..., Any]) -> Mapping[str, Any]:
    """The parts of an algorithm, such as Pwpm, by field; a part's options are options of the algorithm."""
    defaults = _made_defaults(factory)
    return {
        name: value
        for name, value in defaults.items()
        if type(value).__module__.startswith("copfl.parts.") and name != "optimizer"
    }


def built(factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """The value with these options, those of its parts among them."""
    given = dict(options)
    parts = {
        field: dataclasses.replace(part, **{name: given.pop(name) for name in vars(part) if name in given})
        for field, part in _known(_parts, factory).items()
    }
    return factory(**given, **parts)


@lru_cache(maxsize=256)
def _hints(factory: Callable[..., Any]) -> Mapping[str, Any]:
    makers = [factory, *(type(part) for part in _known(_parts, factory).values())]
    try:
        hints = [typing.get_type_hints(m.__init__ if inspect.isclass(m) else m) for m in makers]
    except (NameError, TypeError):  # in code that is not ours, annotations may name what is not there
        return {}
    return {name: hint for one in hints for name, hint in one.items()}


def checked(
    what: str, factory: Callable[..., Any], given: Mapping[str, Any], skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The given keywords with the types that the factory wants; a misspelt or misfit one is an error that names it."""
    known, hints = keywords_of(factory, skip), _known(_hints, factory)
    result = {}
    for name, value in given.items():
        if name not in known:
            raise unknown(f"{what} option", name, known)
        result[name] = _fit(f"{what}.{name}", value, hints.get(name, Any))
    return result


WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    type(None): "left out",
}


def _fit(name: str, value: Any, hint: Any) -> Any:
    """The value as the type of the hint, which is a plain type, a tuple of one, or a choice of those."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = typing.get_args(hint) if union else (hint,)
    for option in options:
        if option in (int, bool, str) and type(value) is option:
            return value
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:  # a whole number of hundreds of digits
                number = math.inf
            if not abs(number) <= LARGEST:
                raise UsageError(f"{name}={str(value)[:40]} must be a finite number of at most {LARGEST:g}")
            return number
        if typing.get_origin(option) is tuple:
            inner = typing.get_args(option)[0]
            parts = value if isinstance(value, list | tuple) else (value,)  # one is a list of one
            return tuple(_fit(name, part, inner) for part in parts)
        if (option is type(None) and value is None) or option not in WORDS:
            return value  # what is not plain is for the factory to judge
    raise UsageError(f"{name}={value!r} must be {' or '.join(WORDS[o] for o in options)}")


def algorithm_of(
    registry: Mapping[str, Callable[..., Any]],
    name: str,
    given: Mapping[str, Any],
    optimizer: Mapping[str, Any],
) -> Any:
    """The algorithm by name, with its own keywords and with the optimizer that another table describes."""
    if name not in registry:
        raise unknown("algorithm", name, registry)
    factory = registry[name]
    keywords = checked(name, factory, given, skip=("optimizer",))
    if optimizer:
        keywords["optimizer"] = optimizer_of(factory, optimizer)
    return built(factory, keywords)


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


def with_robust_rule(name: str, algorithm: Any, options: Mapping[str, Any]) -> Any:
    """The algorithm with the guard of this name around it, its options checked."""
    if name not in ROBUST_RULES:
        raise unknown("robust rule", name, ROBUST_RULES)
    return ROBUST_RULES[name](algorithm, **checked("robust", ROBUST_RULES[name], options, ("algorithm",)))


def setting(text: str) -> tuple[str, str, Any]:
    """("copfl", "rate", 0.15) out of "copfl.rate=0.15"; the value is read as TOML, or else as a plain word."""
    path, equals, value = text.partition("=")
    table, dot, key = path.strip().partition(".")
    if not (equals and dot and table and key):
        raise UsageError(f'--set "{text}" must look like TABLE.KEY=VALUE, such as --set copfl.rate=0.15')
    try:
        return table, key, _toml_of(f"v = {value.strip()}")["v"]
    except (
        ValueError,
        RecursionError,
    ):  # no TOML, or a number of thousands of digits, or brackets without end
        return table, key, value.strip()


def _toml_of(text: str) -> dict[str, Any]:
    """What the TOML says; ValueError for what is none, and for hexadecimal numbers of thousands of digits."""
    found = tomllib.loads(text)
    waiting: list[Any] = [found]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and value.bit_length() > 1024:  # Python refuses to print the longest
            raise ValueError("a whole number has more than 1024 bits")
    return found


def as_toml(tables: Mapping[str, Mapping[str, Any]] | Mapping[tuple[str, ...], Mapping[str, Any]]) -> str:
    """The tables as TOML text; a tuple of names is the title of a table in tables."""
    parts = []
    for name, table in tables.items():
        lines = [f"{_key(key)} = {_toml(value)}" for key, value in table.items() if value is not None]
        title = ".".join(_key(part) for part in ((name,) if isinstance(name, str) else name))
        parts.append("\n".join([f"[{title}]", *lines]) + "\n")
    return "\n".join(parts)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text) + '"'


def read_file(path: Path) -> Tables:
    """The tables of a run file."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror or error}; give the run.toml of a run"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is damaged or no run file: it is not text; give the run.toml of a run"
        ) from error
    return read_toml(text, str(path))


def read_toml(text: str, source: str) -> Tables:
    """The tables in the text of a run file."""
    try:
        tables = _toml_of(text)
    except (ValueError, RecursionError) as error:  # what is no TOML, and numbers or brackets without end
        raise UsageError(
            f"{source} is damaged or no run file: it is not valid TOML: {error}; mend it there"
        ) from error
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(
                f'{source}: "{name}" stands outside any table; a run file has tables such as [run] and [algorithm]'
            )
    return migrated(tables)
