"""L-BFGS (Liu and Nocedal 1989) one gradient at a time: who has the gradient may be elsewhere.

`begun` has a first point. Whoever gets the gradient at `point` passes it to `moved`, which has the next point. A step
whose end is uphill too steeply is shortened: its length is where the slope between both ends would be zero. For convex
objectives that needs no value of the objective, and it allows an objective that changes slowly on the way. What such a
change would make of the curvature is no curvature: see `least`, and a step is at most LONGER times the last one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MEMORY = 8  # pairs of steps and changes of the gradient
STEEP = 0.9  # of the slope at the begin of a step, which the slope at its end may have uphill
LONGER = 10.0  # than the last step a step may be
TINY = 1e-30
SHORTENED = 0.1, 0.7  # of its length that a step keeps, at least and at most


class Search(NamedTuple):
    point: Tensor  # [d], whose gradient is asked for
    begin: Tensor  # [d], of the step whose end is `point`
    gradient: Tensor  # [d], at its begin
    direction: Tensor  # [d], point = begin + length * direction
    length: Tensor  # []
    steps: Tensor  # [MEMORY, d], the latest first
    changes: Tensor  # [MEMORY, d], of the gradient over these steps
    accepted: Tensor  # [], the steps that were accepted


def begun(point: Tensor) -> Search:
    """A search that begins at this point [d]."""
    zero, none = torch.zeros_like(point), point.new_zeros(MEMORY, len(point))
    return Search(point, point, zero, zero, point.new_ones(()), none, none, point.new_zeros(()))


def moved(search: Search, gradient: Tensor, least: Tensor | float = 0.0) -> Search:
    """The search after this gradient [d] at its point; unchanged if it is not finite.

    Args:
        search: The search before it.
        gradient: Of the objective, which may change a little from step to step.
        least: Curvature that the objective has in every direction. A pair with less says how the objective changed, and
            not how it is curved; a step by it could be of any length.
    """
    before, after = search.gradient @ search.direction, gradient @ search.direction
    is_first = search.accepted == 0
    is_accepted = is_first | (after <= STEEP * before.abs())
    step, change = search.point - search.begin, gradient - search.gradient
    is_pair = is_accepted & ~is_first & (step @ change > least * (step @ step))
    steps, changes = (
        torch.where(is_pair, torch.cat([new[None], old[:-1]]), old)
        for new, old in ((step, search.steps), (change, search.changes))
    )
    newton = -_times_inverse(steps, changes, gradient)
    longest = torch.where(step.norm() > 0, LONGER * step.norm(), torch.inf)
    newton = newton * (longest / newton.norm().clamp(min=TINY)).clamp(max=1)
    direction = torch.where(is_accepted, newton, search.direction)
    secant = (before / torch.where(is_accepted, 1, before - after)).clamp(*SHORTENED)
    length = torch.where(is_accepted, 1, secant * search.length)
    begin = torch.where(is_accepted, search.point, search.begin)
    at_begin = torch.where(is_accepted, gradient, search.gradient)
    next = Search(
        begin + length * direction,
        begin,
        at_begin,
        direction,
        length,
        steps,
        changes,
        search.accepted + is_accepted,
    )
    is_known = torch.isfinite(gradient).all()
    return Search(*(torch.where(is_known, new, old) for new, old in zip(next, search, strict=True)))


def _times_inverse(steps: Tensor, changes: Tensor, gradient: Tensor) -> Tensor:
    """The gradient times the inverse Hessian that these pairs describe: the two loops of the paper.

    Without a pair the step has the gradient's direction, and a length of 1.
    """
    product = (steps * changes).sum(1)  # 0: there is no such pair
    weight = torch.where(product > 0, 1 / torch.where(product > 0, product, 1), 0)
    factors, result = [], gradient
    for s, y, rho in zip(steps, changes, weight, strict=True):
        factors.append(rho * (s @ result))
        result = result - factors[-1] * y
    curvature = changes[0] @ changes[0]
    has_pair = curvature > 0
    first = torch.where(
        has_pair, product[0] / torch.where(has_pair, curvature, 1), 1 / gradient.norm().clamp(min=TINY)
    )
    result = first * result
    for s, y, rho, factor in reversed(list(zip(steps, changes, weight, factors, strict=True))):
        result = result + s * (factor - rho * (y @ result))
    return result
