"""The report: one HTML file that opens from disk and asks nothing of the network."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from copfl import __version__
from copfl.errors import UsageError
from copfl.experiment.progress import span
from copfl.experiment.settings import AROUND
from copfl.files import write_bytes
from copfl.report import chart as charting
from copfl.report import charts
from copfl.report.chart import Table
from copfl.report.pairs import Paired, paired
from copfl.report.plotly_charts import figure
from copfl.report.run_data import RunData

if TYPE_CHECKING:
    from jinja2 import Environment

MISSING = (
    "a report needs plotly and jinja2, and {} is not installed; `pip install 'copfl[report]'` brings them"
)


def write(stories: Sequence[RunData], path: Path) -> Path:
    """The path, once the report is there."""
    write_bytes(path, render(stories).encode(), durable=False)
    return path


def render(stories: Sequence[RunData], live: bool = False) -> str:
    """The whole page; a live one asks its server for news."""
    given = {**_words(stories), "live": live}
    data = as_json({"figures": _figures(stories), "live": live}).replace("<", "\\u003c")
    given |= {
        "style": _safe(_file("page.css")),
        "script": _safe(_file("page.js")),
        "plotly": _safe(_plotly()),
    }
    return _templates().get_template("page.html").render(**given, data=_safe(data), version=__version__)


def news(stories: Sequence[RunData]) -> dict[str, Any]:
    """What changes on a live page: the figures, and the parts of the text."""
    words = _words(stories)
    macros: Any = _templates().get_template("parts.html").module
    parts = {"tiles": macros.tiles(words["tiles"])}
    parts["facts"] = macros.table(words["facts"], "The runs" if words["several"] else "The run")
    if words["pairs"]:
        parts["pairs"] = macros.table(words["pairs"], "Differences over all clients")
    for section in words["sections"]:
        for one, table in section["charts"]:
            parts[f"table-{one.name}"] = macros.table(table, one.title)
    about = {f"about-{one.name}": one.about for section in words["sections"] for one, _ in section["charts"]}
    escaped = {name: _templates().from_string("{{ text }}").render(text=text) for name, text in about.items()}
    return {
        "figures": _figures(stories),
        "parts": {**{name: str(html) for name, html in parts.items()}, **escaped},
        "subtitle": words["subtitle"],
        "ended": all(len(s.records) >= s.planned for s in stories),
    }


def stamp_of(paths: Sequence[Path]) -> str:
    """What is different when a run folder tells more than before."""
    fingerprints = []
    for path in paths:
        for name in (
            "rounds.jsonl",
            "timing.jsonl",
            "run.toml",
            "checkpoint/state.safetensors",
            "audit.json",
        ):
            try:
                about = (path / name).stat()
                fingerprints.append(f"{name} {about.st_size} {about.st_mtime_ns}")
            except OSError:
                fingerprints.append(f"{name} -")
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()[:16]


def _figures(stories: Sequence[RunData]) -> dict[str, Any]:
    return {one.name: figure(one) for section in charts.sections(stories) for one in section.charts}


def _words(stories: Sequence[RunData]) -> dict[str, Any]:
    """Everything the page says in words and tables."""
    several = len(stories) > 1
    pairs = paired(stories)
    return {
        "title": _title(stories),
        "subtitle": _subtitle(stories),
        "several": several,
        "tiles": _tiles(stories),
        "facts": _facts(stories),
        "pairs": _pairs(pairs) if pairs else None,
        "pairs_against": pairs[0].against if pairs else "",
        "notes": _notes(stories),
        "sections": [
            {
                "name": s.name,
                "short": s.short,
                "title": s.title,
                "charts": [(one, charting.table(one)) for one in s.charts],
            }
            for s in charts.sections(stories)
        ],
        "runs": [
            {
                "label": s.label,
                "path": s.path,
                "toml": s.toml,
                "command": _command(s.environment.get("command", "")),
            }
            for s in stories
        ],
    }


def _title(stories: Sequence[RunData]) -> str:
    tables = [s.tables.get("data", {}) for s in stories]
    data = {Path(str(table.get("name", table.get("value", "data")))).name for table in tables}
    labels = [s.label for s in stories]
    names = ", ".join(labels[:-1]) + " and " + labels[-1] if len(labels) > 1 else labels[0]
    return f"{names} on {', '.join(sorted(data))}"


def _subtitle(stories: Sequence[RunData]) -> str:
    parts = []
    for s in stories:
        name = f"{s.label}: " if len(stories) > 1 else ""
        done = (
            f"{len(s.records)} rounds"
            if len(s.records) >= s.planned
            else f"{len(s.records)} of {s.planned} rounds"
        )
        parts.append(
            f"{name}{done}, {s.clients} clients" + (f", {span(sum(s.seconds))}" if s.seconds else "")
        )
    return "; ".join(parts)


def _tiles(stories: Sequence[RunData]) -> list[tuple[str, str, str]]:
    """What one looks for first, of each run: the accuracy and who has least; of a single run, more."""
    tiles = []
    for s in stories:
        known = s.last("accuracy")
        known = known[~np.isnan(known)]
        if len(known):
            name = s.label if len(stories) > 1 else "accuracy"
            worst = int(np.nanargmin(s.last("accuracy")))
            note = f"mean of {len(known)} clients; lowest: client {worst}, {100 * known.min():.1f}\N{NO-BREAK SPACE}%"
            tiles.append((name, f"{100 * known.mean():.1f} %", note))
    if len(stories) == 1:
        (s,) = stories
        for name, figure_, note in (
            ("before training", "accuracy_before", "right after the broadcast"),
            ("broadcast alone", "accuracy_global", "as a newcomer has it"),
            ("personal", "personal_fraction", "of a client's parameters"),
        ):
            values = s.last(figure_)
            if not np.isnan(values).all():
                tiles.append((name, f"{100 * np.nanmean(values):.1f} %", note))
        if s.has("bytes_up"):
            total = sum(float(np.nansum(s.metric(way))) for way in ("bytes_up", "bytes_down"))
            tiles.append(("sent in all", _bytes(total), "up and down, all clients"))
    return tiles


def _facts(stories: Sequence[RunData]) -> Table:
    """What the runs are, a column each."""

    def table(s: RunData, kind: str) -> str:
        given = dict(s.tables.get(kind, {}))
        name = given.pop("name", given.pop("value", "–"))
        options = ", ".join(f"{key} {value}" for key, value in given.items() if key not in ("dir", "code"))
        return f"{name} ({options})" if options else str(name)

    def mean(s: RunData, name: str) -> str:
        values = s.last(name)
        return "–" if np.isnan(values).all() else f"{100 * np.nanmean(values):.1f} %"

    def sent(s: RunData, name: str) -> str:
        return _bytes(float(np.nanmean(s.metric(name)))) if s.has(name) else "–"

    def honest(s: RunData) -> str:
        lies, values = np.nan_to_num(s.metric("malicious")).any(0), s.last("accuracy")
        known = values[~lies & ~np.isnan(values)]
        who = ", ".join(map(str, np.flatnonzero(lies)))
        return f"{100 * known.mean():.1f} %; hostile: {who}" if lies.any() and len(known) else "–"

    def spent(s: RunData) -> str:
        last = s.records[-1]["federation"] if s.records else {}
        if "epsilon" not in last:
            return "–"
        delta = s.tables.get("privacy", {}).get("delta")
        return f"{last['epsilon']:.1f}; to the server {last['epsilon_server']:.1f} (delta {delta})"

    def left_out(s: RunData) -> str:
        count = sum(len(record["left_out"]) for record in s.records)
        return f"{count} turns, whose numbers were not finite" if count else "none"

    rows: list[list[str]] = [
        ["rounds", *(f"{len(s.records)} of {s.planned}" for s in stories)],
        ["clients", *(str(s.clients) for s in stories)],
        ["accuracy after training", *(mean(s, "accuracy") for s in stories)],
        ["accuracy before training", *(mean(s, "accuracy_before") for s in stories)],
        ["accuracy of the broadcast alone", *(mean(s, "accuracy_global") for s in stories)],
        *(
            [["accuracy of honest clients", *(honest(s) for s in stories)]]
            if any(s.has("malicious") for s in stories)
            else []
        ),
        *(
            [["epsilon spent", *(spent(s) for s in stories)]]
            if any("privacy" in s.tables for s in stories)
            else []
        ),
        ["to the server, a client and round", *(sent(s, "bytes_up") for s in stories)],
        ["to the client, a client and round", *(sent(s, "bytes_down") for s in stories)],
        ["median seconds a round", *(f"{np.median(s.seconds):.3f}" if s.seconds else "–" for s in stories)],
        ["turns left out", *(left_out(s) for s in stories)],
        *(
            [kind, *(table(s, kind) for s in stories)]
            for kind in ("algorithm", "optimizer", "data", "partition", "model", "robust", "attack")
            if kind not in AROUND or any(kind in s.tables for s in stories)
        ),
        ["parameters", *(f"{s.environment.get('parameters', 0):,}" for s in stories)],
        ["seed", *(str(s.tables["run"].get("seed", "–")) for s in stories)],
        ["device", *(str(s.environment.get("device", "–")) for s in stories)],
        ["versions", *(_versions(s.environment) for s in stories)],
        ["folder", *(str(s.path) for s in stories)],
    ]
    return Table(["what", *(s.label for s in stories)], rows)


def _versions(environment: Any) -> str:
    return ", ".join(
        f"{name} {environment[name]}" for name in ("copfl", "python", "torch") if name in environment
    )


def _pairs(pairs: Sequence[Paired]) -> Table:
    rows = []
    for pair in pairs:
        low, high = pair.clients
        interval = f"{low:+.1f} to {high:+.1f}"
        rows.append([pair.label, f"{pair.mean:+.1f}", interval, *map(str, pair.counts)])
    head = [
        "run",
        "mean difference, points",
        "95 % interval over clients",
        "clients better",
        "equal",
        "worse",
    ]
    return Table(head, rows)


def _notes(stories: Sequence[RunData]) -> list[str]:
    """What a reader must know of the data, and what the report cannot show."""
    notes = []
    for s in stories:
        whose = f"{s.label}: " if len(stories) > 1 else ""
        said = [s.environment.get("data", ""), *s.environment.get("partition", [])]
        notes += [f"{whose}{note}." for note in said if note]
        if not s.records:
            notes.append(f"{whose}no round has ended yet.")
        if s.masks is None and s.has("personal_fraction"):
            notes.append(
                f"{whose}the masks are in no checkpoint (yet), so they are not shown layer by layer."
            )
    return list(dict.fromkeys(notes))


def _command(text: str) -> str:
    """The command as one types it, without the folder that copfl lies in."""
    try:
        words = shlex.split(text)
    except ValueError:  # an environment.json that was edited
        return text
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else "–"


def _bytes(count: float) -> str:
    units = ("bytes", "kB", "MB", "GB", "TB")
    step = 0
    while count >= 1000 and step < len(units) - 1:
        count, step = count / 1000, step + 1
    return f"{count:.{min(step, 1)}f} {units[step]}"


def as_json(data: Any) -> str:
    """JSON with numbers as short as a picture needs them."""
    return json.dumps(_rounded(data), separators=(",", ":"), allow_nan=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def _safe(text: str) -> Any:
    """The text for inside a script or style element, where nothing but its end tag has a meaning."""
    from markupsafe import Markup

    return Markup(text.replace("</", "<\\/").replace("<!--", "<\\!--"))


def _file(name: str) -> str:
    return (resources.files("copfl.report") / "templates" / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(MISSING.format("plotly")) from error
    return str(get_plotlyjs())


@cache
def _templates() -> Environment:
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
    except ImportError as error:
        raise UsageError(MISSING.format("jinja2")) from error
    return Environment(loader=FunctionLoader(_file), autoescape=True, undefined=StrictUndefined)
