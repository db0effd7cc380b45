"""Each server step against a loop over plain floats, written from its paper."""

from __future__ import annotations

import math

import pytest
import torch

from copfl.core import UsageError
from copfl.parts.server_steps import SERVER_STEPS, FedExP, Momentum, ServerStep, Spread

UPDATES = [[0.5, -2.0, 0.0], [0.1, 1.0, 3e-4], [-0.7, 0.25, -1e-4]]


def moved(rule: ServerStep, updates: list[list[float]]) -> list[list[float]]:
    """The steps that the rule takes, one after the other."""
    moments, steps = rule.init(torch.zeros(3, dtype=torch.float64)), []
    for update in updates:
        step, moments = rule.step(torch.tensor(update, dtype=torch.float64), moments, None)
        steps.append(step.tolist())
    return steps


def test_mean_is_a_multiple_of_the_update() -> None:
    assert moved(SERVER_STEPS["mean"](lr=0.5), [[2.0, 4.0, 0.0]]) == [[1.0, 2.0, 0.0]]


def test_momentum_is_fedavgm() -> None:
    expected, m = [], [0.0] * 3
    for update in UPDATES:
        m = [0.9 * old + new for old, new in zip(m, update, strict=True)]
        expected.append([0.3 * value for value in m])
    for step, by_hand in zip(moved(Momentum(0.3, 0.9), UPDATES), expected, strict=True):
        assert step == pytest.approx(by_hand, abs=1e-15)


@pytest.mark.parametrize("name", ["adam", "yogi", "adagrad"])
def test_adaptive_steps_are_those_of_reddi_et_al(name: str) -> None:
    lr, beta1, beta2, tau = 0.1, 0.8, 0.95, 0.01
    m, v, expected = [0.0] * 3, [tau**2] * 3, []
    for update in UPDATES:
        for entry, delta in enumerate(update):
            m[entry] = beta1 * m[entry] + (1 - beta1) * delta
            difference = v[entry] - delta**2
            v[entry] = {
                "adam": beta2 * v[entry] + (1 - beta2) * delta**2,
                "yogi": v[entry] - (1 - beta2) * delta**2 * ((difference > 0) - (difference < 0)),
                "adagrad": v[entry] + delta**2,
            }[name]
        expected.append([lr * a / (math.sqrt(b) + tau) for a, b in zip(m, v, strict=True)])
    steps = moved(SERVER_STEPS[name](lr=lr, beta1=beta1, beta2=beta2, tau=tau), UPDATES)
    for step, by_hand in zip(steps, expected, strict=True):
        assert step == pytest.approx(by_hand, abs=1e-14)


def factor(squares: float, square: float, clients: int, epsilon: float = 0.0) -> float:
    """What FedExP multiplies the mean update with."""
    numbers = [torch.tensor(number, dtype=torch.float64) for number in (squares, square, clients)]
    rule, one = FedExP(epsilon), torch.ones(1, dtype=torch.float64)
    return rule.step(one, rule.init(one), Spread(*numbers))[0].item()


def test_fedexp_by_hand() -> None:
    assert factor(8.0, 1.0, 20) == 4.0
    assert factor(8.0, 1.0, 20, epsilon=1.0) == 2.0
    assert factor(1.0, 1.0, 20) == 1.0  # clients that agree: the plain mean
    assert factor(30.0, 1.0, 20) == 10.0  # at most half of the clients
    assert factor(0.0, 0.0, 20) == 1.0  # nothing moves


@pytest.mark.parametrize("clients", [2, 5, 30])
def test_orthogonal_updates_of_equal_length_give_half_of_the_clients(clients: int) -> None:
    assert factor(1.0, 1 / clients, clients) == pytest.approx(max(1, clients / 2))


@pytest.mark.parametrize(
    ("name", "options"),
    [("mean", {"lr": 0}), ("momentum", {"momentum": 1}), ("adam", {"tau": 0}), ("fedexp", {"epsilon": -1})],
)
def test_numbers_out_of_range_are_refused_by_name(name: str, options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"server.{next(iter(options))}"):
        SERVER_STEPS[name](**options)
