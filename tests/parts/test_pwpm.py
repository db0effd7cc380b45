from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from copfl.core import Batch, Data, UsageError
from copfl.core.layout import Layout, layout_of
from copfl.parts.pwpm import (
    CANDIDATES,
    COUNTS,
    Pwpm,
    _groups,
    moves,
    personal_fraction,
    shared,
    sharing_metrics,
    weighted,
)
from tests.algorithms.chain import vector
from tests.toys import slopes

ROUND = torch.tensor(0)


def plain(d: int) -> Layout:
    """The layout of one weight vector of d entries."""
    return layout_of(nn.Linear(d, 1, bias=False), head="")


def nobody(d: int) -> Tensor:
    return torch.zeros(d, dtype=torch.bool)


def places(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def grown(growth: Pwpm, change: list[float], mask: Tensor | None = None, round: int = 0) -> list[int]:
    d = len(change)
    start = nobody(d) if mask is None else mask
    return places(growth.grow(plain(d), start, torch.tensor(change), torch.tensor(round)))


def test_one_growth_by_hand() -> None:
    # 8 shared entries, rate 1/4: the two with the largest |change|.
    assert grown(Pwpm(0.25, 0.5), [0.1, -5.0, 0.2, 3.0, -0.3, 0.4, 0.5, 0.6]) == [1, 3]


def test_the_shares_of_the_default_rate_are_a_quarter_then_seven_sixteenths_then_the_budget() -> None:
    growth, layout, mask = Pwpm(0.25, 0.5), plain(64), nobody(64)
    shares = []
    for k in range(4):
        mask = growth.grow(layout, mask, torch.rand(64) + 1, torch.tensor(k))
        shares.append(float(mask.double().mean()))
    assert shares == [0.25, 0.4375, 0.5, 0.5]


def test_ties_are_broken_by_order_and_the_count_is_exact() -> None:
    assert grown(Pwpm(0.25, 1.0), [1.0] * 8) == [0, 1]
    assert grown(Pwpm(0.25, 1.0), [-1.0, 1.0] * 4, mask=torch.arange(8) < 4) == [0, 1, 2, 3, 4]


def test_when_everybody_competes_the_same_winners_stall_the_mask() -> None:
    change = [9.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    mask = nobody(8)
    for _ in range(3):
        mask = Pwpm(0.25, 0.5, candidates="all").grow(plain(8), mask, torch.tensor(change), ROUND)
        assert places(mask) == [0, 1]
    assert grown(Pwpm(0.25, 0.5), change, mask) == [0, 1, 2, 3]  # among the shared entries alone it goes on


def test_when_everybody_competes_the_largest_new_clients_use_the_last_room() -> None:
    # Top half of 8: entries 0, 5, 6, 7; 0 is personal already and there is room for 2 of the 3 new clients.
    growth = Pwpm(0.5, 3 / 8, candidates="all")
    assert grown(growth, [9.0, 0.1, 0.2, 0.3, 0.4, 5.0, 7.0, 6.0], mask=torch.arange(8) < 1) == [0, 6, 7]


def test_per_tensor_every_weight_gives_its_share_and_biases_stay_shared() -> None:
    layout = layout_of(
        nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4))
    )  # weights 8, bias 2, weights 8, bias 4
    change = torch.cat(
        [torch.arange(8.0) + 1, torch.full((2,), 99.0), torch.arange(8.0) + 100, torch.full((4,), 999.0)]
    )
    growth = Pwpm(0.25, 0.5, candidates="tensor")
    mask = growth.grow(layout, nobody(22), change, ROUND)
    assert places(mask) == [6, 7, 16, 17]
    mask = growth.grow(
        layout, mask, change, ROUND
    )  # a quarter of the 6 that are left is 2 (1.5 rounded to even)
    assert places(mask) == [4, 5, 6, 7, 14, 15, 16, 17]
    assert torch.equal(
        growth.grow(layout, mask, change, ROUND), mask
    )  # half of every weight tensor: the budget
    overall = Pwpm(0.25, 0.5).grow(layout, nobody(22), change, ROUND)
    assert places(overall) == [16, 17, 18, 19, 20, 21]  # without "tensor" the largest, wherever they are


def test_warmup_and_every_choose_the_rounds() -> None:
    growth, mask, rounds = Pwpm(0.1, 1.0, warmup=2, interval=3), nobody(40), []
    for k in range(10):
        after = growth.grow(plain(40), mask, torch.rand(40) + 1, torch.tensor(k))
        if not torch.equal(after, mask):
            rounds.append(k)
        mask = after
    assert rounds == [2, 5, 8]


