"""The coordinator's page: a federation's members, rounds and audit log, while a run continues and afterwards."""

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from copfl.charts import Chart, Heat, Line, Lines, Value
from copfl.core.halves import HALF
from copfl.core.metrics import METRICS, MetricInfo
from copfl.errors import RunError, raised_as
from copfl.experiment.benefit import Benefit
from copfl.experiment.progress import span
from copfl.flower.halves import BENEFIT, SAMPLES
from copfl.flower.keys import fingerprint
from copfl.flower.proposal import members_fingerprint
from copfl.flower.registry import Event
from copfl.flower.watched import (
    ABSENT,
    ANSWERED,
    MemberState,
    RoundRecord,
    Watched,
    fingerprint_of,
    read,
)
from copfl.report import contributions
from copfl.report.document import Document, Section, render
from copfl.report.run_charts import SCORES
from copfl.report.run_data import MODELS
from copfl.settings.flat import nested
from copfl.tables import Table, capital, listed, number, size

NAMED = 5  # members that a sentence names
CURVES = 8  # members that have a curve each; more are shown as a table in colours
TABLE_ROUNDS = 60  # rounds of which a table has a row
HEAT_ROUNDS = 100  # rounds of which a table in colours has a column: the last ones
LOG_LINES = 300  # of the audit log that the page has
TABLES = ("algorithm", "optimizer", "model", "robust", "privacy", "network", "secure")
HIDDEN = (
    "Hidden by secure aggregation: the nodes send masked uploads, and the server learns their sum. So it has means, "
    "and no value of a single member."
)
OWN_GAIN = "A member's own gain over training alone does not leave its node: the command copfl report shows it there."
NO_INTERVAL = (
    "Scores of the algorithm in each round, without an interval: how far they would change with other batches or "
    "another seed is not known. They are no measured contribution: run.benefit=true measures what each member is worth "
    "to the others, with intervals."
)


class FederationPage:
    """The page of the app in a folder, for `copfl.report.serving`.

    Args:
        folder: That of the app, on the server.
        run: The run that it shows; None: always the last one.
    """

    def __init__(self, folder: Path, run: str | None = None) -> None:
        self.folder, self.run = folder, run

    def fingerprint(self) -> str:
        return fingerprint_of(self.folder, self.run)

    def html(self, fingerprint: str = "") -> str:
        document = document_of(read(self.folder, self.run))
        # A folder may get another run, so a served page asks on.
        return render(document._replace(ended=not fingerprint), fingerprint)


def document_of(found: Watched) -> Document:
    """The page of a federation at one moment."""
    state = _sentences(found)
    return Document(
        title=f"Federation {found.folder.resolve().name}" + (f", run {found.run}" if found.run else ""),
        subtitle=f"{_who(found)}; as of {found.at:%Y-%m-%d %H:%M:%S}, all times are UTC",
        conclusion=state,
        tiles=_tiles(found),
        tables=[_members(found)],
        notes=[f"{capital(remark)}." for remark in found.remarks],
        facts=_facts(found),
        sections=list(_sections(found)) if found.run else [],
        heading="State",
        problems=[f"{capital(problem)}." for problem in found.problems],
        news=" ".join(state[:2]),
    )


def _who(found: Watched) -> str:
    """The algorithm, the members, and who signed the run."""
    tables = nested(found.settings)
    parts = [str(tables.get("algorithm", {}).get("name", "")), f"{len(found.members)} members"]
    if found.proposal is not None:
        parts.append(f"signed by coordinator {fingerprint(found.proposal.coordinator)}")
    elif found.run:
        parts.append("signed by nobody")
    return ", ".join(filter(None, parts))


# -- the state -----------------------------------------------------------------------------------------------


