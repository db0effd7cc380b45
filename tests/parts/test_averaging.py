"""The personal and the shared entries of w: cut, combined, and layer by layer."""

from __future__ import annotations

import dataclasses
from inspect import signature

import pytest
import torch

from copfl.algorithms import ALGORITHMS, FedAvg
from copfl.core import Sgd, UsageError
from copfl.core.task import task_of
from copfl.parts.averaging import active_part, combined, layers, personal_of, shared_of, with_shared
from copfl.testing import small_federation
from tests.core.test_task import network
from tests.toys import federation_of, rounds_of, slopes


def test_personal_and_shared_entries_combine_to_the_vector() -> None:
    task = task_of(network(), 4, dtype=torch.float64)
    w = torch.arange(float(task.layout.size), dtype=torch.float64)
    for parts in ((), ("head",), ("norms",), ("body",), ("0.bias", "head"), ("head", "body", "buffers")):
        personal, shared = personal_of(task, parts, w), shared_of(task, parts, w)
        local = task.local(*parts)
        assert personal.tolist() == w[local].tolist()
        assert shared.tolist() == w[~local].tolist()
        assert torch.equal(combined(task, parts, personal, shared), w)
        assert torch.equal(with_shared(task, parts, w, -shared), torch.where(local, w, -w))


def test_the_active_mask_of_one_part() -> None:
    task = task_of(network(), 4)
    assert active_part(task, "all") is None
    head = active_part(task, "head")
    assert head is not None
    assert head.tolist() == task.where("head")[: task.d].tolist()


def test_the_mean_weighs_by_samples_or_equally() -> None:
    """From 0 client 0 ends in (1, 0) with one sample, client 1 in (0, 2) with three."""
    federation = federation_of(([[2.0, 0.0]], [1]), ([[0.0, 4.0]] * 3, [1, 1, 1]))
    for weights, mean, shares in (("samples", [0.25, 1.5], [0.25, 0.75]), ("equal", [0.5, 1.0], [0.5, 0.5])):
        algorithm = FedAvg(Sgd(1.0, 0.0, 0.0), weights=weights)
        state, shown = rounds_of(algorithm, slopes(0.0, 0.0), federation, 1)
        assert state.server.w.tolist() == pytest.approx(mean, abs=1e-15)
        assert shown[0].clients["weight"].tolist() == shares


@pytest.mark.parametrize("name", ["apfl", "fedbn", "fedpac", "perfedavg"])
def test_equal_weights_are_those_of_clients_of_one_size(name: str) -> None:
    (task, unequal), (_, equal) = small_federation("batch", (5, 9)), small_federation("batch", (6, 6))
    for federation, same in ((unequal, False), (equal, True)):
        by_samples, equally = (
            rounds_of(ALGORITHMS[name](weights=weights), task, federation, 2, batch=4)[0].server.w
            for weights in ("samples", "equal")
        )
        assert torch.allclose(by_samples, equally, rtol=1e-9, atol=1e-12) is same


def test_weights_are_an_option_only_where_there_is_a_mean_of_them() -> None:
    without = {
        name for name, algorithm in ALGORITHMS.items() if "weights" not in signature(algorithm).parameters
    }
    assert without == {
        "copfl",
        "fedcalm",
        "fedce",
        "fedselect",
        "ktpfl",
        "levels",
        "local",
        "trees",
        "wide_levels",
    }
    with pytest.raises(UsageError, match='no weights "size"'):
        FedAvg(weights="size")


@pytest.mark.parametrize("personal", [(), ("head",), ("norms",)])
@pytest.mark.parametrize("buffers", ["local", "average"])
def test_layers_cover_what_is_shared(personal: tuple[str, ...], buffers: str) -> None:
    task = dataclasses.replace(small_federation("batch", (4, 4))[0], buffers=buffers)
    spans = layers(task, personal)
    assert [start for start, *_ in spans] == [0, *(stop for _, stop, _ in spans[:-1])]
    assert spans[-1][1] == int((~task.local(*personal)).sum())
    assert all(trained for *_, trained in spans) is (buffers == "local")
