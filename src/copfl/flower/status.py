"""The state of a federation, from the folder of its server or of a node. Without torch."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
import statistics
import time
import tomllib
from pathlib import Path
from typing import Any

from copfl.errors import RunError
from copfl.flower.events import AUDIT, Verified, verified
from copfl.flower.registry import Event
from copfl.flower.transport import printable
from copfl.flower.worker import FOLDER as WORKER

CONTACT, LAST_ERROR = "contact", "last-error.json"  # in the folder of a node's worker
LOCAL_HOME = ".flwr/local"  # of Flower's command, for a federation on one machine
SILENT = 60.0  # seconds without contact after which a node is not well
SLOW = 10.0  # seconds that a client may need in any case


def read_app(folder: Path) -> dict[str, Any]:
    """The data, host, port and security of the app in the folder, and its run config."""
    try:
        tool = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]
        return {**tool["copfl"], "config": tool["flwr"]["app"]["config"]}
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise RunError(
            f"{folder} holds no app of copfl ({error}); create one with `copfl federate init {folder}`"
        ) from error


def status(folder: Path, run: str | None = None) -> dict[str, Any]:
    """The state of the server or the node in the folder; "problems" is empty if all is well."""
    if is_node(folder):
        return _of_node(folder)
    return _of_server(folder, run)


def is_node(folder: Path) -> bool:
    """Whether the folder is the state-dir of a node."""
    return (folder / WORKER).is_dir() or any(folder.glob("*/client.json"))


def is_locked(path: Path) -> bool:
    """Whether a process has the lock; it is removed at the end, or left by a kill."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


# -- the server ----------------------------------------------------------------------------------------------


def _of_server(folder: Path, run: str | None) -> dict[str, Any]:
    app = read_app(folder)
    address = _address(folder, app)
    result: dict[str, Any] = {
        "kind": "server",
        "superlink": {"address": "{}:{}".format(*address), "answers": _answers(*address)},
        "runs": _runs(folder / "runs"),
    }
    problems = (
        [] if result["superlink"]["answers"] else [f"no SuperLink answers at {address[0]}:{address[1]}"]
    )
    name = run or (result["runs"][-1] if result["runs"] else None)
    if run and run not in result["runs"]:
        raise RunError(
            f'no run "{run}" in {folder / "runs"}; there are: {", ".join(result["runs"]) or "none"}'
        )
    if name:
        path = folder / "runs" / name
        found = verified(path / AUDIT) if (path / AUDIT).exists() else Verified([], "", "")
        result |= {"run": name, **_of_run(path, found)}
        problems += [result["audit"]["problem"]] if result["audit"]["problem"] else []
        problems += [f"the run {result['state']}"] if result["state"] in ("failed", "was interrupted") else []
    return result | {"problems": problems}


def _runs(path: Path) -> list[str]:
    """The names of the runs; the last one was written to last."""
    found = [p for p in path.glob("*") if (p / "config.json").exists() or (p / "rounds.jsonl").exists()]
    return [p.name for p in sorted(found, key=_changed)]


def _changed(run: Path) -> float:
    times = [path.stat().st_mtime for path in (run / AUDIT, run / "rounds.jsonl") if path.exists()]
    return max(times, default=run.stat().st_mtime)


def _address(folder: Path, app: dict[str, Any]) -> tuple[str, int]:
    """Where the SuperLink is: that of `up` while it runs, or the app's, seen from this machine."""
    if is_locked(folder / LOCAL_HOME / "lock"):
        with contextlib.suppress(OSError, KeyError, ValueError):
            text = (folder / LOCAL_HOME / "config.toml").read_text()
            host, _, port = tomllib.loads(text)["superlink"]["copfl"]["address"].rpartition(":")
            return host, int(port)
    return str(app["host"]), int(app["port"])


def _answers(host: str, port: int) -> bool:
    for name in dict.fromkeys((host, "127.0.0.1")):  # a server may not reach its own public address
        with contextlib.suppress(OSError), socket.create_connection((name, port), timeout=2):
            return True
    return False


