"""The rivals of a comparison: what each client has alone, beside the rows; trained once per partition.

`compare` trains them after its rows; tables and files show them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from copfl.comparison.results.results import Record
from copfl.experiment.preparation import prepare
from copfl.experiment.rivals import rivals_of
from copfl.measures.metrics import MetricInfo
from copfl.rivals.choice import best_of_sites
from copfl.rivals.records import TITLES, Rivals
from copfl.settings.complete import complete
from copfl.settings.toml import Tables
from copfl.stats import LEVEL, Difference, Spread, difference, for_all, how_decided, spread_of
from copfl.tables import Table, capital


class SeedRivals(NamedTuple):
    """The rivals with the clients of each seed; natural clients are the same in all of them."""

    chosen: str  # the best kind of model, by cross-validation within training rows
    of_seeds: list[Rivals]

    @property
    def metrics(self) -> tuple[MetricInfo, ...]:
        return self.of_seeds[0].metrics

    def means(self, name: str) -> dict[str, Spread]:
        """By metric, the mean over clients and its spread over seeds, of one kind of model."""
        means = [rivals.means(name) for rivals in self.of_seeds]
        return {
            metric.name: spread_of([of_seed[metric.name] for of_seed in means]) for metric in self.metrics
        }

    def to_best(self, runs: Sequence[Record]) -> Difference:
        """The paired difference of a row to the chosen kind of model, in the primary metric."""
        primary = self.metrics[0].name
        ours = [np.array(run.clients[primary]) for run in runs]
        theirs = [rivals.values[self.chosen].tested[primary] for rivals in self.of_seeds]
        return difference(ours, theirs, same_clients=runs[0].same_clients)

    def all_to_best(self, rows: Mapping[str, Sequence[Record]]) -> dict[str, Difference]:
        """`to_best` of every row, corrected for their number."""
        return for_all({label: self.to_best(runs) for label, runs in rows.items()})


def seed_rivals(layers: Sequence[Tables], seeds: Sequence[int]) -> SeedRivals | None:
    """The rivals with the partition of each seed; None where there are none, or run.rivals is off.

    Args:
        layers: The settings of any row.
        seeds: Of the comparison.
    """
    of_seeds: list[Rivals] = []
    by_partition: dict[str, Rivals] = {}
    for seed in seeds:
        run = complete(*layers, {"run": {"seed": seed}})
        if not run.run.rivals:
            return None
        experiment = prepare(run)
        samples = experiment.federation.partition.fingerprint
        if samples not in by_partition:
            rivals_here = rivals_of(experiment, lambda client: None)
            if rivals_here is None:
                return None
            by_partition[samples] = rivals_here
        of_seeds.append(by_partition[samples])
    names = set.intersection(*(set(rivals.values) for rivals in of_seeds))
    validated = {
        name: np.concatenate([rivals.values[name].validated for rivals in of_seeds])
        for name in TITLES
        if name in names
    }
    return SeedRivals(best_of_sites(validated, of_seeds[0].metric), of_seeds)


def rival_tables(rivals: SeedRivals, rows: Mapping[str, Sequence[Record]]) -> list[Table]:
    """The rivals, a row each, and the difference of every row of the comparison to the best of them.

    Args:
        rivals: Of the comparison.
        rows: The runs of each row by its title.
    """
    metric, first = rivals.metrics[0], rivals.of_seeds[0]
    alone = []
    for name in first.values:
        means = rivals.means(name)
        cells = [other.text(*means[other.name]) for other in rivals.metrics]
        alone.append([TITLES[name], *cells, "best" if name == rivals.chosen else ""])
    how = (
        f"{capital(first.models)}, trained at each site alone on {first.inputs}. best: by cross-validation "
        "within training rows, test rows have no say. They can be left out (rivals)."
    )
    left_out = [f"Without {TITLES[name]}: {why}." for name, why in first.left_out.items()]
    head = ["", *(other.label for other in rivals.metrics), ""]
    shown = [Table("What each site has alone", head, alone, [how, *left_out])]
    level, compared = f"{100 * LEVEL:.0f} %", []
    for title, gain in rivals.all_to_best(rows).items():
        bounds = [metric.interval(*bound) for bound in (gain.both, gain.seeds, gain.clients)]
        compared.append([title, metric.text(gain.mean, sign="+"), *bounds, metric.verdict(gain.verdict)])
    head = ["", "difference", f"{level} over both", "over seeds", "over sites", "verdict"]
    title = f"Difference to {TITLES[rivals.chosen]} at each site alone, {metric.title}{metric.points}"
    note = f"Paired: the same site of the same seed. {how_decided(len(compared))}"
    return [*shown, Table(title, head, compared, [note])]


def as_json(rivals: SeedRivals, rows: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    """The means of the rivals, and the differences of rows to the best of them, by label.

    Args:
        rivals: Of the comparison.
        rows: The runs of each row by its label.
    """
    gains = rivals.all_to_best(rows)
    return {
        "chosen": rivals.chosen,
        "metrics": [metric.as_json() for metric in rivals.metrics],
        "mean": {
            name: {metric: spread.mean for metric, spread in rivals.means(name).items()}
            for name in rivals.of_seeds[0].values
        },
        "per_client": {
            name: [dict(of_seed.values[name].tested) for of_seed in rivals.of_seeds]
            for name in rivals.of_seeds[0].values
        },
        "differences": {label: gain.as_json() for label, gain in gains.items()},
        "left_out": dict(rivals.of_seeds[0].left_out),
    }
