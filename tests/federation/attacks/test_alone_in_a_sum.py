"""Settings by which a sum of all members is of one member, or of few of its rows."""

from __future__ import annotations

import tomllib
from typing import Any

import numpy as np
import pytest

from copfl.core import tree
from copfl.federation.policy.file import policy_from, strict
from copfl.federation.policy.request import refusals
from tests.federation.attacks.test_secure_attacks import ALL, PLAIN, Malicious, Nodes, fresh, nodes
from tests.federation.network import CONFIG

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')
__all__ = ["fresh", "nodes"]

SMALL = 40  # rows of node 0; the others have more


def with_few_rows(nodes: Nodes) -> Nodes:
    """Node 0 has one batch of rows, and every other one several."""
    arrays = dict(np.load(nodes[0]["data"]))
    np.savez(nodes[0]["data"], **arrays | {name: arrays[name][:SMALL] for name in ("x", "y")})
    return nodes


def pixels(config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The rows as the model sees them."""
    x: np.ndarray[Any, Any] = np.load(config["data"])["x"]
    return (x.reshape(-1, 64) / 255 - 0.3) / 0.37


def gradient_of(config: dict[str, Any], model: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of the weights [10, 64] of a linear model without biases, on all rows of a node."""
    x, y = pixels(config), np.load(config["data"])["y"]
    scores = x @ model.T
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    found: np.ndarray[Any, Any] = (chances - np.eye(10)[y]).T @ x / len(x)
    return found


def told(found: np.ndarray[Any, Any], update: np.ndarray[Any, Any]) -> float:
    """How much the server knows of an update."""
    return float(np.nan_to_num(np.corrcoef(found.ravel(), update.ravel())[0, 1]))


def summed(nodes: Nodes, **settings: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The weights of the first model, which is an honest one, and those of the sum after a round."""
    config = PLAIN | {"optimizer.momentum": 0, "run.even_batches": True, **settings}
    server = Malicious(nodes, config=config)
    first = tree.leaves(server.model(0))[0][:640].double().numpy().reshape(10, 64)
    return first, server.total(ALL)[:640].reshape(10, 64)


def test_settings_at_which_all_others_fail_give_no_update_of_a_site(nodes: Nodes) -> None:
    """The decay multiplies weights by 1e8 in each step: one step is within single precision, and five are not."""
    few = with_few_rows(nodes)
    rate = decay = 1e4  # the largest options of the strict policy
    first, total = summed(
        few,
        **{"optimizer.lr": rate, "optimizer.weight_decay": decay, "run.batch": SMALL},
        **{"secure.range": 1e15, "secure.bits": 48},
    )
    found = (first * (1 - rate * decay) - total) / rate
    assert abs(told(found, gradient_of(few[0], first))) < 0.2  # it was 0.999


def test_a_range_that_is_too_small_for_all_others_gives_no_update_of_a_site(nodes: Nodes) -> None:
    """The weights times the rows are at the end of the range where there are many rows: the server knows the end."""
    few, rate, most = with_few_rows(nodes), 0.01, 3.0
    first, total = summed(
        few,
        **{"optimizer.lr": rate, "optimizer.weight_decay": 0, "run.batch": 1000},
        **{"algorithm.weights": "samples", "secure.range": most},
    )
    known = (np.abs(first) * 150 > 1.2 * most) & (np.abs(first) * SMALL < 0.8 * most)
    assert known.sum() > 50
    found = (first * SMALL - (total - 4 * most * np.sign(first))) / SMALL / rate
    assert abs(told(found[known], gradient_of(few[0], first)[known])) < 0.4  # it was 0.999


def rows_told(total: np.ndarray[Any, Any], nodes: Nodes) -> int:
    """How many rows of the sites are in a sum: two classes differ by theirs."""
    rows = np.concatenate([pixels(config) for config in nodes.values()])
    of_classes = np.concatenate([np.diff(total, axis=0), total - total[:1], total - total[-1:]])
    of_classes = of_classes[np.abs(of_classes).max(1) > 1e-3 * np.abs(total).max()]
    both = np.corrcoef(np.concatenate([of_classes, rows]))[: len(of_classes), len(of_classes) :]
    return len({int(row) for row in np.abs(both).argmax(1)[np.abs(both).max(1) > 0.99]})


def test_an_optimizer_that_forgets_is_refused(nodes: Nodes) -> None:
    """Where rate times decay is 1, each step begins with weights of zero: an update is that of its last batch.

    With a row in each, one sum is of five rows, and all five are told.
    """
    rate, decay = 1e-2, 1e2
    forgets: dict[str, Any] = {"optimizer.lr": rate, "optimizer.weight_decay": decay, "run.batch": 1}
    _, total = summed(nodes, **forgets)
    assert rows_told(total, nodes) == 5
    strict_policy = policy_from(tomllib.loads(strict()))
    asked = CONFIG | forgets | {"secure.aggregation": True, "run.even_batches": True, "run.clients": 5}
    lines = [refusal.line for refusal in refusals(strict_policy, asked | {"algorithm.name": "fedavg"})]
    assert lines == ["least_rows", "least_rows"]
