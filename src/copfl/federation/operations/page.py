"""The coordinator's page: a federation's members, rounds and audit log, during a run and afterwards.

`copfl federate watch` serves a `FederationPage`, or writes it to a file.
"""

import datetime
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from copfl.experiment.progress import span
from copfl.federation.operations.sections import NAMED, clock, mean_text, metric_of, moment, sections
from copfl.federation.operations.watched import (
    ABSENT,
    ANSWERED,
    MemberState,
    Watched,
    fingerprint_of,
    read,
)
from copfl.federation.protocol.keys import fingerprint
from copfl.federation.protocol.proposal import members_fingerprint
from copfl.federation.server.invitations import ADMITTED
from copfl.report.document import Document, render
from copfl.settings.flat import nested
from copfl.tables import Table, capital, listed, size

TABLES = ("algorithm", "optimizer", "model", "robust", "privacy", "network", "secure")


class FederationPage:
    """The page of the app in a folder, for `copfl.report.serving`.

    Args:
        folder: The folder of the app, on the server.
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


def document_of(watched: Watched) -> Document:
    """The page of a federation at one moment."""
    state = _sentences(watched)
    return Document(
        title=f"Federation {watched.folder.resolve().name}" + (f", run {watched.run}" if watched.run else ""),
        subtitle=f"{_who(watched)}; as of {watched.at:%Y-%m-%d %H:%M:%S}, all times are UTC",
        conclusion=state,
        tiles=_tiles(watched),
        tables=[*_invited(watched), *_members(watched), *_refused(watched)],
        notes=[f"{capital(remark)}." for remark in watched.remarks],
        facts=_facts(watched),
        sections=list(sections(watched)) if watched.run else [],
        heading="State",
        problems=[f"{capital(problem)}." for problem in watched.problems],
        news=" ".join(state[:2]),
    )


def _who(watched: Watched) -> str:
    """The algorithm, the members, and who signed the run."""
    tables = nested(watched.settings)
    words = [str(tables.get("algorithm", {}).get("name", "")), f"{len(watched.members)} members"]
    if watched.proposal is not None:
        words.append(f"signed by coordinator {fingerprint(watched.proposal.coordinator)}")
    elif watched.run:
        words.append("signed by nobody")
    return ", ".join(filter(None, words))


def _sentences(watched: Watched) -> list[str]:
    """What happens now, who is waited for, and how far the metric is."""
    if not watched.run:
        count = len(watched.members)
        members = f"{count} member{'s' * (count != 1)} admitted" if count else "nobody is admitted yet"
        missing = sum(site.state != ADMITTED for site in watched.invited)
        if watched.invited and not missing:
            return [
                f"All sites that were invited are admitted. Agree and train: {_command(watched)}",
                _unanswered(watched),
            ]
        still = f", {missing} invited site{'s are' if missing > 1 else ' is'} missing" if missing else ""
        return [f"No run has begun; {members}{still}.", *([_unanswered(watched)] if watched.invited else [])]
    done, of = len(watched.rounds), watched.planned or "?"
    lines = []
    if watched.is_running and watched.history.current is not None:
        lines.append(f"Round {watched.history.current.number} of {of} is running.")
        lines.append(_waiting(watched))
    elif watched.is_running:
        lines.append(f"{done} of {of} rounds have ended; the run is running.")
        if away := [member.name for member in watched.members if member.state == ABSENT]:
            lines.append(f"Not connected: {listed(away, NAMED)}.")
    else:
        why = f": {watched.reason}" if watched.reason else ""
        lines.append(f"The run {watched.state} after {done} of {of} rounds{why}.")
        if watched.invited:  # else it may be a trial, which has a command of its own
            further = f"Train again: {_command(watched)}"
            if watched.state != "ended":
                further = f"Continue it: {_command(watched)} --resume --run {watched.run}"
            lines.append(further)
    if mean := mean_text(watched, watched.rounds[-1:]):
        lines.append(
            f"Mean {metric_of(watched).title} of the clients in round {watched.rounds[-1].number}: {mean}."
        )
    return lines


def _command(watched: Watched) -> str:
    """The one command with which the sites agree on what the contract leaves open, and train."""
    return f"copfl federate run {shlex.quote(str(watched.folder))}"


def _unanswered(watched: Watched) -> str:
    """What happens to a training if a site does not answer."""
    clients = int(watched.settings.get("run.clients") or len(watched.invited))
    minutes, needed = float(watched.settings.get("network.deadline") or 600) / 60, watched.needed(clients)
    told = f"If a site does not answer, a round waits at most {minutes:g} minutes for it"
    if watched.settings.get("secure.aggregation"):
        return f"{told}, and begins again when {needed} sites are there. Nothing is lost."
    return f"{told}, and ends without it when {needed} sites have answered. Nothing is lost."


def _waiting(watched: Watched) -> str:
    """Who waits for whom."""
    waited = [member for member in watched.members if member.is_waited_for]
    away = [member.name for member in watched.members if member.state == ABSENT and not member.is_waited_for]
    without = f" {listed(away, NAMED)} {'is' if len(away) == 1 else 'are'} not connected." if away else ""
    if not waited:
        return f"Every upload {'that is needed ' * bool(away)}has arrived; the server adds them up.{without}"
    if refused := len(watched.history.refused):
        return (
            f"It waits: {refused} node{'s take' if refused > 1 else ' takes'} no part, for the reason below."
        )
    names = listed([f"{member.name} ({_how(member, watched.at)})" for member in waited], NAMED)
    answered = [member.name for member in watched.members if member.state == ANSWERED]
    has = "has" if len(answered) == 1 else "have"
    others = (
        f" {listed(answered, NAMED)} {has} answered and wait{'s' * (len(answered) == 1)}." if answered else ""
    )
    return f"It waits for {names}.{others}{without}"


def _how(member: MemberState, now: datetime.datetime) -> str:
    """Such as "training for 0:42"."""
    return f"{member.state} for {_age(member.since, now)}" if member.since else member.state


def _tiles(watched: Watched) -> list[tuple[str, str, str]]:
    tiles = []
    if watched.run:
        since = moment(watched.history.last_at, watched)
        note = watched.reason or (f"last event {since}" if since else "")
        tiles.append(("run", watched.state.removeprefix("is ").removeprefix("was "), note))
        seconds = [record.seconds for record in watched.rounds]
        pace = f"{float(np.median(seconds)):.1f} s each (median)" if seconds else ""
        tiles.append(("rounds", f"{len(watched.rounds)} of {watched.planned or '?'}", pace))
    waited = [member for member in watched.members if member.is_waited_for]
    if watched.is_running and watched.history.current is not None:
        absent = [member.name for member in waited if member.state == ABSENT]
        away = f"not connected: {listed(absent, NAMED)}" if absent else ""
        tiles.append(("waits for", str(len(waited)), away))
    if watched.rounds:
        if mean := mean_text(watched, watched.rounds[-1:]):
            tiles.append((metric_of(watched).title, mean, "mean of the clients, last round"))
        up, down = (sum(getattr(r, way) for r in watched.rounds) for way in ("bytes_up", "bytes_down"))
        tiles.append(("traffic", size(up + down), f"{size(up)} up, {size(down)} down"))
        epsilon = watched.rounds[-1].federation.get("epsilon")
        if epsilon is not None:
            delta = watched.settings.get("privacy.delta")
            tiles.append(("epsilon", f"{epsilon:.2f}", f"of this run, at delta {delta}"))
    return tiles


def _invited(watched: Watched) -> Iterator[Table]:
    """Who was invited and is no member yet: how far, and what the coordinator does now."""
    rows = []
    for site in watched.invited:
        if site.state != ADMITTED:
            misfits = "; ".join(map(str, site.answer.misfits)) if site.answer else ""
            state = f"{site.state} ({misfits})" if misfits else site.state
            invitation = site.invitation
            rows.append(
                [
                    f"{invitation.number} {invitation.site}",
                    state,
                    site.what_to_do(watched.folder) or "-",
                    invitation.words,
                ]
            )
    notes = ["Of data that do not fit a site tells the names of the contract's columns, and no value."]
    if rows:
        yield Table(
            "Invited, and not admitted yet",
            ["site", "state", "what to do", "words to read out"],
            rows,
            notes,
            numeric=False,
        )


def _members(watched: Watched) -> Iterator[Table]:
    rows = []
    for member in watched.members:
        state = member.state + (f": {member.reason}" if member.reason else "") + " (late)" * member.is_late
        since = (
            f"{clock(member.since, watched)}, {_age(member.since, watched.at)} ago" if member.since else "-"
        )
        now = [since, "yes" if member.is_waited_for else "no"] if watched.is_running else []
        answered, counted = clock(member.last_answer, watched), str(member.last_round or "-")
        rows.append(
            [f"{member.number} {member.name}", state, *now, answered, counted, member.fingerprint or "-"]
        )
    present = ["since", "waited for"] if watched.is_running else []
    head = ["member", "state", *present, "last answer", "last counted in round", "fingerprint of its key"]
    revoked = len(watched.roster.revoked)
    notes = [f"{revoked} key{' is' if revoked == 1 else 's are'} revoked"] if revoked else []
    if rows or notes:
        yield Table("Members", head, rows, notes, numeric=False)


def _refused(watched: Watched) -> Iterator[Table]:
    """The nodes that take no part in the run, by the reason; each is asked again every half minute."""
    nodes: dict[str, list[str]] = {}
    for node, why in watched.history.refused.items():
        nodes.setdefault(why, []).append(node)
    rows = [[why, str(len(named)), listed(named, NAMED)] for why, named in nodes.items()]
    if rows:
        yield Table("Nodes that take no part", ["why", "nodes", "which"], rows, numeric=False)


def _facts(watched: Watched) -> Table | None:
    """Who signed the run, and its settings in short."""
    if not watched.run:
        return None
    signed, tables = watched.proposal, nested(watched.settings)
    rows = [["run", watched.run]]
    if signed is None:
        rows.append(["signed by", "nobody: the folder has no proposal of this run"])
    else:
        rows += [
            [
                "signed by",
                f"coordinator {fingerprint(signed.coordinator)}, at {moment(signed.issued, watched)}",
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
    if len(watched.runs) > 1:
        rows.append(["runs in the folder", listed(list(reversed(watched.runs)), NAMED)])
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


def _age(since: datetime.datetime | None, now: datetime.datetime) -> str:
    return span(max(0.0, (now - since).total_seconds())) if since else "-"
