"""The report of one or several runs.

`copfl report` writes it once, and `copfl watch` again whenever a file of the runs changes.
"""

import contextlib
import hashlib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from copfl import foreign
from copfl.charts import Chart, Heat
from copfl.core.evaluation import VALIDATED
from copfl.errors import RunError, raised_as
from copfl.experiment import final
from copfl.experiment.analysis import against_rivals as of_rivals
from copfl.experiment.analysis.convergence import got_worse, still_rises
from copfl.experiment.analysis.gains import EQUAL, constant_text
from copfl.experiment.answer import answer_of, of_several, section_of
from copfl.experiment.progress import span
from copfl.experiment.reading import read_all
from copfl.experiment.run_record import FINDINGS, RunRecord
from copfl.measures.metrics import ACCURACY, MetricInfo
from copfl.report import run_charts
from copfl.report.document import Document, Source, render
from copfl.report.paired import Paired, Runs, paired
from copfl.sections import Section
from copfl.stats import Numbers
from copfl.tables import Table, capital, listed, number, size

BENEFIT = "What is each site worth to the others?"
FILES = (
    "rounds.jsonl",
    "timing.jsonl",
    "run.toml",
    "checkpoint/state.safetensors",
    "audit.json",
    *(finding.file for finding in FINDINGS),
)
NAMED = 5  # clients that a sentence names
OVER_CLIENTS = "95 % interval over sites"
TABLES = ("algorithm", "optimizer", "data", "partition", "model", "robust", "attack")


def document_of(runs: Runs) -> Document:
    """The report of one or several runs; RunError if one of their files has other content than a run writes."""
    folders = ", ".join(str(run.folder) for run in runs)
    damaged = f"a file of {folders} is damaged ({{}}); restore it from a copy, or start the run again"
    with raised_as(RunError, damaged, *foreign.DAMAGE):
        return _document_of(runs)


def _document_of(runs: Runs) -> Document:
    several, pairs = len(runs) > 1, paired(runs)
    notes = [f"{run.label}: {note}." if several else f"{note}." for run in runs for note in _notes(run)]
    if several and not pairs:
        notes.insert(0, "The runs have different sites or samples, so there are no paired differences.")
    return Document(
        title=_title(runs),
        subtitle="; ".join(_progress(run, several) for run in runs),
        conclusion=of_runs(runs),
        tiles=_tiles(runs),
        tables=[_pairs(runs[0], pairs)] if pairs else [],
        notes=notes,
        facts=_facts(runs),
        sections=sections(runs),
        sources=[
            Source(run.label, str(run.folder), _command(str(run.environment.get("command") or "")), run.toml)
            for run in runs
        ],
        ended=all(run.ended for run in runs),
        answer=_answer(runs),
    )


def _answer(runs: Runs) -> Section | None:
    """Whether it pays, for each site of one run; for several runs, which of them."""
    answers = {run.label: answer_of(run) for run in runs if run.algorithm != "local"}
    known = {label: found for label, found in answers.items() if found is not None}
    if len(runs) == 1:
        return next((section_of(found) for found in known.values()), None)
    return of_several(known)


def sections(runs: Runs) -> list[Section]:
    """All charts; metrics that no run recorded are left out."""

    each = partial(_each, runs)
    title = capital(runs[0].primary.title)
    clients = each(lambda run: run_charts.clients(run, runs))
    accuracy = [*run_charts.accuracy(runs), *clients, *run_charts.differences(runs)]
    personal = [*run_charts.personal(runs), *each(run_charts.by_layer)]
    data = list(run_charts.data(runs))
    audit = "Do the weights match the sites' contributions?"
    all_sections = [
        Section("accuracy", title, "How accurate is each site's model?", accuracy),
        Section("gain", "Gain", "Does it pay for each site?", each(run_charts.gain)),
        *found_sections(runs),
        Section("similar", "Similarity", "Which sites are alike?", each(run_charts.similar)),
        Section("benefit", "Benefit", BENEFIT, each(run_charts.benefit), run_charts.contributed(runs)),
        Section("contribution", "Weights", "Which sites have weight, and why?", each(run_charts.scores)),
        Section("audit", "Audit", audit, each(run_charts.audit)),
        Section("personal", "Personal parameters", "Which parameters are personal?", personal),
        Section("data", "Data", "Which data does each site have?", data, run_charts.per_class(runs)),
        Section("cost", "Cost", "How many bytes and seconds does a round take?", run_charts.cost(runs)),
    ]
    all_sections = joined(all_sections)
    for chart in (chart for section in all_sections for chart in section.charts):
        if isinstance(chart, Heat) and len(chart.rows) != len(chart.values):
            raise ValueError(f'"{chart.title}" has {len(chart.values)} rows and {len(chart.rows)} names')
    return [section for section in all_sections if section.charts]


