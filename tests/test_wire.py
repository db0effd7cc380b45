"""The codec: what goes in comes out, personal values never go in, and whatever is not as expected is refused."""

from __future__ import annotations

import json
import sys
import tracemalloc
import zlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from copfl import models, wire
from copfl.algorithms import ALGORITHMS
from copfl.core import payload, tree
from copfl.core.algorithm import traits
from copfl.core.batches import plan
from copfl.core.layout import layout_of
from copfl.core.tree import Masked
from copfl.errors import UsageError, WireError
from copfl.testing import small_federation
from copfl.wire import Head, Packet, decode, encode
from tests.texts import CHARACTERS

HEAD = Head("upload", "run", "model", 3, 1)


class Record(NamedTuple):
    shared: Masked
    score: Tensor
    flags: Tensor
    counts: Tensor
    nothing: Any


def record(size: int = 1000, seed: int = 0) -> Record:
    generator = torch.Generator().manual_seed(seed)
    w, personal = torch.randn(size, generator=generator), torch.rand(size, generator=generator) < 0.5
    return Record(
        Masked(torch.where(personal, 0, w), personal),
        torch.tensor(1.5),
        torch.rand(13, generator=generator) < 0.5,
        torch.tensor([1, 2**40]),
        (),
    )


def same(a: object, b: object) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.parametrize("name", ["exact", "fp32"])
def test_what_goes_in_comes_out(name: str) -> None:
    given = record()
    opened = decode(encode(given, HEAD, name, about={"loss": 0.5}), given, HEAD)
    assert same(opened.record, given)
    assert isinstance(opened.record, Record)
    assert opened.about == {"loss": 0.5}


