"""Every message that a node answers is in one table of the docs, with what it reveals; it refuses all others."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from copfl import wire
from copfl.core.algorithm import message_to_new_client
from copfl.federation.node import audit_log, secure_update, statistics
from copfl.federation.protocol.halves import HALVES
from copfl.federation.protocol.messages import HELLO, JOIN, REQUESTS, TRAIN, Field
from copfl.federation.protocol.secure_sum import PHASES
from copfl.federation.protocol.settings import settings_of
from copfl.federation.protocol.statistics import terms_of
from copfl.wire import Head
from tests.data.sites import CANDIDATES
from tests.federation.network import CONFIG, answered, digits, unsigned, write_nodes

PAGE = (Path(__file__).parents[3] / "docs" / "who-can-do-what.md").read_text()
Answered = tuple[str, str, str]  # what the run does, request, kind of message


def documented() -> list[Answered]:
    """The first columns of the table of the docs."""
    section = PAGE.partition("## What a node answers\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [(cells[0].strip(), cells[1].strip(), cells[2].strip()) for cells in rows[2:]]


def dispatched() -> set[Answered]:
    """What the code looks an answer up by."""
    ways = {False: "plain", True: "secure"}
    assert REQUESTS == (HELLO, TRAIN, JOIN)
    return {
        ("any", HELLO, ""),
        ("new clients", JOIN, "down"),
        *((f"{ways[is_secure]} training", TRAIN, kind) for is_secure, kind in secure_update.UPDATES),
        *((f"{ways[is_secure]} statistics", TRAIN, kind) for is_secure, kind in statistics.ANSWERS),
    }


def test_the_table_has_what_the_code_answers() -> None:
    table = documented()
    assert len(table) == len(set(table))
    assert set(table) == dispatched()


def test_the_log_has_a_word_for_all_that_leaves() -> None:
    of_halves = {Field.LOSSES} if (False, HALVES) in secure_update.UPDATES else set()
    kinds = {"upload", *PHASES, Field.STATISTICS, Field.NEW_CLIENT, Field.EVALUATED, *of_halves}
    assert kinds == set(audit_log.WHAT_LEAVES)


RUNS: dict[str, dict[str, Any]] = {
    "plain training": CONFIG,
    "secure training": CONFIG | {"secure.aggregation": True, "algorithm.name": "fedavg"},
    "plain statistics": {"samples.contract": CANDIDATES.as_json(), "session.agree": True, "run.clients": 3},
    "secure statistics": {
        "samples.contract": CANDIDATES.as_json(),
        "session.agree": True,
        "run.clients": 3,
        "secure.aggregation": True,
    },
    "new clients": CONFIG | {"session.join": 1},
}
KINDS = ("down", HALVES, Field.FINAL, *PHASES, "upload", "server", "client", "", "number")


@pytest.mark.parametrize("run", RUNS)
def test_a_node_answers_nothing_else(run: str, tmp_path: Path) -> None:
    """Every request with every kind of message that the table does not have, through the node's whole door."""
    config = {**RUNS[run], "session.run": "test"}
    node = unsigned(write_nodes(digits(), tmp_path, named=run != "new clients")[0])
    terms = terms_of(config) if "statistics" in run else settings_of(config)
    known = {(request, kind) for name, request, kind in documented() if name == run}
    for request, kind in itertools.product((TRAIN, JOIN, "reconnect", ""), KINDS):
        if (request, kind) not in known:
            packet = wire.encode((), Head(kind, "test", terms.layout, 0, 0), about={Field.SESSION: "a"})
            head, body = answered(node, config, packet, request)
            assert Field.REFUSED in json.loads(head), (request, kind)
            assert not body


def test_a_new_client_trains_as_often_as_the_run_says(tmp_path: Path) -> None:
    """The number of updates in the message alone would be the server's."""
    config = RUNS["new clients"] | {"session.run": "test"}
    node = unsigned(write_nodes(digits(), tmp_path, named=False)[0])
    settings = settings_of(config)
    server = settings.algorithm.server_init(settings.task, 3)
    down = message_to_new_client(settings.algorithm, server, torch.arange(3))
    for updates in (2, 0, 1):
        about = {Field.UPDATES: updates}
        packet = wire.encode(down, Head("down", "test", settings.layout, 3, 3), about=about)
        head = json.loads(answered(node, config, packet, JOIN)[0])
        assert ("and the message others" in head.get(Field.REFUSED, "")) is (updates != 1)
    assert head["kind"] == Field.NEW_CLIENT