def _of_run(path: Path, found: Verified) -> dict[str, Any]:
    """The state of one run, from its audit log; of an older run without one, from its rounds."""
    events, is_running = found.events, is_locked(path / ".lock")
    done = _finished_rounds(path)
    rounds = {e["round"]: e for e in events if e["event"] == Event.ROUND_ENDED}
    first = next((e["round"] for e in events if e["event"] == Event.STARTED), None)
    unlogged = [n for n in done if first is not None and first <= n and n not in rounds]
    problem = found.problem or (
        f"round {unlogged[0]} is not in {AUDIT}: lines were removed" if unlogged else ""
    )
    last = events[-1]["event"] if events else ""
    ended = {Event.ENDED: "ended", Event.FAILED: "failed"}.get(last, "was interrupted" if events else "ended")
    planned = _planned(path, events)
    clients, waiting = _clients(events), _waiting(events) if is_running else {}
    seconds = [e["seconds"] for e in rounds.values()]
    return {
        "state": "is running" if is_running else ended,
        "rounds": {"done": max(done, default=0), "of": planned},
        "seconds_per_round": statistics.median(seconds) if seconds else None,
        "clients": clients if is_running else {c: v | {"connected": False} for c, v in clients.items()},
        "refused_nodes": {e["node"]: e["reason"] for e in events if e["event"] == Event.REFUSED},
        "waiting_for": waiting,
        "late": _late(waiting, rounds, seconds),
        "last_round": _line(rounds[max(rounds)]) if rounds else None,
        "last_error": _last_error(events),
        "audit": {"lines": len(events), "problem": problem, "last_hash": found.last_hash},
    }


def _finished_rounds(path: Path) -> list[int]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        *lines, _ = (path / "rounds.jsonl").read_text().split("\n")
        return [int(json.loads(line)["round"]) for line in lines]
    return []


def _planned(path: Path, events: list[dict[str, Any]]) -> int | None:
    started = [e["rounds"] for e in events if e["event"] == Event.STARTED]
    if started:
        return int(started[-1])
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((path / "config.json").read_text())["rounds"])
    return None


