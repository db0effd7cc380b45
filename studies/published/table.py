"""A published table as values: where it is from, how each row is trained, and what copfl gives for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset
from copfl.engine import seed_batching
from copfl.engine.simulate import simulate
from copfl.experiment.preparation import prepare
from copfl.experiment.result import Result
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
    changed: str = ""  # what differs from the source, where the data folder has less, and what that changes


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
    by_rows: bool = False  # whether the mean over the clients is weighted by their test samples
    model: Callable[..., nn.Module] | None = None  # of classes, where copfl has none of its kind


class Outcome(NamedTuple):
    """What copfl gives for a row."""

    row: Row
    values: Numbers  # [seeds], means over the clients
    low: float  # the range in which 95 % of published means of as many seeds would be
    high: float
    changed: str = ""  # what differs from the source, see `Federation`

    @property
    def agrees(self) -> bool:
        return self.low <= self.row.published <= self.high


def run_row(
    table: Table,
    row: Row,
    federation: Federation,
    seeds: Sequence[int],
    rounds: int | None = None,
    device: str = "cpu",
) -> Numbers:
    """The mean over the clients of the row's metric, for each seed.

    Where the rounds have a part of the clients, one more round of all clients is evaluated after them.

    Args:
        table: The table of the row.
        row: The row.
        federation: What its clients have.
        seeds: Of initial weights and batches.
        rounds: In place of the table's, to try a definition.
        device: Where it is trained.
    """
    always = {
        "workers": 1,
        "device": device,
        "engine": "vmap",
        "chunk": len(seeds) * federation.partition.clients,
    }
    always |= {"rivals": False, "save_models": False, "find_rounds": "off"}
    experiments = []
    for seed in seeds:
        run = {"seed": seed, "clients": federation.partition.clients, **always}
        values = {"data": federation.dataset, "partition": federation.partition, "model": table.model}
        settings = complete({"run": run}, table.settings, row.settings, values=values)
        last = {"run": {"eval_every": rounds or settings.run.rounds, "rounds": rounds or settings.run.rounds}}
        experiments.append(prepare(complete(settings.replaced(last), values=values)))
    simulations = [simulation_of(e) for e in experiments]
    loops = [partial(train_rounds, e, None, None) for e in experiments]
    if seed_batching.can_batch(simulations):
        results = seed_batching.run_batched(simulations, loops)
    else:
        results = [loop() for loop in loops]
    weights = [len(part) for part in federation.partition.test] if table.by_rows else None
    return np.array([_mean(_of_all(result, row.metric), weights) for result in results])


def _of_all(result: Result, metric: str) -> Numbers:
    """The metric of every client at the end of the run."""
    e = result.experiment
    if e.settings.participation == 1:
        return result.final(metric)
    (last,) = simulate(simulation_of(e), result.state, rounds=result.state.round + 1)
    return last.clients[metric]


def _mean(values: Numbers, weights: Sequence[int] | None) -> float:
    is_known = ~np.isnan(values)
    of_known = None if weights is None else np.array(weights)[is_known]
    return float(np.average(values[is_known], weights=of_known))


def outcome(row: Row, values: Numbers, published_seeds: int) -> Outcome:
    """The row's values, and the range of published means that agree with them.

    A published mean of p seeds and our mean of n differ by chance with a deviation of s * sqrt(1/p + 1/n), where s is
    the deviation of a single seed.

    Args:
        row: The row.
        values: Ours, one per seed.
        published_seeds: Of the published mean.
    """
    deviation = float(values.std(ddof=1)) if len(values) > 1 else math.nan
    spread = deviation * math.sqrt(1 / published_seeds + 1 / len(values))
    mean = float(values.mean())
    return Outcome(row, values, mean - CONFIDENCE * spread, mean + CONFIDENCE * spread)


def run_table(
    table: Table,
    seeds: int,
    data_dir: Path | None = None,
    tell: Callable[[str], None] = print,
    rounds: int | None = None,
    device: str = "cpu",
) -> list[Outcome]:
    """The outcome of every row.

    Args:
        table: The table.
        seeds: How many to run; the published means are of `table.seeds`.
        data_dir: The folder of the data, where the table needs one.
        tell: Gets a line for each row.
        rounds: In place of the table's, to try a definition.
        device: Where it is trained.
    """
    federations, outcomes = table.federations(data_dir), []
    for row in table.rows:
        federation = federations[row.federation]
        values = run_row(table, row, federation, range(seeds), rounds, device)
        outcomes.append(outcome(row, values, table.seeds)._replace(changed=federation.changed))
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