def _sentences(found: Watched) -> list[str]:
    """What happens now, who is waited for, and how far the metric is."""
    if not found.run:
        count = len(found.members)
        members = f"{count} member{'s' * (count != 1)} admitted" if count else "nobody is admitted yet"
        return [f"No run has begun; {members}."]
    done, of = len(found.rounds), found.planned or "?"
    lines = []
    if found.is_running and found.history.current is not None:
        lines.append(f"Round {found.history.current.number} of {of} is running.")
        lines.append(_waiting(found))
    elif found.is_running:
        lines.append(f"{done} of {of} rounds have ended; the run is running.")
    else:
        why = f": {found.reason}" if found.reason else ""
        lines.append(f"The run {found.state} after {done} of {of} rounds{why}.")
    if mean := _mean(found, found.rounds[-1:]):
        lines.append(
            f"Mean {_metric(found).title} of the clients in round {found.rounds[-1].number}: {mean}."
        )
    return lines


def _waiting(found: Watched) -> str:
    """Who waits for whom."""
    waited = [member for member in found.members if member.is_waited_for]
    if not waited:
        return "Every upload has arrived; the server adds them up."
    names = listed([f"{member.name} ({_how(member, found.at)})" for member in waited], NAMED)
    answered = [member.name for member in found.members if member.state == ANSWERED]
    has = "has" if len(answered) == 1 else "have"
    others = (
        f" {listed(answered, NAMED)} {has} answered and wait{'s' * (len(answered) == 1)}." if answered else ""
    )
    return f"It waits for {names}.{others}"


def _how(member: MemberState, now: datetime.datetime) -> str:
    """Such as "training for 0:42"."""
    return f"{member.state} for {_age(member.since, now)}" if member.since else member.state


def _tiles(found: Watched) -> list[tuple[str, str, str]]:
    tiles = []
    if found.run:
        since = _moment(found.history.last_at, found)
        note = found.reason or (f"last event {since}" if since else "")
        tiles.append(("run", found.state.removeprefix("is ").removeprefix("was "), note))
        tiles.append(("rounds", f"{len(found.rounds)} of {found.planned or '?'}", _pace(found.rounds)))
    waited = [member for member in found.members if member.is_waited_for]
    if found.is_running and found.history.current is not None:
        absent = sum(member.state == ABSENT for member in waited)
        tiles.append(("waits for", str(len(waited)), f"{absent} of them not connected" if absent else ""))
    if found.rounds:
        if mean := _mean(found, found.rounds[-1:]):
            tiles.append((_metric(found).title, mean, "mean of the clients, last round"))
        up, down = (sum(getattr(r, way) for r in found.rounds) for way in ("bytes_up", "bytes_down"))
        tiles.append(("traffic", size(up + down), f"{size(up)} up, {size(down)} down"))
        epsilon = found.rounds[-1].federation.get("epsilon")
        if epsilon is not None:
            delta = found.settings.get("privacy.delta")
            tiles.append(("epsilon", f"{epsilon:.2f}", f"of this run, at delta {delta}"))
    return tiles


def _pace(rounds: Sequence[RoundRecord]) -> str:
    return f"{float(np.median([r.seconds for r in rounds])):.1f} s each (median)" if rounds else ""


def _members(found: Watched) -> Table:
    rows = []
    for member in found.members:
        state = member.state + (f": {member.reason}" if member.reason else "") + " (late)" * member.is_late
        since = f"{_clock(member.since, found)}, {_age(member.since, found.at)} ago" if member.since else "-"
        now = [since, "yes" if member.is_waited_for else "no"] if found.is_running else []
        answered, counted = _clock(member.last_answer, found), str(member.last_round or "-")
        rows.append(
            [f"{member.number} {member.name}", state, *now, answered, counted, member.fingerprint or "-"]
        )
    present = ["since", "waited for"] if found.is_running else []
    head = ["member", "state", *present, "last answer", "last counted in round", "fingerprint of its key"]
    notes = [f"{len(found.roster.revoked)} keys are revoked"] if found.roster.revoked else []
    notes += [f"Node {node} was refused: {why}" for node, why in list(found.history.refused.items())[-NAMED:]]
    return Table("Members", head, rows, notes, numeric=False)


