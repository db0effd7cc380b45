"""What a run's trees say, for people: which columns count, how the answer depends on them, and the first tree.

It is measured once, when the run ends, and the report shows it. The models are those of the sites, each on its own test
rows; the gains are of the shared trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.algorithms.trees import Server
from copfl.charts import Chart, Dots, Line, Lines, Tree, percent, values_of
from copfl.core import tree
from copfl.core.evaluation import predicted
from copfl.core.task import Data, Personal, Task
from copfl.data.samples import CLASSIFICATION, Dataset
from copfl.data.tables.encoders import Encoder
from copfl.experiment.finding import Finding, Trained
from copfl.experiment.recording import Recording
from copfl.models.trees import Branch, Node, nodes_of
from copfl.sections import Section
from copfl.stats import Numbers

MOST_CLIENTS, MOST_COLUMNS, DRAWN = (
    40,
    40,
    3,
)  # clients and columns that are measured; permutations of a column
SHOWN, GRID = 4, 15  # columns whose dependence is shown, and the values of each
LEVELS = 6  # of questions of the first tree that are shown: a picture of more is too wide to be read


class Importance(NamedTuple):
    """Of one column of the table; a category is a part of its column."""

    column: str
    gain: float  # of the shared trees' splits, as a part of all gains
    # By how much the loss of the test rows grows when the column is shuffled within each site; the mean over sites.
    permuted: float


class Dependence(NamedTuple):
    """The mean answer for the test rows, if a column had this value in all of them."""

    column: str
    values: tuple[str, ...]  # numbers in the unit of the column, or categories
    is_number: bool
    answers: tuple[tuple[str, tuple[float, ...]], ...]  # by class, label or value


class Box(NamedTuple):
    """A node of the first tree: a question, or what a leaf adds."""

    text: str
    parent: int  # -1: the root
    level: int
    place: float  # from the left, 0 to 1


class TreeViews(NamedTuple):
    importance: tuple[Importance, ...]  # the largest gain first
    dependence: tuple[Dependence, ...]
    first: tuple[Box, ...]


class Feature(NamedTuple):
    """The entries of a row that come from one column."""

    column: str
    entries: tuple[int, ...]
    encoder: Encoder | None


def measured(trained: Trained) -> TreeViews | None:
    """What the trees of a run say; None if it was of another algorithm, or grew no shared trees."""
    server, task, federation = trained.state.server, trained.task, trained.federation
    models, dataset = trained.models, trained.dataset
    if not isinstance(server, Server) or not float(server.gain.sum()) > 0:
        return None
    features = _features(dataset, len(server.gain))
    gains = [float(server.gain[list(feature.entries)].sum()) for feature in features]
    order = [features[n] for n in np.argsort(gains, kind="stable")[::-1][:MOST_COLUMNS]]
    by_column = dict(zip((f.column for f in features), gains, strict=True))
    sites = [
        (tree.each(lambda t: t.to(task.device), kept.model), tree.row(federation.test.rows([n]), 0))
        for n in range(min(federation.clients, MOST_CLIENTS))
        if (kept := models.get(n)) is not None and int(federation.test.sizes[n]) > 0
    ]
    with torch.no_grad():
        permuted = [_growth(task, sites, feature) for feature in order]
        dependence = tuple(_dependence(task, sites, feature, dataset) for feature in order[:SHOWN])
    importance = tuple(
        Importance(f.column, by_column[f.column] / sum(gains), growth)
        for f, growth in zip(order, permuted, strict=True)
    )
    return TreeViews(importance, dependence if sites else (), _first(task, sites, features, dataset))


def _features(dataset: Dataset, count: int) -> list[Feature]:
    """The columns of the table; without one, each entry of a row."""
    encoders = dataset.table.columns if dataset.table is not None else ()
    if sum(encoder.width for encoder in encoders) != count:
        return [Feature(f"x{n}", (n,), None) for n in range(count)]
    starts = np.cumsum([0, *(encoder.width for encoder in encoders)])
    return [
        Feature(encoder.name, tuple(range(start, start + encoder.width)), encoder)
        for start, encoder in zip(starts.tolist(), encoders, strict=False)
    ]


def _with(data: Data, feature: Feature, entries: Tensor) -> Data:
    """The rows with other entries of one column."""
    x = data.x.flatten(1).clone()
    x[:, list(feature.entries)] = entries.to(x)
    return data._replace(x=x.view(data.x.shape))


def _growth(task: Task, sites: Sequence[tuple[Personal, Data]], feature: Feature) -> float:
    """By how much the loss grows when the column is shuffled within each site."""
    growths = []
    for model, data in sites:
        size = int(data.size)
        own = data.x.flatten(1)[:, list(feature.entries)]
        before = float(task.evaluate(model, data)[0])
        for draw in range(DRAWN):
            shuffled = own.clone()
            shuffled[:size] = own[torch.from_numpy(np.random.default_rng(draw).permutation(size))]
            growths.append(float(task.evaluate(model, _with(data, feature, shuffled))[0]) - before)
    return float(np.mean(growths)) if growths else float("nan")


def _dependence(
    task: Task, sites: Sequence[tuple[Personal, Data]], feature: Feature, dataset: Dataset
) -> Dependence:
    encoder = feature.encoder
    if encoder is not None and encoder.categories:
        grid = torch.eye(len(encoder.categories))
        values, is_number = tuple(map(str, encoder.categories)), False
    else:
        seen = np.concatenate(
            [d.x.flatten(1)[: int(d.size), feature.entries[0]].cpu().numpy() for _, d in sites]
        )
        points = np.unique(np.quantile(seen, np.linspace(0.02, 0.98, GRID)))
        grid = torch.zeros(len(points), len(feature.entries))  # the second entry: whether it is missing
        grid[:, 0] = torch.from_numpy(points)
        unit = points if encoder is None else points * encoder.std + encoder.mean
        values, is_number = tuple(f"{number:.6g}" for number in unit), True
    said = np.stack([_mean_answer(task, sites, feature, entries) for entries in grid])
    names = dataset.classes
    if dataset.kind == CLASSIFICATION and said.shape[1] == 2:  # the second is enough
        said, names = said[:, 1:], names[1:]
    answers = tuple(
        (str(name), tuple(map(float, column))) for name, column in zip(names, said.T, strict=True)
    )
    return Dependence(feature.column, values, is_number, answers)


def _mean_answer(
    task: Task, sites: Sequence[tuple[Personal, Data]], feature: Feature, entries: Tensor
) -> Numbers:
    """Of all test rows, each by its site's model: probabilities of classes and labels, or values."""
    answers: list[NDArray[Any]] = []
    for model, data in sites:
        changed = _with(data, feature, entries.expand(len(data.y), -1))
        predictions, _ = predicted(task, model, changed)
        answers.append(np.exp(predictions) if task.criterion.logarithmic else predictions)
    whole = np.concatenate(answers)
    return np.asarray(whole.reshape(len(whole), -1).mean(0), np.float64)


