from __future__ import annotations

from collections import Counter
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from copfl.core.batches import choose, plan, plan_of_steps, training_split, validation_split
from copfl.core.random import CHOICE, FLIP, ORDER, SHIFT_ACROSS, SHIFT_DOWN, hashed
from copfl.core.task import Batch, Data, Plan


def visited(drawn: Plan, client: int, which: int) -> list[list[int]]:
    """The valid samples of one client in one epoch, a list per step."""
    steps = []
    for batch in drawn[which]:
        index = batch.index[client]
        steps.append((index if batch.valid is None else index[batch.valid[client]]).tolist())
    return steps


def augmented(drawn: Plan, client: int) -> list[dict[int, tuple[int, int, bool]]]:
    """The shift and flip of each valid sample of one client, a dictionary per epoch."""
    result = []
    for steps in drawn:
        found = {}
        for batch in steps:
            assert batch.shift is not None
            assert batch.flip is not None
            valid = torch.ones_like(batch.flip[client]) if batch.valid is None else batch.valid[client]
            for place in valid.nonzero().flatten().tolist():
                down, across = batch.shift[client, place].tolist()
                found[int(batch.index[client, place])] = (down, across, bool(batch.flip[client, place]))
        result.append(found)
    return result


SIZES = st.lists(st.integers(1, 25), min_size=1, max_size=6)


@given(SIZES, st.integers(1, 9), st.integers(0, 2**40), st.integers(0, 1000))
def test_every_epoch_visits_every_sample_once(sizes: list[int], batch: int, seed: int, round: int) -> None:
    drawn = plan(seed, round, range(len(sizes)), sizes, batch=batch, epochs=2)
    assert len(drawn) == 2
    for which in range(2):
        for client, size in enumerate(sizes):
            steps = visited(drawn, client, which)
            assert sorted(chain.from_iterable(steps)) == list(range(size))
            # Full batches first, then what is left, then nothing.
            lengths = [min(batch, max(0, size - start)) for start in range(0, max(sizes), batch)]
            assert [len(step) for step in steps] == lengths


@given(SIZES, st.integers(1, 9), st.integers(0, 50), st.booleans())
def test_a_client_has_the_same_plan_alone_and_among_others(
    sizes: list[int], batch: int, first_id: int, augment: bool
) -> None:
    ids = [first_id + 3 * n for n in range(len(sizes))]
    how: dict[str, Any] = {"batch": batch, "epochs": 2, "augment": augment}
    together = plan(7, 5, ids, sizes, **how)
    for place, (client, size) in enumerate(zip(ids, sizes, strict=True)):
        alone = plan(7, 5, [client], [size], **how)
        for which in range(2):
            assert [s for s in visited(together, place, which) if s] == visited(alone, 0, which)
        if augment:
            assert augmented(together, place) == augmented(alone, 0)


@pytest.mark.parametrize("sizes", [[1], [17], [5, 40, 1, 33], [64, 64]])
@pytest.mark.parametrize("batch", [1, 16, 32, 100])
def test_even_batches_have_one_size_but_for_one_sample(sizes: list[int], batch: int) -> None:
    """As many as without, and none of what is left; alone, among others, and in rows of a given width."""
    ids = list(range(len(sizes)))
    whole = plan(3, 4, ids, sizes, batch=batch, epochs=2, augment=True, even=True)
    limited = plan(3, 4, ids, sizes, batch=batch, epochs=2, even=True, limits=(1, 70))
    for client, size in enumerate(sizes):
        alone = plan(3, 4, [client], [size], batch=batch, epochs=2, augment=True, even=True)
        plain = plan(3, 4, [client], [size], batch=batch, epochs=2)
        for epoch in range(2):
            steps = visited(whole, client, epoch)
            assert [*filter(None, visited(limited, client, epoch))] == [*filter(None, steps)]
            assert visited(alone, 0, epoch) == [*filter(None, steps)]
            assert sorted(chain.from_iterable(steps)) == list(range(size))
            lengths = [len(step) for step in steps if step]
            assert max(lengths) - min(lengths) <= 1
            assert max(lengths) <= batch
            assert len(lengths) == len(plain[epoch])
            assert [*chain.from_iterable(steps)] == [*chain.from_iterable(visited(plain, 0, epoch))]
        one, other = (
            torch.cat([b.shift[n][:1] for b in p[0] if b.shift is not None])
            for p, n in ((whole, client), (alone, 0))
        )
        assert torch.equal(one[: len(other)], other)


