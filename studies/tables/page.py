"""The page of the study, from its records."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.stats import over_clients
from copfl.tables import Table, as_markdown
from studies.tables.federations import CLASSES, FEDERATIONS
from studies.tables.study import ALONE, CHOOSE, DEFAULT, METHODS, OWN, SHARED

INTRODUCTION = Path(__file__).parent / "introduction.md"
RIVALS = ("constant", "linear", "forest", "boosted")
Numbers = NDArray[np.float64]


class Error(NamedTuple):
    """What is compared: smaller is better."""

    metric: str
    title: str
    digits: int


LOG_LOSS, WRONG = Error("log_loss", "log loss", 3), Error("accuracy", "accuracy, %", 1)
RMSE = Error("rmse", "RMSE", 3)


class Records(NamedTuple):
    """By federation, model and split, the metrics of a run at each site."""

    values: dict[tuple[str, str, int], dict[str, list[float | None]]]
    trained: dict[tuple[str, str], Counter[str]]
    seconds: dict[tuple[str, str], list[float]]  # of a processor
    probabilities: dict[str, list[dict[str, float]]]  # of the default, by federation
    kept: dict[tuple[str, int], list[int]]  # own trees of each site, by federation and split

    def of(self, federation: str, model: str, metric: str) -> dict[int, float]:
        """By split, the mean over sites."""
        found = {}
        for (name, of_model, split), metrics in self.values.items():
            if (name, of_model) == (federation, model) and metric in metrics:
                values = np.array(metrics[metric], float)
                if not np.isnan(values).all():
                    found[split] = float(np.nanmean(values))
        return found


def read(path: Path) -> Records:
    """The records of a file."""
    records = Records({}, {}, {}, {}, {})
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        run = json.loads(line)
        if "error" in run:
            continue
        key = run["federation"], run["method"]
        records.trained.setdefault(key, Counter())[run["trained"]] += 1
        if run["seconds"] is not None:
            records.seconds.setdefault(key, []).append(run["seconds"])
        if run["method"] == DEFAULT and "probabilities" in run:
            records.probabilities.setdefault(run["federation"], []).append(run["probabilities"])
        if run["method"] == OWN:
            records.kept[run["federation"], run["split"]] = run["kept"]
        for model, metrics in run["values"].items():
            records.values[run["federation"], model, run["split"]] = metrics
    return records


def page_of(path: Path) -> str:
    """The page."""
    records = read(path)
    classes = [name for name, federation in FEDERATIONS.items() if federation.kind == CLASSES]
    values = [name for name in FEDERATIONS if name not in classes]
    parts = [INTRODUCTION.read_text("utf-8")]
    for error, federations in ((LOG_LOSS, classes), (WRONG, classes), (RMSE, values)):
        parts.append(as_markdown(_means(records, federations, error)))
    for error, federations in ((LOG_LOSS, classes), (RMSE, values)):
        parts.append(as_markdown(_judged(records, federations, error)))
    parts.append(as_markdown(_calibrated(records, classes)))
    parts.append(as_markdown(_races(records)))
    for error, federations in ((LOG_LOSS, classes), (RMSE, values)):
        if (of_trees := _own_trees(records, federations, error)).rows:
            parts.append(as_markdown(of_trees))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _models(records: Records) -> list[str]:
    """Those that are compared in each split; `choose` is slow and has a table of its own, and so have own trees."""
    known = {model for _, model, _ in records.values} - {CHOOSE, OWN, ALONE}
    return [model for model in (*RIVALS, *METHODS) if model in known]


def _means(records: Records, federations: list[str], error: Error) -> Table:
    """A row per federation, a column per model, of the splits that all models have."""
    models, rows = _models(records), []
    scale = 100 if error is WRONG else 1
    for federation in federations:
        by_model = {model: records.of(federation, model, error.metric) for model in models}
        common = _common(by_model)
        means = {m: scale * np.mean([found[s] for s in common]) for m, found in by_model.items() if found}
        values = (f"{means[m]:.{error.digits}f}" if m in means else "" for m in models)
        rows.append([federation, f"{len(common)}", *values])
    return Table(f"{error.title}: means over sites and splits", ["", "splits", *models], rows)


def _judged(records: Records, federations: list[str], error: Error) -> Table:
    """The default beside the best of the others, which the test rows name."""
    rows = []
    for federation in federations:
        by_model = {model: records.of(federation, model, error.metric) for model in _models(records)}
        common = _common(by_model)
        ours = by_model.pop(DEFAULT, {})
        if not ours:
            continue
        rival = _best({m: v for m, v in by_model.items() if m in RIVALS}, set(ours))
        best = _best(by_model, common)
        row = [federation, f"{len(ours)}", _most(records.trained[federation, DEFAULT])]
        for name, other, splits in (
            ("", "constant", set(ours)),
            (f"{rival} ", rival, set(ours)),
            (f"{best} ", best, common),
        ):
            change = np.array([100 * (ours[s] / by_model[other][s] - 1) for s in sorted(splits)])
            bounds = over_clients(change)
            interval = f" [{bounds.low:+.1f}, {bounds.high:+.1f}]" if len(change) > 1 else ""
            row.append(f"{name}{change.mean():+.1f}{interval}")
        seconds = records.seconds.get((federation, DEFAULT), [])
        row.append(f"{np.mean(seconds):.0f}" if seconds else "")
        rows.append(row)
    head = [
        "",
        "splits",
        "chosen",
        "to the constant, %",
        "to the best alone, %",
        "to the best of everything, %",
        "processor, s",
    ]
    return Table(f"{error.title} of the default, negative is better", head, rows)


def _races(records: Records) -> Table:
    """What `choose` took, beside the default in the same split."""
    rows = []
    for name, federation in FEDERATIONS.items():
        error = LOG_LOSS if federation.kind == CLASSES else RMSE
        for split, value in records.of(name, CHOOSE, error.metric).items():
            took = _most(records.trained[name, CHOOSE]).removesuffix(" 1")
            values = (
                f"{of_model:.{error.digits}f}"
                for of_model in (value, records.of(name, DEFAULT, error.metric)[split])
            )
            rows.append([name, error.title, took, *values])
    return Table("choose with two minutes", ["", "error", "took", "its error", "the default's"], rows)


def _own_trees(records: Records, federations: list[str], error: Error) -> Table:
    """Trees of each site alone, shared ones, and those with a site's own; and the sites that keep their own."""
    rows = []
    for federation in federations:
        arms = {model: records.of(federation, model, error.metric) for model in (ALONE, SHARED, OWN)}
        if not (both := set(arms[OWN])):
            continue
        changes = np.array([100 * (arms[OWN][s] / arms[SHARED][s] - 1) for s in sorted(both)])
        bounds = over_clients(changes)
        interval = f" [{bounds.low:+.1f}, {bounds.high:+.1f}]" if len(both) > 1 else ""
        of_sites = [_errors(records, federation, split, error) for split in sorted(both)]
        kept, difference = (np.concatenate(parts) for parts in zip(*of_sites, strict=True))
        at_keepers = difference[kept > 0]
        alone = both & set(arms[ALONE])
        mean_alone = f"{np.mean([arms[ALONE][s] for s in alone]):.{error.digits}f}" if alone == both else ""
        rows.append(
            [
                federation,
                f"{len(both)}",
                mean_alone,
                *(f"{np.mean([arms[m][s] for s in both]):.{error.digits}f}" for m in (SHARED, OWN)),
                f"{changes.mean():+.1f}{interval}",
                f"{len(at_keepers)} of {len(kept)}",
                f"{int((at_keepers < 0).sum())}, {int((at_keepers > 0).sum())}",
            ]
        )
    head = [
        "",
        "splits",
        "alone",
        "shared",
        "with own",
        "own to shared, %",
        "sites that keep own",
        "better, worse",
    ]
    return Table(f"{error.title} of trees: alone, shared, and with a site's own", head, rows)


