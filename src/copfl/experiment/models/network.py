"""The model of a run, what of it is trained, and its tokenizer.

`prepare` makes the model of a run with it, and a bundle again when it is loaded.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from copfl import models
from copfl.core.criteria import PADDING
from copfl.data.samples import NEXT_TOKEN, Dataset
from copfl.errors import UsageError, how_to_set
from copfl.kernels.draws import seeded
from copfl.models import adapters, pretrained, text
from copfl.settings import user_code
from copfl.settings.components import build
from copfl.settings.model import checked_hash
from copfl.settings.schema import Adapter, Model


def build_model(
    model: Model, adapter: Adapter, shape: tuple[int, ...], classes: int, seed: int, kind: str
) -> nn.Module:
    """The model that the settings describe, with the initial weights of this seed.

    Args:
        model: The settings of the model.
        adapter: The settings of its adapter; an empty record for none.
        shape: Of one sample.
        classes: Number of outputs.
        seed: Of what has no pretrained values.
        kind: Of the task.
    """
    name, options = model.name, model.arguments
    if model.value is not None:
        module = user_code.model_of(model.value, shape, classes, seed, {})
    elif pretrained.is_pretrained(name):
        checked_hash(model)
        module = pretrained.build(name, classes, seed, **options)
    elif user_code.is_reference(name):
        made = user_code.attribute("model", name, model.code)
        module = user_code.model_of(made, shape, classes, seed, options, name)
    else:
        module = models.build(name, shape, classes, seed, kind, **options)
    if pretrained.wrapped(module) is module and not (adapter or model.train or model.freeze):
        return module
    module = pretrained.wrapped(copy.deepcopy(module))
    if adapter:
        with seeded(seed):
            module = build("adapter", adapter, model=module)
    train, freeze = model.train or "", model.freeze or ""
    adapters.select(module, head=model.head, train=train, freeze=freeze, adapted=bool(adapter))
    if isinstance(module, pretrained.Pretrained) and model.frozen_dropout is False:
        module.evaluated = adapters.frozen_modules(module)
    return module


def tokenizer_of(model: Model) -> text.Tokenizer | text.HashedWords | text.WordsAndPairs | text.Bytes:
    """The tokenizer of a model; UsageError if it has none."""
    length = model.max_length or 0
    if model.name == "embedding" and model.tokenizer is None:
        return text.HashedWords(model.options["words"], length)
    if model.name == "words" and model.tokenizer is None:
        return text.WordsAndPairs(model.options["words"], model.options["pairs"], length)
    if model.name == "causal_cnn" and model.tokenizer is None:
        return text.Bytes(length)
    base = Path(pretrained.base_of(model.name, "none").name) if model.name.startswith("hf:") else None
    folder = base if model.tokenizer is None else Path(model.tokenizer)
    if folder is None:
        raise UsageError(
            f"the data set has sentences, and the model has no tokenizer; take {_model('embedding')}, a "
            f"model of transformers, such as {_model('hf:FOLDER')}, or name a folder with the tokenizer of "
            f"yours: {how_to_set('model.tokenizer', 'FOLDER')}"
        )
    return text.Tokenizer(folder, length, base)


def _model(name: str) -> str:
    """How the user names a model."""
    return how_to_set("model.name", name, "--model")


def tokenized(dataset: Dataset, model: Model) -> Dataset:
    """The data set with token numbers in place of sentences; any other data set unchanged.

    Args:
        dataset: With texts, or not.
        model: Its settings, which say how texts become tokens.
    """
    splits = (dataset.train, dataset.test)
    if not all(isinstance(split.x, np.ndarray) and split.x.dtype.kind in "UO" for split in splits):
        return dataset
    texts = [str(sentence) for split in splits for sentence in split.x]
    tokenizer = tokenizer_of(model)
    arrays: dict[str, Any] = getattr(tokenizer, "cached", tokenizer)(texts)
    targets, classes = np.concatenate([split.y for split in splits]), dataset.classes
    if dataset.kind == NEXT_TOKEN:
        if not hasattr(tokenizer, "vocabulary"):
            raise UsageError(
                f"the model {model.title} does not predict the next token; take {_model('causal_cnn')}, or a "
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
    splits_of_tokens = [
        dataclasses.replace(split, x={name: a[some] for name, a in arrays.items()}, y=targets[some])
        for split, some in zip(splits, (slice(0, train), slice(train, None)), strict=True)
    ]
    return dataclasses.replace(dataset, train=splits_of_tokens[0], test=splits_of_tokens[1], classes=classes)