def test_equal_sizes_need_no_padding() -> None:
    for batch in plan(0, 0, [0, 1], [10, 10], batch=4, epochs=1)[0]:
        assert batch.valid is None
        assert batch.shift is None is batch.flip
    lengths = [b.index.shape for b in plan(0, 0, [0, 1], [10, 10], batch=4, epochs=1)[0]]
    assert lengths == [(2, 4), (2, 4), (2, 2)]


def test_filling_points_at_a_sample_that_is_there() -> None:
    for steps in plan(0, 0, [0, 1], [3, 50], batch=8, epochs=2):
        for batch in steps:
            assert int(batch.index[0].max()) < 3


def test_passes_rounds_clients_and_seeds_differ() -> None:
    def order(seed: int = 0, round: int = 0, client: int = 0, which: int = 0) -> tuple[int, ...]:
        return tuple(visited(plan(seed, round, [client], [40], batch=40, epochs=2), 0, which)[0])

    orders = {order(), order(seed=1), order(round=1), order(client=1), order(which=1), order(seed=1, round=1)}
    assert len(orders) == 6
    assert order() == order()


def test_the_streams_are_apart() -> None:
    streams = (ORDER, SHIFT_DOWN, SHIFT_ACROSS, FLIP, CHOICE)
    bits = [hashed(0, stream, 0, np.arange(50, dtype=np.uint64)) for stream in streams]
    assert len(np.unique(np.concatenate(bits))) == 250


def test_shifts_and_flips_are_even() -> None:
    drawn = augmented(plan(3, 0, [0], [9000], batch=9000, epochs=1, augment=True), 0)[0]
    downs, acrosses, flips = zip(*drawn.values(), strict=True)
    for counts in (Counter(downs), Counter(acrosses)):
        assert set(counts) == set(range(9))
        assert all(
            850 < count < 1150 for count in counts.values()
        )  # 1000 each, five deviations of 30 on both sides
    assert 4250 < sum(flips) < 4750
    assert (
        len(Counter(zip(downs, acrosses, flips, strict=True))) == 162
    )  # independent: every combination occurs


def test_a_samples_shift_and_flip_do_not_depend_on_its_place() -> None:
    few, many = (
        augmented(plan(0, 0, [0], [size], batch=4, epochs=1, augment=True), 0)[0] for size in (6, 30)
    )
    assert few == {sample: many[sample] for sample in few}


def test_a_shuffle_is_fair() -> None:
    # Which sample comes first, over 2000 rounds of a client with 4 samples: 500 each, give or take.
    first = Counter(visited(plan(0, round, [5], [4], batch=1, epochs=1), 0, 0)[0][0] for round in range(2000))
    assert set(first) == {0, 1, 2, 3}
    assert all(400 < count < 600 for count in first.values())


def test_everybody_is_chosen_when_everybody_is_asked_for() -> None:
    assert choose(0, 0, 5, 5).tolist() == [0, 1, 2, 3, 4] == choose(0, 0, 5, 9).tolist()


@given(st.integers(1, 40), st.data())
def test_the_chosen_are_distinct_sorted_and_as_many_as_asked(clients: int, data: Any) -> None:
    count = data.draw(st.integers(1, clients))
    chosen = choose(1, 2, clients, count)
    assert len(chosen) == count
    assert (np.diff(chosen) > 0).all()
    assert 0 <= chosen.min() <= chosen.max() < clients
    assert chosen.dtype == np.int64