@pytest.mark.parametrize(("name", "error"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_narrow_numbers_are_rounded_and_small_ones_are_exact(name: str, error: float) -> None:
    given = record()._replace(score=torch.tensor(70001.0))  # neither fits fp16
    result = decode(encode(given, HEAD, name), given, HEAD).record
    difference = (result.shared.values - given.shared.values).abs()
    assert 0 < difference.max() <= error * given.shared.values.abs().max()
    assert result.score == 70001.0
    assert result.shared.values.dtype == torch.float32


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(0, 70),
    bits=st.randoms(use_true_random=False),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_mask_any_size(size: int, bits: Any, dtype: torch.dtype) -> None:
    personal = torch.tensor([bits.random() < 0.5 for _ in range(size)], dtype=torch.bool)
    given = {"v": Masked(torch.where(personal, 0, torch.arange(size).to(dtype) + 1), personal)}
    assert same(decode(encode(given, HEAD), given, HEAD).record, given)


def test_the_size_is_what_the_simulation_counts() -> None:
    given = record(100_000)
    for name, width in (("fp32", 4), ("fp16", 2)):
        assert encode(given, HEAD, name).nbytes == pytest.approx(int(payload.nbytes(given, width)), rel=0.01)


# -- masks ---------------------------------------------------------------------------------------------------


def test_a_mask_the_receiver_holds_is_left_out() -> None:
    first, second = record(seed=1), record(seed=1)
    opened = decode(encode(first, HEAD), first, HEAD)
    holds = {path: wire.fingerprint(mask) for path, mask in opened.masks.items()}
    whole, short = encode(second, HEAD), encode(second, HEAD, receiver_masks=holds)
    assert len(whole.body) - len(short.body) >= 1000 // 8
    assert same(decode(short, second, HEAD, masks=opened.masks).record, second)


def test_a_mask_that_changed_is_sent_again() -> None:
    first, second = record(seed=1), record(seed=2)
    holds = {"shared": wire.fingerprint(first.shared.personal)}
    packet = encode(second, HEAD, receiver_masks=holds)
    assert same(decode(packet, second, HEAD, masks={"shared": first.shared.personal}).record, second)


def test_a_receiver_that_lost_the_mask_says_so() -> None:
    given = record()
    packet = encode(given, HEAD, receiver_masks={"shared": wire.fingerprint(given.shared.personal)})
    with pytest.raises(
        WireError, match=r"leaves out the mask of shared, and no earlier one is known.*sent again"
    ):
        decode(packet, given, HEAD)
    with pytest.raises(WireError, match=r"of an earlier packet is not the one it was made with"):
        decode(packet, given, HEAD, masks={"shared": ~given.shared.personal})


def grown(size: int, before: float, after: float) -> tuple[Record, Record]:
    """A record whose mask covers one share, and a later one whose mask has grown to another."""
    first, rank = record(size), torch.rand(size, generator=torch.Generator().manual_seed(3))
    masks = [rank < share for share in (before, after)]
    one, two = (first._replace(shared=Masked(torch.where(m, 0, torch.ones(size)), m)) for m in masks)
    return one, two


def test_of_a_mask_that_grew_only_the_change_travels() -> None:
    first, second = grown(80_000, 0.45, 0.5)
    held = first.shared.personal
    holds = {"shared": wire.fingerprint(held)}
    change, whole = (
        encode(second, HEAD, receiver_masks=holds, known=known).nbytes for known in ([~held, held], [])
    )
    without = encode(second, HEAD, receiver_masks={"shared": wire.fingerprint(second.shared.personal)}).nbytes
    assert whole - without >= 80_000 / 8  # half of the entries are True: nothing to save
    assert change - without <= 0.36 * 80_000 / 8  # one in twenty changed, which is 0.286 bits for an entry
    packet = encode(second, HEAD, receiver_masks=holds, known=[held])
    assert same(decode(packet, second, HEAD, masks={"shared": held}).record, second)
    for lost in ({}, {"shared": ~held}, {"shared": held[:-1]}):
        with pytest.raises(
            WireError, match=r"changes a mask of shared .* that is not known here; .* sent again"
        ):
            decode(packet, second, HEAD, masks=lost)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(0, 70), seed=st.integers(0, 99))
def test_any_change_of_any_mask(size: int, seed: int) -> None:
    old, new = (torch.rand(size, generator=torch.Generator().manual_seed(s)) < 0.5 for s in (seed, seed + 1))
    given = {"v": Masked(torch.where(new, 0.0, 1.0), new)}
    packet = encode(given, HEAD, receiver_masks={"v": wire.fingerprint(old)}, known=[old])
    assert same(decode(packet, given, HEAD, masks={"v": old}).record, given)


def with_mask(packet: Packet, content: bytes | Tensor) -> Packet:
    """The packet with something else for its mask, and a checksum that fits."""
    from safetensors.torch import load, save

    tensors, head = load(packet.body), json.loads(packet.head)
    mask = torch.frombuffer(bytearray(content), dtype=torch.uint8) if isinstance(content, bytes) else content
    body = save({**tensors, "shared#mask": mask})
    del head["sha256"]
    return Packet(json.dumps({**head, "sha256": wire._checksum(head, body)}), body)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (zlib.compress(bytes(124)), "does not unpack to the expected 125 bytes"),
        (zlib.compress(bytes(126)), "does not unpack to the expected 125 bytes"),
        (zlib.compress(bytes(125))[:-1], "does not unpack to the expected 125 bytes"),
        (zlib.compress(bytes(125)) + b"more", "does not unpack to the expected 125 bytes"),
        (b"\0" * 125, "cannot be unpacked"),
        (torch.zeros(0, dtype=torch.uint8), "does not unpack"),
        (zlib.compress(bytes(125)), "is not the one it was made with"),
        (torch.zeros(125), "expected bytes"),
        (torch.zeros(5, 25, dtype=torch.uint8), "expected bytes"),
    ],
)
def test_a_mask_that_is_none_is_refused(content: bytes | Tensor, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode(with_mask(encode(record(), HEAD), content), record(), HEAD)


def test_a_few_bytes_cannot_fill_the_memory() -> None:
    """200 kB that claim to be 200 MB are refused before they are unpacked."""
    packet = with_mask(encode(record(), HEAD), zlib.compress(bytes(200_000_000), 9))
    assert packet.nbytes < 300_000
    tracemalloc.start()
    with pytest.raises(WireError, match="does not unpack"):
        decode(packet, record(), HEAD)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


@pytest.mark.parametrize("field", ["about", "masks", "since"])
def test_a_head_with_a_word_where_a_table_belongs_is_refused(field: str) -> None:
    packet = encode(record(), HEAD)
    head = {**json.loads(packet.head), field: "word"}
    del head["sha256"]
    forged = Packet(json.dumps({**head, "sha256": wire._checksum(head, packet.body)}), packet.body)
    with pytest.raises(WireError, match="lacks fields that every copfl message has"):
        decode(forged, record(), HEAD)


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("run", "other", "its run is 'other'; expected 'run'"),
        ("layout", "resnet", "its layout is 'resnet'; expected 'model'"),
        ("round", 2, "its round is 2; expected 3"),  # an old upload, sent again
        ("client", 0, "its client is 0; expected 1"),
        ("kind", "down", "its kind is 'down'; expected 'upload'"),
    ],
)
def test_what_is_not_expected_is_named(field: str, value: Any, says: str) -> None:
    given = record()
    with pytest.raises(WireError, match=says):
        decode(encode(given, HEAD._replace(**{field: value})), given, HEAD)


