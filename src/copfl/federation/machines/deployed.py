"""The server of a federation of several machines, and runs on it.

`copfl federate server` calls `serve`, `run` and `agree` the functions of the same purpose. Flower's own programs do the
work; what is here writes their options and reads their results.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from copfl.data.contract.contract import Contract
from copfl.errors import CopflError, RunError, UsageError, raised_as
from copfl.federation.operations.status import status
from copfl.federation.operations.watched import answers, submitted_runs
from copfl.federation.protocol.app_folder import DATABASE, FLOWER_HOME, is_locked, read_app
from copfl.federation.protocol.keys import public_text, read_public, require_private
from copfl.federation.protocol.log_lines import configure_logging, logger
from copfl.federation.protocol.messages import printable
from copfl.federation.protocol.proposal import KEY, SignedProposal
from copfl.federation.server.agreement import AGREE, frozen_by
from copfl.federation.server.certificates import LOOPBACK
from copfl.federation.server.choosing import (
    CHOOSE,
    TAKEN,
    candidates_in,
    chosen_by,
    is_choice,
    kept,
    taken_in,
)
from copfl.federation.server.membership import (
    COORDINATOR,
    coordinator_key,
    overrides,
    propose,
    read_roster,
    revoked_keys,
)
from copfl.federation.server.membership import FILE as MEMBERS
from copfl.settings.flat import flat
from copfl.settings.toml import written

KEYS_INTERVAL = 2.0  # seconds between two looks at the keys in the folder
START_TIMEOUT = 60.0  # seconds that a server may need to start
FLOWER_VARIABLES = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
TLS = (
    "--ssl-ca-certfile keys/ca.pem --ssl-certfile keys/server.pem --ssl-keyfile keys/server.key "
    "--enable-supernode-auth"
)


def flower_environment(home: Path) -> dict[str, str]:
    """The environment of Flower's programs, which Flower starts by name."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **FLOWER_VARIABLES, "PATH": path, "FLWR_HOME": str(home)}


def superlink_options(host: str, port: int, database: str, *, secure: bool) -> list[str]:
    """The options of `flower-superlink` in the app's folder.

    Args:
        host: The address to listen on.
        port: The port.
        database: Its file, in the app's folder.
        secure: Whether there are certificates and node keys.
    """
    options = f"--host {host} --port {port} --database {database} --disable-runtime-dependency-installation"
    return f"{options} {TLS if secure else '--insecure'}".split()


def as_text(config: Mapping[str, Any]) -> str:
    """The keys and values as Flower's command line reads them: up to the next quote, without escapes."""
    return " ".join(f"{key}={_quoted(key, flat(value))}" for key, value in config.items())


def _quoted(key: str, value: Any) -> str:
    if not isinstance(value, str) or not {*value} & {*'"\\\n'}:
        return json.dumps(value, ensure_ascii=False)
    if {*value} & {*"'\n"}:
        raise UsageError(f"{key}={value!r} has both kinds of quotes, or lines; set it in pyproject.toml")
    return f"'{value}'"


def write_connection(folder: Path, host: str, port: int, secure: bool, home: str = FLOWER_HOME) -> None:
    """Writes the SuperLink's address for the `flwr` command with FLWR_HOME=FOLDER/.flwr.

    Control answers on this machine alone, see `planes`.

    Args:
        folder: The folder of the app.
        host: The server's address.
        port: Its port.
        secure: Whether there are certificates.
        home: Where the `flwr` command finds its configuration, in the app's folder.
    """
    host = host if host in LOOPBACK else "127.0.0.1"
    (folder / home).mkdir(parents=True, exist_ok=True)
    certificate = str((folder / "keys" / "ca.pem").resolve())
    security = {"root-certificates": certificate} if secure else {"insecure": True}
    connection = {"address": f"{host}:{port}", **security}
    content = written({"superlink": {"default": "copfl", "copfl": connection}})
    (folder / home / "config.toml").write_text(content)


def new_name() -> str:
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)


def serve(folder: Path, listen: str | None = None) -> NoReturn:
    """Runs the SuperLink of the app in the folder until the process ends, and registers the nodes' keys.

    Args:
        folder: The folder of the app.
        listen: The address HOST:PORT behind a reverse proxy; None: the app's port, for all machines.
    """
    app, folder = read_app(folder), folder.resolve()
    host, port, secure = str(app["host"]), int(app["port"]), bool(app["secure"])
    bind = host if host in LOOPBACK else "0.0.0.0"
    if listen is not None:
        bind, _, number = listen.rpartition(":")
        if not bind or not (number.isdecimal() and 0 < int(number) < 2**16):
            raise UsageError(f'--listen "{listen}" must be HOST:PORT, such as 127.0.0.1:8801')
        port = int(number)
    if secure:
        with raised_as(UsageError, f"{folder}/keys: {{}}; restore it", OSError):
            require_private(folder / "keys" / "server.key")
    with raised_as(UsageError, f"port {port} cannot be used: {{}}; is a server running?", OSError):
        socket.create_server(("127.0.0.1", port)).close()
    write_connection(folder, host, port, secure)  # the folder may have been moved, or restored
    os.environ.update(flower_environment(folder / FLOWER_HOME))
    os.chdir(folder)
    for database in folder.glob(f"{DATABASE}*"):
        database.chmod(0o600)  # of a version that did not see to it
    from copfl.federation.machines import superlink
    from copfl.federation.machines.flower_api import UTCFormatter

    configure_logging(UTCFormatter)
    if secure:
        threading.Thread(target=_keep_registered, args=[folder, port], daemon=True).start()
    sys.argv = ["flower-superlink", *superlink_options(bind, port, DATABASE, secure=secure)]
    superlink.main()
    raise SystemExit(0)


