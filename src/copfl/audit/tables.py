"""An audit as a person reads it: grids of words for the terminal, for Markdown, and everything as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from copfl import stats
from copfl.audit.audit import FORMAT, REFERENCES, SCORES, Audit
from copfl.files import write_bytes
from copfl.stats import Correlation


class Sheet(NamedTuple):
    """One grid, with what stands above and below it."""

    title: str
    head: list[str]
    rows: list[list[str]]
    below: str = ""
    detail: bool = False  # for the files; a terminal is no place for it


def label(score: str) -> str:
    """Such as "weight", or "fedce: gradient part"."""
    algorithm, _, name = score.rpartition(" ")
    return f"{algorithm}: {SCORES.get(name, name)}" if algorithm else SCORES.get(name, name)


def sheets(found: Audit) -> list[Sheet]:
    """All that is shown, grid by grid."""
    return [_clients(found), *(_correlations(found, *how) for how in MEASURES), _stability(found)]


def _clients(found: Audit) -> Sheet:
    weight = found.mean("scores", "weight")
    place = len(weight) + 1 - stats.ranked(weight)  # the heaviest is 1
    values = {name: (found.mean("values", name), found.mean("errors", name)) for name in found.references}
    accuracy = np.nanmean([seed.accuracy for seed in found.seeds], 0)
    rows = [
        [
            name, f"{weight[n]:.2f}", f"{place[n]:g}",
            *(f"{100 * v[n]:+.1f} ± {100 * e[n]:.1f}" for v, e in values.values()), f"{100 * accuracy[n]:.1f}",
        ]
        for n, name in enumerate(found.names)
    ]  # fmt: skip
    return Sheet(
        f"{found.title}: what each client is worth, in points of accuracy, beside its weight",
        ["", "weight", "rank", *(REFERENCES[name] for name in found.references), "accuracy"],
        rows,
        "weight: 1 is an even share, the mean over rounds; rank 1 is the heaviest. left out: what the others' personal "
        "accuracy, or the broadcast's on everybody's test samples, gains by having the client, from training again "
        "without it. Shapley: its fair part of what each round's uploads gained, added up over the rounds, for the "
        "broadcast and for what each client predicts with. ± standard error: over the clients who gain, and over the "
        f"sampled orders.{_seeds(found)}",
    )


MEASURES = (("Spearman's rho", stats.spearman), ("Kendall's tau-b", stats.kendall))


def _correlations(found: Audit, title: str, measure: stats.Measure) -> Sheet:
    rows = [
        [
            label(score),
            *(_interval(found.correlation(measure, score, reference)) for reference in found.references),
        ]
        for score in found.scores
    ]
    return Sheet(
        f"Do the scores rank the clients as their worth does? {title}",
        ["", *(REFERENCES[name] for name in found.references)],
        rows,
        f"+1: the same order, -1: the reverse, 0: no relation. In brackets where 95 % of the values lie when the "
        f"{found.clients} clients are drawn again: an interval that holds 0 tells nothing.{_seeds(found)}",
        detail=measure is stats.kendall,
    )


def _stability(found: Audit) -> Sheet:
    rows = []
    for kind, names in (("scores", found.scores), ("values", found.references)):
        for name in names:
            over = [_number(v) for v in found.over_rounds(name)] if kind == "scores" else ["-", "-"]
            title = label(name) if kind == "scores" else REFERENCES[name]
            rows.append([title, *over, _number(found.over_seeds(kind, name))])
    alone = " One seed was run; --seeds 0,1,2 tells how much of it is luck." if len(found.seeds) < 2 else ""
    return Sheet(
        "Do they say the same again? Spearman's rho",
        ["", "from round to round", "first half, second half", "between seeds"],
        rows,
        f"The clients as one round ranks them and the next, as the halves of the run do, and as two seeds do.{alone}",
    )


def _seeds(found: Audit) -> str:
    seeds = ", ".join(str(seed.seed) for seed in found.seeds)
    return f" Means over the seeds {seeds}." if len(found.seeds) > 1 else ""


def _interval(found: Correlation) -> str:
    if math.isnan(found.value):
        return "-"
    return f"{found.value:+.2f} [{_number(found.low)}, {_number(found.high)}]"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.2f}"


def remarks(found: Audit) -> list[str]:
    """What a reader must know of how it was found."""
    update_of = []
    if not all(seed.same for seed in found.seeds):
        update_of.append(
            "The servers rebuilt from the uploads are not the run's own bit by bit; expect small differences."
        )
    if any(seed.repeated is False for seed in found.seeds):
        update_of.append(
            "The run did not come out here as its folder says (another machine or version?): audited is the repeat."
        )
    orders = sum(seed.orders for seed in found.seeds)
    how = found.sampling
    if orders:
        update_of.append(
            f"Shapley values come from {orders} sampled orders, cut off within {100 * how.truncate:g} points."
        )
    else:
        update_of.append(
            f"Shapley values are exact within each round; rounds that gain under {100 * how.truncate:g} points count 0."
        )
    return update_of


def as_json(found: Audit) -> dict[str, Any]:
    """All that was found; what is not finite is null."""

    def numbers(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: numbers(value) for name, value in values.items()}
        if isinstance(values, float):
            return values if math.isfinite(values) else None
        return [numbers(float(v)) for v in values]

    kinds = ("scores", "values", "errors", "next_round", "halves", "accuracy", "broadcast")
    return {
        "format": FORMAT,
        "title": found.title,
        "clients": found.names,
        "rounds": found.rounds,
        "sampling": found.sampling._asdict(),
        "seeds": [
            {
                **{name: getattr(seed, name) for name in ("seed", "same", "repeated", "orders")},
                **{kind: numbers(getattr(seed, kind)) for kind in kinds},
            }
            for seed in found.seeds
        ],
        "mean": {
            kind: {name: numbers(found.mean(kind, name)) for name in names}
            for kind, names in (
                ("scores", found.scores),
                ("values", found.references),
                ("errors", found.references),
            )
        },
        "correlations": [
            {
                "score": score,
                "reference": reference,
                "spearman": numbers(found.correlation(stats.spearman, score, reference)),
                "kendall": numbers(found.correlation(stats.kendall, score, reference)),
            }
            for score in found.scores
            for reference in found.references
        ],
        "between_seeds": {
            name: numbers(found.over_seeds(kind, name))
            for kind, names in (("scores", found.scores), ("values", found.references))
            for name in names
        },
        "remarks": remarks(found),
    }


def as_markdown(title: str, grids: Sequence[Sheet], update_of: Sequence[str]) -> str:
    """The grids as a Markdown page."""
    parts = [f"# {title}"]
    for grid in grids:
        lines = [grid.head, ["---", *["---:"] * (len(grid.head) - 1)], *grid.rows]
        parts += [f"## {grid.title}", "\n".join("| " + " | ".join(line) + " |" for line in lines), grid.below]
    return "\n\n".join(part for part in [*parts, *update_of] if part) + "\n"


def show(grids: Sequence[Sheet], update_of: Sequence[str], out: IO[str]) -> None:
    """Writes the grids; plain text when `out` is not a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out, highlight=False, width=None if out.isatty() else 120)
    for grid in (grid for grid in grids if not grid.detail):
        table = Table(title=grid.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for place, name in enumerate(grid.head):
            table.add_column(name, justify="right" if place else "left", no_wrap=not place)
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)
        if grid.below:
            console.print(grid.below + "\n")
    for one in update_of:
        console.print(one)


def write(
    folder: Path, title: str, grids: Sequence[Sheet], update_of: Sequence[str], content: dict[str, Any]
) -> list[Path]:
    """The paths of audit.json and audit.md, once they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "audit.json": json.dumps(content, indent=1) + "\n",
        "audit.md": as_markdown(title, grids, update_of),
    }
    for name, text in texts.items():
        write_bytes(folder / name, text.encode(), durable=False)
    return [folder / name for name in texts]
