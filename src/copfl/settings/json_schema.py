"""The JSON Schema of run.toml and the reference page of settings, derived from records and signatures.

`copfl schema` prints it, and the page of all settings in the documentation is made of it.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from copfl.data.sets import datasets
from copfl.settings.checking import described, parameters_of
from copfl.settings.components import FACTORIES, context_parameters
from copfl.settings.first_look import READS
from copfl.settings.record import Component, declared
from copfl.settings.schema import KINDS

TYPES: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
ELSEWHERE = "[:/.]"  # in a name: of a module or a file, with options of its own


def json_schema() -> dict[str, Any]:
    """A JSON Schema (draft 7) of run.toml; with it, editors complete and check the file."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A run of copfl (run.toml)",
        "type": "object",
        "properties": {kind: _table(kind) for kind in KINDS},
        "additionalProperties": False,
    }


def _table(kind: str) -> dict[str, Any]:
    """The schema of a table: its own keys, and by name the keys of the component that is chosen."""
    record = KINDS[kind]
    hints = typing.get_type_hints(record)
    own_keys = {
        f.name: {**_type(hints[f.name]), **f.metadata["limits"], "description": f.metadata["help"]}
        for f in declared(record)
    }
    table: dict[str, Any] = {"type": "object", "description": record.__doc__, "properties": own_keys}
    if not issubclass(record, Component):
        return {**table, "additionalProperties": False}
    ours = [f.name for f in declared(record) if f.metadata["ours"]] + ["name", "value"]
    rules, every = [], set(own_keys) | {"value"}
    for name, options in options_of(kind).items():
        typed = {key: _type(p.hint) for key, p in options.items() if key not in own_keys}
        every |= options.keys()
        rule = {"properties": typed, "propertyNames": {"enum": sorted({*ours, *options})}}
        if not name:  # there is nothing to choose
            return {**table, "properties": {**own_keys, **typed}, "propertyNames": {"enum": sorted(every)}}
        rules.append({"if": _named({"const": name}), "then": rule})
    known = {
        "if": {"not": _named({"pattern": ELSEWHERE})},
        "then": {"propertyNames": {"enum": sorted(every)}},
    }
    any_file = kind in ("data", "partition")  # a folder may have any name
    named = {"anyOf": [{"enum": list(options_of(kind))}, {} if any_file else {"pattern": ELSEWHERE}]}
    return {
        **table,
        "properties": {**own_keys, "name": {**own_keys["name"], **named}},
        "allOf": [*rules, known],
    }


def _named(name: Mapping[str, Any]) -> dict[str, Any]:
    return {"properties": {"name": dict(name)}, "required": ["name"]}


def options_of(kind: str) -> dict[str, dict[str, Any]]:
    """By name, the options of each component of copfl."""
    if kind == "data":
        return {name: parameters_of(read, READS) for name, read in datasets.DATASETS.items()}
    factories = FACTORIES[kind]()
    return {
        name: parameters_of(factory, context_parameters(kind, factory)) for name, factory in factories.items()
    }


def _type(hint: Any) -> dict[str, Any]:
    """The JSON type of a hint; anything, where it is none of the plain ones."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    types_of_options: list[Any] = []
    for option in typing.get_args(hint) if union else (hint,):
        if typing.get_origin(option) is tuple:
            inner = _type(typing.get_args(option)[0])
            types_of_options += [
                {"type": "array", "items": inner},
                inner,
            ]  # one may be written without brackets
        elif option in TYPES:
            types_of_options.append({"type": TYPES[option]})
        elif option is not type(None):
            return {}
    return types_of_options[0] if len(types_of_options) == 1 else {"anyOf": types_of_options}


def reference() -> str:
    """The page of all settings, as Markdown."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    for kind, record in KINDS.items():
        title, _, text = str(record.__doc__).partition(": ")
        yield f"## {title}\n\n{text[:1].upper()}{text[1:]}\n"
        hints = typing.get_type_hints(record)
        rows = [
            (
                f.name,
                described(hints[f.name], f.metadata["limits"]),
                _shown(f),
                _option(f),
                f.metadata["help"],
            )
            for f in declared(record)
        ]
        if rows:
            yield "| key | value | default | option | |\n| --- | --- | --- | --- | --- |"
            yield from (
                "| " + " | ".join([f"`{row[0]}`", *row[1:]]).replace(" or left out", "") + " |"
                for row in rows
            )
            yield ""
        if not issubclass(record, Component):
            continue
        chosen = {name: options for name, options in options_of(kind).items() if options}
        names = {f.name for f in declared(record)}
        for name, options in chosen.items():
            shown = [f"`{key}`{_default(p.default)}" for key, p in options.items() if key not in names]
            if shown:
                yield f"- {f'`{name}`: ' if name else ''}{', '.join(shown)}"
        if chosen:
            yield ""


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty or value is None or value == "":
        return ""
    return f" = {list(value) if isinstance(value, tuple) else value}"


def _shown(field: Any) -> str:
    default = field.default
    return field.metadata["shown"] or (
        ""
        if default in (None, "", ())
        else str(default).lower()
        if default in (True, False) and isinstance(default, bool)
        else f"{default}"
    )


def _option(field: Any) -> str:
    return " ".join(f"`{name}`" for name in field.metadata["names"].replace("/", " ").split())
