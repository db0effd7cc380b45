"""The tables [model] and [adapter] of a run: a model, what of it is trained, and its tokenizer."""

import copy
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from copfl import models
from copfl.core.criteria import PADDING
from copfl.data.samples import NEXT_TOKEN, Dataset
from copfl.errors import UsageError, how_to_set, unknown
from copfl.experiment import config, user_code
from copfl.experiment.config import Component, Table, without
from copfl.models import adapters, pretrained, text

MODEL = Component("model", models.MODELS, ("shape", "classes"))
ADAPTER = Component("adapter", adapters.ADAPTERS, ("model",))
# Of every model, however it is made.
MODEL_KEYS = ("head", "train", "freeze", "frozen_dropout", "tokenizer", "max_length")


def resolve_model(table: Mapping[str, Any], adapted: bool = False) -> Table:
    """The table of a model by name, of a pretrained one, or of the user's: module:attribute."""
    name, shared = table["name"], shared_keys(table)
    options = without(table, "name", "code", *MODEL_KEYS)
    if pretrained.is_pretrained(name) or "sha256" in table:  # a record of a run has the hash, and no place
        probing = shared.get("train") == "head" and not adapted
        if probing and "sha256" not in table:  # earlier runs had the dropout
            shared.setdefault("frozen_dropout", False)
        return {**_resolve_pretrained(name, options), **shared}
    if not user_code.is_reference(name):
        if name not in models.MODELS:
            raise unknown("model", name, [*models.MODELS, "mymodule:MyNet", *models.SOURCES])
        return {**MODEL.resolve({"name": name, **options}), **shared}
    factory = user_code.attribute("model", name, table.get("code"))
    if callable(factory) and not user_code.takes_any(factory):
        options = config.checked(name, factory, options, tuple(user_code.given_by_copfl(factory)))
    return {"name": name, **options, **shared, "code": user_code.folder_of(name)}


def shared_keys(table: Mapping[str, Any]) -> Table:
    """The keys of the table that every model has, checked."""
    shared = config.checked("model", _every_model, {k: v for k, v in table.items() if k in MODEL_KEYS})
    if os.path.isdir(shared.get("tokenizer", "")):
        shared["tokenizer"] = str(Path(shared["tokenizer"]).absolute())
    return shared


def _every_model(
    *, head: str, train: str, freeze: str, frozen_dropout: bool, tokenizer: str, max_length: int
) -> None:
    """The signature of MODEL_KEYS."""


def _resolve_pretrained(name: str, options: Table) -> Table:
    """The table with absolute paths and the SHA-256 of the base, which a given one must equal."""
    source, _, place = name.partition(":")
    skip = ("name", "classes", "seed", *(() if source == "hf" else ("task",)))
    given = config.checked(name, pretrained.build, without(options, "sha256"), skip)
    table = {"name": name, **config.keywords_of(pretrained.build, skip), **given}
    if source == "hf" and os.path.isdir(place):
        table["name"] = f"hf:{Path(place).absolute()}"
    file = None if table["weights"] in ("default", "none") else pretrained.located(table["weights"])
    if file is not None:
        table["weights"] = str(file.absolute())
    expected = options.get("sha256")
    if expected is not None and (pretrained.located(place) if source == "hf" else file) is None:
        return {**table, "sha256": expected}  # compared when the model is built
    if source == "hf":
        base = pretrained.base_of(table["name"], table["weights"])
        table["task"] = pretrained.task_of(base, table["task"])
    return {**table, "sha256": _checked_hash({**table, "sha256": expected})}


def _checked_hash(table: Mapping[str, Any]) -> str | None:
    """The SHA-256 of the base, which is the table's if it has one."""
    base = pretrained.base_of(table["name"], table["weights"])
    if (expected := table.get("sha256")) not in (None, base.sha256):
        raise UsageError(
            f"the base {table['name']} has the SHA-256 {base.sha256}, but this run is of a base with "
            f"{expected}; put that one back, or start a new run without model.sha256"
        )
    return base.sha256


def resolve_adapter(table: Mapping[str, Any]) -> Table:
    """The table of an adapter, whose name may contain options: lora:r=8,alpha=16,targets=query+value."""
    name, _, words = str(table.get("name", "")).partition(":")
    options = {}
    for word in filter(None, words.split(",")):
        _, key, value = config.setting(f"adapter.{word}")
        options[key] = str(value) if key == "targets" else value
    return ADAPTER.resolve({**options, **table, "name": name})


