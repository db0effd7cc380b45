from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from copfl.algorithms.apfl import APFL
from copfl.algorithms.copfl import COPFL
from copfl.algorithms.ditto import Ditto
from copfl.algorithms.fedavg import FedAvg
from copfl.algorithms.fedavg_ft import FedAvgFT
from copfl.algorithms.feddpa import FedDPA
from copfl.algorithms.fedpoe import FedPOE
from copfl.algorithms.knn_per import KNNPer
from copfl.core import AnyAlgorithm, Experts
from copfl.core.evaluation import with_statistics
from copfl.testing import small_federation
from copfl.wrappers.addons import with_addons
from tests.kinds import quick
from tests.toys import rounds_of, slopes

SIZES = (9, 6, 12)


def losses_of_the_global_model(algorithm: AnyAlgorithm) -> list[Any]:
    task, federation = small_federation("batch", SIZES)
    rounds = rounds_of(algorithm, task, federation, 3, batch=4, eval_every=1)[1]
    return [round.clients["test_loss_global"] for round in rounds]


@pytest.fixture(scope="module")
def of_fedavg() -> list[Any]:
    return losses_of_the_global_model(FedAvg())


# Their global model is FedAvg's, whatever else a client trains and predicts with.
AROUND_FEDAVG: dict[str, AnyAlgorithm] = {
    "apfl": APFL(),
    "apfl, weights": APFL(mixture="weights"),
    "ditto": Ditto(),
    "fedavg_ft": FedAvgFT(tune_epochs=1),
    "feddpa": FedDPA(),
    "fedpoe": FedPOE(holdout=0),
    "knn_per": KNNPer(holdout=0, samples=16),
    "fedavg, bn_stats": with_addons(FedAvg(), bn_stats="local"),
    "fedavg, ema": with_addons(FedAvg(), ema=0.9),
    "apfl, bn_stats, ema": with_addons(APFL(), bn_stats="local", ema=0.9),
}


# Quick: two models mixed by outputs and by weights, one beside the shared one, features, and each add-on.
USUAL = ("apfl, weights", "ditto", "fedpoe", "knn_per", "apfl, bn_stats, ema")


@pytest.mark.parametrize("name", quick(AROUND_FEDAVG, USUAL))
def test_the_global_model_has_its_own_statistics_and_not_those_of_a_personal_model(
    name: str, of_fedavg: list[Any]
) -> None:
    np.testing.assert_allclose(losses_of_the_global_model(AROUND_FEDAVG[name]), of_fedavg, rtol=1e-9)


def test_addons_of_the_predictions_do_not_change_the_global_model_of_copfl() -> None:
    expected = losses_of_the_global_model(COPFL())
    found = losses_of_the_global_model(with_addons(COPFL(), bn_stats="local", ema=0.9))
    np.testing.assert_array_equal(found, expected)


def test_statistics_are_put_into_one_model_or_into_each_of_a_mixture() -> None:
    task, _ = small_federation("batch", (4,))
    d, size = task.d, len(task.initial) - task.d
    two = torch.stack([task.initial, 2 * task.initial])
    mixed = with_statistics(task, Experts(two, torch.ones(2) / 2), torch.arange(2.0)[:, None].expand(2, size))
    assert isinstance(mixed, Experts)
    assert torch.equal(mixed.w[:, :d], two[:, :d])
    assert mixed.w[:, d:].mean(1).tolist() == [0, 1]
    one = with_statistics(task, task.initial, torch.full((size,), 3.0))
    assert isinstance(one, torch.Tensor)
    assert one[d:].tolist() == [3] * size


def test_the_global_model_of_fedpoe_is_the_mean_without_untrained_models() -> None:
    task, algorithm = slopes(0.0), FedPOE()
    server = algorithm.server_init(task, 2)._replace(w=torch.tensor([1.0], dtype=torch.float64))
    down = algorithm.downlink(server, torch.tensor([0]))
    new = algorithm.personal_model(task, algorithm.client_init(task), type(down)(*(t[0] for t in down)))
    # Of the local model, the mean and two places of the bank, the second alone has been trained.
    assert new.share.tolist() == [0, 1, 0, 0]
    assert new.w[1].tolist() == [1]
