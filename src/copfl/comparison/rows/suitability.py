"""Which rows of a comparison can train: some algorithms need classes, public samples or adapters.

`compare` and `choose` ask before they train anything.
"""

import dataclasses
from collections.abc import Mapping

from copfl.core import tree
from copfl.core.algorithm import example_output, traits
from copfl.errors import UsageError
from copfl.experiment.experiment import Experiment
from copfl.experiment.preparation import algorithm, prepare
from copfl.settings.complete import complete
from copfl.settings.components import build
from copfl.settings.toml import Tables

SHARED = ("model", "adapter", "task")  # rows that have these in common have the same task
CHECK: Tables = {"run": {"device": "cpu", "engine": "sequential", "precision": "auto"}}  # needs no GPU


def refusals(layers: Mapping[str, list[Tables]], experiment: Experiment) -> dict[str, str]:
    """By label, why a row cannot train: one local update on two samples of the prepared experiment.

    Args:
        layers: The settings of each row by its label.
        experiment: Of any row; rows with the same task use its samples.
    """
    refused = {}
    for label, of_row in layers.items():
        try:
            run, e = complete(*of_row), experiment
            made, task = build("algorithm", run.algorithm, optimizer=run.optimizer), e.task
            if any(getattr(run, kind) != getattr(e.run, kind) for kind in SHARED):
                e = prepare(complete(*of_row, CHECK))
                task, made = e.task, e.algorithm
            else:
                if public := traits(made).public:
                    task = dataclasses.replace(task, public=e.federation.unassigned(public))
                made = algorithm(run, made, task, e.federation)
            example_output(made, task, tree.row(e.federation.train.rows([0]), 0), clients=2)
        except UsageError as error:
            refused[label] = str(error)
    return refused


def reasons(refused: Mapping[str, str]) -> str:
    """The labels with their reasons, each reason once: "fedpac, ktpfl (needs classes)"."""
    labels: dict[str, list[str]] = {}
    for label, reason in refused.items():
        labels.setdefault(reason.removeprefix(f"{label.partition(' ')[0]} "), []).append(label)
    return "; ".join(f"{', '.join(alike)} ({reason})" for reason, alike in labels.items())
