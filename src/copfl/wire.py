"""The one codec of records: messages, client files and checkpoints. No pickle, nothing executable.

A packet is a head and a body. The head is JSON: the format, the fields that both sides must agree on
(`Head`), the masks' fingerprints, small facts `about` the record, and a SHA-256 over all of it and the body.
The body is a safetensors file. A `tree.Masked` is sent as its shared values. Its mask is left out when the
receiver knows it already; else its difference to the mask that the receiver does know is sent, deflated: a
few changed entries cost a few bits.

A receiver knows what it expects. Anything else is refused by a WireError that names the difference. The
checksum finds damage; that nobody else wrote the bytes is left to TLS and to the nodes' keys.

A simulated run sends no packets: `core/payload.py` computes the bytes that it reports.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from copfl import foreign
from copfl.core import tree
from copfl.core.layout import Layout
from copfl.core.payload import SMALL
from copfl.core.tree import Masked
from copfl.errors import WireError, raised_as, unknown

T = TypeVar("T")

FORMAT = 1
EXACT = "exact"  # no narrowing: for files, and for comparing engines
WIRES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MASK = "#mask"  # behind the path of a Masked record: the changes of its mask
MAGIC = b"copfl\n"


class Head(NamedTuple):
    """The fields that sender and receiver must agree on."""

    kind: str  # "down", "upload", "client", "server", ...
    run: str
    layout: str  # of the model, see `layout_hash`
    round: int
    client: int  # -1: not of one client


class Packet(NamedTuple):
    """One message, or one file."""

    head: str
    body: bytes

    @property
    def nbytes(self) -> int:
        return len(self.head.encode()) + len(self.body)


class Opened(NamedTuple):
    """The content of a packet."""

    record: Any
    about: dict[str, Any]
    masks: dict[str, Tensor]  # of the Masked records, for the next packet


def layout_hash(layout: Layout) -> str:
    """16 hexadecimal digits of the names, shapes and order of a model's tensors."""
    text = json.dumps([layout.names, layout.shapes, layout.trained, layout.head])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(mask: Tensor) -> str:
    """16 hexadecimal digits of the content of a mask, or of any tensor."""
    content = packed(mask) if mask.dtype == torch.bool else mask.detach().cpu().contiguous()
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()[:16]


def encode(
    record: object,
    head: Head,
    wire: str = EXACT,
    *,
    receiver_masks: Mapping[str, str] | None = None,
    known: Iterable[Tensor] = (),
    about: Mapping[str, Any] | None = None,
) -> Packet:
    """The packet of a record.

    `receiver_masks` has the masks, by path and fingerprint, that the receiver knows already. Where one of
    them is among the masks `known` here, the difference to it is sent.
    """
    from safetensors.torch import save

    if wire != EXACT and wire not in WIRES:
        raise unknown("wire", wire, WIRES)
    tensors, masks, since = {}, {}, {}
    received = dict(receiver_masks or {})
    bases = {fingerprint(mask): mask for mask in known} if received else {}
    for path, piece in pieces(record):
        if isinstance(piece, Tensor):
            is_mask = piece.dtype == torch.bool
            tensors[path] = packed(piece) if is_mask else _narrow(path, piece, wire, piece.numel())
            continue
        mask = piece.personal
        masks[path] = fingerprint(mask)
        tensors[path] = _narrow(path, piece.values[~mask], wire, piece.values.numel())
        if received.get(path) != masks[path]:
            base = bases.get(received.get(path, ""))
            if base is not None and base.shape == mask.shape:
                since[path] = received[path]
                mask = mask ^ base.to(mask.device)
            tensors[path + MASK] = _deflated(mask)
    body = save(separate({path: t.detach().cpu().contiguous() for path, t in tensors.items()}))
    fields = {"format": FORMAT, **head._asdict(), "wire": wire, "masks": masks, "since": since}
    fields["about"] = dict(about or {})
    return Packet(_canonical({**fields, "sha256": _checksum(fields, body)}), body)


