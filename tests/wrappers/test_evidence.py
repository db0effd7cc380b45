from __future__ import annotations

from typing import Any

import pytest
import torch

from copfl.algorithms import ALGORITHMS, FedAvg
from copfl.audit import replay
from copfl.choosing.run import run
from copfl.core.algorithm import leave_out
from copfl.errors import UsageError
from copfl.experiment.training import train_rounds
from copfl.settings.federation import Federation, Secure
from copfl.settings.schema import Robust, Run
from copfl.testing import check_algorithm
from copfl.wrappers.attacks import Attacked
from copfl.wrappers.evidence import ByEvidence
from tests.audit.small import experiment
from tests.toys import slopes
from tests.wrappers.test_robust import server_after


def test_a_client_that_is_left_out_does_not_count_in_the_mean() -> None:
    algorithm, task = Attacked(ByEvidence(FedAvg()), "noise", (), 1.0), slopes(0.0, 0.0)
    sent = [([3.0, 4.0], 1.0), ([0.0, 1.0], 3.0), ([10.0, 0.0], 8.0)]
    server = server_after(algorithm, task, [sent])
    assert server.server.server.w.tolist() == pytest.approx([83 / 12, 7 / 12])
    without_last = leave_out(algorithm, server, torch.tensor([False, False, True]))
    assert without_last.server.weight.tolist() == [1, 1, 0]
    without_any_more = leave_out(algorithm, without_last, torch.tensor([True, False, False]))
    assert without_any_more.server.weight.tolist() == [0, 1, 0]  # who is left out stays so


@pytest.mark.job
@pytest.mark.parametrize("name", ["fedavg", "copfl"])
def test_without_weight_is_as_if_the_uploads_did_not_arrive(name: str) -> None:
    """Also for CO-PFL, whose clients subtract their own uploads from what they receive."""
    plain = experiment(ALGORITHMS[name](), rounds=3)
    weighed = experiment(ByEvidence(ALGORITHMS[name]()), rounds=3)
    left_out = torch.tensor([False, False, True, False])
    start = type(weighed.algorithm).server_init

    class From(ByEvidence):
        def server_init(self, task: Any, clients: int) -> Any:
            return leave_out(weighed.algorithm, start(self, task, clients), left_out)

    from_the_start = experiment(From(ALGORITHMS[name]()), rounds=3)
    expected, found = replay.without(plain, [2]), train_rounds(from_the_start, None)
    others = [0, 1, 3]
    torch.testing.assert_close(
        torch.tensor(found.metric("test_loss")[:, others]),
        torch.tensor(expected.metric("test_loss")[:, others]),
    )
    assert (found.metric("weight")[:, 2] == 0).all()


@pytest.mark.job
def test_it_is_an_algorithm_like_any_other() -> None:
    check_algorithm(ByEvidence(ALGORITHMS["copfl"]()), rounds=2, norm="none")


def test_it_needs_the_benefit_and_the_losses_of_each_client() -> None:
    with pytest.raises(UsageError, match=r"robust\.name=evidence .* add run\.benefit=true"):
        run("fedavg", "digits", model="mlp", rounds=1, robust={"name": "evidence"})
    with pytest.raises(
        UsageError, match=r"robust\.name='evidence' decides during the run by each member's losses"
    ):
        Federation(run=Run(robust=Robust(name="evidence")), secure=Secure(aggregation=True))
