"""The smallest secure ring of SecAgg+: values of an independent implementation, and probabilities by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from copfl.federation.protocol import secure_graph
from copfl.federation.protocol.secure_graph import Degree, degree_of, smallest_degree


def curious(degree: Degree) -> int:
    """The threshold against a server that follows the protocol."""
    return max(degree.corrupt + 1, 2)


def semi_malicious(degree: Degree) -> int:
    """The threshold against a server that asks for both secrets; only neighbours have shares."""
    return max(math.ceil((degree.corrupt + degree.neighbours - 1.25) / 2) + 1, 2)


@pytest.mark.parametrize(
    ("clients", "corrupt", "dropped", "rule", "neighbours", "threshold"),
    [
        (100, 0.05, 0.05, curious, 12, 6),
        (1_000, 0.05, 0.05, curious, 30, 17),
        (10_000, 0.05, 0.05, curious, 34, 20),
        (100, 0.05, 0.05, semi_malicious, 16, 11),
        (1_000, 0.05, 0.05, semi_malicious, 52, 37),
        (10_000, 0.05, 0.05, semi_malicious, 62, 44),
        (100, 0.33, 0.05, semi_malicious, 42, 37),
        (1_000, 0.33, 0.05, semi_malicious, 132, 109),
        (10_000, 0.33, 0.05, semi_malicious, 178, 146),
        (30, 0.2, 0.1, semi_malicious, 14, 11),
        (50, 0.2, 0.1, semi_malicious, 22, 17),
    ],
)
def test_the_rule_gives_the_published_degrees(
    clients: int,
    corrupt: float,
    dropped: float,
    rule: secure_graph.Threshold,
    neighbours: int,
    threshold: int,
) -> None:
    degree = smallest_degree(clients, corrupt, dropped, rule)
    assert (degree.neighbours, rule(degree)) == (neighbours, threshold)


@pytest.mark.parametrize("clients", [50, 100, 1_000])
def test_the_own_share_is_counted(clients: int) -> None:
    degree = smallest_degree(clients)
    threshold = secure_graph.ring_threshold(degree)
    assert threshold >= semi_malicious(degree)
    assert 2 * threshold > degree.neighbours + 1 + degree.corrupt
    assert threshold <= degree.staying


def test_the_probabilities_of_a_small_ring_by_hand() -> None:
    """Six clients of which two are corrupt, two neighbours: both are corrupt in 1 of 15 cases."""
    assert list(secure_graph._up_to(6, 2, 2)) == [Fraction(6, 15), Fraction(14, 15), Fraction(1)]
    assert degree_of(6, 2, 2 / 6, 0.0) == Degree(2, corrupt=2, staying=2)
