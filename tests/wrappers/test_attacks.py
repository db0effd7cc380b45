"""Each attack by hand, who the attackers are, and that every engine agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from copfl.algorithms import ALGORITHMS, FedAvg
from copfl.choosing.run import run
from copfl.core import Data, UsageError
from copfl.core.payload import Update
from copfl.engine.mapping import vmap
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.experiment.run import resume
from copfl.testing import check_algorithm, small_federation
from copfl.wrappers.attacks import (
    ATTACKS,
    Attacked,
    attacked,
    choose_attackers,
    flipped_labels,
    free_rider,
    noise,
    scaled,
    sign_flip,
)
from tests.commands import called
from tests.slow import slow

HONEST = Update(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 4.0]), None, torch.tensor(6.0))
KEY = torch.tensor(1)


def test_a_flipped_sign() -> None:
    assert sign_flip(HONEST, 2.0, KEY).sent.tolist() == [1 - 2 * 1, 1 - 2 * 3]
    assert sign_flip(HONEST, 2.0, KEY).reported_weight is HONEST.reported_weight


def test_a_scaled_update_with_a_scaled_claim() -> None:
    attack_update = scaled(HONEST, 10.0, KEY)
    assert attack_update.sent.tolist() == [11, 31]
    assert attack_update.reported_weight is not None
    assert attack_update.reported_weight.item() == 60
    assert scaled(HONEST._replace(reported_weight=None), 10.0, KEY).reported_weight is None


def test_noise_is_as_long_as_the_update() -> None:
    change = torch.zeros(10_000)
    change[0] = 3.0
    attack_update = noise(Update(torch.zeros(10_000), change, None, None), 5.0, KEY)
    assert float(attack_update.sent.norm()) == pytest.approx(15, rel=0.05)
    assert not torch.equal(
        attack_update.sent, noise(Update(torch.zeros(10_000), change, None, None), 5.0, torch.tensor(2)).sent
    )


def test_a_free_rider_sends_back_what_it_got_and_an_honest_claim() -> None:
    received = torch.full((10_000,), 2.0)
    attack_update = free_rider(Update(received, torch.zeros(10_000), None, torch.tensor(7.0)), 0.01, KEY)
    assert float((attack_update.sent - received).std()) == pytest.approx(0.02, rel=0.05)
    assert attack_update.reported_weight is not None
    assert attack_update.reported_weight.item() == 7


def test_wrong_labels_are_the_clients_own_other_classes() -> None:
    data = Data(
        torch.zeros(6), torch.tensor([1, 3, 4, 1, 3, 0]), torch.tensor(5)
    )  # the last one is only padding
    assert flipped_labels(data, 6).tolist()[:5] == [3, 4, 1, 3, 4]
    alone = Data(torch.zeros(2), torch.tensor([5, 5]), torch.tensor(2))
    assert flipped_labels(alone, 6).tolist() == [0, 0]


def test_attackers_follow_from_the_seed() -> None:
    assert choose_attackers(1, 10, 0.2) == choose_attackers(1, 10, 0.2)
    assert len({choose_attackers(seed, 10, 0.2) for seed in range(20)}) > 5
    counts = np.bincount([n for seed in range(500) for n in choose_attackers(seed, 10, 0.3)], minlength=10)
    assert counts.min() > 100
    assert len(choose_attackers(0, 4, 0.1)) == 1
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(UsageError, match="fraction of the clients"):
            choose_attackers(0, 10, share)
    with pytest.raises(UsageError, match="no honest one"):
        choose_attackers(0, 2, 0.9)
    with pytest.raises(UsageError, match='did you mean "noise"'):
        attacked(FedAvg(), "nose", 10)


def test_an_honest_client_is_not_touched_and_an_attacker_is() -> None:
    """One round of FedAvg from two clients: the mean moves by the attack and by nothing else."""
    task, federation = small_federation("none", (5, 5))

    def after(algorithm: object) -> torch.Tensor:
        state = begin(algorithm, task, 2)  # type: ignore[arg-type]
        list(simulate(Simulation(algorithm, task, federation, vmap(2), batch=5), state, rounds=1))  # type: ignore[arg-type]
        server = state.server
        w: torch.Tensor = (server.server if hasattr(server, "server") else server).w
        return w

    plain, attacked_mean, nobody = (
        after(a)
        for a in (
            FedAvg(),
            Attacked(FedAvg(), "sign_flip", (1,), 1.0),
            Attacked(FedAvg(), "sign_flip", (), 1.0),
        )
    )
    assert torch.equal(plain, nobody)
    first = task.initial
    # w1 + w2 = 2 plain; the attack sends 2 first - w2: plain + attacked = w1 + first.
    (w1,) = (plain + attacked_mean - first,)
    assert not torch.allclose(attacked_mean, plain)
    assert torch.allclose(after(Attacked(FedAvg(), "sign_flip", (0,), 1.0)), first + plain - w1)


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "attack"), [("copfl", "noise"), pytest.param("fedavg", "label_flip", marks=slow)]
)
def test_it_is_an_algorithm_like_any_other(name: str, attack: str) -> None:
    attacked = Attacked(ALGORITHMS[name](), attack, (0, 2), ATTACKS[attack][1], seed=3)
    check_algorithm(attacked, rounds=2, batch=6, norm="none")


@pytest.mark.job
def test_a_run_names_the_attackers_and_tells_the_honest_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--rounds", 2, "--engine", "vmap", "--model", "mlp", "--out", tmp_path / "run")
    done = called(
        capsys, "run", "-d", "digits", "--attack", "scaled", "--attackers", 0.3, "--verbose", *options
    )
    assert done.code == 0, done.err
    attackers = list(choose_attackers(0, 10, 0.3))
    assert sum("malicious" in line for line in done.out.splitlines()) == 3
    assert "honest" in done.out
    record = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])
    assert [
        n for n, lies in zip(record["clients"], record["per_client"]["malicious"], strict=True) if lies
    ] == attackers
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["attackers"] == attackers
    toml = (tmp_path / "run" / "run.toml").read_text()
    assert '[attack]\nname = "scaled"\nfraction = 0.3' in toml


def test_a_run_that_goes_on_draws_the_same_lies_and_the_same_noise(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model": "mlp", "model_options": {"width": 4}, "clients": 3, "engine": "vmap", "checkpoint_every": 1,
        "attack": {"name": "noise", "fraction": 0.4}, "robust": {"name": "trimmed_mean"},
    }  # fmt: skip
    whole = run("copfl", rounds=4, **options)
    run("copfl", rounds=2, out=tmp_path / "run", **options)
    assert resume(tmp_path / "run", rounds=4).records == whole.records


def test_what_does_not_fit_is_said_before_the_run() -> None:
    for name in ("ktpfl", "ifca"):
        with pytest.raises(UsageError, match="choose another algorithm"):
            run(name, rounds=1, attack={"name": "noise"}, model="mlp")
    with pytest.raises(UsageError, match=r"attack.name=.. is missing; allowed are"):
        run("fedavg", rounds=1, attack={"fraction": 0.2}, model="mlp")
    with pytest.raises(UsageError, match=r'attack.fractio=.* is no setting; did you mean "fraction"'):
        run("fedavg", rounds=1, attack={"name": "noise", "fractio": 0.2}, model="mlp")
