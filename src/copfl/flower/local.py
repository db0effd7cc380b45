"""A whole federation on one machine, with real processes: a SuperLink, a SuperNode per client, a run."""

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from copfl.data.contract import ARRAYS, Contract
from copfl.data.contract_check import check
from copfl.data.samples import CLASSIFICATION
from copfl.data.statistics import site_of
from copfl.data.table_files import read_table
from copfl.errors import DataError, RunError, UsageError, raised_as
from copfl.experiment.bundle.description import read
from copfl.experiment.bundle.writing import OF_NODE
from copfl.experiment.preparation import partition
from copfl.files import Busy, locked
from copfl.flower.agreement import AGREE, frozen_by
from copfl.flower.app import RUN_FILE
from copfl.flower.certificates import make_certificates
from copfl.flower.deployed import as_text, flower_environment, new_name, superlink_options, write_connection
from copfl.flower.keys import fingerprint, make_key, read_key
from copfl.flower.membership import COORDINATOR, make_coordinator, make_member_keys, propose, read_roster
from copfl.flower.policy.file import FILE, VARIABLE, write_policy
from copfl.flower.policy.own_app import allowing
from copfl.flower.policy.record import Policy, Statistics
from copfl.flower.processes import TAG, end, end_with_parent, start_watcher, tagged
from copfl.flower.proposal import KEY
from copfl.flower.secure_memory import CHANGES
from copfl.flower.settings import federation_of, prepared
from copfl.flower.state import NEW_CLIENTS, ServerFolder
from copfl.flower.statistics_terms import terms_of
from copfl.flower.status import LOCAL_HOME, answers, read_app
from copfl.settings import toml
from copfl.settings.complete import complete
from copfl.settings.data import data_of
from copfl.settings.flat import flattened, nested
from copfl.settings.schema import Run
from copfl.settings.toml import Tables

HOST = "127.0.0.1"
LAST_TAG = "tag"  # in LOCAL_HOME: the tag of the last federation in this folder
TRIALS = 10**6  # changes of the cohort in secure sums: in a trial all nodes have one owner
TRIAL = Policy(rollback=True, statistics=Statistics(questions=TRIALS))  # of all nodes
CLOSING = 60.0  # seconds
MAX_RECONNECTS = 10  # how often the log of a run is opened again