def _first(
    task: Task, sites: Sequence[tuple[Personal, Data]], features: Sequence[Feature], dataset: Dataset
) -> tuple[Box, ...]:
    """The first levels of the first tree, which all sites share; a row goes to the left where the answer is yes."""
    if not sites or not isinstance(sites[0][0], Tensor):
        return ()
    boxes: list[Box] = []
    root = nodes_of(task.layout.split(sites[0][0][: task.d]), 0)
    scale = list(dataset.target_scale[1]) if dataset.target_scale[1] else []

    def add(node: Node, parent: int, level: int, left: float, right: float) -> None:
        here, middle = len(boxes), (left + right) / 2
        if not isinstance(node, Branch):
            boxes.append(Box(_leaf(node.value, scale, dataset), parent, level, middle))
            return
        question, is_last = _question(node.feature, node.threshold, features), level == LEVELS
        boxes.append(Box(f"{question} …" if is_last else question, parent, level, middle))
        if is_last:
            return
        add(node.left, here, level + 1, left, middle)
        add(node.right, here, level + 1, middle, right)

    add(root, -1, 0, 0.0, 1.0)
    return tuple(boxes)


def _leaf(value: Sequence[float], scale: Sequence[float], dataset: Dataset) -> str:
    """What it adds: to a value in its unit, to log odds, or to the score of the first of several classes."""
    if dataset.kind == CLASSIFICATION:
        return f"{value[1] - value[0]:+.3f}" if len(value) == 2 else f"{value[0]:+.3f}"
    numbers = [v * s for v, s in zip(value, scale, strict=True)] if scale else value
    return ", ".join(f"{number:+.3g}" for number in numbers)