def decode(
    packet: Packet, like: T, expected: Head, *, masks: Mapping[str, Tensor] | None = None, finite: bool = True
) -> Opened:
    """The record, shaped as `like`; `masks` are those of earlier packets. WireError if something is wrong."""
    head = opened_head(packet)
    for field, wanted in expected._asdict().items():
        if head.get(field) != wanted:
            raise WireError(f"its {field} is {head.get(field)!r}; expected {wanted!r}")
    wire = head.get("wire")
    if wire not in (*WIRES, EXACT):
        raise WireError(f"its number format is {wire!r}; known: {', '.join(WIRES)}")
    expected_pieces = list(pieces(like))
    found, used, tensors = _tensors(packet.body, len(expected_pieces)), {}, []
    for path, piece in expected_pieces:
        if isinstance(piece, Masked):
            mask = _mask(path, found, piece.personal, head, masks or {})
            values = torch.zeros_like(piece.values, device="cpu")
            sent_as = _sent_as(values.dtype, wire, values.numel())
            values[~mask] = take(found, path, (int((~mask).sum()),), sent_as).to(values.dtype)
            used[path] = mask
            tensors += [values, mask]
        elif piece.dtype == torch.bool:
            size = (piece.numel() + 7) // 8
            tensors.append(unpacked(take(found, path, (size,), torch.uint8).numpy(), piece))
        else:
            sent_as = _sent_as(piece.dtype, wire, piece.numel())
            tensors.append(take(found, path, piece.shape, sent_as).to(piece.dtype))
    refuse_rest(found)
    if finite and not all(bool(torch.isfinite(t).all()) for t in tensors if t.is_floating_point()):
        raise WireError("it has NaN or infinity; a client whose training diverged is left out")
    on_device = [t.to(p.device) for t, p in zip(tensors, tree.leaves(like), strict=True)]
    return Opened(tree.rebuild(like, on_device), head["about"], used)


def opened_head(packet: Packet) -> dict[str, Any]:
    """The head of an intact packet; WireError if it has another format, or is damaged."""
    damaged = "its head cannot be read ({}); it is damaged, or not a copfl message"
    with raised_as(WireError, damaged, ValueError, RecursionError):
        head = json.loads(packet.head)
        # What Python reads at its last level it cannot write again, which the checksum and every text need.
        foreign.require_shallow(head)
    if not isinstance(head, dict) or "format" not in head:
        raise WireError("its head has no format; it is not a copfl message")
    if head["format"] != FORMAT:
        found = f"it has format {head['format']!r}; this copfl reads {FORMAT}"
        raise WireError(f"{found}: install the same copfl everywhere")
    if head.pop("sha256", None) != _checksum(head, packet.body):
        found = f"its {len(packet.body):,} bytes do not match its checksum"
        raise WireError(f"it was damaged on its way: {found}")
    if not all(isinstance(head.get(field), dict) for field in ("about", "masks", "since")):
        raise WireError("its head lacks fields that every copfl message has")
    return head


def to_bytes(packet: Packet) -> bytes:
    """The packet as the content of one file."""
    return MAGIC + packet.head.encode() + b"\n" + packet.body


def from_bytes(content: bytes) -> Packet:
    head, newline, body = content.removeprefix(MAGIC).partition(b"\n")
    if not content.startswith(MAGIC) or not newline:
        raise WireError("it is truncated, or not a copfl file")
    with raised_as(WireError, "it is damaged: its head is not text", UnicodeDecodeError):
        return Packet(head.decode(), body)


def pieces(record: object) -> Iterator[tuple[str, Tensor | Masked]]:
    """Every tensor, and every Masked as one, with its path; in the order of `tree.leaves`."""
    return ((path or "record", piece) for path, piece in tree.named(record, leaf=Tensor | Masked))


# -- tensors -------------------------------------------------------------------------------------------------


