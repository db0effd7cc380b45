"""The report of a site of a federation: one page for the owner of the data, or the same text for a terminal."""

import math
import shlex
import textwrap
from collections.abc import Sequence

import numpy as np

from copfl.charts import MODEL_STYLES, Line, Lines
from copfl.experiment.analysis.gains import EQUAL, SAME_RISK
from copfl.experiment.answer import ALONE as TRAINED_ALONE
from copfl.experiment.answer import of_gains, section_of
from copfl.federation.node.site import AuditSummary, Measurement, SentKind, SiteGain, SiteReport
from copfl.measures.metrics import C_INDEX
from copfl.report.document import Document
from copfl.rivals.records import TITLES, Rivals
from copfl.sections import Section
from copfl.stats import Interval
from copfl.tables import Table, as_text, capital, size

# The suffix of a metric, what a chart calls the model, and what it is.
MODELS = {
    "": "this site's model, after training",
    "_before": "this site's model, before training",
    "_global": "the global model",
}
WIDTH = 100  # of the text for a terminal
RIVALS = "What does this site have without the federation?"
OVER_SAMPLES = "95 % interval over this site's test samples"


def document_of(site: SiteReport) -> Document:
    """The page."""
    origin = site.description.origin
    number = "A new site" if origin.client is None else f"Site {origin.client}"
    return Document(
        title=f"{site.name or number}: {origin.title}",
        subtitle=f"run {site.run}, {_which_round(site)}, {origin.clients} sites",
        conclusion=_paragraphs(site),
        tiles=_tiles(site),
        tables=[],
        notes=_notes(site),
        facts=_facts(site),
        answer=_answer(site),
        sections=[
            *([curve] if (curve := _curve(site)) else []),
            *([Section("rivals", "Alone", RIVALS, [], [_alone(site.rivals)])] if site.rivals else []),
            *site.found,
            Section("left", "What left", "What left this site?", [], _left_tables(site)),
            Section("use", "Use", "How is the model used?", [], [_commands(site)]),
        ],
    )


def text_of(site: SiteReport) -> str:
    """The same for a terminal."""
    document = document_of(site)
    paragraphs = [f"{document.title}\n{capital(document.subtitle)}."]
    paragraphs += [textwrap.fill(text, WIDTH) for text in _paragraphs(site)]
    for section in (*([document.answer] if site.verdict and document.answer else []), *document.sections):
        paragraphs += [textwrap.fill(note, WIDTH) for note in section.notes]
        paragraphs += [as_text(table, WIDTH) for table in section.tables]
    return "\n\n".join([*paragraphs, *(textwrap.fill(note, WIDTH) for note in document.notes)])


def _answer(site: SiteReport) -> Section | None:
    """Whether it pays for this site: by held-out rows, else by its test rows; None where nothing is known."""
    if site.verdict is not None:
        return site.verdict.section
    metric, found = site.metric, list[tuple[str, float, float, Interval]]()
    if site.rivals is not None:
        gain = float(site.rivals.gain(site.rivals.personal[metric.name])[0])
        value = float(site.rivals.best[0])
        found.append((f"{TITLES[site.rivals.chosen]} alone", value, gain, site.rivals.interval[0]))
    if site.gain is not None:
        found.append((TRAINED_ALONE, site.gain.alone, site.gain.gain, site.gain.interval))
    found = [one for one in found if math.isfinite(one[2])]
    if not found:
        return None
    alone, _, gain, bounds = max(found, key=lambda one: metric.score(one[1]))
    name = site.name or "this site"
    return section_of(of_gains(metric, alone, [name], np.array([gain]), [bounds]))


def _paragraphs(site: SiteReport) -> list[str]:
    verdict = [site.verdict.sentences] if site.verdict else []
    return [*verdict, *_conclusion(site), *_rivals(site), _left_in_a_sentence(site.log)]


def _which_round(site: SiteReport) -> str:
    origin = site.description.origin
    how = ", the best on this site's validation samples" if origin.select == "best" else ""
    return f"the model of round {origin.round} of {origin.rounds}{how}"


def _score(site: SiteReport, split: str) -> str:
    for score in site.description.scores:
        if score.metric == site.metric.name and score.split == split:
            return f"{site.metric.text(score.value)}{site.metric.unit}"
    return ""


# -- did it gain? --------------------------------------------------------------------------------------------


def _conclusion(site: SiteReport) -> list[str]:
    metric = site.metric
    value, samples = _score(site, "test"), [s.samples for s in site.description.scores if s.split == "test"]
    measured = (
        f"{capital(metric.title)} of {_which_round(site)}: {value} on {samples[0]:,} own test samples."
        if value
        else f"The test samples of this site do not define the {metric.title}."
    )
    if site.gain is None:
        return [measured, f"Whether the federation helped is not known: {site.no_gain}."]
    return [measured, _gain_in_a_sentence(site, site.gain)]


