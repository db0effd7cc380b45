"""Exact solutions of the quadratic programmes: by hand, and by the conditions that only a solution meets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from copfl.parts.quadratic import combination, in_box, on_simplex, onto_simplex

SIZES = st.integers(1, 12)
SEEDS = st.integers(0, 2**31)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def semidefinite(size: int, rank: int, seed: int) -> Tensor:
    """A random positive semidefinite matrix; singular where the rank is below the size."""
    rows = torch.randn(size, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows @ rows.T


def test_on_the_simplex_by_hand() -> None:
    """a^2 + 3 (1 - a)^2 is least at a = 3/4."""
    torch.testing.assert_close(on_simplex(torch.diag(vector(1, 3))), vector(0.75, 0.25))


def test_a_vertex_can_be_best() -> None:
    """a' P a = a^2 + 4 a b + 4 b^2 = (a + 2 b)^2 = (1 + b)^2 for a = 1 - b."""
    torch.testing.assert_close(on_simplex(torch.tensor([[1.0, 2.0], [2.0, 4.0]])), torch.tensor([1.0, 0.0]))


def test_without_any_difference_all_count_the_same() -> None:
    torch.testing.assert_close(on_simplex(torch.zeros(4, 4)), torch.full((4,), 0.25))


def test_variances_that_a_client_invented_give_weights() -> None:
    """Of a large negative one, the matrix was not positive definite by rounding, and no server could go on."""
    for size in (1.0, 1e6, 1e12, 1e20):
        for others in (0.0, 1e-12, 1.0, 1e12):
            a = on_simplex(torch.diag(vector(-size, others, others)) + semidefinite(3, 2, seed=0))
            torch.testing.assert_close(a.sum(), vector(1)[0])


@given(SIZES, st.integers(1, 15), SEEDS, st.floats(-4, 4))
def test_on_the_simplex_only_the_best_will_do(size: int, rank: int, seed: int, magnitude: float) -> None:
    """Karush, Kuhn and Tucker: P a is least, and the same, wherever a is not zero; the problem is convex."""
    matrix = 10**magnitude * semidefinite(size, rank, seed)
    a = on_simplex(matrix)
    assert (a >= 0).all()
    torch.testing.assert_close(a.sum(), vector(1)[0])
    slope, scale = matrix @ a, matrix.diagonal().mean()
    assert (slope.min() - (slope * a).sum()).abs() <= 1e-8 * scale
    value = (a * slope).sum()
    assert (value <= matrix.diagonal() + 1e-8 * scale).all(), "a vertex is better"
    assert value <= matrix.mean() + 1e-8 * scale, "equal shares are better"


def test_in_the_box_by_hand() -> None:
    torch.testing.assert_close(
        in_box(torch.eye(3, dtype=torch.float64), vector(2, 0.5, -1), 1.0), vector(1, 0.5, 0)
    )
    assert not in_box(torch.eye(3, dtype=torch.float64), vector(2, 0.5, -1), 0.0).any()


@given(SIZES, st.integers(1, 15), SEEDS, st.floats(0.01, 10))
def test_in_the_box_only_the_best_will_do(size: int, rank: int, seed: int, limit: float) -> None:
    """What is inside has no slope; what is at an end would leave the box if it followed its slope."""
    matrix, gain = semidefinite(size, rank, seed), semidefinite(size, 3, seed + 1)[0]
    x = in_box(matrix, gain, limit)
    slope, scale = gain - matrix @ x, 1 + float(matrix.diagonal().mean()) * limit + float(gain.abs().max())
    assert (x >= 0).all()
    assert (x <= limit).all()
    assert (slope[x > 0] >= -1e-6 * scale).all()
    assert (slope[x < limit] <= 1e-6 * scale).all()


def test_two_heads_by_hand() -> None:
    """P_1 = diag(v1, v2 + |h1 - h2|^2), so a_1 is to a_2 as v2 + |h1 - h2|^2 to v1."""
    weights = combination(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(weights, torch.tensor([[7 / 8, 1 / 8], [3 / 8, 5 / 8]], dtype=torch.float64))


@given(st.integers(1, 10), st.integers(1, 6), st.integers(0, 2**31))
def test_weights_lie_on_the_simplex_and_no_other_choice_is_better(clients: int, size: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    means = torch.randn(clients, size, dtype=torch.float64, generator=draw) + 100
    spread = torch.rand(clients, dtype=torch.float64, generator=draw)
    for i, a in enumerate(combination(means, spread)):
        apart = means[i] - means
        matrix = torch.diag(spread) + apart @ apart.T
        assert (a >= 0).all()
        assert float(a.sum()) == pytest.approx(1)
        slope = matrix @ a
        value, scale = float(a @ slope), float(matrix.diagonal().mean())
        assert value <= float(matrix.diagonal().min()) + 1e-9 * scale, "one head alone is better"
        assert float(slope.min()) >= value - 1e-7 * scale, "a little more of one head is better"


@given(st.integers(1, 8), st.integers(0, 2**31), st.floats(0.01, 100))
def test_onto_the_simplex(size: int, seed: int, spread: float) -> None:
    """The nearest point is max(v - tau, 0) for one tau."""
    draw = torch.Generator().manual_seed(seed)
    rows = spread * torch.randn(3, size, dtype=torch.float64, generator=draw)
    allowed = torch.rand(size, generator=draw) < 0.7
    allowed[0] = True
    nearest = onto_simplex(rows, allowed)
    assert (nearest >= 0).all()
    assert not nearest[:, ~allowed].any()
    torch.testing.assert_close(nearest.sum(1), torch.ones(3, dtype=torch.float64))
    for row, point in zip(rows, nearest, strict=True):
        tau = (row - point)[point > 0]
        assert float(tau.max() - tau.min()) < 1e-9 * spread
        assert (row[allowed & (point == 0)] <= tau.max() + 1e-9 * spread).all()
