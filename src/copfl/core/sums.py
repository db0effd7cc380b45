"""Whether the total of a round tells more about the uploads than one weighted sum of them.

Noise is counted for a sum, and secure aggregation hides everything but a sum. Neither holds if the summand is
another function of an upload: a product of two of its parts, its mask beside its values, or two sums with
different weights. Here three uploads are replaced by three others with the same sum, and the totals compared.
"""

from typing import Any

import torch

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.payload import VECTOR_FIELDS, WEIGHT_FIELDS, other_fields
from copfl.core.task import Task

UPLOADS = 3


def total_is_one_sum(
    algorithm: AnyAlgorithm, task: Task, server: Any, upload: Any, *, private: bool = False
) -> bool:
    """Whether a total is determined by the sums of `weight * vector` and of the weight over the uploads.

    Args:
        algorithm: its `summand` is tested.
        task: the task of the federation.
        server: the server's record with which the summands are computed.
        upload: an upload of the algorithm, of which only the structure matters.
        private: whether the uploads have the constant weights and masks of noised uploads. Otherwise both
            differ between the clients, and between the two sets of uploads; and single numbers of the total
            may be any sums over the clients, such as of squared norms: a sum of numbers hides each.
    """
    if not any(name in upload._fields for name in VECTOR_FIELDS):
        return False
    random = torch.Generator().manual_seed(0)
    first, second = _same_sums(upload, task, random, private)

    def same_total(uploads: list[Any], others: list[Any]) -> bool:
        totals = [_total(algorithm, task, server, rows) for rows in (uploads, others)]
        pairs = [pair for pair in zip(*map(tree.leaves, totals), strict=True) if private or pair[0].dim()]
        return all(torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5) for a, b in pairs)

    def adds_up(name: str) -> bool:
        """Whether a further field adds up too, by itself or weighted, and is no second model update.

        SCAFFOLD's control variates are the update again, with other weights: two sums of the same vectors. A
        field of whole numbers or truth values, such as the number of a cluster, cannot be tested by small
        changes, and is none.
        """
        field = getattr(upload, name)
        if not field.is_floating_point():
            return False
        is_short = 2 * field.numel() < task.d
        moved = (_moved(first, name, random, weighted) for weighted in (False, True))
        return is_short and any(same_total(first, others) for others in moved)

    return same_total(first, second) and all(map(adds_up, other_fields(upload)))


def _moved(uploads: list[Any], name: str, random: torch.Generator, weighted: bool) -> list[Any]:
    """The uploads with another value of this field in the first two, and the same (weighted) sum."""
    first, second, *rest = uploads
    like = getattr(first, name)
    change = torch.randn(like.shape, generator=random, dtype=torch.float64).to(like)
    weight_name = next((field for field in WEIGHT_FIELDS if field in first._fields), None)
    a, b = (getattr(upload, weight_name) if weighted and weight_name else 1.0 for upload in (first, second))
    moved = (
        first._replace(**{name: like + change / a}),
        second._replace(**{name: getattr(second, name) - change / b}),
    )
    return [*moved, *rest]


def _total(algorithm: AnyAlgorithm, task: Task, server: Any, uploads: list[Any]) -> Any:
    id = torch.tensor(0, device=task.device)
    with torch.no_grad():
        total = algorithm.summand(task, server, id, uploads[0])
        for upload in uploads[1:]:
            total = tree.add(total, algorithm.summand(task, server, id, upload))
    return total


def _same_sums(
    upload: Any, task: Task, random: torch.Generator, private: bool
) -> tuple[list[Any], list[Any]]:
    """Two lists of uploads with the same sums of `weight * vector` and of the weight."""
    vector_name = next(name for name in VECTOR_FIELDS if name in upload._fields)
    weight_name = next((name for name in WEIGHT_FIELDS if name in upload._fields), None)
    is_masked = vector_name == "shared"
    like = upload.shared.values if is_masked else getattr(upload, vector_name)
    weight_like = like.new_ones(()) if weight_name is None else getattr(upload, weight_name)
    fixed = task.local().cpu() if is_masked else torch.zeros(like.shape, dtype=torch.bool)
    weights = 0.5 + torch.rand(UPLOADS, *weight_like.shape, generator=random, dtype=torch.float64)
    if private or weight_name is None:
        weights = torch.ones_like(weights)

    def vectors() -> tuple[torch.Tensor, torch.Tensor]:
        """Random values, zero where they are personal, and the masks. The last upload has no further mask."""
        values = torch.randn(UPLOADS, *like.shape, generator=random, dtype=torch.float64)
        masks = torch.zeros(values.shape, dtype=torch.bool)
        if is_masked and not private:
            masks[:-1] = torch.rand(masks[:-1].shape, generator=random) < 0.5
        masks |= fixed
        return values.masked_fill(masks, 0), masks

    def weighted(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        first_weight = weights.reshape(UPLOADS, -1)[:, 0]  # several weights cannot all have the same sum
        return first_weight.reshape(-1, *[1] * (values.dim() - 1)) * values

    def uploads(values: torch.Tensor, masks: torch.Tensor, weights: torch.Tensor) -> list[Any]:
        rows = []
        for value, mask, weight in zip(values.to(like), masks.to(like.device), weights, strict=True):
            fields = {vector_name: tree.Masked(value, mask) if is_masked else value}
            if weight_name is not None:
                fields[weight_name] = weight.to(weight_like)
            rows.append(upload._replace(**fields))
        return rows

    values, masks = vectors()
    other_values, other_masks = vectors()
    other_weights = weights.roll(1, 0)
    missing = (weighted(values, weights) - weighted(other_values, other_weights)).sum(0)
    last_weight = other_weights[-1].reshape(-1)[0]
    other_values[-1] += missing / last_weight
    return uploads(values, masks, weights), uploads(other_values, other_masks, other_weights)
