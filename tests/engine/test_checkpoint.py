"""A state in one file: all of it or nothing, and what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from copfl.engine import checkpoint
from copfl.errors import RunError


class Record(NamedTuple):
    w: Tensor
    mask: Tensor
    steps: Tensor
    moments: tuple[Tensor, ...]


def record() -> Record:
    generator = torch.Generator().manual_seed(0)
    return Record(
        torch.randn(3, 5, generator=generator, dtype=torch.float64),
        torch.rand(3, 5, generator=generator) > 0.5,
        torch.tensor(7),
        (torch.full((3, 2), float("nan")), torch.zeros(0)),
    )


def bits(tree: Any) -> list[tuple[torch.dtype, tuple[int, ...], bytes]]:
    from copfl.core.tree import leaves

    return [(t.dtype, tuple(t.shape), t.contiguous().numpy().tobytes()) for t in leaves(tree)]


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.safetensors"
    checkpoint.save(path, {"server": record().w, "clients": record()}, {"round": 4, "settings": "abc"})
    trees, about = checkpoint.load(path, {"server": record().w * 0, "clients": record()})
    assert about == {"round": 4, "settings": "abc"}
    assert isinstance(trees["clients"], Record)
    assert bits(trees["clients"]) == bits(record())
    assert bits(trees["server"]) == bits(record().w)
    assert [p.name for p in path.parent.iterdir()] == ["state.safetensors"]


def test_the_same_state_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        checkpoint.save(tmp_path / name, {"clients": record()}, {"round": 4, "b": 1, "a": 2})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_it_is_about_may_look_like_a_checksum_that_is_not_known_yet(tmp_path: Path) -> None:
    about = {"settings": f'"{checkpoint.UNKNOWN}"]', checkpoint.UNKNOWN: checkpoint.UNKNOWN}
    checkpoint.save(tmp_path / "state", {"clients": record(), checkpoint.UNKNOWN: record().w}, about)
    tensors, found = checkpoint.read(tmp_path / "state")
    assert found == about
    assert bits(tensors[f"{checkpoint.UNKNOWN}:"]) == bits(record().w)


def test_a_tree_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    checkpoint.save(path, {"clients": record()}, {})
    with pytest.raises(
        RunError,
        match=r"is not a checkpoint of this run: in clients, its w is torch.float64 \[3, 5\]; expected",
    ):
        checkpoint.load(path, {"clients": record()._replace(w=torch.zeros(3, 6))})
    with pytest.raises(
        RunError, match=r"not a checkpoint of this run: in clients, it has moments\.1, which is not"
    ):
        checkpoint.load(path, {"clients": record()._replace(moments=(torch.zeros(3, 2),))})
    with pytest.raises(RunError, match=r"in server, it lacks w"):
        checkpoint.load(path, {"server": {"w": torch.zeros(3)}})


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    checkpoint.save(path, {"clients": record()}, {"round": 4})
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x11]) + whole[place + 1 :])
        with pytest.raises(RunError, match=r"damaged|not a checkpoint of this run"):
            checkpoint.load(path, {"clients": record()})
    for size in range(0, len(whole), 31):
        path.write_bytes(whole[:size])
        with pytest.raises(RunError, match=r"is damaged .*; restore it from a copy, or start the run again"):
            checkpoint.read(path)
    with pytest.raises(RunError, match="there is no checkpoint at"):
        checkpoint.read(tmp_path / "gone")
