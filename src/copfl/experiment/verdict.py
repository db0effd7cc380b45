"""What training together is worth, a finding: verdict.json.

`copfl.choosing` finds it before the rounds, from the losses of rows that no model saw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from copfl.charts import Chart, Dots, Line
from copfl.core import tree
from copfl.data.samples import CLASSIFICATION
from copfl.experiment.experiment import Experiment
from copfl.experiment.finding import Finding
from copfl.experiment.recording import Recording
from copfl.experiment.rivals import ModelOf, answers_of, plan_of, trained_rivals
from copfl.measures.calibration import tempered
from copfl.measures.losses import row_losses
from copfl.rivals.records import Array
from copfl.sections import Section
from copfl.tables import Table
from copfl.verdict.headline import Check, GainChart, chart, checked, headline, statements
from copfl.verdict.verdict import Estimate, Verdict, as_json, from_json

SITES = "sites"


def check_of(e: Experiment, verdict: Verdict, model_of: ModelOf, own: Mapping[int, str]) -> Check | None:
    """What the test rows say, which nobody looked at; None where no site has a rival to compare with.

    Args:
        e: The run.
        verdict: Of its training rows.
        model_of: Each client's model; None of one that has none.
        own: The kind of model of the clients that predict with their rival.
    """
    if (plan := plan_of(e)) is None:
        return None
    trained, kind = trained_rivals(e, plan), e.task.criterion.kind
    losses: list[tuple[Array, Array]] = []
    for site, rivals in trained.by_site.items():
        y, model = trained.targets[site], model_of(site)
        best = rivals.get(verdict.sites[site].alone.removesuffix(" alone"))
        if best is None or model is None:
            continue
        test = tree.row(e.training.federation.test.rows([site]), 0)
        answers = answers_of(e.training.task, model, test)
        if site in own and own[site] in rivals:
            answers = rivals[own[site]].answers
        elif kind == CLASSIFICATION:
            answers = tempered(answers, e.settings.temperature)
        losses.append((row_losses(answers, y, kind), row_losses(best.answers, y, kind)))
    return checked(verdict, *map(list, zip(*losses, strict=True))) if losses else None


def sentences(verdict: Verdict, check: Check | None) -> list[str]:
    """The headline first, then what is shown of these sites and of a new one."""
    return [headline(verdict, SITES, check), *statements(verdict, SITES)]


def _section(verdict: Verdict, run: Recording) -> Section:
    return section_of(verdict, run.short_names, CHECK.__get__(run, Recording))


def section_of(verdict: Verdict, names: Sequence[str], check: Check | None = None) -> Section:
    """The section of a page: the gain of each site.

    Args:
        verdict: What is shown.
        names: Of the sites.
        check: By test rows.
    """
    drawn = chart(verdict, names, SITES, check)
    return Section(
        "verdict", "Verdict", drawn.headline, [_dots(drawn)], [_table(drawn)], sentences(verdict, check)[1:]
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


CHECK = Finding(
    file="verdict-check.json",
    as_json=lambda check: {**check.test._asdict(), "agrees": check.agrees},
    parse=lambda content: Check(
        Estimate(*(math.nan if content[name] is None else float(content[name]) for name in Estimate._fields)),
        bool(content["agrees"]),
    ),
)
VERDICT = Finding(
    file="verdict.json",
    as_json=as_json,
    parse=from_json,
    fits=lambda verdict, rounds, clients: len(verdict.sites) == clients,
    given=True,
    section=_section,
)
