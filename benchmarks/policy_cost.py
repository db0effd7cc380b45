"""What the strict policy costs a node in a round, against one without a file. Writes JSON, prints a table.

    python benchmarks/policy_cost.py [--out results/policy_cost.json]

Digits, MLP of width 64, three clients, five rounds; the first is not measured. CO-PFL, and FedAvg with noise. A node's
requests are answered in this process as by its worker: it reads and checks the policy, the run config, its ledger and
its memory of sums for each. Both policies get the same run, in turn; the permissive one allows everything that the run
asks for. Seconds are processor time of one client in one round: the median of the repetitions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the federation without a network is in the tests

from tests.federation.network import CONFIG, DirectTransport, digits, write_nodes

from copfl.federation.node.acceptance import accept
from copfl.federation.node.resident import Resident
from copfl.federation.policy.file import FILE, read_policy, write_policy, write_strict
from copfl.federation.policy.record import Policy, PrivacyRules, ProposalRules
from copfl.federation.protocol.messages import HELLO, Content, Reply
from copfl.federation.protocol.node_config import NodeConfig
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server

ROUNDS = 5
SECURE = CONFIG | {
    "run.rounds": ROUNDS,
    "secure.aggregation": True,
    "run.even_batches": True,
    "run.batch": 32,
    "model.width": 64,
}
NOISED = SECURE | {"algorithm.name": "fedavg", "privacy.noise": 8.0}
CASES = {"secure sums": SECURE, "secure sums with noise and a lifetime epsilon": NOISED}


class Answered(DirectTransport):
    """Passes requests to a worker's functions, and counts their processor time."""

    def __init__(self, config: dict[str, Any], nodes: dict[int, dict[str, Any]]) -> None:
        super().__init__(settings_of(config), nodes)
        self.config, self.seconds = config, 0.0
        self.workers = {node: Resident() for node in nodes}

    def send(self, node_id: int, request: str, content: Content, seconds: float) -> str:
        if request == HELLO:
            return super().send(node_id, request, content, seconds)
        started, name = time.process_time(), f"answer-{len(self.inbox)}-{time.monotonic_ns()}"
        accepted = accept(NodeConfig.parse(self.online[node_id]), self.config)
        answer = self.workers[node_id].answer(accepted, request, content).content
        self.seconds += time.process_time() - started
        self.inbox[name] = Reply(name, answer)
        return name


def measured(config: dict[str, Any], is_strict: bool) -> float:
    """The processor seconds of one client in one round."""
    with tempfile.TemporaryDirectory() as name:
        nodes = write_nodes(digits(), Path(name) / "nodes")
        for node in nodes:
            path = Path(node["state-dir"]) / FILE
            policy = Policy()
            if is_strict:
                write_strict(path)
                policy = read_policy(path)
                if config.get("privacy.noise"):
                    policy = dataclasses.replace(policy, privacy=PrivacyRules(lifetime_epsilon=1e6))
            write_policy(path, dataclasses.replace(policy, proposals=ProposalRules(unsigned=True)))
        transport = Answered(config, dict(enumerate(nodes, 100)))
        folder = ServerFolder(str(Path(name) / "runs"), "test", resume=False)
        server = new_server(transport.settings, transport, folder, pause=0, retry=0)
        rounds = server.rounds()
        next(rounds)
        transport.seconds = 0.0
        records = list(rounds)
        if any(len(record["clients"]) != len(nodes) for record in records):
            raise SystemExit(f"clients were left out: {records[-1]['why']}")
        return transport.seconds / len(nodes) / len(records)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/policy_cost.json"))
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| run | permissive s | strict s | more |")
    print("| --- | --- | --- | --- |")
    for name, config in CASES.items():
        measured(config, True)  # imports and caches
        pairs = [(measured(config, False), measured(config, True)) for _ in range(args.repetitions)]
        permissive, strict = (statistics.median(column) for column in zip(*pairs, strict=True))
        more = statistics.median(second / first for first, second in pairs) - 1
        rows.append({"run": name, "permissive_s": permissive, "strict_s": strict, "more": more})
        print(f"| {name} | {permissive:.4f} | {strict:.4f} | {100 * more:.0f} % |", flush=True)
    machine = {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    content = {"machine": machine, "repetitions": args.repetitions, "rows": rows}
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
