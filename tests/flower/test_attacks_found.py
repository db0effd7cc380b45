"""Attacks that once succeeded: each test states what holds against them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from copfl import wire
from copfl.core import tree
from copfl.core.algorithm import received
from copfl.flower import node
from copfl.flower.policy import FILE, Policy, Privacy, refusals
from copfl.flower.policy_file import write_policy
from copfl.flower.private_node import upload_noise
from copfl.flower.settings import Settings, settings_of
from copfl.wire import Head
from tests.flower.network import CONFIG, digits, write_nodes

pytest.importorskip("dp_accounting", reason='dp-accounting is not installed: pip install "copfl[privacy]"')

NOISED = CONFIG | {"algorithm": "fedavg", "privacy": 8.0, "privacy-clip": 0.2, "rounds": 1}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A node with data."""
    return write_nodes(digits(), tmp_path)[0]


def upload_for_zeros(settings: Settings, config: dict[str, Any]) -> torch.Tensor:
    """What a node sends to a server that sends a model of zeros: then the upload is the change of the weights."""
    down = received(settings.algorithm, settings.algorithm.server_init(settings.task, 3), torch.tensor(0))
    head = Head("down", "test", settings.layout, 0, 0)
    packet = wire.encode(tree.each(torch.zeros_like, down), head, about={"counted": -1})
    trained = node.train(settings, config, packet, node.node_data)
    return max(tree.leaves(trained.output.upload), key=torch.numel)


@pytest.mark.parametrize("scale", [1.0, 1e-25])
def test_an_update_is_clipped_whatever_its_scale(config: dict[str, Any], scale: float) -> None:
    """Squares of numbers below 1e-23 are 0 in single precision, and so was their norm: nothing was clipped.

    A server that chooses such a learning rate and such a clip saw the update as if it had no noise.
    """
    clip, noise = 1e-3 * scale, 8.0
    keys = {"privacy": noise, "privacy-clip": clip, "optimizer.name": "sgd", "optimizer.lr": scale}
    settings = settings_of(NOISED | keys)
    sent = upload_for_zeros(settings, config).double()
    deviation = upload_noise(settings.algorithm) * clip
    assert sent.abs().max() < 6 * deviation  # of normal numbers, with a change of at most a fifth of it


@pytest.mark.parametrize(("clients", "participation"), [(3, 0.34), (10, 0.1000001), (3, 0.5), (4, 0.5), (3, 1)])
def test_each_upload_has_the_least_noise_whatever_the_fraction_of_clients(
    clients: int, participation: float
) -> None:
    """Of 1.02 clients a round selects two, which divide the noise: each upload had 0.71 of the least noise."""
    policy, keys = Policy(privacy=Privacy(noise=1.0)), {"clients": clients, "participation": participation}
    asked = CONFIG | {"algorithm": "fedavg", "min-replies": 0} | keys
    least = settings_of(asked).config.selected ** 0.5
    for noise in (least, (clients * participation) ** 0.5):
        run_config = asked | {"privacy": noise}
        is_enough = upload_noise(settings_of(run_config).algorithm) >= 1 - 1e-9
        assert (refusals(policy, run_config) == ()) == is_enough
