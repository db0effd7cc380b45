"""Members that wait for their owners: over Flower, with a process per node, under the strict policy.

Without the processes: attacks/test_node_answers.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from copfl.federation import init
from copfl.federation.machines.local import follow
from copfl.federation.machines.local_federation import LocalFederation
from copfl.federation.node import acceptance
from copfl.federation.policy.file import strict
from copfl.federation.protocol.chained_log import AUDIT, verified
from copfl.federation.protocol.keys import fingerprint
from copfl.federation.server.folder import ServerFolder
from copfl.settings.flat import nested
from tests.federation.network import CONFIG, digits, write_nodes
from tests.slow import slow

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')
ROUNDS, SECONDS = 2, 240.0


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.2)


@slow
def test_no_round_begins_before_the_owners_approved_the_members(tmp_path: Path) -> None:
    config = CONFIG | {"run.rounds": ROUNDS, "secure.aggregation": True, "algorithm.name": "fedavg"}
    app = init(tmp_path / "app", nested(config), secure=True)
    nodes = write_nodes(digits(), tmp_path / "nodes")
    with LocalFederation(app, secure=True) as local:
        name = fingerprint(local.coordinator.public)
        (tmp_path / "policy.toml").write_text(
            strict().replace("coordinators = []", f'coordinators = ["{name}"]')
        )
        local.start_superlink()
        for client, node in enumerate(nodes):
            local.add_node(f"node-{client}", node | {"policy": str(tmp_path / "policy.toml")})
        process = local.start_run({})
        states = [Path(node["state-dir"]) for node in nodes]
        until(lambda: all(acceptance.pending(state) for state in states))
        folder = ServerFolder(str(app / "runs"), "test", resume=True)
        assert not folder.rounds()
        for state in states:
            acceptance.approve(state, acceptance.pending(state)[0])
        lines = list(follow(local, process, folder, ROUNDS))
    assert [line["clients"] for line in lines] == [[0, 1, 2]] * ROUNDS
    answers = [verified(state / AUDIT).lines for state in states]
    assert all("[proposals.members]" in lines[0]["reason"] for lines in answers)
