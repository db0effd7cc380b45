"""Boosted trees by sums over sites: bins, histograms, splits (Friedman 2001; Chen and Guestrin 2016).

A tree is grown level by level. Each site adds up its rows' first and second derivatives of the loss, by node,
column and bin; the sum over sites is that of all rows in one place, and the best split of a node depends on it alone:

  gain = GL²/(HL + λ) + GR²/(HR + λ) - G²/(H + λ)          summed over the outputs
  value of a leaf = rate · G/(H + λ)                       G: of the negative derivatives
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.core.criteria import Criterion, is_log_likelihood, standardised_targets
from copfl.errors import UsageError
from copfl.kernels.draws import mixed

CELLS = 512  # of the grid from which the bins are made
NEVER = 1e30  # the threshold of a node that is not split; a sum of many is finite in single precision
LONGEST_STEP = 4.0  # of an intercept, in a step of Newton's method
TURNS = 4  # such steps; of values one is exact
FIRST_RATIO = -1.5  # log τ²/σ² before the first trees
SEED = 53  # of the columns that a tree may use


# -- targets -------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A kind of targets as η [n, q] that trees add up to."""

    outputs: int  # q
    contrasts: Tensor | None  # [outputs of the model, q], None: η are the model's outputs
    has_scale: bool  # whether the residuals have a variance to be estimated; else it is 1
    derivatives: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # η, y -> -∂loss/∂η, ∂²loss/∂η² [n, q]
    means: Callable[[Tensor], Tensor]  # y -> [n, q], whose mean over rows the first prediction has
    start: Callable[[Tensor], Tensor]  # that mean -> η

    def outputs_of(self, eta: Tensor) -> Tensor:
        """The model's outputs [..., K] for η [..., q]."""
        return eta if self.contrasts is None else eta @ self.contrasts.T


