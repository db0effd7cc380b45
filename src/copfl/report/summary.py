"""The end of a run in the terminal: the answer, a row per site, and what decides; the rest on demand.

`copfl run` prints it, and `--json` writes the same as JSON.
"""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from copfl.charts import MOST_ROWS
from copfl.core.evaluation import VALIDATED
from copfl.data.clients.groups import names_of_clients
from copfl.errors import how_to_set, with_code
from copfl.experiment.analysis import against_rivals as of_rivals
from copfl.experiment.analysis.against_rivals import against
from copfl.experiment.analysis.convergence import got_worse, still_rises
from copfl.experiment.analysis.gains import Gains, constant_text
from copfl.experiment.answer import Answer, answer_of, best_alone, cells, cells_of
from copfl.experiment.coefficients import table as coefficients_table
from copfl.experiment.final import in_words
from copfl.experiment.folder import BASELINE
from copfl.experiment.progress import span
from copfl.report import contributions
from copfl.rivals.records import CONSTANT, TITLES
from copfl.settings.schema import SELECTION
from copfl.stats import Numbers, mean_of_known, over_clients, unknown_reason
from copfl.tables import RULE, Table, as_text, capital, number, plain

if TYPE_CHECKING:
    from copfl.experiment.result import Result

MODELS = {"global": "_global", "personal": ""}  # column, suffix of the metric
EVALUATED = ("_global", "_before", "")  # before: the personal model before training; it is in the JSON
GAIN = ("alone", "gain")
RIVALS = ("constant", "rival", "verdict")
COLUMNS = (
    "site",
    "classes",
    "train",
    "test",
    "constant",
    "rival",
    "alone",
    *MODELS,
    "gain",
    "verdict",
    "weight",
)
# Left out in a narrow terminal, in this order.
OPTIONAL = ("test", "classes", "train", "global", "weight", "alone", "verdict", "constant")
SITE_COLUMNS = ("site", "train", "test", "alone", "together", "gain", "95 % interval", "verdict")
SITE_OPTIONAL = ("train", "test", "95 % interval", "alone", "verdict", "gain")
MODELS_MEAN = "global: the global model; personal: the site's model after local training."
PLAIN_MARKS = {"▲": "+", "▼": "-", "…": "..."}  # where an encoding has no such signs
STYLES = {"▲ better together": "green", "▼ better alone": "red"}
ROWS = 30  # of more clients than this, only the worst are shown


def as_json(result: Result) -> dict[str, Any]:
    """The final evaluation of every client, the means, and the folder of the run."""
    last, malicious, federation = _final(result), result.malicious, result.experiment.federation
    content: dict[str, Any] = {
        "folder": None if result.folder is None else str(result.folder),
        "rounds": len(result.records),
        "select": result.experiment.settings.select,
        "rounds_taken": result.rounds_taken,
        "stopped_early": result.stopped_early,
        "partition": result.experiment.partition_text,
        "seconds": round(sum(result.seconds), 3),
        "mean": {name: mean_of_known(values) for name, values in last.items()},
        "warnings": result.warnings,
        "client_names": names_of_clients(federation.dataset, federation.partition),
    }
    if malicious.any():
        content["honest"] = {name: mean_of_known(values[~malicious]) for name, values in last.items()}
        content["attackers"] = np.flatnonzero(malicious)
    if epsilons := _epsilons(result):
        content["spent"] = epsilons
    if (gains := result.gains) is not None:
        content["alone"], content["gain"], content["constant"] = gains.alone, gains.gain, gains.constant
        content["share_that_gains"], content["worst_tenth"] = gains.share, gains.worst
        content["spread"], content["advice"] = gains.spread, advice(result)
    if (contributed := _contributions(result)) is not None:
        content["contributions"] = contributions.as_json(contributed)
    if (coefficients := result.coefficients) is not None:
        content["coefficients"] = [one._asdict() for one in coefficients.coefficients]
        content["spreads"] = [one._asdict() for one in coefficients.spreads]
        content["converged"] = coefficients.converged
    for finding, found in result.found():
        content |= finding.summary_of(found, result)
    return dict(plain({**content, "clients": last}))


