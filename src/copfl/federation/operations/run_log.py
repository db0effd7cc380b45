"""The log that a server's run writes: log lines, audit log, metrics. Without torch.

`machines.server_app` opens `operations` around a run; the server gets it as its `Log`.
"""

import contextlib
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from copfl.errors import UsageError, one_of, raised_as
from copfl.federation.protocol.chained_log import AUDIT, append
from copfl.federation.protocol.events import Event, Log
from copfl.federation.protocol.log_lines import LOG_FORMAT, LOG_LEVEL, METRICS, logger
from copfl.federation.protocol.messages import printable

FORMATS, LEVELS = ("text", "json"), ("debug", "info", "warning", "error")
LOOPBACK = "127.0.0.1"
# On disk before anything else is done.
SYNCED = (Event.STARTED, Event.ROUND_ENDED, Event.ENDED, Event.FAILED)
WARNINGS = (Event.REFUSED, Event.REJECTED, Event.WAITING, Event.NO_RESULT)

# -- log lines -----------------------------------------------------------------------------------------------


def environment(metrics: str | None, log_format: str | None, log_level: str | None) -> dict[str, str]:
    """The variables by which the processes of a federation receive these options.

    Args:
        metrics: The address of metrics for Prometheus; None: there are none.
        log_format: Of FORMATS; None: text.
        log_level: Of LEVELS; None: info.
    """
    one_of(FORMATS, log_format=log_format or "text")
    one_of(LEVELS, log_level=log_level or "info")
    if metrics:
        endpoint(metrics)
    variables = {METRICS: metrics, LOG_FORMAT: log_format, LOG_LEVEL: log_level}
    return {name: value for name, value in variables.items() if value}


# -- metrics -------------------------------------------------------------------------------------------------


def endpoint(address: str) -> tuple[str, int]:
    """The host and the port of "HOST:PORT" or "PORT"; without a host, this machine alone can connect."""
    host, _, port = address.rpartition(":")
    if not (port.isdecimal() and 0 < int(port) < 2**16):
        as_given = f'metrics="{printable(address, 60)}"'
        raise UsageError(f"{as_given} must be HOST:PORT or PORT, such as {LOOPBACK}:9464")
    return host.strip("[]") or LOOPBACK, int(port)


class _Threads(ThreadingMixIn, WSGIServer):
    """A thread for each request, so that a silent one keeps nobody waiting."""

    daemon_threads = True


class _Silent(WSGIRequestHandler):
    """Prints nothing of requests."""

    timeout = 10.0

    def log_message(self, format: str, *args: object) -> None:
        pass


def _for_own_names(app: Any, host: str) -> Any:
    """A WSGI app that answers under addresses and names of this machine alone.

    A web page that somebody visits can ask this machine under a name of its own, which leads here, and would read
    the answer. It cannot do so under an address.
    """
    own = {host.lower(), "localhost", socket.gethostname().lower(), socket.getfqdn().lower()}

    def checked(environ: dict[str, Any], start: Any) -> Any:
        name = str(environ.get("HTTP_HOST", "")).lower()
        name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if name not in own:
                start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
                return [b"ask by the address of this machine, or by the name that --metrics has\n"]
        return app(environ, start)

    return checked


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
            self.server = make_server(
                host, port, _for_own_names(prometheus.make_wsgi_app(registry), host), _Threads, _Silent
            )
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def add(self, event: str, **fields: Any) -> None:
        """Counts an event.

        Args:
            event: Its name.
            fields: Its fields, as the audit log has them.
        """
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

    Args:
        folder: The server's, of the run.
        run: The run's name.
    """
    address = os.environ.get(METRICS)
    with contextlib.ExitStack() as stack:
        metrics = stack.enter_context(contextlib.closing(Metrics(run, address))) if address else None

        def log(text: str, /, event: str = "", **fields: Any) -> None:
            if text:
                level = logging.WARNING if event in WARNINGS else logging.INFO
                named = {"event": event, **fields} if event else {}
                logger.log(level, "copfl: %s", text, extra={"fields": named})
            if event:
                append(folder / AUDIT, {"event": event, **fields}, durable=event in SYNCED)
            if event and metrics is not None:
                metrics.add(event, **fields)

        try:
            yield log
        except Exception as error:
            log("", Event.FAILED, reason=printable(error))
            raise
        log("", Event.ENDED)
