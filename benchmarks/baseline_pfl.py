"""The same FedAvg rounds in pfl-research (`pip install pfl`): prints the seconds of each as JSON.

`baseline_pfl.py CASE ROUNDS on|off [SEED]`, where CASE is digits, images or pfl_cifar and on or off is mkldnn. A case
that has a test of the model is tested after the last round.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel


class Net(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def metrics(self, x, y):  # type: ignore[no-untyped-def]
        return {}

    def loss(self, x, y, eval=False):  # type: ignore[no-untyped-def]
        self.train(not eval)
        return torch.nn.functional.cross_entropy(self.net(x), y)


class Clock(TrainingProcessCallback):
    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = [(time.perf_counter(), time.process_time())]

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        self.times.append((time.perf_counter(), time.process_time()))
        return False, Metrics()


def main(case: Any, rounds: int, mkldnn: bool, seed: int) -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = mkldnn
    np.random.seed(seed)  # noqa: NPY002 by which pfl-research chooses the users of a round
    x, y = case.tensors()
    users = [str(n) for n in range(len(y))]

    def data(user: str) -> Dataset:
        return Dataset(raw_data=[x[int(user)], y[int(user)]], user_id=user)

    federation = FederatedDataset(data, get_user_sampler("random", users))
    model = Net(case.net())
    federated = PyTorchModel(
        model=model,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=case.PARTICIPANTS,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=federation, val_data=None),
        model=federated,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=case.RATE, local_batch_size=case.BATCH
        ),
        callbacks=[clock],
    )
    steps = list(zip(clock.times, clock.times[1:], strict=False))
    if os.environ.get("RANK", "0") == "0":  # the first process prints
        seconds = {"wall": [b[0] - a[0] for a, b in steps], "cpu": [b[1] - a[1] for a, b in steps]}
        accuracy = case.accuracy(model.net) if hasattr(case, "accuracy") else None
        print(json.dumps({**seconds, "accuracy": accuracy}))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(importlib.import_module(arguments[0]), int(arguments[1]), arguments[2] == "on", int(*arguments[3:]))
