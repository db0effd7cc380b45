"""A published table as values: where it is from, how each row is trained, and what copfl gives for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset
from copfl.engine import seed_batching
from copfl.experiment.preparation import prepare
from copfl.experiment.training import simulation_of, train_rounds
from copfl.settings.complete import complete
from copfl.stats import Numbers
from copfl.tables import Table as Printed
from copfl.tables import as_markdown

Settings = Mapping[str, Mapping[str, Any]]  # by title and key, as in run.toml
CONFIDENCE = 1.96  # deviations on both sides that have 95 % of a normal distribution


class Federation(NamedTuple):
    """What the clients have."""

    dataset: Dataset
    partition: Partition


class Row(NamedTuple):
    """One method of a table."""

    name: str
    published: float
    settings: Settings  # beside those of the table
    metric: str  # of copfl's records, at the end of the run; the mean over the clients counts
    federation: str = ""  # another one of the table's federations; "": the usual one


class Table(NamedTuple):
    """A published table."""

    title: str
    source: str
    federations: Callable[[Path | None], Mapping[str, Federation]]  # of the data folder; the usual one is ""
    settings: Settings  # of every row
    rows: tuple[Row, ...]
    seeds: int  # of the published means
    tolerance: str  # why a published number may differ
    unsaid: str  # what the source leaves open, and how it is taken here


class Outcome(NamedTuple):
    """What copfl gives for a row."""

    row: Row
    values: Numbers  # [seeds], means over the clients
    low: float  # the range in which 95 % of published means of as many seeds would be
    high: float

    @property
    def agrees(self) -> bool:
        return self.low <= self.row.published <= self.high


def run_row(table: Table, row: Row, federation: Federation, seeds: Sequence[int]) -> Numbers:
    """The mean over the clients of the row's metric, for each seed.

    Args:
        table: The table of the row.
        row: The row.
        federation: What its clients have.
        seeds: Of initial weights and batches.
    """
    always = {"workers": 1, "engine": "vmap", "chunk": len(seeds) * federation.partition.clients}
    always |= {"rivals": False, "save_models": False, "find_rounds": "off"}
    experiments = []
    for seed in seeds:
        run = {"seed": seed, "clients": federation.partition.clients, **always}
        values = {"data": federation.dataset, "partition": federation.partition}
        settings = complete({"run": run}, table.settings, row.settings, values=values)
        last = {"run": {"eval_every": settings.run.rounds}}
        experiments.append(prepare(complete(settings.replaced(last), values=values)))
    simulations = [simulation_of(e) for e in experiments]
    loops = [partial(train_rounds, e, None, None) for e in experiments]
    if seed_batching.can_batch(simulations):
        results = seed_batching.run_batched(simulations, loops)
    else:
        results = [loop() for loop in loops]
    return np.array([np.nanmean(result.final(row.metric)) for result in results])


def outcome(row: Row, values: Numbers, published_seeds: int) -> Outcome:
    """The row's values, and the range of published means that agree with them.

    A published mean of p seeds and our mean of n differ by chance with a deviation of s * sqrt(1/p + 1/n), where s is
    the deviation of a single seed.

    Args:
        row: The row.
        values: Ours, one per seed.
        published_seeds: Of the published mean.
    """
    spread = float(values.std(ddof=1)) * math.sqrt(1 / published_seeds + 1 / len(values))
    mean = float(values.mean())
    return Outcome(row, values, mean - CONFIDENCE * spread, mean + CONFIDENCE * spread)


def run_table(
    table: Table, seeds: int, data_dir: Path | None = None, tell: Callable[[str], None] = print
) -> list[Outcome]:
    """The outcome of every row.

    Args:
        table: The table.
        seeds: How many to run; the published means are of `table.seeds`.
        data_dir: The folder of the data, where the table needs one.
        tell: Gets a line for each row.
    """
    federations, outcomes = table.federations(data_dir), []
    for row in table.rows:
        values = run_row(table, row, federations[row.federation], range(seeds))
        outcomes.append(outcome(row, values, table.seeds))
        tell(f"{row.name}: {outcomes[-1].values.mean():.3f}, published {row.published:.3f}")
    return outcomes


def as_text(outcomes: Sequence[Outcome]) -> str:
    """The table, published beside ours."""
    rows = [
        [
            one.row.name,
            f"{one.row.published:.3f}",
            f"{one.values.mean():.3f}",
            f"{one.low:.3f} to {one.high:.3f}",
            "yes" if one.agrees else "**no**",
        ]
        for one in outcomes
    ]
    return as_markdown(Printed("", ("method", "published", "copfl", "range", "inside"), rows))