def _facts(found: Watched) -> Table | None:
    """Who signed the run, and its settings in short."""
    if not found.run:
        return None
    signed, tables = found.proposal, nested(found.settings)
    rows = [["run", found.run]]
    if signed is None:
        rows.append(["signed by", "nobody: the folder has no proposal of this run"])
    else:
        rows += [
            [
                "signed by",
                f"coordinator {fingerprint(signed.coordinator)}, at {_moment(signed.issued, found)}",
            ],
            ["proposal", f"SHA-256 {signed.digest}"],
            [
                "members",
                f"{len(signed.members)}, fingerprint of the list {members_fingerprint(signed.members)}",
            ],
        ]
    rows += [[kind, _described(tables[kind])] for kind in TABLES if _described(tables.get(kind, {}))]
    run = tables.get("run", {})
    rows.append(["clients", f"{run.get('clients')}, participation {run.get('participation', 1)}"])
    rows += [["seed", str(run["seed"])]] if "seed" in run else []
    if len(found.runs) > 1:
        rows.append(["runs in the folder", listed(list(reversed(found.runs)), NAMED)])
    return Table("The run", ["what", "value"], rows, numeric=False)


def _described(table: Any) -> str:
    """Such as "adam (lr 0.001)"."""
    if not isinstance(table, Mapping):
        return str(table or "")
    options = {
        key: value for key, value in table.items() if key not in ("dir", "code") and value not in ("", None)
    }
    name = str(options.pop("name", ""))
    rest = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"{name} ({rest})" if name and rest else name or rest


# -- charts and tables ---------------------------------------------------------------------------------------


def _sections(found: Watched) -> Iterator[Section]:
    if found.rounds:
        metric, rounds = _metric(found), found.rounds
        is_hidden = any(r.is_summed for r in rounds) and not any(metric.name in r.per_client for r in rounds)
        hidden = [HIDDEN] if is_hidden else []
        scores = list(_scores(found))
        yield Section(
            "curves",
            capital(metric.title),
            f"Which {metric.title} do the members' models have?",
            list(_curves(found, metric)),
            notes=hidden,
        )
        yield Section(
            "rounds",
            "Rounds",
            "How long do rounds take, and who is missing?",
            [_seconds(rounds)],
            [_rounds(found)],
        )
        yield Section(
            "bytes",
            "Bytes",
            "How many bytes do members send and receive?",
            list(_traffic(found)),
            [_totals(found)],
        )
        yield _privacy(found)
        if found.settings.get("run.benefit") or any(HALF in r.per_client for r in rounds):
            yield _benefit(found)
        yield Section(
            "contributions",
            "Weights",
            "Which members have weight?",
            scores,
            notes=[NO_INTERVAL] if scores else hidden or ["The algorithm of this run gives no weights."],
        )
    yield Section("log", "Log", "What is in the audit log?", [], [_log(found)])


