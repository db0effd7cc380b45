"""What the folder of a federation's server says of a run, for `copfl federate status` and the page of `watch`.

Without torch. Names, reasons and metrics come from other machines; the page that shows them escapes them.
"""

import contextlib
import datetime
import socket
import sqlite3
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from copfl.errors import CopflError, RunError
from copfl.federation.operations.history import ClientHistory, RunHistory, history_of
from copfl.federation.protocol import proposal
from copfl.federation.protocol.app_folder import (
    AGREEMENTS,
    DATABASE,
    is_locked,
    is_node,
    read_app,
    run_names,
    superlink_address,
)
from copfl.federation.protocol.chained_log import AUDIT, NO_LOG, Verified, verified
from copfl.federation.protocol.keys import fingerprint, read_public
from copfl.federation.protocol.messages import parsed, printable, read_json
from copfl.federation.protocol.proposal import Proposal
from copfl.federation.protocol.round_record import ROUNDS, RoundRecord, read_rounds
from copfl.federation.server.certificates import expiries, expiry_warnings
from copfl.federation.server.invitations import ANSWERS, INVITATIONS, InvitedSite, invited
from copfl.federation.server.membership import COORDINATOR, PROPOSALS, SIGNED, Roster, read_roster
from copfl.federation.server.membership import FILE as MEMBERS

CONFIG = "config.json"  # in the run's folder
LOCK = ".lock"
LATE_AFTER = 10.0  # seconds that a client may need in any case

# States of a member.
TRAINING, ANSWERED, LEFT_OUT = "training", "has answered", "left out"
ABSENT, NOT_SELECTED, READY = "not connected", "not selected", "connected"
DONE, NOT_COUNTED, REVOKED, NO_MEMBER = "done", "never counted", "revoked", "not in this run"


class MemberState(NamedTuple):
    """A member of a run."""

    number: int
    name: str
    fingerprint: str  # of its key; empty: nobody signed who is a member
    state: str
    reason: str = ""  # why it is left out
    since: datetime.datetime | None = None  # when this state began
    is_waited_for: bool = False
    is_late: bool = False
    last_answer: datetime.datetime | None = None
    last_round: int | None = None  # that counted its upload


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A federation's run at one moment."""

    folder: Path
    at: datetime.datetime
    run: str  # empty: there is none yet
    runs: Sequence[str]
    is_running: bool
    state: str  # what can be said after "the run"
    history: RunHistory
    reason: str  # why it failed
    proposal: Proposal | None  # what the coordinator signed
    settings: Mapping[str, Any]  # the run config, by path
    roster: Roster
    invited: Sequence[InvitedSite]  # the sites that were invited, and how far they are
    members: Sequence[MemberState]
    rounds: Sequence[RoundRecord]
    log: Verified
    address: str  # of the SuperLink
    answers: bool  # whether it does
    other_runs: Sequence[Mapping[str, Any]]  # of the SuperLink, without a folder
    certificates: dict[str, datetime.datetime]  # when they expire
    problems: Sequence[str]
    remarks: Sequence[str]  # on the server, without a run in which they matter

    @property
    def planned(self) -> int | None:
        """The number of rounds of the run."""
        planned = self.history.planned or self.settings.get("run.rounds")
        return planned if type(planned) is int else None

    @property
    def names(self) -> dict[int, str]:
        """What clients are called, by number."""
        return {member.number: member.name for member in self.members}

    def name(self, client: int) -> str:
        return self.names.get(client, f"client {client}")

    def needed(self, selected: int) -> int:
        """The replies that a round needs.

        Args:
            selected: How many clients it selects.
        """
        return needed_replies(self.settings, selected)


