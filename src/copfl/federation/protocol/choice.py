"""The choice of a method by rows that each site holds out: all candidates on all folds, in one run of few rounds.

A run with session.choose=true trains `InFolds`: for each candidate and each fold a model of the rows of the other
folds. What a node sends are the equations of all of them, one after another, so a round is one sum. In the last round
the metrics are losses of held-out rows: see `names_of` for what leaves.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.algorithms.levels import Levels, Total, Upload
from copfl.choosing.candidates import ALONE, LEVELS, SLOPES, Candidate, Facts, candidates_for
from copfl.choosing.evaluate import ENOUGH
from copfl.core import ClientOutput, Data, Metrics, Plan, Task, tree
from copfl.core.algorithm import blank_samples, example_output
from copfl.core.task import Personal
from copfl.errors import UsageError
from copfl.rivals.records import BOOSTED, CONSTANT, FOREST, LINEAR
from copfl.settings.components import build
from copfl.settings.federation import Federation
from copfl.settings.schema import Run, record_of

# What is tried: solved from sums in a few rounds. Trees take hundreds, a network has no end that is known before.
TRIED = (LEVELS, SLOPES)
RIVALS = (CONSTANT, LINEAR, FOREST, BOOSTED)  # what a site trains alone, the simplest first
NEVER = -1  # the fold of a row that is always trained on
REPORTS, LOSS, GAIN, VARIANCE = "choice reports", "choice loss of ", "choice gain of ", "choice variance of "


def name_of_rival(kind: str) -> str:
    """Of a candidate that a site trains alone."""
    return kind if kind == CONSTANT else kind + ALONE


ALONE_NAMES = tuple(map(name_of_rival, RIVALS))


def names_of(methods: Sequence[str]) -> list[str]:
    """What a site reports once, in the last round: sums over sites leave where only sums may.

    Whether it held rows out; of each candidate the mean loss of these rows; and for each pair of what it has alone and
    a method, by how much what is alone is better, with the variance of that.

    Args:
        methods: The candidates of the federation.
    """
    pairs = [f"{alone} over {method}" for alone, method in product(ALONE_NAMES, methods)]
    losses = [LOSS + name for name in (*methods, *ALONE_NAMES)]
    return [REPORTS, *losses, *(GAIN + pair for pair in pairs), *(VARIANCE + pair for pair in pairs)]


def candidates_of(names: Sequence[str]) -> list[Candidate]:
    """The candidates of these names; UsageError for one that no federation tries."""
    known = {one.name: one for one in candidates_for(Facts("", "", 0, 1, ())).candidates if one.name in TRIED}
    for name in names:
        if name not in known:
            raise UsageError(f"choice.candidates has {name!r}; a federation chooses among {', '.join(known)}")
    return [known[name] for name in names]


def _algorithm_of(one: Candidate, run: Run) -> Run:
    table = dict((one.layer or {})["algorithm"])
    return dataclasses.replace(
        run, algorithm=record_of("algorithm", {"shrink": True, "alone": False} | table)
    )


def applied(federation: Federation) -> Federation:
    """The federation as it trains: of the candidate that was taken, or for the rounds of the choice.

    Args:
        federation: As its settings say, with candidates.
    """
    session, run = federation.session, federation.run
    candidates = candidates_of(federation.choice.names)
    if (
        run.algorithm.name != LEVELS
        or run.privacy
        or run.server
        or run.addons
        or federation.selected < run.run.clients
    ):
        raise UsageError(
            "choice.candidates are solved from sums of all sites: name no other algorithm, step of the server, add-on, "
            "privacy or participation beside them, or leave the candidates out"
        )
    if session.taken:
        taken = next(one for one in candidates if one.name == session.taken)
        return dataclasses.replace(federation, run=_algorithm_of(taken, run))
    if not session.choose:
        return federation
    rounds = min(run.run.rounds, ENOUGH)
    settings = dataclasses.replace(run.run, rounds=rounds, eval_every=rounds)
    return dataclasses.replace(federation, run=dataclasses.replace(run, run=settings))


class Parts(NamedTuple):
    """Records of each candidate on each fold."""

    parts: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class InFolds:
    """Each candidate on the rows without each fold, as one algorithm."""

    names: tuple[str, ...]
    candidates: tuple[Levels, ...]
    folds: int
    of: Tensor | None = None  # [rows] at a node: the fold of each, or NEVER; None: no row is held out

    head_only = True
    only_mean = Levels.only_mean
    total_epochs = 1

    @classmethod
    def of_federation(cls, federation: Federation) -> "InFolds":
        """The candidates of its settings."""
        runs = [_algorithm_of(one, federation.run) for one in candidates_of(federation.choice.names)]
        algorithms = tuple(build("algorithm", run.algorithm) for run in runs)
        return cls(federation.choice.names, algorithms, federation.choice.folds)

    @property
    def reported(self) -> list[str]:
        """What a site reports in the last round."""
        return names_of(self.names)

    @property
    def _each(self) -> list[tuple[Levels, int]]:
        return list(product(self.candidates, range(self.folds)))

    def held_out(self, fold: int, rows: int) -> Tensor:
        """[rows] bool: those of a fold; none where it would be all."""
        held = torch.zeros(rows, dtype=torch.bool) if self.of is None else self.of == fold
        return torch.zeros_like(held) if bool(held.all()) else held

    def server_init(self, task: Task, clients: int) -> Parts:
        return Parts(tuple(one.server_init(task, clients) for one, _ in self._each))

    def client_init(self, task: Task) -> Parts:
        return Parts(tuple(one.client_init(task) for one, _ in self._each))

    def downlink(self, server: Parts, ids: Tensor) -> Parts:
        pairs = zip(self._each, server.parts, strict=True)
        return Parts(tuple(one.downlink(part, ids) for (one, _), part in pairs))

    def models(self, task: Task, client: Parts, down: Parts) -> list[Personal]:
        """The model of each candidate on each fold, the folds of a candidate one after another."""
        triples = zip(self._each, client.parts, down.parts, strict=True)
        return [one.personal_model(task, own, common) for (one, _), own, common in triples]

    def personal_model(self, task: Task, client: Parts, down: Parts) -> Personal:
        return self.models(task, client, down)[0]

    def client_update(self, task: Task, client: Parts, down: Parts, data: Data, plan: Plan) -> ClientOutput:
        outputs = []
        for (one, fold), own, common in zip(self._each, client.parts, down.parts, strict=True):
            trained = ~self.held_out(fold, len(data.y)).to(data.y.device)
            x, y = tree.each(lambda t, rows=trained: t[rows], (data.x, data.y))
            size = data.size if self.of is None else torch.tensor(len(y), device=data.y.device)
            outputs.append(one.client_update(task, own, common, Data(x, y, size), plan))
        upload = Upload(torch.cat([output.upload.sums for output in outputs]))
        return ClientOutput(Parts(tuple(output.client for output in outputs)), upload, outputs[0].trained, {})

    def summand(self, task: Task, server: Parts, id: Tensor, upload: Upload) -> Total:
        return Total(upload.sums)

    def server_update(self, task: Task, server: Parts, total: Total) -> tuple[Parts, Metrics]:
        blank = blank_samples(task, (task.layout.head_shape[1],))
        sizes = [example_output(one, task, blank, False, 1).upload.sums.numel() for one in self.candidates]
        ends = np.cumsum([size for size in sizes for _ in range(self.folds)])[:-1].tolist()
        sums = torch.tensor_split(total.sums, ends)
        after = [
            one.server_update(task, part, Total(own))[0]
            for (one, _), part, own in zip(self._each, server.parts, sums, strict=True)
        ]
        return Parts(tuple(after)), {}
