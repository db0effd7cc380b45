from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from copfl.algorithms import ALGORITHMS
from copfl.core.payload import WEIGHT_FIELDS, example, update_of, with_reported_weight, with_update
from copfl.core.tree import Masked
from copfl.errors import UsageError
from copfl.testing import small_federation


class Down(NamedTuple):
    w: Tensor


class Around(NamedTuple):
    down: Any


class Plain(NamedTuple):
    w: Tensor
    size: Tensor


class Partly(NamedTuple):
    shared: Masked
    score: Tensor


def test_a_plain_upload_says_its_weights_and_its_size() -> None:
    found = update_of(
        Around(Around(Down(torch.tensor([1.0, 2.0])))), Plain(torch.tensor([4.0, 6.0]), torch.tensor(5.0))
    )
    assert found.change.tolist() == [3, 4]
    assert found.reported_weight is not None
    assert found.reported_weight.item() == 5
    again = with_update(Plain(torch.zeros(2), torch.zeros(())), found)
    assert (again.w.tolist(), again.size.item()) == ([4, 6], 5)


def test_what_is_personal_has_no_part_in_it() -> None:
    personal = torch.tensor([True, False])
    upload = Partly(Masked(torch.tensor([0.0, 6.0]), personal), torch.tensor(2.0))
    found = update_of(Down(torch.tensor([9.0, 2.0])), upload)
    assert found.change.tolist() == [0, 4]
    again = with_update(upload, found._replace(sent=torch.tensor([7.0, 8.0])))
    assert again.shared.values.tolist() == [0, 8]
    assert (
        again.shared.personal is personal
    )  # the very tensor: the bytes of an unchanged mask are counted by it


def test_a_record_without_a_claim_stays_as_it_is() -> None:
    assert with_reported_weight(Down(torch.zeros(1)), torch.ones(())) == Down(torch.zeros(1))


def test_messages_without_weights_are_refused() -> None:
    with pytest.raises(UsageError, match="hold answers"):
        update_of(Down(torch.zeros(1)), type("Upload", (), {"_fields": ("answers",)})())


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_keeps_the_conventions(name: str) -> None:
    """All but ktpfl, which sends answers instead of weights; and no field is a claim by name alone."""
    algorithm = ALGORITHMS[name]()
    task, _ = small_federation("none", (4,))
    upload = example(algorithm, task, (1, 8, 8), augment=False)
    down = algorithm.downlink(algorithm.server_init(task, 1), torch.tensor([0]))
    if name == "ktpfl":
        assert upload._fields == ("answers",)
        return
    row = type(down)(*(None if field is None else field[0] for field in down))
    found = update_of(row, upload)
    assert found.received.shape == found.sent.shape
    assert sum(field in WEIGHT_FIELDS for field in upload._fields) == (0 if name == "fedselect" else 1)
