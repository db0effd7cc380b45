"""[model] and [adapter]: the records of their tables.

`validate` calls them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.errors import UsageError
from copfl.models import MODELS, pretrained
from copfl.settings import schema, toml, user_code
from copfl.settings.checking import checked, parameters_of
from copfl.settings.components import component
from copfl.settings.record import declared
from copfl.settings.schema import record_of
from copfl.settings.values import record_of_value


def model_record(table: Mapping[str, Any], adapted: bool = False, value: Any = None) -> schema.Model:
    """The model: by name, pretrained, of the user, or a value.

    Args:
        table: What is set.
        adapted: Whether there is an adapter.
        value: A module, or a function that makes one, that a program passed.
    """
    table = dict(table)
    if os.path.isdir(str(table.get("tokenizer", ""))):
        table["tokenizer"] = str(Path(table["tokenizer"]).absolute())
    if value is not None:
        ours = [f.name for f in declared(schema.Model) if f.metadata["ours"]]
        return record_of_value("model", table, value, type(value).__name__, *ours)  # type: ignore[no-any-return]
    name = str(table.get("name", ""))
    # A record of a run has the hash, and no place.
    if not (pretrained.is_pretrained(name) or "sha256" in table):
        return component("model", table, fill=name in MODELS)  # type: ignore[no-any-return]
    if table.get("train") == "head" and not adapted and "sha256" not in table:
        table.setdefault("frozen_dropout", False)
    return _pretrained(record_of("model", table))


def _pretrained(record: schema.Model) -> schema.Model:
    """The record with absolute paths and the SHA-256 of the base, which a given one must equal."""
    source, _, model_name = record.name.partition(":")
    skip = ("name", "classes", "seed", *(() if source == "hf" else ("task",)))
    known = {name: p.default for name, p in parameters_of(pretrained.build, skip).items()}
    options = known | checked("model", pretrained.build, record.arguments, skip, schema.paths())
    name = (
        f"hf:{Path(model_name).absolute()}" if source == "hf" and os.path.isdir(model_name) else record.name
    )
    record = dataclasses.replace(record, name=name)
    file = None if options["weights"] in ("default", "none") else pretrained.located(options["weights"])
    if file is not None:
        options["weights"] = str(file.absolute())
    if record.sha256 is not None and (pretrained.located(model_name) if source == "hf" else file) is None:
        return record.with_arguments(options)  # compared when it is built
    if source == "hf":
        options["task"] = pretrained.task_of(pretrained.base_of(name, options["weights"]), options["task"])
    record = record.with_arguments(options)
    return dataclasses.replace(record, sha256=checked_hash(record))


def checked_hash(record: schema.Model) -> str | None:
    """The SHA-256 of a pretrained base, which is the record's if it has one."""
    base = pretrained.base_of(record.name, str(record.weights))
    if record.sha256 not in (None, base.sha256):
        raise UsageError(
            f"the base {record.name} has the SHA-256 {base.sha256}, but this run is of a base with "
            f"{record.sha256}; put that one back, or start a new run without model.sha256"
        )
    return base.sha256


def adapter_record(table: Mapping[str, Any]) -> schema.Adapter:
    """The adapter, whose name may contain options: lora:r=8,alpha=16,targets=query+value."""
    name, _, words = str(table.get("name", "")).partition(":")
    if user_code.is_reference(str(table.get("name", ""))):
        return component("adapter", table)  # type: ignore[no-any-return]
    options: dict[str, Any] = {}
    for word in filter(None, words.split(",")):
        _, key, value = toml.assignment(f"adapter.{word}")
        options[key] = str(value) if key == "targets" else value
    return component("adapter", {**options, **table, "name": name})  # type: ignore[no-any-return]