def _gain_in_a_sentence(site: SiteReport, gain: SiteGain) -> str:
    metric = site.metric
    alone = f"training alone ({metric.text(gain.alone)}{metric.unit})"
    if math.isnan(gain.gain):
        return (
            f"The test samples do not define the {metric.title} of both models, so they cannot be compared."
        )
    unit = " points" if metric.fraction else ""
    if not all(map(math.isfinite, gain.interval)):
        sign = metric.text(gain.gain, sign="+")
        return f"{sign}{unit} over {alone}. With {gain.samples} test samples there is no interval."
    bounds = metric.interval(*gain.interval)
    if gain.constant_may_be_as_good:
        answer = "always answering the most frequent class, or mean value, of the training samples"
        answer = SAME_RISK if metric.name == C_INDEX else answer
        return (
            f"No useful gain is shown: {answer} gives "
            f"{metric.text(gain.constant)}{metric.unit}, and the model is not shown to be better: "
            f"{metric.interval(*gain.over_constant)}{unit}. Its gain over {alone} is "
            f"{metric.text(gain.gain, sign='+')} {bounds}."
        )
    if gain.verdict == "not distinguishable":
        return (
            f"The model cannot be distinguished from {alone}: {metric.text(gain.gain, sign='+')}{unit} "
            f"{bounds}. More test samples would tell smaller differences apart."
        )
    return (
        f"The model is {metric.text(abs(gain.gain))}{unit} {gain.verdict} than {alone}; "
        f"gain {metric.text(gain.gain, sign='+')} {bounds}."
    )


def _rivals(site: SiteReport) -> list[str]:
    """The model beside the best that the site has alone by scikit-learn; [] where such samples have none."""
    rivals, metric = site.rivals, site.metric
    if rivals is None:
        return [f"What this site has without us is not known: {site.no_rivals}."] if site.no_rivals else []
    personal = rivals.personal[metric.name]
    gain, bounds, title = float(rivals.gain(personal)[0]), rivals.interval[0], TITLES[rivals.chosen]
    if math.isnan(gain):
        return []
    value, unit = f"{metric.text(float(rivals.best[0]))}{metric.unit}", " points" if metric.fraction else ""
    gain_text = metric.text(gain, sign="+") + unit
    if not all(map(math.isfinite, bounds)):
        text = f"Beside {title} that this site trains alone ({value}): {gain_text}; there is no interval"
    elif not bounds.without_zero:
        text = (
            f"The model is not shown to be better than {title} that this site trains alone ({value}): {gain_text} "
            f"{metric.interval(*bounds)}"
        )
    else:
        word = "better" if gain > 0 else "worse"
        first = "" if gain > 0 else f"Stay alone, take {title}: "
        text = (
            f"{first}{'The' if gain > 0 else 'the'} model is {word} than {title} that this site trains alone "
            f"({value}): {gain_text} {metric.interval(*bounds)}"
        )
    is_no_use = float(metric.gain(personal, rivals.constant)[0]) < -EQUAL
    constant = f"{metric.text(float(rivals.constant[0]))}{metric.unit}"
    return [f"{text}.{f' It is worse than the constant answer, {constant}.' * is_no_use}"]


def _alone(rivals: Rivals) -> Table:
    """The models that this site trains alone, beside the model of the federation."""
    metrics = rivals.metrics
    rows = [
        [
            TITLES[name],
            metrics[0].text(float(of_kind.validated[0])),
            *(metric.text(float(of_kind.tested[metric.name][0])) for metric in metrics),
            "best" * (name == rivals.chosen),
        ]
        for name, of_kind in rivals.values.items()
    ]
    ours = [metric.text(float(rivals.personal[metric.name][0])) for metric in metrics]
    rows.append(["the model of the federation", "", *ours, ""])
    head = ["", f"cross-validated {metrics[0].label}", *(metric.label for metric in metrics), ""]
    notes = [
        f"{capital(rivals.models)}, trained here on {rivals.inputs}. They never leave this site. best: by "
        "cross-validation within training rows, test rows have no say.",
        *(f"Without {TITLES[name]}: {why}." for name, why in rivals.left_out.items()),
    ]
    return Table("On this site's own test samples", head, rows, notes)


def _tiles(site: SiteReport) -> list[tuple[str, str, str]]:
    metric, tiles = site.metric, []
    if value := _score(site, "test"):
        tiles.append((metric.title, value, _which_round(site)))
    if site_gain := site.gain:
        value = f"{metric.text(site_gain.alone)}{metric.unit}"
        tiles.append(("trained alone", value, f"round {site_gain.alone_round}, the same batches"))
        bounds = (
            metric.interval(*site_gain.interval)
            if all(map(math.isfinite, site_gain.interval))
            else "no interval"
        )
        gain = f"{metric.text(site_gain.gain, sign='+')}{' points' if metric.fraction else ''}"
        tiles.append(("gain", gain, f"{bounds}, {site_gain.verdict}"))
    if site.log is not None:
        sent = sum(left.bytes for left in site.log.left)
        messages = sum(left.messages for left in site.log.left)
        tiles.append(("left this site", size(float(sent)), f"{messages:,} messages of this run"))
    return tiles


