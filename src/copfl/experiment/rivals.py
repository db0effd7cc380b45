"""The rivals of a run: what every site has alone, by scikit-learn, beside the models of the federation.

Training calls `rivals_of` after the rounds; a first run trains them on folds.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from copfl.core import tree
from copfl.core.evaluation import predicted
from copfl.core.task import EVAL_BATCH, Data, Personal, Task
from copfl.data.clients.federation import FederatedData, Split
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, REGRESSION, SURVIVAL
from copfl.errors import in_words
from copfl.experiment.experiment import Experiment
from copfl.experiment.progress import counted
from copfl.measures.metrics import Metric
from copfl.models import pretrained
from copfl.models.networks import WEIGHT_OF_PAIRS, Words
from copfl.rivals import process
from copfl.rivals.choice import best_of, best_of_sites
from copfl.rivals.effort import MOST_SITES, Effort, effort_of, effort_of_survival
from copfl.rivals.paired import gain_interval, is_fast
from copfl.rivals.process import SiteTask
from copfl.rivals.records import (
    BOOSTED,
    CONSTANT,
    FOREST,
    LINEAR,
    OF_SCIKIT_LEARN,
    OF_SURVIVAL,
    Array,
    Rival,
    Rivals,
    RivalValues,
    SiteRows,
)
from copfl.rivals.site import judged_by, site_rivals, values_on
from copfl.stats import Interval, Numbers, mean_of_known

logger = logging.getLogger(__name__)
COLUMNS, WORDS, FEATURES, VALUES = "columns", "words", "features", "values"
SHOWN = {
    COLUMNS: "the same rows and columns",
    WORDS: "TF-IDF of the same words",
    FEATURES: "the features of the same pretrained model",
    VALUES: "the same numbers, whatever their places",
}
MOST_VALUES = 20_000  # numbers of an image or a signal: beyond them, rivals would take long and much memory
MOST_LABELS = 20
SLOW_INTERVALS = 6  # sites at most, of a metric whose interval takes seconds
NUMBERS = {COLUMNS: 0, VALUES: 0, WORDS: 200, FEATURES: 500}  # of a row that cost time, about; 0: its columns
SAID = 2.0  # seconds from which on a run says beforehand how long they take
UNKNOWN = Interval(-np.inf, np.inf)

ModelOf = Callable[[int], Personal | None]


class Inputs(NamedTuple):
    """What the rivals learn from."""

    how: str  # COLUMNS, WORDS or FEATURES
    none: str = ""  # why there are no rivals
    is_survival: bool = False

    @property
    def trees(self) -> bool:
        """Whether there are forests and boosted trees, of which a client can have one as its own model."""
        return self.how == COLUMNS and not self.is_survival

    @property
    def forest(self) -> bool:
        return self.trees or self.how == VALUES


def inputs_of(task: Task, x: Any, model: str) -> Inputs:
    """What the rivals of these samples learn from.

    Args:
        task: Of the run.
        x: The samples of a site, or several arrays by name.
        model: The name of the network.
    """
    if task.criterion.kind == NEXT_TOKEN:
        return Inputs("", "there are none for the next token")
    if task.criterion.kind != CLASSIFICATION and task.classes > MOST_LABELS:
        return Inputs("", f"there are none for more than {MOST_LABELS} labels or values")
    is_table = isinstance(x, torch.Tensor) and x.dim() == 2
    if task.criterion.kind == SURVIVAL and (pretrained.is_pretrained(model) or not is_table):
        return Inputs("", "those of survival learn from columns of numbers")
    if pretrained.is_pretrained(model):
        return Inputs(FEATURES)
    if isinstance(x, dict) and "input_ids" in x:
        return Inputs(WORDS)
    if all(array.dim() == 2 for array in (x.values() if isinstance(x, dict) else [x])):
        return Inputs(COLUMNS, is_survival=task.criterion.kind == SURVIVAL)
    if isinstance(x, torch.Tensor) and task.criterion.kind != SURVIVAL and x[0].numel() <= MOST_VALUES:
        return Inputs(VALUES)
    return Inputs("", "there are none for large images, and for several arrays, without a pretrained model")


def site_rows(
    inputs: Inputs, task: Task, seen: Sequence[Data], test: Data, unit: Array | None = None
) -> SiteRows:
    """One site's rows as the rivals take them.

    Args:
        inputs: What they learn from.
        task: Of the data: with the front of a pretrained model cut off, of the tail.
        seen: The site's training samples and, where it has some, its validation samples: the network chooses
            its round by them, and a rival needs none.
        test: Its test samples.
        unit: What of the samples that it has seen belongs together; None: each is alone.
    """
    valid = [tree.each(lambda t, size=int(data.size): t[:size], data[:2]) for data in (*seen, test)]
    (x, y), (x_test, y_test) = tree.concatenate(valid[:-1]), valid[-1]
    both, targets = (x, x_test), [part.cpu().numpy() for part in (y, y_test)]
    if inputs.how == WORDS:
        width = 1 + max(int(x["input_ids"].max()) if x["input_ids"].numel() else 0 for x in both)
        words = task.module.words if isinstance(task.module, Words) else width
        matrices = [_word_weights(x, width, words) for x in both]
    elif inputs.how == FEATURES:
        matrices = [_features(task, x) for x in both]
    else:
        matrices = [_columns(x) for x in both]
    return SiteRows(matrices[0], targets[0], matrices[1], targets[1], unit)


def _columns(x: Any) -> Array:
    arrays = x.values() if isinstance(x, dict) else [x]
    return np.concatenate(
        [array.cpu().numpy().reshape(len(array), -1).astype(np.float64) for array in arrays], axis=1
    )


def _word_weights(x: dict[str, torch.Tensor], width: int, words: int) -> Any:
    """1 + the logarithm of how often each word is in each text, and of a pair half of it; sparse [n, width].

    Args:
        x: The tokens.
        width: One more than the largest token.
        words: The largest token that is no pair of words.
    """
    from scipy.sparse import csr_array

    ids = x["input_ids"].cpu().numpy()
    seen = x["attention_mask"].cpu().numpy() > 0 if "attention_mask" in x else np.ones(ids.shape, bool)
    texts = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
    ones = np.ones(int(seen.sum()))
    weights = csr_array((ones, (texts[seen], ids[seen])), shape=(len(ids), width))
    weights.sum_duplicates()
    weights.data = (1 + np.log(weights.data)) * np.where(weights.indices > words, WEIGHT_OF_PAIRS, 1)
    return weights


def _features(task: Task, x: Any) -> Array:
    """The input of the head, of the model as it was before any training."""
    size = len(next(iter(tree.leaves(x))))
    with torch.no_grad():
        parts = [
            task.forward(task.initial, task.numbers(tree.each(lambda t, b=begin: t[b : b + EVAL_BATCH], x)))[
                1
            ]
            for begin in range(0, size, EVAL_BATCH)
        ]
    width = parts[0].shape[1] if parts else 0
    return torch.cat(parts).double().cpu().numpy() if parts else np.zeros((0, width))


def effort_for(inputs: Inputs, task: Task, rows: list[int], columns: int) -> Effort:
    """How many trees the rivals of sites with so many training rows have.

    Args:
        inputs: What the rivals are trained on.
        task: What the clients learn.
        rows: Training rows of each site.
        columns: Of the table.
    """
    classes = task.classes
    if task.criterion.kind == SURVIVAL:
        return effort_of_survival(rows, columns)
    outputs = 1 if task.criterion.kind == CLASSIFICATION and classes == 2 else classes
    is_values = task.criterion.kind == REGRESSION
    found = effort_of(rows, columns, outputs, values=is_values, trees=inputs.forest)
    return found if inputs.trees else found.without_boosting()


def left_out(inputs: Inputs, effort: Effort) -> dict[str, str]:
    """Why there is no linear model, no forest, or no boosted trees.

    Args:
        inputs: What the rivals are trained on.
        effort: What the time allows.
    """
    slow = "it would take too long with so many rows, columns, classes and sites"
    wanted = {LINEAR: len(effort.penalties)}
    wanted |= {FOREST: effort.forest} if inputs.forest else {}
    wanted |= {BOOSTED: effort.boosted} if inputs.trees else {}
    return {name: slow for name, number in wanted.items() if not number}


class TrainedRivals(NamedTuple):
    """The rivals of every site that has some."""

    by_site: dict[int, dict[str, Rival]]
    targets: dict[int, Array]  # of the test rows
    metrics: tuple[Metric, ...]
    inputs: Inputs
    effort: Effort


def rivals_of(
    e: Experiment, model_of: ModelOf, own: Mapping[int, str] = MappingProxyType({})
) -> Rivals | None:
    """The rivals of every site of a run, beside its models; None where there are none.

    Args:
        e: The run.
        model_of: Each client's model; None of one that has none.
        own: The kind of model of the clients that predict with their rival.
    """

    def of_site(site: int) -> Array | None:
        model, task = model_of(site), e.training.task
        test = tree.row(e.training.federation.test.rows([site]), 0)
        return None if model is None else answers_of(task, model, test)

    if (plan := plan_of(e)) is None:
        return None
    if plan.effort.seconds >= SAID and not are_known(e, plan):
        logger.info(plan.text)
    return _judged(trained_rivals(e, plan), e.clients, of_site, own)


def rivals_of_site(
    task: Task,
    seen: Sequence[Data],
    test: Data,
    model: Personal,
    network: str,
    seed: int,
    unit: Array | None = None,
) -> Rivals | None:
    """The rivals of one site that has only its own samples, as of a federation with one client.

    Args:
        task: Of the site.
        seen: Its training samples and, where it has some, its validation samples.
        test: Its test samples.
        model: That it got from the federation.
        network: The name of the network.
        seed: Of the folds and the trees.
        unit: As of `site_rows`.
    """
    inputs = inputs_of(task, seen[0].x, network)
    count = sum(int(data.size) for data in seen)
    if inputs.none or not count or not int(test.size):
        return None
    rows = site_rows(inputs, task, seen, test, unit)
    columns = NUMBERS[inputs.how] or int(rows.x.shape[1])
    effort = effort_for(inputs, task, [count], columns)
    metrics = judged_by(task.criterion.kind, task.metrics)
    own = site_rivals(rows, task.criterion.kind, task.classes, metrics[0], effort, seed)
    trained = TrainedRivals({0: own}, {0: rows.y_test}, metrics, inputs, effort)
    return _judged(trained, 1, lambda site: answers_of(task, model, test))


def _judged(
    trained: TrainedRivals,
    clients: int,
    answers_of: Callable[[int], Array | None],
    own: Mapping[int, str] = MappingProxyType({}),
) -> Rivals:
    """The rivals with the best of them, and the models of the federation beside it.

    A kind of model that is worse than the constant answer is no bar to beat. A site whose model is its rival has equal
    values, and not those of another rounding.

    Args:
        trained: The rivals.
        clients: Their number.
        answers_of: The answers of a client's model to its test rows; None: it has none.
        own: The kind of model of the clients that predict with their rival.
    """
    losses = {
        name: float(mean_of_known(np.array([of_site[name].loss for of_site in trained.by_site.values()])))
        for name in next(iter(trained.by_site.values()))
    }
    worse = {name for name, loss in losses.items() if loss > losses[CONSTANT] and name not in own.values()}
    by_kind = _values(trained, clients)
    metric, values = trained.metrics[0], {name: v for name, v in by_kind.items() if name not in worse}
    validated = {name: of_kind.validated for name, of_kind in values.items()}
    best, by_site = best_of_sites(validated, metric), [""] * clients
    for site in trained.by_site:
        by_site[site] = best_of({name: float(own[site]) for name, own in validated.items()}, metric)
    personal = {metric.name: np.full(clients, np.nan) for metric in trained.metrics}
    intervals = [UNKNOWN] * clients
    for place, (site, y) in enumerate(trained.targets.items()):
        if (answers := answers_of(site)) is None:
            continue
        if (rival := trained.by_site[site].get(own.get(site, ""))) is not None:
            answers = rival.answers
        for other in trained.metrics:
            personal[other.name][site] = other.of(answers, y)
        if (is_fast(metric, y) or place < SLOW_INTERVALS) and not np.isnan(answers).any():
            intervals[site] = gain_interval(metric, answers, trained.by_site[site][best].answers, y)
    return Rivals(
        metrics=trained.metrics,
        values=values,
        chosen=best,
        by_site=tuple(by_site),
        personal=personal,
        interval=tuple(intervals),
        left_out={
            **left_out(trained.inputs, trained.effort),
            **dict.fromkeys(sorted(worse), "it is worse than the constant answer, cross-validated"),
        },
        inputs=SHOWN[trained.inputs.how],
        models=OF_SURVIVAL if trained.inputs.is_survival else OF_SCIKIT_LEARN,
    )


class RivalPlan(NamedTuple):
    """Which sites of a run have rivals, and what they are trained with."""

    inputs: Inputs
    sites: list[int]
    effort: Effort

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of model, the simplest first."""
        effort = self.effort
        wanted = {CONSTANT: 1, LINEAR: len(effort.penalties), FOREST: effort.forest, BOOSTED: effort.boosted}
        return tuple(kind for kind, number in wanted.items() if number)

    @property
    def text(self) -> str:
        """How long they take, before they are trained."""
        seconds = max(1, round(self.effort.seconds))
        without = in_words("--no-rivals", "rivals=False leaves them out")
        return f"rivals at {len(self.sites)} sites alone, about {seconds} s ({without})"


