from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from copfl.core import tree


class Inner(NamedTuple):
    a: Tensor
    b: Tensor | None


class Outer(NamedTuple):
    x: Tensor
    inner: Inner
    table: dict[str, Tensor]
    pair: tuple[Tensor, ...]


def record(start: float = 0.0) -> Outer:
    number = torch.arange(6.0) + start
    return Outer(
        number[:2], Inner(number[2], None), {"p": number[3:5].view(1, 2)}, (number[5:], torch.tensor([True]))
    )


def same(a: Any, b: Any) -> bool:
    left, right = list(tree.named(a)), list(tree.named(b))
    return [n for n, _ in left] == [n for n, _ in right] and all(
        torch.equal(x, y) for (_, x), (_, y) in zip(left, right, strict=True)
    )


def test_names_are_paths_in_the_order_of_the_fields() -> None:
    assert [name for name, _ in tree.named(record())] == ["x", "inner.a", "table.p", "pair.0", "pair.1"]
    assert next(name for name, _ in tree.named(record(), "down")) == "down.x"


def test_a_bare_tensor_and_nothing_are_trees() -> None:
    assert [name for name, _ in tree.named(torch.ones(2))] == [""]
    assert tree.leaves(None) == [] == tree.leaves(())
    assert tree.each(torch.neg, None) is None


def test_rebuild_undoes_leaves_and_keeps_the_types() -> None:
    again = tree.rebuild(record(), tree.leaves(record(1)))
    assert type(again) is Outer
    assert type(again.inner) is Inner
    assert again.inner.b is None
    assert same(again, record(1))


def test_stack_then_row_gives_each_back() -> None:
    rows = tree.stack([record(n) for n in range(3)])
    assert rows.x.shape == (3, 2)
    assert all(same(tree.row(rows, n), record(n)) for n in range(3))


def test_rows_picks_in_the_order_asked_for_and_copies() -> None:
    whole = tree.stack([record(n) for n in range(4)])
    some = tree.rows(whole, torch.tensor([2, 0]))
    assert same(tree.row(some, 0), record(2))
    some.x.zero_()
    assert same(tree.row(whole, 2), record(2))


def test_put_rows_writes_by_id() -> None:
    whole = tree.stack([record(n) for n in range(4)])
    tree.put_rows(whole, torch.tensor([3, 1]), tree.stack([record(30), record(10)]))
    assert [float(x) for x in whole.x[:, 0]] == [0, 10, 2, 30]


def test_concatenate_joins_trees_of_rows() -> None:
    parts = [tree.stack([record(0), record(1)]), tree.stack([record(2)])]
    assert same(tree.concatenate(parts), tree.stack([record(n) for n in range(3)]))
    assert tree.concatenate(parts[:1]) is parts[0]


def test_repeat_gives_everybody_the_same() -> None:
    assert same(tree.row(tree.repeat(record(), 5), 4), record())


def test_a_sum_leaves_no_trace_of_the_order_and_keeps_the_dtypes() -> None:
    def part(number: float) -> tuple[torch.Tensor, torch.Tensor, tree.Gathered]:
        return torch.tensor([number]), torch.tensor(number != 1), tree.Gathered((torch.tensor([number]),))

    for order in ([1e8, 1.0, -1e8], [1.0, 1e8, -1e8], [-1e8, 1e8, 1.0]):  # in single precision 1e8 + 1 is 1e8
        number, flag, rows = tree.summed(map(part, order))
        assert (number.item(), number.dtype) == (1.0, torch.float32)
        assert (flag.item(), flag.dtype) == (True, torch.bool)
        assert tree.leaves(rows)[0].tolist() == order  # put side by side, in its own dtype
        assert tree.leaves(rows)[0].dtype == torch.float32
    assert tree.summed([part(3.0)])[0].item() == 3.0


def test_placed_rows_add_up_to_a_table() -> None:
    pairs = [(torch.tensor([1.0, 2.0]), torch.tensor(3.0)), (torch.tensor([4.0, 5.0]), torch.tensor(6.0))]
    table = tree.add(*(tree.placed(pair, torch.tensor(n), 3) for n, pair in zip((2, 0), pairs, strict=True)))
    assert table[0].tolist() == [[4, 5], [0, 0], [1, 2]]
    assert table[1].tolist() == [6, 0, 3]


def test_total_is_the_sum_of_the_rows() -> None:
    pairs = [(torch.tensor([1.0, 2.0]), torch.tensor(3.0)), (torch.tensor([10.0, 20.0]), torch.tensor(30.0))]
    assert same(tree.total(tree.stack(pairs)), tree.add(*pairs))
    assert same(tree.add(*pairs), (torch.tensor([11.0, 22.0]), torch.tensor(33.0)))


def test_trees_of_different_shape_do_not_mix() -> None:
    with pytest.raises(ValueError, match="shorter"):
        tree.add((torch.ones(1), torch.ones(1)), (torch.ones(1),))


@pytest.mark.parametrize("bad", [[torch.ones(1)], 3, "w"])
def test_a_record_holds_only_tensors_tuples_and_dicts(bad: object) -> None:
    with pytest.raises(TypeError, match=f"not {type(bad).__name__}"):
        tree.each(torch.neg, bad)
    with pytest.raises(TypeError, match=f"not {type(bad).__name__}"):
        tree.leaves(bad)


def test_finite_checks_every_number() -> None:
    assert tree.finite({"a": torch.zeros(3), "b": (torch.ones(2), torch.tensor(7)), "c": ()})
    assert not tree.finite({"a": torch.zeros(3), "b": (torch.tensor([1.0, torch.nan]),)})
    assert not tree.finite(torch.tensor([torch.inf]))


def test_gathered_parts_are_concatenated() -> None:
    one, two = ((torch.tensor(n), tree.Gathered((torch.tensor([n]),))) for n in (1, 2))
    assert [t.tolist() for t in tree.leaves(tree.add(one, two))] == [3, [1, 2]]
    rows = {"sum": torch.tensor([1, 2]), "rows": tree.Gathered((torch.tensor([[1], [2]]),))}
    assert [t.tolist() for t in tree.leaves(tree.total(rows))] == [3, [1, 2]]


def test_finite_answers_on_the_device_of_the_tree() -> None:
    """The meta device stands for a GPU; tensors of two devices cannot be stacked."""
    assert tree.finite({"x": torch.ones(2, device="meta")}).device.type == "meta"
    assert bool(tree.finite({"x": torch.ones(2), "n": torch.tensor(3)}))
    assert not tree.finite({"x": torch.tensor([1.0, torch.inf])})
    assert bool(tree.finite({}))