def show(result: Result, out: IO[str], seconds: float | None = None, *, verbose: bool = False) -> None:
    """Writes the answer, the sites and what decides, as wide as the terminal or 100 characters.

    Args:
        result: Of the run.
        out: The terminal or file.
        seconds: What the whole command took, with preparation, training alone and saving.
        verbose: Whether all else that was found out follows.
    """
    width = shutil.get_terminal_size((100, 24)).columns if out.isatty() else 100
    answer = answer_of(result)
    parts: list[str] = []
    if answer is not None:
        parts = [answer.headline, as_text(_sites(result, answer, width), width)]
        parts += ["\n".join(textwrap.fill(line, width) for line in answer.said)] if answer.said else []
    else:
        parts = [as_text(_table(result, width)._replace(notes=[] if verbose else [MODELS_MEAN]), width)]
    if decides := _decides(result):
        parts.append("\n".join(textwrap.fill(line, width) for line in decides))
    if verbose:
        parts += ["Details", *_details(result, answer is not None, width)]
    if text := advice(result):
        parts.append(textwrap.fill(text, width, break_on_hyphens=False))
    early = f" of {result.experiment.settings.rounds}" if result.stopped_early else ""
    whole = "" if seconds is None else f", {span(seconds)} in all"
    last = [f"{len(result.records)}{early} rounds in {span(sum(result.seconds))}{whole}."]
    last += [] if result.folder is None else [f"Folder: {result.folder}"]
    parts.append((" " if len(" ".join(last)) <= width else "\n").join(last))
    _print("\n\n".join(parts), out, "" if answer is None else answer.headline)