def plan_of(e: Experiment) -> RivalPlan | None:
    """The sites with training and test rows, at most MOST_SITES of them; None: no site has rivals."""
    first = tree.row(e.federation.train.rows([0]), 0)
    inputs = inputs_of(e.task, first.x, e.run.model.name)
    tested, *seen = (split.sizes for split in (e.federation.test, *_seen(e.federation)))
    sizes = np.sum(seen, axis=0)
    with_rows = np.flatnonzero((e.federation.train.sizes > 0) & (tested > 0))
    if inputs.none or not len(with_rows):
        return None
    count = min(len(with_rows), MOST_SITES)
    sites: list[int] = with_rows[np.linspace(0, len(with_rows) - 1, count).round().astype(np.int64)].tolist()
    columns = NUMBERS[inputs.how] or _columns(tree.each(lambda t: t[:1], first.x)).shape[1]
    return RivalPlan(inputs, sites, effort_for(inputs, e.task, sizes[sites].tolist(), columns))


def _seen(federation: FederatedData) -> list[Split]:
    """Training samples and, where there are some, validation samples."""
    return [federation.train, *([] if federation.validation is None else [federation.validation])]


_trained: dict[str, TrainedRivals] = {}  # of the last federation, by what they depend on


def trained_rivals(e: Experiment, plan: RivalPlan) -> TrainedRivals:
    """The rivals of these sites; the last federation's are kept, as a choice and its run need the same.

    Args:
        e: Whose rows they are.
        plan: The sites, and the effort.
    """
    if plan.inputs.how == FEATURES:
        return _train(e, plan)
    known = _known_as(e, plan)
    return _trained[known] if known in _trained else _kept(known, _train(e, plan))


