"""Markdown of an experiment: our numbers next to the paper's, and a verdict for every claim."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, median

from copfl.comparison.rows.entries import described
from copfl.errors import UsageError
from copfl.files import write_bytes
from copfl.tables import Table, as_markdown, percent, with_spread
from studies.paper.experiments import PROTOCOLS, Budget, Claim
from studies.paper.findings import (
    FAILS,
    HOLDS,
    NOT_YET,
    OPEN,
    UNKNOWN,
    Cell,
    Findings,
    best_of,
    complete,
    corrected,
    differences,
    gain,
    judged,
    leaders,
    overall,
    verdicts,
)

FRONT = "README.md"  # the page with the main tables
TABLES = "tables"  # the folder of the others, one page per experiment
BASELINES_NOTE = (
    "The last lines are paired differences in points to the baseline with the highest mean on the same "
    "seeds, with the 95 % t interval over seeds. A claim to be the best is judged against every baseline."
)
LEADERS_NOTE = (
    "**The highest mean of each column**, and the methods that five seeds do not distinguish from it: a "
    "paired t test, with Holm's correction for the number of methods. Only methods with all seeds are "
    "compared."
)
COST_NOTE = (
    "**Cost.** Kilobytes that a client receives and sends in a round, and seconds of a round of all clients: "
    "the median over rounds and seeds. Where seeds trained as one batch it is the time of all of them. "
    "Several runs shared the processor, so the seconds do not rank the methods."
)
DIFFERENCES_NOTE = (
    "**Differences** in points, with the 95 % t interval over seeds. Bold: significant with Holm's "
    "correction for the {} differences of this table."
)
JUDGED = (HOLDS, FAILS, OPEN, UNKNOWN)
HOLM_NOTE = "Holm: the same with Holm's correction for the number of comparisons ({})."


def summary(findings: Findings, pictures: Sequence[str] = ()) -> str:
    """The tables, the pictures and the verdicts."""
    experiment = findings.experiment
    if not experiment.columns:
        return f"{experiment.about}\n"
    parts = [experiment.about]
    for protocol in findings.protocols:
        parts.append(f"**{experiment.protocols[protocol]}.** {_complete_cells(findings, protocol)}")
        parts += _maps(findings, protocol) if experiment.map else [_table(findings, protocol)]
        shown = [name for name in pictures if len(findings.protocols) == 1 or f"-{protocol}." in name]
        parts += [f"![{experiment.title}]({name})" for name in shown]
    if experiment.baselines and any(row.ours for row in experiment.rows):
        parts.append(BASELINES_NOTE)
    if experiment.differences:
        parts += [_differences(findings, protocol) for protocol in findings.protocols]
    if experiment.cost:
        parts += [LEADERS_NOTE, *(_leaders(findings, protocol) for protocol in findings.protocols)]
        parts += [COST_NOTE, *(_costs(findings, protocol) for protocol in findings.protocols)]
    if experiment.claims:
        ours = "Claims of ours, and whether they hold."
        papers = "The paper's claims, and whether they hold."
        parts += [f"**{ours if experiment.aims else papers}**", _claims(findings), _holm_note(findings)]
    return "\n\n".join(filter(None, parts)) + "\n"


def page(findings: Findings, budget: Budget, pictures: Sequence[str] = ()) -> str:
    """The summary and the method, then every verdict by column, what tuning chose, and every seed."""
    experiment = findings.experiment
    parts = [f"# {experiment.title}", summary(findings, pictures).strip(), _method(findings, budget)]
    if not experiment.columns:
        return "\n\n".join(parts) + "\n"
    notes = dict.fromkeys(f"- {column.note}." for column in experiment.columns if column.note)
    about_data = "How the data differ from the paper's:" if experiment.of_paper else "The clients' data:"
    parts += [about_data, "\n".join(notes)] if notes else []
    if experiment.claims:
        parts.append("## The verdicts by column")
    for protocol in findings.protocols if experiment.claims else []:
        holm = corrected(findings, protocol)
        rows = [
            [claim.text, plain.where, plain.word, strict.word, plain.why]
            for claim in experiment.claims
            for plain, strict in zip(
                verdicts(claim, findings, protocol), verdicts(claim, findings, protocol, holm), strict=True
            )
        ]
        head = ["claim", "column", "verdict", "Holm", "difference"]
        parts.append(as_markdown(Table(experiment.protocols[protocol], head, rows, numeric=False)))
    tuned_here = [cell for cell in findings.cells.values() if cell.plan.column.tuned is None]
    tried = [cell for cell in tuned_here if not all(math.isnan(trial.accuracy) for trial in cell.trials)]
    if tried:
        head = ["column", "protocol", "row", "chosen", "tried"]
        table = as_markdown(Table("", head, [_trials(cell) for cell in tried], numeric=False))
        parts += ["## What tuning chose", _tuning(findings, budget), table]
    parts += ["## Every seed", _seeds(findings), _machines(findings)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _method(findings: Findings, budget: Budget) -> str:
    columns = findings.experiment.columns
    lengths = sorted({min(budget.rounds, column.rounds or budget.rounds) for column in columns})
    length = (
        f"{lengths[0]} rounds" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} rounds, by column"
    )
    more = ", more often in columns with fewer rounds" if lengths[0] < budget.rounds else ""
    text = (
        f"{length}. Mean ± standard deviation over seeds of each client's last {budget.last} "
        f"evaluations (every {budget.eval_every} rounds{more}). All rows of a seed have the same partitions, "
        "initial weights and batches."
    )
    if findings.experiment.numbers:
        text += " The paper's numbers, single runs, are in brackets."
    if budget.name == "short":
        text += " **A short budget, for trials: this is not the reproduction.**"
    return text


def _complete_cells(findings: Findings, protocol: str) -> str:
    cells = [cell for (its_protocol, _, _), cell in findings.cells.items() if its_protocol == protocol]
    done = sum(len(cell.per_seed) == len(cell.plan.seeds) for cell in cells)
    counts = sorted({len(cell.plan.seeds) for cell in cells})
    return f"{done} of {len(cells)} cells have all {' or '.join(map(str, counts))} seeds."


def _table(findings: Findings, protocol: str) -> str:
    experiment = findings.experiment
    columns = [findings.column(protocol, column.name) for column in experiment.columns]
    lines = list(zip(*columns, strict=True))
    rows = [[line[0].row.label, *(shown(cell, findings) for cell in line)] for line in lines]
    for line in lines if experiment.baselines else []:
        if line[0].row.ours:
            gains = [_gain(cell, column) for cell, column in zip(line, columns, strict=True)]
            rows.append([f"*{line[0].row.label} − best baseline*", *gains])
    return as_markdown(Table("", ["", *(column.title for column in experiment.columns)], rows))


def _differences(findings: Findings, protocol: str) -> str:
    gains = differences(findings, protocol)
    words = {
        key: f"**{points}**" if significant else str(points) for key, (points, significant) in gains.items()
    }
    columns = findings.experiment.columns
    rows = [
        [f"{row} − {other}", *(words.get((row, other, column.name), NOT_YET) for column in columns)]
        for row, other in findings.experiment.differences
    ]
    table = as_markdown(Table("", ["", *(column.title for column in columns)], rows))
    return f"{DIFFERENCES_NOTE.format(len(gains))}\n\n{table}"


def _leaders(findings: Findings, protocol: str) -> str:
    rows = []
    for column in findings.experiment.columns:
        cells = findings.column(protocol, column.name)
        known = sum(map(complete, cells))
        means = [f"{cell.row.label} ({shown(cell, findings)})" for cell in leaders(cells)] or [NOT_YET]
        rows.append([column.title, means[0], "; ".join(means[1:]) or "none", f"{known} of {len(cells)}"])
    head = ["", "highest mean", "not distinguishable", "methods compared"]
    return as_markdown(Table("", head, rows, numeric=False))


def _costs(findings: Findings, protocol: str) -> str:
    """Such as "295 / 295 kB, 0.12 s" for each row and column."""
    columns = [findings.column(protocol, column.name) for column in findings.experiment.columns]
    rows = [[line[0].row.label, *map(_cost, line)] for line in zip(*columns, strict=True)]
    return as_markdown(Table("", ["", *(column.title for column in findings.experiment.columns)], rows))


def _cost(cell: Cell) -> str:
    costs = [record.cost for record in cell.runs.values()]
    if not costs:
        return NOT_YET
    down, up, seconds = (median(cost[key] for cost in costs) for key in ("bytes_down", "bytes_up", "seconds"))
    return f"{down / 1000:,.0f} / {up / 1000:,.0f} kB, {seconds:.2g} s"


def shown(cell: Cell, findings: Findings) -> str:
    """Such as "75.5 ± 2.1 (74.60)", with the number of seeds if some are missing."""
    metric, wanted = cell.metric(), len(cell.plan.seeds)
    number = findings.papers(cell)
    paper = "" if number is None else f" ({number:.2f})"
    have = len(cell.per_seed)
    few = "" if have in (0, wanted) else f", {have} of {wanted} seeds"
    return f"{with_spread(*metric) if metric else NOT_YET}{few}{paper}"


def _gain(cell: Cell, column: Sequence[Cell]) -> str:
    """Such as "-0.2 [-1.2, +0.8], FedSelect": the cell minus the best baseline of its column."""
    baselines = [other for other in column if not other.row.ours]
    least = best_of([gain(cell, baseline) for baseline in baselines])
    if least is None:
        return NOT_YET
    return f"{least}, {least.other}{'' if all(other.runs for other in baselines) else ' (of those run)'}"


def _maps(findings: Findings, protocol: str) -> list[str]:
    (down, down_values), (across, across_values) = findings.experiment.map.items()
    parts = []
    for column in findings.experiment.columns:
        cells = iter(shown(cell, findings) for cell in findings.column(protocol, column.name))
        rows = [[f"{'.'.join(down)}={v:g}", *(next(cells) for _ in across_values)] for v in down_values]
        head = [column.title, *(f"{'.'.join(across)}={value:g}" for value in across_values)]
        parts.append(as_markdown(Table("", head, rows)))
    return parts


def _claims(findings: Findings) -> str:
    aims = findings.experiment.aims
    head = ["claim"] if aims else ["claim", "the paper's own numbers"]
    rows = []
    for claim in findings.experiment.claims:
        cells = [claim.text] if aims else [claim.text, claim.paper_shows]
        rows.append([*cells, *(judgement(claim, findings, protocol) for protocol in findings.protocols)])
    head += [f"{protocol} protocol" for protocol in findings.protocols]
    return as_markdown(Table("", head, rows, numeric=False))


def judgement(claim: Claim, findings: Findings, protocol: str) -> str:
    """Such as "**not distinguishable** (1 holds, 3 not distinguishable)", with Holm's where it differs."""
    plain, strict = (
        _counted([part.word for part in verdicts(claim, findings, protocol, judge)])
        for judge in (judged, corrected(findings, protocol))
    )
    return plain if plain == strict else f"{plain}; Holm: {strict}"