def found_sections(runs: Runs) -> list[Section]:
    """What the findings of the runs show, a section per finding and run; of several runs, titles name the run."""
    sections = []
    for finding in FINDINGS:
        for position, run in enumerate(runs, 1):
            found = run.findings.get(finding.name)
            if found is not None and (section := finding.section(found, run)) is not None:
                sections.append(_of_run(section, run, position) if len(runs) > 1 else section)
    return sections


def joined(sections: Sequence[Section]) -> list[Section]:
    """One section of each name, in the place of the first."""
    by_name: dict[str, Section] = {}
    for section in sections:
        first = by_name.get(section.name)
        by_name[section.name] = (
            section
            if first is None
            else first._replace(
                charts=[*first.charts, *section.charts],
                tables=[*first.tables, *section.tables],
                notes=[*first.notes, *section.notes],
            )
        )
    return list(by_name.values())


def _each(runs: Runs, charts_of: Callable[[RunRecord], Iterable[Chart]]) -> list[Chart]:
    """The charts of every run; of several, their titles and names contain the run."""
    if len(runs) == 1:
        return list(charts_of(runs[0]))
    return [_chart_of_run(c, run, position) for position, run in enumerate(runs, 1) for c in charts_of(run)]


def _of_run(section: Section, run: RunRecord, position: int) -> Section:
    return section._replace(
        charts=[_chart_of_run(chart, run, position) for chart in section.charts],
        tables=[table._replace(title=f"{table.title}: {run.label}") for table in section.tables],
    )


def _chart_of_run(chart: Chart, run: RunRecord, position: int) -> Chart:
    algorithm = re.sub(r"[^a-z0-9]+", "-", run.algorithm.lower()).strip("-")
    return chart._replace(name=f"{chart.name}-{position}-{algorithm}", title=f"{chart.title}: {run.label}")


def fingerprint_of(paths: Sequence[Path]) -> str:
    """A text that changes when a run folder has new data."""
    states = []
    for path in (folder / name for folder in paths for name in FILES):
        with contextlib.suppress(OSError):
            about = path.stat()
            states.append(f"{path} {about.st_size} {about.st_mtime_ns}")
    return hashlib.sha256("\n".join(states).encode()).hexdigest()[:16]


def _title(runs: Runs) -> str:
    tables = [run.tables.get("data", {}) for run in runs]
    data = {Path(str(table.get("name", table.get("value", "data")))).name for table in tables}
    *first, last = [run.label for run in runs]
    names = f"{'; '.join(first)} and {last}" if first else last
    return f"{names} on {', '.join(sorted(data))}{_unequal(runs)}"


def _unequal(runs: Runs) -> str:
    """A remark for the title if the runs differ in the optimizer or its learning rate."""
    tables = [run.tables.get("optimizer", {}) for run in runs]
    for key, what in (("name", "optimizers"), ("lr", "learning rates")):
        if len({str(table.get(key)) for table in tables}) > 1:  # a damaged file may have a list there
            return f" (unequal {what})"
    return ""


def _progress(run: RunRecord, several: bool) -> str:
    planned = f" of {run.planned}" if len(run.records) < run.planned else ""
    rounds = f"{len(run.records)}{planned} rounds{', as no client improved any more' * run.stopped_early}"
    time = f", {span(sum(run.seconds))}" if run.seconds else ""
    return f"{run.label}: " * several + f"{rounds}, {run.clients} sites{time}"


