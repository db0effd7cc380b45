from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from copfl.kernels.topk import count, count_of_each, largest, largest_of_each


def places(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def by_sorting(values: Tensor, count: int) -> Tensor:
    """The same by a stable sort: equal ones in the order they stand, negative ones never."""
    first = torch.sort(values, descending=True, stable=True).indices[: max(count, 0)]
    chosen = torch.zeros(len(values), dtype=torch.bool)
    chosen[first] = True
    return chosen & (values >= 0)


VECTORS = st.one_of(
    st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=40),
    st.lists(
        st.sampled_from([0.0, 1.0, 2.0, -1.0]), min_size=1, max_size=40
    ),  # ties, and entries out of the race
    st.lists(st.just(0.0), min_size=1, max_size=10),
    st.lists(
        st.sampled_from([0.0, 1e-45, 3e-45, 1e-38, 2e-38]), min_size=1, max_size=20
    ),  # below the normal range
)


@given(VECTORS, st.integers(0, 45), st.sampled_from([torch.float32, torch.float64]))
def test_largest_is_the_top_of_a_sort(values: list[float], count: int, dtype: torch.dtype) -> None:
    vector = torch.tensor(values, dtype=dtype)
    assert torch.equal(largest(vector, torch.tensor(count)), by_sorting(vector, count))


@given(st.integers(0, 2**31 - 1), st.sampled_from([torch.float32, torch.float64]))
def test_largest_with_a_count_per_client(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = (
        torch.rand(5, 30, generator=generator, dtype=dtype).mul(7).round().div(7) - 0.1
    )  # many ties, some negative
    counts = torch.randint(0, 31, (5,), generator=generator)
    together = torch.func.vmap(largest)(values, counts)
    for n in range(5):
        assert torch.equal(together[n], by_sorting(values[n], int(counts[n])))


def test_largest_by_hand() -> None:
    values = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, -1.0])
    assert places(largest(values, torch.tensor(0))) == []
    assert places(largest(values, torch.tensor(2))) == [1, 2]
    assert places(largest(values, torch.tensor(4))) == [0, 1, 2, 4]
    assert places(largest(values, torch.tensor(99))) == [0, 1, 2, 3, 4]  # a negative value never wins


def test_largest_with_one_value_above_all_bounds() -> None:
    assert places(largest(torch.tensor([1.0, torch.inf, 2.0]), torch.tensor(2))) == [1, 2]


def test_count_is_exact_and_per_client() -> None:
    masks = torch.rand(3, 70, generator=torch.Generator().manual_seed(0)) < 0.3
    assert torch.func.vmap(count)(masks).tolist() == masks.sum(1).tolist()
    assert int(count(torch.ones(100_001, dtype=torch.bool))) == 100_001


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 2**31 - 1))
def test_stretches_are_chosen_and_counted_each_on_its_own(sizes: list[int], seed: int) -> None:
    generator, cuts = torch.Generator().manual_seed(seed), tuple(sizes)
    values = torch.rand(3, sum(sizes), generator=generator).mul(5).round() - 1
    counts = torch.randint(0, 13, (3, len(sizes)), generator=generator)
    together = torch.func.vmap(lambda v, n: largest_of_each(v, n, cuts))(values, counts)
    found = torch.func.vmap(lambda m: count_of_each(m, cuts))(together)
    for n in range(3):
        alone = [largest(part, k) for part, k in zip(torch.split(values[n], sizes), counts[n], strict=True)]
        assert torch.equal(together[n], torch.cat(alone))
        assert torch.equal(largest_of_each(values[n], counts[n], cuts), together[n])
        assert (
            found[n].tolist()
            == count_of_each(together[n], cuts).tolist()
            == [int(part.sum()) for part in alone]
        )