def test_another_format_is_named() -> None:
    packet = encode(record(), HEAD)
    newer = json.dumps({**json.loads(packet.head), "format": 2})
    with pytest.raises(WireError, match=r"has format 2; this copfl reads 1"):
        decode(Packet(newer, packet.body), record(), HEAD)


@pytest.mark.parametrize("place", [0, 8, 100, -1])
def test_one_flipped_bit_is_found(place: int) -> None:
    packet = encode(record(), HEAD)
    body = bytearray(packet.body)
    body[place] ^= 1
    with pytest.raises(WireError, match="damaged on its way"):
        decode(Packet(packet.head, bytes(body)), record(), HEAD)


def test_a_changed_head_is_found() -> None:
    packet = encode(record(), HEAD._replace(round=2))
    with pytest.raises(WireError, match="damaged on its way"):
        decode(Packet(packet.head.replace('"round":2', '"round":3'), packet.body), record(), HEAD)


@settings(max_examples=30, deadline=None)
@given(keep=st.integers(0, 4000))
def test_a_truncated_packet_is_refused(keep: int) -> None:
    content = wire.to_bytes(encode(record(), HEAD))
    with pytest.raises(WireError):
        decode(wire.from_bytes(content[: min(keep, len(content) - 1)]), record(), HEAD)


@settings(max_examples=50, deadline=None)
@given(head=st.text(CHARACTERS), body=st.binary())
def test_noise_is_refused(head: str, body: bytes) -> None:
    with pytest.raises(WireError):
        decode(Packet(head, body), record(), HEAD)


def test_a_head_of_any_depth_is_read_or_refused() -> None:
    """Python reads one level more than it writes, where its stack ends: then no checksum can be computed."""
    head = encode(record(), HEAD).head
    for depth in range(1, sys.getrecursionlimit() + 10):
        deep = '{"a":' * depth + "1" + "}" * depth
        with pytest.raises(WireError, match=r"checksum|cannot be read"):
            wire.opened_head(Packet(head.replace('"about":{', f'"about":{{"deep":{deep}', 1), b""))


@pytest.mark.parametrize("head", ["1", "[]", "{}", '{"format":2}', '{"format":2,"x":NaN}'])
def test_a_head_that_is_none_is_refused(head: str) -> None:
    with pytest.raises(WireError):
        decode(Packet(head, b""), record(), HEAD)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    given = record()
    place = int((~given.shared.personal).nonzero()[0])
    given.shared.values[place] = value
    with pytest.raises(WireError, match="NaN or infinity"):
        decode(encode(given, HEAD), given, HEAD)


def test_another_record_is_refused() -> None:
    given = record()
    with pytest.raises(WireError, match=r"shared#mask does not unpack to the expected 125 bytes"):
        decode(encode(record(900), HEAD), given, HEAD)
    with pytest.raises(WireError, match="lacks counts"):
        decode(encode({"score": given.score}, HEAD), {"counts": given.counts}, HEAD)
    with pytest.raises(WireError, match="it has more"):
        decode(encode({"score": given.score, "more": given.counts}, HEAD), {"score": given.score}, HEAD)


def test_what_does_not_fit_fp16_is_said_before_it_is_sent() -> None:
    with pytest.raises(WireError, match=r"does not fit into fp16.*set wire=bf16 or wire=fp32"):
        encode({"w": torch.full((100,), 1e6)}, HEAD, "fp16")


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(UsageError, match='no wire "fp8"'):
        encode(record(), HEAD, "fp8")


# -- every algorithm -----------------------------------------------------------------------------------------


