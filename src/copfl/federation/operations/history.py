"""A run as the server's audit log tells it: all events, folded into one record by `watched`. Without torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from copfl.errors import RunError, raised_as
from copfl.federation.protocol.events import Event

ERRORS = (Event.FAILED, Event.REJECTED, Event.REFUSED, Event.NO_RESULT)


@dataclass
class ClientHistory:
    """What the log says of one client; times are texts of ISO 8601."""

    is_connected: bool = False
    node: str = ""
    since: str = ""  # when it joined, or left
    last_answer: str = ""  # when; empty: none was counted or rejected
    last_round: int | None = None  # that counted its upload


@dataclass
class CurrentRound:
    """A round that has begun and not ended."""

    number: int
    started: str
    selected: list[int]
    answered: set[int] = field(default_factory=set)
    left_out: dict[int, str] = field(default_factory=dict)  # client -> why; it may be asked again
    slow: list[int] = field(
        default_factory=list
    )  # for whom alone a phase of a secure sum waits, long already

    @property
    def missing(self) -> list[int]:
        """The clients for which the round waits: in a secure sum, if known, those of its present phase."""
        return self.slow or [client for client in self.selected if client not in self.answered]


@dataclass
class RunHistory:
    """All events, folded."""

    first_round: int | None = None
    planned: int | None = None
    started: str = ""
    last_event: str = ""
    last_at: str = ""
    clients: dict[int, ClientHistory] = field(default_factory=dict)
    rounds: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # the events at the ends of rounds
    current: CurrentRound | None = None
    refused: dict[str, str] = field(default_factory=dict)  # node that is no client -> why
    last_error: Mapping[str, Any] | None = None
    evaluated: Mapping[str, Any] | None = None  # the event after the last round, with partial participation

    def state(self, *, is_running: bool) -> str:
        """What can be said after "the run"."""
        ended = {Event.ENDED: "ended", Event.FAILED: "failed"}
        usual = "was interrupted" if self.last_event else "ended"
        return "is running" if is_running else ended.get(self.last_event, usual)


def history_of(events: Iterable[Mapping[str, Any]]) -> RunHistory:
    """The history in the events of an audit log; RunError if one lacks what such an event has."""
    history = RunHistory()
    for number, event in enumerate(events, 1):
        damaged = f"event {number} of the audit log, {event['event']!r}, is damaged: {{}}"
        with raised_as(RunError, damaged, KeyError, TypeError, ValueError, AttributeError):
            _add(history, event)
    return history


def _add(history: RunHistory, event: Mapping[str, Any]) -> None:
    kind, at = event["event"], event["at"]
    history.last_event, history.last_at = kind, at
    history.last_error = event if kind in ERRORS else history.last_error
    if kind == Event.STARTED:
        history.first_round = event["round"] if history.first_round is None else history.first_round
        history.planned, history.started, history.current = int(event["rounds"]), at, None
        for client in history.clients.values():
            client.is_connected = False
    elif kind in (Event.JOINED, Event.LEFT):
        client = history.clients.setdefault(int(event["client"]), ClientHistory())
        client.is_connected, client.node, client.since = kind == Event.JOINED, event["node"], at
        if kind == Event.JOINED:  # its owner has approved the run meanwhile
            history.refused.pop(event["node"], None)
    elif kind == Event.ROUND_STARTED:
        history.current = CurrentRound(int(event["round"]), at, list(map(int, event["clients"])))
    elif kind in (Event.ACCEPTED, Event.REJECTED):
        number = int(event["client"])
        if number in history.clients:
            history.clients[number].last_answer = at
        if history.current is not None and kind == Event.ACCEPTED:
            history.current.answered.add(number)
            history.current.left_out.pop(number, None)
        elif history.current is not None:
            history.current.left_out[number] = event["reason"]
    elif kind == Event.WAITING and history.current is not None:
        history.current.slow = list(map(int, event.get("clients", [])))
    elif kind == Event.ROUND_ENDED:
        history.rounds[int(event["round"])], history.current = event, None
        for number in set(map(int, event["accepted"])) & history.clients.keys():
            history.clients[number].last_round = int(event["round"])
    elif kind == Event.EVALUATED:
        history.evaluated = event
    elif kind == Event.REFUSED:
        history.refused[event["node"]] = event["reason"]