def _keep_registered(folder: Path, port: int) -> NoReturn:
    """Registers keys when they arrive, and unregisters those that are revoked, while the server runs."""
    import httpx

    before = None
    while True:
        # Whatever fails now, such as to open a file while an attacker holds all connections, may not fail later.
        try:
            paths = [folder / MEMBERS, folder / "keys", *(folder / "keys").glob("*.pub")]
            state = [(path, path.stat().st_mtime_ns) for path in paths if path.exists()]
            if state != before:
                _register_keys(folder, port)
                before = state
        except (CopflError, OSError, httpx.HTTPError) as error:
            logger.error("copfl: keys were not registered: %s", printable(error))
        time.sleep(KEYS_INTERVAL)


def _register_keys(folder: Path, port: int) -> None:
    """Registers the public keys in the folder, and unregisters those that are revoked."""
    import httpx
    from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

    from copfl.federation.machines.flower_api import (
        ListNodesRequest,
        RegisterNodeRequest,
        UnregisterNodeRequest,
        init_http_client_from_connection,
        public_key_to_bytes,
        read_superlink_connection,
    )

    while not answers("127.0.0.1", port):
        time.sleep(0.3)
    revoked = revoked_keys(folder)
    with contextlib.closing(init_http_client_from_connection(read_superlink_connection("copfl"))) as client:
        nodes = client.ListNodes(request=ListNodesRequest()).nodes_info
        for node in nodes:
            if not revoked or public_text(load_pem_public_key(node.public_key)) not in revoked:
                continue
            try:
                client.UnregisterNode(request=UnregisterNodeRequest(node_id=node.node_id))
                logger.info("copfl: node %d is unregistered, its key is revoked", node.node_id)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.NOT_FOUND:  # it is unregistered already
                    text = printable(error.response.text)
                    logger.error("copfl: node %d was not unregistered: %s", node.node_id, text)
        # Flower's server prints an error for each key that it is asked to register again.
        registered = {node.public_key for node in nodes}
        for path in sorted((folder / "keys").glob("*.pub")):
            try:
                if path.stem == COORDINATOR or read_public(path) in revoked:
                    continue
                public: Any = load_ssh_public_key(path.read_bytes())
                content = public_key_to_bytes(public)
                if content in registered:
                    continue
                client.RegisterNode(request=RegisterNodeRequest(public_key=content))
                logger.info("copfl: registered %s", path.name)
            except (CopflError, ValueError, OSError) as error:
                logger.error("copfl: %s cannot be used: %s", path.name, printable(error))
            except httpx.HTTPStatusError as error:
                if "already" not in (text := printable(error.response.text)).lower():
                    logger.error("copfl: %s was not registered: %s", path.name, text)


class Followed(NamedTuple):
    """A run that was followed to the end of its log."""

    name: str
    exit_code: int  # of `flwr run`


def start_run(
    folder: Path, config: Mapping[str, Any], *, resume: bool = False, proposal: SignedProposal | None = None
) -> dict[str, Any]:
    """The state of a run after its last round; the server runs in this folder, on this machine.

    Args:
        folder: The folder of the app.
        config: Keys of the run config that are set for this run.
        resume: Whether to continue the run from its last checkpoint.
        proposal: One that the coordinator signed elsewhere; None: it is signed here.
    """
    config = config if proposal is None else overrides(folder, proposal.proposal)
    if config.get(AGREE):
        raise UsageError(f"{AGREE}=true trains nothing; start it with `copfl federate agree {folder}`")
    if proposal is None and resume:
        runs = status(folder)["runs"]
        last = str(config.get("session.run") or (runs[-1] if runs else ""))
        resume = not is_choice(folder, last)  # the training that follows a choice has not begun
        config = {**taken_in(folder, last), **config} if resume else {**config, **taken(folder, config, last)}
    elif proposal is None:
        config = {**config, **taken(folder, config)}
    name, exit_code = follow_run(folder, config, resume=resume, proposal=proposal)
    after = status(folder, name) if (folder / "runs" / name / "config.json").exists() else {}
    rounds = int(config.get("run.rounds", read_app(folder)["config"]["run"]["rounds"]))
    if not after or (not config.get("session.join") and after["rounds"]["done"] < rounds):
        count = f"after round {after['rounds']['done']} of {rounds}" if after else "before its first round"
        command_line = f"copfl federate run {folder} --resume --run {name}"
        again = f"`{command_line}` continues it" if after else "see the log"
        raise RunError(f"the run {name} ended {count} (flwr: exit code {exit_code}); {again}")
    return after