def _print(text: str, out: IO[str], headline: str) -> None:
    """With colours on a terminal; marks stand beside the words everywhere."""
    try:
        text.encode(getattr(out, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        for mark, plain_mark in PLAIN_MARKS.items():
            text = text.replace(mark, plain_mark)
    if not out.isatty():
        print(text, file=out)
        return
    from rich.console import Console
    from rich.text import Text

    shown = Text(text)
    if headline:
        shown.stylize("bold", 0, len(headline))
    for words, style in STYLES.items():
        shown.highlight_words([words], style)
    Console(file=out, soft_wrap=True).print(shown, soft_wrap=True)


def _sites(result: Result, answer: Answer, width: int) -> Table:
    """A row per site: what it has alone, what it has together, and its gain with interval and verdict."""
    metric, alone = result.primary, best_alone(result)
    together, digits, names = result.of_honest, answer.chart.digits, _marked(result)
    sizes = [list(map(len, rows)) for rows in (result.partition.train, result.partition.test)]

    def values(sites: Any) -> list[str]:
        both = (np.full(len(together), np.nan) if alone is None else alone.values, together)
        return [metric.text(float(mean_of_known(of[sites]))) for of in both]

    rows = [
        [names[n], *(str(of[n]) for of in sizes), *values([n]), *cells_of(answer, n)] for n in answer.rows
    ]
    if answer.chart.folded:
        place = {n: at for at, n in enumerate(answer.rows)}
        best = sorted(answer.rows, key=lambda n: (math.isnan(answer.rows[n].gain), -answer.rows[n].gain))
        shown = [rows[place[n]] for n in (*best[: MOST_ROWS // 2], *best[-(MOST_ROWS // 2) :])]
        between = [f"... {answer.chart.folded} more", *[""] * (len(SITE_COLUMNS) - 1)]
        rows = [*shown[: MOST_ROWS // 2], between, *shown[MOST_ROWS // 2 :]]
    if (mean := answer.chart.mean) is not None:
        rows += [RULE, ["mean", "", "", *values(list(answer.rows)), *cells(mean, digits)]]
    columns = list(SITE_COLUMNS)
    for name in (*(["alone"] if alone is None else []), *SITE_OPTIONAL):
        longest = [
            max(len(head), *(len(row[n]) for row in rows if row)) + 2 for n, head in enumerate(columns)
        ]
        if sum(longest) - 2 <= width and not (name == "alone" and alone is None):
            break
        if name in columns:
            at = columns.index(name)
            columns.pop(at)
            rows = [[*row[:at], *row[at + 1 :]] if row else row for row in rows]
    what = "" if alone is None else f"alone: {alone.title}; "
    title = f"{result.experiment.title}: {metric.in_unit} on each site's own test rows"
    notes = [f"{what}together: the site's model after training together.", f"gain: {answer.chart.x_title}."]
    return Table(title, columns, rows, notes)


def _decides(result: Result) -> list[str]:
    """What a person must know beside the answer: rounds that are too few or too many, and privacy that is spent."""
    e, said = (
        result.experiment,
        [text] if (text := in_words(result.final_evaluation, _marked(result))) else [],
    )
    if text := still_rises(*_honest_curves(result), result.primary):
        said.append(f"{capital(text)}.")
    if e.settings.select == "last" and (text := got_worse(*_honest_curves(result), result.primary)):
        is_open = e.settings.find_rounds != "done"
        finds = f": {how_to_set('run.find_rounds', 'first')} finds their number" if is_open else ""
        said.append(f"{capital(text)}{finds}.")
    if epsilons := _epsilons(result):
        delta = e.run.privacy.options.get("delta")
        said.append(
            f"Privacy spent at delta {delta:g}: epsilon {epsilons['epsilon']:.1f} towards those who see the "
            f"global models, {epsilons['epsilon_server']:.1f} towards a server that sees each upload."
        )
    return said


def _details(result: Result, has_answer: bool, width: int) -> list[str]:
    """Everything else, in paragraphs and tables."""
    experiment, gains = result.experiment, result.gains
    notes = [MODELS_MEAN]
    if gains is not None:
        worst, spread = (result.primary.text(value) for value in (gains.worst, gains.spread))
        order = "personal minus alone" if result.primary.higher_is_better else "alone minus personal"
        notes = [
            f"alone: local training on the same batches; {MODELS_MEAN} gain: {order}. "
            f"Worst tenth {worst}{result.primary.unit}, standard deviation over sites {spread}."
        ]
    if result.rivals is not None:
        chosen = result.rivals.chosen
        which = "" if chosen == CONSTANT else f"{chosen}: {TITLES[chosen]} that each site trains alone; "
        notes.append(
            f"constant: the most frequent class, the mean, or the same risk for all; {which}verdict: personal against "
            f"{chosen}, by the interval over the site's test rows."
        )
    if experiment.clients > ROWS:
        of_all = f"of {experiment.clients}; all are in rounds.jsonl."
        worst = "lowest" if result.primary.higher_is_better else "highest"
        notes.insert(0, f"The {ROWS} sites with the {worst} {result.primary.title} {of_all}")
    notes += [_selection(result), _found_rounds(result), *_others(result)]
    for finding, found in result.found():
        notes += finding.sentences(found, result)
    notes.append(f"Model: {experiment.model_text}.")
    notes.append(f"Sites: {experiment.partition_text}.")
    remarks = (experiment.federation.dataset.note, *experiment.federation.partition.notes)
    notes += [f"Data: {note}." for note in remarks if note]
    lines = [line for note in notes for line in textwrap.wrap(note, width)]
    table = [as_text(_table(result, width), width)] if has_answer else []
    parts = ["\n".join([*table, *lines])]
    parts += [
        as_text(table, width) for finding, found in result.found() for table in finding.tables(found, result)
    ]
    if (coefficients := result.coefficients) is not None:
        parts.append(as_text(coefficients_table(coefficients), width))
    if (contributed := _contributions(result)) is not None:
        parts.append(as_text(contributions.table(contributed), width))
    if result.verdict is not None:  # which has more evidence than the test rows alone
        return parts
    of_honest = honest_gains(result)
    said = [conclusion(of_honest) if of_honest is not None else "", _against_rivals(result)]
    parts += [textwrap.fill(text, width) for text in said if text]
    by_site = [
        textwrap.fill(line, width, subsequent_indent="  " if line.startswith("- ") else "")
        for line in _by_site(result)
    ]
    return [*parts, "\n".join(by_site)] if by_site else parts


def _marked(result: Result) -> list[str]:
    """The names of the sites; who attacked and who is new is said."""
    new = set(result.experiment.settings.split_clients[1].tolist())
    return [
        f"{name}{' malicious' * bool(bad)}{' new' * (n in new)}"
        for n, (name, bad) in enumerate(zip(result.short_names, result.malicious, strict=True))
    ]


def _table(result: Result, width: int) -> Table:
    experiment, gains, metric, rivals = result.experiment, result.gains, result.primary, result.rivals
    last, malicious = _final(result), result.malicious
    data, partition = experiment.federation.dataset, experiment.federation.partition
    names = _marked(result)
    left_out = (() if gains is not None else GAIN) + (() if rivals is not None else RIVALS)
    left_out += ("rival",) if rivals is not None and rivals.chosen == CONSTANT else ()
    columns, room = _columns(width, max(7, *map(len, names)), left_out)
    order = last[metric.name] if metric.higher_is_better else -last[metric.name]
    lowest = np.argsort(order, kind="stable")[:ROWS]  # nan is last
    counts = partition.label_counts(data)
    columns = [name for name in columns if name != "classes" or counts.shape[1]]

    def accuracies(clients: Any) -> dict[str, str]:
        means = {name: mean_of_known(last[metric.name + of][clients]) for name, of in MODELS.items()}
        cells = {name: metric.text(float(mean)) for name, mean in means.items()}
        if gains is not None:
            alone, gain = (float(mean_of_known(values[clients])) for values in (gains.alone, gains.gain))
            cells |= {"alone": metric.text(alone), "gain": metric.text(gain, sign="+")}
        if rivals is not None:
            both = (float(mean_of_known(values[clients])) for values in (rivals.constant, rivals.best))
            cells |= dict(zip(("constant", "rival"), map(metric.text, both), strict=True))
        return cells

    verdicts = [] if rivals is None else of_rivals.verdicts(rivals, last[metric.name])

    rows: list[dict[str, str]] = []
    for n in sorted(map(int, lowest)):
        cells = {
            "site": names[n],
            "classes": _listed([data.classes[c] for c in np.flatnonzero(counts[n])], room),
            "train": str(len(partition.train[n])),
            "test": str(len(partition.test[n])),
            "verdict": verdicts[n] if verdicts else "",
            "weight": number(last["weight"][n], ".3f"),
        }
        rows.append(cells | accuracies([n]))
    below = [{"site": "mean", **accuracies(slice(None))}]
    if malicious.any():
        below.append({"site": "honest", **accuracies(~malicious)})
    grid = [[row.get(name, "") for name in columns] for row in (*rows, *below)]
    title = f"{experiment.title}: {metric.in_unit} on each site's own test samples"
    if rivals is not None:
        columns = [rivals.chosen if name == "rival" else name for name in columns]
    return Table(title, columns, [*grid[: len(rows)], RULE, *grid[len(rows) :]])


def _contributions(result: Result) -> contributions.Contributions | None:
    federation = result.experiment.federation
    samples = [len(train_samples) for train_samples in federation.partition.train]
    names = result.short_names
    return contributions.contributions(result.records, names, samples, result.gains, result.primary)


def conclusion(gains: Gains) -> str:
    """Who gains, in a sentence: the paired differences with their intervals; "" where nothing is known.

    Where they are not shown to be better than a constant answer, it says so first: a gain over training alone
    has no use then.
    """
    others = {"training alone": gains.gain, "the global model": gains.over_global}
    comparisons = [against(gains.metric, name, values) for name, values in others.items()]
    known = int((~np.isnan(gains.gain)).sum())
    if not known:
        return ""
    brackets = "In brackets: 95 % intervals over the sites of this run."
    if known < 2:
        brackets = "That is one site, so there is no interval over sites."
    first = "The personal models are"
    if constant := constant_text(gains):
        over_constant = against(gains.metric, "it", gains.over_constant)
        first = f"No useful gain is shown: {constant}, and the personal models are {over_constant}. They are"
    return (
        f"{first} {' and '.join(filter(None, comparisons))}; {round(gains.share * known)} of "
        f"{known} site{'s' * (known > 1)} gain{'s' * (known < 2)} over training alone. {brackets}"
    )


def _against_rivals(result: Result) -> str:
    """The verdict against what clients have alone; "" where there are no rivals."""
    if result.rivals is None:
        return ""
    names = result.short_names
    return of_rivals.conclusion(result.rivals, result.of_honest, names)


def _by_site(result: Result) -> list[str]:
    """Each client's verdict against what it has alone; [] where nothing is known."""
    if result.rivals is None:
        return []
    federation = result.experiment.federation
    tested = [len(rows) for rows in federation.partition.test]
    lead, lines = of_rivals.of_sites(result.rivals, result.of_honest, result.short_names, tested)
    return [lead, *(f"- {line}" for line in lines)] if lead else []


def advice(result: Result) -> str:
    """What to try after a run whose models are worse on average than those trained alone; else ""."""
    gains, e = honest_gains(result), result.experiment
    if gains is None:
        return ""
    known = gains.gain[~np.isnan(gains.gain)]
    if unknown_reason([known]) or len(known) < 2 or round(float(known.mean()), 9) >= 0:
        return ""
    is_worse = over_clients(known).high < 0
    verdict = "Training alone is better here." if is_worse else "This run shows no gain over training alone."
    data = f" -d {e.run.data.name}" if e.run.data.name else ""
    tries = [f"`copfl choose{data}` with the options of this run finds out whether any method is better here"]
    if result.folder is not None and still_rises(*_honest_curves(result), result.primary):
        more = f"`copfl resume {result.folder} --rounds {2 * e.settings.rounds}{with_code()}`"
        tries.append(f"the values still rise: {more} trains on")
    # Not `-a local`: it has one epoch and no add-ons, and the values of this run have those of its algorithm.
    as_here = "train alone with `-a local`, for as many epochs and with the add-ons of this run"
    if result.folder is not None and data:
        as_here = (
            f"`copfl run -c {result.folder / BASELINE}/run.toml{with_code()}` trains alone as here and keeps the "
            "models"
        )
    return f"{verdict} To try: {'; '.join(tries)}. If none is, {as_here}."


def _selection(result: Result) -> str:
    """Which rounds the values are of, and the validation value where there is one; "" if of the last."""
    e, metric = result.experiment, result.primary
    if e.federation.validation is None:
        return ""
    value = metric.text(float(mean_of_known(result.final(f"{metric.name}{VALIDATED}"))))
    validated = f"mean {metric.title} on validation samples {value}{metric.unit}"
    if e.settings.select == "last":
        return f"{capital(validated)}."
    trained = e.settings.split_clients[0]
    best_rounds = result.rounds_taken[trained][result.rounds_taken[trained] > 0]
    rounds = (
        f"{best_rounds.min()} to {best_rounds.max()}, median {np.median(best_rounds):g}"
        if len(best_rounds)
        else "none"
    )
    unknown = int(np.isnan(result.final(f"{metric.name}{VALIDATED}")[trained]).sum())
    others = f"; {unknown} sites without such a value have their last evaluation" if unknown else ""
    stopped = ""
    if result.stopped_early:
        stopped = f" The run ended as no site improved in {e.settings.patience} evaluations."
    return (
        f"Values are those of each site's best round on its validation samples: rounds {rounds} of "
        f"{len(result.records)}; {validated}{others}.{stopped}"
    )


def _found_rounds(result: Result) -> str:
    """How the number of rounds was found; "" where somebody set it."""
    settings = result.experiment.settings
    if settings.find_rounds != "done":
        return ""
    alone = f"; training alone has {settings.rounds_alone}, found alike" if result.gains is not None else ""
    return (
        f"The run has {settings.rounds} rounds, as many as had the lowest loss in a first training with "
        f"{SELECTION:g} of each site's training samples held out{alone}."
    )


def _others(result: Result) -> list[str]:
    """The means of the other metrics, and how many clients do not define the primary one."""
    metric, others = result.primary, result.experiment.task.metrics[1:]
    means = [f"{m.title} {m.text(float(mean_of_known(result.final(m.name))))}{m.unit}" for m in others]
    notes = [f"Mean after training: {', '.join(means)}."] if means else []
    value, loss = (result.final(name) for name in (metric.name, "test_loss"))
    if missing := int((np.isnan(value) & ~np.isnan(loss)).sum()):
        notes.append(
            f"The test samples of {missing} sites do not define the {metric.title}; means omit them."
        )
    return notes


def _columns(width: int, client: int, left_out: Sequence[str]) -> tuple[list[str], int]:
    """The columns that fit into this width, and the room for the names of classes; numbers are never cut."""
    widest = {"site": client, "rival": 7, "verdict": len(of_rivals.NO_USE)}
    sizes = {name: max(len(name), 5, widest.get(name, 0)) + 2 for name in COLUMNS}
    names = [name for name in COLUMNS if name not in left_out]
    for name in (name for name in OPTIONAL if name not in left_out):
        if sum(sizes[name] for name in names) <= width:
            break
        names = [other for other in names if other != name]
    return names, max(5, width - sum(sizes[name] for name in names if name != "classes") - 2)


def _listed(names: Sequence[str], room: int) -> str:
    """As many of the names as fit, six at most, and the number of names if that is not all."""
    for count in range(min(len(names), 6), 0, -1):
        text = ", ".join(names[:count]) + ("" if count == len(names) else f", ... ({len(names)})")
        if len(text) <= room:
            return text
    return names[0] if len(names) == 1 else f"{len(names)} classes"


def _final(result: Result) -> dict[str, Numbers]:
    """The value of each metric for each client, in the round that its model is taken from."""
    suffixes = (*EVALUATED, *([VALIDATED] if result.experiment.federation.validation is not None else []))
    evaluated = [metric.name + of for metric in result.experiment.task.metrics for of in suffixes]
    return {name: result.final(name) for name in (*evaluated, "weight")}


def _honest_curves(result: Result) -> tuple[Numbers, Numbers]:
    """The primary metric and the loss on test samples by round, of all but the clients of a simulated attack."""
    names = result.primary.name, "test_loss"
    of_metric, of_loss = (result.metric_or_nan(name)[:, ~result.malicious] for name in names)
    return of_metric, of_loss


def honest_gains(result: Result) -> Gains | None:
    """The gains of all but the clients of a simulated attack, which alone trained on right labels."""
    if result.gains is None:
        return None
    personal = np.where(result.malicious, np.nan, result.gains.personal)
    return result.gains._replace(personal=personal)


def _epsilons(result: Result) -> dict[str, float]:
    """The privacy budgets spent after the last round; none without [privacy]."""
    last = result.records[-1]["federation"] if result.records else {}
    return {name: value for name, value in last.items() if name in ("epsilon", "epsilon_server")}