def build_model(
    table: Mapping[str, Any],
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    adapter: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The model that the tables [model] and [adapter] describe, with the initial weights of this seed."""
    name, options = table["name"], without(table, "name", "code", "sha256", *MODEL_KEYS)
    if pretrained.is_pretrained(name):
        _checked_hash(table)
        model: nn.Module = pretrained.build(name, classes, seed, **options)
    elif user_code.is_reference(name):
        given = user_code.attribute("model", name, table.get("code"))
        model = user_code.model_of(given, shape, classes, seed, options, name)
    else:
        model = models.build(name, shape, classes, seed, **options)
    return adapted(model, table, seed, adapter)


def adapted(
    model: nn.Module, table: Mapping[str, Any], seed: int, adapter: Mapping[str, Any] | None = None
) -> nn.Module:
    """The model with its adapter, in which only the chosen parameters require a gradient."""
    train, freeze = table.get("train", ""), table.get("freeze", "")
    if pretrained.wrapped(model) is model and not (adapter or train or freeze):
        return model
    model = pretrained.wrapped(copy.deepcopy(model))
    if adapter:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = ADAPTER.build(adapter, model=model)
    adapters.select(model, head=table.get("head"), train=train, freeze=freeze, adapted=bool(adapter))
    if isinstance(model, pretrained.Pretrained) and not table.get("frozen_dropout", True):
        model.evaluated = adapters.frozen_modules(model)
    return model


def tokenizer_of(table: Mapping[str, Any]) -> text.Tokenizer | text.HashedWords | text.Bytes:
    name = str(table.get("name", ""))
    if name == "embedding" and "tokenizer" not in table:
        return text.HashedWords(table["words"], table.get("max_length", 0))
    if name == "causal_cnn" and "tokenizer" not in table:
        return text.Bytes(table.get("max_length", 0))
    model = Path(pretrained.base_of(name, "none").name) if name.startswith("hf:") else None
    folder = Path(table["tokenizer"]) if "tokenizer" in table else model
    if folder is None:
        raise UsageError(
            f"the data set has sentences, and the model has no tokenizer; take {_model('embedding')}, a model of "
            f"transformers, such as {_model('hf:FOLDER')}, or name a folder with the tokenizer of yours: "
            f"{how_to_set('model.tokenizer', 'FOLDER')}"
        )
    return text.Tokenizer(folder, table.get("max_length", 0), model)


def _model(name: str) -> str:
    """How the user names a model."""
    return how_to_set("model.name", name, "--model")


def tokenized(dataset: Dataset, table: Mapping[str, Any]) -> Dataset:
    """The data set with token numbers in place of sentences; any other data set unchanged."""
    splits = (dataset.train, dataset.test)
    if not all(isinstance(split.x, np.ndarray) and split.x.dtype.kind in "UO" for split in splits):
        return dataset
    texts = [str(sentence) for split in splits for sentence in split.x]
    tokenizer = tokenizer_of(table)
    arrays: dict[str, Any] = getattr(tokenizer, "cached", tokenizer)(texts)
    targets, classes = np.concatenate([split.y for split in splits]), dataset.classes
    if dataset.kind == NEXT_TOKEN:
        if not hasattr(tokenizer, "vocabulary"):
            raise UsageError(
                f"the model {table['name']} does not predict the next token; take {_model('causal_cnn')}, or a "
                f"causal language model of transformers, such as {_model('hf:FOLDER')}"
            )
        ids, seen = arrays["input_ids"], arrays["attention_mask"]
        if ids.shape[1] < 2:
            short = f'no text of "{dataset.name}" has two tokens'
            raise UsageError(f"{short}, so there is no next token to predict")
        targets = np.where(seen[:, 1:] > 0, ids[:, 1:], PADDING)
        arrays = {name: array[:, :-1] for name, array in arrays.items()}
        classes = tuple(map(str, range(tokenizer.vocabulary)))
    train = len(dataset.train)
    parts = [
        dataclasses.replace(split, x={name: a[some] for name, a in arrays.items()}, y=targets[some])
        for split, some in zip(splits, (slice(0, train), slice(train, None)), strict=True)
    ]
    return dataclasses.replace(dataset, train=parts[0], test=parts[1], classes=classes)