def _clients(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The clients that joined, since when, and the last round that counted their upload."""
    clients: dict[str, dict[str, Any]] = {}
    for event in events:
        name = event["event"]
        if name == Event.STARTED:
            clients = {client: found | {"connected": False} for client, found in clients.items()}
        elif name in (Event.JOINED, Event.LEFT):
            found = clients.setdefault(str(event["client"]), {"last_round": None})
            clients[str(event["client"])] = found | {
                "connected": name == Event.JOINED,
                "node": event["node"],
                "since": event["at"],
            }
        elif name == Event.ROUND_ENDED:
            for client in map(str, event["accepted"]):
                if client in clients:
                    clients[client]["last_round"] = event["round"]
    return dict(sorted(clients.items(), key=lambda item: int(item[0])))


def _waiting(events: list[dict[str, Any]]) -> dict[str, float]:
    """The clients without an answer in the present round, and for how many seconds."""
    waiting: dict[str, float] = {}
    for event in events:
        if event["event"] == Event.ROUND_STARTED:
            waiting = dict.fromkeys(map(str, event["clients"]), round(_age(event), 1))
        elif event["event"] == Event.ACCEPTED:
            waiting.pop(str(event["client"]), None)
        elif event["event"] == Event.ROUND_ENDED:
            waiting = {}
    return waiting


def _late(
    waiting: dict[str, float], rounds: dict[int, dict[str, Any]], seconds: list[float]
) -> dict[str, str]:
    """The clients that did not answer in the last round, or take twice as long as a round does."""
    late = {}
    if rounds:
        last = rounds[max(rounds)]
        late = {
            c: f"round {last['round']}: {why}" for c, why in last["left_out"].items() if "no reply" in why
        }
    limit = max(SLOW, 2 * statistics.median(seconds)) if seconds else None
    return late | {
        c: f"round {max(rounds) + 1}: no answer for {age:.0f} s"
        for c, age in waiting.items()
        if limit and age > limit
    }


def _last_error(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    errors = (Event.FAILED, Event.REJECTED, Event.REFUSED, Event.NO_RESULT)
    found = [e for e in events if e["event"] in errors]
    return _line(found[-1]) if found else None


def _line(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key != "previous"}


def _age(event: dict[str, Any]) -> float:
    return time.time() - datetime.datetime.fromisoformat(event["at"]).timestamp()


# -- a node --------------------------------------------------------------------------------------------------


def _of_node(folder: Path) -> dict[str, Any]:
    worker, is_running = folder / WORKER, is_locked(folder / WORKER / "lock")
    contact, error = None, None
    with contextlib.suppress(OSError):
        contact = round(time.time() - (worker / CONTACT).stat().st_mtime, 1)
    with contextlib.suppress(OSError, ValueError):
        error = json.loads((worker / LAST_ERROR).read_text())
    runs = {p.parent.name: 0 for p in folder.glob("*/client.json")}
    for path in sorted(folder.glob("*/round-*.copfl")):
        number = path.stem.removeprefix("round-")
        if number.isdecimal():
            runs[path.parent.name] = int(number) + 1
    problems = [] if is_running else ["the node is not running"]
    is_training = (worker / "message").exists()
    if is_running and not is_training and (contact is None or contact > SILENT):
        since = "yet" if contact is None else f"for {contact:.0f} s"
        problems.append(f"the node has no contact with its server {since}")
    return {
        "kind": "node",
        "running": is_running,
        "training": is_running and is_training,
        "seconds_since_contact": contact,
        "runs": runs,  # by name: the last round that it trained
        "last_error": error,
        "problems": problems,
    }


# -- as text -------------------------------------------------------------------------------------------------


def as_text(found: dict[str, Any]) -> str:
    """The state in a few lines."""
    lines = _node_lines(found) if found["kind"] == "node" else _server_lines(found)
    error = found.get("last_error")
    if error:
        named = [f"{key} {error[key]}" for key in ("round", "client", "node") if key in error]
        about = ", ".join([str(error.get("event", "")), *named]).strip(", ")
        lines.append(f"last error  {error.get('at', '')} {about}: {printable(error.get('reason', ''))}")
    lines += [f"problem     {problem}" for problem in found["problems"]]
    return "\n".join(lines)


def _node_lines(found: dict[str, Any]) -> list[str]:
    contact = found["seconds_since_contact"]
    lines = [
        f"node        {'training' if found['training'] else 'running' if found['running'] else 'not running'}"
    ]
    lines += [f"contact     {contact:.0f} s ago"] if contact is not None else []
    return lines + [f"run         {name}: trained in round {n}" for name, n in found["runs"].items()]


def _server_lines(found: dict[str, Any]) -> list[str]:
    superlink = found["superlink"]
    lines = [f"SuperLink   {superlink['address']} {'answers' if superlink['answers'] else 'does not answer'}"]
    if "run" not in found:
        return [*lines, "runs        none yet"]
    rounds, last, audit = found["rounds"], found["last_round"], found["audit"]
    others = f" ({len(found['runs'])} runs in all)" if len(found["runs"]) > 1 else ""
    lines += [f"run         {found['run']} {found['state']}{others}"]
    median = found["seconds_per_round"]
    lines += [
        f"rounds      {rounds['done']} of {rounds['of'] or '?'}"
        + (f", {median:.1f} s each" if median is not None else "")
        + (f", {last['metric']} {last['value']:.4f}" if last and last["value"] is not None else "")
    ]
    for client, about in found["clients"].items():
        state = "connected" if about["connected"] else "left" if found["state"] == "is running" else "joined"
        counted = f"; last counted in round {about['last_round']}" if about["last_round"] else ""
        lines.append(f"client {client:<4} {state} {about['since']}, node {about['node']}{counted}")
    lines += [f"refused     node {node}: {reason}" for node, reason in found["refused_nodes"].items()]
    if found["waiting_for"]:
        seconds = max(found["waiting_for"].values())
        lines.append(f"waiting     for clients {', '.join(found['waiting_for'])}, {seconds:.0f} s")
    lines += [f"late        client {client}: {why}" for client, why in found["late"].items()]
    intact = "no line changed or removed" if not audit["problem"] else "DAMAGED"
    return [*lines, f"audit log   {audit['lines']} lines, {intact}; last hash {audit['last_hash'][:16]}"]