def _mean(values: Numbers, metric: MetricInfo = ACCURACY) -> str:
    """Such as "65.0 %"; nothing where no value is known."""
    return "" if np.isnan(values).all() else f"{metric.text(float(np.nanmean(values)))}{metric.unit}"


def _tiles(runs: Runs) -> list[tuple[str, str, str]]:
    """The main numbers: each run's primary metric and its worst client; of a single run, more."""
    tiles = []
    for run in runs:
        metric = run.primary
        values = run.final(metric.name)
        if not np.isnan(values).all():
            end, find = ("lowest", np.nanargmin) if metric.higher_is_better else ("highest", np.nanargmax)
            client, clients = int(find(values)), int((~np.isnan(values)).sum())
            worst = f"{run.client_titles[client]}, {metric.text(values[client])}{metric.unit}"
            note = f"mean of {clients} sites; {end}: {worst}".replace(" %", "\N{NO-BREAK SPACE}%")
            tiles.append((run.label if len(runs) > 1 else metric.title, _mean(values, metric), note))
    if len(runs) == 1:
        (run,) = runs
        for name, of, note in (
            ("before training", "_before", "with the new global model"),
            ("global model", "_global", "alone, as for a new site"),
        ):
            if mean := _mean(run.final(run.primary.name + of), run.primary):
                tiles.append((name, mean, note))
        if mean := _mean(run.final("personal_fraction")):
            tiles.append(("personal parameters", mean, "of a site's parameters; the others are shared"))
        if run.has("bytes_up"):
            total = sum(float(np.nansum(run.metric_or_nan(way))) for way in ("bytes_up", "bytes_down"))
            tiles.append(("traffic", size(total), "up and down, all sites"))
    return tiles


def _facts(runs: Runs) -> Table:
    """The settings and results of the runs, a column each."""
    columns = [_facts_of(run) for run in runs]
    rows = [
        [name, *(column.get(name) or "–" for column in columns)]
        for name in columns[0]
        if any(column.get(name) for column in columns)
    ]
    return Table("The runs" if len(runs) > 1 else "The run", ["what", *(run.label for run in runs)], rows)


def _facts_of(run: RunRecord) -> dict[str, str]:
    """The settings and results of a run; "" where it has none."""
    metric = run.primary
    left_out = sum(len(record["left_out"]) for record in run.records)
    versions = (f"{name} {run.environment.get(name, '–')}" for name in ("copfl", "python", "torch"))
    return {
        "rounds": f"{len(run.records)} of {run.planned}",
        "clients": str(run.clients),
        "values of": "" if run.best is None else run.selection,
        f"{metric.title} after training": _mean(run.final(metric.name), metric),
        f"{metric.title} on validation samples": _mean(run.final(metric.name + VALIDATED), metric),
        f"{metric.title} before training": _mean(run.final(f"{metric.name}_before"), metric),
        f"{metric.title} of the global model": _mean(run.final(f"{metric.name}_global"), metric),
        f"{metric.title} of honest sites": _honest(run),
        "epsilon": _epsilon(run),
        "to the server, per site and round": _traffic(run, "bytes_up"),
        "to the site, per site and round": _traffic(run, "bytes_down"),
        "median seconds per round": f"{np.median(run.seconds):.3f}" if run.seconds else "",
        "updates left out": f"{left_out}, as they were not finite" if left_out else "none",
        **{kind: _described(run.tables.get(kind, {})) for kind in TABLES},
        "parameters": number(run.environment.get("parameters", 0), ","),
        "seed": str(run.tables["run"].get("seed", "")),
        "device": str(run.environment.get("device", "")),
        "versions": ", ".join(versions),
        "folder": str(run.folder),
    }


def _described(table: Mapping[str, Any]) -> str:
    """Such as "adam (lr 0.001)"."""
    options = {key: value for key, value in table.items() if key not in ("dir", "code")}
    name = str(options.pop("name", options.pop("value", "")))
    return f"{name} ({', '.join(f'{key} {value}' for key, value in options.items())})" if options else name


def _traffic(run: RunRecord, way: str) -> str:
    return size(float(np.nanmean(run.metric_or_nan(way)))) if run.has(way) else ""