def _curves(found: Watched, metric: MetricInfo) -> Iterator[Chart]:
    """The mean of each kind of model, and each member's model after training."""
    x = [float(r.number) for r in found.rounds]
    lines = []
    for place, (of, (name, _)) in enumerate(MODELS.items()):
        values = [_times(r.mean.get(metric.name + of), metric.factor) for r in found.rounds]
        if any(value is not None for value in values):
            lines.append(Line(name, values, colour=place, dash=place))
    if lines:
        about = "Mean over the clients that took part in the round, each tested on its own samples."
        yield Lines("mean", f"{capital(metric.title)} by round", about, x, metric.label, lines, metric.unit)
    per_member = _by_member(found, metric.name, metric.factor)
    if not per_member:
        return
    title = f"{capital(metric.title)} of each member by round"
    about = "After its training in the round, on its own test samples, as its node reports it."
    if len(per_member) <= CURVES:
        own = [
            Line(name, values, colour=place, dash=place // 4)
            for place, (name, values) in enumerate(per_member.items())
        ]
        yield Lines("members", title, about, x, metric.label, own, metric.unit)
    else:
        yield _heat(found, "members", title, about, per_member, metric.title, metric.unit)._replace(
            low_is_bright=not metric.higher_is_better
        )


def _seconds(rounds: Sequence[RoundRecord]) -> Chart:
    about = "The wall-clock time of each round, with the time in which it waited for members."
    lines = [Line("seconds", [r.seconds for r in rounds])]
    return Lines(
        "seconds", "Seconds by round", about, [float(r.number) for r in rounds], "seconds", lines, " s", 2
    )


def _rounds(found: Watched) -> Table:
    rows = []
    for record in reversed(found.rounds[-TABLE_ROUNDS:]):
        missing = [f"{found.name(client)}: {why}" for client, why in record.left_out.items()]
        mean = _mean(found, [record])
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
        f"mean {_metric(found).title}",
        "bytes up",
        "bytes down",
        "missing, and why",
    ]
    left_out = len(found.rounds) - len(rows)
    notes = [f"The last {len(rows)} of {len(found.rounds)} rounds; rounds.jsonl has all"] if left_out else []
    return Table("Rounds, the last one first", head, rows, notes, numeric=False)


def _traffic(found: Watched) -> Iterator[Chart]:
    x = [float(r.number) for r in found.rounds]
    lines = [
        Line("to the server", [r.bytes_up / 1000 for r in found.rounds]),
        Line("to the nodes", [r.bytes_down / 1000 for r in found.rounds], colour=1, dash=1),
    ]
    about = "All members together, the messages that were not counted included; 1 kB is 1000 bytes."
    yield Lines("bytes", "Bytes by round", about, x, "kB", lines, " kB")
    for way, where in (("bytes_up", "to the server"), ("bytes_down", "to the node")):
        values = _by_member(found, way, 1 / 1000)
        about = "Of the members whose upload counted in the round; a stroke where one did not take part."
        yield _heat(found, way, f"Bytes of each member {where}", about, values, "bytes", " kB")._replace(
            zero=True
        )


def _totals(found: Watched) -> Table:
    rows = []
    for client, name in sorted(_everyone(found).items()):
        up, down = (
            sum(r.per_client.get(way, {}).get(client) or 0.0 for r in found.rounds)
            for way in ("bytes_up", "bytes_down")
        )
        rows.append([name, str(sum(client in r.clients for r in found.rounds)), size(up), size(down)])
    return Table("Bytes of each member, all rounds", ["member", "rounds that counted it", "up", "down"], rows)


def _privacy(found: Watched) -> Section:
    """The epsilon by round, and at most of each member."""
    title, last = "How much do the uploads reveal at most?", found.rounds[-1].federation
    if last.get("epsilon") is None:
        note = "The run adds no noise to uploads, so no epsilon bounds what they reveal."
        return Section("privacy", "Epsilon", title, [], notes=[note])
    names = {"epsilon": "towards everybody else", "epsilon_server": "towards the server"}
    lines = [
        Line(text, [r.federation.get(name) for r in found.rounds], colour=place, dash=place)
        for place, (name, text) in enumerate(names.items())
    ]
    about = "After each round, for a member whose upload was in every round so far."
    x = [float(r.number) for r in found.rounds]
    chart = Lines("epsilon", "Epsilon by round", about, x, "epsilon", lines, "", 2)
    rows = []
    for client, name in sorted(_everyone(found).items()):
        uploads = sum(client in r.clients for r in found.rounds)
        rows.append([name, str(uploads), *(number(last.get(n) if uploads else 0.0, ".2f") for n in names)])
    head = ["member", "uploads in this run", *(f"epsilon {text}, at most" for text in names.values())]
    note = (
        "Of this run alone, as the server counts. What a member's data have spent over all runs is in its own ledger, "
        "which does not leave its node: the command copfl federate status shows it there."
    )
    return Section(
        "privacy", "Epsilon", title, [chart], [Table("Epsilon of each member", head, rows)], [note]
    )


