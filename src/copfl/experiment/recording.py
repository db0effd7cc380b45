"""What a run recorded, as plain values: it is the same in memory and in the run folder.

Nothing here needs the data set, the model or somebody's code. What else was found out about the run are its findings,
see `copfl.experiment.finding`, which look at a `Recording`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.core.selection import BestRounds, has_ended
from copfl.data.clients.groups import client_titles
from copfl.data.clients.partition import Partition
from copfl.engine.rounds import Ids
from copfl.errors import unknown
from copfl.experiment import records
from copfl.experiment.records import FinalEvaluation, Record
from copfl.measures.metrics import MetricInfo, metrics_of
from copfl.settings.toml import Tables
from copfl.stats import Numbers

NAME = 20  # characters of a client's name in a table of the terminal
# The name of the finding that completes the metrics of the rounds.
FINAL_EVALUATION = "final_evaluation"


@dataclass(eq=False, repr=False, kw_only=True)
class Recording:
    """The settings, sites and rounds of a run. Arrays are [rounds, clients], nan where a client was not evaluated.

    Args:
        tables: The settings, as in run.toml.
        environment: Versions, metrics and clients, as in environment.json.
        partition: The samples of each client.
        records: The metrics of each round, as in rounds.jsonl.
        seconds: Of each round.
        folder: Where the run is stored; None: nowhere.
        findings: What was found out beside the rounds, by name.
    """

    tables: Tables
    environment: Mapping[str, Any]
    partition: Partition
    records: list[Record] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    folder: Path | None = None
    findings: dict[str, Any] = field(default_factory=dict)

    @property
    def algorithm(self) -> str:
        return algorithm_of(self.tables)

    @property
    def clients(self) -> int:
        return self.partition.clients

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """The training and test samples of each client."""
        return [len(rows) for rows in self.partition.train], [len(rows) for rows in self.partition.test]

    @property
    def label_counts(self) -> NDArray[np.int64] | None:
        """The training samples of each class, [clients, classes]; None where targets are no classes."""
        return label_counts_of(self.environment)

    @property
    def rounds(self) -> list[int]:
        return [record["round"] for record in self.records]

    @property
    def planned(self) -> int:
        """The number of rounds that run.toml asks for."""
        return int(self.tables["run"]["rounds"])

    @property
    def ended(self) -> bool:
        patience = int(self.tables["run"].get("patience", 0))
        return has_ended(len(self.records), self.planned, self.best, patience)

    @property
    def stopped_early(self) -> bool:
        """Whether the rounds ended because no client improved any more, see run.patience."""
        return self.ended and len(self.records) < self.planned

    @property
    def primary(self) -> MetricInfo:
        """The primary metric of the run: the first of those that were asked for."""
        return metrics_of(self.environment)[0]

    def has(self, name: str) -> bool:
        """Whether any round recorded this metric of its clients."""
        return any(name in record["per_client"] for record in self.records)

    def metric(self, name: str) -> Numbers:
        """A metric of rounds.jsonl by name, such as "loss", "weight" or "gradient_score"."""
        if not self.has(name):
            raise unknown("metric", name, {name for record in self.records for name in record["per_client"]})
        return self.metric_or_nan(name)

    def metric_or_nan(self, name: str) -> Numbers:
        """A metric by name; all nan where the run did not record it."""
        return records.table(self.records, name, self.clients)

    def latest(self, name: str) -> Numbers:
        """The newest value of a metric for each client, nan where there is none.

        Args:
            name: Of the metric, such as "accuracy" or "loss".
        """
        return records.latest(self.records, name, self.clients)

    def federation_metric(self, name: str) -> list[float | None]:
        """A metric of the whole federation, in every round."""
        return [record["federation"].get(name) for record in self.records]

    @cached_property
    def best(self) -> BestRounds | None:
        """Each client's best round on its validation samples; None where its last one was taken."""
        if self.tables["run"].get("select", "last") != "best":
            return None
        return records.best_rounds(self.records, self.primary, self.clients)

    @cached_property
    def rounds_taken(self) -> Ids:
        """The round, from 1, of each client's model and final metrics, see run.select; 0: no round evaluated it."""
        if self.best is not None:
            return self.best.rounds
        return records.last_rounds(self.records, self.primary, self.clients)

    def final(self, name: str) -> Numbers:
        """A metric of each client's model that the run ended with: with run.select="best", of its best round.

        A client that no round evaluated has the value of `final_evaluation`.

        Args:
            name: Of the metric, such as "accuracy" or "loss".
        """
        values = (
            self.latest(name)
            if self.best is None
            else records.at_rounds(self.records, name, self.best.rounds)
        )
        at_the_end: FinalEvaluation | None = self.findings.get(FINAL_EVALUATION)
        return values if at_the_end is None else at_the_end.completed(values, name)

    @property
    def selection(self) -> str:
        """Which round a client's values are of, in words."""
        if self.best is None:
            return "last evaluation"
        best_rounds = self.best.rounds[self.best.rounds > 0]
        rounds = (
            f": rounds {best_rounds.min()} to {best_rounds.max()}, median {np.median(best_rounds):g}"
            if len(best_rounds)
            else ""
        )
        return f"best round of each client on its validation samples{rounds}"

    @property
    def malicious(self) -> NDArray[np.bool_]:
        """Which clients the simulation attacks with."""
        return np.asarray(np.nan_to_num(self.latest("malicious")) > 0)

    @property
    def of_honest(self) -> Numbers:
        """The primary metric of each client's model; nan of the clients of a simulated attack."""
        return np.where(self.malicious, np.nan, self.final(self.primary.name))

    @property
    def client_names(self) -> list[str]:
        """The name of each client, or its number."""
        numbers = list(map(str, range(self.clients)))
        names = [str(name) for name in self.environment.get("client_names", [])]
        return (
            [name or n for name, n in zip(names, numbers, strict=True)]
            if len(names) == len(numbers)
            else numbers
        )

    @property
    def client_titles(self) -> list[str]:
        """Such as "site 3", or "site 3 (north)" where the data name their sites."""
        return client_titles(self.client_names)

    @property
    def site_names(self) -> list[str]:
        """The name of each site, or such as "site 3", for people."""
        return [f"site {name}" if name == str(n) else name for n, name in enumerate(self.client_names)]

    @property
    def short_names(self) -> list[str]:
        """Such as "3", or "3 (north)", for a table of the terminal."""
        return [
            name if name == str(n) else f"{n} ({name[:NAME]})" for n, name in enumerate(self.client_names)
        ]


def algorithm_of(tables: Tables) -> str:
    """The algorithm's name, or its description where it was given as a Python value."""
    table = tables["algorithm"]
    return str(table.get("name") or str(table.get("value", "own")).partition("(")[0])


def label_counts_of(environment: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """The label counts of environment.json; None where it has none."""
    counts = [[int(count) for count in row.split()] for row in environment.get("label_counts", [])]
    return np.array(counts, np.int64) if counts else None