def _honest(run: RunRecord) -> str:
    malicious = np.nan_to_num(run.metric_or_nan("malicious")).any(0)
    clients = listed([run.client_titles[n] for n in np.flatnonzero(malicious)], 2 * NAMED)
    mean = _mean(run.final(run.primary.name)[~malicious], run.primary)
    return f"{mean or '–'}; malicious: {clients}" if clients else ""


def _epsilon(run: RunRecord) -> str:
    last = run.records[-1]["federation"] if run.records else {}
    if "epsilon" not in last:
        return ""
    delta = run.tables.get("privacy", {}).get("delta")
    return f"{last['epsilon']:.1f}; towards the server {last['epsilon_server']:.1f} (delta {delta})"


def _pairs(first: RunRecord, pairs: Sequence[Paired]) -> Table:
    rows, metric = [], first.primary
    for pair in pairs:
        gain = metric.gain(pair.difference, np.zeros(len(pair.difference)))
        better, worse = int((gain > EQUAL).sum()), int((gain < -EQUAL).sum())
        counts = map(str, (better, len(gain) - better - worse, worse))
        rows.append([pair.label, metric.text(pair.mean, sign="+"), pair.bounds, pair.verdict, *counts])
    means = ("mean difference" + ", points" * metric.fraction, OVER_CLIENTS)
    head = ["run", *means, "verdict", "sites better", "equal", "worse"]
    note = "The interval is over the sites of these runs; it does not cover other seeds"
    what = f"each site compared with the same site under {first.label}, {first.selection}"
    return Table(f"Paired differences: {what}", head, rows, [note])


def _notes(run: RunRecord) -> list[str]:
    """Remarks on the data, and on charts that are missing."""
    notes = [run.environment.get("data", ""), *run.environment.get("partition", [])]
    if not run.records:
        notes.append("no round has ended yet")
    if run.masks is None and run.has("personal_fraction"):
        ended = run.ended
        notes.append(
            f"no checkpoint contains the masks{'' if ended else ' yet'}: no chart shows them by layer"
        )
    notes.append(final.in_words(run.final_evaluation, run.client_titles))
    if run.has(run.primary.name):
        curves = run.metric_or_nan(run.primary.name), run.metric_or_nan("test_loss")
        notes += [still_rises(*curves, run.primary)]
        notes += [got_worse(*curves, run.primary)] if run.best is None else []
    return list(filter(None, notes))


def _command(text: str) -> str:
    """The command as one types it, without the folder of the program."""
    try:
        words = shlex.split(text)
    except ValueError:  # environment.json was edited
        return text
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else "–"


# What a report says first: who gains, what it cost, and which differences are distinguishable


def of_runs(runs: Runs) -> list[str | tuple[str, ...]]:
    """The paragraphs and lists above everything else."""
    if len(runs) == 1:
        (run,) = runs
        lead, lines = _of_sites(run)
        sites = [lead, tuple(lines)] if lines else [lead] if lead else []
        without = [] if lead else _most_and_least(run)
        return [*_rivals(run), *sites, *_gain(run), *without, f"Cost: {_cost(run)}."]
    measured = [run for run in runs if run.algorithm != "local" and run.known_gains is not None]
    gains = [f"{run.label}: {' '.join([*_gain(run), *_rivals(run)])}" for run in measured]
    costs = "; ".join(f"{run.label}: {_cost(run)}" for run in runs)
    return [*_compared(runs), *gains, f"Cost. {costs}."]


def _gain(run: RunRecord) -> list[str]:
    """How many gain over training alone, and how much."""
    gains, metric = run.known_gains, run.primary
    if gains is None:
        mean = _mean(run.final(metric.name), metric)
        if not mean:
            return ["No site has been evaluated yet."]
        return [
            f"Mean {metric.title} of the sites: {mean}. Whether they gain is not known: "
            "the run did not train them alone as a baseline."
        ]
    known = np.flatnonzero(~np.isnan(gains.gain))
    pair = Paired("", gains.gain[known], metric)
    verdict = " On average, no gain is distinguishable." * (pair.verdict == "not distinguishable")
    if constant := constant_text(gains):
        over_constant = Paired("", gains.over_constant[~np.isnan(gains.over_constant)], metric)
        difference = f"{_points(over_constant)} ({over_constant.bounds})"
        verdict = f" No useful gain is shown: {constant}; the personal models compared with it: {difference}."
    return [
        f"{round(gains.share * len(known))} of {len(known)} sites gain over training alone. Mean gain: "
        f"{_points(pair)} ({OVER_CLIENTS}: {pair.bounds}).{verdict}"
    ]


