"""`elementwise` is the function itself, alone and under vmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from copfl.kernels import fused as room
from copfl.kernels import private_torch
from copfl.kernels.fused import either, elementwise, mostly
from copfl.kernels.private_torch import gradient


def line(x: Tensor, slope: Tensor, other: Tensor | None, shift: float) -> tuple[Tensor, Tensor]:
    return slope * x + shift, x if other is None else x + other


def test_alone_it_is_the_function() -> None:
    x = torch.tensor([1.0, 2.0])
    first, second = elementwise(line, x, torch.tensor(3.0), None, 1.0)
    assert first.tolist() == [4.0, 7.0]
    assert second.tolist() == [1.0, 2.0]


def test_the_gradient_is_that_of_torch_func() -> None:
    x, y, scale = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3)

    def loss(scale: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return scale * (x * x).sum(), 2 * x

    def own(scale: Tensor, x: Tensor, y: Tensor) -> Any:
        return gradient(lambda x, y: loss(scale, x, y), x, y)

    def torchs(scale: Tensor, x: Tensor, y: Tensor) -> Any:
        return torch.func.grad_and_value(loss, argnums=(1, 2), has_aux=True)(scale, x, y)

    found, wanted = (torch.func.vmap(f)(scale, x, y) for f in (own, torchs))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not found[0][1].any()  # the loss does not depend on it


def test_own_where_the_mask_is() -> None:
    mask = torch.tensor([True, False, False])
    assert either(mask, torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])).tolist() == [1, 5, 6]


def test_under_vmap_a_scalar_per_client_meets_its_own_row() -> None:
    x, slope = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([10.0, 100.0])
    mapped = torch.func.vmap(lambda a, b: elementwise(line, a, b, None, 1.0))
    first, second = mapped(x, slope)
    assert first.tolist() == [[11.0, 21.0, 31.0], [401.0, 501.0, 601.0]]
    assert second.tolist() == x.tolist()


@room.over_rows
def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows."""
    assert x.shape == y.shape
    assert not private_torch.mapped()
    return 2 * x + y, x * y


def test_a_function_of_rows_is_called_once_for_all_in_any_axis() -> None:
    x, y, calls = torch.randn(4, 3), torch.randn(3, 4), list[torch.Size]()

    @room.over_rows
    def product(x: Tensor, y: Tensor) -> Tensor:
        calls.append(x.shape)
        return x * y

    found = torch.func.vmap(product, in_dims=(0, 1), out_dims=1)(x, y)
    assert torch.equal(found, (x * y.T).T)
    assert calls == [(4, 3)]
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.func.vmap(product)(x, torch.randn(4, 2))
    assert not private_torch.mapped()  # also after an error inside


def test_a_function_of_rows_where_only_the_outer_of_two_maps_has_an_axis() -> None:
    x, y = torch.randn(2, 5), torch.randn(2, 5)

    def outer(x: Tensor, y: Tensor) -> Any:
        return torch.func.vmap(lambda _: both(x, y))(torch.zeros(3))

    first, second = torch.func.vmap(outer)(x, y)
    assert first.shape == (2, 3, 5)
    assert torch.equal(first, (2 * x + y)[:, None].expand(2, 3, 5))
    assert torch.equal(second[:, 1], x * y)


def test_an_argument_without_client_axis_is_the_same_for_all() -> None:
    x, common = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 20.0])
    mapped = torch.func.vmap(lambda a: elementwise(line, a, torch.tensor(1.0), common, 0.0)[1])
    assert mapped(x).tolist() == [[11.0, 22.0], [13.0, 24.0]]


@pytest.mark.parametrize("kernel", [False, True])
def test_the_old_vector_stays_where_the_new_one_is_not_wanted(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel:  # the plumbing around the kernel, without the kernel
        monkeypatch.setattr(room, "compiles", lambda tensor: True)
        monkeypatch.setattr(room, "LONG", 1)
        pytest.importorskip("triton")
        from copfl.kernels.triton import vectors

        monkeypatch.setattr(vectors, "put_back", lambda keep, new, old: torch.where(keep[:, None], new, old))
    new, old = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    some, all = torch.tensor([True, False]), torch.tensor([True, True])
    assert mostly(some[0], new[0], old[0]).tolist() == [1.0, 2.0]
    assert mostly(some[1], new[0], old[0]).tolist() == [5.0, 6.0]
    assert torch.func.vmap(mostly)(some, new, old).tolist() == [[1.0, 2.0], [7.0, 8.0]]
    assert torch.func.vmap(mostly)(all, new, old).tolist() == new.tolist()
    same_for_all = torch.func.vmap(mostly, in_dims=(0, 0, None))(some, new, old[0])
    assert same_for_all.tolist() == [[1.0, 2.0], [5.0, 6.0]]


def test_it_can_be_mapped_twice() -> None:
    """As by an algorithm that trains several models of each client under a vmap of its own."""
    keep = torch.tensor([[True, False], [False, True]])
    new, old = torch.ones(2, 2, 3), torch.zeros(2, 2, 3)
    found = torch.func.vmap(torch.func.vmap(mostly))(keep, new, old)
    assert torch.equal(found, keep[:, :, None].float().expand(2, 2, 3))
