"""The same FedAvg rounds in Flower's simulation (pip install "flwr[simulation]"): prints seconds as JSON.

`baseline_flower.py CASE ROUNDS on|off`, where CASE is digits or images and the last argument switches mkldnn.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from itertools import pairwise

import numpy as np
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation

case = importlib.import_module(sys.argv[1]) if __name__ == "__main__" else None
mkldnn = sys.argv[3:] == ["on"]
cache = []  # of each actor process: its tensors and its model


def state(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters, and the statistics of batch norms."""
    return [t.detach() for t in model.state_dict().values() if t.is_floating_point()]


class Client(NumPyClient):
    def __init__(self, number: int) -> None:
        self.number = number

    def fit(self, parameters, config):  # type: ignore[no-untyped-def]
        torch.set_num_threads(1)
        # By its name: Ray would pickle the module.
        importlib.import_module("torch.backends.mkldnn").enabled = mkldnn
        if not cache:
            cache.append((*case.tensors(), case.net()))
        x, y, model = cache[0]
        with torch.no_grad():
            for t, value in zip(state(model), parameters, strict=True):
                t.copy_(torch.from_numpy(np.asarray(value)))
        optimizer = torch.optim.SGD(model.parameters(), lr=case.RATE)
        for part in torch.randperm(x.shape[1]).split(case.BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[self.number][part]), y[self.number][part]).backward()
            optimizer.step()
        return [t.numpy() for t in state(model)], x.shape[1], {}


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
        initial = ndarrays_to_parameters([t.numpy() for t in state(case.net())])
        strategy = Timed(
            fraction_fit=case.PARTICIPANTS / case.CLIENTS,
            min_fit_clients=case.PARTICIPANTS,
            fraction_evaluate=0.0,
            min_evaluate_clients=0,
            min_available_clients=case.CLIENTS,
            initial_parameters=initial,
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds + 1))

    run_simulation(
        server_app=ServerApp(server_fn=server),
        client_app=ClientApp(client_fn=client),
        num_supernodes=case.CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"num_cpus": 2, "log_to_driver": False},
        },
    )
    print(json.dumps({"wall": [b - a for a, b in pairwise(times)]}))


if __name__ == "__main__":
    main(int(sys.argv[2]))