def _benefit(found: Watched) -> Section:
    """What each member is worth to the others, beside the other numbers of it."""
    title, contributed = "What is each member worth to the others?", contributions_of(found)
    is_summed = any(record.is_summed for record in found.rounds)
    if contributed is None:
        when = "when the run has ended: then the nodes add up what they conclude from their losses"
        note = (
            f"With secure sums the benefit is known {when}."
            if is_summed
            else "No round has compared halves yet."
        )
        return Section("benefit", "Benefit", title, [], notes=[note])
    table, notes = contributions.table(contributed), [OWN_GAIN]
    notes += [HIDDEN] if is_summed else []
    return Section("benefit", "Benefit", title, [contributions.chart(contributed)], [table], notes)


def contributions_of(found: Watched) -> contributions.Contributions | None:
    """What the server knows of each member's part in the run; None where the benefit is not measured, or not yet."""
    summed = None
    if found.benefit:
        with raised_as(
            RunError, f"{BENEFIT} is damaged: {{}}; restore it, or remove it", KeyError, ValueError
        ):
            value, error = (np.array(found.benefit[name], np.float64) for name in ("value", "error"))
            summed = Benefit(value, error, int(found.benefit["freedom"]))
    clients = 1 + max(_everyone(found), default=-1)
    return contributions.contributions(
        [_line(record) for record in found.rounds],
        [found.name(client) for client in range(clients)],
        _samples(found, clients),
        None,
        _metric(found),
        summed,
    )


def _line(record: RoundRecord) -> dict[str, Any]:
    """A round as a line of rounds.jsonl, with what contributions are made of."""
    return {
        "round": record.number,
        "clients": list(record.clients),
        "left_out": list(record.left_out),
        "per_client": {
            name: [values[client] for client in record.clients] for name, values in record.per_client.items()
        },
    }


def _samples(found: Watched, clients: int) -> list[float] | None:
    """The last number of samples of each member; None where no upload has it."""
    known: dict[int, float] = {}
    for record in found.rounds:
        known |= {n: value for n, value in record.per_client.get(SAMPLES, {}).items() if value is not None}
    return [known.get(client, math.nan) for client in range(clients)] if known else None


def _scores(found: Watched) -> Iterator[Chart]:
    """The weights of members as shares of a round, and the scores behind them."""
    for metric, meaning in SCORES.items():
        values = _by_member(found, metric, 1.0, as_share=metric == "weight")
        if not values:
            continue
        what = metric.replace("_", " ")
        title = f"{capital(what)} of each member by round, without an interval"
        chart = _heat(found, metric, title, f"{meaning}.", values, what)
        if metric == "weight":
            count = int(np.median([len(r.clients) for r in found.rounds]))
            mark = f"mark: the equal share 1/{count} = {1 / count:.3f}"
            chart = chart._replace(what="share of the weights", centre=1 / count, centre_title=mark)
        yield chart._replace(digits=3)


def _log(found: Watched) -> Table:
    events = found.log.events
    rows = [
        [_moment(event["at"], found), str(event["event"]).replace("_", " "), _told(event, found)]
        for event in reversed(events)
    ]
    chain = found.log.problem or "no line was changed or removed"
    notes = [f"{len(events)} lines; {chain}; last hash {found.log.last_hash[:16]}"]
    if len(rows) > LOG_LINES:
        notes.append(f"The last {LOG_LINES} lines; runs/{found.run}/audit.jsonl has all")
    return Table(
        "The server's audit log, the last line first",
        ["at", "event", "what"],
        rows[:LOG_LINES],
        notes,
        numeric=False,
    )


