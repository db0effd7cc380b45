"""The cost of secure aggregation: bytes and seconds of a round, against a plain one. Writes JSON, prints a table.

    python benchmarks/secure_aggregation.py [--out results/secure_aggregation.json]

Digits, MLP, two rounds; the second is measured. Server and clients are in one process and call each other, so
that only the computation counts. Seconds are processor time: of one client, and of the server.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from copfl.core import tree
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.schemes import SCHEMES
from copfl.data.sets.datasets import load
from copfl.errors import CopflError
from copfl.federation.node import secure_update
from copfl.federation.node.data import NodeData
from copfl.federation.node.known_data import hashes_of
from copfl.federation.node.node import Node
from copfl.federation.node.respond import greeting
from copfl.federation.policy.record import Policy
from copfl.federation.protocol.messages import HELLO, Content, Reply, refusal
from copfl.federation.protocol.node_config import NodeConfig
from copfl.federation.protocol.settings import TrainingSettings, settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server
from copfl.wire import Packet

CASES = [("fedavg", 3, 0), ("copfl", 3, 0), ("copfl", 10, 0), ("copfl", 30, 0)]
COLUMNS = ("up_kB", "down_kB", "client_s", "server_s")


class Calls:
    """The clients, called in this process; their processor time is counted."""

    def __init__(self, settings: TrainingSettings, data: list[NodeData], folder: Path) -> None:
        self.settings, self.data = settings, data
        configs = [{"client": n, "state-dir": str(folder / str(n))} for n in range(len(data))]
        self.clients = [Node(NodeConfig.parse(config), Policy()) for config in configs]
        self.seconds, self.inbox = 0.0, dict[str, Reply]()

    def nodes(self) -> list[int]:
        return list(range(len(self.data)))

    def send(self, node: int, request: str, content: Content, seconds: float) -> str:
        started, client = time.process_time(), self.clients[node]
        name = f"{len(self.inbox)}-{node}-{started}"
        try:
            if request == HELLO:
                answer: Content = greeting(client, content)
            else:
                packet = Packet(*content)
                answer = secure_update.round_answer(self.settings, client, packet, lambda *_: self.data[node])
        except CopflError as error:
            answer = refusal(error)
        self.seconds += time.process_time() - started
        self.inbox[name] = Reply(name, answer)
        return name

    def replies(self, message_ids: Collection[str]) -> list[Reply]:
        return [self.inbox.pop(name) for name in message_ids if name in self.inbox]


def measured(algorithm: str, clients: int, neighbours: int, secure: bool, width: int) -> dict[str, float]:
    """Kilobytes of one client, and seconds of one client and of the server, in the second round."""
    config: dict[str, Any] = {
        "session.run": "cost",
        "run.rounds": 2,
        "algorithm.name": algorithm,
        "run.clients": clients,
    }
    config |= {
        "model.name": "mlp",
        "samples.shape": [1, 8, 8],
        "samples.mean": [0.3],
        "samples.std": [0.37],
        "model.width": width,
    }
    config |= {"network.min_replies": clients, "secure.aggregation": secure, "secure.neighbours": neighbours}
    settings = settings_of(config)
    dataset = load("digits")
    federation = FederatedData(dataset, SCHEMES["iid"](dataset, clients, seed=1))
    rows = [(federation.train.rows([n]), federation.test.rows([n])) for n in range(clients)]
    parts = [[tree.row(part, 0) for part in pair] for pair in rows]
    data = [NodeData(train, test, hashes_of(train.x.numpy()), settings.task) for train, test in parts]
    with tempfile.TemporaryDirectory() as folder:
        transport = Calls(settings, data, Path(folder))
        files = ServerFolder(folder, "cost", resume=False)
        server = new_server(settings, transport, files, pause=0)
        rounds = server.rounds()
        next(rounds)
        started, transport.seconds = time.process_time(), 0.0
        record = next(rounds)
        total = time.process_time() - started
    if len(record["clients"]) != clients:
        raise SystemExit(f"clients were left out: {record['why']}")
    size = {way: record["bytes"][way] / clients / 1000 for way in ("up", "down")}
    spent = transport.seconds / clients, total - transport.seconds
    return dict(zip(COLUMNS, (round(v, 3) for v in (size["up"], size["down"], *spent)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/secure_aggregation.json"))
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| algorithm | clients | neighbours | | kB up | kB down | client s | server s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for algorithm, clients, neighbours in CASES:
        for secure in (False, True):
            row = measured(algorithm, clients, neighbours, secure, args.width)
            case = {"algorithm": algorithm, "clients": clients, "neighbours": neighbours or clients - 1}
            rows.append({**case, "secure": secure, **row})
            cells = [algorithm, clients, case["neighbours"], "secure" if secure else "plain", *row.values()]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    machine = {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    content = {"machine": machine, "width": args.width, "rows": rows}
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
