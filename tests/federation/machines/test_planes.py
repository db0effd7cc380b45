"""Two planes: what other machines reach of a server, by itself and behind a reverse proxy that is started for real."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

import httpx
from fastapi.routing import iter_route_contexts

from copfl.federation import init
from copfl.federation.machines.deployed import serve, write_connection
from copfl.federation.machines.planes import Planes, is_served, is_this_machine
from copfl.federation.operations.watched import answers
from copfl.federation.protocol.keys import make_key
from copfl.federation.server.certificates import make_certificates
from copfl.settings.flat import nested
from tests.federation.network import CONFIG, digits, write_nodes
from tests.slow import slow

ROOT = Path(__file__).parents[3]
PROXY = (ROOT / "deploy" / "nginx.conf").read_text()
OTHER = "192.0.2.7"  # another machine's address
CONTROL = (
    "list-runs",
    "start-run",
    "stop-run",
    "register-node",
    "unregister-node",
    "list-nodes",
    "stream-logs",
)


@pytest.mark.parametrize(("client", "expected"), [
    ("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("::ffff:127.0.0.1", True),
    ("192.0.2.7", False), ("::ffff:192.0.2.7", False), ("fe80::1%eth0", False), ("", False), ("localhost", False),
    ("127.0.0.1, 192.0.2.7", False),
])  # fmt: skip
def test_which_addresses_are_this_machine(client: str, expected: bool) -> None:
    assert is_this_machine(client) == expected


@pytest.mark.parametrize("path", [
    "/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs", "/openapi.json", "/", "", "/v1/fleet", "//v1/fleet/x",
    "/V1/FLEET/x", "/v1/fleet%2fx",
])  # fmt: skip
def test_another_machine_reaches_nothing_but_the_fleet(path: str) -> None:
    assert not is_served(path, "192.0.2.7")
    assert is_served("/v1/fleet/pull-messages", "192.0.2.7")


@pytest.fixture(scope="module")
def routes() -> tuple[Any, list[str]]:
    """Flower's own server, in memory, and all its paths."""
    from flwr.superlink.main import create_app

    app = create_app()
    paths = sorted({context.path for context in iter_route_contexts(app.routes) if context.path})
    return app, paths


