"""The bundles of a run: one for each client, and one of the global model.

A run writes its bundles at its end, and a node its own after each release.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from copfl import __version__
from copfl.core.layout import Layout
from copfl.core.task import Personal, Task
from copfl.data.samples import NEXT_TOKEN, Dataset, by_name
from copfl.experiment.bundle import base
from copfl.experiment.bundle.card import card
from copfl.experiment.bundle.description import (
    Array,
    Description,
    Hazard,
    Input,
    Origin,
    Output,
    Score,
)
from copfl.experiment.bundle.places import BASE, OF_SERVER
from copfl.experiment.models.client_models import (
    GLOBAL,
    TRAINED,
    WEIGHTS,
    InFolder,
    Stage,
    remembers_samples,
    write_weights,
)
from copfl.files import write_bytes
from copfl.models.networks import OF_HASHED_WORDS
from copfl.settings.toml import Tables


def describe(tables: Tables, task: Task, dataset: Dataset, seed: int, origin: Origin) -> Description:
    """The description of a model of this run, without scores.

    Args:
        tables: The settings of the run.
        task: With the model.
        dataset: What it was trained on.
        seed: Of the run.
        origin: Where the model comes from.
    """
    table = dataset.table
    names = () if dataset.kind == NEXT_TOKEN else dataset.classes
    return Description(
        model=base.portable(tables["model"]),
        adapter=dict(tables.get("adapter", {})),
        task=dict(tables.get("task", {})),
        seed=seed,
        dtype=str(task.initial.dtype).removeprefix("torch."),
        input=input_of(dataset, task, tables["model"]),
        output=Output(
            dataset.kind,
            len(dataset.classes),
            names,
            () if table is None else table.targets,
            *dataset.target_scale,
        ),
        origin=origin,
        copfl=__version__,
    )


def input_of(dataset: Dataset, task: Task, model: dict[str, Any]) -> Input:
    """What a model takes that was trained on this data; `model` is its table.

    Args:
        dataset: What the model was trained on.
        task: With the model.
        model: Its table of settings.
    """
    table = dataset.table
    text = table.text if table is not None else None
    if text is None and "input_ids" in by_name(dataset.train.x) and _has_tokenizer(model):
        text = "text"  # texts without a column: an array, or the lines of a file
    mean, std = (() if t is None else tuple(t.flatten().tolist()) for t in (task.mean, task.std))
    return Input(
        {name: Array(str(a.dtype), tuple(a.shape[1:])) for name, a in by_name(dataset.train.x).items()},
        columns=() if table is None else table.columns,
        missing="refuse" if table is None else table.missing,
        text=text,
        mean=mean,
        std=std,
        group="" if table is None else table.group,
        time="" if table is None else table.time,
    )


def _has_tokenizer(model: dict[str, Any]) -> bool:
    name = str(model.get("name", ""))
    return "tokenizer" in model or name.startswith("hf:") or name in (*OF_HASHED_WORDS, "causal_cnn")


def write_bundles(
    models: InFolder,
    general: Description,
    task: Task,
    tables: Tables,
    global_model: Personal,
    names: Sequence[str],
    scores: Sequence[Sequence[Score]],
    temperatures: Sequence[float],
    hazards: Sequence[Hazard | None],
) -> None:
    """Completes the folders of the clients' models, and adds the global model's.

    `names`, `scores`, `temperatures` and `hazards` are of each client.
    """
    takes_text = general.input.text is not None
    has_base = base.write_base(models.path / BASE, task, tables["model"], takes_text)
    general = dataclasses.replace(general, base=f"../{BASE}" if has_base else "")
    for n, name in enumerate(names):
        stage = models.stage(n)
        if stage is None:
            continue
        select = general.origin.select if stage.name == TRAINED else "last"
        origin = dataclasses.replace(
            general.origin, client=n, name=name, stage=stage.name, round=stage.round, select=select
        )
        output = dataclasses.replace(general.output, temperature=temperatures[n], hazard=hazards[n])
        facts = dataclasses.replace(general, origin=origin, output=output, scores=tuple(scores[n]))
        write_facts(models.of(n), facts)
    last = dataclasses.replace(general.origin, stage=GLOBAL, round=general.origin.rounds, select="last")
    write_bundle(
        models.path / OF_SERVER, dataclasses.replace(general, origin=last), models.layout, global_model
    )


def write_bundle(folder: Path, facts: Description, layout: Layout, model: Personal) -> None:
    """A bundle as a folder.

    Args:
        folder: Where it is written; files of an earlier bundle there are replaced.
        facts: What the model takes and returns, where it comes from, and how good it is.
        layout: The names and shapes of its tensors.
        model: The tensors, as one vector or a mixture.
    """
    stage = Stage(facts.origin.stage, facts.origin.round)
    write_weights(folder / WEIGHTS, layout, model, stage)
    write_facts(folder, facts)


def write_facts(folder: Path, facts: Description) -> None:
    """The files of a bundle beside its weights; bundle.json is the last, so a folder with it is complete.

    Args:
        folder: Of the bundle.
        facts: Its description.
    """
    text = card(facts, folder.name, remembers_samples(folder / WEIGHTS))
    write_bytes(folder / "README.md", text.encode(), durable=False)
    facts.write(folder)
