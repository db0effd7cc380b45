"""A vote of remembered samples, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from copfl.core.criteria import classification, regression
from copfl.core.memory import Memory, recalled, vote


def memory(*samples: tuple[float, int], nearest: int = 2, width: float = 4.0, places: int = 5) -> Memory:
    """Samples of one feature and a class of two, and empty places after them."""
    features, targets = torch.zeros(places, 1), torch.zeros(places, 2)
    for place, (feature, target) in enumerate(samples):
        features[place], targets[place, target] = feature, 1
    used = torch.arange(places) < len(samples)
    return Memory(features, targets, used, torch.tensor(nearest), torch.tensor(width), torch.tensor(0.5))


def shares(remembered: Memory, at: float, besides: Tensor | None = None) -> list[float]:
    result: list[float] = vote(remembered, torch.tensor([[at]]), besides)[0].tolist()
    return result


def test_the_nearest_vote_by_their_distance() -> None:
    remembered = memory((1.0, 0), (2.0, 1), (9.0, 0))
    near, far = 1.0, math.exp(-1 / 4)  # at distances 0 and 1; the third is not among two
    assert shares(remembered, 1.0) == pytest.approx([near / (near + far), far / (near + far)])


def test_a_sample_has_no_vote_on_itself() -> None:
    remembered = memory((1.0, 0), (2.0, 1), (9.0, 1))
    assert shares(remembered, 1.0, torch.tensor([0])) == pytest.approx([0, 1])


def test_all_that_are_as_near_as_the_last_vote() -> None:
    assert shares(memory((1.0, 0), (3.0, 1), (3.0, 1), nearest=1), 2.0) == pytest.approx([1 / 3, 2 / 3])


def test_more_neighbours_than_samples_are_all_samples() -> None:
    assert shares(memory((1.0, 0), (3.0, 1), nearest=50), 2.0) == pytest.approx([0.5, 0.5])


def test_samples_far_away_still_vote() -> None:
    """exp(-distance / width) of all of them is 0 in any precision; the nearest one decides."""
    assert shares(memory((1.0, 0), (2.0, 1)), 1e4) == pytest.approx([0, 1])


def test_an_empty_memory_is_finite() -> None:
    assert shares(memory(), 1.0) == [0, 0]
    predictions = torch.tensor([[0.25, 0.75]]).log()
    mixed = recalled(classification(), torch.zeros(1, 2), predictions, torch.tensor(0.0))
    torch.testing.assert_close(mixed, predictions)


def test_probabilities_and_values_are_mixed() -> None:
    share, voted = torch.tensor(0.25), torch.tensor([[1.0, 0.0]])
    mixed = recalled(classification(), voted, torch.tensor([[0.2, 0.8]]).log(), share).exp()
    assert mixed[0].tolist() == pytest.approx([0.25 + 0.75 * 0.2, 0.75 * 0.8])
    values = recalled(regression(), torch.tensor([[8.0]]), torch.tensor([[4.0]]), share)
    assert values.tolist() == [[5.0]]
