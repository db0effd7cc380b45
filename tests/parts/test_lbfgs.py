"""L-BFGS, one gradient at a time, against known solutions."""

from __future__ import annotations

import torch
from scipy.optimize import minimize
from torch import Tensor

from copfl.parts.lbfgs import Search, begun, moved


def searched(gradient: object, start: Tensor, turns: int) -> Search:
    search = begun(start)
    for _ in range(turns):
        search = moved(search, gradient(search.point))  # type: ignore[operator]
    return search


def test_a_quadratic_is_solved() -> None:
    torch.manual_seed(0)
    root = torch.randn(30, 6, dtype=torch.float64)
    matrix, right = root.T @ root / 30, torch.randn(6, dtype=torch.float64)
    search = searched(lambda point: matrix @ point - right, torch.zeros(6, dtype=torch.float64), 25)
    torch.testing.assert_close(search.point, torch.linalg.solve(matrix, right), rtol=1e-6, atol=1e-8)


def test_a_step_that_is_much_too_long_is_shortened() -> None:
    curvature = torch.tensor([1e4, 1.0], dtype=torch.float64)
    search = searched(lambda point: curvature * (point - 1), torch.zeros(2, dtype=torch.float64), 40)
    torch.testing.assert_close(search.point, torch.ones(2, dtype=torch.float64), rtol=1e-4, atol=1e-4)


def test_a_logistic_regression_equals_scipys() -> None:
    torch.manual_seed(1)
    x = torch.randn(200, 5, dtype=torch.float64)
    y = (x @ torch.randn(5, dtype=torch.float64) + torch.randn(200) > 0).double()

    def gradient(w: Tensor) -> Tensor:
        return -x.T @ (y - torch.sigmoid(x @ w)) / len(x) + 0.01 * w

    def loss(w: object) -> tuple[float, object]:
        at = torch.as_tensor(w)
        eta = x @ at
        value = (torch.nn.functional.softplus(eta) - y * eta).mean() + 0.005 * at @ at
        return float(value), gradient(at).numpy()

    expected = minimize(loss, torch.zeros(5).double().numpy(), jac=True, options={"gtol": 1e-9}).x
    found = searched(gradient, torch.zeros(5, dtype=torch.float64), 30).point
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    search = searched(lambda point: point - 1, torch.zeros(2), 2)
    for new, old in zip(moved(search, torch.full((2,), torch.nan)), search, strict=True):
        torch.testing.assert_close(new, old)


def test_an_objective_that_changes_on_the_way_does_not_throw_the_search_far_away() -> None:
    """The objective becomes a little less steep between two gradients, as it does where others fit their part of it."""
    curvature = torch.tensor([1.0, 0.01], dtype=torch.float64)
    search, largest = begun(torch.tensor([5.0, 5.0], dtype=torch.float64)), 0.0
    for turn in range(40):
        pull = 0.3 * 0.8**turn
        search = moved(search, curvature * search.point + pull, least=0.01)
        largest = max(largest, float(search.point.norm()))
    assert largest < 30
    torch.testing.assert_close(search.point, torch.zeros_like(search.point), rtol=0, atol=0.05)


def test_a_pair_with_less_curvature_than_there_is_says_nothing() -> None:
    search = moved(begun(torch.zeros(2)), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(search.point, torch.tensor([-1.0, 0.0]))  # the first step has the length 1
    flat = torch.tensor([0.999, 0.0])
    assert not moved(search, flat, least=0.01).changes.any()
    found = moved(search, flat)
    assert found.changes[0].any()
    assert float((found.point - search.point).norm()) <= 10.0  # not 999, which the pair says
