"""The rivals of a comparison are trained: once for each partition of its seeds."""

from collections.abc import Sequence

import numpy as np

from copfl.comparison.jobs.submission import Log
from copfl.comparison.rivals import SeedRivals
from copfl.experiment.preparation import prepare
from copfl.experiment.rivals import rivals_of
from copfl.rivals.choice import best_of_sites
from copfl.rivals.records import TITLES, Rivals
from copfl.settings.complete import complete
from copfl.settings.toml import Tables


def seed_rivals(layers: Sequence[Tables], seeds: Sequence[int], log: Log) -> SeedRivals | None:
    """The rivals with the partition of each seed; None where there are none, or run.rivals is off.

    Args:
        layers: The settings of any row.
        seeds: Of the comparison.
        log: Gets a line before they are trained.
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
            rivals_here = rivals_of(experiment, lambda client: None, log)
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
