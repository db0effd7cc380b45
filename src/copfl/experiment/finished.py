"""What a finished run folder, read with the data of the run, gives beside the bundles.

`copfl evaluate --all` asks it for every model on every client's samples.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from copfl.core import tree
from copfl.core.evaluation import primary_metrics
from copfl.core.task import Personal
from copfl.data.clients.groups import client_titles, names_of_clients
from copfl.engine import simulate
from copfl.errors import RunError, UsageError, at_least
from copfl.experiment.analysis import gains
from copfl.experiment.analysis.gains import GAINS, Analysis, Cross
from copfl.experiment.bundle import description
from copfl.experiment.bundle.bundle import Bundle, read_bundle
from copfl.experiment.bundle.places import OF_SERVER, located
from copfl.experiment.folder import RunFolder, claimed
from copfl.experiment.models.client_models import RECEIVED, received_model
from copfl.experiment.run import reopen
from copfl.measures.metrics import Metric
from copfl.settings import named_code
from copfl.stats import Numbers


def received_bundle(path: str | Path, client: int | str, **values: Any) -> Bundle:
    """The model that a client has after the last aggregation, from which it would train in a further round.

    Args:
        path: The run folder, with its checkpoint.
        client: Its number from 0, or its name in the data.
        values: What a Python program passed to the run: `algorithm`, `model`, `data`.
    """
    if client == OF_SERVER:
        raise UsageError(
            "the global model is not trained by a client; name a client, or leave out before_training"
        )
    folder = RunFolder(Path(path))
    if not folder.begun:
        raise RunError(
            f"{path} is no run folder; the model before local training is in the checkpoint of a run"
        )
    facts = description.read(located(Path(path), client))
    e = reopen(folder, **values)
    disk = folder.states if e.settings.store == "disk" else None
    state = simulate.begin(e.algorithm, e.task, e.clients, disk)
    folder.load_state(state, e.fingerprints())
    if not state.round:
        raise RunError(f"{path} has no checkpoint, which has the model before local training; run it again")
    number = facts.origin.client
    assert number is not None
    origin = dataclasses.replace(facts.origin, stage=RECEIVED, round=state.round, select="last")
    trained = read_bundle(path, number, model=values.get("model"))
    model = received_model(e.algorithm, e.task, state, number)
    output = dataclasses.replace(facts.output, hazard=None)  # it is of the trained model
    own = dataclasses.replace(facts, origin=origin, output=output, scores=())
    return dataclasses.replace(trained, description=own, model=model)


class CrossSite(NamedTuple):
    """The primary metric of every client's model and of the global model on every client's test samples."""

    clients: list[str]
    values: Numbers  # [clients + 1, clients], the last row is of the global model
    samples: list[int]  # of each client
    metric: Metric

    @property
    def own(self) -> Numbers:
        """Each client's model on its own samples."""
        return np.diagonal(self.values)

    @property
    def of_others(self) -> Numbers:
        """The mean over the other clients' samples of each client's model; nan of a single client."""
        others = self.values[:-1].copy()
        np.fill_diagonal(others, np.nan)
        known = ~np.isnan(others)
        return np.where(known.any(1), np.nansum(others, 1) / np.maximum(known.sum(1), 1), np.nan)


@named_code.scope()
def cross_site(
    path: str | Path, samples: int = gains.SAMPLES, code: named_code.Modules = (), **values: Any
) -> CrossSite:
    """Every bundle of a run on every client's test samples; the matrix is added to the folder, for reports.

    Args:
        path: The run folder.
        samples: Test samples of each client at most, evenly chosen.
        code: Modules of yours that the folder may name.
        values: What a Python program passed to the run: `algorithm`, `model`, `data`.
    """
    at_least(1, samples=samples)
    named_code.name(code)
    path = Path(path)
    located(path, OF_SERVER)  # it says so, if there are no bundles
    e = reopen(RunFolder(path), **values)
    task, federation, models = e.training.task, e.training.federation, RunFolder(path).models(e.task)

    def model_of(client: int) -> Personal:
        kept = models.get(client)
        if kept is None:
            raise RunError(f"{models.of(client)} has no model; restore it from a copy, or run it again")
        return kept.model

    e.training.compute()
    cross = gains.cross_evaluation(task, federation, model_of, range(e.clients), samples)
    tests = [gains.evenly_chosen(tree.row(federation.test.rows([n]), 0), samples) for n in range(e.clients)]
    of_server = tree.each(
        lambda t: t.to(task.device), read_bundle(path, OF_SERVER, model=values.get("model")).model
    )
    with torch.no_grad():
        last_row = primary_metrics(task, of_server, tests)
    measured = GAINS.read(path)
    alone = np.full(e.clients, np.nan) if measured is None else measured.alone
    shown = gains.compared(e.clients)
    part = Cross(shown, cross.values[np.ix_(shown, shown)], cross.metric, cross.per_class)
    with claimed(path, new=False):
        constant = gains.constant_answers(e.federation, e.task.metrics[0])
        GAINS.write(Analysis(alone, part, constant), path)
    names = client_titles(names_of_clients(federation.dataset, federation.partition))
    sizes = [int(data.size) for data in tests]
    return CrossSite(names, np.vstack([cross.values, last_row]), sizes, task.metrics[0])
