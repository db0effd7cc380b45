"""What the operators of a federation read: the audit log, JSON log lines, metrics. Without torch.

Each line of the audit log has the hash of the line before it. So a line that was changed or removed is seen,
except at the end of the file: note the hash of the last line elsewhere (`copfl federate status` prints it).
"""

import contextlib
import datetime
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from copfl.errors import RunError, UsageError, one_of, raised_as
from copfl.flower.registry import Event, Log
from copfl.flower.transport import MAX_TEXT, printable

AUDIT = "audit.jsonl"  # in the run's folder
FIRST_PREVIOUS = "0" * 64  # the first line has no line before it
METRICS, LOG_FORMAT, LOG_LEVEL = "COPFL_METRICS", "COPFL_LOG_FORMAT", "FLWR_LOG_LEVEL"  # of the environment
FORMATS, LEVELS = ("text", "json"), ("debug", "info", "warning", "error")
LOOPBACK = "127.0.0.1"
# On disk before anything else is done.
SYNCED = (Event.STARTED, Event.ROUND_ENDED, Event.ENDED, Event.FAILED, Event.RELEASED, Event.SETTLED)
WARNINGS = (Event.REFUSED, Event.REJECTED, Event.WAITING, Event.NO_RESULT)

logger = logging.getLogger("flwr")


# -- the audit log -------------------------------------------------------------------------------------------


class AuditLog:
    """The open audit log of a run; lines are only appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        *lines, rest = path.read_bytes().split(b"\n")
        self._previous = _hash(lines[-1]) if lines else FIRST_PREVIOUS
        if rest:  # a kill cut it off
            self._write(b"\n")
            self._previous = _hash(rest)
            self.add(Event.RECOVERED)

    def add(self, event: str, **fields: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"at": now, "event": event, **fields, "previous": self._previous}).encode()
        self._write(line + b"\n")
        self._previous = _hash(line)
        if event in SYNCED:
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, content: bytes) -> None:
        start = os.fstat(self._file).st_size
        try:
            while content:
                content = content[os.write(self._file, content) :]
        except OSError as error:
            os.ftruncate(self._file, start)
            raise RunError(
                f"cannot write {self.path}: {error.strerror}; free some space, then resume"
            ) from error


class Verified(NamedTuple):
    """An audit log as it was read."""

    events: list[dict[str, Any]]
    problem: str  # empty: no line was changed or removed
    last_hash: str


def verified(path: Path) -> Verified:
    """The events of an audit log; an incomplete last line is being written, and is left out."""
    *lines, _ = path.read_bytes().split(b"\n")
    events, problem, previous, cut = list[dict[str, Any]](), "", FIRST_PREVIOUS, 0
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            is_chained = event["previous"] == previous and isinstance(event["event"], str)
            datetime.datetime.fromisoformat(event["at"])
            events.append(event)
            is_chained &= not cut or event["event"] == Event.RECOVERED
            cut = 0
        except (ValueError, TypeError, KeyError, RecursionError):
            is_chained, cut = not cut, number  # a kill cut it off, if the next line says so
        if not (is_chained or problem):
            problem = f"line {number} of {path.name} was changed, or lines before it were changed or removed"
        previous = _hash(line)
    if cut and not problem:
        problem = f"line {cut} of {path.name} was changed"
    return Verified(events, problem, previous)


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


# -- log lines -----------------------------------------------------------------------------------------------


class JsonFormatter(logging.Formatter):
    """A line of JSON for each record of a log."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line = {"at": at, "level": record.levelname.lower(), "process": record.process}
        message = printable(record.getMessage().removeprefix("copfl: "), 10 * MAX_TEXT)
        error = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**line, "message": message, **getattr(record, "fields", {}), **error})


def configure_logging(*formatters: type[logging.Formatter]) -> None:
    """Sets the format of this process' log lines, and of these formatters; Flower sets their level."""
    if not logger.handlers:  # Flower is not imported here
        to_stderr = logging.StreamHandler()
        to_stderr.setFormatter(logging.Formatter("%(levelname)s :      %(message)s"))  # as Flower writes it
        logger.addHandler(to_stderr)
        logger.setLevel(os.environ.get(LOG_LEVEL, "info").upper())
    if os.environ.get(LOG_FORMAT) != "json":
        return
    formatter = JsonFormatter()
    for handler in logger.handlers:
        # Flower's handler ignores formatters.
        handler.format = formatter.format  # type: ignore[method-assign]
    for other in formatters:
        other.format = lambda self, record: formatter.format(record)  # type: ignore[method-assign]


