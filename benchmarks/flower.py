"""Seconds per round over Flower: with resident workers, and with a process per message. Prints JSON.

`flower.py --rounds 9`: three nodes on this machine, digits, MLP, CO-PFL. The same run with

    node       nodes of copfl (`copfl site node`), each with its resident worker
    worker     Flower's SuperNodes, each with a resident worker: a process per message, without torch
    process    Flower's SuperNodes without workers: a process per message that loads torch, data and model

`flower.py --trees 50`: the same three nodes of copfl grow so many trees of depth 3 on the heart data, a round for each
level. It writes `results/flower_trees.json`.

A result is the median of the rounds after the first, and the processor time per round of all processes of the
federation. The last line has the medians together. The final records of the server and of the clients must be those
of the simulation, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the comparison with the simulation is in the tests

from tests.federation.network import client_of, farthest, server_of, simulated

from copfl.algorithms.trees import BEFORE
from copfl.core import tree
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.schemes import SCHEMES
from copfl.data.sets.datasets import load
from copfl.federation import init
from copfl.federation.machines.app import RUN_FILE
from copfl.federation.machines.local import follow, partition_nodes
from copfl.federation.machines.local_federation import LocalFederation
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.settings import TrainingSettings, settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.settings import toml
from copfl.settings.complete import complete
from copfl.settings.flat import flattened, nested
from copfl.settings.toml import Tables

WAYS = ("node", "worker", "process")
RECORD = Path(__file__).parents[1] / "results" / "flower_trees.json"
NETWORK: Tables = {
    "run": {"clients": 3, "batch": 32},
    "network": {"min_replies": 3},
    "algorithm": {"name": "copfl"},
    "model": {"name": "mlp"},
    "partition": {"name": "dirichlet"},
}
TREE_NETWORK: Tables = {
    "run": {"clients": 3},
    "data": {"name": "heart"},
    "network": {"min_replies": 3},
    "algorithm": {"name": "trees"},
    "partition": {"name": "iid"},
}
DEPTH = 3


def processor_seconds(pids: list[int]) -> dict[int, float]:
    """The processor time of each process, with that of its children that have ended."""
    found = {}
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return found


def measured(way: str, rounds: int, folder: Path, common: Tables = NETWORK) -> dict[str, Any]:
    """One federation, from its start to its end."""
    settings = common | {"run": common["run"] | {"rounds": rounds}}
    app = init(folder / way, settings)
    nodes = partition_nodes(app, complete(toml.read_file(app / RUN_FILE)))
    started, marks = time.monotonic(), list[tuple[float, float]]()
    with LocalFederation(app, supernode=way != "node") as federation:
        federation.start_superlink()
        for client, config in enumerate(nodes):
            federation.add_node(f"node-{client}", config | ({"worker": False} if way == "process" else {}))
        runs = ServerFolder(str(app / "runs"), "benchmark", resume=True)
        process = federation.start_run({"session.run": "benchmark"})
        records = []
        for record in follow(federation, process, runs, rounds, pause=0.2):
            records.append(record)
            marks.append((time.monotonic(), sum(processor_seconds(federation.alive()).values())))
    seconds = [record["seconds"] for record in records]
    return {
        "seconds": round(time.monotonic() - started, 1),
        "processor_s": round(marks[-1][1], 1),
        "start_s": round(marks[0][0] - started - seconds[0], 2),
        "first_s": seconds[0],
        "median_s": round(statistics.median(seconds[1:]), 2),
        "rounds_s": seconds,
        "processor_s_per_round": round((marks[-1][1] - marks[0][1]) / (rounds - 1), 2),
        "accuracy": records[-1]["mean"]["accuracy"],
        "farthest_from_simulation": distance(app, nodes),
    }


def distance(app: Path, nodes: list[dict[str, Any]]) -> float:
    """How far the server and the clients are from where the simulation ends."""
    torch.set_num_threads(1)
    run_config = flattened(nested(read_app(app)["config"])) | {"session.run": "benchmark"}
    settings: TrainingSettings = settings_of(run_config)
    run = complete(toml.read_file(app / RUN_FILE))
    dataset = load(run.data.name)
    state = simulated(settings, FederatedData(dataset, SCHEMES[run.partition.name](dataset, len(nodes), 0)))
    rows, last = state.clients.rows(torch.arange(len(nodes))), settings.federation.rounds - 1
    clients = [client_of(settings, config, client, last) for client, config in enumerate(nodes)]
    far = farthest(server_of(settings, app / "runs"), state.server)
    return max([far, *(farthest(record, tree.row(rows, client)) for client, record in enumerate(clients))])


def grow(trees: int) -> None:
    """A federation that grows so many trees; its record."""
    settings = TREE_NETWORK | {"model": {"name": "trees", "trees": trees, "depth": DEPTH}}
    with tempfile.TemporaryDirectory() as folder:
        result = measured("node", BEFORE + trees * DEPTH, Path(folder), settings)
    result |= {"trees": trees, "depth": DEPTH, "load": round(os.getloadavg()[0], 2), "cores": os.cpu_count()}
    RECORD.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rounds_s"}))
    if result["farthest_from_simulation"]:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--trees", type=int, help="grow so many trees, with nodes of copfl")
    args = parser.parse_args()
    if args.trees:
        return grow(args.trees)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in args.ways:
            results[way] = measured(way, args.rounds, Path(folder))
            load = os.getloadavg()[0]
            print(
                json.dumps({way: results[way], "load": round(load, 2), "cores": os.cpu_count()}), flush=True
            )
    medians = {way: result["median_s"] for way, result in results.items()}
    equal = all(result["farthest_from_simulation"] == 0 for result in results.values())
    print(json.dumps({"median round after the first, s": medians, "equal to the simulation": equal}))
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
