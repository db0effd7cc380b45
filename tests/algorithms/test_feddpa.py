"""FedDPA: v trains in the mixture, w alone; what is unlike the client's samples is predicted by w."""

from __future__ import annotations

import math

import pytest
import torch

from copfl.algorithms import FedAvg, FedDPA
from copfl.core import Experts
from copfl.errors import UsageError
from tests.algorithms.chain import LR, PLAIN, chain, numbers, off, one_at_a_time, samples, vector
from tests.algorithms.updates import down_of, output_of, three_rounds
from tests.toys import sigma

V, W, X = (1.0, -0.5), (2.0, 0.25), 1.5  # v's and w's body and head


def test_w_takes_fedavgs_step_and_v_that_of_the_mixture() -> None:
    task, algorithm = chain(0.0, 0.0), FedDPA(PLAIN, share=0.25)
    started = algorithm.client_init(task)._replace(v=vector(*V), started=torch.tensor(True))
    output = output_of(algorithm, task, samples((X, 1)), one_at_a_time([0]), started, w=vector(*W))
    miss = off(W[0] * W[1] * X, 1)
    assert output.upload.w.tolist() == numbers(W[0] - LR * miss * W[1] * X, W[1] - LR * miss * W[0] * X)
    of_v, of_w = sigma(V[0] * V[1] * X), sigma(W[0] * W[1] * X)
    mixed = 0.25 * of_v + 0.75 * of_w
    slope = -0.25 * of_v * (1 - of_v) / mixed  # of -log(mixed) by v's answer
    assert output.metrics["loss"].item() == pytest.approx(-math.log(mixed))
    stepped = (V[0] - LR * slope * V[1] * X, V[1] - LR * slope * V[0] * X)
    assert output.client.v.tolist() == numbers(*stepped)
    assert output.trained.w[0].tolist() == numbers(*stepped)
    assert output.trained.w[1].tolist() == numbers(*W)  # the global model as received
    assert output.client.near.tolist() == [1.0]  # the one feature is positive


def test_a_sample_unlike_the_clients_is_predicted_by_the_global_model() -> None:
    task = chain(0.0, 0.0)
    near = vector(0.5)  # the mean of three cosines of 1 and one of -1
    model = Experts(torch.tensor([V, W], dtype=torch.float64), vector(0.25, 0.75), near)
    alike, unlike = task.predict(model, vector(X, -X)[:, None]).exp()[:, 1].tolist()
    share = 0.25 * 0.5
    assert alike == pytest.approx(share * sigma(V[0] * V[1] * X) + (1 - share) * sigma(W[0] * W[1] * X))
    assert unlike == pytest.approx(sigma(-W[0] * W[1] * X))


def test_a_new_client_predicts_with_the_global_model() -> None:
    task, algorithm, w = chain(9.0, 9.0), FedDPA(), vector(*W)
    personal = algorithm.personal_model(task, algorithm.client_init(task), down_of(algorithm, task, w))
    x = vector(X, -X)[:, None]
    torch.testing.assert_close(task.predict(personal, x), task.predict(w, x))


def test_the_global_model_is_fedavgs() -> None:
    _, ours, _ = three_rounds(FedDPA())
    _, plain, _ = three_rounds(FedAvg())
    assert torch.equal(ours.server.w, plain.server.w)


def test_a_share_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match=r"share=1\.5 must be above 0 and at most 1"):
        FedDPA(share=1.5)
