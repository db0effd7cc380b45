"""The sections of the coordinator's page: charts and tables of the rounds, the weights, and the audit log.

`page` puts them below its head. With secure sums a section says what is hidden, and why.
"""

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from copfl.charts import Chart, Heat, Line, Lines, Value
from copfl.core.halves import HALF
from copfl.federation.operations.watched import Watched
from copfl.federation.protocol.events import Event
from copfl.federation.protocol.halves import SAMPLES
from copfl.federation.protocol.round_record import RoundRecord
from copfl.measures.metrics import METRICS, MetricInfo
from copfl.report import contributions
from copfl.report.run_charts import MODELS, SCORES
from copfl.sections import Section
from copfl.tables import Table, capital, listed, number, size

NAMED = 5  # members that a sentence names
CURVES = 8  # members that have a curve each; more are shown as a table in colours
TABLE_ROUNDS = 60  # at most so many rounds have a row of a table
HEAT_ROUNDS = 100  # at most so many, the last ones, have a column of a table in colours
LOG_LINES = 300  # of the audit log that the page has
HIDDEN = (
    "Hidden by secure aggregation: the nodes send masked uploads, and the server learns their sum. So it has "
    "means, and no value of a single member."
)
OWN_GAIN = "A member's own gain over training alone does not leave its node: the command copfl report shows it there."
NO_INTERVAL = (
    "Scores of the algorithm in each round, without an interval: how far they would change with other "
    "batches or another seed is not known. They are no measured contribution: run.benefit=true measures what "
    "each member is worth to the others, with intervals."
)


def sections(watched: Watched) -> Iterator[Section]:
    """One after another; where no round has ended, the log alone."""
    if watched.rounds:
        metric, rounds = metric_of(watched), watched.rounds
        is_hidden = any(r.is_summed for r in rounds) and not any(metric.name in r.per_client for r in rounds)
        hidden = [HIDDEN] if is_hidden else []
        scores = list(_scores(watched))
        yield Section(
            "curves",
            capital(metric.title),
            f"Which {metric.title} do the members' models have?",
            list(_curves(watched, metric)),
            notes=[*hidden, *_last_evaluation(watched, metric)],
        )
        yield Section(
            "rounds",
            "Rounds",
            "How long do rounds take, and who is missing?",
            [_seconds(rounds)],
            [_rounds(watched)],
        )
        yield Section(
            "bytes",
            "Bytes",
            "How many bytes do members send and receive?",
            list(_traffic(watched)),
            [_totals(watched)],
        )
        yield _privacy(watched)
        if watched.settings.get("run.benefit") or any(HALF in r.per_client for r in rounds):
            yield _benefit(watched)
        yield Section(
            "contributions",
            "Weights",
            "Which members have weight?",
            scores,
            notes=[NO_INTERVAL] if scores else hidden or ["The algorithm of this run gives no weights."],
        )
    yield Section("log", "Log", "What is in the audit log?", [], [_log(watched)])


def _last_evaluation(watched: Watched, metric: MetricInfo) -> Iterator[str]:
    """Of how many members the last evaluation is; nothing where every round has all."""
    if (event := watched.history.evaluated) is None:
        return
    value, of = event.get("value"), f"{event.get('clients')} of {event.get('of')} members"
    if value is None:
        yield f"The last evaluation has {of}: those of the last round, as the others have no value."
    else:
        yield (
            f"After the last round {metric.title} is {metric.text(value)}{metric.unit} in the mean of {of}; "
            "who was in no evaluated round was evaluated then."
        )


