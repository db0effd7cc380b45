"""What each client gains over training alone and over a constant answer, and how every client's model does on
every client's samples."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from copfl.core import tree
from copfl.core.evaluation import primary_metrics
from copfl.core.task import Data, Personal, Task
from copfl.data.clients.federation import FederatedData
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, SURVIVAL
from copfl.experiment.finding import Finding
from copfl.measures.metrics import ACCURACY, C_INDEX, Metric, MetricInfo
from copfl.stats import Interval, Numbers, mean_of_known, over_clients, unknown_reason, worst_of

MODELS = 40  # of more clients than this, evenly chosen ones are in the matrix
SAMPLES = 100  # of a client's test samples that the matrix uses
EQUAL = 1e-9  # differences of accuracy that are rounding
SAME_RISK = "the same risk for all"  # what is constant where risks order events


class Gains(NamedTuple):
    """The primary metric of each client at its last evaluation, [clients]; nan where there is none."""

    alone: Numbers  # local training on the same batches
    global_model: Numbers
    personal: Numbers  # after local training
    metric: MetricInfo = ACCURACY
    constant: Numbers | None = None  # see `constant_answers`; None: not known

    @property
    def gain(self) -> Numbers:
        """Positive where the client is better than alone."""
        return self.metric.gain(self.personal, self.alone)

    @property
    def over_global(self) -> Numbers:
        """Positive where the client's model is better than the global one."""
        return self.metric.gain(self.personal, self.global_model)

    @property
    def over_constant(self) -> Numbers:
        """Positive where the client's model is better than its constant answer."""
        if self.constant is None:
            return np.full(len(self.personal), np.nan)
        return self.metric.gain(self.personal, self.constant)

    @property
    def over_constant_bounds(self) -> Interval:
        """Of the mean gain over constant answers, over clients; of one client its gain; nan: not known."""
        known = self.over_constant[~np.isnan(self.over_constant)]
        if unknown_reason([known]):
            return Interval(np.nan, np.nan)
        return Interval(float(known[0]), float(known[0])) if len(known) < 2 else over_clients(known)

    @property
    def share(self) -> float:
        """The fraction of the clients that are better than alone."""
        return share_of(self.gain)

    @property
    def worst(self) -> float:
        """The mean over the worst tenth of the clients, at least one."""
        return worst_of(self.personal, self.metric.higher_is_better)

    @property
    def spread(self) -> float:
        """The standard deviation of the personal values over the clients."""
        return float(np.nanstd(self.personal))


def constant_text(gains: Gains) -> str:
    """What a constant answer is, and how good; "" where models are shown to be better or nothing is known."""
    if gains.constant is None or not gains.over_constant_bounds.low <= EQUAL:  # nan: not known
        return ""
    metric, value = gains.metric, float(mean_of_known(gains.constant))
    answer = "always answering a site's most frequent class, or mean value, in training"
    answer = SAME_RISK if metric.name == C_INDEX else answer
    return f"{answer} gives {metric.title} {metric.text(value)}{metric.unit}"


def share_of(gains: Numbers) -> float:
    """The fraction of the known gains that are positive."""
    known = gains[~np.isnan(gains)]
    return float((known > EQUAL).mean()) if len(known) else float("nan")


def constant_answer(kind: str, classes: int, known: NDArray[Any]) -> Numbers:
    """What a client's training samples have on average, whatever the input, as the metrics take predictions.

    That is the frequency of each class or label, or the mean of the values; its class is the most frequent one.
    Of survival it is any number: the same risk for all.

    Args:
        kind: Of the task; not next_token.
        classes: Their number, of a classification.
        known: The targets of the training samples, at least one.
    """
    if kind == SURVIVAL:
        return np.zeros(classes)
    total = np.bincount(known, minlength=classes) if kind == CLASSIFICATION else known.sum(0, np.float64)
    return np.asarray(total / len(known))


def constant_answers(federation: FederatedData, metric: Metric) -> Numbers:
    """The metric of each client's constant answer on its test samples, [clients]; nan where it is not defined.

    Args:
        federation: The clients.
        metric: Of predictions and targets on the host.
    """
    kind, classes = federation.dataset.kind, len(federation.dataset.classes)
    values = np.full(federation.clients, np.nan)
    if kind == NEXT_TOKEN:
        return values
    for client in np.flatnonzero((federation.train.sizes > 0) & (federation.test.sizes > 0)).tolist():
        known, tested = (split.targets(client).cpu().numpy() for split in (federation.train, federation.test))
        answer = constant_answer(kind, classes, known)
        values[client] = metric.of(np.repeat(answer[None], len(tested), axis=0), tested)
    return values