def environment(metrics: str | None, log_format: str | None, log_level: str | None) -> dict[str, str]:
    """The variables by which the processes of a federation receive these options."""
    one_of(FORMATS, log_format=log_format or "text")
    one_of(LEVELS, log_level=log_level or "info")
    if metrics:
        endpoint(metrics)
    given = {METRICS: metrics, LOG_FORMAT: log_format, LOG_LEVEL: log_level}
    return {name: value for name, value in given.items() if value}


# -- metrics -------------------------------------------------------------------------------------------------


def endpoint(address: str) -> tuple[str, int]:
    """The host and the port of "HOST:PORT" or "PORT"; without a host, this machine alone can connect."""
    host, _, port = address.rpartition(":")
    if not (port.isdecimal() and 0 < int(port) < 2**16):
        given = f'metrics="{printable(address, 60)}"'
        raise UsageError(f"{given} must be HOST:PORT or PORT, such as {LOOPBACK}:9464")
    return host.strip("[]") or LOOPBACK, int(port)


class Metrics:
    """The metrics of a run in Prometheus' text format, at http://HOST:PORT/metrics while it continues."""

    def __init__(self, run: str, address: str) -> None:
        missing = 'metrics need prometheus_client: pip install "copfl[flower]"'
        with raised_as(UsageError, missing, ImportError):
            import prometheus_client as prometheus
        registry = prometheus.CollectorRegistry()

        def made(kind: Any, name: str, text: str, *labels: str) -> Any:
            return kind(f"copfl_{name}", text, ["run", *labels], registry=registry)

        self.run = run
        self.round = made(prometheus.Gauge, "round", "The last finished round, from 1.")
        self.planned = made(prometheus.Gauge, "rounds_planned", "The rounds of the run.")
        self.connected = made(prometheus.Gauge, "clients_connected", "Clients that are connected.")
        self.seconds = made(prometheus.Summary, "round_seconds", "Duration of a round.")
        self.answers = made(prometheus.Counter, "answers", "Uploads that were accepted.")
        self.rejected = made(prometheus.Counter, "rejected", "Clients that were left out of a round.")
        self.bytes = made(prometheus.Counter, "bytes", "Bytes of messages.", "direction")
        self.metric = made(prometheus.Gauge, "metric", "The primary metric, mean over clients.", "metric")
        host, port = endpoint(address)
        with raised_as(UsageError, f"metrics={address} cannot be used: {{}}; name another port", OSError):
            self.server, self.thread = prometheus.start_http_server(port, host, registry)

    def add(self, event: str, **fields: Any) -> None:
        if event == Event.STARTED:
            self.round.labels(self.run).set(fields["round"] - 1)
            self.planned.labels(self.run).set(fields["rounds"])
        elif event in (Event.JOINED, Event.LEFT):
            self.connected.labels(self.run).inc(1 if event == Event.JOINED else -1)
        elif event == Event.ROUND_ENDED:
            self.round.labels(self.run).set(fields["round"])
            self.seconds.labels(self.run).observe(fields["seconds"])
            self.answers.labels(self.run).inc(len(fields["accepted"]))
            self.rejected.labels(self.run).inc(len(fields["left_out"]))
            for direction, count in fields["bytes"].items():
                self.bytes.labels(self.run, direction).inc(count)
            if fields["value"] is not None:
                self.metric.labels(self.run, fields["metric"]).set(fields["value"])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@contextlib.contextmanager
def operations(folder: Path, run: str) -> Iterator[Log]:
    """The log of a server's run: log lines, the audit log, and metrics if the environment asks for them.

    How the run ends is its last event.
    """
    address = os.environ.get(METRICS)
    receivers: list[Metrics | AuditLog] = []
    with contextlib.ExitStack() as stack:
        if address:
            receivers.append(stack.enter_context(contextlib.closing(Metrics(run, address))))
        receivers.insert(0, stack.enter_context(contextlib.closing(AuditLog(folder / AUDIT))))

        def log(text: str, /, event: str = "", **fields: Any) -> None:
            if text:
                level = logging.WARNING if event in WARNINGS else logging.INFO
                named = {"event": event, **fields} if event else {}
                logger.log(level, "copfl: %s", text, extra={"fields": named})
            for receiver in receivers if event else ():
                receiver.add(event, **fields)

        try:
            yield log
        except Exception as error:
            log("", Event.FAILED, reason=printable(error))
            raise
        log("", Event.ENDED)
