"""The data of a run folder, finished or not, read without the data set, the model or the user's code.

The report reads runs of others: nothing of them is imported or unpickled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from copfl import foreign
from copfl.core.selection import BestRounds, has_ended
from copfl.data.clients.groups import client_titles
from copfl.engine import checkpoint
from copfl.errors import RunError, UsageError, raised_as
from copfl.experiment import choice as choice_file
from copfl.experiment import final as final_file
from copfl.experiment import probabilities, records, survival, tree_views
from copfl.experiment.analysis import gains
from copfl.experiment.analysis.gains import Analysis, Gains
from copfl.experiment.choice import Choice
from copfl.experiment.final import FinalEvaluation
from copfl.experiment.folder import RunFolder
from copfl.experiment.models import new_clients
from copfl.experiment.models.new_clients import NEW_CLIENTS, NewClients
from copfl.experiment.probabilities import Probabilities
from copfl.experiment.survival import Survival
from copfl.experiment.tree_views import TreeViews
from copfl.measures.metrics import MetricInfo, metrics_of
from copfl.rivals import file as rivals_file
from copfl.rivals.records import Rivals
from copfl.settings.schema import optimizer_text
from copfl.settings.toml import Tables
from copfl.stats import Numbers, difference_of_known, over_clients, unknown_reason
from copfl.tables import NONE

T = TypeVar("T")

AUDIT_FORMAT = "copfl audit 2"
MODELS = {  # by the suffix of the metric
    "": ("after training", "after local training"),
    "_before": ("before training", "with the new global model, before local training"),
    "_global": ("global model", "with the global model alone, as a new client would have it"),
}
RESTORE = "restore it from a copy, or start the run again"


@dataclass(frozen=True, eq=False)
class RunData:
    """One run. Arrays are [rounds, clients], nan where a client did not take part or was not evaluated."""

    path: Path
    label: str  # unique among the runs of the report
    tables: Tables
    toml: str  # the text of run.toml
    environment: Mapping[str, Any]
    records: list[dict[str, Any]]
    seconds: list[float]
    partition: str  # fingerprint
    sizes: tuple[list[int], list[int]]  # train and test samples of each client
    label_counts: NDArray[np.int64] | None  # [clients, classes], of train samples
    masks: Masks | None
    audit: Mapping[str, Any] | None = None  # audit.json, if there is one
    analysis: Analysis | None = None  # gains.json, if there is one
    new: NewClients | None = None  # new_clients.json, if there is one
    rivals: Rivals | None = None  # rivals.json, if there is one
    choice: Choice | None = None  # choice.json, if there is one
    probabilities: Probabilities | None = None  # probabilities.json, if there is one
    survival: Survival | None = None  # survival.json, if there is one
    trees: TreeViews | None = None  # trees.json, if there is one
    final_evaluation: FinalEvaluation | None = None  # final.json, if there is one of these rounds

    @property
    def algorithm(self) -> str:
        return algorithm_of(self.tables)

    @property
    def clients(self) -> int:
        return len(self.sizes[0])

    @property
    def rounds(self) -> list[int]:
        return [record["round"] for record in self.records]

    @property
    def planned(self) -> int:
        """The number of rounds that run.toml asks for."""
        return int(self.tables["run"]["rounds"])

    @property
    def primary(self) -> MetricInfo:
        return metrics_of(self.environment)[0]

    def has(self, name: str) -> bool:
        """Whether any round recorded this metric of its clients."""
        return any(name in record["per_client"] for record in self.records)

    def metric(self, name: str) -> Numbers:
        """A metric of the clients, in every round."""
        return records.table(self.records, name, self.clients)

    @cached_property
    def best(self) -> BestRounds | None:
        """Each client's best round on its validation samples; None where its last one was taken."""
        if self.tables["run"].get("select", "last") != "best":
            return None
        return records.best_rounds(self.records, self.primary, self.clients)

    @property
    def stopped_early(self) -> bool:
        """Whether the run ended because no client improved any more."""
        return self.ended and len(self.records) < self.planned

    @property
    def ended(self) -> bool:
        patience = int(self.tables["run"].get("patience", 0))
        return has_ended(len(self.records), self.planned, self.best, patience)

    def final(self, name: str) -> Numbers:
        """Each client's value in the round that its model is taken from, or is so far, [clients]."""
        values = (
            records.latest(self.records, name, self.clients)
            if self.best is None
            else records.at_rounds(self.records, name, self.best.rounds)
        )
        return values if self.final_evaluation is None else self.final_evaluation.completed(values, name)

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

    @cached_property
    def client_names(self) -> list[str]:
        """Such as "client 3", or "client 3 (north)" where the data name their clients."""
        names = [str(name) for name in self.environment.get("client_names", [])]
        return client_titles(names if len(names) == self.clients else list(map(str, range(self.clients))))

    @property
    def gains(self) -> Gains | None:
        """Each client alone, with the global and with its personal model; None where it was not measured."""
        name = self.primary.name
        if self.analysis is None or not self.has(name):
            return None
        gains = Gains(
            self.analysis.alone,
            self.final(f"{name}_global"),
            self.final(name),
            self.primary,
            self.analysis.constant,
        )
        return None if np.isnan(gains.gain).all() else gains

    def federation(self, name: str) -> list[float | None]:
        """A metric of the whole federation, in every round."""
        return [record["federation"].get(name) for record in self.records]


