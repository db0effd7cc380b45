"""Runs of one report beside each other: the difference of each client to the first run."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from copfl.experiment.run_record import RunRecord
from copfl.measures.metrics import MetricInfo
from copfl.stats import Numbers, difference_of_known, over_clients, unknown_reason
from copfl.tables import NONE


class Paired(NamedTuple):
    """A run's difference to the first, over the clients that both evaluated; positive is higher."""

    label: str
    difference: Numbers  # [clients that have both values]
    metric: MetricInfo

    @property
    def mean(self) -> float:
        return math.nan if unknown_reason([self.difference]) else float(self.difference.mean())

    @property
    def bounds(self) -> str:
        """The interval of the mean over the clients, such as "-1.5 to +2.0"."""
        if unknown_reason([self.difference]):
            return NONE
        if len(self.difference) < 2:
            return "no interval, as there is one site"
        return " to ".join(self.metric.text(end, sign="+") for end in over_clients(self.difference))

    @property
    def verdict(self) -> str:
        """What the interval allows, if it excludes zero; one client has none."""
        if reason := unknown_reason([self.difference]):
            return f"not computed: {reason}"
        if not over_clients(self.difference).without_zero:
            return "not distinguishable"
        return self.metric.verdict("higher" if self.mean > 0 else "lower")


Runs = Sequence[RunRecord]


def paired(runs: Runs) -> list[Paired]:
    """The other runs compared with the first, where both have the same samples."""
    first, *others = runs
    name, differences = first.primary.name, []
    for run in others:
        if run.partition.fingerprint == first.partition.fingerprint:
            difference = difference_of_known(run.final(name), first.final(name))
            differences.append(Paired(run.label, difference, first.primary))
    return [pair for pair in differences if len(pair.difference)]