def _told(event: Mapping[str, Any], found: Watched) -> str:
    """An event in words; its fields come from a file, and any may be missing."""
    parts = []
    if "round" in event:
        parts.append(f"round {event['round']}")
    if "client" in event:
        known = event["client"]
        parts.append(found.name(known) if type(known) is int else str(known))
    if event["event"] == Event.ROUND_STARTED:
        clients = event.get("clients")
        parts.append(f"{len(clients)} members asked" if isinstance(clients, list) else "")
    if event["event"] == Event.ROUND_ENDED:
        accepted = event.get("accepted")
        parts.append(f"{len(accepted)} uploads" if isinstance(accepted, list) else "")
    if "node" in event:
        parts.append(f"node {event['node']}")
    if type(event.get("bytes")) is int:
        parts.append(size(event["bytes"]))
    if "reason" in event:
        parts.append(str(event["reason"]))
    return ", ".join(filter(None, parts)) or "-"


# -- numbers and times ---------------------------------------------------------------------------------------


def _metric(found: Watched) -> MetricInfo:
    """The primary metric; one of the user's own is shown as it is, without a unit."""
    name = found.rounds[-1].metric if found.rounds else "accuracy"
    return METRICS.get(name) or MetricInfo(name, fraction=False)


def _mean(found: Watched, rounds: Sequence[RoundRecord]) -> str:
    """Such as "65.0 %"; empty where no value is known."""
    metric = _metric(found)
    value = rounds[-1].mean.get(metric.name) if rounds else None
    return "" if value is None else f"{metric.text(value)}{metric.unit}"


def _everyone(found: Watched) -> dict[int, str]:
    """The members, and whoever was a client of a round."""
    seen = {client for r in found.rounds for client in (*r.clients, *r.left_out)}
    return {client: found.name(client) for client in seen | found.names.keys()}


def _by_member(found: Watched, name: str, factor: float, as_share: bool = False) -> dict[str, list[Value]]:
    """A metric of each member in every round; none of a metric that no node sends."""
    if not any(name in r.per_client for r in found.rounds):
        return {}
    table: dict[str, list[Value]] = {}
    for client, label in sorted(_everyone(found).items()):
        row: list[Value] = []
        for record in found.rounds:
            values = record.per_client.get(name, {})
            whole = sum(value or 0.0 for value in values.values()) if as_share else 1.0
            row.append(_times(values.get(client), factor, whole) if whole else None)
        table[label if label not in table else f"{label} (client {client})"] = row
    return table


def _heat(
    found: Watched,
    name: str,
    title: str,
    about: str,
    values: Mapping[str, Sequence[Value]],
    what: str,
    unit: str = "",
) -> Heat:
    columns = [str(r.number) for r in found.rounds[-HEAT_ROUNDS:]]
    cells = [row[-HEAT_ROUNDS:] for row in values.values()]
    about += f" The last {HEAT_ROUNDS} rounds." if len(found.rounds) > HEAT_ROUNDS else ""
    return Heat(name, title, about, list(values), columns, cells, what, "round", unit, row_title="member")


def _times(value: float | None, factor: float, whole: float = 1.0) -> Value:
    """The value times the factor, of a whole; None where that is no number: members may report any."""
    product = math.nan if value is None else factor * (value / whole)
    return product if math.isfinite(product) else None


def _clock(at: datetime.datetime | None, found: Watched) -> str:
    """The time, with the date if it is another day than that of the page."""
    if at is None:
        return "-"
    return f"{at:%H:%M:%S}" if at.date() == found.at.date() else f"{at:%Y-%m-%d %H:%M:%S}"


def _moment(text: str, found: Watched) -> str:
    return _clock(datetime.datetime.fromisoformat(text).astimezone(datetime.UTC), found) if text else ""


def _age(since: datetime.datetime | None, now: datetime.datetime) -> str:
    return span(max(0.0, (now - since).total_seconds())) if since else "-"