@dataclass(frozen=True, eq=False)
class Masks:
    """The clients' masks by layer, at the last checkpoint."""

    round: int
    layers: list[str]
    sizes: list[int]
    fraction: Numbers  # [clients, layers], of the parameters that are personal
    shared_by_all: Numbers  # [layers], fraction of the parameters that every client shares
    overlap: Numbers  # [clients, clients], the entries that are personal for both, of those for either


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
            return "no interval, as there is one client"
        return " to ".join(self.metric.text(end, sign="+") for end in over_clients(self.difference))

    @property
    def verdict(self) -> str:
        """What the interval allows, if it excludes zero; one client has none."""
        if reason := unknown_reason([self.difference]):
            return f"not computed: {reason}"
        if not over_clients(self.difference).without_zero:
            return "not distinguishable"
        return self.metric.verdict("higher" if self.mean > 0 else "lower")


Runs = Sequence[RunData]


def paired(runs: Runs) -> list[Paired]:
    """The other runs compared with the first, where both have the same samples."""
    first, *others = runs
    name, differences = first.primary.name, []
    for run in others:
        if run.partition == first.partition:
            difference = difference_of_known(run.final(name), first.final(name))
            differences.append(Paired(run.label, difference, first.primary))
    return [pair for pair in differences if len(pair.difference)]


def algorithm_of(tables: Tables) -> str:
    """The algorithm's name, or its description where it was given as a Python value."""
    table = tables["algorithm"]
    return str(table.get("name") or str(table.get("value", "own")).partition("(")[0])