@contextlib.contextmanager
def rivals_beside(e: Experiment, plan: RivalPlan, processes: int) -> Iterator[Callable[[], TrainedRivals]]:
    """Trains the rivals beside what the `with` block does, which gets a function that waits for them.

    Args:
        e: As of `trained_rivals`.
        plan: As of `trained_rivals`; not of features.
        processes: That train them; 0: this one does, when it is asked for them.
    """
    known = _known_as(e, plan)
    if not processes or known in _trained:
        yield lambda: trained_rivals(e, plan)
        return
    tasks = {site: _task_of(e, plan, site) for site in plan.sites}
    targets = {site: task.rows.y_test for site, task in tasks.items()}
    with process.beside(tasks, processes) as of_sites:
        yield lambda: _kept(known, TrainedRivals(of_sites(), targets, _judging(e), plan.inputs, plan.effort))


def are_known(e: Experiment, plan: RivalPlan) -> bool:
    """Whether the last federation's rivals are these, so that they take no time.

    Args:
        e: As of `trained_rivals`.
        plan: As of `trained_rivals`.
    """
    return plan.inputs.how != FEATURES and _known_as(e, plan) in _trained


def _known_as(e: Experiment, plan: RivalPlan) -> str:
    named = [metric.name for metric in e.task.metrics]
    return json.dumps([e.fingerprints()["samples"], named, e.settings.seed, plan], default=str)


