"""A client's model as a bundle in its node's folder, which `copfl predict`, `evaluate` and `export` take.

`update` and `join` write it. It is the model that the node's last evaluation measured, of whatever round that was;
with run.select="best" it is of the best round by the node's own validation samples. It needs no server, and the
folder may be moved.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from copfl.core.task import Personal
from copfl.experiment.bundle import writing
from copfl.experiment.bundle.base import write_base
from copfl.experiment.bundle.description import VALIDATION, Description, Score, read
from copfl.experiment.bundle.places import BASE, FILE, OF_NODE
from copfl.federation.protocol.files import private_folder
from copfl.federation.protocol.settings import TrainingSettings
from copfl.measures.metrics import MetricInfo
from copfl.settings.schema import table_of
from copfl.wire import Head


def write_bundle(
    folder: Path,
    settings: TrainingSettings,
    general: Description,
    head: Head,
    model: Personal,
    scores: Sequence[Score],
    select: str = "last",
) -> None:
    """Writes the bundle of a model into the folder of its run, in place of an earlier round's.

    Args:
        folder: The folder of the run, in the node's state-dir.
        settings: The federation's.
        general: See `description_of`.
        head: Of the message to the client: the run, the round and the client.
        model: What was measured.
        scores: Its metrics on the node's samples.
        select: How the round was chosen: run.select.
    """
    bundle = private_folder(folder / OF_NODE)
    takes_text, base = general.input.text is not None, folder / BASE
    if not base.is_dir() and not write_base(base, settings.task, table_of(settings.run.model), takes_text):
        base.mkdir()  # nothing is frozen: it is not tried again
    client = head.client if head.client < settings.federation.clients else None  # a new one has no number
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
    writing.write_bundle(bundle, facts, settings.task.layout, model)


def kept_score(folder: Path, metric: MetricInfo) -> float:
    """The metric of the run's present bundle on the node's validation samples; nan where there is none.

    Args:
        folder: The folder of the run, in the node's state-dir.
        metric: The primary one.
    """
    if not (folder / OF_NODE / FILE).is_file():
        return math.nan
    scores = {(score.metric, score.split): score.value for score in read(folder / OF_NODE).scores}
    return scores.get((metric.name, VALIDATION), math.nan)