@lru_cache(maxsize=16)  # a recorded program must not copy from the host
def _halves(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Logits of two classes from their log odds."""
    return torch.tensor([[-0.5], [0.5]], dtype=dtype).to(device)


def target_of(criterion: Criterion, classes: int, like: Tensor) -> Target:
    """How trees learn targets of this kind; UsageError if they do not.

    Two classes have their log odds. More have an output each, whose second derivative is K/(K-1) times that of the
    loss (Friedman 2001), so that two outputs would learn as one does.

    Args:
        criterion: Of the task.
        classes: Or labels, or values.
        like: Of the device and the precision of the sums.
    """
    if criterion.kind in ("next_token", "survival") or not is_log_likelihood(criterion):
        raise UsageError(
            "trees predict values by squared error, or classes and labels by plain cross-entropy; leave out other "
            "losses, weights and smoothing, or choose another algorithm"
        )
    if criterion.kind == "regression":

        def values(y: Tensor) -> Tensor:
            return standardised_targets(criterion, y.to(like.dtype)).reshape(len(y), classes)

        return Target(
            classes,
            None,
            True,
            lambda eta, y: (values(y) - eta, torch.ones_like(eta)),
            values,
            lambda mean: mean,
        )
    if criterion.kind == "classification" and classes > 2:
        factor = classes / (classes - 1)

        def of_classes(eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            p = torch.softmax(eta, -1)
            return indicators(y) - p, factor * p * (1 - p)

        def indicators(y: Tensor) -> Tensor:
            return F.one_hot(y.long(), classes).to(like.dtype)

        return Target(classes, None, False, of_classes, indicators, lambda mean: mean.clamp(min=1e-6).log())

    def labels(y: Tensor) -> Tensor:
        return y.to(like.dtype).reshape(len(y), -1)

    def of_labels(eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.sigmoid(eta)
        return labels(y) - p, p * (1 - p)

    contrasts = _halves(like.device, like.dtype) if criterion.kind == "classification" else None
    outputs = 1 if contrasts is not None else classes
    return Target(
        outputs, contrasts, False, of_labels, labels, lambda mean: mean.clamp(1e-6, 1 - 1e-6).logit()
    )


# -- trees ---------------------------------------------------------------------------------------------------


class Forest(NamedTuple):
    """Complete trees of one depth. A node that is not split sends all its rows to the left."""

    feature: Tensor  # [T, 2^depth - 1] int32
    threshold: Tensor  # [T, 2^depth - 1]: a row with more goes to the right
    value: Tensor  # [T, 2^depth, q], of the leaves
    bias: Tensor  # [q]

    @property
    def depth(self) -> int:
        return self.value.shape[1].bit_length() - 1

    def leaves(self, x: Tensor) -> Tensor:
        """[n, T]: the leaf of each row in each tree."""
        trees, splits = self.feature.shape
        feature, threshold = self.feature.flatten().long(), self.threshold.flatten()
        first = splits * torch.arange(trees, device=x.device)
        node = torch.zeros_like(first).expand(len(x), trees)
        for level in range(self.depth):
            at = (first + (2**level - 1) + node).flatten()
            column, limit = (table.gather(0, at).view_as(node) for table in (feature, threshold))
            node = 2 * node + (x.gather(1, column) > limit)
        return node

    def eta(self, leaves: Tensor, like: Tensor) -> Tensor:
        """[n, q]: what the trees add up to, in the precision of `like`."""
        trees, size, _ = self.value.shape
        at = (size * torch.arange(trees, device=leaves.device) + leaves).flatten()
        values = self.value.to(like.dtype).flatten(0, 1).unbind(1)
        said = [column.gather(0, at).view_as(leaves).sum(1) for column in values]
        return self.bias.to(like.dtype) + torch.stack(said, 1)


# -- bins ----------------------------------------------------------------------------------------------------


class Bins(NamedTuple):
    """A row is in bin b of a column where b edges are below its value."""

    centre: Tensor  # [columns], the mean
    spread: Tensor  # [columns], the standard deviation
    edges: Tensor  # [columns, bins - 1]

    def of(self, x: Tensor) -> Tensor:
        """[n, columns]: the bin of each value."""
        return _place(self.edges, x.T).T

    def cells(self, x: Tensor) -> Tensor:
        """[n, columns]: the cell of each value in the grid from which the edges are made."""
        deviations = (x - self.centre) / self.spread
        return ((deviations / (1 + deviations.abs()) + 1) * (CELLS / 2)).long().clamp(max=CELLS - 1)

    def scaled(self, rows: Tensor, sums: Tensor, squares: Tensor) -> "Bins":
        """Those whose grid has this mean and deviation."""
        mean = sums / rows.clamp(min=1)
        variance = squares / rows.clamp(min=1) - mean**2
        is_constant = variance <= 1e-12 * (1 + mean**2)
        spread = torch.where(is_constant, 1, variance.clamp(min=1e-300).sqrt())
        # In single precision: the order in which sites are added up has no effect.
        return self._replace(centre=mean.float().to(self.centre), spread=spread.float().to(self.spread))

    def with_edges(self, counts: Tensor) -> "Bins":
        """Those whose bins hold equally many rows.

        A column with no more occupied cells than bins has a bin for each.

        Args:
            counts: [columns, CELLS] of rows.
        """
        bins = self.edges.shape[1] + 1
        below = counts.cumsum(1)
        middle = (below - counts / 2) / below[:, -1:].clamp(min=1)
        occupied = counts > 0.5
        number = occupied.long().cumsum(1) - 1
        by_rows = (middle * bins).long().clamp(max=bins - 1)
        bin = torch.where(number[:, -1:] < bins, number, by_rows)
        bin = torch.where(occupied, bin, -1).cummax(1)[0]
        wanted = torch.arange(1, bins, device=counts.device)
        # The first cell in this bin or a later one.
        first = _place(bin, wanted + 0 * bin[:, : bins - 1])
        place = torch.arange(CELLS, device=counts.device)
        last = torch.where(occupied, place, -1).cummax(1)[0]  # the last occupied cell up to here
        before = last.gather(1, (first - 1).clamp(0, CELLS - 1)).clamp(min=0)
        scaled = (before + 1 + first).to(counts.dtype) / CELLS - 1  # the middle of the gap
        deviations = (scaled / (1 - scaled.abs()).clamp(min=1e-9)).to(self.edges)
        edges = self.centre[:, None] + self.spread[:, None] * deviations
        return self._replace(edges=torch.where(first < CELLS, edges, NEVER))


def _place(sorted: Tensor, values: Tensor) -> Tensor:
    """How many of a sorted row are below each value of the same row."""
    first, second = (t.clone(memory_format=torch.contiguous_format) for t in (sorted, values))
    return torch.searchsorted(first, second)


def histogram(index: Sequence[Tensor], numbers: Sequence[Tensor], room: int) -> Tensor:
    """[columns, room]: sums of numbers of rows.

    Args:
        index: [n, columns] each, where in the room of its column a row adds its number.
        numbers: [n, columns] or [n, 1] each.
        room: Of a column.
    """
    columns = index[0].shape[1]
    first = room * torch.arange(columns, device=index[0].device)
    sums = numbers[0].new_zeros(columns * room)
    for places, values in zip(index, numbers, strict=True):
        sums = sums.scatter_add(0, (first + places).flatten(), values.expand(places.shape).flatten())
    return sums.view(columns, room)


def merged(sums: Tensor, least: int) -> Tensor:
    """[..., channels, bins]: the sums, where bins of few rows are added to a neighbour; every sum is of enough rows.

    First of two bins, then of two pairs, up to all bins: a half with too few rows has them in one bin, which is added
    to the nearest bin of the other half that has a row. What has too few rows in all is 0.

    Args:
        sums: Of some bins; the last channel counts their rows.
        least: Rows of a bin that has one.
    """
    bins = sums.shape[-1]
    width = 1 << (bins - 1).bit_length()
    blocks, size = F.pad(sums, (0, width - bins)), 1
    while size < width:
        pairs = blocks.reshape(*blocks.shape[:-1], width // (2 * size), 2, size)
        left, right = pairs.unbind(-2)  # [..., channels, pairs, bins]
        has_left, has_right = (half[..., -1, :, :] > 0.5 for half in (left, right))
        rows = [half[..., -1, :, :].sum(-1, keepdim=True) for half in (left, right)]
        few_left, few_right = ((own > 0.5) & (own < least - 0.5) for own in rows)
        to_right = (few_left & has_right.any(-1, keepdim=True))[..., None, :, :]
        to_left = (few_right & has_left.any(-1, keepdim=True))[..., None, :, :] & ~to_right
        first = (has_right & (has_right.cumsum(-1) == 1))[..., None, :, :]
        last = (has_left & (has_left.flip(-1).cumsum(-1).flip(-1) == 1))[..., None, :, :]
        moved = [half.sum(-1, keepdim=True) for half in (left, right)]
        with_left = torch.where(to_right & first, right + moved[0], right)
        with_right = torch.where(to_left & last, left + moved[1], left)
        halves = torch.where(to_right, 0, with_right), torch.where(to_left, 0, with_left)
        blocks, size = torch.stack(halves, -2).flatten(-3), 2 * size
    return torch.where((blocks.sum(-1)[..., -1:] < least - 0.5)[..., None], 0, blocks)[..., :bins]


# -- splits --------------------------------------------------------------------------------------------------


class Splits(NamedTuple):
    """The best split of each node of a level."""

    feature: Tensor  # [nodes]
    threshold: Tensor  # [nodes]
    left: Tensor  # [nodes, 2q + 1], sums of the rows that go to the left
    right: Tensor


def best_splits(sums: Tensor, edges: Tensor, allowed: Tensor, penalty: float, least: float) -> Splits:
    """The splits with the largest gain.

    Args:
        sums: [2q + 1, columns, nodes, bins]: of the negative derivatives, the second ones, and of rows.
        edges: [columns, bins - 1].
        allowed: [columns] bool, which columns may split.
        penalty: λ.
        least: Rows of a leaf.
    """
    outputs, (_, columns, nodes, bins) = len(sums) // 2, sums.shape
    below = sums.cumsum(3)
    whole = below[:, 0, :, -1]  # [2q + 1, nodes]
    left = below[..., :-1].transpose(1, 2).flatten(2)  # [2q + 1, nodes, columns · (bins - 1)]
    right = whole[:, :, None] - left

    def score(sums: Tensor) -> Tensor:
        g, h = sums[:outputs], sums[outputs : 2 * outputs].clamp(min=0)
        return (g**2 / (h + penalty).clamp(min=1e-12)).sum(0)

    gain = score(left) + score(right) - score(whole)[:, None]
    limits, place = edges.flatten(), torch.arange(columns * (bins - 1), device=edges.device)
    possible = (left[-1] >= least - 0.5) & (right[-1] >= least - 0.5)
    possible = possible & (limits < NEVER) & allowed[place // (bins - 1)]
    gain = torch.where(possible, gain, -torch.inf)
    best = gain.argmax(1)
    is_split = gain.amax(1) > 1e-9 * score(whole).clamp(min=1e-9)

    def at_best(sums: Tensor) -> Tensor:
        return sums.gather(2, best[:, None].expand(len(sums), nodes, 1))[..., 0].T

    keep = is_split[:, None]
    return Splits(
        torch.where(is_split, best // (bins - 1), 0),
        torch.where(is_split, limits.gather(0, best), NEVER),
        torch.where(keep, at_best(left), whole.T),
        torch.where(keep, at_best(right), 0),
    )


def with_level(
    forest: Forest, tree: Tensor, level: Tensor, splits: Splits, penalty: float, rate: float
) -> Forest:
    """The forest with one more level of a tree; its last level gives the leaves their values.

    Args:
        forest: The trees so far.
        tree: [] int64, which one grows.
        level: [] int64, of the nodes that are split.
        splits: Of these nodes.
        penalty: λ.
        rate: The fraction of a Newton step that a leaf takes.
    """
    trees, inner = forest.feature.shape
    device = forest.feature.device
    is_tree = torch.arange(trees, device=device) == tree
    place = torch.arange(inner, device=device)
    level_of = sum(((place + 1) >> n > 0).long() for n in range(1, forest.depth)) + torch.zeros_like(place)
    slot = place + 1 - (1 << level_of)
    here = is_tree[:, None] & (level_of == level)
    outputs = forest.bias.shape[0]
    both = torch.stack([splits.left, splits.right], 1).flatten(0, 1)  # [2 nodes, 2q + 1]
    g, h = both[:, :outputs], both[:, outputs : 2 * outputs].clamp(min=0)
    value = (rate * g / (h + penalty).clamp(min=1e-12)).to(forest.value)
    is_last = is_tree & (level == forest.depth - 1)
    return forest._replace(
        feature=torch.where(here, splits.feature[slot].to(forest.feature), forest.feature),
        threshold=torch.where(here, splits.threshold[slot].to(forest.threshold), forest.threshold),
        value=torch.where(is_last[:, None, None], value, forest.value),
    )


def allowed_columns(tree: Tensor, columns: int, fraction: float, seed: int) -> Tensor:
    """[columns] bool: which columns a tree may use, a fraction of them.

    Args:
        tree: [] int64, its number.
        columns: How many there are.
        fraction: Of them.
        seed: Of the choice.
    """
    place = torch.arange(columns, device=tree.device)
    rank = mixed(SEED, seed, tree, place).argsort().argsort()
    return rank < max(1, math.ceil(fraction * columns))


# -- intercepts ----------------------------------------------------------------------------------------------


def own_intercept(
    target: Target, eta: Tensor, y: Tensor, counts: Tensor, log_ratio: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """u [q], the mode of a site's intercept u ~ N(0, τ²) beside what the trees say, and its curvature.

    Args:
        target: The kind of targets.
        eta: [n, q], of the trees.
        y: The targets.
        counts: [n], 0 of a row that does not count.
        log_ratio: [q], log τ²/σ².
        start: [q], where the steps begin.
    """
    precision, u = torch.exp(-log_ratio), start
    curvature = precision
    for _ in range(1 if target.has_scale else TURNS):
        e, h = target.derivatives(eta + u, y)
        curvature = (h * counts[:, None]).sum(0) + precision
        slope = (e * counts[:, None]).sum(0) - precision * u
        u = u + (slope / curvature).clamp(-LONGEST_STEP, LONGEST_STEP)
    return u, curvature
