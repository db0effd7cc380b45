"""The audit log, metrics, JSON lines and status of a federation: what its operators read."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

from copfl.errors import UsageError
from copfl.federation import init
from copfl.federation.node.ledger import Spent
from copfl.federation.operations.run_log import Metrics, endpoint, operations
from copfl.federation.operations.status import as_text, status
from copfl.federation.protocol import log_lines
from copfl.federation.protocol.app_folder import CONTACT, LAST_ERROR, WAITS
from copfl.federation.protocol.chained_log import AUDIT, append, verified
from copfl.federation.protocol.events import Event
from copfl.federation.protocol.log_lines import JsonFormatter
from copfl.federation.protocol.round_record import ROUNDS, read_rounds
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server
from copfl.files import locked
from copfl.settings.flat import nested
from copfl.wire import Packet
from tests.commands import called
from tests.federation.network import CONFIG, DirectTransport, digits, write_nodes


def audit(path: Path, *names: str) -> Path:
    for n, name in enumerate(names or ("started", "joined", "round_ended", "ended")):
        append(path / AUDIT, {"event": name, "round": n, "rounds": 3})
    return path / AUDIT


def test_each_line_has_the_hash_of_the_line_before(tmp_path: Path) -> None:
    path = audit(tmp_path)
    found = verified(audit(tmp_path, "again"))  # opened again, the chain continues
    assert found.problem == ""
    assert [e["event"] for e in found.lines] == ["started", "joined", "round_ended", "ended", "again"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:80", ("::1", 80)),
        (":80", ("127.0.0.1", 80)),
    ],
)
def test_metrics_are_for_this_machine_by_default(text: str, expected: tuple[str, int]) -> None:
    assert endpoint(text) == expected


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "1:70000", "0"])
def test_an_invalid_address_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="must be HOST:PORT or PORT"):
        endpoint(text)


def test_metrics_are_told_under_own_names_alone() -> None:
    """A web page can ask this machine under a name of its own, which it lets lead here."""
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with contextlib.closing(Metrics("test", f"127.0.0.1:{port}")) as metrics:
        metrics.add(Event.STARTED, round=1, rounds=5)
        for host, code in (
            (f"127.0.0.1:{port}", 200),
            (f"localhost:{port}", 200),
            (f"[::1]:{port}", 200),
            ("192.0.2.7", 200),  # an address cannot be made to lead elsewhere
            (f"attacker.example:{port}", 403),
            (f"127.0.0.1.attacker.example:{port}", 403),
            ("", 403),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.putrequest("GET", "/metrics", skip_host=True)
            connection.putheader("Host", host)
            connection.endheaders()
            answer = connection.getresponse()
            assert (answer.status, b"copfl_rounds_planned" in answer.read()) == (code, code == 200), host
            connection.close()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_worker_writes_log_lines(form: str) -> None:
    """It does not import Flower, which has the handler of the other processes."""
    program = "import copfl.federation.node.worker\n"
    program += "from copfl.federation.protocol.log_lines import configure_logging, logger\n"
    program += "configure_logging(); logger.info('copfl: trained'); logger.debug('copfl: detail')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, log_lines.LOG_FORMAT: form},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    (line,) = done.stderr.splitlines()
    assert (
        line == "INFO :      copfl: trained" if form == "text" else json.loads(line)["message"] == "trained"
    )


def test_a_log_line_is_json_without_control_characters() -> None:
    record = logging.LogRecord("flwr", logging.WARNING, "f", 1, "copfl: %s", ("a\x1b[2J\nb",), None)
    record.fields = {"event": "rejected", "client": 1}
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["message"], line["client"]) == ("warning", "a\\x1b[2J\\nb", 1)


class Operated:
    """A federation of three clients, of which the second sends damaged uploads in the second round."""

    def __init__(self, folder: Path, port: int) -> None:
        self.app = init(folder / "app", nested(CONFIG), port=_free_port())
        self.path = self.app / "runs" / "test"
        config = CONFIG | {"run.rounds": 3, "network.min_replies": 2}
        settings = settings_of(config)
        nodes = write_nodes(digits(), folder / "nodes")

        def fault(client: int, round: int, packet: Packet) -> Packet:
            return Packet(packet.head, packet.body[:-1]) if (client, round) == (1, 1) else packet

        transport = DirectTransport(settings, dict(enumerate(nodes, 100)), fault)
        server_folder = ServerFolder(str(self.app / "runs"), "test", resume=False)
        with server_folder.claimed(), operations(server_folder.path, "test") as log:
            (self.path / "config.json").write_text(json.dumps(config))
            server = new_server(settings, transport, server_folder, log, pause=0)
            for record in server.rounds():
                self.records, self.during = record, status(self.app)
            url = f"http://127.0.0.1:{port}/metrics"
            self.metrics = urllib.request.urlopen(url, timeout=5).read().decode()
        self.after = status(self.app)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    with pytest.MonkeyPatch.context() as patch:
        port = _free_port()
        patch.setenv(log_lines.METRICS, str(port))
        yield Operated(tmp_path_factory.mktemp("operated"), port)


def test_the_lines_of_a_real_run_are_records_of_rounds(operated: Operated) -> None:
    lines = [json.loads(line) for line in (operated.path / ROUNDS).read_text().splitlines()]
    rounds = read_rounds(operated.path / ROUNDS)
    assert [record.as_json() for record in rounds] == lines
    assert rounds[1].left_out.keys() == {1}
    assert rounds[1].left_out[1].startswith("it was damaged on its way")
    assert {"weight", "gradient_score", "prediction_score"} <= rounds[0].per_client.keys()


def test_the_status_of_a_run(operated: Operated) -> None:
    during, after = operated.during, operated.after
    assert (during["state"], after["state"]) == ("is running", "ended")
    assert after["rounds"] == {"done": 3, "of": 3}
    assert [c["connected"] for c in during["clients"].values()] == [True] * 3
    assert [c["last_round"] for c in after["clients"].values()] == [3, 3, 3]
    assert after["last_error"]["client"] == 1
    assert "damaged" in after["last_error"]["reason"]
    assert after["audit"]["problem"] == ""
    assert after["problems"] == [f"no SuperLink answers at {after['superlink']['address']}"]
    text = as_text(after)
    assert "rounds      3 of 3" in text
    assert "rejected, round 2, client 1: " in text


def test_the_audit_log_names_who_was_accepted_and_rejected(operated: Operated) -> None:
    found = verified(operated.path / AUDIT)
    names = [e["event"] for e in found.lines]
    assert (names[0], names[-1]) == (Event.STARTED, Event.ENDED)
    assert names.count(Event.JOINED) == 3
    second = [e for e in found.lines if e.get("round") == 2]
    assert [e["client"] for e in second if e["event"] == Event.ACCEPTED] == [0, 2]
    (ended,) = [e for e in second if e["event"] == Event.ROUND_ENDED]
    assert ended["accepted"] == [0, 2]
    assert list(ended["left_out"]) == ["1"]


def test_the_metrics_of_a_run(operated: Operated) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    found = {
        (s.name, *(v for k, v in sorted(s.labels.items()) if k != "run")): s.value
        for family in text_string_to_metric_families(operated.metrics)
        for s in family.samples
    }
    assert found["copfl_round",] == 3
    assert found["copfl_answers_total",] == 8
    assert found["copfl_rejected_total",] == 1
    assert found["copfl_round_seconds_count",] == 3
    assert found["copfl_bytes_total", "up"] > 1000
    assert found["copfl_metric", "accuracy"] == operated.records["mean"]["accuracy"]


def test_a_round_that_is_not_in_the_audit_log_is_a_problem(operated: Operated, tmp_path: Path) -> None:
    lines = (operated.path / AUDIT).read_bytes()
    try:
        cut = lines[: lines.index(b'"round": 3')].rpartition(b"\n")[0] + b"\n"
        (operated.path / AUDIT).write_bytes(cut)
        assert "round 3 is not in audit.jsonl" in status(operated.app)["audit"]["problem"]
    finally:
        (operated.path / AUDIT).write_bytes(lines)


def test_who_is_late(operated: Operated, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (operated.path / AUDIT).read_bytes()
    try:
        started = {"event": Event.ROUND_STARTED, "round": 4, "clients": [0, 1]}
        for line in (started, {"event": Event.ACCEPTED, "round": 4, "client": 0, "bytes": 1}):
            append(operated.path / AUDIT, line)
        with locked(operated.path / ".lock"), pytest.MonkeyPatch.context() as patch:
            now = time.time() + 60
            patch.setattr(time, "time", lambda: now)
            found = status(operated.app)
            patient, impatient = status(operated.app, waiting=100), status(operated.app, waiting=30)
            done = called(capsys, "federate", "status", operated.app, "--json", "--waiting", 30)
        assert list(found["waiting_for"]) == ["1"]
        assert found["late"]["1"].startswith("round 4: no answer for 6")
        (problem,) = set(impatient["problems"]) - set(patient["problems"])
        assert problem.startswith("a round has waited for 6")
        assert problem.endswith(" s, for clients 1 (node-1)")
        assert json.loads(done.out)["problems"] == impatient["problems"]
        found = status(operated.app)
        assert found["state"] == "was interrupted"
        assert "the run was interrupted" in found["problems"]
    finally:
        (operated.path / AUDIT).write_bytes(lines)


def test_the_status_command(operated: Operated, capsys: pytest.CaptureFixture[str]) -> None:
    done = called(capsys, "federate", "status", operated.app, "--json")
    assert (done.code, json.loads(done.out)["rounds"]["done"]) == (0, 3)
    assert called(capsys, "federate", "status", operated.app, "--check").code == 1
    wrong = called(capsys, "federate", "status", operated.app, "--run", "other")
    assert 'no run "other"' in wrong.err
    assert "test" in wrong.err


def test_a_run_of_an_earlier_version_has_a_status(operated: Operated, tmp_path: Path) -> None:
    """Without an audit log."""
    app = init(tmp_path / "app", nested(CONFIG))
    path = app / "runs" / "old"
    path.mkdir(parents=True)
    (path / "rounds.jsonl").write_bytes((operated.path / "rounds.jsonl").read_bytes())
    (path / "config.json").write_text('{"run.rounds": 3}')
    found = status(app)
    assert found["rounds"] == {"done": 3, "of": 3}
    assert found["audit"]["problem"] == ""
    assert "rounds      3 of 3" in as_text(found)


def test_the_status_of_a_node(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / ".worker").mkdir(parents=True)
    (state / "first").mkdir()
    (state / "first" / "round-000004.copfl").write_bytes(b"")
    assert status(state)["problems"] == ["the node is not running"]
    with locked(state / ".worker" / "lock"):
        assert "no contact" in status(state)["problems"][0]
        (state / ".worker" / WAITS).write_text("waiting until the coordinator has admitted site.key.pub")
        found = status(state)
        assert (
            found["problems"]
            == [found["not_connected"]]
            == ["waiting until the coordinator has admitted site.key.pub"]
        )
        (state / ".worker" / WAITS).unlink()
        (state / ".worker" / CONTACT).touch()
        (state / ".worker" / LAST_ERROR).write_text('{"at": "now", "reason": "its data"}')
        found = status(state)
    assert found["problems"] == []
    assert found["runs"] == {"first": 5}
    assert as_text(found).splitlines()[-1] == "last error  now : its data"


def test_an_epsilon_without_noise_is_null_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has no infinity, and the programs that watch a node would read nothing at all."""
    (tmp_path / "state" / ".worker").mkdir(parents=True)
    spent = Spent(math.inf, 1e-5, 0.0, 2, 1, without_noise=("first",))
    monkeypatch.setattr("copfl.federation.operations.status.spent", lambda *_: spent)
    done = called(capsys, "site", "status", tmp_path / "state", "--json")

    def refused(constant: str) -> None:
        raise AssertionError(constant)

    privacy = json.loads(done.out, parse_constant=refused)["privacy"]
    assert (privacy["epsilon"], privacy["without_noise"]) == (None, ["first"])
    assert "epsilon inf" in called(capsys, "site", "status", tmp_path / "state").out


