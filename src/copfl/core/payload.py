"""The content of messages: their size in bytes, and the model update and reported weight of an upload.

Attacks, robust aggregation and noise wrap any algorithm, so they must find the update in records that each
algorithm declares for itself. Three conventions make that possible: the global model is the field `w` of the
Down record; the client's model is the field `w` of the Upload, or `shared` where a mask goes with it; the
reported weight is called `size`, `score` or `weight`. An upload that is no model but a vector of sums calls it
`sums`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from copfl.core.tree import Masked, leaves, named
from copfl.errors import UsageError
from copfl.kernels.topk import count, count_of_each

SMALL = 64  # a tensor of at most this many numbers is never narrowed on the wire
SEGMENTS = 16

# -- the model update of an upload ---------------------------------------------------------------------------

WEIGHT_FIELDS = ("size", "score", "weight")
VECTOR_FIELDS = ("w", "shared", "sums")


class Update(NamedTuple):
    """One upload, with the global model it started from."""

    received: Tensor  # [s], the global model; zero where personal
    sent: Tensor  # [s]; zero where personal
    personal: Tensor | None  # [s] bool; None: all of it is shared
    reported_weight: Tensor | None  # None: every client has the same weight

    @property
    def change(self) -> Tensor:
        return self.sent - self.received


def other_fields(upload: Any) -> list[str]:
    """The fields of an upload that are neither its model nor its reported weight."""
    return [name for name in upload._fields if name not in (*VECTOR_FIELDS, *WEIGHT_FIELDS)]


def innermost(down: Any) -> Any:
    """The message of the innermost algorithm; a wrapper stores it in its field `down`."""
    return innermost(down.down) if hasattr(down, "down") else down


def update_of(down: Any, upload: Any) -> Update:
    """The model update in an upload that answers this message."""
    down = innermost(down)
    sent = next((getattr(upload, name) for name in VECTOR_FIELDS if hasattr(upload, name)), None)
    sent = sent.values if isinstance(sent, Masked) else sent
    if sent is None or getattr(getattr(down, "w", None), "shape", None) != sent.shape:
        raise UsageError(
            "attacks, robust aggregation and privacy work on the weights that a client sends back for the "
            "one model that it received; this algorithm's messages have "
            f"{', '.join(innermost(down)._fields)} and back {', '.join(upload._fields)}; choose another "
            "algorithm, or leave them out"
        )
    reported_weight = next((getattr(upload, name) for name in WEIGHT_FIELDS if hasattr(upload, name)), None)
    if hasattr(upload, "shared"):
        values, personal = upload.shared
        return Update(torch.where(personal, 0, down.w), values, personal, reported_weight)
    return Update(down.w, upload.w, None, reported_weight)


def with_update(upload: Any, update: Update) -> Any:
    """The upload with this model update."""
    if update.personal is None:
        upload = upload._replace(w=update.sent)
    else:
        values = torch.where(update.personal, 0, update.sent)
        upload = upload._replace(shared=Masked(values, update.personal))
    return with_reported_weight(upload, update.reported_weight)


def with_reported_weight(record: Any, reported_weight: Tensor | None) -> Any:
    """The record with another reported weight, if it has one."""
    name = next((name for name in WEIGHT_FIELDS if hasattr(record, name)), None)
    return record if name is None or reported_weight is None else record._replace(**{name: reported_weight})


def counted(algorithm: Any, client: Any, down: Any, update: Update) -> Any:
    """A client's record after its local update, where the server counts this update in place of its upload.

    It stays as it is, unless the algorithm has a method of this name: one whose clients keep their upload and
    their weight, to remove them from the mean later.
    """
    rule = getattr(algorithm, "counted", None)
    return client if rule is None else rule(client, down, update)


# -- bytes on the wire ---------------------------------------------------------------------------------------


def nbytes(tree: object, float_bytes: int = 4, of: torch.dtype = torch.float64) -> int | Tensor:
    """The bytes of a record on the wire: of a Masked vector, the shared entries and the mask as bits.

    Args:
        tree: The record.
        float_bytes: Of an entry of a vector.
        of: The dtype of the weights. Doubles beside single-precision weights are sent as they are.
    """
    if isinstance(tree, Masked):
        shared = tree.personal.numel() - count(tree.personal)
        return shared * float_bytes + (tree.personal.numel() + 7) // 8
    if isinstance(tree, Tensor):
        if tree.dtype == torch.bool:
            return (tree.numel() + 7) // 8
        is_vector = tree.is_floating_point() and tree.numel() > SMALL
        narrow = is_vector and (tree.dtype == of or tree.dtype != torch.float64)
        return tree.numel() * (float_bytes if narrow else tree.element_size())
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple) else ()
    return sum((nbytes(part, float_bytes, of) for part in parts), start=0)


def mask_bytes(upload: object, before: object = None, after: object = None) -> tuple[int, float | Tensor]:
    """The part of those bytes that are masks of Masked vectors, and their size as the wire sends them.

    The wire deflates the difference to the mask that the server knows, which comes to the entropy of the
    changes. The server knows the client's last mask, and so does the client's record: where the record has
    this mask `after` the local update, it has the last one `before`. A mask in no record counts as changed
    from nothing.
    """
    whole: int = 0
    sent: float | Tensor = 0.0
    old = {id(now): was for now, was in zip(leaves(after), leaves(before), strict=True)}
    for personal in (masked.personal for masked in masked_vectors(upload)):
        base = old.get(id(personal))
        whole += (personal.numel() + 7) // 8
        changed = personal if base is None else personal ^ base
        # By segments, because some layers compress better than others.
        size = max(1.0, changed.numel() / SEGMENTS)
        counts = count_of_each(changed, _segments(changed))
        fraction = (counts.double() / size).clamp(max=1.0)  # segments differ by one entry in length
        # Not torch.special.entr, which a GPU compiles in every process that calls it.
        nats = -torch.xlogy(fraction, fraction) - torch.xlogy(1 - fraction, 1 - fraction)
        bits = nats.sum() / math.log(2)
        sent = sent + bits * size / 8
    return whole, torch.ceil(sent) if isinstance(sent, Tensor) else sent


def mask_fingerprint(tree: object) -> int | Tensor:
    """A number, exact as a double, that changes with the masks: the personal entries, counted by segments."""
    counts = [count_of_each(masked.personal, _segments(masked.personal)) for masked in masked_vectors(tree)]
    if not counts:
        return 0
    places = torch.arange(1, len(counts) * SEGMENTS + 1, device=counts[0].device)
    return (torch.cat(counts) * (2654435761 * places % 2**24)).sum()


def _segments(vector: Tensor) -> tuple[int, ...]:
    """The sizes of SEGMENTS parts of nearly equal length."""
    size, more = divmod(len(vector), SEGMENTS)
    return tuple(size + (place < more) for place in range(SEGMENTS))


def masked_vectors(tree: object) -> list[Masked]:
    """The Masked vectors of a record."""
    return [piece for _, piece in named(tree, leaf=Tensor | Masked) if isinstance(piece, Masked)]