def read_all(paths: Sequence[Path]) -> list[RunData]:
    """The runs, each with a unique label: the algorithm, of several runs also its optimizer, and the folder.

    The folder is named where the rest is ambiguous.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError("a run was named twice; name each run folder once")
    tables = [RunFolder(path).tables() for path in paths]
    names = [algorithm_of(settings) for settings in tables]
    if len(paths) > 1:
        names = [
            ", ".join(filter(None, (algorithm_of(settings), optimizer_text(settings)))) for settings in tables
        ]
    folders = [path.resolve() for path in paths]
    labels = names
    for details in ([folder.name for folder in folders], folders):
        labels = [
            label if labels.count(label) == 1 else f"{name} ({detail})"
            for label, name, detail in zip(labels, names, details, strict=True)
        ]
    return [read(path, label) for path, label in zip(paths, labels, strict=True)]


def read(path: Path, label: str) -> RunData:
    """The current data of the folder; a running run may be read at any time.

    Args:
        path: Of the run folder.
        label: Its name on the page.
    """
    folder = RunFolder(path)
    tables, partition = folder.tables(), folder.partition()
    rounds = tables["run"].get("rounds")
    if type(rounds) is not int or not 0 < rounds < 2**63:
        raise RunError(f"{path / 'run.toml'} has no valid number of rounds; restore it from a copy")
    environment = _environment(path / "environment.json")
    lines = records.read(path / "rounds.jsonl")
    timing = path / "timing.jsonl"
    seconds = [line["seconds"] for line in records.read(timing)] if timing.exists() else []
    return RunData(
        path=path,
        label=label,
        tables=tables,
        toml=foreign.printable_lines((path / "run.toml").read_text(encoding="utf-8")),
        environment=environment,
        records=lines,
        seconds=seconds[: len(lines)],
        partition=partition.fingerprint,
        sizes=([len(rows) for rows in partition.train], [len(rows) for rows in partition.test]),
        label_counts=environment["label_counts"],
        masks=_masks(path / "checkpoint" / "state.safetensors", environment.get("layers", {})),
        audit=_audit(path / "audit.json", len(partition.train)),
        analysis=_extra(path / gains.FILE, gains.read),
        new=_extra(path / NEW_CLIENTS, new_clients.read),
        rivals=_extra(path / rivals_file.FILE, rivals_file.read),
        choice=_extra(path / choice_file.FILE, choice_file.read),
        probabilities=_extra(path / probabilities.FILE, probabilities.read),
        survival=_extra(path / survival.FILE, survival.read),
        trees=_extra(path / tree_views.FILE, tree_views.read),
        final_evaluation=_extra(
            path / final_file.FILE,
            lambda folder: final_file.read(folder, len(lines), len(partition.train)),
        ),
    )


def _readable(path: Path, advice: str) -> AbstractContextManager[None]:
    """Errors in the content of a file are reported with its path."""
    return raised_as(RunError, f"cannot read {path} ({{}}); {advice}", OSError, *foreign.DAMAGE)


def _environment(path: Path) -> dict[str, Any]:
    """The content of the file, with the label counts as an array, None where it has none."""
    with _readable(path, RESTORE):
        content = foreign.read_json(path)
        layers = content.get("layers", {})
        if not all(type(size) is int and 0 < size < 2**63 for size in layers.values()):
            raise ValueError("the sizes of its layers are not positive numbers")
        if type(number := content.get("parameters", 0)) is not int or not 0 <= number < 2**63:
            raise ValueError("its number of parameters is not a number")
        counts = [[int(count) for count in row.split()] for row in content.get("label_counts", [])]
        if counts and {len(row) for row in counts} != {len(content["classes"])}:
            raise ValueError("it does not count every class for every client")
        if not metrics_of(content):
            raise ValueError("it has no metric")
        return {**content, "label_counts": np.array(counts, np.int64) if counts else None}


def _extra(path: Path, read: Callable[[Path], T | None]) -> T | None:
    """The content of an optional file of the run folder."""
    with _readable(path, f"delete it, and `copfl resume {path.parent}` makes it again"):
        return read(path.parent)


def _audit(path: Path, clients: int) -> dict[str, Any] | None:
    """The audit of the run; None where there is none of these clients in this format."""
    if not path.is_file():
        return None
    with _readable(path, f"`copfl audit {path.parent}` makes it again"):
        content = dict(foreign.read_json(path))
        return content if content["format"] == AUDIT_FORMAT and len(content["clients"]) == clients else None


def _masks(path: Path, layers: Mapping[str, int]) -> Masks | None:
    """The clients' masks by layer; None where there is no checkpoint, or the algorithm has no masks.

    Only the masks are read, because the whole state of ten ResNets takes gigabytes.
    """
    if not layers or not path.is_file():
        return None
    inside, about = checkpoint.peek(path, re.compile(r"clients:(client\.)*mask"))  # also that of a wrapper
    if inside is None:
        return None
    mask = inside.numpy()
    if sum(layers.values()) != mask.shape[1]:
        raise RunError(f"{path} has other layers than environment.json; restore both from a copy")
    names = [name.rpartition(".")[0] or name for name in layers]  # a layer's weight and bias are one row
    modules = list(dict.fromkeys(names))
    module_of = np.repeat([modules.index(name) for name in names], list(layers.values()))  # of each parameter
    sizes = np.bincount(module_of)
    personal = np.stack([np.bincount(module_of, row, len(modules)) for row in mask])
    shared = np.bincount(module_of, ~mask.any(0), len(modules))
    overlap = np.zeros((0, 0))
    if len(mask) <= gains.MODELS:
        both, of_client = np.array([[np.count_nonzero(a & b) for b in mask] for a in mask]), mask.sum(1)
        overlap = both / np.maximum(of_client[:, None] + of_client - both, 1)
    return Masks(int(about["round"]), modules, sizes.tolist(), personal / sizes, shared / sizes, overlap)