class LocalFederation:
    """The processes of a federation on this machine; all of them end with the context."""

    def __init__(
        self, folder: Path, *, secure: bool = False, supernode: bool = False, policy: Policy | None = None
    ) -> None:
        self.folder, self.secure = folder.resolve(), secure
        # An app for several machines has no private keys here: its trial has members of its own.
        is_trial = (self.folder / "keys" / COORDINATOR).exists()
        self.home = self.folder if is_trial else self.folder / LOCAL_HOME
        if not (self.home / "keys" / COORDINATOR).exists():
            make_coordinator(self.home, self.home / "keys")
        self.coordinator = read_key(self.home / "keys" / COORDINATOR)
        # The server and the nodes have one owner here, and one policy.
        allowed = Policy(rollback=True) if policy is None else policy
        agreed = dataclasses.replace(allowed.proposals, coordinators=(fingerprint(self.coordinator.public),))
        self.policy = write_policy(
            self.folder / LOCAL_HOME / FILE, dataclasses.replace(allowed, proposals=agreed)
        )
        self.supernode = supernode  # Flower's own nodes instead of those of copfl
        self.keys, self.logs, self.tag = self.folder / "keys", self.folder / "logs", secrets.token_hex(8)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.log_begins: dict[str, int] = {}  # where in its log the last start of a program is
        self.port = _free_port()
        self._stack = contextlib.ExitStack()
        environment = {
            **flower_environment(self.folder / LOCAL_HOME),
            # A new client's custom data may be a module of the current folder.
            "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH")))),
            TAG: self.tag,
            VARIABLE: str(self.policy),
        }
        self.options: dict[str, Any] = {
            "cwd": self.folder,
            "env": environment,
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.STDOUT,
        }
        self.logs.mkdir(parents=True, exist_ok=True)
        if secure and not (self.keys / "ca.pem").exists():
            make_certificates(self.keys, HOST)

    def __enter__(self) -> Self:
        """Locks the folder, and ends the processes that a killed federation left in it."""
        home = self.folder / LOCAL_HOME
        home.mkdir(parents=True, exist_ok=True)
        busy = f"a federation is running in {self.folder}; wait for it, or end it first"
        with raised_as(Busy, busy, Busy):
            self._stack.enter_context(locked(home / "lock"))
        with contextlib.suppress(OSError):
            end(partial(tagged, (home / LAST_TAG).read_text()))
        (home / LAST_TAG).write_text(self.tag)
        self._stack.enter_context(start_watcher(self.tag))  # its end closes the watcher's stdin
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack:
            for name in self.running:
                self.send_signal(name, signal.SIGTERM)
            end(self.alive)
            for process in self.running.values():
                process.wait(10)

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a program in its own group, with its output in logs/NAME.log."""
        with open(self.logs / f"{name}.log", "ab") as log:
            self.log_begins[name] = log.tell()
            process = subprocess.Popen(
                command,
                stdout=log,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),
                **self.options,
            )
        self.running[name] = process
        return process

    def call(self, command: Sequence[str], seconds: float = 120) -> str:
        """The output of a program that ends by itself; RunError if it fails."""
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=seconds, **self.options)
        text: str = done.stdout.decode(errors="replace")
        if done.returncode:
            raise RunError(f"`{' '.join(command)}` failed: {text.strip()[-2000:]}")
        return text

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a program and its group."""
        process = self.running[name]
        if process.poll() is None:
            os.killpg(process.pid, number)

    def alive(self) -> list[int]:
        """The ids of the running processes with this tag: those started here, and their descendants."""
        return tagged(self.tag)

    def tail(self, name: str, lines: int = 15) -> str:
        """The end of a program's log."""
        path = self.logs / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def reason(self) -> str:
        """Why the run ended: copfl's last error in its log, or the end of the log; and where the logs are."""
        with open(self.logs / "run.log", "rb") as log:
            log.seek(self.log_begins["run"])
            lines = log.read().decode(errors="replace").splitlines()
        errors = [line.partition("copfl: ")[2] for line in lines if "ERROR" in line and "copfl: " in line]
        return f"{errors[-1] if errors else self.tail('run')}; the logs are in {self.logs}"

    def start_superlink(self) -> None:
        """Starts the SuperLink; started again, it continues with the same database."""
        write_connection(self.folder, HOST, self.port, self.secure, LOCAL_HOME)
        options = superlink_options(HOST, self.port, f"{LOCAL_HOME}/{self.port}.db", secure=self.secure)
        process = self.start("superlink", [sys.executable, "-m", "copfl.flower.superlink", *options])
        deadline = time.monotonic() + 90
        while process.poll() is None and time.monotonic() < deadline:
            if answers(HOST, self.port):
                return
            time.sleep(0.3)
        raise RunError(f"the SuperLink did not start: {self.tail('superlink')}")

    def add_node(self, name: str, node_config: Mapping[str, Any]) -> None:
        """Registers a node, with a new key if it has none, and starts it."""
        if self.secure:
            self.call(["flwr", "supernode", "register", f"{self._key(name)}.pub", "copfl"])
        self.start_node(name, node_config)

    def _key(self, name: str) -> Path:
        """The file of a node's key, which is made if there is none."""
        path = self.home / "keys" / name
        if not path.exists():
            make_key(path)
        return path

    def start_node(self, name: str, node_config: Mapping[str, Any]) -> None:
        """Starts a node; a second start is the node's return."""
        key = self._key(name)
        node_config = {"policy": str(self.policy), "key": str(key), **node_config}
        if self.supernode:
            command = f"flower-supernode --superlink {HOST}:{self.port} --host {HOST} --port {_free_port()}"
            keys = ["--root-certificates", "keys/ca.pem", "--auth-supernode-private-key", str(key)]
            options = [*command.split(), *(keys if self.secure else ["--insecure"])]
            self.start(name, [*options, "--node-config", as_text(node_config)])
            return
        command = f"{sys.executable} -m copfl federate node --superlink {HOST}:{self.port}"
        keys = ["--root-certificates", "keys/ca.pem", "--key", str(key)] if self.secure else []
        settings = [f"--set={key}={json.dumps(value)}" for key, value in node_config.items()]
        self.start(name, [*command.split(), *keys, *settings])

    def start_run(self, config: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Submits the app to the SuperLink; the process writes the run's log and ends with the run."""
        settings = {**flattened(nested(read_app(self.folder)["config"])), **config}
        make_member_keys(self.home, int(settings["run.clients"]))
        named = {**config, "session.run": settings.get("session.run") or new_name()}
        signed = propose(self.folder, named, self.coordinator, read_roster(self.home))
        given = as_text({**named, KEY: signed.text})
        return self.start("run", ["flwr", "run", ".", "copfl", "--stream", "-c", given])

    def runs(self) -> list[dict[str, Any]]:
        """The runs as Flower lists them."""
        text = self.call(["flwr", "list", "copfl", "--format", "json"])
        return list(json.loads(text[text.index("{") :])["runs"])

    def reopen_log(self, pause: float = 1.0, attempts: int = 5) -> subprocess.Popen[bytes] | None:
        """The log of the run if it continues: `flwr run` ends when its connection to the SuperLink breaks."""
        for _ in range(attempts):
            time.sleep(pause)
            with contextlib.suppress(RunError, ValueError, subprocess.TimeoutExpired):  # still no connection
                active = [run["run-id"] for run in self.runs() if not run["status"].startswith("finished")]
                if not active:
                    return None
                return self.start("run", ["flwr", "log", active[0], "copfl", "--stream"])
        return None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def partition_nodes(folder: Path, run: Run) -> list[dict[str, Any]]:
    """The nodes' configurations; each node's part of the run's data set is in a file of its own.

    A node chooses its validation samples itself.
    """
    dataset, configs = data_of(run.data), []
    whole = dataclasses.replace(run.run, select="last", validation=0.0, patience=0)
    split = partition(dataclasses.replace(run, run=whole), dataset)
    tested = split.tested(dataset)
    for client, (train, test) in enumerate(zip(split.train, split.test, strict=True)):
        path = (folder / "nodes" / str(client)).resolve()
        path.mkdir(parents=True, exist_ok=True)
        x, y, x_test, y_test = dataset.train.x[train], dataset.train.y[train], tested.x[test], tested.y[test]
        if split.labels is not None:
            y, y_test = split.labels[client][y], split.labels[client][y_test]
        if dataset.kind == CLASSIFICATION:  # a node's file has the names of its classes
            y, y_test = (np.array(dataset.classes)[labels] for labels in (y, y_test))
        np.savez(path / "data.npz", x=x, y=y, x_test=x_test, y_test=y_test)
        config = {"client": client, "data": str(path / "data.npz"), "state-dir": str(path / "state")}
        configs.append({**config, CHANGES: TRIALS})
    return configs


def site_nodes(folder: Path, sites: Sequence[Path | str]) -> list[dict[str, Any]]:
    """The nodes' configurations, of which each has the data of one site."""
    configs = []
    for client, site in enumerate(sites):
        path = Path(site).expanduser().resolve()
        if not path.exists():
            raise UsageError(f"there is no file {site} for node {client}")
        state = (folder / "nodes" / str(client) / "state").resolve()
        configs.append({"client": client, "data": str(path), "state-dir": str(state), CHANGES: TRIALS})
    return configs


def site_problems(folder: Path, sites: Sequence[Path]) -> list[str]:
    """In which the sites' data differ from the app's contract; UsageError if a node could not train on some.

    Args:
        folder: That of the app.
        sites: The data of each node.
    """
    text = read_app(folder)["config"].get("samples", {}).get("contract")
    found: list[str] = []
    for site in sites if text else ():
        contract, file = Contract.read(text), site.expanduser()
        problems = check(contract, file).problems
        try:
            if contract.data != ARRAYS and not contract.is_frozen:
                site_of(contract, [file])
            elif contract.data != ARRAYS:
                contract.encoders.dataset_of([read_table(file)], file.stem)
        except DataError as error:
            raise UsageError(f"{site} cannot be trained on: {'; '.join(problems or [str(error)])}") from error
        found += [f"{site}: {problem}" for problem in problems]
    return found


def up(
    folder: Path | str,
    *,
    sites: Sequence[Path | str] = (),
    nodes: int | None = None,
    data: str | None = None,
    scheme: str | None = None,
    secure: bool | None = None,
    config: Mapping[str, Any] | None = None,
    run: str | None = None,
    resume: bool = False,
) -> Iterator[dict[str, Any]]:
    """The record of each round of the app in the folder, run on this machine; all processes end with it.

    Args:
        folder: That of the app.
        sites: The data of each node, in order; none: a data set is partitioned. If the data contract is open,
            the nodes agree on the encoders first.
        nodes: Number of nodes; None: the app's number of clients.
        data: A data set to partition among the nodes instead of the app's.
        scheme: A partition instead of the app's.
        secure: Whether there are certificates and keys; None: as the app has it.
        config: Settings of the federation by path, such as run.rounds.
        run: The run's name; None: a new one.
        resume: Whether to continue it.
    """
    folder = Path(folder)
    app, given = read_app(folder), dict(config or {})
    name = run or new_name()
    settings = {**flattened(nested(app["config"])), **given}
    clients, runs = nodes or len(sites) or int(settings["run.clients"]), str(folder.resolve() / "runs")
    server_folder = ServerFolder(runs, name, resume=resume)
    overrides = {**given, "session.run": name, "run.clients": clients, "session.resume": resume}
    overrides.setdefault("network.min_replies", 0 if settings["run.participation"] < 1 else clients)
    planned = federation_of({**settings, **overrides})
    prepared(planned)  # what cannot run is an error before a process is started
    policy = allowing(TRIAL, {**settings, **overrides}, planned)
    contract = planned.samples.contract
    is_open = bool(contract) and not Contract.read(contract).is_frozen
    if is_open:
        terms_of({**settings, **overrides})  # the same of what the nodes must agree on
    if sites:
        node_configs = site_nodes(folder, sites)
    elif is_open or "data" not in toml.read_file(folder / RUN_FILE):
        raise UsageError(
            "the app was made of a data contract, without data: name the file of each node with --site FILE"
        )
    else:
        here: Tables = {"run": {"clients": clients, "seed": planned.run.run.seed}}
        here |= {"data": {"name": data}} if data else {}
        here |= {"partition": {"name": scheme}} if scheme else {}
        node_configs = partition_nodes(folder, complete(toml.read_file(folder / RUN_FILE), here))
    if len(node_configs) != clients:
        raise UsageError(
            f"there are {len(node_configs)} files for {clients} nodes; name one for each with --site"
        )
    is_secure = app["secure"] if secure is None else secure
    with LocalFederation(folder, secure=is_secure, policy=policy) as federation:
        federation.start_superlink()
        for client, node_config in enumerate(node_configs):
            federation.add_node(f"node-{client}", node_config)
        if is_open:
            agreement = {**overrides, "session.run": f"{name}-agree", AGREE: True, "session.resume": False}
            federation.start_run(agreement).wait()
            frozen_by(folder, agreement["session.run"], federation.reason())
        process = federation.start_run(overrides)
        # After the last round the benefit may still be added up.
        is_added = planned.run.run.benefit and planned.secure.aggregation
        closing = planned.network.deadline if is_added else CLOSING
        yield from follow(federation, process, server_folder, planned.rounds, closing=closing)


def follow(
    federation: LocalFederation,
    process: subprocess.Popen[bytes],
    folder: ServerFolder,
    rounds: int,
    pause: float = 1.0,
    closing: float = CLOSING,
) -> Iterator[dict[str, Any]]:
    """The record of each round when it is written; RunError if the run ends before its last round.

    Args:
        federation: The processes.
        process: That of the run's log.
        folder: The server's of the run.
        rounds: How many the run has.
        pause: Seconds between two looks at the folder.
        closing: The most seconds after the last round until the SuperLink closes the run.
    """
    done, reconnects = len(folder.rounds()), 0
    while done < rounds:
        has_ended = process.poll() is not None
        for record in folder.rounds()[done:]:
            done += 1
            yield record
        if has_ended and done < rounds:
            reconnects += 1
            is_lost = process.returncode != 0 and reconnects <= MAX_RECONNECTS  # the log, maybe not the run
            log = federation.reopen_log(pause) if is_lost else None
            if log is None:
                raise RunError(f"the run ended after round {done} of {rounds}: {federation.reason()}")
            process = log
        else:
            time.sleep(pause)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(closing)


def resume(folder: Path | str, run: str | None = None, **options: Any) -> Iterator[dict[str, Any]]:
    """`up`, continuing a run (by default the last one) from its last checkpoint."""
    return up(folder, run=run or last_run(Path(folder)), resume=True, **options)


def finished(folder: Path, run: str, rounds: int | None = None) -> int:
    """The number of rounds of a run that has all of them; 0 if some are left."""
    wanted = rounds or int(read_app(folder)["config"]["run"]["rounds"])
    done = len(ServerFolder(str(folder.resolve() / "runs"), run, resume=True).rounds())
    return done if done >= wanted else 0


def last_run(folder: Path) -> str:
    """The run in the folder with the newest checkpoint."""
    runs = folder / "runs"
    checkpoints = sorted(runs.glob("*/server.copfl"), key=lambda path: path.stat().st_mtime)
    if not checkpoints:
        raise RunError(f"no run in {runs} has a finished round; start one with `copfl federate up {folder}`")
    return checkpoints[-1].parent.name


def join(
    folder: Path | str,
    data: str,
    *,
    test: str | None = None,
    state: str | None = None,
    run: str | None = None,
    updates: int = 3,
) -> dict[str, Any]:
    """A new client's primary metric before and after its local updates of a finished run's model.

    Args:
        folder: That of the app.
        data: The new client's: a file, a folder or module:function.
        test: A file of test rows of a table; None: some of its rows.
        state: Its state-dir; None: nodes/new-client in the app's folder.
        run: The name of the run; None: the last one.
        updates: Number of local updates.
    """
    if updates < 1:
        raise UsageError(f"updates={updates} must be at least 1")
    folder = Path(folder)
    app, runs, run = read_app(folder), folder.resolve() / "runs", run or last_run(folder)
    node_config = {
        "data": data if ":" in data else str(Path(data).resolve()),
        "state-dir": str(Path(state or folder / "nodes" / "new-client").resolve()),
        **({} if test is None else {"test": str(Path(test).resolve())}),
    }
    clients = json.loads((runs / run / "config.json").read_text())["run.clients"]
    results_file = runs / run / NEW_CLIENTS
    results_file.unlink(missing_ok=True)
    policy = allowing(Policy(rollback=True), app["config"], federation_of(app["config"]))
    with LocalFederation(folder, secure=app["secure"], policy=policy) as federation:
        federation.start_superlink()
        federation.add_node("new-client", node_config)
        overrides = {"session.run": run, "session.join": updates, "run.clients": clients}
        federation.start_run(overrides).wait(600)
        results = json.loads(results_file.read_text()) if results_file.exists() else []
        if len(results) != 1 or "why" in results[0]:
            reason = results[0]["why"] if results else federation.reason()
            raise RunError(f"the new client was not personalised: {reason}")
        model = Path(node_config["state-dir"]) / run / OF_NODE
        return {**results[0], "model": str(model), "note": read(model).origin.note}
