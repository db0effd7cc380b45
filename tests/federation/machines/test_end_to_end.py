"""A SuperLink and its nodes as real processes on this machine: they end where the simulation ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from copfl.core import tree
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.schemes import SCHEMES
from copfl.data.sets.datasets import load
from copfl.federation import init
from copfl.federation.machines.local import follow
from copfl.federation.machines.local_federation import LocalFederation
from copfl.federation.protocol.chained_log import AUDIT, verified
from copfl.federation.protocol.proposal import read
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.settings.flat import nested
from tests.federation.network import CONFIG, client_of, digits, farthest, server_of, simulated, write_nodes
from tests.federation.server import test_trees
from tests.slow import slow

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')


@pytest.mark.long
@slow  # .ci/run has it beside the other tests; test_same_run.py has the same without processes
def test_two_nodes_end_where_the_simulation_does(tmp_path: Path) -> None:
    """CO-PFL on the digits: the server's vector, every node's personal model, and Flower's count of the bytes.

    The process that shows the run's log is killed; the run continues.
    """
    config = CONFIG | {"run.clients": 2, "network.min_replies": 2, "run.rounds": 2, "network.deadline": 240}
    config |= {"model.width": 256, "optimizer.lr": 0.001}
    app, runs, federation = tmp_path / "app", tmp_path / "app" / "runs", digits(2)
    init(app, nested(config))
    nodes = write_nodes(federation, tmp_path / "nodes")
    with LocalFederation(app) as local:
        local.start_superlink()
        for client, node in enumerate(nodes):
            local.start_node(f"node-{client}", node)
        process = local.start_run({})
        while "Successfully started run" not in local.tail("run") and process.poll() is None:
            time.sleep(0.2)
        process.kill()
        records = list(follow(local, process, ServerFolder(str(runs), "test", resume=True), 2))
        (run,) = local.runs()
    assert not local.alive()
    agreed = read((runs / "test" / "proposal.json").read_bytes()).proposal
    for node in nodes:  # each one wrote down what left it, and which document it was for
        found = verified(Path(node["state-dir"]) / AUDIT)
        assert (found.problem, {line["proposal"] for line in found.lines}) == ("", {agreed.digest})
        left = [line["left"] for line in found.lines]
        assert left == [["number"], ["update", "metrics"], ["update", "metrics"]]
    assert [r["clients"] for r in records] == [[0, 1]] * 2

    settings = settings_of(config)
    server, state = server_of(settings, runs), simulated(settings, federation)
    assert farthest(server, state.server) <= 1e-5
    everybody = torch.arange(2)
    rows = state.clients.rows(everybody)
    theirs, ours = (settings.algorithm.downlink(s, everybody) for s in (state.server, server))
    for client, node in enumerate(nodes):
        record = client_of(settings, node, client, 1)
        assert farthest(record, tree.row(rows, client)) <= 1e-5
        personal = settings.algorithm.personal_model(settings.task, record, tree.row(ours, client))
        simulated_one = settings.algorithm.personal_model(
            settings.task, tree.row(rows, client), tree.row(theirs, client)
        )
        assert farthest((personal,), (simulated_one,)) <= 1e-5

    for ours_up, flowers in (("up", "inbound-bytes"), ("down", "outbound-bytes")):
        counted = sum(r["bytes"][ours_up] for r in records)
        assert counted == pytest.approx(run["network-traffic"][flowers], rel=0.05)


@slow
def test_trees_that_sites_grow_for_themselves_are_those_of_the_simulation(tmp_path: Path) -> None:
    dataset = load("diabetes")
    federation = FederatedData(dataset, SCHEMES["iid"](dataset, 3, seed=1))
    config = test_trees.CONFIGURED | {"network.deadline": 240}
    app, runs = tmp_path / "app", tmp_path / "app" / "runs"
    init(app, nested(config))
    nodes = write_nodes(federation, tmp_path / "nodes")
    with LocalFederation(app) as local:
        local.start_superlink()
        for client, node in enumerate(nodes):
            local.start_node(f"node-{client}", node)
        process = local.start_run({})
        list(follow(local, process, ServerFolder(str(runs), "test", resume=True), test_trees.ROUNDS))
    settings, state = settings_of(config), simulated(settings_of(config), federation)
    assert farthest(server_of(settings, runs), state.server) <= 1e-9
    rows = state.clients.rows(torch.arange(3))
    assert rows.trees.value.any()
    for client, node in enumerate(nodes):
        record = client_of(settings, node, client, test_trees.ROUNDS - 1)
        assert farthest(record, tree.row(rows, client)) <= 1e-9


@slow
def test_a_secure_sum_over_flower_is_the_plain_one(tmp_path: Path) -> None:
    """CO-PFL, one round: three nodes with their workers; the total is that of the simulation within the step."""
    config = CONFIG | {
        "secure.aggregation": True,
        "secure.bits": 48,
        "run.rounds": 1,
        "network.deadline": 240,
    }
    app, runs, federation = tmp_path / "app", tmp_path / "app" / "runs", digits()
    init(app, nested(config))
    with LocalFederation(app) as local:
        local.start_superlink()
        for client, node in enumerate(write_nodes(federation, tmp_path / "nodes")):
            local.add_node(f"node-{client}", node)
        process = local.start_run({})
        (record,) = follow(local, process, ServerFolder(str(runs), "test", resume=True), 1)
    settings = settings_of(config)
    assert record["secure_aggregation"]["revealed"] == [0, 1, 2]
    assert sorted(record["per_client"]) == ["bytes_down", "bytes_up"]
    assert farthest(server_of(settings, runs), simulated(settings, federation).server) <= 1e-5
