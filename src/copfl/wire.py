"""Records as bytes: a head that says what the record is, and a body of plain numbers. No pickle, nothing executable.

The head is JSON: the format, what both sides must agree on (`Head`), the masks' fingerprints, whatever small facts go
`about` the record, and a SHA-256 over all of it and the body. The body is a safetensors file. A `tree.Masked` travels
as its shared values alone. Its mask is left out when the receiver holds it already; else it travels as the bits that
changed since the mask that the receiver does hold, deflated: a mask that grows by a few entries costs a few bits.

A receiver knows what it waits for. What is not exactly that is refused by a WireError that says what differs.
The checksum finds damage; that nobody else wrote the bytes is the business of TLS and of the nodes' keys.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from copfl.core import payload, tree
from copfl.core.layout import Layout
from copfl.core.tree import Masked
from copfl.errors import WireError, unknown

T = TypeVar("T")

FORMAT = 2
EXACT = "exact"  # every number as it is: for files, and for comparing engines
WIRES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MASK = "#mask"  # behind the path of a Masked record: what changed in its mask
MAGIC = b"copfl\n"


class Head(NamedTuple):
    """What sender and receiver must agree on."""

    kind: str  # "down", "upload", "client", "server", ...
    run: str
    layout: str  # the model's, see `layout_hash`
    round: int
    client: int  # -1: nobody's in particular


class Packet(NamedTuple):
    """One message, or one file."""

    head: str
    body: bytes

    @property
    def nbytes(self) -> int:
        return len(self.head.encode()) + len(self.body)


class Opened(NamedTuple):
    """What a packet held."""

    record: Any
    about: dict[str, Any]
    masks: dict[str, Tensor]  # of the Masked records, for the next packet that leaves them out


def layout_hash(layout: Layout) -> str:
    """16 hexadecimal digits that differ where two models differ in a name, a shape or their order."""
    text = json.dumps([layout.names, layout.shapes, layout.trained, layout.head])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(mask: Tensor) -> str:
    """16 hexadecimal digits that differ where two masks, or any two tensors, differ."""
    content = _packed(mask) if mask.dtype == torch.bool else mask.detach().cpu().contiguous()
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()[:16]


def encode(
    record: object,
    head: Head,
    wire: str = EXACT,
    *,
    holds: Mapping[str, str] | None = None,
    known: Iterable[Tensor] = (),
    about: Mapping[str, Any] | None = None,
) -> Packet:
    """The packet of a record. `holds` names the masks, by path and fingerprint, that the receiver has already.

    Where one of them is among the masks `known` here, what travels is the difference to it.
    """
    from safetensors.torch import save

    _check_wire(wire)
    tensors, masks, since = {}, {}, {}
    bases = {fingerprint(mask): mask for mask in known} if holds else {}
    for path, piece in pieces(record):
        if isinstance(piece, Masked):
            masks[path] = fingerprint(piece.personal)
            tensors[path] = _narrow(path, piece.values[~piece.personal], wire, piece.values.numel())
            held = (holds or {}).get(path)
            if held != masks[path]:
                base = bases.get(held) if held is not None else None
                if held is not None and base is not None and base.shape == piece.personal.shape:
                    since[path] = held
                    tensors[path + MASK] = _deflated(piece.personal ^ base.to(piece.personal.device))
                else:
                    tensors[path + MASK] = _deflated(piece.personal)
        else:
            tensors[path] = (
                _packed(piece) if piece.dtype == torch.bool else _narrow(path, piece, wire, piece.numel())
            )
    body = save(_apart({path: t.detach().cpu().contiguous() for path, t in tensors.items()}))
    fields = {"format": FORMAT, **head._asdict(), "wire": wire, "masks": masks, "since": since}
    fields["about"] = dict(about or {})
    return Packet(_canonical({**fields, "sha256": _checksum(fields, body)}), body)


def decode(
    packet: Packet, like: T, expected: Head, *, masks: Mapping[str, Tensor] | None = None, finite: bool = True
) -> Opened:
    """The record, shaped as `like`; a WireError says what is not as expected. `masks` are those held from before."""
    head = opened_head(packet)
    for field, wanted in expected._asdict().items():
        if head.get(field) != wanted:
            raise WireError(f"it is of {field} {head.get(field)!r}; expected {wanted!r}")
    wire = head.get("wire")
    if wire not in (*WIRES, EXACT):
        raise WireError(f"its numbers are {wire!r}; known: {', '.join(WIRES)}")
    found, kept, result = _tensors(packet.body), {}, []
    for path, piece in pieces(like):
        if isinstance(piece, Masked):
            mask = _mask(path, found, piece.personal, head, masks or {})
            kept[path], shared = mask, ~mask
            values = torch.zeros_like(piece.values, device="cpu")
            values[shared] = _wide(
                path, found, (int(shared.sum()),), piece.values, wire, piece.values.numel()
            )
            result += [values, mask]
        elif piece.dtype == torch.bool:
            result.append(_bits(path, found, piece))
        else:
            result.append(_wide(path, found, tuple(piece.shape), piece, wire, piece.numel()))
    if found:
        raise WireError(f"it carries {', '.join(sorted(found)[:5])}, which nobody expects")
    if finite and not all(bool(torch.isfinite(t).all()) for t in result if t.is_floating_point()):
        raise WireError("it holds NaN or infinity; a client whose training diverged is left out")
    placed = [t.to(p.device) for t, p in zip(result, tree.leaves(like), strict=True)]
    return Opened(tree.rebuild(like, placed), head["about"], kept)


def opened_head(packet: Packet) -> dict[str, Any]:
    """The head of a packet that arrived whole; WireError if it is of another format, or damaged."""
    try:
        head = json.loads(packet.head)
    except (ValueError, RecursionError) as error:
        raise WireError(f"its head cannot be read ({error}); it is damaged, or no copfl message") from error
    if not isinstance(head, dict) or "format" not in head:
        raise WireError("its head names no format; it is no copfl message")
    if head["format"] != FORMAT:
        raise WireError(
            f"it is of format {head['format']!r}; this copfl reads {FORMAT}: install the same copfl everywhere"
        )
    claimed = head.pop("sha256", None)
    if claimed != _checksum(head, packet.body):
        raise WireError(f"it was damaged on its way: its {len(packet.body):,} bytes do not have its checksum")
    if not all(isinstance(head.get(field), dict) for field in ("about", "masks", "since")):
        raise WireError("its head lacks what every copfl message has")
    return head


def to_bytes(packet: Packet) -> bytes:
    """The packet as the content of one file."""
    return MAGIC + packet.head.encode() + b"\n" + packet.body


def from_bytes(content: bytes) -> Packet:
    """The packet that `to_bytes` wrote."""
    head, newline, body = content.removeprefix(MAGIC).partition(b"\n")
    if not content.startswith(MAGIC) or not newline:
        raise WireError("it is cut short, or no copfl file")
    try:
        return Packet(head.decode(), body)
    except UnicodeDecodeError as error:
        raise WireError("it is damaged: its head is no text") from error


def pieces(record: object, prefix: str = "") -> Iterator[tuple[str, Tensor | Masked]]:
    """Every tensor, and every Masked as one, with its path; in the order of `tree.leaves`."""
    if isinstance(record, Tensor | Masked):
        yield prefix or "record", record
    elif isinstance(record, dict | tuple):
        keyed = record.items() if isinstance(record, dict) else zip(_fields(record), record, strict=True)
        for key, value in keyed:
            yield from pieces(value, f"{prefix}.{key}" if prefix else str(key))
    elif record is not None:
        raise TypeError(f"a record holds tensors, tuples and dicts, not {type(record).__name__}")


def _fields(record: tuple[Any, ...]) -> tuple[str, ...]:
    names: tuple[str, ...] = getattr(record, "_fields", tuple(map(str, range(len(record)))))
    return names


# -- numbers -----------------------------------------------------------------------------------------------------------


def _sent_as(dtype: torch.dtype, wire: str, numel: int) -> torch.dtype:
    """What a number travels as: vectors are narrowed, a few numbers are not, for a count of samples must stay exact."""
    narrow = dtype.is_floating_point and wire != EXACT and numel > payload.SMALL
    return WIRES[wire] if narrow else dtype


def _narrow(path: str, values: Tensor, wire: str, numel: int) -> Tensor:
    narrow = values.to(_sent_as(values.dtype, wire, numel))
    if narrow.dtype == torch.float16 and bool((torch.isinf(narrow) & torch.isfinite(values)).any()):
        largest = float(values[torch.isfinite(values)].abs().max())
        raise WireError(
            f"{path} holds {largest:.4g}, which does not fit into fp16 (up to 65504); use bf16 or fp32"
        )
    return narrow


def _wide(
    path: str, found: dict[str, Tensor], shape: tuple[int, ...], like: Tensor, wire: str, numel: int
) -> Tensor:
    return _taken(path, found, shape, _sent_as(like.dtype, wire, numel)).to(like.dtype)


def _taken(path: str, found: dict[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if path not in found:
        raise WireError(f"it lacks {path}")
    values = found.pop(path)
    if tuple(values.shape) != shape or values.dtype != dtype:
        raise WireError(f"its {path} is {values.dtype} {list(values.shape)}; expected {dtype} {list(shape)}")
    return values


def _packed(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.detach().cpu().numpy().reshape(-1)))


def _bits(path: str, found: dict[str, Tensor], like: Tensor) -> Tensor:
    packed = _taken(path, found, ((like.numel() + 7) // 8,), torch.uint8).numpy()
    bits = np.unpackbits(packed, count=like.numel()).astype(bool)
    return torch.from_numpy(bits).reshape(tuple(like.shape))


def _deflated(mask: Tensor) -> Tensor:
    # Scattered bits have no repetitions to look for but runs of zeros: so it is ten times as quick, and shorter.
    deflater = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    content = deflater.compress(_packed(mask).numpy().tobytes()) + deflater.flush()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _inflated(path: str, deflated: Tensor, like: Tensor) -> Tensor:
    """The bits; never more of them than expected are unpacked, however many a few bytes claim to be."""
    size = (like.numel() + 7) // 8
    if deflated.dtype != torch.uint8 or deflated.dim() != 1:
        raise WireError(f"its {path} is {deflated.dtype} {list(deflated.shape)}; expected bytes")
    inflater = zlib.decompressobj()
    try:
        packed = inflater.decompress(deflated.numpy().tobytes(), size + 1)  # 0 would mean: without a limit
    except zlib.error as error:
        raise WireError(f"its {path} cannot be unpacked ({error})") from error
    if len(packed) != size or not inflater.eof or inflater.unused_data:
        raise WireError(f"its {path} does not unpack to the expected {size:,} bytes, one bit for each entry")
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=like.numel()).astype(bool)
    return torch.from_numpy(bits).reshape(tuple(like.shape))


def _mask(
    path: str, found: dict[str, Tensor], like: Tensor, head: dict[str, Any], held: Mapping[str, Tensor]
) -> Tensor:
    """The mask out of the packet, or else the one held from before; either way it must be the one the sender used."""
    used, since = head["masks"].get(path), head["since"].get(path)
    if path + MASK in found:
        mask, source = _inflated(path + MASK, found.pop(path + MASK), like), "that it carries"
        if since is not None:
            if path not in held or held[path].shape != like.shape or fingerprint(held[path]) != since:
                raise WireError(
                    f"it changes a mask of {path} ({since}) that is not held here; it must be sent again"
                )
            mask = mask ^ held[path].cpu()
    elif path in held:
        mask, source = held[path], "held from before"
    else:
        raise WireError(
            f"it leaves out the mask of {path}, and none is held from before; it must be sent again"
        )
    if mask.shape != like.shape or fingerprint(mask) != used:
        raise WireError(
            f"the mask of {path} {source} is not the one it was made with ({used}); it must be sent again"
        )
    return mask


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, none of which shares its memory with another: a record may hold one twice, a file may not."""
    seen: set[int] = set()
    result = {}
    for path, t in tensors.items():
        place = t.untyped_storage().data_ptr()
        result[path] = t.clone() if place in seen and t.numel() else t
        seen.add(place)
    return result


def _tensors(body: bytes) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(body))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise WireError(f"its body cannot be read ({error})") from error


def _checksum(fields: Mapping[str, Any], body: bytes) -> str:
    digest = hashlib.sha256(_canonical(fields).encode() + b"\n")
    digest.update(body)
    return digest.hexdigest()


def _canonical(fields: Mapping[str, Any]) -> str:
    try:
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise WireError(f"what goes along must be finite numbers and words ({error})") from error


def _check_wire(wire: str) -> None:
    if wire != EXACT and wire not in WIRES:
        raise unknown("wire", wire, WIRES)


def plain(value: float) -> float | None:
    """A number as JSON knows it: what is not finite is null."""
    return float(value) if math.isfinite(value) else None
