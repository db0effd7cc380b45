from __future__ import annotations

import numpy as np
import torch

from copfl.core.random import hashed, normal
from copfl.kernels.draws import mixed, seeded


def test_the_bits_are_those_of_the_plans_hash() -> None:
    ids = np.arange(1000, dtype=np.uint64)
    here = mixed(3, 7, torch.arange(1000)).numpy().view(np.uint64)
    assert (here == hashed(3, 7, ids)).all()
    assert mixed(2**62, torch.tensor(-1)).item() == hashed(2**62, np.array(2**64 - 1, np.uint64)).view(
        np.int64
    )


def test_the_numbers_are_normal() -> None:
    drawn = normal(torch.tensor(5), torch.zeros(200_000, dtype=torch.float64))
    assert torch.isfinite(drawn).all()
    assert abs(float(drawn.mean())) < 0.01
    assert abs(float(drawn.std()) - 1) < 0.01
    assert abs(float((drawn**4).mean()) - 3) < 0.1
    assert abs(float((drawn.abs() < 1).double().mean()) - 0.6827) < 0.005
    assert abs(float((drawn[1:] * drawn[:-1]).mean())) < 0.01


def test_a_key_gives_the_same_numbers_alone_and_side_by_side() -> None:
    keys, like = torch.tensor([1, 2, 2]), torch.zeros(3, 50)
    rows = torch.func.vmap(normal)(keys, like)
    assert torch.equal(rows, torch.stack([normal(k, v) for k, v in zip(keys, like, strict=True)]))
    assert torch.equal(rows[1], rows[2])
    assert not torch.equal(rows[0], rows[1])


def test_a_seed_gives_the_numbers_of_manual_seed_and_the_generator_goes_on_afterwards() -> None:
    torch.manual_seed(7)
    drawn = torch.rand(3), torch.rand(3)
    torch.manual_seed(1)
    others = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), drawn[0])
    with seeded(1):
        assert torch.equal(torch.rand(3), others)
    assert torch.equal(torch.rand(3), drawn[1])
