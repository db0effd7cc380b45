"""What training together is worth, a finding: verdict.json.

`copfl.choosing` finds it before the rounds, from the losses of rows that no model saw.
"""

from __future__ import annotations

from copfl.charts import Chart, Dots, Line
from copfl.experiment.finding import Finding
from copfl.experiment.recording import Recording
from copfl.sections import Section
from copfl.tables import Table
from copfl.verdict.headline import GainChart, chart, headline, statements
from copfl.verdict.verdict import Verdict, as_json, from_json

SITES = "sites"


def sentences(verdict: Verdict) -> list[str]:
    """The headline first, then what is shown of these sites and of a new one."""
    return [headline(verdict, SITES), *statements(verdict, SITES)]


def _section(verdict: Verdict, run: Recording) -> Section:
    drawn = chart(verdict, run.short_names, SITES)
    return Section(
        "verdict", "Verdict", drawn.headline, [_dots(drawn)], [_table(drawn)], sentences(verdict)[1:]
    )


def _dots(drawn: GainChart) -> Chart:
    rows = [drawn.mean, *drawn.rows]
    columns = (
        [None if value != value else value for value in column]
        for column in zip(*(row[1:4] for row in rows), strict=True)
    )
    gain, low, high = columns
    about = (
        f"Right of the line, {drawn.right}; left of it, {drawn.left}. A dot is the gain over the best model that a "
        "site has alone, given what all sites show, with its 95 % interval."
    )
    line = Line("gain", gain, low, high, [row.words for row in rows])
    return Dots(
        "verdict",
        drawn.headline,
        about,
        [row.label for row in rows],
        drawn.axis,
        [line],
        digits=3,
        zero=True,
        row_title="site",
    )


def _table(drawn: GainChart) -> Table:
    rows = [
        [row.label, *("" if value != value else f"{value:+.3f}" for value in row[1:4]), row.words]
        for row in (drawn.mean, *drawn.rows)
    ]
    notes = [f"{drawn.folded} sites between them are left out."] if drawn.folded else []
    return Table("What each site gains", ["site", "gain", "low", "high", ""], rows, notes)


VERDICT = Finding(
    file="verdict.json",
    as_json=as_json,
    parse=from_json,
    fits=lambda verdict, rounds, clients: len(verdict.sites) == clients,
    given=True,
    section=_section,
)