def _kept(known: str, trained: TrainedRivals) -> TrainedRivals:
    _trained.clear()
    _trained[known] = trained
    return trained


def _train(e: Experiment, plan: RivalPlan) -> TrainedRivals:
    by_site: dict[int, dict[str, Rival]] = {}
    targets: dict[int, Array] = {}
    advance = counted("rivals", "client", len(plan.sites), logger.debug)
    for site in plan.sites:
        task = _task_of(e, plan, site)
        by_site[site] = site_rivals(*task)
        targets[site] = task.rows.y_test
        advance(1)
    return TrainedRivals(by_site, targets, _judging(e), plan.inputs, plan.effort)


def _judging(e: Experiment) -> tuple[Metric, ...]:
    return judged_by(e.task.criterion.kind, e.task.metrics)


def _task_of(e: Experiment, plan: RivalPlan, site: int) -> SiteTask:
    """What the rivals of a site are trained on."""
    task, federation = e.training[:2] if plan.inputs.how == FEATURES else (e.task, e.federation)
    splits = (federation.test, *_seen(federation))
    test, *seen = (tree.row(split.rows([site]), 0) for split in splits)
    units = [split.units(site) for split in splits[1:]]
    unit = np.concatenate([u for u in units if u is not None]) if units[0] is not None else None
    rows = site_rows(plan.inputs, task, seen, test, unit)
    return SiteTask(rows, task.criterion.kind, task.classes, _judging(e)[0], plan.effort, e.settings.seed)


def _values(trained: TrainedRivals, clients: int) -> dict[str, RivalValues]:
    """The metrics of each kind of model at every site."""

    def of_sites(values: dict[int, float]) -> Numbers:
        result = np.full(clients, np.nan)
        result[list(values)] = list(values.values())
        return result

    tested = {
        metric.name: {
            site: values_on(own, metric, trained.targets[site]) for site, own in trained.by_site.items()
        }
        for metric in trained.metrics
    }
    return {
        name: RivalValues(
            of_sites({site: own[name].validated for site, own in trained.by_site.items()}),
            {
                metric: of_sites({site: v[name] for site, v in sites.items()})
                for metric, sites in tested.items()
            },
        )
        for name in next(iter(trained.by_site.values()))
    }


def answers_of(task: Task, model: Personal, test: Data) -> Array:
    """The predictions of a model for test samples."""
    with torch.no_grad():
        return predicted(task, model, test)[0]
