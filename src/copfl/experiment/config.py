"""Names and keyword arguments as people write them: read, checked against signatures, and written as TOML."""

import dataclasses
import inspect
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli_w

from copfl.core.optim import DefaultNumber
from copfl.errors import UsageError, raised_as, unknown
from copfl.experiment.migration import Tables as Tables
from copfl.experiment.migration import migrated

LARGEST = 1e30  # of a number that is set by name: ten times as much must still fit into float32
Table = dict[str, Any]
TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    type(None): "left out",
}


SYNONYMS = {  # keys that people try in the wrong table or under another name, with the setting that they mean
    "alpha": "dirichlet.alpha",
    "batch_size": "run.batch",
    "batchsize": "run.batch",
    "epochs": "algorithm.epochs",
    "learning_rate": "optimizer.lr",
    "local_epochs": "algorithm.epochs",
    "lr": "optimizer.lr",
    "momentum": "sgd.momentum",
    "num_clients": "run.clients",
    "num_rounds": "run.rounds",
} | {name: f"run.{name}" for name in ("batch", "clients", "device", "rounds", "seed")}


def keywords_of(factory: Callable[..., Any], skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keyword arguments of a factory, with their defaults."""
    defaults = {name: default for name, (default, _) in _signature(factory).items() if name not in skip}
    return {
        name: float(value) if isinstance(value, DefaultNumber) else value for name, value in defaults.items()
    }


def _signature(factory: Callable[..., Any]) -> Mapping[str, tuple[Any, Any]]:
    """The default and the type of each keyword argument."""
    try:
        return _cached_signature(factory)
    except TypeError:  # an object without a hash
        return _cached_signature.__wrapped__(factory)


@lru_cache(maxsize=256)  # reproduction checks a thousand records against the same few signatures
def _cached_signature(factory: Callable[..., Any]) -> Mapping[str, tuple[Any, Any]]:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    # The fields of a dataclass may be annotated in the modules of its bases, which __init__ does not know.
    plain_class = inspect.isclass(factory) and not dataclasses.is_dataclass(factory)
    try:
        hints = typing.get_type_hints(factory.__init__ if plain_class else factory)
    except (NameError, TypeError):  # the annotations of a user's code may name what does not exist
        hints = {}
    parameters = inspect.signature(factory).parameters.values()
    result = {p.name: (p.default, hints.get(p.name, Any)) for p in parameters if p.kind not in variadic}
    for field, value in _made_defaults(factory).items():
        if _is_part(field, value):
            del result[field]
            result |= {k: (getattr(value, k), hint) for k, (_, hint) in _signature(type(value)).items()}
        else:
            result[field] = (value, result[field][1])
    return result


def _made_defaults(factory: Any) -> dict[str, Any]:
    """The defaults of a dataclass that a default_factory makes."""
    fields = dataclasses.fields(factory) if dataclasses.is_dataclass(factory) else ()
    return {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}


def _is_part(field: str, value: Any) -> bool:
    """Whether a field of an algorithm is a part of it, such as Pwpm, whose options are the algorithm's."""
    return type(value).__module__.startswith("copfl.parts.") and field != "optimizer"


def built(factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """The value with these options, those of its parts among them."""
    given, parts = dict(options), {}
    for field, part in _made_defaults(factory).items():
        if _is_part(field, part):
            chosen = {name: given.pop(name) for name in vars(part) if name in given}
            parts[field] = dataclasses.replace(part, **chosen)
    return factory(**given, **parts)


def checked(
    what: str, factory: Callable[..., Any], given: Mapping[str, Any], skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The keywords with the types of the factory's parameters; UsageError names one that does not fit."""
    signature = {name: p for name, p in _signature(factory).items() if name not in skip}
    result = {}
    for name, value in given.items():
        if name not in signature:
            raise unknown(f"{what} option", name, signature, SYNONYMS.get(name))
        result[name] = _converted(f"{what}.{name}", value, signature[name][1])
    return result


def _converted(name: str, value: Any, hint: Any) -> Any:
    """The value as the type of the hint, which is a plain type, a tuple of one, or a choice of those."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = typing.get_args(hint) if union else (hint,)
    for option in options:
        if option in (int, bool, str) and type(value) is option:
            return value
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            if not abs(value) <= LARGEST:
                raise UsageError(f"{name}={str(value)[:40]} must be a finite number of at most {LARGEST:g}")
            return float(value)
        if typing.get_origin(option) is tuple:
            inner = typing.get_args(option)[0]
            parts = value if isinstance(value, list | tuple) else (value,)
            return tuple(_converted(name, part, inner) for part in parts)
        if (option is type(None) and value is None) or option not in TYPES:
            return value  # the factory checks other types
    raise UsageError(f"{name}={value!r} must be {' or '.join(TYPES[o] for o in options)}")


@dataclasses.dataclass(frozen=True)
class Component:
    """A choice among factories by name, whose keyword arguments are the options of the table."""

    kind: str
    factories: Mapping[str, Callable[..., Any]]  # without a name where there is nothing to choose
    context: tuple[str, ...] = ()  # parameters that do not come from the table

    def factory(self, table: Mapping[str, Any]) -> Callable[..., Any]:
        name = table.get("name", "")
        if name not in self.factories:
            if not name:
                raise UsageError(f"[{self.kind}] needs a name: {', '.join(self.factories)}")
            raise unknown(self.kind, name, self.factories)
        return self.factories[name]

    def resolve(self, table: Mapping[str, Any]) -> Table:
        """The table with its options checked and every default filled in."""
        factory = self.factory(table)
        name = {"name": table["name"]} if "name" in table else {}
        options = checked(table.get("name", self.kind), factory, without(table, "name"), self.context)
        return {**name, **keywords_of(factory, self.context), **options}

    def build(self, table: Mapping[str, Any], **context: Any) -> Any:
        """The value that a resolved table describes."""
        return built(self.factory(table), {**context, **without(table, "name")})


def without(table: Mapping[str, Any], *keys: str) -> Table:
    return {k: v for k, v in table.items() if k not in keys}


def setting(text: str) -> tuple[str, str, Any]:
    """("copfl", "rate", 0.15) for "copfl.rate=0.15"; the value is read as TOML, or else as a plain word."""
    path, equals, value = text.partition("=")
    table, dot, key = path.strip().partition(".")
    if not (equals and dot and table and key):
        example = f"{SYNONYMS[key]}={value}" if (key := path.strip()) in SYNONYMS else "copfl.rate=0.15"
        raise UsageError(f'--set "{text}" must be TABLE.KEY=VALUE, such as --set {example}')
    try:
        return table, key, parsed(f"v = {value.strip()}")["v"]
    except (ValueError, RecursionError):
        return table, key, value.strip()


def parsed(text: str) -> dict[str, Any]:
    """The content of TOML text; ValueError for other text, and for numbers that Python refuses to print."""
    content = tomllib.loads(text)
    waiting: list[Any] = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and value.bit_length() > 1024:
            raise ValueError("a whole number has more than 1024 bits")
    return content


def as_toml(tables: Mapping[str, Any]) -> str:
    """The tables as TOML text, without what is None."""
    return tomli_w.dumps(_without_none(tables))


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }


def read_file(path: Path) -> Tables:
    """The tables of a run file."""
    with raised_as(UsageError, f"cannot read {path}: {{}}; give the run.toml of a run", OSError):
        content = path.read_bytes()
    return read_toml(content, str(path))


def read_toml(content: bytes, source: str) -> Tables:
    """The tables in a run file, under today's names."""
    damaged = f"{source} is damaged or no run file: it is not valid TOML: {{}}"
    with raised_as(UsageError, damaged, ValueError, RecursionError):
        tables = parsed(content.decode())
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f'{source}: "{name}" is outside any table; a run file has tables such as [run]')
    return migrated(tables)


def partition_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Such as "10 clients, partition classes (per_client=2)", or "(natural clients)" of by_group."""
    table, clients = tables["partition"], tables["run"]["clients"]
    if "value" in table:
        return f"{clients} clients, {table['value']}"
    options = without(table, "name").items()
    shown = [f"{key}={value}" for key, value in options if value is not False]
    shown += ["natural clients"] if table["name"] == "by_group" else []
    in_brackets = f" ({', '.join(shown)})" if shown else ""
    return f"{clients} clients, partition {table['name']}{in_brackets}"