def test_counting_what_moves_or_everything() -> None:
    # Of 16 entries 8 move. Moving: 2 a time up to 4. All: 4 a time up to 8, which is all that moves.
    change = torch.cat([torch.arange(8.0) + 1, torch.zeros(8)])
    sizes: dict[str, list[int]] = {}
    for count in COUNTS:
        mask, sizes[count] = nobody(16), []
        for k in range(4):
            mask = Pwpm(0.25, 0.5, count=count).grow(plain(16), mask, change, torch.tensor(k))
            sizes[count].append(int(mask.sum()))
    assert sizes["moving"] == [
        2,
        4,
        4,
        4,
    ]  # round(.25 * 8), then round(.25 * 6) = 2 by rounding to even, then full
    assert sizes["all"] == [4, 7, 8, 8]  # round(.25 * 16), round(.25 * 12), then room for one
    assert places(mask) == list(range(8))


def test_personal_entries_that_rest_still_count_as_moving() -> None:
    # 4 personal entries without change, 4 shared ones with: 8 count, so three quarters leave room for 2 more.
    assert grown(Pwpm(0.5, 0.75), [0.0] * 4 + [1.0] * 4, mask=torch.arange(8) < 4) == [0, 1, 2, 3, 4, 5]
    assert grown(Pwpm(0.5, 0.5), [0.0] * 4 + [1.0] * 4, mask=torch.arange(8) < 4) == [0, 1, 2, 3]


def test_nothing_moved_nothing_grows() -> None:
    assert grown(Pwpm(0.25, 0.5), [0.0] * 8) == []
    assert grown(Pwpm(0.0, 0.5), [1.0] * 8) == []
    assert grown(Pwpm(1.0, 0.0), [1.0] * 8) == []
    assert grown(Pwpm(1.0, 1.0), [1.0] * 8) == list(range(8))


