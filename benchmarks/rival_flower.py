"""The same FedAvg rounds in Flower's simulation (`pip install "flwr[simulation]"`): prints their seconds as JSON."""

from __future__ import annotations

import json
import sys
import time
import warnings
from itertools import pairwise

import numpy as np
import torch
from digits import BATCH, CLIENTS, PARTICIPANTS, RATE, net, tensors
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation

held = []  # of each actor process: read once


class Client(NumPyClient):
    def __init__(self, number: int) -> None:
        self.number = number

    def fit(self, parameters, config):  # type: ignore[no-untyped-def]
        torch.set_num_threads(1)
        torch.backends.mkldnn.enabled = False
        if not held:
            held.append((*tensors(), net()))
        x, y, model = held[0]
        with torch.no_grad():
            for p, value in zip(model.parameters(), parameters, strict=True):
                p.copy_(torch.from_numpy(np.asarray(value)))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for part in torch.randperm(x.shape[1]).split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[self.number][part]), y[self.number][part]).backward()
            optimizer.step()
        return [p.detach().numpy() for p in model.parameters()], x.shape[1], {}


def client(context):  # type: ignore[no-untyped-def]
    return Client(int(context.node_config["partition-id"])).to_client()


def main(rounds: int) -> None:
    warnings.simplefilter("ignore")
    times: list[float] = []

    class Timed(FedAvg):
        def configure_fit(self, *given, **named):  # type: ignore[no-untyped-def]
            times.append(time.perf_counter())
            return super().configure_fit(*given, **named)

    def server(context):  # type: ignore[no-untyped-def]
        first = ndarrays_to_parameters([p.detach().numpy() for p in net().parameters()])
        strategy = Timed(
            fraction_fit=PARTICIPANTS / CLIENTS, min_fit_clients=PARTICIPANTS, fraction_evaluate=0.0,
            min_evaluate_clients=0, min_available_clients=CLIENTS, initial_parameters=first,
        )  # fmt: skip
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds + 1))

    run_simulation(
        server_app=ServerApp(server_fn=server), client_app=ClientApp(client_fn=client), num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2, "log_to_driver": False}},
    )  # fmt: skip
    print(json.dumps({"wall": [b - a for a, b in pairwise(times)]}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
