"""What a data set is, as text: samples, targets, clients, and a picture of who has what.

`copfl data describe` prints it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from copfl.data.samples import CLASSIFICATION, MULTILABEL, NEXT_TOKEN, REGRESSION, SURVIVAL, Dataset, shown
from copfl.errors import how_to_set
from copfl.tables import listed

WORDS = {  # one target, and several
    CLASSIFICATION: ("class", "classes"),
    MULTILABEL: ("label", "labels"),
    REGRESSION: ("target", "targets"),
    NEXT_TOKEN: ("token", "tokens"),
    SURVIVAL: ("time", "times"),
}
SHADES = " .:-=+*#@"  # from none to all of a client's samples
SKEWED = 0.8  # of the samples are of one class
MOST_ROWS, MOST_COLUMNS, BINS = 20, 40, 10  # of the picture


def overview(dataset: Dataset) -> str:
    """A few lines: what was understood, and who has what."""
    facts = {
        "kind": dataset.kind,
        "samples": f"{len(dataset.train):,} train, {len(dataset.test):,} test; each {shown(dataset.train.x)}",
        WORDS[dataset.kind][1]: _target_facts(dataset),
        "clients": _client_facts(dataset),
    }
    notes = [note for note in (*dataset.note.split("; "), skew(dataset)) if note]
    lines = [f"{name:<10}{fact}" for name, fact in facts.items()]
    for title, texts in (("notes", notes), ("warnings", dataset.warnings)):
        lines += [f"{'' if n else title:<10}{text}" for n, text in enumerate(texts)]
    return "\n".join([dataset.name, *lines, *_picture(dataset)])


def targets(dataset: Dataset) -> str:
    """Such as "10 classes" or "regression of 1 target"."""
    count = len(dataset.classes)
    counted = f"{count} {WORDS[dataset.kind][count != 1]}"
    return counted if dataset.kind == CLASSIFICATION else f"{dataset.kind} of {counted}"


def skew(dataset: Dataset) -> str:
    """The hint for samples that are mostly of one class: accuracy hardly tells whether the others are found."""
    if dataset.kind != CLASSIFICATION or not len(dataset.train):
        return ""
    counts = np.bincount(dataset.train.y)
    share = counts.max() / counts.sum()
    if share < SKEWED or not dataset.classes:
        return ""
    name = dataset.classes[int(counts.argmax())]
    if len(dataset.classes) == 1:
        return f"all samples are {name}: there is nothing to predict"
    metrics = how_to_set("task.metrics", "balanced_accuracy,accuracy", "--metrics")
    return (
        f"{100 * share:.0f} % of the samples are {name}, and a model that always answers so has this accuracy: "
        f"judge by the balanced accuracy ({metrics}) or the AUC"
    )


def _target_facts(dataset: Dataset) -> str:
    y = dataset.train.y
    if dataset.kind == NEXT_TOKEN and shown(dataset.train.x) == "text":
        return "each token of a text from those before it, by the tokenizer of the model"
    if dataset.kind == NEXT_TOKEN:
        return f"{len(dataset.classes):,} different, {y.shape[1]} in a sample"
    if dataset.kind == REGRESSION:
        columns = y.reshape(len(y), -1).T
        facts = [
            f"{name}: mean {c.mean():.4g}, deviation {c.std():.4g}, from {c.min():.4g} to {c.max():.4g}"
            for name, c in zip(dataset.classes, columns, strict=True)
        ]
        return "; ".join(facts[:5]) + ("; ..." if len(facts) > 5 else "")
    if dataset.kind == SURVIVAL:
        seen, times = int(y[:, 1].sum()), y[:, 0]
        return f"from {times.min():.4g} to {times.max():.4g}, {seen:,} of {len(y):,} end with the event"
    counts = y.sum(axis=0) if dataset.kind == MULTILABEL else np.bincount(y, minlength=len(dataset.classes))
    order = np.argsort(-counts, kind="stable")
    facts = [f"{dataset.classes[k]} {int(counts[k]):,}" for k in order[:8]]
    return f"{len(counts)}: {', '.join(facts)}{', ...' if len(counts) > 8 else ''}"


def _client_facts(dataset: Dataset) -> str:
    if dataset.train.group is None or dataset.test.group is None:
        return "none by nature; a partition makes them (`copfl list partitions`)"
    train, test = (
        np.bincount(groups, minlength=len(dataset.groups))
        for groups in (dataset.train.group, dataset.test.group)
    )
    sizes = f"{train.min():,} to {train.max():,} train samples (median {int(np.median(train)):,})"
    untested = [name for name, count in zip(dataset.groups, test, strict=True) if not count]
    missing = f"; without a test sample: {listed(untested, 5)}" if untested else ""
    usual = "" if dataset.natural else "; used as clients with --partition by_group"
    tests = f"{test.min():,} to {test.max():,} test samples"
    return f"{len(dataset.groups):,} groups, {sizes}, {tests}{missing}{usual}"


def _picture(dataset: Dataset) -> list[str]:
    """Rows of shades: the fraction of each class, label or range of values in each client's train samples."""
    if dataset.train.group is None or dataset.kind == NEXT_TOKEN:
        return []
    columns, counted = _columns(dataset)
    rows = []
    for number, name in enumerate(dataset.groups[:MOST_ROWS]):
        in_group = dataset.train.group == number
        share = counted[in_group].sum(axis=0) / max(int(in_group.sum()), 1)
        level = np.ceil(share * (len(SHADES) - 1)).astype(int).clip(0, len(SHADES) - 1)
        rows.append((name, f"{int(in_group.sum()):,}", "".join(SHADES[k] for k in level)))
    widths = [max(len(row[k]) for row in rows) for k in (0, 1)]
    body = [f"  {name:<{widths[0]}}  {size:>{widths[1]}}  |{shades}|" for name, size, shades in rows]
    more = len(dataset.groups) - MOST_ROWS
    legend = f'columns: {columns}. Shades, from none to all of the samples: "{SHADES}"'
    return ["", "who has what", *body, *([f"  and {more:,} more"] if more > 0 else []), f"  {legend}"]


def _columns(dataset: Dataset) -> tuple[str, NDArray[np.float64]]:
    """What the columns of the picture are, and which of them each train sample counts in."""
    y = dataset.train.y
    if dataset.kind == SURVIVAL:
        return "an event, and a time that is censored", np.stack([y[:, 1], 1 - y[:, 1]], 1)
    if dataset.kind == REGRESSION:
        values = y if y.ndim == 1 else y[:, 0]
        edges = np.quantile(values, np.linspace(0, 1, BINS + 1))
        bins = np.searchsorted(edges[1:-1], values, side="right")
        return f"tenths of all values of {dataset.classes[0]}, in order", np.eye(BINS)[bins]
    count = len(dataset.classes)
    rows = np.asarray(y, np.float64) if dataset.kind == MULTILABEL else np.eye(count)[y]
    names: Sequence[str] = dataset.classes[:MOST_COLUMNS]
    first = listed(names, 5)
    title = f"the {'first ' if count > MOST_COLUMNS else ''}{len(names)} of {count} ({first})"
    return title, rows[:, :MOST_COLUMNS]