def _notes(site: SiteReport) -> list[str]:
    notes = []
    if site.gain is not None:
        notes.append(
            f"In brackets: {OVER_SAMPLES}, paired. It says nothing about other samples than these, nor about "
            "training again with another seed. Training alone had this site's samples, batches and number of "
            "local epochs, in the rounds in which the site took part. It never left this site."
        )
    if note := site.description.origin.note:
        notes.append(f"Data: {note}.")
    if site.log is not None and site.log.problem:
        notes.append(f"The audit log is damaged: {site.log.problem}.")
    return notes


def _curve(site: SiteReport) -> Section | None:
    """The primary metric in each round that was evaluated."""
    metric, name = site.metric, site.metric.name
    curves = [(MODELS[of], of, site.rounds, name + of) for of in MODELS]
    curves.append(("trained alone", "alone", site.alone, name))
    lines = [
        Line(
            title,
            _values(rounds, key, metric.factor),
            colour=MODEL_STYLES[style],
            dash=MODEL_STYLES[style] % 4,
            x=[float(noted.round) for noted in rounds if noted.metrics],
        )
        for title, style, rounds, key in curves
        if any(not math.isnan(noted.metrics.get(key, math.nan)) for noted in rounds)
    ]
    if not lines:
        return None
    description = "On this site's own test samples, which no model was trained on."
    rounds = [float(noted.round) for noted in site.rounds if noted.metrics]
    title = f"{capital(metric.title)} by round"
    chart = Lines("rounds", title, description, rounds, metric.label, lines, metric.unit)
    return Section("metric", capital(metric.title), "How good is the model, round by round?", [chart])


def _values(rounds: Sequence[Measurement], key: str, factor: float) -> list[float | None]:
    values = [noted.metrics.get(key, math.nan) for noted in rounds if noted.metrics]
    return [None if math.isnan(value) else factor * value for value in values]


# -- what left, and how the model is used --------------------------------------------------------------------


def _left_in_a_sentence(log: AuditSummary | None) -> str:
    if log is None:
        return "There is no audit log here: what left this site is not known."
    sent, messages = sum(left.bytes for left in log.left), sum(left.messages for left in log.left)
    epsilon = "" if log.epsilon is None else f", epsilon {log.epsilon:.3g} in all answers together"
    return f"{messages:,} messages of this run left this site, {size(float(sent))}{epsilon}; no sample did."


def _left_tables(site: SiteReport) -> list[Table]:
    log = site.log
    if log is None:
        return []
    notes = [
        f"{log.refused:,} requests of this run were refused; {log.other_runs:,} messages of other runs left.",
        f"The audit log has {log.lines:,} lines, "
        f"{'DAMAGED: ' + log.problem if log.problem else 'no line changed or removed'}. Last hash: "
        f"{log.last_hash[:16]}.",
    ]
    notes += [f"All runs on these data: {site.spent}."] if site.spent else []
    total = SentKind("all", sum(left.messages for left in log.left), sum(left.bytes for left in log.left))
    rows = [[left.kind, f"{left.messages:,}", f"{left.bytes:,}"] for left in (*log.left, total)]
    return [Table("Answers to the server in this run", ["kind", "messages", "bytes"], rows, notes)]


def _commands(site: SiteReport) -> Table:
    folder = shlex.quote(str(site.model))
    rows = [
        ["predict new samples", f"copfl predict {folder} --data FILE --out answers.csv"],
        ["evaluate it on other samples", f"copfl evaluate {folder} --data FILE"],
        ["for other programs", f"copfl export {folder} --format onnx --out model.onnx"],
        ["a copy to move", f"copfl export {folder} --out FOLDER"],
    ]
    if site.gain is not None:
        other = shlex.quote(str(site.model.parent / "alone"))
        rows.append(["the model that was trained alone", f"copfl predict {other} --data FILE"])
    return Table("Commands, which need no server", ["what", "command"], rows, numeric=False)


def _facts(site: SiteReport) -> Table:
    origin, facts = site.description.origin, site.description
    rows = [
        ["run", site.run],
        ["method", origin.title],
        ["model", str(facts.model.get("name", ""))],
        ["rounds of the run", str(origin.rounds)],
        ["rounds with this site", str(len(site.rounds))],
        ["the model is of round", str(origin.round)],
        [f"{site.metric.title} on validation samples", _score(site, "validation")],
        ["data", origin.data],
        ["folder", str(site.model)],
        ["copfl", facts.copfl],
    ]
    return Table("The model", ["what", "value"], [row for row in rows if row[1]])
