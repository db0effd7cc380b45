from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

from copfl.core.layout import Layout, layout_of, runs
from copfl.errors import UsageError


class Net(nn.Module):
    """3 -> 2 with a norm between: 6 + 2 + 2 + 2 + 4 + 2 parameters and 2 + 2 statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.last = nn.Linear(2, 2)


def layout(head: str | None = None) -> Layout:
    return layout_of(Net(), head, norms=["norm"])


def test_parameters_come_first_then_the_statistics_without_the_counter() -> None:
    names = layout().names
    assert names[:6] == ("first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight", "last.bias")
    assert names[6:] == ("norm.running_mean", "norm.running_var")  # num_batches_tracked stays out
    assert (layout().trained, layout().parameters, layout().size) == (6, 18, 22)
    assert sum(layout().sizes) == layout().size


def test_split_and_join_undo_each_other() -> None:
    w, it = torch.arange(22.0), layout()
    tensors = {**it.split(w[:18]), **it.split(w[18:], buffers=True)}
    assert tensors["first.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["norm.running_var"].tolist() == [20, 21]
    assert torch.equal(it.join(tensors), w)


@pytest.mark.parametrize("head", ["first", "norm", "last"])
def test_the_head_comes_out_and_goes_in_wherever_it_is(head: str) -> None:
    w, it = torch.arange(22.0), layout(head)
    own = it.entries(w, "head")
    assert own.tolist() == w[it.where("head")].tolist()
    assert torch.equal(it.with_entries(w, "head", -own), torch.where(it.where("head"), -w, w))
    tensors = it.split_head(own)
    assert list(tensors) == [f"{head}.weight", f"{head}.bias"]
    assert all(torch.equal(t, it.split(w[:18])[name]) for name, t in tensors.items())


@pytest.mark.parametrize(
    "parts", [("head",), ("buffers",), ("first.bias", "norms"), ("head", "body", "buffers")]
)
def test_entries_and_runs_of_a_part(parts: tuple[str, ...]) -> None:
    w, it = torch.arange(22.0), layout()
    assert it.entries(w, *parts).tolist() == w[it.where(*parts)].tolist()
    found = runs(it, parts)
    assert [inside for length, inside in found for _ in range(length)] == it.where(*parts).tolist()
    assert all(one[1] is not other[1] for one, other in pairwise(found))


def test_split_of_a_model_without_statistics_is_empty() -> None:
    plain = layout_of(nn.Linear(2, 2), head="")
    assert plain.split(torch.zeros(0), buffers=True) == {}


def places(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def test_where_by_hand() -> None:
    it = layout()
    assert places(it.where("head")) == [12, 13, 14, 15, 16, 17]
    assert places(it.where("norms")) == [8, 9, 10, 11]
    assert places(it.where("buffers")) == [18, 19, 20, 21]
    assert places(it.where("body")) == list(range(12))
    assert places(it.where("first.bias")) == [6, 7]
    assert places(it.where("first", "norms")) == list(range(12))
    assert places(it.where()) == []


def test_head_body_and_buffers_make_the_whole() -> None:
    it = layout()
    parts = [it.where(part) for part in ("head", "body", "buffers")]
    assert torch.stack(parts).sum(0).eq(1).all()


def test_a_name_matches_whole_components_alone() -> None:
    with pytest.raises(
        UsageError,
        match=r'no part "fir" in the trained part of the model. Known: head, body, norms, buffers, first, last, norm',
    ):
        layout().where("fir")


def test_the_head_is_the_last_linear_unless_there_is_a_head_or_it_is_named() -> None:
    assert layout().head == "last"
    assert layout("first").head == "first"
    with_head = nn.ModuleDict({"head": nn.Conv2d(1, 1, 1), "last": nn.Linear(1, 1)})
    assert layout_of(with_head).head == "head"
    deep = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.ReLU(), nn.Linear(1, 1)))
    assert layout_of(deep).head == "1.1"


def test_a_head_that_is_not_there_is_named_with_what_is() -> None:
    with pytest.raises(
        UsageError, match=r'no module "classifier" to be its head; its Linear layers are: first, last'
    ):
        layout("classifier")


def test_a_model_without_a_linear_needs_a_named_head() -> None:
    convolutions = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1))
    with pytest.raises(UsageError, match="no Linear layer to be its head; name one of its modules"):
        layout_of(convolutions)
    assert places(layout_of(convolutions, head="1").where("head")) == [4, 5, 6, 7, 8, 9]


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="the model has no parameter to train"):
        layout_of(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize(
    "hide",
    [
        lambda layer: [layer],
        lambda layer: (layer,),
        lambda layer: {"a": layer},
        lambda layer: [layer.weight],
    ],
)
def test_parameters_that_torch_does_not_see_are_refused(hide: Callable[[nn.Linear], object]) -> None:
    net = Net()
    net.first.hidden = hide(nn.Linear(2, 2))  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r'"first\.hidden".*nn\.ModuleList'):
        layout_of(net)
    net.first.hidden = hide(net.last)  # type: ignore[assignment]  # a second reference is none of these
    assert layout_of(net).parameters == 18