def test_every_set_of_clients_is_equally_likely() -> None:
    sets = Counter(tuple(choose(4, round, 5, 2).tolist()) for round in range(4000))
    assert set(sets) == set(combinations(range(5), 2))
    assert all(300 < count < 500 for count in sets.values())  # 400 each, five deviations of 19


def test_draws_do_not_change_between_versions() -> None:
    assert int(hashed(0)) == 0xE220A8397B1DCDAF  # the first output of splitmix64 from state 0, as published
    # Ours, once drawn: a run that is resumed with a later version must go on with the same draws.
    assert choose(0, 0, 100, 3).tolist() == [7, 28, 82]
    drawn = plan(0, 0, [0], [6], batch=6, epochs=1, augment=True)
    assert visited(drawn, 0, 0) == [[1, 4, 2, 3, 0, 5]]
    assert augmented(drawn, 0)[0] == {
        1: (6, 2, True), 4: (6, 7, False), 2: (7, 4, False), 3: (0, 5, False), 0: (2, 2, False), 5: (4, 8, True),
    }  # fmt: skip


@pytest.mark.parametrize("big", [2**63, 2**64 - 1])
def test_large_seeds_work(big: int) -> None:
    assert visited(plan(big, 0, [0], [3], batch=3, epochs=1), 0, 0) != []


# -- training and validation split ---------------------------------------------------------------------------


def test_every_fifth_sample_is_left_out_of_training() -> None:
    valid = torch.tensor([True, True, False])
    plan = (
        (
            Batch(torch.tensor([4, 3, 9]), None, None, None),
            Batch(torch.tensor([0, 14, 1]), valid, None, None),
        ),
    )
    (first, second) = training_split(plan)[0]
    assert first.valid is not None
    assert second.valid is not None
    assert first.valid.tolist() == [False, True, False]
    assert second.valid.tolist() == [True, False, False]
    for size, count in ((4, 0), (5, 1), (9, 1), (12, 2)):  # of 12 rows, the first `size` are valid
        validation = validation_split(Data(torch.arange(12), torch.arange(12), torch.tensor(size)))
        assert int(validation.size) == count
        assert validation.y[:count].tolist() == [4, 9][:count]


def test_the_two_share_no_sample_and_miss_none() -> None:
    plan = ((Batch(torch.arange(11), None, None, None),),)
    for every in (2, 3, 7):
        (batch,) = training_split(plan, every)[0]
        assert batch.valid is not None
        validation = validation_split(Data(torch.arange(11), torch.arange(11), torch.tensor(11)), every)
        trained = batch.index[batch.valid].tolist()
        assert sorted(trained + validation.y[: int(validation.size)].tolist()) == list(range(11))


def test_every_sample_is_in_the_validation_split_of_one_fold() -> None:
    plan = ((Batch(torch.arange(11), None, None, None),),)
    data = Data(torch.arange(12), torch.arange(12), torch.tensor(11))
    validated = []
    for fold in range(5):
        (batch,) = training_split(plan, fold=torch.tensor(fold))[0]
        validation = validation_split(data, fold=torch.tensor(fold))
        assert batch.valid is not None
        ours = validation.y[: int(validation.size)].tolist()
        assert sorted(batch.index[batch.valid].tolist() + ours) == list(range(11))
        validated += ours
    assert sorted(validated) == list(range(11))
    (batch,) = training_split(plan, fold=torch.tensor(-1))[0]
    assert batch.valid is not None
    assert batch.valid.all()  # fold -1: every sample is trained on


# -- local steps ---------------------------------------------------------------------------------------------


