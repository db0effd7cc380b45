"""A whole federation on one machine, with real processes: a SuperLink, a SuperNode per client, and the run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from copfl.errors import RunError, UsageError
from copfl.flower.app import about, write_connection
from copfl.flower.certificates import make_certificates, make_node_key
from copfl.flower.folder import Folder, new_run
from copfl.flower.processes import Processes, free_port, wait_for_port

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
HOST = "127.0.0.1"
LOST = 10  # times that a run's log may be lost
HOME = ".trial"  # FLWR_HOME of trials: the app's own connection stays as it is


class Trial:
    """The processes of a federation on this machine."""

    def __init__(self, folder: Path, *, secure: bool = False) -> None:
        self.folder, self.secure = folder.resolve(), secure
        self.port = free_port()
        self.keys = self.folder / "keys"
        home = {"FLWR_HOME": str(self.folder / HOME)}
        self.processes = Processes(self.folder / "logs", {**QUIET, **home})
        self.node_ports: dict[str, int] = {}
        if secure and not (self.keys / "ca.pem").exists():
            make_certificates(self.keys, HOST)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *error: Any) -> None:
        self.processes.__exit__(*error)

    def start_link(self) -> None:
        """Starts the SuperLink, with its database in the folder; a second start goes on where the first was ended."""
        files = (("ca-certfile", "ca.pem"), ("certfile", "server.pem"), ("keyfile", "server.key"))
        tls = [text for name, file in files for text in (f"--ssl-{name}", str(self.keys / file))]
        secured = [*tls, "--enable-supernode-auth"] if self.secure else ["--insecure"]
        command = ["flower-superlink", *secured, "--host", HOST, "--port", str(self.port)]
        database = ["--database", str(self.folder / HOME / f"superlink-{self.port}.db")]
        write_connection(self.folder, HOST, self.port, self.secure, HOME)
        process = self.processes.start(
            "superlink", [*command, *database, "--disable-runtime-dependency-installation"]
        )
        if not wait_for_port(self.port, process):
            raise RunError(f"the SuperLink did not start: {self.processes.tail('superlink')}")

    def register(self, name: str) -> None:
        """Makes a key for the node and tells the SuperLink about it."""
        if not (self.keys / name).exists():
            make_node_key(self.keys / name)
        self.processes.call(
            f"registering {name}", ["flwr", "supernode", "register", str(self.keys / f"{name}.pub"), "copfl"]
        )

    def start_node(self, name: str, config: Mapping[str, Any]) -> None:
        """Starts a SuperNode; a second start is the node's return."""
        port = self.node_ports.setdefault(name, free_port())
        how = [
            "--root-certificates",
            str(self.keys / "ca.pem"),
            "--auth-supernode-private-key",
            str(self.keys / name),
        ]
        command = [
            "flower-supernode",
            *(how if self.secure else ["--insecure"]),
            "--superlink",
            f"{HOST}:{self.port}",
        ]
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        self.processes.start(name, [*command, "--host", HOST, "--port", str(port), "--node-config", words])

    def start_run(self, config: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Hands the app to the SuperLink; the process shows the run's log and ends with the run."""
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        return self.processes.start(
            "run", ["flwr", "run", str(self.folder), "copfl", "--stream", "-c", words]
        )

    def runs(self) -> list[dict[str, Any]]:
        """What Flower knows about the runs."""
        text = self.processes.call("flwr list", ["flwr", "list", "copfl", "--format", "json"])
        result: list[dict[str, Any]] = json.loads(text[text.index("{") :])["runs"]
        return result

    def again(self, pause: float = 1.0, trials: int = 5) -> subprocess.Popen[bytes] | None:
        """The log of a run that goes on without us: `flwr run` ends when it loses the SuperLink for a moment."""
        for _ in range(trials):
            time.sleep(pause)
            with contextlib.suppress(RunError, ValueError, subprocess.TimeoutExpired):  # it may still be lost
                going_on = [run["run-id"] for run in self.runs() if not run["status"].startswith("finished")]
                return (
                    self.processes.start("run", ["flwr", "log", going_on[0], "copfl", "--stream"])
                    if going_on
                    else None
                )
        return None


def deal(folder: Path, data: str, nodes: int, scheme: str, seed: int) -> list[dict[str, Any]]:
    """The nodes' configurations, each with its share of the data set in a file of its own."""
    from copfl.data.datasets import load
    from copfl.data.partition import partition

    dataset = load(data)
    split, configs = partition(scheme, dataset, nodes, seed), []
    tested = split.tested(dataset)
    for client in range(nodes):
        home = (folder / "nodes" / str(client)).resolve()
        home.mkdir(parents=True, exist_ok=True)
        train, test = split.train[client], split.test[client]
        np.savez(
            home / "data.npz",
            x=dataset.train.x[train], y=dataset.train.y[train], x_test=tested.x[test], y_test=tested.y[test],
        )  # fmt: skip
        configs.append({"client": client, "data": str(home / "data.npz"), "state-dir": str(home / "state")})
    return configs


def up(
    folder: Path | str,
    *,
    nodes: int | None = None,
    data: str | None = None,
    scheme: str = "dirichlet",
    secure: bool | None = None,
    config: Mapping[str, Any] | None = None,
    run: str | None = None,
    resume: bool = False,
) -> Iterator[dict[str, Any]]:
    """Each round's record, as a trial of the app in the folder goes on; at the end nothing is left running."""
    folder = Path(folder)
    known = about(folder)
    settings = {**known["config"], **(config or {})}
    clients = nodes or int(settings["clients"])
    run = run or new_run()
    runs = Folder(str(folder.resolve() / "runs"), run, goes_on=resume)
    sent = {
        **(config or {}),
        "run": run,
        "runs": str(folder.resolve() / "runs"),
        "clients": clients,
        "resume": resume,
    }
    sent.setdefault("min-replies", 0 if settings.get("participation", 1.0) < 1 else clients)
    configs = deal(folder, data or known["data"], clients, scheme, int(settings.get("seed", 0)))
    with Trial(folder, secure=known["secure"] if secure is None else secure) as trial:
        trial.start_link()
        for client, node_config in enumerate(configs):
            if trial.secure:
                trial.register(f"node-{client}")
            trial.start_node(f"node-{client}", node_config)
        yield from follow(trial, trial.start_run(sent), runs, int(settings["rounds"]))


def follow(
    trial: Trial, process: subprocess.Popen[bytes], folder: Folder, rounds: int, pause: float = 1.0
) -> Iterator[dict[str, Any]]:
    """Each round's record as it is written; RunError if the run ends before its last round."""
    seen, lost = len(folder.rounds()), 0
    while seen < rounds:
        ended = process.poll() is not None
        for record in folder.rounds()[seen:]:
            seen += 1
            yield record
        if ended and seen < rounds:
            lost += 1
            if process.returncode and lost <= LOST and (log := trial.again(pause)) is not None:
                process = log
                continue
            raise RunError(f"the run ended after round {seen} of {rounds}: {trial.processes.tail('run')}")
        time.sleep(pause)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)  # the SuperLink closes the run


