"""Attacks that once succeeded: each test states what holds against them."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from copfl import wire
from copfl.core import tree
from copfl.core.algorithm import received
from copfl.core.payload import innermost
from copfl.data.contract.contract import Column, Contract
from copfl.errors import WireError
from copfl.federation.node import ledger, update
from copfl.federation.node.data import node_data
from copfl.federation.node.known_data import KnownData
from copfl.federation.node.ledger import Ledger, Release, epsilon
from copfl.federation.node.secure_phases import PhaseRequest, SecureSession
from copfl.federation.node.secure_update import UpdateSummand
from copfl.federation.policy.record import Policy, PrivacyRules
from copfl.federation.policy.refusal import PolicyError
from copfl.federation.policy.request import refusals
from copfl.federation.protocol import secure_total
from copfl.federation.protocol.noise import SecretNoise, upload_noise
from copfl.federation.protocol.proposal import KEY
from copfl.federation.protocol.secure_sum import Rules, Words, dequantised
from copfl.federation.protocol.settings import TrainingSettings, settings_of
from copfl.wire import Head
from tests.data.sites import rows_of, write_rows
from tests.federation.network import CONFIG, digits, node_of, write_nodes
from tests.federation.signing import answer, knowing, proposed

pytest.importorskip("dp_accounting", reason='dp-accounting is not installed: pip install "copfl[privacy]"')

NOISED = CONFIG | {"algorithm.name": "fedavg", "privacy.noise": 8.0, "privacy.clip": 0.2, "run.rounds": 1}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A node with data."""
    return write_nodes(digits(), tmp_path)[0]


def upload_for_zeros(settings: TrainingSettings, config: dict[str, Any]) -> torch.Tensor:
    """What a node sends to a server that sends a model of zeros: then the upload is the change of the weights."""
    down = received(settings.algorithm, settings.algorithm.server_init(settings.task, 3), torch.tensor(0))
    head = Head("down", "test", settings.layout, 0, 0)
    packet = wire.encode(tree.each(torch.zeros_like, down), head, about={"counted": -1})
    trained = update.train(settings, node_of(config), packet, node_data)
    assert trained.output is not None
    return max(tree.leaves(trained.output.upload), key=torch.numel)


def noise_of(settings: TrainingSettings) -> float:
    """The noise of one upload, over the clip."""
    assert isinstance(settings.algorithm, SecretNoise)
    return upload_noise(settings.algorithm)


@pytest.mark.parametrize("scale", [1.0, 1e-25])
def test_an_update_is_clipped_whatever_its_scale(config: dict[str, Any], scale: float) -> None:
    """Squares of numbers below 1e-23 are 0 in single precision, and so was their norm: nothing was clipped.

    A server that chooses such a learning rate and such a clip saw the update as if it had no noise.
    """
    clip, noise = 1e-3 * scale, 8.0
    keys = {"privacy.noise": noise, "privacy.clip": clip, "optimizer.name": "sgd", "optimizer.lr": scale}
    settings = settings_of(NOISED | keys)
    sent = upload_for_zeros(settings, config).double()
    deviation = noise_of(settings) * clip
    assert sent.abs().max() < 6 * deviation  # of normal numbers, with a change of at most a fifth of it


@pytest.mark.parametrize(
    ("clients", "participation"), [(3, 0.34), (10, 0.1000001), (3, 0.5), (4, 0.5), (3, 1)]
)
def test_each_upload_has_the_least_noise_whatever_the_fraction_of_clients(
    clients: int, participation: float
) -> None:
    """Of 1.02 clients a round selects two, which divide the noise: each upload had 0.71 of the least noise."""
    policy, keys = (
        Policy(privacy=PrivacyRules(noise=1.0)),
        {"run.clients": clients, "run.participation": participation},
    )
    asked = CONFIG | {"algorithm.name": "fedavg", "network.min_replies": 0} | keys
    least = settings_of(asked).federation.selected ** 0.5
    for noise in (least, (clients * participation) ** 0.5):
        run_config = asked | {"privacy.noise": noise}
        is_enough = noise_of(settings_of(run_config)) >= 1 - 1e-9
        assert (refusals(policy, run_config) == ()) == is_enough