def read(folder: Path, run: str | None = None) -> Watched:
    """The state of a run, by default of the last one; RunError if the folder is no server's.

    Args:
        folder: Of the app on the server.
        run: The name of a run; None: the last one.
    """
    if is_node(folder):
        raise RunError(f"{folder} is the state-dir of a node; name the app's folder on the server")
    app, now = read_app(folder), datetime.datetime.now(datetime.UTC)
    runs = run_names(folder / "runs")
    if run is not None and run not in runs:
        raise RunError(f'no run "{run}" in {folder / "runs"}; there are: {", ".join(runs) or "none"}')
    name = run or (runs[-1] if runs else "")
    path = folder / "runs" / name
    is_running = bool(name) and is_locked(path / LOCK)
    log = verified(path / AUDIT) if name and (path / AUDIT).exists() else NO_LOG
    history, roster = history_of(log.lines), read_roster(folder)
    rounds = read_rounds(path / ROUNDS) if name and (path / ROUNDS).exists() else []
    signed, problem = _signed(folder, path, name) if name else (None, "")
    unlogged = [
        r.number for r in rounds if (history.first_round or r.number + 1) <= r.number not in history.rounds
    ]
    removed = f"round {unlogged[0]} is not in {AUDIT}: lines were removed" if unlogged else ""
    broken = f"{AUDIT}: {log.problem}" if log.problem else removed
    certificates = expiries(folder / "keys")
    problems = [*filter(None, (broken, problem)), *expiry_warnings(certificates, now)]
    host, port = superlink_address(folder, app)
    has_answered, others = answers(host, port), other_runs(folder)
    remarks = [] if has_answered else [f"no SuperLink answers at {host}:{port}"]
    remarks += [
        f"the SuperLink has the run {other['run']}, which "
        + (f"ended: {other['details'] or 'no details'}" if other["ended"] else "has not begun")
        for other in others
    ]
    settings = (
        signed.settings
        if signed
        else read_json(path / CONFIG)
        if name
        else proposal.settings_in(app["config"])
    )
    needed = needed_replies(settings, len(history.current.selected)) if history.current else 0
    failed = history.last_error if history.state(is_running=is_running) == "failed" else None
    return Watched(
        folder=folder,
        at=now,
        run=name,
        runs=runs,
        is_running=is_running,
        state=history.state(is_running=is_running) if name else "has not begun",
        history=history,
        reason=str(failed.get("reason", "")) if failed else "",
        proposal=signed,
        settings=settings,
        roster=roster,
        invited=invited(folder),
        members=_members(signed, roster, history, is_running, needed, now),
        rounds=rounds,
        log=log._replace(problem=broken),
        address=f"{host}:{port}",
        answers=has_answered,
        other_runs=others,
        certificates=certificates,
        problems=problems + (remarks if is_running else []),
        remarks=[] if is_running else remarks,
    )


def fingerprint_of(folder: Path, run: str | None = None) -> str:
    """A text that changes when there is news; while a run continues, every five seconds, as people wait.

    Args:
        folder: Of the app on the server.
        run: The name of a run; None: the last one.
    """
    runs = run_names(folder / "runs")
    name = run or (runs[-1] if runs else "")
    path, states = folder / "runs" / name, [name]
    files = [path / file for file in (AUDIT, ROUNDS, CONFIG, SIGNED)]
    answered = [*(folder / INVITATIONS).glob("*"), *(folder / ANSWERS).rglob("*.json")]
    for file in (*files, *answered, folder / MEMBERS, folder / PROPOSALS / f"{name}.json"):
        with contextlib.suppress(OSError):
            state = file.stat()
            states.append(f"{file.name} {state.st_size} {state.st_mtime_ns}")
    now = datetime.datetime.now().timestamp()
    states.append(f"running {now // 5}" if name and is_locked(path / LOCK) else f"ended {now // 60}")
    return fingerprint("\n".join(states))


def _signed(folder: Path, path: Path, run: str) -> tuple[Proposal | None, str]:
    """A run's proposal and what is wrong with it: as the server received it, or the coordinator wrote it."""
    for file in (path / SIGNED, folder / PROPOSALS / f"{run}.json"):
        if file.exists():
            try:
                signed = proposal.read(file.read_bytes()).proposal
                public_file = folder / "keys" / f"{COORDINATOR}.pub"
                is_other = public_file.exists() and read_public(public_file) != signed.coordinator
                who = f"{fingerprint(signed.coordinator)}, who is not the coordinator of {public_file.name}"
                return signed, f"the run is signed by {who}" if is_other else ""
            except (CopflError, OSError) as error:
                return None, f"{file.name} of this run: {error}"
    return None, ""


# -- the SuperLink -------------------------------------------------------------------------------------------


class SubmittedRun(NamedTuple):
    """A run in the SuperLink's database; its name is as it was submitted, other texts are printable."""

    name: str
    flower_run: int  # Flower's number of it
    app: str
    submitted: str
    has_ended: bool
    details: str  # how it ended


def submitted_runs(folder: Path) -> list[SubmittedRun]:
    """All runs that the SuperLink of the folder was asked for, in order."""
    database = folder / DATABASE
    if not database.exists():
        return []
    columns = "run.run_id, run.fab_id, run.override_config, task.pending_at, task.finished_at, task.details"
    both = "run LEFT JOIN task ON task.task_id = run.primary_task_id"
    query = f"SELECT {columns} FROM {both} ORDER BY task.pending_at"
    runs = []
    with (
        contextlib.suppress(sqlite3.Error),  # of another version of Flower
        contextlib.closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as connection,
    ):
        for number, app, config, at, finished, details in connection.execute(query):
            flower_run = int(number) % 2**64  # the database has no unsigned numbers
            run_config = parsed(str(config))
            name = str(run_config.get("session.run") or run_config.get("run") or f"run-{flower_run}")
            texts = printable(app, 100), str(at), bool(finished), printable(details or "", 200)
            runs.append(SubmittedRun(name, flower_run, *texts))
    return runs


