"""The report: one HTML file that opens from disk and makes no network requests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from copfl import __version__
from copfl.charts import Chart, Dots, Heat, Value, figure
from copfl.core.metrics import ACCURACY, MetricInfo
from copfl.errors import UsageError
from copfl.experiment.progress import span
from copfl.report.run_data import RunData
from copfl.report.sections import Runs, gains, sections
from copfl.stats import Numbers, over_clients
from copfl.tables import Table, number, size

if TYPE_CHECKING:
    from jinja2 import Template

MISSING = "a report needs {}, which is not installed; `pip install 'copfl[report]'` installs it"
FILES = ("rounds.jsonl", "timing.jsonl", "run.toml", "checkpoint/state.safetensors", "audit.json")
TABLE_ROWS = 60  # a table of more rounds contains some of them
EQUAL = 1e-7  # points; smaller differences are rounding
TABLES = ("algorithm", "optimizer", "data", "partition", "model", "robust", "attack")


def render(runs: Runs, fingerprint: str = "", plotly: bool = True) -> str:
    """The whole page. With a fingerprint, it asks its server for updates; an update needs no plotly.js."""
    shown = sections(runs)
    charts = [chart for section in shown for chart in section.charts]
    data = {
        "figures": {chart.name: figure(chart) for chart in charts},
        "fingerprint": fingerprint,
        "ended": all(len(run.records) >= run.planned for run in runs),
    }
    return _template().render(
        version=__version__,
        live=bool(fingerprint),
        title=_title(runs),
        subtitle="; ".join(_progress(run, len(runs) > 1) for run in runs),
        tiles=_tiles(runs),
        facts=_facts(runs),
        pairs=_pairs(runs),
        notes=_notes,
        sections=shown,
        tables={chart.name: table_of(chart) for chart in charts},
        runs=runs,
        commands=[_command(run.environment.get("command", "")) for run in runs],
        data=json.dumps(_rounded(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        plotly=_plotly() if plotly else "",
    )


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
        if len({table.get(key) for table in tables}) > 1:
            return f" (unequal {what})"
    return ""


def _progress(run: RunData, several: bool) -> str:
    rounds = f"{len(run.records)} rounds"
    if len(run.records) < run.planned:
        rounds = f"{len(run.records)} of {run.planned} rounds"
    time = f", {span(sum(run.seconds))}" if run.seconds else ""
    return f"{run.label}: " * several + f"{rounds}, {run.clients} clients{time}"


def _mean(values: Numbers, metric: MetricInfo = ACCURACY) -> str:
    """Such as "65.0 %"; nothing where no value is known."""
    return "" if np.isnan(values).all() else f"{metric.text(float(np.nanmean(values)))}{metric.unit}"


def _tiles(runs: Runs) -> list[tuple[str, str, str]]:
    """The main numbers: each run's primary metric and its worst client; of a single run, more."""
    tiles = []
    for run in runs:
        metric = run.primary
        values = run.last(metric.name)
        if not np.isnan(values).all():
            end, find = ("lowest", np.nanargmin) if metric.higher_is_better else ("highest", np.nanargmax)
            place, clients = int(find(values)), int((~np.isnan(values)).sum())
            worst = f"client {place}, {metric.text(values[place])}{metric.unit}".replace(
                " %", "\N{NO-BREAK SPACE}%"
            )
            note = f"mean of {clients} clients; {end}: {worst}"
            tiles.append((run.label if len(runs) > 1 else metric.title, _mean(values, metric), note))
    if len(runs) == 1:
        (run,) = runs
        for name, of, note in (
            ("before training", "_before", "with the new global model"),
            ("global model", "_global", "alone, as for a new client"),
        ):
            if mean := _mean(run.last(run.primary.name + of), run.primary):
                tiles.append((name, mean, note))
        if mean := _mean(run.last("personal_fraction")):
            tiles.append(("personal", mean, "of a client's parameters"))
        if run.has("bytes_up"):
            total = sum(float(np.nansum(run.metric(way))) for way in ("bytes_up", "bytes_down"))
            tiles.append(("traffic", size(total), "up and down, all clients"))
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


def _facts_of(run: RunData) -> dict[str, str]:
    """The settings and results of a run; "" where it has none."""
    metric = run.primary
    left_out = sum(len(record["left_out"]) for record in run.records)
    versions = (f"{name} {run.environment.get(name, '–')}" for name in ("copfl", "python", "torch"))
    return {
        "rounds": f"{len(run.records)} of {run.planned}",
        "clients": str(run.clients),
        f"{metric.title} after training": _mean(run.last(metric.name), metric),
        f"{metric.title} before training": _mean(run.last(f"{metric.name}_before"), metric),
        f"{metric.title} of the global model": _mean(run.last(f"{metric.name}_global"), metric),
        f"{metric.title} of honest clients": _honest(run),
        "epsilon": _epsilon(run),
        "to the server, per client and round": _traffic(run, "bytes_up"),
        "to the client, per client and round": _traffic(run, "bytes_down"),
        "median seconds per round": f"{np.median(run.seconds):.3f}" if run.seconds else "",
        "updates left out": f"{left_out}, as they were not finite" if left_out else "none",
        **{kind: _described(run.tables.get(kind, {})) for kind in TABLES},
        "parameters": number(run.environment.get("parameters", 0), ","),
        "seed": str(run.tables["run"].get("seed", "")),
        "device": str(run.environment.get("device", "")),
        "versions": ", ".join(versions),
        "folder": str(run.path),
    }


