"""The gates of studies/adaptive: their likelihood and shrinkage by hand, and the algorithms that they contain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from copfl.algorithms import FedAvgFT, FedPAC, FedPer, FedRoD
from copfl.core import Data
from studies.adaptive.block_gate import BlockGate
from studies.adaptive.fedpac_gate import FedPACGate
from studies.adaptive.fedrod_gate import FedRoDGate
from studies.adaptive.gates import Evidence, Prior, fitted, next_prior, solved
from tests.algorithms.chain import chain, vector
from tests.algorithms.updates import three_rounds

PAIRS = ((2.0, 1), (1.0, 0), (-1.0, 1), (0.5, 1))
OWN, SHARED = vector(-0.4, 0.8), vector(1.0, 0.5)  # body and head
PRIOR = Prior(vector(0.25, 0.75, 0.8), vector(0.1, 0.2, 0.05))


def held_out() -> Data:
    """Four samples, and one that is padding."""
    x = torch.tensor([[x] for x, _ in (*PAIRS, (9.0, 0))], dtype=torch.float64)
    return Data(x, torch.tensor([y for _, y in (*PAIRS, (9.0, 0))]), torch.tensor(len(PAIRS)))


def mixed(gates: Tensor) -> Tensor:
    return SHARED + gates * (OWN - SHARED)


def by_hand() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """s, A and the sum of the samples' outer products of scores: the logits are [0, scale * head * body * x]."""
    body, head, scale = 1 - 0.25 * 1.4, 0.5 + 0.75 * 0.3, 0.8
    # Secants to the far end of each gate: the body's gate goes to 1, the head's to 0.
    slopes = np.array([scale * head * (-0.4 - body) / 0.75, scale * body * (0.5 - head) / -0.75, head * body])
    score, information, noise = np.zeros(3), np.zeros((3, 3)), np.zeros((3, 3))
    for x, y in PAIRS:
        p = 1 / (1 + np.exp(-scale * head * body * x))
        of_sample = (y - p) * slopes * x
        score, noise = score + of_sample, noise + np.outer(of_sample, of_sample)
        information = information + p * (1 - p) * x * x * np.outer(slopes, slopes)
    return score, information, noise


def test_a_client_by_hand() -> None:
    gates, evidence = fitted(chain(1.0, 0.5), mixed, PRIOR, held_out())
    score, information, noise = by_hand()
    assert evidence.score.numpy() == pytest.approx(score, rel=1e-12)
    assert evidence.information.numpy() == pytest.approx(information, rel=1e-12)
    assert evidence.surplus.numpy() == pytest.approx(score**2 - noise.diagonal(), rel=1e-12)
    assert evidence.squares.numpy() == pytest.approx(information.diagonal() ** 2, rel=1e-12)
    spread = np.diag(PRIOR.variance.numpy())
    matrix = noise + information @ spread @ information + 1e-3 * np.eye(3)
    deviation = spread @ information @ np.linalg.solve(matrix, score)
    assert gates.numpy() == pytest.approx((PRIOR.mean.numpy() + deviation)[:2], rel=1e-9)


def test_without_spread_or_samples_a_client_follows_the_federation() -> None:
    no_spread = PRIOR._replace(variance=torch.zeros_like(PRIOR.variance))
    assert fitted(chain(1.0, 0.5), mixed, no_spread, held_out())[0].tolist() == [0.25, 0.75]
    nobody = held_out()._replace(size=torch.tensor(0))
    gates, evidence = fitted(chain(1.0, 0.5), mixed, PRIOR, nobody)
    assert gates.tolist() == [0.25, 0.75]
    assert all(not bool(part.any()) for part in evidence)


def test_the_federation_finds_the_mean_and_the_spread() -> None:
    rng, mean, deviation = np.random.default_rng(0), np.array([0.6, 0.3, 1.0]), np.array([0.2, 0.1, 0.0])
    start, clients = vector(0.0, 0.0), 4000
    information = np.array([[40.0, 5.0, 1.0], [5.0, 60.0, 2.0], [1.0, 2.0, 50.0]])
    own = mean + deviation * rng.normal(size=(clients, 3))
    prior = Prior(vector(0.0, 0.0, 1.0), vector(0.0, 0.0, 0.0))
    noise = np.linalg.cholesky(information)
    errors = rng.normal(size=(clients, 3)) @ noise.T
    for _ in range(40):
        scores = (own - prior.mean.numpy()) @ information + errors
        total = Evidence(
            *map(
                torch.from_numpy,
                (
                    scores.sum(0),
                    clients * information,
                    (scores**2 - information.diagonal()).sum(0),
                    clients * information.diagonal() ** 2,
                ),
            )
        )
        prior = next_prior(prior, start, total)
    assert prior.mean.numpy() == pytest.approx(mean, abs=0.01)
    assert prior.variance.sqrt().numpy() == pytest.approx(deviation, abs=0.04)


def test_a_round_without_evidence_changes_nothing() -> None:
    nothing = Evidence(*(torch.zeros(shape, dtype=torch.float64) for shape in (3, (3, 3), 3, 3)))
    after = next_prior(PRIOR, vector(0.0, 0.0), nothing)
    assert [t.tolist() for t in after] == [t.tolist() for t in PRIOR]


def test_elimination_solves() -> None:
    root = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix, right = root @ root.T + torch.eye(4, dtype=torch.float64), vector(1.0, -2.0, 0.5, 3.0)
    torch.testing.assert_close(solved(matrix, right), torch.linalg.solve(matrix, right))


@pytest.mark.parametrize(
    ("gated", "contained"),
    [
        (
            FedPACGate(explore=0, start_gates=("own_head", "mean_head", "own_body"), end_gates="layers"),
            FedPAC(),
        ),
        (FedPACGate(explore=0, start_gates=("own_head", "own_body"), end_gates="shared"), FedPAC()),
        (FedPACGate(explore=0), FedPAC()),
        (FedRoDGate(explore=0), FedRoD()),
        (BlockGate(explore=0, first_head_gate=0.0), FedAvgFT()),
        (BlockGate(explore=0, first_head_gate=1.0), FedPer()),
    ],
)
def test_with_fixed_gates_it_is_the_algorithm_that_it_contains(gated: Any, contained: Any) -> None:
    (*_, with_gates), (*_, without) = three_rounds(gated), three_rounds(contained)
    for first, second in zip(with_gates, without, strict=True):
        assert first.clients["loss"] == pytest.approx(second.clients["loss"], rel=1e-9)
    last = [rounds[-1].clients["test_loss"] for rounds in (with_gates, without)]
    assert last[0] == pytest.approx(last[1], rel=1e-9)
