"""Small quadratic programmes with one variable per client."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_simplex(matrix: Tensor) -> Tensor:
    """argmin a' P a over a >= 0, sum(a) = 1, for a positive semidefinite P [m, m].

    Its direction is that of argmin 1/2 a' P a - 1' a over a >= 0: both ask for P a = 1 (up to scale) where a
    > 0 and for P a >= 1 elsewhere. With P = L L', that is the non-negative least squares problem |L' a - L^-1
    1|, for which scipy has an exact active-set solver.
    """
    from scipy.optimize import nnls

    factor, ones = _factor(matrix.detach().cpu().double().numpy()), np.ones(matrix.shape[0])
    weights, _ = nnls(factor.T, np.linalg.solve(factor, ones), maxiter=100 * len(ones))
    return torch.from_numpy(weights / weights.sum()).to(matrix.device, matrix.dtype)


def _factor(matrix: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """L of P = L L', with the smallest eigenvalue raised to zero and 1e-12 of the mean diagonal added."""
    matrix = (matrix + matrix.T) / 2
    lowest = max(0.0, -float(np.linalg.eigvalsh(matrix)[0]))
    # Of sizes: a variance that a client invented may be negative.
    lift = lowest + 1e-12 * float(np.trace(np.abs(matrix))) / len(matrix) + 1e-30
    factor: NDArray[np.floating[Any]] = np.linalg.cholesky(matrix + lift * np.eye(len(matrix)))
    return factor


def in_box(matrix: Tensor, gain: Tensor, limit: float, sweeps: int = 1000) -> Tensor:
    """argmax b' x - 1/2 x' G x over 0 <= x <= limit, for positive semidefinite G [..., m, m] and b [..., m].

    One coordinate after the other is set to its best value until nothing moves, or `sweeps` times. Unlike a
    factorisation, this also works for a singular G, such as from updates with fewer entries than clients.
    """
    matrix, gain = matrix.double(), gain.double()
    bends, x = matrix.diagonal(dim1=-2, dim2=-1), torch.zeros_like(gain)
    for _ in range(sweeps):
        before = x.clone()
        for i in range(x.shape[-1]):
            slope, bend = gain[..., i] - (matrix[..., i, :] * x).sum(-1), bends[..., i]
            best = x[..., i] + slope / torch.where(bend > 0, bend, 1)
            x[..., i] = torch.where(bend > 0, best, torch.where(slope > 0, limit, 0.0)).clamp(0, limit)
        if ((x - before).abs() <= 1e-14 * limit).all():
            break
    return x


def combination(means: Tensor, spread: Tensor) -> Tensor:
    """The weights [m, m] of the members in each mixture: a_i = argmin a' (diag(v) + D_i) a on the simplex.

    D_i[j, k] = <h_i - h_j, h_i - h_k> with the members' `means` h [m, ...] and the `spread` v [m] of these:
    the bias of the mixture and its variance. One Gram matrix gives them all; only differences matter, so the
    mean is subtracted.
    """
    rows = means.double() - means.double().mean(0)
    # The solver runs on the CPU: one small table each way.
    gram, variance = (rows @ rows.T).cpu(), torch.diag(spread.double().cpu())
    weights = [on_simplex(variance + gram + g[i] - g[:, None] - g) for i, g in enumerate(gram)]
    return (torch.stack(weights) if weights else gram).to(means.device)


def onto_simplex(rows: Tensor, allowed: Tensor) -> Tensor:
    """The nearest rows [m, n] that are not negative, add up to 1, and are zero where not allowed [n]."""
    values = torch.where(allowed, rows, -torch.inf)
    ordered, _ = values.sort(1, descending=True)
    count = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    excess = (torch.where(torch.isfinite(ordered), ordered, 0).cumsum(1) - 1) / count
    last = (ordered > excess).sum(1, keepdim=True).clamp(min=1) - 1
    return (values - excess.gather(1, last)).clamp(min=0)
