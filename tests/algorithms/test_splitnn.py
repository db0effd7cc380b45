"""Split learning: one gradient from two sides, halves at their places, and what crosses the cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from copfl.algorithms import LGFedAvg, Local, SplitNN
from copfl.algorithms.splitnn import client_parameters
from copfl.core import Adam, Optimizer, Sgd, UsageError, task_of
from copfl.models import MLP
from copfl.testing import SIZES, small_federation
from tests.algorithms.updates import clients_of, three_rounds
from tests.toys import rounds_of


def test_two_sides_make_the_gradient_of_the_whole_model() -> None:
    """The client sends its output, the server sends back the gradient there: what `SplitNN` computes in one piece."""
    torch.manual_seed(0)
    model, x, y = MLP((3,), 4, width=5).double(), torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 4
    up = model.features(x)  # the client
    received = up.detach().requires_grad_()
    server = [received, *model.head.parameters()]
    back, *head = torch.autograd.grad(F.cross_entropy(model.head(received), y), server)  # the server
    body = torch.autograd.grad(up, list(model.body.parameters()), back)  # the client again
    grads = [grad.flatten() for grad in (*body, *head)]
    task = task_of(model, 4, dtype=torch.float64)
    whole, _, _ = task.gradient(task.initial, task.initial[task.d :], x, y)
    torch.testing.assert_close(torch.cat(grads), whole)


@pytest.mark.parametrize("optimizer", [Sgd(), Adam(keep=True)])
def test_with_the_cut_at_the_end_it_is_local_training(optimizer: Optimizer) -> None:
    task, federation = small_federation("batch", SIZES)
    cut, shown = rounds_of(SplitNN(optimizer, cut="head"), task, federation, 3, batch=4)
    alone, _ = rounds_of(Local(optimizer), task, federation, 3, batch=4)
    assert cut.server.w.numel() == 0
    assert torch.equal(clients_of(cut).personal, clients_of(alone).personal)
    assert not shown[0].clients["bytes_up"].any()
    assert not shown[0].clients["bytes_down"].any()


def test_before_the_head_its_weights_are_those_of_lg_fedavg() -> None:
    task, federation = small_federation("batch", SIZES)
    cut, shown = rounds_of(SplitNN(), task, federation, 3, batch=4)
    mean, others = rounds_of(LGFedAvg(), task, federation, 3, batch=4)
    assert torch.equal(cut.server.w, mean.server.w)
    assert torch.equal(clients_of(cut).personal, clients_of(mean).personal)
    assert (shown[0].clients["bytes_up"] != others[0].clients["bytes_up"]).all()


@pytest.mark.parametrize(
    ("cut", "width"), [("", 5), ("body", 5), ("body.3", 2 * 4 * 4), ("body.0", 2 * 8 * 8)]
)
def test_bytes_are_those_that_cross_the_cut(cut: str, width: int) -> None:
    """In each of two epochs, 4 bytes a number there and back, and 8 for the label."""
    _, _, shown = three_rounds(SplitNN(epochs=2, cut=cut))
    sizes = torch.tensor(SIZES)
    assert shown[0].clients["bytes_up"].tolist() == (2 * sizes * (4 * width + 8)).tolist()
    assert shown[0].clients["bytes_down"].tolist() == (2 * sizes * 4 * width).tolist()


@pytest.mark.parametrize(
    ("cut", "names"),
    [
        ("body.0", ["body.0.weight"]),
        ("body.3", ["body.0.weight", "body.1.weight", "body.1.bias"]),
        ("head", None),
    ],
)
def test_the_client_holds_what_comes_up_to_the_cut(cut: str, names: list[str] | None) -> None:
    task, _ = small_federation("batch", SIZES)
    expected = task.layout.names[: task.layout.trained] if names is None else tuple(names)
    assert client_parameters(task, cut) == expected
    assert set(client_parameters(task, "")) == {
        name for name in task.layout.names[: task.layout.trained] if "head" not in name
    }


def test_an_unknown_cut_is_refused() -> None:
    task: Any = small_federation("none", SIZES)[0]
    with pytest.raises(UsageError, match="no module"):
        SplitNN(cut="bodi").server_init(task, 2)
