"""The log lines of a federation's processes, as text or as JSON: each process calls `configure_logging` once, first."""

import datetime
import json
import logging
import os

from copfl.federation.protocol.messages import MAX_TEXT, printable

METRICS, LOG_FORMAT, LOG_LEVEL = "COPFL_METRICS", "COPFL_LOG_FORMAT", "FLWR_LOG_LEVEL"  # of the environment


logger = logging.getLogger("flwr")


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