def uploads(name: str) -> tuple[Any, Any, Tensor]:
    """The client's record after one turn, its upload and its broadcast."""
    algorithm = ALGORITHMS[name]()
    task, federation = small_federation(
        "batch", (6, 6), needs=traits(algorithm).needs, trains=traits(algorithm).trains
    )
    order = plan(0, 0, [0], [6], batch=4, epochs=algorithm.total_epochs)
    down = tree.row(algorithm.downlink(algorithm.server_init(task, 2), torch.tensor([0])), 0)
    with torch.no_grad():
        turn = algorithm.client_update(
            task,
            algorithm.client_init(task),
            down,
            tree.row(federation.train.rows([0]), 0),
            tree.row(order, 0),
        )
    return turn.client, turn.upload, down


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_travels(name: str) -> None:
    client, upload, down = uploads(name)
    for one in (client, upload, down):
        assert same(decode(encode(one, HEAD), one, HEAD).record, one)
        assert wire.from_bytes(wire.to_bytes(encode(one, HEAD))) == encode(one, HEAD)


def test_no_personal_coordinate_is_in_the_bytes() -> None:
    """CO-PFL's upload, read as bytes: every shared value is found there, no personal one is, in any float format."""
    client, upload, _ = uploads("copfl")
    packet = encode(upload, HEAD)
    content = packet.head.encode() + packet.body
    w, mask = client.w.numpy(), client.mask.numpy()
    assert 0 < mask.sum() < mask.size
    once = w[mask & (w != 0)]
    assert len(once) > 5
    for value in once:
        for kind in (np.float64, np.float32, np.float16):
            if (short := kind(value).tobytes()).strip(b"\0") and len(short) > 2:
                assert short not in content
    shared = w[~mask]
    assert all(value.tobytes() in content for value in shared)


# -- sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.job
def test_resnet18_at_half_budget_uploads_half() -> None:
    """A round once half of all entries are personal, against FedAvg's upload in fp32."""
    layout = layout_of(models.build("resnet18", (3, 32, 32), 10, seed=0))
    d = layout.parameters
    generator = torch.Generator().manual_seed(0)
    w, order = torch.randn(layout.size, generator=generator), torch.randperm(d, generator=generator)
    # What is personal at random is the worst case. At PWPM's rate of 0.25 it is 0.25, 0.4375 and then 0.5.
    before, personal = (
        torch.arange(layout.size) >= d for _ in range(2)
    )  # the batch-norm statistics stay home
    before[order[: int(0.4375 * d)]] = True
    personal[order[: d // 2]] = True
    upload = {"shared": Masked(torch.where(personal, 0, w), personal), "score": torch.tensor(1.0)}
    whole = encode({"w": w[:d], "size": torch.tensor(500.0)}, HEAD, "fp32").nbytes
    same_mask, other = ({"shared": wire.fingerprint(mask)} for mask in (personal, before))
    raw, sent = payload.mask_bytes(upload, {"mask": before}, {"mask": personal})
    for name, width, limit in (("fp32", 4, 0.55), ("fp16", 2, 0.28), ("bf16", 2, 0.28)):
        assert encode(upload, HEAD, name, receiver_masks=same_mask).nbytes <= (width / 8 + 0.001) * whole
        changed = encode(
            upload, HEAD, name, receiver_masks=other, known=[before]
        ).nbytes  # the round in which the budget is reached
        assert changed <= limit * whole
        assert changed == pytest.approx(int(payload.nbytes(upload, width)) - raw + float(sent), rel=0.01)
    # Half of all entries turned personal at once are a whole bit each, and nothing can shorten that.
    assert encode(upload, HEAD, "fp16").nbytes == pytest.approx((0.25 + 1 / 32) * whole, rel=0.001)


def test_a_list_of_too_many_tensors_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million names would take seconds."""
    from safetensors.torch import save

    body = save({f"t{i}": torch.zeros(0) for i in range(100)})
    head = Head("upload", "run", "", 0, 0)
    fields = {"format": wire.FORMAT, **head._asdict(), "wire": "fp32", "masks": {}, "since": {}, "about": {}}
    packet = wire.Packet(wire._canonical({**fields, "sha256": wire._checksum(fields, body)}), body)
    monkeypatch.setattr("safetensors.torch.load", lambda body: 1 / 0)
    with pytest.raises(WireError, match="its list of tensors has"):
        wire.decode(packet, {"w": torch.zeros(3)}, head)