def _counted(words: Sequence[str]) -> str:
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    return f"**{overall(words)}**" + (f" ({counts})" if "," in counts else "")


def _holm_note(findings: Findings) -> str:
    counts = [f"{len(corrected(findings, p).p)} under the {p} protocol" for p in findings.protocols]
    return HOLM_NOTE.format(", ".join(counts))


def _tuning(findings: Findings, budget: Budget) -> str:
    samples = "images" if findings.experiment.of_paper else "samples"
    text = (
        f"Accuracy in % on {budget.validation:.0%} of the training {samples}, which these runs did not train "
        f"on. Seed {budget.tune_seed}, {budget.tune_rounds} rounds."
    )
    plans = {cell.plan.column.title: cell.plan for cell in findings.cells.values() if cell.trials}
    for title, plan in plans.items():
        if plan.column.tuned is not None:
            text += f" {title}: as chosen for {plan.column.tuned.title}."
        elif plan.column.rounds:
            text += f" {title}: {plan.trials()[0].job.run.run.rounds} rounds."
    return text


def _trials(cell: Cell) -> list[str]:
    plan = cell.plan
    silent = "optimizer", "algorithm", plan.row.algorithm
    tried = ", ".join(f"{described(t.settings, *silent)}: {percent(t.accuracy)}" for t in cell.trials)
    chosen = NOT_YET if cell.chosen is None else described(cell.chosen, *silent)
    return [plan.column.title, plan.protocol, plan.row.label, chosen, tried]