def _curves(watched: Watched, metric: MetricInfo) -> Iterator[Chart]:
    """The mean of each kind of model, and each member's model after training."""
    x = [float(r.number) for r in watched.rounds]
    lines = []
    for index, (of, (name, _)) in enumerate(MODELS.items()):
        values = [_times(r.mean.get(metric.name + of), metric.factor) for r in watched.rounds]
        if any(value is not None for value in values):
            lines.append(Line(name, values, colour=index, dash=index))
    if lines:
        description = "Mean over the clients that took part in the round, each tested on its own samples."
        yield Lines(
            "mean", f"{capital(metric.title)} by round", description, x, metric.label, lines, metric.unit
        )
    per_member = _by_member(watched, metric.name, metric.factor)
    if not per_member:
        return
    title = f"{capital(metric.title)} of each member by round"
    description = "After its training in the round, on its own test samples, as its node reports it."
    if len(per_member) <= CURVES:
        lines_of_members = [
            Line(name, values, colour=index, dash=index // 4)
            for index, (name, values) in enumerate(per_member.items())
        ]
        yield Lines("members", title, description, x, metric.label, lines_of_members, metric.unit)
    else:
        yield _heat(watched, "members", title, description, per_member, metric.title, metric.unit)._replace(
            low_is_bright=not metric.higher_is_better
        )


def _seconds(rounds: Sequence[RoundRecord]) -> Chart:
    description = "The wall-clock time of each round, with the time in which it waited for members."
    lines = [Line("seconds", [r.seconds for r in rounds])]
    return Lines(
        "seconds",
        "Seconds by round",
        description,
        [float(r.number) for r in rounds],
        "seconds",
        lines,
        " s",
        2,
    )


def _rounds(watched: Watched) -> Table:
    rows = []
    for record in reversed(watched.rounds[-TABLE_ROUNDS:]):
        missing = [f"{watched.name(client)}: {why}" for client, why in record.left_out.items()]
        mean = mean_text(watched, [record])
        rows.append(
            [
                str(record.number),
                f"{record.seconds:.2f} s",
                str(len(record.clients)),
                mean or "-",
                size(record.bytes_up),
                size(record.bytes_down),
                listed(missing, NAMED) or "nobody",
            ]
        )
    head = [
        "round",
        "time",
        "counted",
        f"mean {metric_of(watched).title}",
        "bytes up",
        "bytes down",
        "missing, and why",
    ]
    left_out = len(watched.rounds) - len(rows)
    notes = (
        [f"The last {len(rows)} of {len(watched.rounds)} rounds; rounds.jsonl has all"] if left_out else []
    )
    return Table("Rounds, the last one first", head, rows, notes, numeric=False)


def _traffic(watched: Watched) -> Iterator[Chart]:
    x = [float(r.number) for r in watched.rounds]
    lines = [
        Line("to the server", [r.bytes_up / 1000 for r in watched.rounds]),
        Line("to the nodes", [r.bytes_down / 1000 for r in watched.rounds], colour=1, dash=1),
    ]
    description = "All members together, the messages that were not counted included; 1 kB is 1000 bytes."
    yield Lines("bytes", "Bytes by round", description, x, "kB", lines, " kB")
    for way, where in (("bytes_up", "to the server"), ("bytes_down", "to the node")):
        values = _by_member(watched, way, 1 / 1000)
        description = (
            "Of the members whose upload counted in the round; a stroke where one did not take part."
        )
        yield _heat(
            watched, way, f"Bytes of each member {where}", description, values, "bytes", " kB"
        )._replace(zero=True)


def _totals(watched: Watched) -> Table:
    rows = []
    for client, name in sorted(_everyone(watched).items()):
        up, down = (
            sum(r.per_client.get(way, {}).get(client) or 0.0 for r in watched.rounds)
            for way in ("bytes_up", "bytes_down")
        )
        rows.append([name, str(sum(client in r.clients for r in watched.rounds)), size(up), size(down)])
    return Table("Bytes of each member, all rounds", ["member", "rounds that counted it", "up", "down"], rows)


def _privacy(watched: Watched) -> Section:
    """The epsilon by round, and at most of each member."""
    title, last = "How much do the uploads reveal at most?", watched.rounds[-1].federation
    if last.get("epsilon") is None:
        note = "The run adds no noise to uploads, so no epsilon bounds what they reveal."
        return Section("privacy", "Epsilon", title, [], notes=[note])
    names = {"epsilon": "towards everybody else", "epsilon_server": "towards the server"}
    lines = [
        Line(text, [r.federation.get(name) for r in watched.rounds], colour=index, dash=index)
        for index, (name, text) in enumerate(names.items())
    ]
    description = "After each round, for a member whose upload was in every round so far."
    x = [float(r.number) for r in watched.rounds]
    chart = Lines("epsilon", "Epsilon by round", description, x, "epsilon", lines, "", 2)
    rows = []
    for client, name in sorted(_everyone(watched).items()):
        uploads = sum(client in r.clients for r in watched.rounds)
        rows.append([name, str(uploads), *(number(last.get(n) if uploads else 0.0, ".2f") for n in names)])
    head = ["member", "uploads in this run", *(f"epsilon {text}, at most" for text in names.values())]
    note = (
        "Of this run alone, as the server counts. What a member's data have spent over all runs is in its "
        "own ledger, which does not leave its node: the command copfl federate status shows it there."
    )
    return Section(
        "privacy", "Epsilon", title, [chart], [Table("Epsilon of each member", head, rows)], [note]
    )


def _benefit(watched: Watched) -> Section:
    """What each member is worth to the others, beside the other numbers of it."""
    title, contributed = "What is each member worth to the others?", contributions_of(watched)
    if contributed is None:
        return Section("benefit", "Benefit", title, [], notes=["No round has compared halves yet."])
    table, chart = contributions.table(contributed), contributions.chart(contributed)
    return Section("benefit", "Benefit", title, [chart], [table], [OWN_GAIN])


def contributions_of(watched: Watched) -> contributions.Contributions | None:
    """What the server knows of each member's part in the run; None where no benefit is measured yet."""
    clients = 1 + max(_everyone(watched), default=-1)
    return contributions.contributions(
        [record.as_json() for record in watched.rounds],
        [watched.name(client) for client in range(clients)],
        _samples(watched, clients),
        None,
        metric_of(watched),
    )


def _samples(watched: Watched, clients: int) -> list[float] | None:
    """The last number of samples of each member; None where no upload has it."""
    last_samples: dict[int, float] = {}
    for record in watched.rounds:
        last_samples |= {
            n: value for n, value in record.per_client.get(SAMPLES, {}).items() if value is not None
        }
    return [last_samples.get(client, math.nan) for client in range(clients)] if last_samples else None


def _scores(watched: Watched) -> Iterator[Chart]:
    """The weights of members as shares of a round, and the scores behind them."""
    for metric, meaning in SCORES.items():
        values = _by_member(watched, metric, 1.0, as_share=metric == "weight")
        if not values:
            continue
        words = metric.replace("_", " ")
        title = f"{capital(words)} of each member by round, without an interval"
        chart = _heat(watched, metric, title, f"{meaning}.", values, words)
        if metric == "weight":
            count = int(np.median([len(r.clients) for r in watched.rounds]))
            mark = f"mark: the equal share 1/{count} = {1 / count:.3f}"
            chart = chart._replace(what="share of the weights", centre=1 / count, centre_title=mark)
        yield chart._replace(digits=3)


def _log(watched: Watched) -> Table:
    events = watched.log.lines
    rows = [
        [moment(event["at"], watched), str(event["event"]).replace("_", " "), _told(event, watched)]
        for event in reversed(events)
    ]
    chain = watched.log.problem or "no line was changed or removed"
    notes = [f"{len(events)} lines; {chain}; last hash {watched.log.last_hash[:16]}"]
    if len(rows) > LOG_LINES:
        notes.append(f"The last {LOG_LINES} lines; runs/{watched.run}/audit.jsonl has all")
    return Table(
        "The server's audit log, the last line first",
        ["at", "event", "what"],
        rows[:LOG_LINES],
        notes,
        numeric=False,
    )


def _told(event: Mapping[str, Any], watched: Watched) -> str:
    """An event in words; its fields come from a file, and any may be missing."""
    words = []
    if "round" in event:
        words.append(f"round {event['round']}")
    if "client" in event:
        client = event["client"]
        words.append(watched.name(client) if type(client) is int else str(client))
    if event["event"] == Event.ROUND_STARTED:
        clients = event.get("clients")
        words.append(f"{len(clients)} members asked" if isinstance(clients, list) else "")
    if event["event"] == Event.ROUND_ENDED:
        accepted = event.get("accepted")
        words.append(f"{len(accepted)} uploads" if isinstance(accepted, list) else "")
    if "node" in event:
        words.append(f"node {event['node']}")
    if type(event.get("bytes")) is int:
        words.append(size(event["bytes"]))
    if "reason" in event:
        words.append(str(event["reason"]))
    return ", ".join(filter(None, words)) or "-"


def metric_of(watched: Watched) -> MetricInfo:
    """The primary metric; one of the user's own is shown as it is, without a unit."""
    name = watched.rounds[-1].metric if watched.rounds else "accuracy"
    return METRICS.get(name) or MetricInfo(name, fraction=False)


def mean_text(watched: Watched, rounds: Sequence[RoundRecord]) -> str:
    """Such as "65.0 %"; empty where no value is known.

    Args:
        watched: The federation.
        rounds: Those that are meant; the mean is of the last one.
    """
    metric = metric_of(watched)
    value = rounds[-1].mean.get(metric.name) if rounds else None
    return "" if value is None else f"{metric.text(value)}{metric.unit}"


def _everyone(watched: Watched) -> dict[int, str]:
    """The members, and whoever was a client of a round."""
    seen = {client for r in watched.rounds for client in (*r.clients, *r.left_out)}
    return {client: watched.name(client) for client in seen | watched.names.keys()}


def _by_member(watched: Watched, name: str, factor: float, as_share: bool = False) -> dict[str, list[Value]]:
    """A metric of each member in every round; none of a metric that no node sends."""
    if not any(name in r.per_client for r in watched.rounds):
        return {}
    table: dict[str, list[Value]] = {}
    for client, label in sorted(_everyone(watched).items()):
        row: list[Value] = []
        for record in watched.rounds:
            values = record.per_client.get(name, {})
            whole = sum(value or 0.0 for value in values.values()) if as_share else 1.0
            row.append(_times(values.get(client), factor, whole) if whole else None)
        table[label if label not in table else f"{label} (client {client})"] = row
    return table


def _heat(
    watched: Watched,
    name: str,
    title: str,
    description: str,
    values: Mapping[str, Sequence[Value]],
    value_name: str,
    unit: str = "",
) -> Heat:
    columns = [str(r.number) for r in watched.rounds[-HEAT_ROUNDS:]]
    cells = [row[-HEAT_ROUNDS:] for row in values.values()]
    description += f" The last {HEAT_ROUNDS} rounds." if len(watched.rounds) > HEAT_ROUNDS else ""
    return Heat(
        name, title, description, list(values), columns, cells, value_name, "round", unit, row_title="member"
    )


def _times(value: float | None, factor: float, whole: float = 1.0) -> Value:
    """The value times the factor, of a whole; None where that is no number: members may report any."""
    product = math.nan if value is None else factor * (value / whole)
    return product if math.isfinite(product) else None


def clock(at: datetime.datetime | None, watched: Watched) -> str:
    """The time, with the date if it is another day than the page's.

    Args:
        at: The time; None: there is none.
        watched: The federation, as of the page's moment.
    """
    if at is None:
        return "-"
    return f"{at:%H:%M:%S}" if at.date() == watched.at.date() else f"{at:%Y-%m-%d %H:%M:%S}"


def moment(text: str, watched: Watched) -> str:
    """A time of a log, as the page shows it.

    Args:
        text: As ISO 8601 writes it; empty: there is none.
        watched: The federation, as of the page's moment.
    """
    return clock(datetime.datetime.fromisoformat(text).astimezone(datetime.UTC), watched) if text else ""