def _described(table: Mapping[str, Any]) -> str:
    """Such as "adam (lr 0.001)"."""
    options = {key: value for key, value in table.items() if key not in ("dir", "code")}
    name = str(options.pop("name", options.pop("value", "")))
    return f"{name} ({', '.join(f'{key} {value}' for key, value in options.items())})" if options else name


def _traffic(run: RunData, way: str) -> str:
    return size(float(np.nanmean(run.metric(way)))) if run.has(way) else ""


def _honest(run: RunData) -> str:
    malicious = np.nan_to_num(run.metric("malicious")).any(0)
    clients = ", ".join(map(str, np.flatnonzero(malicious)))
    mean = _mean(run.last(run.primary.name)[~malicious], run.primary)
    return f"{mean or '–'}; malicious: {clients}" if clients else ""


def _epsilon(run: RunData) -> str:
    last = run.records[-1]["federation"] if run.records else {}
    if "epsilon" not in last:
        return ""
    delta = run.tables.get("privacy", {}).get("delta")
    return f"{last['epsilon']:.1f}; towards the server {last['epsilon_server']:.1f} (delta {delta})"


def _pairs(runs: Runs) -> Table | None:
    rows, metric = [], runs[0].primary
    digits = "+.1f" if metric.fraction else "+.3g"
    for label, gain in gains(runs).items():
        known = gain[~np.isnan(gain)]
        low, high = over_clients([known])
        better, worse = int((known > EQUAL).sum()), int((known < -EQUAL).sum())
        better, worse = (better, worse) if metric.higher_is_better else (worse, better)
        counts = map(str, (better, len(known) - better - worse, worse))
        rows.append([label, number(known.mean(), digits), f"{low:{digits}} to {high:{digits}}", *counts])
    means = ("mean difference" + ", points" * metric.fraction, "95 % interval over clients")
    head = ["run", *means, "clients better", "equal", "worse"]
    return Table("Differences over all clients", head, rows) if rows else None


def _notes(run: RunData) -> list[str]:
    """Remarks on the data, and on charts that are missing."""
    notes = [run.environment.get("data", ""), *run.environment.get("partition", [])]
    if not run.records:
        notes.append("no round has ended yet")
    if run.masks is None and run.has("personal_fraction"):
        notes.append("no checkpoint contains the masks (yet), so no chart shows them by layer")
    return list(filter(None, notes))


def _command(text: str) -> str:
    """The command as one types it, without the folder of the program."""
    try:
        words = shlex.split(text)
    except ValueError:  # environment.json was edited
        return text
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else "–"


def _rounded(value: Any) -> Any:
    """The value with numbers rounded to five digits, which suffice for a chart."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


@cache
def _plotly() -> str:
    """plotly.js, for a script element, in which only the end tag and comments have a meaning."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(MISSING.format("plotly")) from error
    return str(get_plotlyjs()).replace("</", "<\\/").replace("<!--", "<\\!--")


@cache
def _template() -> Template:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise UsageError(MISSING.format("jinja2")) from error
    loader = PackageLoader("copfl.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("page.html")


def table_of(chart: Chart) -> Table:
    """The numbers of a chart; of many rounds, some."""

    def cell(values: Sequence[Value], place: int) -> str:
        known = values[place] if place < len(values) else None
        return number(known, f",.{chart.digits}f") + (chart.unit if known is not None else "")

    if isinstance(chart, Dots):
        head = [chart.row_title, *(series.name for series in chart.series)]
        columns = [[cell(series.y, place) for place in range(len(chart.rows))] for series in chart.series]
        return Table(chart.title, head, list(zip(chart.rows, *columns, strict=True)))
    count = len(chart.columns if isinstance(chart, Heat) else chart.x)
    places = sorted({int(place) for place in np.linspace(0, count - 1, min(count, TABLE_ROWS)).round()})
    left_out = f"{len(places)} of {count} {chart.x_title}s; rounds.jsonl contains all."
    notes = [left_out] if len(places) < count else []
    if isinstance(chart, Heat):
        head = [chart.row_title, *(f"{chart.x_title} {chart.columns[place]}" for place in places)]
        named = zip(chart.rows, chart.values, strict=True)
        return Table(chart.title, head, [[row, *(cell(vs, p) for p in places)] for row, vs in named], notes)
    curves: dict[str, Sequence[Value]] = {}
    for line in chart.lines:
        curves[line.name] = line.y
        if line.low:
            curves |= {f"{line.name}, lowest tenth": line.low, f"{line.name}, highest tenth": line.high}
    rows = [[f"{chart.x[place]:g}", *(cell(y, place) for y in curves.values())] for place in places]
    return Table(chart.title, [chart.x_title, *curves], rows, notes)
