"""The two small quadratic programmes of the rivals, a variable per client, solved exactly: no step size, no tolerance.

Both are least squares under a factor of the matrix, and scipy holds exact active-set solvers for those.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Matrix = NDArray[np.float64]


def on_simplex(matrix: Tensor) -> Tensor:
    """argmin a' P a over a >= 0, sum(a) = 1, for a positive semidefinite P [m, m].

    Its direction is that of argmin 1/2 a' P a - 1' a over a >= 0: both ask for P a = 1 (up to scale) where a > 0 and
    for P a >= 1 elsewhere. With P = L L', that is the non-negative least squares problem |L' a - L^-1 1|.
    """
    from scipy.optimize import nnls

    factor, ones = _factor(matrix), np.ones(matrix.shape[0])
    weights, _ = nnls(factor.T, np.linalg.solve(factor, ones), maxiter=100 * len(ones))
    return _like(weights / weights.sum(), matrix)


def in_box(matrix: Tensor, gain: Tensor, limit: float) -> Tensor:
    """argmax b' x - 1/2 x' G x over 0 <= x <= limit, for a positive semidefinite G [m, m] and b [m]."""
    from scipy.optimize import lsq_linear

    if limit == 0:
        return torch.zeros_like(gain)
    factor = _factor(matrix)
    target = np.linalg.solve(factor, gain.detach().cpu().double().numpy())
    return _like(lsq_linear(factor.T, target, bounds=(0.0, limit), method="bvls", max_iter=100 * len(target)).x, matrix)


def _factor(matrix: Tensor) -> Matrix:
    """L of P = L L'. What rounding may have taken below zero is lifted by 1e-12 of the mean diagonal."""
    exact = matrix.detach().cpu().double().numpy()
    exact = (exact + exact.T) / 2
    lift = 1e-12 * float(np.trace(exact)) / len(exact) + 1e-30
    lowest = float(np.linalg.eigvalsh(exact)[0])
    factor: Matrix = np.linalg.cholesky(exact + (lift + max(0.0, -lowest)) * np.eye(len(exact)))
    return factor


def _like(values: Matrix, other: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(other.device, other.dtype)