@settings(max_examples=50)
@given(
    st.integers(1, 60), st.floats(0, 1), st.floats(0, 1), st.sampled_from(("shared", "all", "tensor")),
    st.sampled_from(COUNTS),
    st.integers(0, 2**31 - 1), st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_masks_only_grow_and_never_beyond_the_budget(
    d: int, rate: float, budget: float, among: str, count: str, seed: int, dtype: torch.dtype
) -> None:
    growth, layout, mask = Pwpm(rate, budget, among, count=count), plain(d), nobody(d)
    generator = torch.Generator().manual_seed(seed)
    for k in range(5):
        change = (
            torch.randn(d, generator=generator, dtype=dtype).mul(2).round()
        )  # ties, and entries that rest
        after = growth.grow(layout, mask, change, torch.tensor(k))
        counted = int((moves(change, mask) | mask).sum()) if count == "moving" else d
        fresh = int(after.sum() - mask.sum())
        assert not (mask & ~after).any()
        assert fresh == 0 or int(after.sum()) <= budget * counted
        assert count == "moving" or int(after.sum()) <= budget * d
        if among == "shared":
            baselines = int((moves(change, mask) & ~mask).sum()) if count == "moving" else d - int(mask.sum())
            room = math.floor(budget * counted) - int(mask.sum())
            assert fresh == max(0, min(round(rate * baselines), room))
        if fresh and among != "all":  # what was taken changed at least as much as what was left
            left = change.abs()[~after & (moves(change, mask) if count == "moving" else ~after)]
            assert not len(left) or change.abs()[after & ~mask].min() >= left.max()
        mask = after


@pytest.mark.parametrize("among", CANDIDATES)
@pytest.mark.parametrize("count", COUNTS)
def test_clients_side_by_side_grow_as_each_alone(among: str, count: str) -> None:
    growth = Pwpm(0.3, 0.5, among, count, warmup=1)
    layout = layout_of(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    generator = torch.Generator().manual_seed(0)
    d = layout.parameters
    changes = torch.randn(4, d, generator=generator).mul(2).round()
    masks = torch.rand(4, d, generator=generator) < torch.tensor([0.0, 0.2, 0.5, 0.9])[:, None]
    rounds = torch.tensor([0, 1, 2, 3])
    together = torch.func.vmap(lambda m, c, k: growth.grow(layout, m, c, k))(masks, changes, rounds)
    for n in range(4):
        assert torch.equal(together[n], growth.grow(layout, masks[n], changes[n], rounds[n]))


def test_chosen_anew_an_entry_may_return() -> None:
    held = torch.tensor([True, False, False, False])
    # One is personal and a third of three more would be: two of four, the budget. The largest two do not hold
    # entry 0.
    assert grown(Pwpm(1 / 3, 0.5, "reselect"), [0.1, 5.0, 3.0, 0.2], held) == [1, 2]
    assert grown(Pwpm(1 / 3, 0.5, "reselect"), [4.0, 5.0, 3.0, 0.2], held) == [0, 1]
    assert grown(Pwpm(1 / 3, 0.5, "reselect", warmup=1), [0.1, 5.0, 3.0, 0.2], held) == [0]  # it is not due


def test_samples_are_kept_back_only_where_benefit_is_asked_for() -> None:
    plan = ((Batch(torch.arange(10), None, None, None),),)
    assert Pwpm().trainable(plan, ROUND) is plan
    growth = Pwpm(criterion="benefit", warmup=6)
    for round, missing in ((5, []), (6, [1, 6]), (7, [2, 7])):
        (batch,) = growth.trainable(plan, torch.tensor(round))[0]
        assert batch.valid is not None
        assert places(~batch.valid) == missing


@pytest.mark.parametrize("among", CANDIDATES)
def test_what_is_of_no_benefit_stays_shared(among: str) -> None:
    change, benefit = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([-1.0, 0.5, 0.0, 0.25])
    found = Pwpm(1.0, 1.0, among, criterion="benefit").grow(plain(4), nobody(4), change, ROUND, benefit)
    assert places(found) == [1, 3]
    found = Pwpm(0.25, 1.0, among, criterion="benefit").grow(plain(4), nobody(4), change, ROUND, benefit)
    assert places(found) == [1]


def test_a_group_is_personal_while_its_own_values_are_better_on_held_out_samples() -> None:
    task, growth = slopes(0.0, 0.0), Pwpm(criterion="held_out", warmup=1, until=3)
    x = torch.tensor([[1.0, n / 10] for n in range(10)], dtype=torch.float64)
    data = Data(x, torch.ones(10, dtype=torch.int64), torch.tensor(10))  # a·x should be large
    low, high = (torch.tensor([v, 0.1], dtype=torch.float64) for v in (-1.0, 1.0))

    def selected(own: Tensor, received: Tensor, round: int = 1, mask: bool = False) -> list[bool]:
        before = torch.full((2,), mask)
        return growth.selected(task, before, own, received, data, torch.tensor(round)).tolist()

    assert selected(high, low) == [True, True]
    assert selected(low, high, mask=True) == [False, False]
    assert selected(high, high, mask=True) == [False, False]  # no better: it is shared
    assert selected(high, low, round=0) == selected(high, low, round=3) == [False, False]
    plan = ((Batch(torch.arange(10), None, None, None),),)
    for round, missing in ((0, [4, 9]), (2, [4, 9]), (3, [])):
        (batch,) = growth.trainable(plan, torch.tensor(round))[0]
        assert batch.valid is not None
        assert places(~batch.valid) == missing


def test_the_groups_are_the_head_and_then_the_blocks_from_the_last() -> None:
    names = ("layer.0.A", "layer.0.B", "layer.11.A", "head.weight", "scale")
    layout = Layout(names, ((1,), (2,), (1,), (3,), (1,)), 5, "head", ())
    found = [places(group) for group in _groups(layout, torch.device("cpu"))]
    assert found == [[4, 5, 6], [7], [3], [0, 1, 2]]


def test_shares() -> None:
    mask, change = torch.tensor([True, True, False, False, False]), torch.tensor([0.0, 1.0, 1.0, 0.0, 1e-9])
    share, of_moving = personal_fraction(mask, change).values()
    assert float(share) == pytest.approx(2 / 5)
    assert float(of_moving) == pytest.approx(2 / 3)  # the personal ones and one more move; 1e-9 is rounding
    assert [float(s) for s in personal_fraction(nobody(3), torch.zeros(3)).values()] == [0, 0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate": 1.5}, "rate=1.5 must lie between 0 and 1"),
        ({"budget": -0.1}, "budget=-0.1 must lie between 0 and 1"),
        ({"rate": float("nan")}, "rate=nan must lie between 0 and 1"),
        ({"candidates": "tensors"}, 'no candidates "tensors"; did you mean "tensor"'),
        ({"count": "moved"}, 'no count "moved"'),
        ({"criterion": "size"}, 'no criterion "size"'),
        ({"warmup": -1}, "warmup=-1 must be a number of at least 0"),
        ({"interval": 0}, "interval=0 must be a number of at least 1"),
    ],
)
def test_what_cannot_work_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Pwpm(**wrong)


MASK = torch.tensor([True, False, False])


def test_an_upload_holds_nothing_where_personal() -> None:
    upload = shared(MASK, vector(1, 2, 3))
    assert upload.values.tolist() == [0, 2, 3]
    assert upload.personal is MASK


def test_what_an_upload_adds_to_the_mean_over_the_sharers() -> None:
    w, weights, personal = weighted(shared(MASK, vector(1, 2, 3)), vector(0.5)[0])
    assert w.tolist() == [0, 1, 1.5]
    assert weights.tolist() == [0, 0.5, 0.5]
    assert personal.tolist() == [1, 0, 0]


def test_how_much_is_shared() -> None:
    """Of two clients one holds the first entry, both the last, which nobody averages then."""
    found = sharing_metrics(vector(1, 0, 2), torch.tensor([True, True, False]), vector(2)[0])
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {"shared": 0.5, "averaged": 2 / 3, "shared_by_all": 1 / 3}
    )