def _most_and_least(run: RunRecord) -> list[str]:
    """Who gains most over training alone, and who does not, where there is no interval of a single client."""
    if run.known_gains is None:
        return []
    gain, tested = run.known_gains.gain, run.sizes[1]
    order = sorted(map(int, np.flatnonzero(~np.isnan(gain))), key=lambda n: -float(gain[n]))
    most = [n for n in order if gain[n] > EQUAL]
    least = [n for n in reversed(order) if gain[n] <= EQUAL]
    named = [("Largest gains over training alone", most), ("No gain", least)]
    texts = [f"{title}: {_named(clients, run)}." for title, clients in named if clients]
    fewest, largest = (end(tested[n] for n in order) for end in (min, max))
    samples = f"{fewest} test samples" if fewest == largest else f"{fewest} to {largest} test samples"
    one = (
        f", where one more or less is {100 / fewest:.1f} points" if run.primary.name == ACCURACY.name else ""
    )
    doubt = f"A single site's gain has no interval here and may be chance: it is measured on {samples}{one}."
    return [" ".join([*texts, *([] if least else ["Every site gains."]), doubt])]


def _of_sites(run: RunRecord) -> of_rivals.OfSites:
    """Whether each client's model is better than what it has alone; nothing where it was not measured."""
    metric = run.primary
    if run.rivals is None or not run.has(metric.name):
        return of_rivals.OfSites("", [])
    return of_rivals.of_sites(run.rivals, run.final(metric.name), run.client_titles, run.sizes[1])


def _rivals(run: RunRecord) -> list[str]:
    """Whether the models are better than what clients have alone; [] where it was not measured."""
    if run.rivals is None or not run.has(run.primary.name):
        return []
    text = of_rivals.conclusion(run.rivals, run.final(run.primary.name), run.client_titles)
    return [text] if text else []


def _named(clients: Sequence[int], run: RunRecord) -> str:
    """Such as "client 3 +8.1, client 5 +6.0 and 2 more"."""
    assert run.known_gains is not None
    gain, names = run.known_gains.gain, run.client_titles
    return listed([f"{names[n]} {run.primary.text(float(gain[n]), sign='+')}" for n in clients], NAMED)


def _points(pair: Paired) -> str:
    return f"{pair.metric.text(pair.mean, sign='+')}{' points' if pair.metric.fraction else ''}"


def _cost(run: RunRecord) -> str:
    """The rounds, their time and the bytes of one client."""
    rounds = f"{len(run.records)} rounds" + (f" in {span(sum(run.seconds))}" if run.seconds else "")
    if not run.has("bytes_up"):
        return rounds
    up, down = _traffic(run, "bytes_up"), _traffic(run, "bytes_down")
    return f"{rounds}, {up} up and {down} down per site and round"


def _compared(runs: Runs) -> list[str]:
    """Which differences to the first run are distinguishable."""
    texts = [f"{pair.label}: {pair.verdict}, {_points(pair)} ({pair.bounds})." for pair in paired(runs)]
    if not texts:
        return []
    title = runs[0].primary.title
    about = f"Mean {title} compared with {runs[0].label}, site by site ({OVER_CLIENTS} in brackets):"
    return [" ".join([about, *texts]), "One run of each says nothing about other seeds; copfl compare does."]


class RunsPage:
    """The report of runs as a page that follows them, for `copfl.report.serving`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def fingerprint(self) -> str:
        return fingerprint_of(self.paths)

    def html(self, fingerprint: str = "") -> str:
        return render(document_of(read_all(self.paths)), fingerprint)