def stop_run(folder: Path, run: str | None = None) -> str:
    """The name of the run that this ends on the server; RunError if none continues.

    Args:
        folder: The folder of the app, whose server runs on this machine.
        run: The name of a run; None: the last one that was started.
    """
    continuing = {other.name: other.flower_run for other in submitted_runs(folder) if not other.has_ended}
    name = run or next(reversed(continuing), "")
    if name not in continuing:
        what = f"the run {printable(name, 60)} does not continue" if name else "no run continues"
        others = (
            f"; there are: {', '.join(printable(other, 60) for other in continuing)}" if continuing else ""
        )
        raise RunError(f"{what}, so there is nothing to stop{others}")
    command = ["flwr", "stop", str(continuing[name]), "copfl"]
    environment = flower_environment(folder.resolve() / FLOWER_HOME)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = printable((done.stderr or done.stdout).strip(), 300)
        raise RunError(
            f"the run {printable(name, 60)} was not stopped: {said}; see `copfl federate status {folder}`"
        )
    return name


def taken(folder: Path, config: Mapping[str, Any], continued: str = "") -> dict[str, Any]:
    """The method that the federation takes, as a key of the run config; none where it is named.

    It is measured by a run of its own, on rows that each site holds out, unless an earlier one found it. RunError if
    what sites train alone is better.

    Args:
        folder: The folder of the app, whose server runs on this machine.
        config: Keys of the run config that are set for the run that follows.
        continued: The name of the run that measures it and was interrupted.
    """
    if not (methods := candidates_in(folder, config)):
        return {}
    chosen = kept(folder, methods)
    if chosen is None:
        run = continued or f"{config.get('session.run') or new_name()}-choice"
        choice = {**config, CHOOSE: True, "session.run": run}
        name, exit_code = follow_run(folder, choice, resume=bool(continued))
        chosen = chosen_by(folder, name, choice, f"flwr ended with exit code {exit_code}; its log is above")
    print(chosen, flush=True)
    return {TAKEN: chosen.required()} | ({"session.run": new_name()} if continued else {})


def agree(folder: Path, config: Mapping[str, Any], *, proposal: SignedProposal | None = None) -> Contract:
    """The frozen data contract, from sums over all members; the app in the folder has it afterwards.

    Args:
        folder: The folder of the app, whose server runs on this machine.
        config: Keys of the run config that are set for this run.
        proposal: One with session.agree=true that the coordinator signed elsewhere; None: it is signed here.
    """
    config = {**config, AGREE: True} if proposal is None else overrides(folder, proposal.proposal)
    if not config.get(AGREE):
        raise UsageError(f"this is the proposal of a training; sign one with `propose --set {AGREE}=true`")
    name, exit_code = follow_run(folder, config, proposal=proposal)
    return frozen_by(folder, name, f"flwr ended with exit code {exit_code}; its log is above")


def follow_run(
    folder: Path, config: Mapping[str, Any], *, resume: bool = False, proposal: SignedProposal | None = None
) -> Followed:
    """Starts a run, and prints its log until it ends.

    Args:
        folder: The folder of the app, whose server runs on this machine.
        config: Keys of the run config that are set for this run.
        resume: Whether to continue the run from its last checkpoint.
        proposal: One that the coordinator signed elsewhere; None: it is signed here.
    """
    server_state, until = status(folder), time.monotonic() + START_TIMEOUT
    while not server_state["superlink"]["answers"] and time.monotonic() < until:
        time.sleep(1)  # it may have been started just now
        server_state = status(folder)
    if not server_state["superlink"]["answers"]:
        address = server_state["superlink"]["address"]
        raise RunError(f"no SuperLink answers at {address}; start it with `copfl federate server {folder}`")
    named = config.get("session.run")
    if resume and not (named or server_state["runs"]):
        raise RunError(f"no run in {folder / 'runs'} can be resumed; leave out --resume")
    name = str(config.get("session.run") or (server_state["runs"][-1] if resume else new_name()))
    if is_locked(folder / "runs" / name / ".lock"):
        raise RunError(f"the run {name} is running; `copfl federate status {folder}` shows how far it is")
    signed = proposal
    if signed is None:
        signed = propose(
            folder, {**config, "session.run": name}, coordinator_key(folder), read_roster(folder)
        )
    overridden = {**overrides(folder, signed.proposal), "session.run": name}
    overridden |= {"session.resume": resume, KEY: signed.text}
    print(f"proposal {signed.proposal.digest[:16]}, {len(signed.proposal.members)} members", flush=True)
    command = ["flwr", "run", ".", "copfl", "--stream", "-c", as_text(overridden)]
    done = subprocess.run(command, cwd=folder, env=flower_environment(folder.resolve() / FLOWER_HOME))
    return Followed(name, done.returncode)
