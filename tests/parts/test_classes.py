"""Class statistics by hand, and without the samples that only fill up space."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from copfl.core import Data, UsageError, task_of
from copfl.parts.classes import Sums, aligned, centroids_of, class_sums, prior_means, table_shape
from tests.algorithms.chain import chain, samples, vector


def test_sums_by_hand() -> None:
    """The features are twice the samples: 2 and 6 in class 0, 4 in class 1."""
    task = chain(2.0, 0.5)
    sums = class_sums(task, task.initial, samples((1.0, 0), (3.0, 0), (2.0, 1)))
    assert sums.features.tolist() == [[8.0], [4.0]]
    assert sums.counts.tolist() == [2.0, 1.0]
    assert float(sums.squares) == 4 + 36 + 16


def test_what_is_not_real_does_not_count() -> None:
    task, (x, y, *_) = chain(2.0, 0.5), samples((1.0, 0), (3.0, 0), (2.0, 1))
    sums = class_sums(task, task.initial, Data(x, y, torch.tensor(1)))
    assert sums.features.tolist() == [[2.0], [0.0]]
    assert sums.counts.tolist() == [1.0, 0.0]
    assert float(sums.squares) == 4


def test_centroids_stay_where_nobody_has_the_class() -> None:
    found = centroids_of(vector(6.0, 0.0)[:, None], vector(3.0, 0.0), vector(7.0, 8.0)[:, None])
    assert found.tolist() == [[2.0], [8.0]]


def test_prior_means_and_their_variance_by_hand() -> None:
    """Features 2, 6 in class 0 and 4 in class 1: h = (8/3, 4/3), and v = (56/3 - 64/9 - 16/9) / 3."""
    sums = Sums(vector(8.0, 4.0)[:, None], vector(56.0)[0], vector(2.0, 1.0))
    means, spread = prior_means(sums, vector(3.0)[0])
    assert means.flatten().tolist() == pytest.approx([8 / 3, 4 / 3])
    assert float(spread) == pytest.approx((56 / 3 - 80 / 9) / 3)


def test_alignment_by_hand() -> None:
    """Features (1, 2) and (5, 7) of classes 0 and 1; class 1 has no centroid but the client's own mean, (3, 3)."""
    logits, labels = torch.zeros(2, 2).double(), torch.tensor([0, 1])
    features = torch.tensor([[1.0, 2.0], [5.0, 7.0]]).double()
    own = Sums(torch.tensor([[9.0, 9.0], [6.0, 6.0]]).double(), vector(0.0)[0], vector(1.0, 2.0))
    centroids = torch.tensor([[0.0, 0.0], [50.0, 50.0]]).double()
    task = chain(1.0, 1.0)
    plain = float(task.objective(logits, features, labels, None))
    pulled = aligned(task, centroids, torch.tensor([True, False]), own, 0.5)(logits, features, labels, None)
    assert float(pulled) == pytest.approx(plain + 0.5 * ((1 + 4) / 2 + (4 + 16) / 2) / 2)
    nobody = aligned(task, centroids, torch.tensor([False, False]), own, 0.5)(logits, features, labels, None)
    assert float(nobody) == plain


def test_a_table_of_classes_and_features_needs_a_linear_head() -> None:
    assert table_shape(chain(1.0, 1.0)) == (1, 1)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.LayerNorm(3))
    with pytest.raises(UsageError, match="need a Linear head"):
        table_shape(task_of(model, 3, head="2"))