def take(found: dict[str, Tensor], path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Removes and returns the tensor at this path; WireError if it is not as expected."""
    if path not in found:
        raise WireError(f"it lacks {path}")
    values = found.pop(path)
    if values.shape != shape or values.dtype != dtype:
        raise WireError(f"its {path} is {values.dtype} {list(values.shape)}; expected {dtype} {list(shape)}")
    return values


def refuse_rest(found: Mapping[str, Tensor]) -> None:
    """WireError if tensors are left that nobody took."""
    if found:
        raise WireError(f"it has {', '.join(sorted(found)[:5])}, which is not expected")


def packed(mask: Tensor) -> Tensor:
    """The entries of a mask as bits, eight in a byte."""
    return torch.from_numpy(np.packbits(mask.detach().cpu().numpy().reshape(-1)))


def unpacked(content: np.ndarray[Any, np.dtype[np.uint8]], like: Tensor) -> Tensor:
    """The mask that `packed` packed, in the shape of `like`."""
    bits = np.unpackbits(content, count=like.numel()).view(bool)
    return torch.from_numpy(bits).view(like.shape)


def _sent_as(dtype: torch.dtype, wire: str, numel: int) -> torch.dtype:
    """The dtype on the wire: vectors are narrowed, but not a few numbers, so that counts stay exact.

    Whoever has doubles among single-precision weights needs them, so fp32 does not narrow those.
    """
    narrow = dtype.is_floating_point and wire not in (EXACT, "fp32") and numel > SMALL
    return WIRES[wire] if narrow else dtype


def _narrow(path: str, values: Tensor, wire: str, numel: int) -> Tensor:
    narrow = values.to(_sent_as(values.dtype, wire, numel))
    if narrow.dtype == torch.float16 and bool((torch.isinf(narrow) & torch.isfinite(values)).any()):
        largest = float(values[torch.isfinite(values)].abs().max())
        unfit = f"{path} has {largest:.4g}, which does not fit into fp16 (up to 65504)"
        raise WireError(f"{unfit}; set wire=bf16 or wire=fp32")
    return narrow


def _deflated(mask: Tensor) -> Tensor:
    # Scattered bits repeat nothing but runs of zeros: Z_RLE is ten times as fast here, and shorter.
    deflater = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    content = deflater.compress(packed(mask).numpy().tobytes()) + deflater.flush()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _inflated(path: str, deflated: Tensor, like: Tensor) -> Tensor:
    """The mask; never more than the expected bytes are unpacked, whatever the content would expand to."""
    size = (like.numel() + 7) // 8
    if deflated.dtype != torch.uint8 or deflated.dim() != 1:
        raise WireError(f"its {path} is {deflated.dtype} {list(deflated.shape)}; expected bytes")
    inflater = zlib.decompressobj()
    with raised_as(WireError, f"its {path} cannot be unpacked ({{}})", zlib.error):
        content = inflater.decompress(deflated.numpy().tobytes(), size + 1)  # 0 would mean: without a limit
    if len(content) != size or not inflater.eof or inflater.unused_data:
        raise WireError(f"its {path} does not unpack to the expected {size:,} bytes, one bit for each entry")
    return unpacked(np.frombuffer(content, np.uint8), like)


def _mask(
    path: str, found: dict[str, Tensor], like: Tensor, head: dict[str, Any], known: Mapping[str, Tensor]
) -> Tensor:
    """The mask of the packet, or else of an earlier one; it must be the mask that the sender used."""
    used, since = head["masks"].get(path), head["since"].get(path)
    if path + MASK in found:
        mask, source = _inflated(path + MASK, found.pop(path + MASK), like), "in it"
        if since is not None:
            if path not in known or known[path].shape != like.shape or fingerprint(known[path]) != since:
                unknown_mask = f"it changes a mask of {path} ({since}) that is not known here"
                raise WireError(f"{unknown_mask}; it must be sent again")
            mask = mask ^ known[path].cpu()
    elif path in known:
        mask, source = known[path], "of an earlier packet"
    else:
        missing = f"it leaves out the mask of {path}, and no earlier one is known"
        raise WireError(f"{missing}; it must be sent again")
    if mask.shape != like.shape or fingerprint(mask) != used:
        wrong = f"the mask of {path} {source} is not the one it was made with ({used})"
        raise WireError(f"{wrong}; it must be sent again")
    return mask


def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, none of which shares its memory with another, as safetensors requires."""
    seen: set[int] = set()
    result = {}
    for path, t in tensors.items():
        place = t.untyped_storage().data_ptr()
        result[path] = t.clone() if place in seen and t.numel() else t
        seen.add(place)
    return result


def _tensors(body: bytes, pieces: int) -> dict[str, Tensor]:
    """The tensors of a body; a list of many more than these pieces is refused before it is read."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    listed, most = int.from_bytes(body[:8], "little"), 1024 * (pieces + 4)  # a piece is two tensors at most
    if listed > most:
        raise WireError(f"its list of tensors has {listed:,} bytes; {most:,} are enough for those expected")
    errors = SafetensorError, ValueError, KeyError, TypeError
    with raised_as(WireError, "its body cannot be read ({})", *errors):
        return dict(load(body))


def _checksum(fields: Mapping[str, Any], body: bytes) -> str:
    digest = hashlib.sha256(_canonical(fields).encode() + b"\n")
    digest.update(body)
    return digest.hexdigest()


def _canonical(fields: Mapping[str, Any]) -> str:
    with raised_as(WireError, "the facts about a record must be finite numbers and text ({})", ValueError):
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)


def plain(value: float) -> float | None:
    """A number for JSON: null where it is not finite."""
    return float(value) if math.isfinite(value) else None