def _seeds(findings: Findings) -> str:
    rows = []
    seeds = sorted({seed for cell in findings.cells.values() for seed in cell.plan.seeds})
    for cell in findings.cells.values():
        values = cell.per_seed
        numbers = [f"{values[seed]:.2f}" if seed in values else "–" for seed in seeds]
        if values:
            rows.append([cell.plan.column.title, cell.plan.protocol, cell.row.label, *numbers])
    head = ["", "protocol", "row", *(f"seed {seed}" for seed in seeds)]
    return as_markdown(Table("", head, rows, numeric=False))


def _machines(findings: Findings) -> str:
    form = "copfl {copfl} with torch {torch} on {device} ({engine}, {precision})"
    known = [record.where for cell in findings.cells.values() for record in cell.runs.values()]
    machines = sorted({form.format_map(defaultdict(lambda: "?", where)) for where in known})
    return f"Run with {'; '.join(machines)}." if machines else ""


def write_claims(all_findings: Sequence[Findings], folder: Path) -> None:
    """Writes one table of the paper's claims in these experiments into the front page, and how many hold."""
    front, rows = folder / FRONT, []
    if not front.exists() or "<!-- claims -->" not in (text := front.read_text("utf-8")):
        return
    of_paper = [findings for findings in all_findings if not findings.experiment.aims]
    for findings in of_paper:
        experiment = findings.experiment
        link = f"[{experiment.title.partition(':')[0]}]({TABLES}/{experiment.name}.md)"
        elsewhere = f"<!-- {experiment.name} -->" in text
        for claim in () if elsewhere else experiment.claims:
            words = [
                judgement(claim, findings, protocol) if protocol in findings.protocols else "–"
                for protocol in PROTOCOLS
            ]
            rows.append([link, claim.text, *words])
    head = ["experiment", "claim of the paper", *(f"{protocol} protocol" for protocol in PROTOCOLS)]
    text = put(text, "claims", as_markdown(Table("", head, rows, numeric=False)))
    if "<!-- count -->" in text:
        text = put(text, "count", _count(of_paper))
    write_bytes(front, text.encode())


