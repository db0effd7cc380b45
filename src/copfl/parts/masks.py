"""Vectors under a personal mask, each function in one pass over memory; True is personal."""

from __future__ import annotations

import torch
from torch import Tensor

from copfl.core.tree import Masked
from copfl.kernels.fused import elementwise


def shared(mask: Tensor, w: Tensor) -> Masked:
    """What is uploaded, with nothing where personal: g = w o (1 - m), Eq. (8)."""
    return Masked(elementwise(_shared, mask, w)[0], mask)


def weighed(upload: Masked, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What an upload adds to a mean over the sharers: Gamma (1 - m) w, Gamma (1 - m), and m."""
    w, weights, personal = elementwise(_weighed, *upload, weight)
    return w, weights, personal


def sharing(personal: Tensor, averaged: Tensor, clients: Tensor) -> dict[str, Tensor]:
    """How much is shared, by how many clients hold each entry as personal, and which ones this round averaged."""
    return {
        "shared": 1 - (personal / clients).mean(),  # of all clients' parameters, what is still shared
        "averaged": averaged.to(personal.dtype).mean(),  # of the server's parameters, what this round changed
        "shared_by_all": (personal == 0).to(personal.dtype).mean(),
    }


def _shared(mask: Tensor, w: Tensor) -> tuple[Tensor]:
    return (torch.where(mask, 0, w),)


def _weighed(values: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.where(mask, 0, weight)
    return counts * values, counts, mask.to(values.dtype)
