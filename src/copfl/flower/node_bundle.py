"""The model of a client as a bundle in its node's folder: `copfl predict`, `evaluate` and `export` take the folder.

It is the model that the node's last evaluation measured, of whatever round that was; with run.select="best" that of the
best round by the node's own validation samples. It needs no server, and the folder may be moved.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from copfl import __version__
from copfl.core.metrics import MetricInfo
from copfl.core.task import Personal
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, Dataset
from copfl.experiment.bundle import writing
from copfl.experiment.bundle.base import portable, write_base
from copfl.experiment.bundle.description import FILE, VALIDATION, Description, Origin, Output, Score, read
from copfl.experiment.bundle.writing import BASE, OF_NODE, input_of
from copfl.experiment.client_models import TRAINED
from copfl.flower.settings import Settings
from copfl.flower.worker import private_folder
from copfl.settings.federation import Samples
from copfl.settings.schema import table_of
from copfl.wire import Head


def description_of(settings: Settings, dataset: Dataset) -> Description:
    """What every bundle of this node says about its model, without the round and the scores."""
    run, samples, task = settings.run, settings.federation.samples, settings.task
    model = table_of(run.model)
    table = dataset.table
    return Description(
        model=portable(model),
        adapter=table_of(run.adapter),
        task=table_of(run.task),
        seed=run.run.seed,
        dtype=str(task.initial.dtype).removeprefix("torch."),
        input=input_of(dataset, task, model),
        output=Output(
            samples.kind,
            samples.outputs,
            names_of_outputs(samples, dataset.classes),
            () if table is None else table.targets,
            *samples.scale,
        ),
        origin=Origin(
            f"{run.algorithm.title} in a federation",
            dataset.name,
            TRAINED,
            settings.federation.rounds,
            settings.federation.clients,
            note=dataset.note,
        ),
        copfl=__version__,
    )


def names_of_outputs(samples: Samples, others: tuple[str, ...]) -> tuple[str, ...]:
    """The names of what a model returns: of the classes as the federation agreed on them, else these."""
    if samples.kind == NEXT_TOKEN:
        return ()
    numbers = tuple(map(str, range(samples.outputs)))
    return (samples.names if samples.kind == CLASSIFICATION else others) or numbers


def write_bundle(
    folder: Path,
    settings: Settings,
    general: Description,
    head: Head,
    model: Personal,
    scores: Sequence[Score],
    select: str = "last",
) -> None:
    """Writes the bundle of a model into the folder of its run, in place of that of an earlier round.

    Args:
        folder: That of the run, in the node's state-dir.
        settings: Those of the federation.
        general: See `description_of`.
        head: Of the message to the client: the run, the round and the client.
        model: What was measured.
        scores: Its metrics on the node's samples.
        select: How the round was chosen: run.select.
    """
    place = private_folder(folder / OF_NODE)
    takes_text, base = general.input.text is not None, folder / BASE
    if not base.is_dir() and not write_base(base, settings.task, table_of(settings.run.model), takes_text):
        base.mkdir()  # nothing is frozen: it is not tried again
    client = (
        head.client if head.client < settings.federation.clients else None
    )  # that of a new one is no number
    facts = dataclasses.replace(
        general,
        base=f"../{BASE}" if any(base.iterdir()) else "",
        origin=dataclasses.replace(
            general.origin,
            client=client,
            name=f"run {head.run}",
            round=min(head.round + 1, settings.federation.rounds),
            select=select,
        ),
        scores=tuple(scores),
    )
    writing.write_bundle(place, facts, settings.task.layout, model)


def kept_score(folder: Path, metric: MetricInfo) -> float:
    """The metric of the run's present bundle on the node's validation samples; nan where there is none."""
    if not (folder / OF_NODE / FILE).is_file():
        return math.nan
    scores = {(score.metric, score.split): score.value for score in read(folder / OF_NODE).scores}
    return scores.get((metric.name, VALIDATION), math.nan)