def _question(entry: int, threshold: float, features: Sequence[Feature]) -> str:
    feature = next(f for f in features if entry in f.entries)
    encoder, place = feature.encoder, feature.entries.index(entry)
    if encoder is not None and encoder.categories:
        return f"{feature.column} is not {encoder.categories[place]}"
    if place:
        return f"{feature.column} is known"
    number = threshold if encoder is None else threshold * encoder.std + encoder.mean
    return f"{feature.column} ≤ {number:.4g}"


# -- the file ------------------------------------------------------------------------------------------------


def _as_json(views: TreeViews) -> dict[str, Any]:
    return {name: [one._asdict() for one in part] for name, part in views._asdict().items()}


def _views(content: dict[str, Any]) -> TreeViews:
    def number(value: Any) -> float:
        return float("nan") if value is None else float(value)

    importance = tuple(
        Importance(str(one["column"]), number(one["gain"]), number(one["permuted"]))
        for one in content["importance"]
    )
    dependence = tuple(
        Dependence(
            str(one["column"]),
            tuple(map(str, one["values"])),
            bool(one["is_number"]),
            tuple((str(name), tuple(map(number, answers))) for name, answers in one["answers"]),
        )
        for one in content["dependence"]
    )
    first = tuple(
        Box(str(one["text"]), int(one["parent"]), int(one["level"]), float(one["place"]))
        for one in content["first"]
    )
    _require_tree(first)
    if any(len(answers) != len(one.values) for one in dependence for _, answers in one.answers):
        raise ValueError("a column has another number of answers than of values")
    return TreeViews(importance, dependence, first)


def _require_tree(boxes: Sequence[Box]) -> None:
    """ValueError where the boxes are no tree of so few levels: a picture has room for each of them."""
    children = [0] * len(boxes)
    for place, box in enumerate(boxes):
        if box.parent >= place or (box.parent < 0) != (place == 0):
            raise ValueError("a node of the first tree comes before its parent, or has none")
        level = 0 if place == 0 else boxes[box.parent].level + 1
        if box.level != level or level > LEVELS or not 0 <= box.place <= 1:
            raise ValueError("a node of the first tree is not on the level below its parent")
        if place:
            children[box.parent] += 1
    if any(count > 2 for count in children):
        raise ValueError("a node of the first tree has more than two answers")


# -- how it is shown -----------------------------------------------------------------------------------------


def _charts(found: TreeViews, run: Recording) -> Iterator[Chart]:
    """Which columns count, how the answer depends on the first ones, and the first tree."""
    if not run.records:
        return
    about = (
        "Gain: of the splits of the shared trees, as a part of all gains. Shuffled: by how much the loss of a site's "
        "own test rows grows when the column is shuffled among them, mean over sites."
    )
    names = [one.column for one in found.importance]
    gain = Dots(
        "tree-gain", "Importance of the columns: gain", about, names, "part of all gains, %", [], " %"
    )
    growth = Dots(
        "tree-shuffled", "Importance of the columns: shuffled", about, names, "growth of the loss", []
    )
    yield gain._replace(
        series=[Line("gain", percent([one.gain for one in found.importance]))], zero=True, row_title="column"
    )
    if np.isfinite([one.permuted for one in found.importance]).any():
        series = [Line("shuffled", values_of([one.permuted for one in found.importance]))]
        yield growth._replace(series=series, zero=True, row_title="column", digits=4)
    about = "The mean answer for all test rows, each by its site's model, if the column had this value in all of them."
    for place, one in enumerate(found.dependence, 1):
        name, title = f"tree-dependence-{place}", f"Dependence on {one.column}"
        lines = [Line(of, values_of(y), colour=n, dash=n % 4) for n, (of, y) in enumerate(one.answers)]
        if one.is_number:
            x = [float(value) for value in one.values]
            yield Lines(name, title, about, x, "mean answer", lines, digits=3, x_title=one.column)
        else:
            yield Dots(
                name, title, about, list(one.values), "mean answer", lines, digits=3, row_title=one.column
            )
    if found.first:
        about = (
            "A row goes to the left where the answer is yes. A leaf adds its number to a value, to the log odds, or to "
            "the score of the first of several classes. Below a question with … are further ones."
        )
        labels, parents, levels, places = zip(*found.first, strict=True)
        yield Tree("first-tree", "The first tree", about, labels, parents, levels, places)


TREES = Finding(
    file="trees.json",
    as_json=_as_json,
    parse=_views,
    measured=measured,
    section=lambda found, run: Section("trees", "Trees", "What do the trees say?", [*_charts(found, run)]),
    summary=lambda found, run: {},  # it is long
)