class Cross(NamedTuple):
    """The primary metric of each client's personal model on the test samples of each client."""

    clients: list[int]
    values: Numbers  # [models, clients]
    metric: str = ACCURACY.name
    # Of each class, the correctly classified test samples of the models' own clients, and all of them.
    # () where the task has no classes, and in older files.
    per_class: Sequence[tuple[int, int]] = ()


def compared(clients: int) -> list[int]:
    """The clients in the matrix of `cross_evaluation`."""
    count = min(clients, MODELS)
    chosen: list[int] = np.unique(np.linspace(0, clients - 1, count).round().astype(np.int64)).tolist()
    return chosen


def cross_evaluation(
    task: Task,
    federation: FederatedData,
    model_of: Callable[[int], Personal],
    clients: Sequence[int],
    samples: int = SAMPLES,
) -> Cross:
    """Every model of these clients on test samples of each, at most so many; by class, on all of its own.

    Args:
        task: What the clients learn.
        federation: Their samples.
        model_of: The model of a client.
        clients: Those that are compared.
        samples: The most of each client.
    """
    count = len(clients)
    whole = [tree.row(federation.test.rows([n]), 0) for n in clients]
    tests = [evenly_chosen(data, samples) for data in whole]
    table = np.full((count, count), np.nan)
    per_class = np.zeros((task.classes if task.criterion.kind == "classification" else 0, 2), np.int64)
    for row, (n, data) in enumerate(zip(clients, whole, strict=True)):
        model: Personal = tree.each(lambda t: t.to(task.device), model_of(n))
        with torch.no_grad():
            table[row] = primary_metrics(task, model, tests)
            if len(per_class) and int(data.size):
                right = torch.cat(task.scores(model, data).predictions).argmax(-1) == data.y
                per_class[:, 0] += np.bincount(data.y[right].cpu(), minlength=len(per_class))
                per_class[:, 1] += np.bincount(data.y.cpu(), minlength=len(per_class))
    counts = [(right, tested) for right, tested in per_class.tolist()]
    return Cross(list(clients), table, task.metrics[0].name, counts)


def evenly_chosen(data: Data, most: int) -> Data:
    """At most so many of a client's samples, evenly spaced; where targets are classes, each in proportion.

    Args:
        data: Of one client.
        most: Samples.
    """
    size = int(data.size)
    count, y = min(size, most), data.y[:size]
    has_classes = y.dim() == 1 and not y.is_floating_point()
    order = torch.argsort(y, stable=True) if has_classes else torch.arange(size, device=y.device)
    chosen = order[torch.arange(count, device=y.device) * size // max(count, 1)].sort().values
    x, y = tree.each(lambda t: t[chosen], (data.x, data.y))
    return Data(x, y, torch.tensor(count, device=data.size.device))


def similar_first(values: Numbers, metric: MetricInfo = ACCURACY) -> list[int]:
    """An order of the clients in which those whose models do well on each other's samples are neighbours.

    Args:
        values: [clients, clients], each model on each client's samples.
        metric: What was measured.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    lack = metric.gain(np.full_like(values, metric.best(values[~np.isnan(values)].tolist())), values)
    lack = np.nan_to_num(lack, nan=float(np.nanmax(lack, initial=0.0)))
    distance = (lack + lack.T) / 2
    np.fill_diagonal(distance, 0)
    return [int(place) for place in leaves_list(linkage(squareform(distance, checks=False), "average"))]


class Analysis(NamedTuple):
    """The content of gains.json."""

    alone: Numbers
    cross: Cross
    constant: Numbers  # see `constant_answers`
    intervals: Sequence[
        Interval
    ] = ()  # of each client's gain over training alone, on its test samples; nan: none


def _as_json(found: Analysis) -> dict[str, Any]:
    clients, values, metric, per_class = found.cross
    content = {"alone": found.alone, "constant": found.constant, "clients": clients, "cross": values}
    content |= {"intervals": found.intervals} if found.intervals else {}
    content |= {"metric": metric}
    return content | ({"per_class": per_class} if per_class else {})


def _parsed(content: dict[str, Any]) -> Analysis:
    values = np.array(content["cross"], np.float64)
    per_class = [(int(right), int(tested)) for right, tested in content.get("per_class", [])]
    cross = Cross(content["clients"], values, content.get("metric", ACCURACY.name), per_class)
    alone, constant = (np.array(content[name], np.float64) for name in ("alone", "constant"))
    intervals = [Interval(*np.array(ends, np.float64).tolist()) for ends in content.get("intervals", ())]
    return Analysis(alone, cross, constant, intervals)


GAINS = Finding(
    file="gains.json",
    as_json=_as_json,
    parse=_parsed,
    summary=lambda found, run: {},  # the summary has the gains that follow from it
)
