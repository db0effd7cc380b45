"""The state of a federation's server or of a node, as `copfl federate status` prints it. Without torch.

`status` is the state as numbers and texts, for --json too; `as_text` are the lines for people.
"""

import contextlib
import datetime
import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.federation.node.acceptance import pending
from copfl.federation.node.ledger import Spent, spent
from copfl.federation.operations.watched import LATE_AFTER, Watched, read
from copfl.federation.policy.file import policy_of
from copfl.federation.protocol.app_folder import (
    CONTACT,
    LAST_ERROR,
    WAITS,
    is_locked,
    is_node,
)
from copfl.federation.protocol.chained_log import AUDIT, CHAIN, verified
from copfl.federation.protocol.messages import printable, read_json
from copfl.federation.protocol.node_config import WORKER
from copfl.federation.server.certificates import expiry_warnings

CONTACT_TIMEOUT = 60.0  # seconds without contact after which a node is not well


def status(folder: Path, run: str | None = None, waiting: float = math.inf) -> dict[str, Any]:
    """The state of the server or the node in the folder; "problems" is empty if all is well.

    Args:
        folder: Of the app on the server, or the state-dir of a node.
        run: The name of a run; None: the last one.
        waiting: Seconds after which a round that waits for a client is a problem.
    """
    if is_node(folder):
        return _of_node(folder)
    return _of_server(folder, run, waiting)


# -- the server ----------------------------------------------------------------------------------------------


def _of_server(folder: Path, run: str | None, waiting: float) -> dict[str, Any]:
    watched = read(folder, run)
    problems = [] if watched.answers else [f"no SuperLink answers at {watched.address}"]
    result: dict[str, Any] = {
        "kind": "server",
        "superlink": {"address": watched.address, "answers": watched.answers},
        "runs": list(watched.runs),
        "other_runs": list(watched.other_runs),
    }
    result["invited"] = {site.invitation.site: site.state for site in watched.invited}
    if watched.run:
        result |= {"run": watched.run, **_of_run(watched)}
        if (longest := max(result["waiting_for"].values(), default=0.0)) > waiting:
            who = ", ".join(_named(result, client) for client in result["waiting_for"])
            problems.append(f"a round has waited for {longest:.0f} s, for clients {who}")
        problems += [watched.log.problem] if watched.log.problem else []
        problems += [f"the run {watched.state}"] if watched.state in ("failed", "was interrupted") else []
    result["certificates"] = {name: end.isoformat() for name, end in watched.certificates.items()}
    return result | {"problems": problems + expiry_warnings(watched.certificates, watched.at)}


def _of_run(watched: Watched) -> dict[str, Any]:
    """The state of one run."""
    history, is_running = watched.history, watched.is_running
    seconds = [event["seconds"] for event in history.rounds.values()]
    waiting: dict[str, float] = {}  # the clients without an answer in the present round, and since when
    if is_running and history.current is not None:
        started = datetime.datetime.fromisoformat(history.current.started).timestamp()
        waiting = dict.fromkeys(map(str, history.current.missing), round(time.time() - started, 1))
    clients = {
        str(number): {
            "last_round": client.last_round,
            "connected": is_running and client.is_connected,
            "node": client.node,
            "since": client.since,
        }
        for number, client in sorted(history.clients.items())
    }
    return {
        "state": watched.state,
        "rounds": {
            "done": max((record.number for record in watched.rounds), default=0),
            "of": watched.planned,
        },
        "seconds_per_round": statistics.median(seconds) if seconds else None,
        "clients": clients,
        "names": {str(number): name for number, name in watched.names.items()},
        "refused_nodes": history.refused,
        "waiting_for": waiting,
        "late": _late(waiting, history.rounds, seconds),
        "last_round": _line(history.rounds[max(history.rounds)]) if history.rounds else None,
        "last_error": _line(history.last_error) if history.last_error else None,
        "audit": {
            "lines": len(watched.log.lines),
            "problem": watched.log.problem,
            "last_hash": watched.log.last_hash,
        },
    }


def _late(
    waiting: dict[str, float], rounds: Mapping[int, Mapping[str, Any]], seconds: list[float]
) -> dict[str, str]:
    """The clients that did not answer in the last round, or take twice as long as a round does."""
    if not rounds:
        return {}
    number, left_out = max(rounds), rounds[max(rounds)]["left_out"]
    late = {client: f"round {number}: {why}" for client, why in left_out.items() if "no reply" in why}
    limit = max(LATE_AFTER, 2 * statistics.median(seconds))
    slow = {client: age for client, age in waiting.items() if age > limit}
    return late | {client: f"round {number + 1}: no answer for {age:.0f} s" for client, age in slow.items()}


def _line(event: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in CHAIN}


# -- a node --------------------------------------------------------------------------------------------------


