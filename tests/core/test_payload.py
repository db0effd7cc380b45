from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from copfl.algorithms import ALGORITHMS
from copfl.core import tree
from copfl.core.algorithm import blank_samples, example_output, traits
from copfl.core.payload import (
    SMALL,
    WEIGHT_FIELDS,
    mask_bytes,
    nbytes,
    update_of,
    with_reported_weight,
    with_update,
)
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
    with pytest.raises(UsageError, match="back answers"):
        update_of(Down(torch.zeros(1)), type("Upload", (), {"_fields": ("answers",)})())


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_keeps_the_conventions(name: str) -> None:
    """All but ktpfl, trees and the levels, which send answers and sums instead of weights, and ifca, whose clients
    receive several models; and no field is a claim by name alone."""
    algorithm = ALGORITHMS[name]()
    task, _ = small_federation("none", (4,), needs=traits(algorithm).needs, trains=traits(algorithm).trains)
    upload = example_output(algorithm, task, blank_samples(task, (1, 8, 8))).upload
    down = algorithm.downlink(algorithm.server_init(task, 1), torch.tensor([0]))
    if name == "ktpfl":
        assert upload._fields == ("answers",)
        return
    row = tree.row(down, 0)
    others = {
        "ifca": "have models, common, members",
        "levels": "have coefficients, log_ratio and back sums",
        "trees": "have grown and back sums",
        "wide_levels": "have coefficients, log_variance and back sums",
    }
    if name in others:
        with pytest.raises(UsageError, match=f"for the one model that it received.*{others[name]}"):
            update_of(row, upload)
        return
    found = update_of(row, upload)
    assert found.received.shape == found.sent.shape
    assert sum(field in WEIGHT_FIELDS for field in upload._fields) == (0 if name == "fedselect" else 1)


def test_bytes_on_the_wire_by_hand() -> None:
    many = SMALL + 1
    assert nbytes(torch.zeros(10)) == 40
    assert nbytes(torch.zeros(many)) == 4 * many
    assert (
        nbytes(torch.zeros(many, dtype=torch.float64)) == 4 * many
    )  # many numbers are sent with four bytes each
    assert nbytes(torch.zeros(many), float_bytes=2) == 2 * many
    assert nbytes(torch.zeros(10), float_bytes=2) == 40  # a few are sent as they are
    assert nbytes(torch.zeros(10, dtype=torch.bool)) == 2  # bits
    assert nbytes(torch.zeros(3, dtype=torch.int64)) == 24
    assert nbytes({"a": torch.zeros(1), "b": (None, torch.zeros(2))}) == 12
    assert nbytes(()) == 0
    # 9 entries, 4 of them personal: 5 floats and 9 bits.
    assert nbytes(Masked(torch.zeros(9), torch.arange(9) < 4)) == 5 * 4 + 2
    assert nbytes((Masked(torch.zeros(9), torch.arange(9) < 4), torch.tensor(1.0))) == 26


def test_bytes_differ_from_client_to_client_under_vmap() -> None:
    masks = torch.tensor([[True, False, False], [True, True, True]])
    sizes: Any = torch.func.vmap(lambda mask: nbytes(Masked(torch.zeros(3), mask)))(masks)
    assert sizes.tolist() == [9, 1]


def test_a_mask_is_sent_as_its_changes() -> None:
    """By hand: of 1600 entries, 100 in each segment; ten new ones in every hundred are 0.469 bits an entry."""
    old = torch.zeros(1600, dtype=torch.bool)
    new = torch.arange(1600) % 10 == 0
    upload = {"shared": Masked(torch.zeros(1600), new)}
    whole, sent = mask_bytes(upload, {"mask": old}, {"mask": new})
    assert whole == 200
    assert float(sent) == 94  # 1600 / 8 * 0.469, and no half bytes
    assert mask_bytes(upload, {"mask": new}, {"mask": new})[1] == 0
    assert mask_bytes(upload)[1] == sent  # in no record: changed from nothing
    assert mask_bytes({"w": torch.zeros(3)}) == (0, 0.0)