def test_options_are_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    app = init(tmp_path / "app", nested(CONFIG))  # a folder that is none is said first
    done = called(capsys, "federate", "up", app, "--log-format", "xml")
    assert (done.code, 'no log_format "xml"' in done.err) == (2, True)
    done = called(capsys, "site", "node", "--superlink", "a:1", "--log-level", "loud")
    assert (done.code, 'no log_level "loud"' in done.err) == (2, True)
    done = called(capsys, "federate", "up", app, "--metrics", "x")
    assert (done.code, "must be HOST:PORT or PORT" in done.err) == (2, True)


def test_an_address_that_is_taken_ends_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv(log_lines.METRICS, str(listener.getsockname()[1]))
        with pytest.raises(UsageError, match="cannot be used: Address already in use"):
            operations(tmp_path, "a").__enter__()


def test_how_a_run_ends_is_its_last_event(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), operations(tmp_path, "a"):
        raise ValueError("x\x1b")
    (event,) = verified(tmp_path / AUDIT).lines
    assert (event["event"], event["reason"]) == ("failed", "x\\x1b")


def test_the_status_needs_no_torch() -> None:
    """A health check runs it every few seconds."""
    modules = (
        "copfl.federation.operations.backup, copfl.federation.operations.watched, copfl.cli.federate.commands"
    )
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_runs_that_others_submitted_are_shown(tmp_path: Path) -> None:
    """The SuperLink has them in its database; they have no folder. Flower's own tables, and another version's."""
    import sqlite3

    app = init(tmp_path / "app", nested(CONFIG))
    (app / "runs" / "ours").mkdir(parents=True)
    (app / "runs" / "ours" / "config.json").write_text("{}")
    (app / "agreements" / "agreed").mkdir(parents=True)
    with sqlite3.connect(app / "superlink.db") as database:
        database.execute("CREATE TABLE run (run_id, fab_id, override_config, primary_task_id)")
        database.execute("CREATE TABLE task (task_id, pending_at, finished_at, details)")
        for number, config, finished in (
            (1, '{"run": "ours"}', ""),
            (4, '{"session.run": "agreed"}', ""),
            (-2, '{"run": "th\\neirs"}', ""),
            (3, "{}", "x"),
        ):
            database.execute("INSERT INTO run VALUES (?, 'copfl/app', ?, ?)", (number, config, number))
            row = (number, f"2026-11-0{abs(number)}", finished, "refused" if finished else "")
            database.execute("INSERT INTO task VALUES (?, ?, ?, ?)", row)
    database.close()
    found = status(app)
    assert [other["run"] for other in found["other_runs"]] == ["th\\neirs", "run-3"]
    text = as_text(found)
    assert "other run   th\\neirs, app copfl/app, submitted 2026-11-02, has not begun" in text
    assert "other run   run-3, app copfl/app, submitted 2026-11-03, ended: refused" in text
    (app / "superlink.db").write_bytes(b"")
    assert status(app)["other_runs"] == []
