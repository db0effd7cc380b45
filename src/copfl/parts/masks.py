"""Vectors under a personal mask, each function in one pass over memory; True is personal."""

from __future__ import annotations

import torch
from torch import Tensor

from copfl.core.tree import Masked
from copfl.kernels.fused import elementwise


def shared(mask: Tensor, w: Tensor) -> Masked:
    """The uploaded vector, zero where personal: g = w o (1 - m), Eq. (8)."""
    return Masked(elementwise(_shared, mask, w)[0], mask)


def weighted(upload: Masked, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The summands of a mean over the sharers: Gamma (1 - m) w, Gamma (1 - m), and m."""
    w, weights, personal = elementwise(_weighted, *upload, weight)
    return w, weights, personal


def sharing_metrics(personal: Tensor, averaged: Tensor, clients: Tensor) -> dict[str, Tensor]:
    """The shared fractions, from how many clients keep each entry personal and what the round averaged."""
    return {
        "shared": 1 - (personal / clients).mean(),  # of all clients' parameters
        "averaged": averaged.to(personal.dtype).mean(),  # of the server's parameters
        "shared_by_all": (personal == 0).to(personal.dtype).mean(),
    }


def _shared(mask: Tensor, w: Tensor) -> tuple[Tensor]:
    return (torch.where(mask, 0, w),)


def _weighted(values: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = torch.where(mask, 0, weight)
    return weights * values, weights, mask.to(values.dtype)
