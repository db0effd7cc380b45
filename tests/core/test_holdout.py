"""Which samples are kept back from training."""

from __future__ import annotations

import torch

from copfl.core.holdout import held_out, kept_back
from copfl.core.task import Batch, Data


def test_every_fifth_sample_is_kept_back() -> None:
    valid = torch.tensor([True, True, False])
    plan = (
        (
            Batch(torch.tensor([4, 3, 9]), None, None, None),
            Batch(torch.tensor([0, 14, 1]), valid, None, None),
        ),
    )
    (first, second) = kept_back(plan)[0]
    assert first.valid is not None
    assert second.valid is not None
    assert first.valid.tolist() == [False, True, False]
    assert second.valid.tolist() == [True, False, False]
    for size, kept in ((4, 0), (5, 1), (9, 1), (12, 2)):  # of 12 rows, the first `size` are real
        held = held_out(Data(torch.arange(12), torch.arange(12), torch.tensor(size)))
        assert int(held.size) == kept
        assert held.y[:kept].tolist() == [4, 9][:kept]


def test_the_two_share_no_sample_and_miss_none() -> None:
    plan = ((Batch(torch.arange(11), None, None, None),),)
    for every in (2, 3, 7):
        (batch,) = kept_back(plan, every)[0]
        assert batch.valid is not None
        held = held_out(Data(torch.arange(11), torch.arange(11), torch.tensor(11)), every)
        trained = batch.index[batch.valid].tolist()
        assert sorted(trained + held.y[: int(held.size)].tolist()) == list(range(11))


def test_in_turn_every_sample_is_judged_with_once_and_trained_on_else() -> None:
    plan = ((Batch(torch.arange(11), None, None, None),),)
    data = Data(torch.arange(12), torch.arange(12), torch.tensor(11))
    judged = []
    for which in range(5):
        (batch,) = kept_back(plan, which=torch.tensor(which))[0]
        held = held_out(data, which=torch.tensor(which))
        assert batch.valid is not None
        ours = held.y[: int(held.size)].tolist()
        assert sorted(batch.index[batch.valid].tolist() + ours) == list(range(11))
        judged += ours
    assert sorted(judged) == list(range(11))
    (batch,) = kept_back(plan, which=torch.tensor(-1))[0]
    assert batch.valid is not None
    assert batch.valid.all()  # where nothing is judged, nothing is kept back