def _of_node(folder: Path) -> dict[str, Any]:
    worker, is_running = folder / WORKER, is_locked(folder / WORKER / "lock")
    contact = None
    with contextlib.suppress(OSError):
        contact = round(time.time() - (worker / CONTACT).stat().st_mtime, 1)
    runs = {p.parent.name: 0 for p in folder.glob("*/client.json")}
    for path in sorted(folder.glob("*/round-*.copfl")):
        number = path.stem.removeprefix("round-")
        if number.isdecimal():
            runs[path.parent.name] = int(number) + 1
    problems = [] if is_running else ["the node is not running"]
    audit = None
    if (folder / AUDIT).exists():
        log = verified(folder / AUDIT)
        audit = {"lines": len(log.lines), "problem": log.problem, "last_hash": log.last_hash}
        problems += [f"{AUDIT}: {log.problem}"] if log.problem else []
    is_training, waits = (worker / "message").exists(), ""
    with contextlib.suppress(OSError):
        waits = printable((worker / WAITS).read_text(errors="replace"))
    if is_running and not is_training and (contact is None or contact > CONTACT_TIMEOUT):
        since = "yet" if contact is None else f"for {contact:.0f} s"
        problems.append(waits or f"the node has no contact with its server {since}")
    privacy = spent(folder, policy_of(None, folder).privacy)
    return {
        "kind": "node",
        "running": is_running,
        "training": is_running and is_training,
        "seconds_since_contact": contact,
        "not_connected": waits if is_running else "",  # why; empty: it is, or is not running
        "runs": runs,  # by name: the last round that it trained
        "audit": audit,
        "waiting_proposals": [signed.proposal.digest for signed in pending(folder)],
        "privacy": privacy._asdict() if privacy else None,  # what its data have spent
        "last_error": read_json(worker / LAST_ERROR) or None,
        "problems": problems,
    }


# -- as text -------------------------------------------------------------------------------------------------


def as_text(state: dict[str, Any]) -> str:
    """The state in a few lines."""
    lines = _node_lines(state) if state["kind"] == "node" else _server_lines(state)
    error = state.get("last_error")
    if error:
        named = [f"{key} {error[key]}" for key in ("round", "client", "node") if key in error]
        where = ", ".join([str(error.get("event", "")), *named]).strip(", ")
        lines.append(f"last error  {error.get('at', '')} {where}: {printable(error.get('reason', ''))}")
    lines += [f"problem     {problem}" for problem in state["problems"]]
    return "\n".join(lines)


def _node_lines(state: dict[str, Any]) -> list[str]:
    contact = state["seconds_since_contact"]
    lines = [
        f"node        {'training' if state['training'] else 'running' if state['running'] else 'not running'}"
    ]
    lines += [f"contact     {contact:.0f} s ago"] if contact is not None else []
    lines += [f"run         {name}: trained in round {n}" for name, n in state["runs"].items()]
    lines += [
        f"waiting     proposal {digest[:16]}: `copfl site approve`" for digest in state["waiting_proposals"]
    ]
    lines += [f"privacy     {Spent(**state['privacy'])}"] if state["privacy"] else []
    return lines + ([_audit_line(state["audit"])] if state["audit"] else [])


def _audit_line(audit: dict[str, Any]) -> str:
    intact = "no line changed or removed" if not audit["problem"] else "DAMAGED"
    return f"audit log   {audit['lines']} lines, {intact}; last hash {audit['last_hash'][:16]}"


def _server_lines(state: dict[str, Any]) -> list[str]:
    superlink = state["superlink"]
    lines = [f"SuperLink   {superlink['address']} {'answers' if superlink['answers'] else 'does not answer'}"]
    lines += [f"certificate {name} is valid until {end[:10]}" for name, end in state["certificates"].items()]
    lines += [f"invited     {site}: {how_far}" for site, how_far in state["invited"].items()]
    for other in state["other_runs"]:
        ended = f"ended: {other['details'] or 'no details'}" if other["ended"] else "has not begun"
        lines.append(
            f"other run   {other['run']}, app {other['app']}, submitted {other['submitted']}, {ended}"
        )
    if "run" not in state:
        return [*lines, "runs        none yet"]
    rounds, last, audit = state["rounds"], state["last_round"], state["audit"]
    others = f" ({len(state['runs'])} runs in all)" if len(state["runs"]) > 1 else ""
    lines += [f"run         {state['run']} {state['state']}{others}"]
    median = state["seconds_per_round"]
    lines += [
        f"rounds      {rounds['done']} of {rounds['of'] or '?'}"
        + (f", {median:.1f} s each" if median is not None else "")
        + (f", {last['metric']} {last['value']:.4f}" if last and last["value"] is not None else "")
    ]
    for client, client_state in state["clients"].items():
        connection = (
            "connected"
            if client_state["connected"]
            else "left"
            if state["state"] == "is running"
            else "joined"
        )
        counted = (
            f"; last counted in round {client_state['last_round']}" if client_state["last_round"] else ""
        )
        since = f"{connection} {client_state['since']}, node {client_state['node']}{counted}"
        lines.append(f"client {_named(state, client):<4} {since}")
    lines += [f"refused     node {node}: {reason}" for node, reason in state["refused_nodes"].items()]
    if state["waiting_for"]:
        seconds = max(state["waiting_for"].values())
        who = ", ".join(_named(state, client) for client in state["waiting_for"])
        lines.append(f"waiting     for clients {who}, {seconds:.0f} s")
    lines += [f"late        client {_named(state, client)}: {why}" for client, why in state["late"].items()]
    return [*lines, _audit_line(audit)]


def _named(state: dict[str, Any], client: str) -> str:
    """A client's number and name, as the lines and problems have it."""
    return f"{client} ({printable(state['names'][client])})" if client in state["names"] else client
