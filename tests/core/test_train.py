from __future__ import annotations

from typing import Any

import pytest
import torch

from copfl.core import optim, tree
from copfl.core.optim import Adam, Optimizer, Sgd
from copfl.core.task import Batch, Data
from copfl.core.train import Trained, descend, train
from tests.core.test_optim import OPTIMIZERS, close
from tests.core.test_task import network, samples, toy
from tests.toys import slopes


def batches(*parts: list[int], valid: list[list[bool]] | None = None) -> tuple[Batch, ...]:
    fingerprints = [None] * len(parts) if valid is None else [torch.tensor(mark) for mark in valid]
    return tuple(
        Batch(torch.tensor(p), mark, None, None) for p, mark in zip(parts, fingerprints, strict=True)
    )


def test_descend_equals_a_plain_torch_loop() -> None:
    made, model = toy(), network().double()
    x, y = samples(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, weight_decay=5e-4)
    losses = []
    for part in ([0, 1, 2], [3, 4, 5, 6]):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[part]), y[part])
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    start, mine = made.initial.clone(), Sgd(0.05)
    data = Data(x, y, torch.tensor(7))
    with torch.no_grad():
        after = descend(made, mine, start, mine.init(start[: made.d]), data, batches([0, 1, 2], [3, 4, 5, 6]))
    statistics = [b for name, b in model.named_buffers() if not name.endswith("tracked")]
    close(after.w, torch.cat([t.detach().flatten() for t in (*model.parameters(), *statistics)]))
    assert after.loss.item() == pytest.approx(sum(losses) / 2)
    assert torch.equal(start, made.initial)


def test_steps_in_place_equal_steps_in_new_tensors_and_spare_what_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, adam = toy(), Adam(0.05)
    data = Data(*samples(6), torch.tensor(6))
    parts = batches([0, 1], [2, 3], [4, 5])
    monkeypatch.setattr(optim, "LONG", 1)
    given = made.initial.clone(), adam.init(made.initial[: made.d])
    with torch.no_grad():
        whole = descend(made, adam, *given, data, parts)
        single = Trained(*given, whole.loss)
        for part in parts:  # the first step of a call is never in place
            single = descend(made, adam, single.w, single.state, data, (part,))
    assert torch.equal(whole.w, single.w)
    assert all(map(torch.equal, tree.leaves(whole.state), tree.leaves(single.state)))
    assert torch.equal(given[0], made.initial)
    assert not any(t.any() for t in tree.leaves(given[1]))


@pytest.mark.parametrize("valid", [None, [[True, True], [True, False], [False, False]]])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_last_step_whose_state_nobody_needs_gives_the_same_weights(
    optimizer: Optimizer, valid: list[list[bool]] | None
) -> None:
    made, data = toy(), Data(*samples(6), torch.tensor(6))
    epochs = (batches([0, 1], [2, 3], [4, 5], valid=valid),) * 2
    given = made.initial, optimizer.init(made.initial[: made.d])

    def trained(ends: bool) -> torch.Tensor:
        with torch.no_grad():
            found = tree.vectorised(
                lambda w: tuple(train(made, optimizer, w, given[1], data, epochs, ends)[::2]), given[0][None]
            )
        return torch.cat([t.flatten() for t in found])

    assert torch.equal(trained(True), trained(False))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_filled_up_plan_equals_the_plan_without_filling(optimizer: Optimizer) -> None:
    made = toy()
    x, y = samples(5)
    data = Data(x, y, torch.tensor(3))
    init = optimizer.init(made.initial[: made.d])
    plain = descend(made, optimizer, made.initial, init, data, batches([2, 0], [1]))
    filled = batches(
        [2, 0], [1, 0], [0, 0], valid=[[True, True], [True, False], [False, False]]
    )  # the last step holds nobody: it changes neither weights, statistics nor moments
    padded = descend(made, optimizer, made.initial, init, data, filled)
    for found, expected in zip(tree.leaves(padded), tree.leaves(plain), strict=True):
        # Adam makes steps of the rounding on a coordinate without gradient (a bias before a batch norm),
        # hence 1e-9.
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_descend_of_nothing_is_where_it_started() -> None:
    made = toy()
    x, y = samples(2)
    data = Data(x, y, torch.tensor(2))
    found = descend(made, Adam(), made.initial, Adam().init(made.initial[: made.d]), data, ())
    assert torch.equal(found.w, made.initial)
    assert found.loss == 0


def test_adjust_and_objective_change_the_gradient() -> None:
    # Slopes at 0 with one sample x = (2, -1), y = 1: the gradient is -x / 2 = (-1, .5).
    made = slopes(0.0, 0.0)
    data = Data(torch.tensor([[2.0, -1.0]], dtype=torch.float64), torch.tensor([1]), torch.tensor(1))
    sgd = Sgd(1.0, 0.0, 0.0)

    def go(**how: Any) -> list[float]:
        found: list[float] = descend(
            made, sgd, made.initial, sgd.init(made.initial), data, batches([0]), **how
        ).w.tolist()
        return found

    assert go() == [1.0, -0.5]
    assert go(adjust=lambda w, grad: grad + 1) == [0.0, -1.5]
    assert go(objective=lambda logits, features, labels, valid: 3 * logits[:, 1].sum()) == [-6.0, 3.0]
    assert go(active=torch.tensor([False, True])) == [0.0, -0.5]


def test_train_goes_through_the_passes_and_averages_their_losses() -> None:
    made = toy()
    x, y = samples(4)
    data, optimizer = Data(x, y, torch.tensor(4)), Sgd()
    init = optimizer.init(made.initial[: made.d])
    one = descend(made, optimizer, made.initial, init, data, batches([0, 1], [2, 3]))
    two = descend(made, optimizer, one.w, one.state, data, batches([3, 1], [0, 2]))
    both = train(
        made, optimizer, made.initial, init, data, (batches([0, 1], [2, 3]), batches([3, 1], [0, 2]))
    )
    assert isinstance(both, Trained)
    assert torch.equal(both.w, two.w)
    close(both.loss, (one.loss + two.loss) / 2)
    assert train(made, optimizer, made.initial, init, data, ()).loss == 0