def test_a_restored_state_dir_gives_no_second_upload_with_the_same_noise(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """The difference of both would have no noise, and the ledger of the first is lost with the state-dir.

    So noise depends on what it hides, and on its scale: a node needs no memory to keep two uploads apart.
    """
    state, kept = Path(config["state-dir"]), tmp_path / "kept"
    first = settings_of(NOISED | {"privacy.clip": 1e-3})
    upload_for_zeros(first, config)
    shutil.copytree(state, kept)
    (kept / "test" / "noised.json").unlink()

    def restored(**keys: Any) -> torch.Tensor:
        shutil.rmtree(state)
        shutil.copytree(kept, state)
        settings = settings_of(NOISED | {"privacy.clip": 1e-3} | keys)
        return upload_for_zeros(settings, config).double()

    sent, deviation = restored(), noise_of(first) * 1e-3
    assert torch.equal(restored(), sent)  # the same value again reveals nothing
    for keys, scale in (
        ({"algorithm.epochs": 2}, 1),
        ({"privacy.clip": 2e-3}, 2),
        ({"privacy.noise": 16.0}, 2),
    ):
        difference = restored(**keys) - scale * sent
        assert difference.std() > deviation


def test_requests_that_spend_at_the_same_time_share_one_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock, each of two spent what was left for one, and their lines broke the chain."""
    samples = KnownData(tmp_path).name_of(np.arange(3, dtype=np.uint64))
    one = Release(samples, "test", 0, noise=5.0, clip=1.0)
    limit, both_have_read = 1.1 * epsilon([one], 1e-5), threading.Barrier(2)

    def slow(releases: Iterable[Release], delta: float) -> float:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_read.wait(0.5)
        return epsilon(releases, delta)

    def is_entered(value: str) -> bool:
        try:
            Ledger(tmp_path).enter(one._replace(value=value), PrivacyRules(lifetime_epsilon=limit))
        except PolicyError:
            return False
        return True

    monkeypatch.setattr(ledger, "epsilon", slow)
    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(is_entered, "ab")) == [False, True]
    assert len(Ledger(tmp_path).releases()) == 1


@pytest.mark.parametrize("by", ["missing", "time"])
@pytest.mark.parametrize(("present", "is_answered"), [(1, False), (4, False), (5, True)])
def test_a_contract_does_not_choose_a_few_rows(
    present: int, is_answered: bool, by: str, tmp_path: Path
) -> None:
    """Without the rows that lack a rare value, a node trained on one row, and its upload was that row's gradient.

    So it was with a time that is the same for all rows but one: then the later ones are test rows.
    """
    files = {}
    for part in ("data", "test") if by == "missing" else ("data",):
        rows: list[dict[str, Any]] = [
            {**row, "lab": 3.5 if n < present or by == "time" else "", "day": int(n >= present)}
            for n, row in enumerate(rows_of("north"))
        ]
        files[part] = str(write_rows(tmp_path / f"{part}.csv", rows))
    config = knowing({**files, "state-dir": str(tmp_path / "state")})
    columns = (Column(name=name, type="number", mean=0.0, deviation=1.0) for name in ("age", "lab"))
    target = Column(name="outcome", type="category", categories=("ill", "well"))
    how: dict[str, Any] = {"missing": "drop"} if by == "missing" else {"time": "day"}
    contract = Contract(columns=tuple(columns), targets=(target,), **how)
    run_config = {
        "run.clients": 1,
        "session.run": "test",
        "algorithm.name": "fedavg",
        "model.name": "mlp",
        "samples.shape": [2],
        "samples.classes": ["ill", "well"],
        "samples.contract": contract.as_json(),
    }
    settings = settings_of(run_config)
    down = received(settings.algorithm, settings.algorithm.server_init(settings.task, 1), torch.tensor(0))
    packet = wire.encode(down, Head("down", "test", settings.layout, 0, 0), about={"counted": -1})
    head, _ = answer(config, {**run_config, KEY: proposed(run_config, [config]).text}, "train", packet)
    refused = json.loads(head).get("refused", "")
    assert ("its data cannot be used" in refused) is not is_answered
    assert (refused == "") is is_answered


def test_a_noised_upload_is_never_refused_for_its_values(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model at the end of the range, a node refused the uploads that passed it: a bit with its own noise alone.

    The epsilon of a secure sum counts the noise of all. Now the model is refused, before the node trains.
    """
    settings = settings_of(NOISED | {"secure.aggregation": True})
    noised, rules = settings.noised, settings.rules
    assert noised is not None
    down = received(settings.algorithm, settings.algorithm.server_init(settings.task, 3), torch.tensor(0))
    head = Head("down", "test", settings.layout, 0, 0)
    cohort = dict(enumerate(["a", "b", "c"]))
    training = Mock(wraps=update.train)
    monkeypatch.setattr(update, "train", training)

    def words(first: float) -> Words:
        model = innermost(down).w.clone()
        model[0] = first
        message = down._replace(down=down.down._replace(w=model))
        packet = wire.encode(message, head, about={"counted": -1})
        asked = PhaseRequest(
            settings, node_of(config), head, {}, SecureSession(cohort=cohort), UpdateSummand(node_data)
        )
        return asked.summand.contribution(asked, packet).words

    with pytest.raises(WireError, match="a noised value may be"):
        words(rules.range)
    training.assert_not_called()
    largest = torch.tensor([2 * rules.range, -2 * rules.range, 1.0])
    sums = secure_total.sums_of(largest, {}, rules)
    sent = dequantised(secure_total.words_of(sums, rules), rules)
    assert sent.tolist() == [rules.range, -rules.range, 1.0]
    assert len(words(rules.range / 2)) > settings.task.d
    training.assert_called_once()


@pytest.mark.parametrize(
    ("size", "clip", "noise", "error"),
    [
        (1.0, 1.0, 1.0, ""),
        (60.0, 1.0, 1.0, "may be"),
        (0.0, 0.1, 1e-4, "too small"),
        (0.0, 1.0, 10.0, "may be"),
    ],
)
def test_a_model_has_room_for_noise(size: float, clip: float, noise: float, error: str) -> None:
    """In a range of 64 with steps of 2^-9: the model, the clip and eight deviations of the noise."""
    rules = Rules(3, range=64.0, bits=16)
    with pytest.raises(WireError, match=error) if error else contextlib.nullcontext():
        secure_total.require_room(torch.full((5,), size), clip, noise, rules)