def resume(folder: Path | str, run: str | None = None, **how: Any) -> Iterator[dict[str, Any]]:
    """`up`, going on with a run (the last one, unless it is named) from its last checkpoint."""
    return up(folder, run=run or last_run(Path(folder)), resume=True, **how)


def last_run(folder: Path) -> str:
    """The run in the folder whose checkpoint is the newest."""
    found = sorted((folder / "runs").glob("*/server.copfl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise RunError(
            f"there is no run in {folder / 'runs'} with a finished round; start one with `copfl federate up`"
        )
    return found[-1].parent.name


def join(
    folder: Path | str, data: str, *, state: str | None = None, run: str | None = None, turns: int = 3
) -> dict[str, Any]:
    """What a newcomer with this data gains from a finished run: its accuracy before and after its own turns."""
    folder = Path(folder)
    known, run = about(folder), run or last_run(folder)
    if turns < 1:
        raise UsageError(f"turns={turns} must be at least 1")
    home = folder.resolve() / "nodes" / "newcomer"
    node = {"data": data if ":" in data else str(Path(data).resolve()), "state-dir": state or str(home)}
    clients = json.loads((folder / "runs" / run / "config.json").read_text())["clients"]
    with Trial(folder, secure=known["secure"]) as trial:
        trial.start_link()
        if trial.secure:
            trial.register("newcomer")
        trial.start_node("newcomer", node)
        sent = {"run": run, "runs": str(folder.resolve() / "runs"), "join": turns, "clients": clients}
        process = trial.start_run(sent)
        process.wait(600)
        found = folder / "runs" / run / "newcomers.json"
        results: Sequence[dict[str, Any]] = json.loads(found.read_text()) if found.exists() else []
        if len(results) != 1 or "why" in results[0]:
            why = results[0]["why"] if results else trial.processes.tail("run")
            raise RunError(f"the newcomer was not personalised: {why}")
        return results[0]