def _errors(records: Records, federation: str, split: int, error: Error) -> tuple[Numbers, Numbers]:
    """Of each site that has test rows: how many own trees it keeps, and its error with them less that without."""
    own, shared = (
        np.array(records.values[federation, model, split][error.metric], float) for model in (OWN, SHARED)
    )
    known = ~np.isnan(own)
    return np.array(records.kept[federation, split], float)[known], (own - shared)[known]


def _calibrated(records: Records, federations: list[str]) -> Table:
    """What the default's probabilities are worth, a row per federation."""
    rows = []
    for federation in federations:
        if found := records.probabilities.get(federation):
            error = 100 * np.mean([of_split["calibration_error"] for of_split in found])
            sites, above, shown = (
                int(sum(of_split[name] for of_split in found)) for name in ("sites", "above", "shown_above")
            )
            rows.append([federation, f"{len(found)}", f"{error:.1f}", f"{above} of {sites}", f"{shown}"])
    head = ["", "splits", "calibration error, %", "sites above the class frequencies", "by more than noise"]
    return Table(
        "probabilities of the default: calibration error of all test rows, log loss at sites", head, rows
    )


def _common(by_model: dict[str, dict[int, float]]) -> set[int]:
    """The splits that all models have."""
    known = [set(found) for found in by_model.values() if found]
    return set.intersection(*known) if known else set()


def _best(by_model: dict[str, dict[int, float]], splits: set[int]) -> str:
    """The model with the lowest mean over the splits."""
    means = {m: np.mean([v[s] for s in splits]) for m, v in by_model.items() if splits and splits <= v.keys()}
    return min(means, key=lambda model: means[model])


def _most(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
