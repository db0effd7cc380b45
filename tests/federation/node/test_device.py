"""A node that trains on a GPU: its answers are those of the CPU, up to rounding, and its files are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from copfl.errors import UsageError
from copfl.federation.node.data import node_data, task_on
from copfl.federation.protocol.settings import settings_of
from tests.federation.network import CONFIG, client_of, digits, farthest, node_of, play, write_nodes

EXACT = {"run.batch": 64, "optimizer.lr": 0.001}


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:99", "meta"])
def test_a_device_that_this_machine_does_not_have_is_an_error(device: str, tmp_path: Path) -> None:
    (config, *_) = write_nodes(digits(), tmp_path)
    with pytest.raises(UsageError, match=f"device={device}"):
        node_data(settings_of(CONFIG), node_of(config | {"device": device}))


def test_a_task_is_moved_as_a_whole() -> None:
    """To the device that every machine has."""
    settings = settings_of({"model.name": "cnn", "algorithm.name": "fedavg"})
    moved = task_on(settings.task, torch.device("meta"))
    assert moved.device.type == "meta"
    tensors = [*moved.module.parameters(), *moved.module.buffers(), moved.mean, moved.std]
    assert {t.device.type for t in tensors if t is not None} <= {"meta"}
    assert settings.task.device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm.name": "copfl"},
        {"algorithm.name": "fedavg", "model.name": "cnn"},
        {"algorithm.name": "fedavg", "secure.aggregation": True},
        {"algorithm.name": "fedbabu", "samples.augment": True},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_a_gpu_gives_the_answers_of_the_cpu(keys: dict[str, Any], tmp_path: Path, logged: list[str]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    config = CONFIG | EXACT | keys
    config = {k: v for k, v in config.items() if not (k == "model.width" and "model.name" in keys)}
    ends = []
    for device in ("cpu", "cuda"):
        nodes = [n | {"device": device} for n in write_nodes(digits(), tmp_path / device)]
        played = play(config, nodes, tmp_path / f"runs-{device}")
        assert [record["clients"] for record in played.records] == [[0, 1, 2]] * 3
        settings = settings_of(config)
        clients = [client_of(settings, n, c, 2) for c, n in enumerate(nodes)]
        ends.append((played.server, clients, played.records[-1]["mean"]))
    assert farthest(ends[0][0], ends[1][0]) < 1e-3
    for cpu, gpu in zip(ends[0][1], ends[1][1], strict=True):
        assert farthest(cpu, gpu) < 1e-2
    assert ends[0][2]["accuracy"] == pytest.approx(ends[1][2]["accuracy"], abs=0.02)
    trained = [line for line in logged if f"was trained on {torch.cuda.get_device_name()}" in line]
    assert len(trained) == 9  # three rounds of three nodes, of the GPU alone
