"""Pretrained models over Flower: each node has the base on its own disk, and proves it by its hash."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from copfl.core import tree
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.clients.schemes import SCHEMES
from copfl.data.samples import Dataset
from copfl.errors import UsageError
from copfl.experiment.models.network import tokenized
from copfl.federation.machines.app import init
from copfl.federation.node.data import node_data
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.settings import settings_of
from tests.federation.network import client_of, farthest, node_of, play, simulated, write_nodes
from tests.models import tiny

CONFIG: dict[str, Any] = {
    "session.run": "test",
    "run.rounds": 2,
    "run.clients": 3,
    "network.min_replies": 3,
    "run.batch": 8,
    "algorithm.name": "fedper",
    "optimizer.lr": 0.01,
    "samples.text": True,
    "samples.classes": list(tiny.CLASSES),
}


def without_copies(dataset: Dataset, partition: Partition) -> Partition:
    """The partition without training sentences that a client is tested on: a node leaves them out, too."""
    train = tuple(
        rows[~np.isin(dataset.train.x[rows], dataset.test.x[test])]
        for rows, test in zip(partition.train, partition.test, strict=True)
    )
    return replace(partition, train=train)


@pytest.mark.job
def test_a_run_with_adapters_ends_where_the_simulation_does(tmp_path: Path) -> None:
    dataset = tiny.sentences()
    texts = FederatedData.__new__(FederatedData)  # with sentences: only write_nodes reads it
    texts.dataset, texts.partition = dataset, without_copies(dataset, SCHEMES["iid"](dataset, 3, 0))
    texts.train = texts.test = type("Sizes", (), {"sizes": np.zeros(3)})()
    nodes = write_nodes(texts, tmp_path / "nodes")
    config = CONFIG | {
        "model.name": f"hf:{tiny.base(tmp_path)}",
        "adapter.name": "lora:r=2,targets=query+value",
    }
    played = play(config, nodes, tmp_path / "runs")
    settings = settings_of(config)
    tokens = tokenized(dataset, settings.run.model)
    federation = FederatedData(tokens, texts.partition)
    probed = replace(settings, task=settings.task.probed(tree.row(federation.train.rows([0]), 0)))
    state = simulated(probed, federation)
    assert farthest(played.server, state.server) <= 1e-5
    rows = state.clients.rows(torch.arange(3))
    for client, node_config in enumerate(nodes):
        assert farthest(client_of(settings, node_config, client, 1), tree.row(rows, client)) <= 1e-5
    shared = int((~settings.task.where("head")).sum())
    assert shared < 1000
    assert all(4 * shared <= len(packet.body) < 4 * shared + 4000 for packet in played.transport.received[3:])


def test_every_machine_has_its_own_copy_of_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, disk = tiny.base(tmp_path), tmp_path / "disk"
    monkeypatch.setenv("COPFL_MODELS", str(base.parent))
    np.savez(
        tmp_path / "data.npz", x=tiny.sentences().train.x, y=np.array(tiny.CLASSES)[tiny.sentences().train.y]
    )
    folder = init(
        tmp_path / "app",
        {
            "model": {"name": f"hf:{base.name}"},
            "data": {"name": str(tmp_path / "data.npz")},
            "adapter": {"name": "lora:r=2"},
            "algorithm": {"name": "fedper"},
        },
    )
    config = read_app(folder)["config"]
    assert (config["model"]["name"], config["samples"]["text"], config["adapter"]["r"]) == (
        f"hf:{base.name}",
        True,
        2,
    )
    server = settings_of(config)
    shutil.copytree(base, disk / base.name)
    monkeypatch.setenv("COPFL_MODELS", str(disk))
    assert settings_of(config).layout == server.layout
    node_data(server, node_of({"data": str(tmp_path / "data.npz")}))
    shutil.copy(tiny.base(tmp_path, seed=1) / "model.safetensors", disk / base.name)
    with pytest.raises(UsageError, match=r"has the SHA-256 \w+, but this run is of a base with \w+"):
        settings_of(config)
    other = settings_of({**config, "model": {k: v for k, v in config["model"].items() if k != "sha256"}})
    assert other.layout != server.layout