@given(SIZES, st.integers(1, 9), st.integers(1, 7), st.integers(0, 200), st.booleans())
def test_every_pass_of_local_steps_visits_every_sample_once(
    sizes: list[int], batch: int, steps: int, seed: int, augment: bool
) -> None:
    """Over updates and epochs, whatever the sizes: the steps of a client end to end are whole passes."""
    taken: list[list[list[int]]] = [[] for _ in sizes]
    for update in range(4):
        done = [update * 2 * steps] * len(sizes)
        how: dict[str, Any] = {"batch": batch, "epochs": 2, "steps": steps, "augment": augment}
        drawn = plan_of_steps(seed, range(len(sizes)), sizes, done, **how)
        assert [len(epoch) for epoch in drawn] == [steps, steps]
        for client in range(len(sizes)):
            taken[client] += [step for which in range(2) for step in visited(drawn, client, which)]
    for size, steps_of_client in zip(sizes, taken, strict=True):
        length = -(-size // batch)
        assert all(steps_of_client)  # no step without a sample
        for start in range(0, len(steps_of_client) - length + 1, length):
            a_pass = steps_of_client[start : start + length]
            assert sorted(chain.from_iterable(a_pass)) == list(range(size))


@pytest.mark.parametrize(("size", "passes", "epochs"), [(20, 1, 1), (20, 3, 1), (20, 2, 2), (18, 2, 1)])
def test_steps_that_are_whole_passes_are_epochs(size: int, passes: int, epochs: int) -> None:
    """The same samples, shifts, flips and keys in the same steps, in every round."""
    how: dict[str, Any] = {"batch": 5, "augment": True}
    length = -(-size // 5)
    for round in range(3):
        whole = plan(3, round, [0, 4], [size, size], epochs=passes * epochs, **how)
        done = [round * passes * epochs * length] * 2
        drawn = plan_of_steps(3, [0, 4], [size, size], done, epochs=epochs, steps=passes * length, **how)
        assert len(drawn) == epochs
        for one, other in zip(chain.from_iterable(whole), chain.from_iterable(drawn), strict=True):
            width = one.index.shape[1]
            assert one.valid is None
            assert (other.valid is None) == (size % 5 == 0)  # else every step has one, so that all are alike
            assert other.valid is None or torch.equal(other.valid.sum(1), torch.tensor([width, width]))
            for name in ("index", "shift", "flip"):
                assert torch.equal(getattr(one, name), getattr(other, name)[:, :width])
            assert one.key is not None
            assert other.key is not None
            assert torch.equal(one.key, other.key)


def test_a_client_of_ten_and_one_of_a_thousand_make_as_many_steps() -> None:
    drawn = plan_of_steps(0, [0, 1], [10, 1000], [0, 0], batch=32, epochs=1, steps=100)[0]
    small, large = (visited((drawn,), client, 0) for client in (0, 1))
    assert [len(step) for step in small] == [10] * 100
    assert [len(step) for step in large[:33]] == [32] * 31 + [8, 32]
    orders = {tuple(step) for step in small}
    assert len(orders) == 100  # shuffled anew at each pass


@given(SIZES, st.integers(1, 9), st.integers(1, 7), st.booleans())
def test_local_steps_of_a_client_are_the_same_alone_and_among_others(
    sizes: list[int], batch: int, steps: int, augment: bool
) -> None:
    done = [3 * place for place in range(len(sizes))]
    how: dict[str, Any] = {"batch": batch, "epochs": 2, "steps": steps, "augment": augment}
    together = plan_of_steps(7, range(len(sizes)), sizes, done, **how)
    for client, size in enumerate(sizes):
        alone = plan_of_steps(7, [client], [size], [done[client]], **how)
        for which in range(2):
            assert visited(together, client, which) == visited(alone, 0, which)
        if augment:
            for which in range(2):
                for one, other in zip(together[which], alone[which], strict=True):
                    count = int(one.valid[client].sum()) if one.valid is not None else one.index.shape[1]
                    assert one.shift is not None
                    assert other.shift is not None
                    assert torch.equal(one.shift[client, :count], other.shift[0, :count])
