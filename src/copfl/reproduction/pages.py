"""Markdown of an item: ours beside the paper's, and a verdict for every claim. Made of the records alone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from copfl.comparison.entries import described
from copfl.comparison.tables import as_lines
from copfl.errors import UsageError
from copfl.reproduction.experiments import Budget, Column
from copfl.reproduction.findings import Cell, Findings, best_baseline, interval_text, overall, verdicts

NOT_YET = "not yet run"


def summary(findings: Findings, budget: Budget, pictures: Sequence[str] = ()) -> str:
    """The tables, the pictures and the verdicts."""
    item = findings.item
    parts = [item.about] if item.about else []
    parts.append(_how(findings, budget))
    for protocol in findings.protocols:
        rows = item.rows_of(protocol)
        parts.append(f"**{item.protocols[protocol]}.** {_counted(findings, protocol)}")
        parts += (
            _maps(findings, protocol) if item.map else [as_lines(_head(findings), _table(findings, protocol))]
        )
        parts += [
            f"![{item.title}]({name})"
            for name in pictures
            if f"-{protocol}." in name or len(findings.protocols) == 1
        ]
        if any(row.ours for row in rows) and item.baselines:
            parts.append(_rivals_note())
    if item.claims:
        said = (
            "What was aimed at, and whether it was reached"
            if item.aims
            else "What the paper says, and whether it holds"
        )
        parts += [f"**{said} here.**", _claims(findings)]
    parts += _notes(item.columns)
    return "\n\n".join(parts) + "\n"


def page(findings: Findings, budget: Budget, pictures: Sequence[str] = ()) -> str:
    """All of it: the summary, then how each verdict came about, what tuning chose, and every seed."""
    item = findings.item
    parts = [f"# {item.title}", summary(findings, budget, pictures).strip()]
    if item.claims:
        parts.append("## The verdicts, place by place")
    for protocol in findings.protocols if item.claims else []:
        rows = [
            [claim.text, found.where, found.word, found.why]
            for claim in item.claims
            for found in verdicts(claim, findings, protocol)
        ]
        parts += [
            f"**{item.protocols[protocol]}**",
            as_lines(["claim", "where", "verdict", "difference"], rows, text=True),
        ]
    tried = [cell for cell in findings.cells.values() if cell.trials and cell.plan.column.tuned is None]
    if tried:
        told = f"Accuracy in % on {budget.validation:.0%} of the training images, which these runs did not train on."
        plans = {cell.plan.column.title: cell.plan for cell in findings.cells.values() if cell.trials}
        told += f" Seed {budget.tune_seed}, {budget.tune_rounds} rounds."
        for title, plan in plans.items():
            if plan.column.tuned is not None:
                told += f" {title}: as chosen for {plan.column.tuned.title}."
            elif plan.column.rounds:
                told += f" {title}: {plan.trials()[0].run.tables['run']['rounds']} rounds."
        parts += ["## What tuning chose", told]
        parts.append(
            as_lines(["column", "protocol", "row", "chosen", "tried"], [_trials(c) for c in tried], text=True)
        )
    parts += ["## Every seed", as_lines(*_seeds(findings), text=True)]
    parts.append(_machines(findings))
    return "\n\n".join(filter(None, parts)) + "\n"


def _how(findings: Findings, budget: Budget) -> str:
    fewer = (
        ", more often in columns with fewer rounds" if any(c.rounds for c in findings.item.columns) else ""
    )
    text = (
        f"{budget.rounds} rounds; mean ± standard deviation over seeds of each client's last {budget.last} looks "
        f"(every {budget.eval_every} rounds{fewer}), the same partitions, first weights and batches for every row of a "
        "seed. "
    )
    shown = "The paper's numbers, single runs, are in brackets." if findings.item.numbers else ""
    short = " **A short budget, for trying things: not the reproduction.**" if budget.name == "short" else ""
    return (text + shown).strip() + short


def _counted(findings: Findings, protocol: str) -> str:
    cells = [cell for (own, _, _), cell in findings.cells.items() if own == protocol]
    whole = sum(len(cell.runs) == len(findings.seeds) for cell in cells)
    return f"{whole} of {len(cells)} cells have all {len(findings.seeds)} seeds."


def _head(findings: Findings) -> list[str]:
    return ["", *(column.title for column in findings.item.columns)]


def _table(findings: Findings, protocol: str) -> list[list[str]]:
    item = findings.item
    table = []
    for row in item.rows_of(protocol):
        cells = [findings.cell(protocol, column.name, row.label) for column in item.columns]
        told = [
            shown(cell, len(findings.seeds), item.numbers.get(column.name, {}).get(row.like))
            for cell, column in zip(cells, item.columns, strict=True)
        ]
        table.append([row.label, *told])
    for row in item.rows_of(protocol):
        if row.ours and item.baselines:
            gains = [_gain(findings, protocol, column, row.label) for column in item.columns]
            table.append([f"*{row.label} − best rival*", *gains])
    return table


def shown(cell: Cell, wanted: int, paper: float | None) -> str:
    """Such as "75.5 ± 2.1 (74.60)", or how much of it is there."""
    figure = cell.figure()
    beside = "" if paper is None else f" ({paper:.2f})"
    if figure is None:
        return f"{NOT_YET}{beside}"
    spread = "" if math.isnan(figure.spread) else f" ± {figure.spread:.1f}"
    few = "" if len(cell.runs) == wanted else f", {len(cell.runs)} of {wanted} seeds"
    return f"{figure.mean:.1f}{spread}{few}{beside}"


def _gain(findings: Findings, protocol: str, column: Column, row: str) -> str:
    cells = findings.column(protocol, column.name)
    found = best_baseline(findings.cell(protocol, column.name, row), cells)
    if found is None:
        return NOT_YET
    lacking = any(not cell.runs for cell in cells if not cell.row.ours)
    return f"{found.difference.mean:+.1f} {interval_text(found.difference.seeds)}, {found.other}" + (
        " (of those run)" if lacking else ""
    )


def _rivals_note() -> str:
    return (
        "The last lines are paired differences in points to the rival with the highest mean on the same seeds, with "
        "the 95 % t interval over seeds. That rival is picked by the very numbers it is compared with, which is a "
        "little in its favour."
    )


def _maps(findings: Findings, protocol: str) -> list[str]:
    item = findings.item
    assert item.map is not None
    (down, down_values), (across, across_values) = item.map
    parts = []
    for column in item.columns:
        labels = iter(row.label for row in item.rows_of(protocol))
        numbers = item.numbers.get(column.name, {})
        rows = []
        for value in down_values:
            cells = [findings.cell(protocol, column.name, next(labels)) for _ in across_values]
            told = [shown(cell, len(findings.seeds), numbers.get(cell.row.label)) for cell in cells]
            rows.append([f"{down}={value:g}", *told])
        head = [column.title, *(f"{across}={value:g}" for value in across_values)]
        parts.append(as_lines(head, rows))
    return parts


def _claims(findings: Findings) -> str:
    aims = findings.item.aims
    head = ["aim"] if aims else ["the paper says", "its own numbers"]
    head += [f"{protocol} protocol" for protocol in findings.protocols]
    rows = []
    for claim in findings.item.claims:
        words = []
        for protocol in findings.protocols:
            parts = verdicts(claim, findings, protocol)
            counts = _count([part.word for part in parts])
            words.append(f"**{overall(parts)}**" + (f" ({counts})" if "," in counts else ""))
        rows.append([claim.text, *([] if aims else [claim.paper_shows]), *words])
    return as_lines(head, rows, text=True)


def _count(words: Sequence[str]) -> str:
    """Such as "3 holds, 1 not measured"."""
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))


def _notes(columns: Sequence[Column]) -> list[str]:
    notes = dict.fromkeys(column.note for column in columns if column.note)
    if not notes:
        return []
    return ["Where the data is not the paper's:\n\n" + "\n".join(f"- {note}." for note in notes)]


def _trials(cell: Cell) -> list[str]:
    plan = cell.plan
    tried = [
        f"{described(t.settings, 'optimizer', plan.row.algorithm)}: "
        + (NOT_YET if t.accuracy is None else f"{100 * t.accuracy:.1f}")
        for t in cell.trials
    ]
    chosen = "not yet" if cell.chosen is None else described(cell.chosen, "optimizer", plan.row.algorithm)
    return [plan.column.title, plan.protocol, plan.row.label, chosen, ", ".join(tried)]


def _seeds(findings: Findings) -> tuple[list[str], list[list[str]]]:
    head = ["", "protocol", "row", *(f"seed {seed}" for seed in findings.seeds)]
    rows = []
    for cell in findings.cells.values():
        values = cell.per_seed()
        told = [f"{values[seed]:.2f}" if seed in values else "–" for seed in findings.seeds]
        if values:
            rows.append([cell.plan.column.title, cell.plan.protocol, cell.row.label, *told])
    return head, rows


def _machines(findings: Findings) -> str:
    where = {
        f"copfl {r.where.get('copfl', '?')} with torch {r.where.get('torch', '?')} on {r.where.get('device', '?')}"
        f" ({r.where.get('engine', '?')}, {r.where.get('precision', '?')})"
        for cell in findings.cells.values()
        for r in cell.runs.values()
    }
    return f"Run with {'; '.join(sorted(where))}." if where else ""


# The page that people read


def put(text: str, name: str, made: str) -> str:
    """The text with what is between the marks of an item replaced; everything else is left as it was written."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise UsageError(
            f"the page must have the marks {begin} and {end} once, with what is made here between them"
        )
    return pattern.sub(lambda _: f"{begin}\n{made.strip()}\n{end}", text)