def status_of(app: Any, path: str, client: str, method: str = "POST") -> int:
    """The status of the answer to an empty request; an error in Flower's program is 500."""

    async def asked() -> int:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(client, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as sender:
            return (await sender.request(method, path)).status_code

    return asyncio.run(asked())


def test_every_path_of_flowers_server_is_closed_to_other_machines(routes: tuple[Any, list[str]]) -> None:
    """Without the planes each answers: it is the protection, not Flower's login."""
    app, paths = routes
    beyond = [path for path in paths if not path.startswith("/v1/fleet/")]
    assert {f"/v1/control/{name}" for name in CONTROL} | {"/v1/runtime/acquire-task"} <= {*beyond}
    for path in beyond:
        assert status_of(app, path, OTHER) != 404, path
        for method in ("POST", "GET"):
            assert status_of(Planes(app), path, OTHER, method) == 404, path
    open_to_all = [path for path in paths if path.startswith("/v1/fleet/")]
    assert len(open_to_all) >= 10
    for path in open_to_all:
        assert status_of(Planes(app), path, OTHER) != 404, path


def test_this_machine_reaches_what_copfl_uses_of_control_and_no_more(routes: tuple[Any, list[str]]) -> None:
    app, paths = routes
    control = [path for path in paths if path.startswith("/v1/control/")]
    served = [path for path in control if status_of(Planes(app), path, "127.0.0.1") != 404]
    names = [path.removeprefix("/v1/control/") for path in served]
    assert sorted(names) == sorted((*CONTROL, "stream-run-events"))
    assert "/v1/control/start-automation" in control


def test_the_connection_of_the_command_is_to_this_machine(tmp_path: Path) -> None:
    write_connection(tmp_path, "fl.example.org", 8800, secure=True)
    text = (tmp_path / ".flwr" / "config.toml").read_text()
    assert 'address = "127.0.0.1:8800"' in text
    assert "fl.example.org" not in text


@pytest.mark.parametrize("listen", ["8801", ":8801", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_an_error(listen: str, tmp_path: Path) -> None:
    from copfl.errors import UsageError

    app = init(tmp_path / "app", nested(CONFIG))
    with pytest.raises(UsageError, match="must be HOST:PORT"):
        serve(app, listen)


# -- nginx ---------------------------------------------------------------------------------------------------


class Ports:
    """Free ports in place of those of the file."""

    def __init__(self) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        self.fleet, self.server, self.control = (s.getsockname()[1] for s in sockets)
        for listener in sockets:
            listener.close()


@contextlib.contextmanager
def proxy(folder: Path, keys: Path, ports: Ports) -> Iterator[None]:
    """nginx with the file of the deployment: only its ports and paths differ."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    text = PROXY.replace("/etc/copfl/", f"{keys}/").replace("fl.example.org", "localhost")
    for number, port in ((8800, ports.fleet), (8801, ports.server), (8802, ports.control)):
        text = re.sub(rf"\b{number}\b", str(port), text)
    places = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/nginx.pid;\nerror_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log {folder}/access.log;\n{places}{text}\n}}\n"
    )
    checked = subprocess.run([program, "-t", "-c", str(config)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen([program, "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", ports.fleet), 1):
                break
            time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def coordinator(folder: Path, name: str = "coordinator") -> None:
    """The certificate of docs/operations.md, by its command."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    (command,) = re.findall(
        r"^openssl req -x509 .*", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE
    )
    subprocess.run(command.replace("coordinator", name).split(), cwd=folder, check=True, capture_output=True)


def context(keys: Path, name: str = "") -> ssl.SSLContext:
    """Trusts the authority; shows a certificate if it has a name."""
    trusted = ssl.create_default_context(cafile=str(keys / "ca.pem"))
    if name:
        trusted.load_cert_chain(keys / f"{name}.pem", keys / f"{name}.key")
    return trusted


class Echo(http.server.BaseHTTPRequestHandler):
    """A server that answers every path with its name."""

    def do_POST(self) -> None:
        content = f"{self.path} from {self.headers.get('X-Forwarded-For')}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Ports]]:
    """The proxy before a server that answers everything."""
    folder, ports = tmp_path_factory.mktemp("proxy"), Ports()
    keys = folder / "keys"
    make_certificates(keys, "localhost")
    coordinator(keys)
    coordinator(keys, "stranger")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", ports.server), Echo)
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(keys / "server.pem", keys / "server.key")
    server.socket = own.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with proxy(folder, keys, ports):
        yield keys, ports
    server.shutdown()
    server.server_close()


def raw(keys: Path, port: int, path: str, certificate: str = "") -> tuple[int, str]:
    """The status and the body for a path exactly as it is given: clients normalise theirs."""
    with (
        socket.create_connection(("localhost", port), 5) as plain,
        context(keys, certificate).wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        secure.sendall(
            f"POST {path} HTTP/1.0\r\nHost: localhost\r\nX-Forwarded-For: 127.0.0.1\r\n\r\n".encode()
        )
        answer = b""
        while part := secure.recv(65536):
            answer += part
    head, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
    return int(head.split()[1]), body


def test_the_proxy_passes_the_fleet_with_its_true_sender(proxied: tuple[Path, Ports]) -> None:
    keys, ports = proxied
    assert raw(keys, ports.fleet, "/v1/fleet/pull-messages") == (
        200,
        "/v1/fleet/pull-messages from 127.0.0.1",
    )
    assert "$remote_addr" in PROXY  # what a client says of itself is replaced


@pytest.mark.parametrize("path", [
    *(f"/v1/control/{name}" for name in CONTROL), "/v1/runtime/acquire-task", "/docs", "/openapi.json", "/health", "/",
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/..%2fcontrol/list-runs",
    "/v1//control/list-runs", "/v1/%63ontrol/list-runs", "/V1/fleet/x",
])  # fmt: skip
def test_the_proxy_passes_nothing_else(path: str, proxied: tuple[Path, Ports]) -> None:
    keys, ports = proxied
    status, body = raw(keys, ports.fleet, path)
    assert status in (400, 404)
    assert "from" not in body


def test_control_from_elsewhere_wants_the_coordinators_certificate(proxied: tuple[Path, Ports]) -> None:
    """An outsider has ca.pem, as every member has, and a stranger a certificate of its own."""
    keys, ports = proxied
    assert raw(keys, ports.control, "/v1/control/list-runs", "coordinator") == (
        200,
        "/v1/control/list-runs from None",  # for the server it is this machine
    )
    for certificate in ("", "stranger"):
        status, body = raw(keys, ports.control, "/v1/control/list-runs", certificate)
        assert (status, "from" in body) == (400, False)
    for path in ("/v1/runtime/acquire-task", "/v1/fleet/pull-messages", "/docs"):
        assert raw(keys, ports.control, path, "coordinator")[0] == 404


def test_the_proxy_checks_the_server(proxied: tuple[Path, Ports]) -> None:
    assert PROXY.count("proxy_ssl_verify on;") == PROXY.count("proxy_pass ") == 2


# -- a federation behind it ----------------------------------------------------------------------------------


def ask(port: int, keys: Path, method: str, certificate: str = "", **fields: Any) -> Any:
    """The answer of Flower's control interface to a client that is not the `flwr` command."""
    from flwr.proto import control_pb2

    name = re.sub(r"(?<!^)([A-Z])", r"-\1", method).lower()
    content = getattr(control_pb2, f"{method}Request")(**fields).SerializeToString()
    headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    with httpx.Client(verify=context(keys, certificate)) as client:
        return client.post(f"https://localhost:{port}/v1/control/{name}", content=content, headers=headers)


@slow
def test_a_node_trains_through_the_proxy_and_an_outsider_gets_nothing(tmp_path: Path) -> None:
    """`copfl federate server --listen`, nginx, and two nodes; each request of the outsider would change something."""
    ports, app = Ports(), tmp_path / "app"
    config = CONFIG | {"run.clients": 2, "network.min_replies": 2, "run.rounds": 2}
    init(app, nested(config), host="localhost", port=ports.fleet, secure=True)
    keys = app / "keys"
    coordinator(keys)
    coordinator(keys, "stranger")
    make_key(tmp_path / "outsider")
    nodes = write_nodes(digits(2), tmp_path / "nodes")
    command = [sys.executable, "-m", "copfl", "federate"]
    with contextlib.ExitStack() as stack:

        def start(name: str, *words: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context(open(tmp_path / f"{name}.log", "wb"))
            process = subprocess.Popen([*command, *words], stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        stack.enter_context(proxy(tmp_path, keys, ports))
        server = start("server", "server", str(app), "--listen", f"127.0.0.1:{ports.server}")
        deadline = time.monotonic() + 180
        while not answers("127.0.0.1", ports.server):  # a run that is started before is an error
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        for client, node in enumerate(nodes):
            secure = ["--root-certificates", str(keys / "ca.pem"), "--key", str(keys / f"node-{client}")]
            given = ["--data", node["data"], "--state-dir", node["state-dir"], "--client", str(client)]
            given += ["--coordinator", str(keys / "coordinator.pub")]
            start(f"node-{client}", "node", "--superlink", f"localhost:{ports.fleet}", *secure, *given)
        done = start("run", "run", str(app), "--run", "test").wait(480)
        assert done == 0, (tmp_path / "run.log").read_text()[-3000:]
        rounds = (app / "runs" / "test" / "rounds.jsonl").read_text().splitlines()
        assert len(rounds) == 2
        listed = ask(ports.control, keys, "ListRuns", "coordinator")
        assert listed.status_code == 200
        known = ask(ports.control, keys, "ListNodes", "coordinator").content
        public = (tmp_path / "outsider.pub").read_bytes()
        for method, fields in (
            ("ListRuns", {}),
            ("ListNodes", {}),
            ("StartRun", {}),
            ("StopRun", {"run_id": 1}),
            ("RegisterNode", {"public_key": public}),
            ("UnregisterNode", {"node_id": 1}),
        ):
            assert ask(ports.fleet, keys, method, **fields).status_code == 404
            assert ask(ports.control, keys, method, "stranger", **fields).status_code == 400
            assert ask(ports.control, keys, method, **fields).status_code == 400
        again = ask(ports.control, keys, "ListNodes", "coordinator").content
        assert len(again) == len(known)
