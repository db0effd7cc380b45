"""Clipped and noised uploads over messages: the numbers of the simulation, with noise that only the node knows."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from copfl import wire
from copfl.core.algorithm import received
from copfl.errors import RunError, UsageError, WireError
from copfl.federation.node import update
from copfl.federation.protocol.noise import SECRET, SecretNoise, epsilons
from copfl.federation.protocol.settings import settings_of
from copfl.wire import Head, Packet
from copfl.wrappers.privacy import Private, epsilon
from tests.federation.network import CONFIG, digits, farthest, node_of, play, simulated, write_nodes
from tests.slow import some

pytest.importorskip("dp_accounting", reason='dp-accounting is not installed: pip install "copfl[privacy]"')

# Batches of 256 give few steps, and the first steps of MAMO magnify the noise.
NOISED = CONFIG | {
    "algorithm.name": "fedavg",
    "privacy.noise": 4.0,
    "privacy.clip": 0.2,
    "run.rounds": 2,
    "run.batch": 64,
}
NOISED = {key: value for key, value in NOISED.items() if not key.startswith("optimizer")}


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "secure"),
    some(product(["copfl", "fedavg"], [False, True]), [("copfl", False), ("fedavg", True)]),
)
def test_without_noise_the_numbers_are_those_of_the_simulation(
    name: str, secure: bool, tmp_path: Path
) -> None:
    """Clipped updates, equal weights and unchanged masks; the noise is too small to turn a choice of the mask."""
    config = NOISED | {
        "algorithm.name": name,
        "privacy.noise": 1e-9,
        "secure.aggregation": secure,
        "secure.bits": 48,
    }
    federation = digits()
    played = play(config, write_nodes(federation, tmp_path / "n"), tmp_path / "runs")
    settings = settings_of(config)
    assert isinstance(settings.algorithm, SecretNoise)
    fields = {
        key: getattr(settings.algorithm, key) for key in ("clients", "taking_part", "clip", "noise", "delta")
    }
    simulation = Private(settings.algorithm.algorithm, **fields)
    state = simulated(replace(settings, algorithm=simulation), federation)
    assert farthest(played.server, state.server) <= 1e-5


@pytest.mark.parametrize("secure", [False, True])
def test_the_epsilons_are_those_of_the_simulation(secure: bool, tmp_path: Path) -> None:
    records = play(
        NOISED | {"secure.aggregation": secure}, write_nodes(digits(), tmp_path / "n"), tmp_path / "runs"
    ).records
    for rounds, record in enumerate(records, 1):
        found = record["federation"]
        # A client knows its own third of the noise.
        assert found["epsilon"] == epsilon(4.0 * (2 / 3) ** 0.5, rounds, 1e-5, 3, 3)
        alone = 4.0 if secure else 4.0 / 3**0.5  # the server of a secure sum sees the noise of all
        assert found["epsilon_server"] == epsilon(alone, rounds, 1e-5)
        assert "accuracy" not in record["mean"]  # metrics have no noise


def test_a_client_that_does_not_answer_adds_no_noise(tmp_path: Path) -> None:
    def fault(client: int, round: int, packet: Packet) -> Packet | str:
        return "Node Unavailable" if client == 2 and round else packet

    config = NOISED | {"network.min_replies": 2}
    first, second = play(config, write_nodes(digits(), tmp_path / "n"), tmp_path / "runs", fault).records
    assert first["federation"]["epsilon"] == epsilon(4.0 * (2 / 3) ** 0.5, 1, 1e-5)
    assert second["federation"]["epsilon"] > epsilon(4.0 * (2 / 3) ** 0.5, 2, 1e-5)
    algorithm = settings_of(config).algorithm
    assert isinstance(algorithm, Private)
    assert second["federation"]["epsilon"] == epsilons(algorithm, [3, 2], secure=False)["epsilon"]
    assert epsilons(algorithm, [0], secure=True) == {"epsilon": 0.0, "epsilon_server": 0.0}


def noise_of(key: bytes, size: int) -> torch.Tensor:
    algorithm = settings_of(NOISED).algorithm
    assert isinstance(algorithm, SecretNoise)
    return replace(algorithm, key=key).draw(torch.tensor(0), torch.zeros(size))


def test_the_noise_is_normal_and_follows_the_key() -> None:
    first, second = noise_of(b"a" * 32, 100_000), noise_of(b"b" * 32, 100_000)
    assert torch.equal(first, noise_of(b"a" * 32, 100_000))
    for sample in (first, second):
        assert abs(float(sample.mean())) < 5 / 100_000**0.5
        assert abs(float(sample.std()) - 1) < 5 / 200_000**0.5
        assert abs(float((sample.abs() < 1).double().mean()) - 0.6827) < 0.01
    assert abs(float((first * second).mean())) < 5 / 100_000**0.5


def test_a_node_sends_one_noised_upload_per_round(tmp_path: Path) -> None:
    settings, (config, *_) = settings_of(NOISED), write_nodes(digits(), tmp_path)
    algorithm, task = settings.algorithm, settings.task
    down = received(algorithm, algorithm.server_init(task, 3), torch.tensor(0))

    def ask(down: Any, round: int = 0, known: int = 0) -> Packet:
        about = {"counted": -1, "evaluate": True, "known_masks": {str(known): ""}}
        packet = wire.encode(down, Head("down", "test", settings.layout, round, 0), about=about)
        return update.local_update(settings, node_of(config), packet)

    once = ask(down)
    assert ask(down, known=1).body == once.body  # the same noise, whatever else the message has
    other = down._replace(down=down.down._replace(w=down.down.w + 1e-3))
    with pytest.raises(WireError, match="trains on one in a round"):
        ask(other)
    assert ask(down, round=1).body != once.body
    with pytest.raises(RunError, match="already taken part"):
        ask(down)
    assert json.loads(once.head)["about"]["metrics"] == {}
    secret = Path(config["state-dir"]) / SECRET
    assert len(secret.read_bytes()) == 32
    assert secret.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "keys", [{"privacy.noise": 8.0}, {"privacy.clip": 0.1}, {"run.seed": 1}, {"optimizer.lr": 1e-9}]
)
def test_the_noise_of_a_round_is_on_one_upload(keys: dict[str, Any], tmp_path: Path) -> None:
    """The same message under another run config: 2 u - v of noises 4 and 8 would be the update without noise."""
    (config, *_) = write_nodes(digits(), tmp_path)

    def ask(run_config: dict[str, Any]) -> Packet:
        settings = settings_of(run_config)
        server = settings.algorithm.server_init(settings_of(NOISED).task, 3)
        down = received(settings.algorithm, server, torch.tensor(0))
        head = Head("down", "test", settings.layout, 0, 0)
        return update.local_update(settings, node_of(config), wire.encode(down, head, about={"counted": -1}))

    once = ask(NOISED)
    with pytest.raises(WireError, match="would have none"):
        ask(NOISED | keys)
    assert ask(NOISED).body == once.body


def test_the_noise_of_a_round_is_not_used_again_for_changed_data(tmp_path: Path) -> None:
    settings, (config, other, *_) = settings_of(NOISED), write_nodes(digits(), tmp_path)
    down = received(settings.algorithm, settings.algorithm.server_init(settings.task, 3), torch.tensor(0))
    packet = wire.encode(down, Head("down", "test", settings.layout, 0, 0), about={"counted": -1})
    update.local_update(settings, node_of(config), packet)
    with pytest.raises(WireError, match="would have none"):
        update.local_update(settings, node_of(config | {"data": other["data"]}), packet)


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm.name": "fedpac"},
        {"algorithm.name": "fedcalm"},
        {"robust.name": "median"},
        {"privacy.delta": 2.0},
    ],
)
def test_what_no_epsilon_covers_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="privacy"):
        settings_of(NOISED | keys)
