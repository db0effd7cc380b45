"""Cox's model with a ridge: its equations hold, its ridge is chosen by likelihood, and test targets have no say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from copfl.core.criteria import survival
from copfl.measures.metrics import metric
from copfl.rivals.records import SiteRows
from copfl.rivals.survival import log_likelihood, ridge_cox, survival_rivals

Floats = NDArray[np.float64]
C_INDEX = metric("c_index", "survival")
RIDGES = (1.0, 100.0)


def patients(rows: int = 120, seed: int = 0, effect: float = 1.0) -> tuple[Floats, Floats]:
    """Rows of which the first column raises the hazard, with ties and censoring."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4)) * [1, 3, 1, 0.1] + 5
    time, end = rng.exponential(np.exp(-effect * (x[:, 0] - 5))), rng.exponential(2, rows)
    return x, np.stack([np.ceil(10 * np.minimum(time, end)), time <= end], 1)


def test_the_likelihood_is_that_of_the_objective() -> None:
    x, y = patients()
    losses = survival(ties="breslow").losses(torch.from_numpy(x[:, :1]), torch.from_numpy(y))
    assert log_likelihood(x[:, 0], y) == pytest.approx(-float(losses.sum()))


@pytest.mark.parametrize("ridge", [0.5, 50.0])
def test_the_gradient_is_zero_at_the_coefficients(ridge: float) -> None:
    x, y = patients()
    model, deviation = ridge_cox(x, y, ridge), x.std(0)
    beta = torch.tensor(model.coefficients * deviation, requires_grad=True)
    risk = torch.from_numpy((x - x.mean(0)) / deviation) @ beta
    losses = survival(ties="breslow").losses(risk[:, None], torch.from_numpy(y))
    (losses.sum() + ridge / 2 * (beta**2).sum()).backward()  # type: ignore[no-untyped-call]
    assert beta.grad is not None
    assert float(beta.grad.abs().max()) < 1e-4
    np.testing.assert_allclose(model(x).mean(), 0, atol=1e-9)


def late(targets: Floats) -> Floats:
    """The targets with starts: half of the rows enter late."""
    start = np.floor(targets[:, 0] / 2) * (np.arange(len(targets)) % 2)
    return np.column_stack([targets, start])


def test_the_likelihood_and_its_maximum_with_starts() -> None:
    x, y = patients()
    y = late(y)
    losses = survival(ties="breslow").losses(torch.from_numpy(x[:, :1]), torch.from_numpy(y))
    assert log_likelihood(x[:, 0], y) == pytest.approx(-float(losses.sum()))
    deviation = x.std(0)
    beta = torch.tensor(ridge_cox(x, y, 0.5).coefficients * deviation, requires_grad=True)
    risk = torch.from_numpy((x - x.mean(0)) / deviation) @ beta
    losses = survival(ties="breslow").losses(risk[:, None], torch.from_numpy(y))
    (losses.sum() + 0.25 * (beta**2).sum()).backward()  # type: ignore[no-untyped-call]
    assert beta.grad is not None
    assert float(beta.grad.abs().max()) < 1e-4


def test_a_column_without_variance_and_one_patient_more_than_columns_are_no_trouble() -> None:
    x, y = patients(5)
    x[:, 1] = 7
    y[:, 1] = 1
    model = ridge_cox(x, y, 0.1)
    assert np.isfinite(model.coefficients).all()
    assert model.coefficients[1] == 0


def test_the_ridge_is_chosen_and_the_risk_is_found() -> None:
    x, y = patients(200)
    found = survival_rivals(SiteRows(x[:120], y[:120], x[120:], y[120:]), C_INDEX, RIDGES, seed=0)
    assert list(found) == ["constant", "linear"]
    assert found["constant"].validated == 0.5
    assert found["linear"].validated > 0.7
    assert C_INDEX.of(found["linear"].answers, y[120:]) > 0.7
    np.testing.assert_allclose(found["linear"].fitted[0](x[120:])[:, None], found["linear"].answers)


def test_without_an_effect_the_larger_ridge_is_chosen() -> None:
    x, y = patients(60, effect=0.0)
    (model,) = survival_rivals(SiteRows(x, y, x, y), C_INDEX, (0.01, 1e6), seed=0)["linear"].fitted
    assert np.abs(model.coefficients * x.std(0)).max() < 1e-3


def test_the_targets_of_the_test_rows_have_no_say() -> None:
    x, y = patients()
    first, second = [
        survival_rivals(SiteRows(x[:90], y[:90], x[90:], tested), C_INDEX, RIDGES, seed=0)["linear"].answers
        for tested in (y[90:], y[90:] * 0 + 1)
    ]
    np.testing.assert_array_equal(first, second)


def test_of_one_event_there_is_no_more_than_the_curve() -> None:
    x, y = patients(20)
    y[1:, 1] = 0
    y[0, 1] = 1
    found = survival_rivals(SiteRows(x, y, x, y), C_INDEX, RIDGES, seed=0)
    assert not found["linear"].answers.any()
    assert list(survival_rivals(SiteRows(x, y, x, y), C_INDEX, (), seed=0)) == ["constant"]