def other_runs(folder: Path) -> list[dict[str, Any]]:
    """The SuperLink's runs that have no folder: somebody submitted them, and they have not begun."""
    return [
        {
            "run": printable(run.name, 100),
            "flower_run": str(run.flower_run),
            "app": run.app,
            "submitted": run.submitted,
            "ended": run.has_ended,
            "details": run.details,
        }
        for run in submitted_runs(folder)
        if not any((folder / runs_folder / run.name).is_dir() for runs_folder in ("runs", AGREEMENTS))
    ]


def answers(host: str, port: int) -> bool:
    """Whether a server accepts connections there.

    Args:
        host: Its name or address.
        port: Its port.
    """
    for name in dict.fromkeys((host, "127.0.0.1")):  # a server may not reach its own public address
        with contextlib.suppress(OSError), socket.create_connection((name, port), timeout=2):
            return True
    return False


# -- members -------------------------------------------------------------------------------------------------


def _members(
    signed: Proposal | None,
    roster: Roster,
    history: RunHistory,
    is_running: bool,
    needed: int,
    now: datetime.datetime,
) -> list[MemberState]:
    """The members of the signed proposal, then those admitted since; without both, the clients of the log.

    Args:
        signed: The proposal.
        roster: Who is admitted, and whose key is revoked.
        history: The events of the run.
        is_running: Whether a server has the run's folder.
        needed: Number of replies that a round needs.
        now: When all this was read.
    """
    begun = bool(history.last_event)
    by_number = {other.number: other for other in (signed.members if signed else ())}
    for other in roster.members:
        by_number.setdefault(other.number, other)
    in_run = {m.number for m in signed.members} if signed else by_number.keys() | history.clients.keys()
    seconds = [float(event["seconds"]) for event in history.rounds.values()]
    limit = max(LATE_AFTER, 2 * statistics.median(seconds)) if seconds else LATE_AFTER
    states = []
    for number in sorted(by_number.keys() | history.clients.keys()):
        member = by_number.get(number)
        state = MemberState(number, f"client {number}", "", ABSENT)
        if member is not None:
            state = state._replace(name=member.name, fingerprint=fingerprint(member.key))
        if member is not None and member.key in roster.revoked:
            state = state._replace(state=REVOKED)
        elif number not in in_run and begun:
            state = state._replace(state=NO_MEMBER)
        else:
            state = _in_run(state, history, is_running)
        client = history.clients.get(number, ClientHistory())
        waited = (now - state.since).total_seconds() if state.since else 0.0
        states.append(
            state._replace(
                last_answer=_time(client.last_answer),
                last_round=client.last_round,
                is_late=state.is_waited_for and waited > limit,
            )
        )
    if sum(other.state in (ANSWERED, TRAINING) for other in states) >= needed:
        # The round ends without the others.
        states = [
            other._replace(is_waited_for=False, is_late=False) if other.state in (ABSENT, LEFT_OUT) else other
            for other in states
        ]
    return states


def needed_replies(settings: Mapping[str, Any], selected: int) -> int:
    """The replies that a round needs, as `copfl.settings.federation` defines it.

    Args:
        settings: The run config, by path.
        selected: How many clients the round selects.
    """
    is_secure = bool(settings.get("secure.aggregation"))
    usual = selected if is_secure else (selected + 1) // 2
    needed = int(settings.get("network.min_replies") or usual)
    return max(needed, int(settings.get("secure.threshold") or 0)) if is_secure else needed


def _in_run(member: MemberState, history: RunHistory, is_running: bool) -> MemberState:
    """What a member does now, and since when."""
    client, current = history.clients.get(member.number), history.current
    if not is_running:
        counted = client is not None and client.last_round is not None
        state = DONE if counted else NOT_COUNTED if history.last_event else ABSENT
        return member._replace(state=state)
    joined = _time(client.since) if client else None
    if current is None:  # between two rounds
        is_here = client is not None and client.is_connected
        return member._replace(state=READY if is_here else ABSENT, since=joined)
    started = _time(current.started)
    if member.number not in current.selected:
        return member._replace(state=NOT_SELECTED, since=started)
    if member.number in current.answered:
        return member._replace(state=ANSWERED, since=_time(client.last_answer) if client else None)
    if member.number not in current.missing:
        return member._replace(state=ANSWERED)
    member = member._replace(is_waited_for=True)
    if client is None or not client.is_connected:
        return member._replace(state=ABSENT, since=joined or started)
    if member.number in current.left_out:
        since = _time(client.last_answer)
        return member._replace(state=LEFT_OUT, reason=current.left_out[member.number], since=since)
    return member._replace(state=TRAINING, since=max(filter(None, (joined, started)), default=None))


def _time(text: str) -> datetime.datetime | None:
    return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC) if text else None