def _count(all_findings: Sequence[Findings]) -> str:
    """How many claims hold, do not hold or cannot be told, with Holm's correction."""
    words = {
        protocol: [
            overall(
                [part.word for part in verdicts(claim, findings, protocol, corrected(findings, protocol))]
            )
            for findings in all_findings
            if protocol in findings.protocols
            for claim in findings.experiment.claims
        ]
        for protocol in PROTOCOLS
    }
    kinds = [word for word in JUDGED if any(word in judged_so for judged_so in words.values())]
    rows = [
        [f"{len(own)} claims, {protocol} protocol", *(str(own.count(word)) for word in kinds)]
        for protocol, own in words.items()
    ]
    return as_markdown(Table("", ["with Holm's correction", *kinds], rows))


def put(text: str, name: str, made: str) -> str:
    """The text with the part between the comments of an experiment replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise UsageError(f"the page must have the comments {begin} and {end} once, around the generated part")
    return pattern.sub(lambda _: f"{begin}\n{made.strip()}\n{end}", text)


def begun(findings: Findings) -> Findings:
    """The findings without the columns in which half of the methods lack seeds; the text names these."""
    experiment = findings.experiment
    mostly_run = {
        column.name
        for protocol, column in product(findings.protocols, experiment.columns)
        if mean([complete(cell) for cell in findings.column(protocol, column.name)]) > 1 / 2
    }
    missing = [column.title for column in experiment.columns if column.name not in mostly_run]
    about = f"{experiment.about} Not yet run: {'; '.join(missing)}." if missing else experiment.about
    shown_columns = [column for column in experiment.columns if column.name in mostly_run]
    known = {key: cell for key, cell in findings.cells.items() if key[1] in mostly_run}
    return replace(findings, experiment=replace(experiment, columns=shown_columns, about=about), cells=known)


def write(findings: Findings, budget: str, folder: Path) -> list[Path]:
    """Writes the page and pictures of an experiment, and its part of the front page.

    Args:
        findings: The cells of the experiment.
        budget: The budget of its runs; the page of any but the full one has its name, too.
        folder: Has the front page, README.md, and below it the folder of the other pages.

    Returns:
        The files that were written.
    """
    from studies.paper import figures

    findings = begun(findings) if findings.experiment.cost else findings
    experiment = findings.experiment
    stem = experiment.name if budget == "full" else f"{experiment.name}-{budget}"
    tables = folder / TABLES
    tables.mkdir(parents=True, exist_ok=True)
    drawn, names = figures.write(findings, stem, tables), figures.names(findings, stem)
    path, front = tables / f"{stem}.md", folder / FRONT
    write_bytes(path, page(findings, experiment.budget(budget), names).encode())
    if not front.exists() or f"<!-- {stem} -->" not in (text := front.read_text("utf-8")):
        return [path, *drawn]
    made = summary(findings)
    made += f"\nEvery column, seed and tuning run: [{experiment.title}]({TABLES}/{path.name})."
    write_bytes(front, put(text, stem, made).encode())
    return [path, *drawn, front]
