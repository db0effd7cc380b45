"""The rivals of a run in words and tables: is the federation better than what a site has alone?

The summary of a run and its report say it in the same words.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from copfl.charts import Chart, Dots, series_of
from copfl.experiment.analysis.gains import EQUAL
from copfl.experiment.finding import Finding
from copfl.experiment.recording import Recording
from copfl.measures.metrics import MetricInfo
from copfl.rivals import file as rivals_file
from copfl.rivals.records import CONSTANT, TITLES, Rivals
from copfl.sections import Section
from copfl.stats import Interval, Numbers, mean_of_known, over_clients, unknown_reason
from copfl.tables import Table, capital, listed

BESIDE = "Is it better than what a site has alone?"  # the title of the section
BETTER, WORSE, ALIKE, NO_USE = "better", "worse", "alike", "constant better"
NAMED = 5  # sites that a sentence names
LISTED = 12  # sites that have a line each; more are counted
# What is said of a site, by the verdict; "": its interval is not known.
SAID = {
    BETTER: "better with the others",
    WORSE: "worse with the others",
    ALIKE: "cannot be told apart",
    "": "not judged, as there is no interval",
}


def against(metric: MetricInfo, other: str, gains: Numbers) -> str:
    """Such as "4.2 points [+2.1, +6.3] better than the global model"; "" where nothing is known.

    Args:
        metric: What was measured.
        other: What the gains are over.
        gains: Of each client, positive is better; nan: not known.
    """
    known = gains[~np.isnan(gains)]
    if not len(known):
        return ""
    if reason := unknown_reason([known]):
        return f"not comparable with {other} ({reason})"
    mean, bounds = float(known.mean()), over_clients(known)
    unit, brackets = " points" if metric.fraction else "", metric.interval(*bounds)
    if len(known) < 2:
        return f"{metric.text(abs(mean))}{unit} {'better' if mean > 0 else 'worse'} than {other}"
    if not bounds.without_zero:
        return f"not distinguishable from {other} ({metric.text(mean, sign='+')}{unit} {brackets})"
    return f"{metric.text(abs(mean))}{unit} {brackets} {'better' if mean > 0 else 'worse'} than {other}"


def verdicts(rivals: Rivals, personal: Numbers) -> list[str]:
    """What is known of each site's model, by the interval over its test rows; "" where nothing is.

    Args:
        rivals: Of the run.
        personal: The primary metric of each site's model.
    """
    worse = rivals.metric.gain(personal, rivals.constant) < -EQUAL  # nan is not worse
    return [
        NO_USE if is_worse else "" if np.isnan(gain) else _verdict(bounds)
        for is_worse, gain, bounds in zip(worse, rivals.gain(personal), rivals.interval, strict=True)
    ]


def _verdict(bounds: Interval) -> str:
    if not np.isfinite(bounds).all():
        return ""
    return ALIKE if not bounds.without_zero else BETTER if bounds.low > 0 else WORSE


class OfSites(NamedTuple):
    """The verdicts of the sites in words."""

    lead: str  # "" where nothing is known
    lines: list[str]  # of each site; [] of many, which the lead counts


def of_sites(rivals: Rivals, personal: Numbers, names: Sequence[str], tested: Sequence[int]) -> OfSites:
    """For each site whether its model is better than the best that sites have alone, and how sure that is.

    Args:
        rivals: Of the run.
        personal: The primary metric of each site's model; nan of those that do not count.
        names: Of the sites.
        tested: Their test rows.
    """
    metric, gains, bounds_of = rivals.metric, rivals.gain(personal), rivals.interval
    found = {n: _verdict(bounds_of[n]) for n in map(int, np.flatnonzero(~np.isnan(gains)))}
    if not found:
        return OfSites("", [])
    title = TITLES[rivals.chosen]
    alone = title if rivals.chosen == CONSTANT else f"{title} that it trains alone"
    if len(found) > LISTED:
        of = {verdict: [names[n] for n, its in found.items() if its == verdict] for verdict in SAID}
        worse = f" ({listed(of[WORSE], LISTED)})" if of[WORSE] else ""
        counts = [
            f"{len(of[BETTER])} of {len(found)} better",
            f"{len(of[WORSE])} worse{worse}",
            f"{len(of[ALIKE])} cannot be told apart",
            *([f"{len(of[''])} not judged, as there is no interval"] if of[""] else []),
        ]
        return OfSites(
            f"Site by site, its model against {alone}: {', '.join(counts)}. By the 95 % interval over each "
            "site's own test rows.",
            [],
        )
    constant, points = metric.gain(rivals.constant, personal), " points" * metric.fraction
    lines = []
    for n, verdict in found.items():
        rows = f"its {tested[n]} test row{'s' * (tested[n] != 1)}"
        gain = f"{metric.text(float(gains[n]), sign='+')}{points}"
        interval = f" {metric.interval(*bounds_of[n])}" if verdict else ""
        said = f"{SAID[verdict]}: {gain}{interval} on {rows}"
        if bounds_of[n] == (0, 0):
            said = f"cannot be told apart: equally good on each of {rows}"
        if verdict == WORSE:
            said += f"; it should keep {title} of its own"
        if constant[n] > EQUAL and rivals.chosen != CONSTANT:
            said += (
                f"; the constant answer is {metric.text(float(constant[n]))}{points} better than its model"
            )
        lines.append(f"{capital(names[n])}: {said}")
    return OfSites(
        f"Site by site, its model against {alone}, with the 95 % interval over its own test rows:", lines
    )


def conclusion(rivals: Rivals, personal: Numbers, names: Sequence[str]) -> str:
    """Whether the federation is better than the best that sites have alone, in sentences; "" if unknown.

    Args:
        rivals: Of the run.
        personal: The primary metric of each site's model; nan of those that do not count.
        names: Of the sites.
    """
    metric, title, gains = rivals.metric, TITLES[rivals.chosen], rivals.gain(personal)
    known = gains[~np.isnan(gains)]
    if not len(known):
        return ""
    alone = title if rivals.chosen == CONSTANT else f"{title} that each site trains alone"
    sentence = f"the personal models are {against(metric, alone, gains)}."
    sentences = [capital(sentence)]
    if len(known) > 1 and not unknown_reason([known]):
        bounds = over_clients(known)
        if bounds.high < 0:
            sentences = [f"Stay alone, take {title}: {sentence}"]
        elif bounds.low <= 0:
            sentences = [f"No gain over what sites have alone is shown: {sentence}"]
    others = [other for other in rivals.metrics[1:] if rivals.personal]
    pairs = [
        f"{other.title} {other.text(ours)}{other.unit} against {other.text(theirs)}{other.unit}"
        for other in others
        for ours, theirs in [_means(rivals, other.name, ~np.isnan(gains))]
        if not np.isnan([ours, theirs]).any()
    ]
    sentences += [f"{capital(', '.join(pairs))}."] if pairs else []
    worse = np.flatnonzero(metric.gain(personal, rivals.constant) < -EQUAL)
    if len(worse):
        is_are = "is" if len(worse) == 1 else "are"
        sentences.append(
            f"{len(worse)} of {len(known)} sites {is_are} worse than the constant answer: "
            f"{listed([names[int(n)] for n in worse], NAMED)}."
        )
    return " ".join(sentences)


def _means(rivals: Rivals, metric: str, clients: Numbers) -> tuple[float, float]:
    """The means of the personal models and of the chosen rival, over the clients that have both."""
    ours, theirs = rivals.personal[metric], rivals.values[rivals.chosen].tested[metric]
    both = clients & ~np.isnan(ours) & ~np.isnan(theirs)
    return float(mean_of_known(ours[both])), float(mean_of_known(theirs[both]))


def means_table(rivals: Rivals) -> Table:
    """A row per kind of model, with the means over the sites, and one of the personal models."""
    metrics = rivals.metrics
    rows = []
    for name, values in rivals.values.items():
        validated = metrics[0].text(float(mean_of_known(values.validated)))
        means = rivals.means(name)
        chosen = "best" if name == rivals.chosen else ""
        rows.append([TITLES[name], validated, *(m.text(means[m.name]) for m in metrics), chosen])
    if rivals.personal:
        ours = [metric.text(float(mean_of_known(rivals.personal[metric.name]))) for metric in metrics]
        rows.append(["the personal models", "", *ours, ""])
    head = ["", f"cross-validated {metrics[0].label}", *(metric.label for metric in metrics), ""]
    return Table("What each site has alone, mean over sites", head, rows, [note(rivals)])


def note(rivals: Rivals) -> str:
    """How the rivals were trained and chosen."""
    how = f"{rivals.models}, trained at each site alone on {rivals.inputs}"
    chosen = f"best: by cross-validation within training rows, test rows have no say: {TITLES[rivals.chosen]}"
    left = [f"Without {TITLES[name]}: {why}." for name, why in rivals.left_out.items()]
    return " ".join([f"{capital(how)}; {chosen}. They can be left out (rivals).", *left])


def sites_table(rivals: Rivals, personal: Numbers, names: Sequence[str]) -> Table:
    """A row per site: what it has alone, its model of the federation, and the gain over the best rival.

    Args:
        rivals: Of the run.
        personal: The primary metric of each site's model.
        names: Of the sites.
    """
    metric, gains, verdict_of = rivals.metric, rivals.gain(personal), verdicts(rivals, personal)
    rows = []
    for n, name in enumerate(names):
        if not rivals.by_site[n]:
            continue
        values = [of_kind.tested[metric.name][n] for of_kind in rivals.values.values()]
        bounds = rivals.interval[n]
        interval = metric.interval(*bounds) if np.isfinite(bounds).all() else ""
        cells = [metric.text(float(value)) for value in (*values, personal[n])]
        rivals_here = rivals.by_site[n]
        rows.append(
            [name, *cells, metric.text(float(gains[n]), sign="+"), interval, verdict_of[n], rivals_here]
        )
    head = [
        "site",
        *rivals.values,
        "personal",
        f"to {rivals.chosen}",
        "95 % over its rows",
        "",
        "its own best",
    ]
    title = f"{capital(metric.in_unit)} on each site's own test samples, beside what it has alone"
    about = (
        f"to {rivals.chosen}: the gain of the personal model over it, positive is better, with the paired "
        "bootstrap interval over the site's own test rows. its own best: by cross-validation within its own "
        "training rows."
    )
    return Table(title, head, rows, [note(rivals), about])


# -- the finding ---------------------------------------------------------------------------------------------


def _charts(of_sites: Rivals, run: Recording) -> Iterator[Chart]:
    """Each client's model beside its constant answer and the models that it trains alone."""
    metric = run.primary
    personal = run.final(metric.name)
    order = [int(n) for n in np.argsort(of_sites.gain(personal)) if not np.isnan(of_sites.gain(personal)[n])]
    if not order:
        return
    series = series_of({"personal model, after training": personal[order]}, metric.factor)
    alone = {TITLES[name]: values.tested[metric.name][order] for name, values in of_sites.values.items()}
    series += series_of(alone, metric.factor, first=1)
    about = f"{note(of_sites)} Sites are ordered by their gain over {TITLES[of_sites.chosen]}."
    names = [run.client_titles[n] for n in order]
    yield Dots("rivals", "What each site has alone", about, names, metric.label, series, metric.unit)


def _section(rivals: Rivals, run: Recording) -> Section | None:
    if not run.has(run.primary.name):
        return None
    sites = sites_table(rivals, run.final(run.primary.name), run.client_titles)
    return Section("rivals", "Rivals", BESIDE, [*_charts(rivals, run)], [means_table(rivals), sites])


def _summary(rivals: Rivals, run: Recording) -> dict[str, Any]:
    said = conclusion(rivals, run.of_honest, run.short_names)
    judged = verdicts(rivals, run.final(run.primary.name))
    return {"rivals": rivals_file.as_json(rivals) | {"verdicts": judged, "conclusion": said}}


RIVALS = Finding(
    file=rivals_file.FILE,
    as_json=rivals_file.as_json,
    parse=rivals_file.from_json,
    tables=lambda rivals, run: [means_table(rivals)],
    section=_section,
    summary=_summary,
)
