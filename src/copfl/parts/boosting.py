"""Boosted trees by sums over sites: bins, histograms, splits (Friedman 2001; Chen and Guestrin 2016).

A tree is grown level by level. Each site adds up its rows' first and second derivatives of the loss, by node,
column and bin; the sum over sites is that of all rows in one place, and the best split of a node depends on it alone:

  gain = GL²/(HL + λ) + GR²/(HR + λ) - G²/(H + λ)          summed over the outputs
  value of a leaf = rate · G/(H + λ)                       G: of the negative derivatives

By absolute errors the value of a leaf is rate · n/(n + λ) times the median of its n rows' residuals, from counts of
residuals in cells, which add up over sites as well.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.core.criteria import Criterion, is_absolute, is_log_likelihood, standardised_targets
from copfl.errors import UsageError
from copfl.kernels.draws import mixed
from copfl.kernels.fused import sums_by_place

CELLS = 512  # of a column, from whose counts the bins are made
KNOTS = 16  # intervals of cells of one width
LAST = 0x7F7FFFFF  # the place of the largest finite number among all
NEVER = 1e30  # the threshold of a node that is not split; a sum of many is finite in single precision
LONGEST_STEP = 4.0  # of an intercept, in a step of Newton's method
TURNS = 4  # such steps; of values one is exact
FIRST_RATIO = -1.5  # log τ²/σ² before the first trees
SEED = 53  # of the columns that a tree may use
# Derivatives are multiples of 1/UNITS. So the sum of a bin is exact in double precision, up to 2^53 units: whatever the
# order of rows and sites is, it has the same bits.
UNITS = 2.0**36


# -- targets -------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A kind of targets as η [n, q] that trees add up to."""

    outputs: int  # q
    contrasts: Tensor | None  # [outputs of the model, q], None: η are the model's outputs
    has_scale: bool  # whether the residuals have a variance to be estimated; else it is 1
    derivatives: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # η, y -> -∂loss/∂η, ∂²loss/∂η² [n, q]
    means: Callable[[Tensor], Tensor]  # y -> [n, q], whose mean over rows the first prediction has
    start: Callable[[Tensor], Tensor]  # that mean -> η
    by_median: bool = False  # whether a leaf has the median of the residuals, and not a Newton step
    trees: int = 1  # of a step: one for each class, or one with a value for each output

    def outputs_of(self, eta: Tensor) -> Tensor:
        """The model's outputs [..., K] for η [..., q]."""
        return eta if self.contrasts is None else eta @ self.contrasts.T


def in_units(numbers: Tensor) -> Tensor:
    """The nearest multiples of 1/UNITS."""
    return (numbers * UNITS).round() / UNITS


def parted(numbers: Tensor, trees: int) -> list[Tensor]:
    """[n, q] of outputs, as [n, q / trees] for each tree of a step."""
    return list(numbers.reshape(len(numbers), trees, -1).unbind(1))


@lru_cache(maxsize=16)  # a recorded program must not copy from the host
def _halves(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Logits of two classes from their log odds."""
    return torch.tensor([[-0.5], [0.5]], dtype=dtype).to(device)


def target_of(criterion: Criterion, classes: int, like: Tensor) -> Target:
    """How trees learn targets of this kind; UsageError if they do not.

    Two classes have their log odds. More have an output each, and in every step a tree each; its second derivative is
    K/(K-1) times that of the loss (Friedman 2001), so that two outputs would learn as one does.

    Args:
        criterion: Of the task.
        classes: Or labels, or values.
        like: Of the device and the precision of the sums.
    """
    by_median = criterion.kind == "regression" and is_absolute(criterion)
    if criterion.kind in ("next_token", "survival") or not (by_median or is_log_likelihood(criterion)):
        raise UsageError(
            "trees predict values by squared or absolute error, or classes and labels by plain cross-entropy; leave "
            "out other losses, weights and smoothing, or choose another algorithm"
        )
    if criterion.kind == "regression":

        def values(y: Tensor) -> Tensor:
            return standardised_targets(criterion, y.to(like.dtype)).reshape(len(y), classes)

        def of_values(eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            residuals = values(y) - eta
            return residuals.sign() if by_median else residuals, torch.ones_like(eta)

        return Target(classes, None, True, of_values, values, lambda mean: mean, by_median)
    if criterion.kind == "classification" and classes > 2:
        factor = classes / (classes - 1)

        def of_classes(eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            p = torch.softmax(eta, -1)
            return indicators(y) - p, factor * p * (1 - p)

        def indicators(y: Tensor) -> Tensor:
            return F.one_hot(y.long(), classes).to(like.dtype)

        def start(mean: Tensor) -> Tensor:
            return mean.clamp(min=1e-6).log()

        return Target(classes, None, False, of_classes, indicators, start, trees=classes)

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
    """Complete trees of one depth. A node that is not split sends all its rows to the left.

    A step has one tree with a value for each of q outputs, or a tree for each.
    """

    feature: Tensor  # [T, 2^depth - 1] int32
    threshold: Tensor  # [T, 2^depth - 1]: a row with more goes to the right
    value: Tensor  # [T, 2^depth, q / trees of a step], of the leaves
    bias: Tensor  # [q]

    @property
    def depth(self) -> int:
        return self.value.shape[1].bit_length() - 1

    @property
    def each(self) -> int:
        """Trees of a step."""
        return self.bias.shape[0] // self.value.shape[2]

    @property
    def steps(self) -> int:
        return len(self.value) // self.each

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

    def after_level(self, step: int, level: int, leaf: Tensor, x: Tensor) -> Tensor:
        """[n, trees of a step]: the leaves, where only the splits of the levels before this one were made."""
        trees = torch.arange(step * self.each, (step + 1) * self.each, device=x.device)
        at = self.feature.shape[1] * trees + (2**level - 1) + (leaf >> (self.depth - level))
        is_right = x.gather(1, self.feature.flatten()[at].long()) > self.threshold.flatten()[at]
        return leaf + (is_right.long() << (self.depth - 1 - level))

    def eta(self, leaves: Tensor, like: Tensor) -> Tensor:
        """[n, q]: what the trees add up to, one after the other, in the precision of `like`."""
        trees, size, _ = self.value.shape
        at = (size * torch.arange(trees, device=leaves.device) + leaves).flatten()
        columns = []
        biases = self.bias.to(like).view(self.each, -1).unbind(1)
        for values, bias in zip(self.value.to(like).flatten(0, 1).unbind(1), biases, strict=True):
            column = bias.expand(len(leaves), self.each)
            for said in values.gather(0, at).view(len(leaves), -1, self.each).unbind(1):
                column = column + said
            columns.append(column)
        return torch.stack(columns, 2).flatten(1)

    def said(self, step: int, leaf: Tensor, like: Tensor) -> Tensor:
        """[n, q]: what the trees of a step say of rows in these leaves [n, trees of a step]."""
        values = self.value[step * self.each : (step + 1) * self.each].to(like)
        parts = [of_tree[at] for of_tree, at in zip(values, leaf.unbind(1), strict=True)]
        return torch.cat(parts, 1)


# -- bins ----------------------------------------------------------------------------------------------------


class Bins(NamedTuple):
    """A row is in bin b of a column where b edges are below its value.

    The edges are chosen from counts of rows in CELLS cells of a column. Cells are of float32 numbers in their order,
    `order_of`, so the first ones, about one for each power of two, are for columns of any unit. The next ones lie
    where the rows are: a few numbers far away, or a site in another unit, cost the others nothing.
    """

    knots: Tensor  # [columns, KNOTS + 1] int32, orders: KNOTS intervals of CELLS / KNOTS cells of equal width each
    edges: Tensor  # [columns, bins - 1]

    def of(self, x: Tensor) -> Tensor:
        """[n, columns]: the bin of each value."""
        return _place(self.edges, x.T).T

    def cells(self, x: Tensor) -> Tensor:
        """[n, columns]: the cell of each value."""
        each, order = CELLS // KNOTS, order_of(x).T.contiguous()
        knots = self.knots.long()
        inner = knots[:, 1:-1].contiguous()
        interval = torch.searchsorted(inner, order, right=True)
        start, end = (knots.gather(1, interval + side) for side in (0, 1))
        inside = each * (order - start) // (end - start).clamp(min=1)
        return (each * interval + inside.clamp(0, each - 1)).T

    def _starts(self) -> Tensor:
        """[columns, CELLS + 1]: the order with which each cell starts, and that with which the last one ends."""
        each = CELLS // KNOTS
        knots = self.knots.long()
        width = (knots[:, 1:] - knots[:, :-1])[..., None]
        number = torch.arange(each, device=width.device)
        starts = knots[:, :-1, None] + (number * width + each - 1) // each
        return torch.cat([starts.flatten(1), knots[:, -1:]], 1)

    def moved(self, counts: Tensor) -> "Bins":
        """Those whose next cells lie where the rows are: half as many as the rows say, half as the cells with a row.

        Args:
            counts: [columns, CELLS] of rows.
        """
        starts, occupied = self._starts(), (counts > 0.5).to(counts)
        share = counts / counts.sum(1, keepdim=True).clamp(min=1)
        share = (share + occupied / occupied.sum(1, keepdim=True).clamp(min=1)) / 2
        below = share.cumsum(1)
        wanted = torch.arange(1, KNOTS, device=counts.device) / KNOTS + 0 * below[:, :1]
        cell = _place(below, wanted).clamp(max=CELLS - 1)
        inside = (wanted - (below - share).gather(1, cell)) / share.gather(1, cell).clamp(min=1e-12)
        start, end = starts.gather(1, cell), starts.gather(1, cell + 1)
        inner = start + (inside.clamp(0, 1) * (end - start)).long()
        first = occupied.argmax(1, keepdim=True)
        last = CELLS - 1 - occupied.flip(1).argmax(1, keepdim=True)
        low, high = starts.gather(1, first), starts.gather(1, last + 1)
        knots = torch.cat([low, inner.clamp(low, high), high], 1).int()
        return self._replace(knots=torch.where(occupied.any(1, keepdim=True), knots, self.knots))

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
        # The middle of the gap; no number of the first cell is at its edge.
        starts = self._starts()
        low, high = starts.gather(1, before + 1) - 1, starts.gather(1, first.clamp(max=CELLS)) - 1
        middle = (number_of(low).double() + number_of(high).double()) / 2
        edges = torch.minimum(middle.float(), number_of(high)).to(self.edges)
        return self._replace(edges=torch.where(first < CELLS, edges, NEVER))


def bins_of(columns: int, bins: int, like: Tensor) -> Bins:
    """Those before the first counts: no edge, and cells for all numbers.

    Args:
        columns: Of the table.
        bins: Of a column.
        like: A tensor on the device, in the precision of the columns.
    """
    knots = torch.linspace(-LAST, LAST + 1, KNOTS + 1, dtype=torch.float64, device=like.device)
    return Bins(knots.round().int().repeat(columns, 1), like.new_full((columns, bins - 1), NEVER))


class _SameBits(torch.autograd.Function):
    """The bits of each number as another type of the same size; before torch 2.13 vmap has no such `view`."""

    @staticmethod
    def forward(x: Tensor, type: torch.dtype) -> Tensor:
        return x.view(type)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: integers have no gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, type: torch.dtype) -> Any:
        return _SameBits.apply(x, type), in_dims[0]  # type: ignore[no-untyped-call]


def order_of(x: Tensor) -> Tensor:
    """The place of each number among all numbers in single precision; that of 0 is 0."""
    bits: Tensor = _SameBits.apply(x.float().contiguous(), torch.int32).long()  # type: ignore[no-untyped-call]
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits).clamp(-LAST, LAST)


def number_of(order: Tensor) -> Tensor:
    """The number at this place."""
    numbers: Tensor = _SameBits.apply(order.abs().clamp(max=LAST).int(), torch.float32)  # type: ignore[no-untyped-call]
    return torch.where(order < 0, -numbers, numbers)


def cell_of(deviations: Tensor) -> Tensor:
    """The place of each number in a grid of CELLS over all numbers, which is finest around 0."""
    return ((deviations / (1 + deviations.abs()) + 1) * (CELLS / 2)).long().clamp(max=CELLS - 1)


def _unsquashed(place: Tensor) -> Tensor:
    """The number at a place between -1 and 1 of that grid."""
    return place / (1 - place.abs()).clamp(min=1e-9)


def median_of_cells(counts: Tensor) -> Tensor:
    """[...]: the median of numbers that were counted in cells [..., CELLS]; of none 0.

    Inside of its cell it is as if the numbers there were equally far from each other.
    """
    below = counts.cumsum(-1)
    half = below[..., -1:] / 2
    cell = (below < half).long().sum(-1, keepdim=True).clamp(max=CELLS - 1)
    inside = counts.gather(-1, cell)
    before = below.gather(-1, cell) - inside
    place = cell + (half - before) / inside.clamp(min=1e-9)
    return torch.where(half > 0, _unsquashed(place / (CELLS / 2) - 1), 0)[..., 0]


def median(numbers: Tensor, counts: Tensor) -> Tensor:
    """[q]: the lower median of each column of numbers [n, q] of the rows whose count is not 0; of none 0."""
    ordered = torch.where(counts[:, None] > 0, numbers, torch.inf).sort(0)[0]
    place = ((counts.sum() - 1) / 2).long().clamp(min=0)
    found = ordered.gather(0, place.expand(1, numbers.shape[1]))[0]
    return torch.where(counts.sum() > 0, found, 0)


def _place(sorted: Tensor, values: Tensor) -> Tensor:
    """How many of a sorted row are below each value of the same row."""
    first, second = (t.clone(memory_format=torch.contiguous_format) for t in (sorted, values))
    return torch.searchsorted(first, second)


def histogram(index: Tensor, numbers: Sequence[Tensor], room: int) -> Tensor:
    """[len(numbers), columns, room]: sums of numbers of rows.

    Args:
        index: [n, columns], where in the room of its column a row adds its numbers.
        numbers: [n, columns] or [n, 1] each.
        room: Of a column.
    """
    columns = index.shape[1]
    place = (index + room * torch.arange(columns, device=index.device)).flatten()
    sums: dict[int, Tensor] = {}  # the second derivatives of values are the counts of rows
    for one in numbers:
        if id(one) not in sums:
            sums[id(one)] = sums_by_place(place, one.expand(index.shape).flatten(), columns * room)
    return torch.stack([sums[id(one)] for one in numbers]).view(-1, columns, room)


def merged(sums: Tensor, least: int) -> Tensor:
    """[..., channels, bins]: the sums, where bins of few rows are added to a neighbour; every sum is of enough rows.

    First of two bins, then of two pairs, up to all bins: a half with too few rows has them in one bin, which is added
    to the nearest bin of the other half that has a row. What has too few rows in all is 0.

    Args:
        sums: Of some bins; the last channel counts their rows.
        least: Rows of a bin that has one.
    """
    if least <= 1:
        return sums
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
    gain: Tensor  # [nodes], 0 where there is no split


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
        torch.where(is_split, gain.amax(1), 0),
    )


def with_level(
    forest: Forest, tree: Tensor, level: Tensor, splits: Splits, penalty: float, rate: float
) -> Forest:
    """The forest with one more level of a step's trees; their last level gives the leaves their values.

    Args:
        forest: The trees so far.
        tree: [] int64, which step grows.
        level: [] int64, of the nodes that are split.
        splits: Of these nodes, tree after tree.
        penalty: λ.
        rate: The fraction of a Newton step that a leaf takes.
    """
    trees, inner = forest.feature.shape
    each, device = forest.each, forest.feature.device
    is_tree = torch.arange(trees, device=device) // each == tree
    place = torch.arange(inner, device=device)
    level_of = sum(((place + 1) >> n > 0).long() for n in range(1, forest.depth)) + torch.zeros_like(place)
    slot = place + 1 - (1 << level_of)
    here = is_tree[:, None] & (level_of == level)
    outputs = forest.value.shape[2]
    both = torch.stack([splits.left, splits.right], 1).flatten(0, 1)  # [2 nodes, 2q + 1]
    g, h = both[:, :outputs], both[:, outputs : 2 * outputs].clamp(min=0)
    value = (rate * g / (h + penalty).clamp(min=1e-12)).to(forest.value)
    is_last = is_tree & (level == forest.depth - 1)

    def of_nodes(table: Tensor) -> Tensor:
        return table.view(each, -1)[:, slot].repeat(forest.steps, 1)

    return forest._replace(
        feature=torch.where(here, of_nodes(splits.feature).to(forest.feature), forest.feature),
        threshold=torch.where(here, of_nodes(splits.threshold).to(forest.threshold), forest.threshold),
        value=torch.where(
            is_last[:, None, None], value.view(each, -1, outputs).repeat(forest.steps, 1, 1), forest.value
        ),
    )


def with_medians(
    forest: Forest, tree: Tensor, counts: Tensor, unit: Tensor, penalty: float, rate: float
) -> Forest:
    """The forest whose tree has leaves by the medians of their residuals, shrunk as n/(n + λ).

    Args:
        forest: With the splits of this tree.
        tree: [] int64, its number.
        counts: [q, leaves, CELLS] of residuals.
        unit: [q], of the cells.
        penalty: λ, in rows.
        rate: The fraction of the median that a leaf takes.
    """
    rows = counts.sum(2).clamp(min=0)
    shrinkage = rows / (rows + penalty).clamp(min=1e-12)
    value = (rate * shrinkage * median_of_cells(counts) * unit[:, None]).T.to(forest.value)
    is_tree = torch.arange(len(forest.value), device=forest.value.device) == tree
    return forest._replace(value=torch.where(is_tree[:, None, None], value, forest.value))


def joined(first: Forest, second: Forest) -> Forest:
    """The trees of both; the bias is that of the first."""
    feature, threshold, value = (torch.cat(pair) for pair in zip(first[:3], second[:3], strict=True))
    return Forest(feature, threshold, value, first.bias)


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


# -- trees of one site ---------------------------------------------------------------------------------------


class Growth(NamedTuple):
    """How a site grows trees of its own."""

    trees: int  # at most
    depth: int
    rate: float
    penalty: float  # λ
    least: int  # rows of a leaf


def own_trees(
    target: Target, how: Growth, bins: Bins, x: Tensor, y: Tensor, eta: Tensor, counts: Tensor
) -> tuple[Forest, Tensor]:
    """Trees on the residuals that η leaves to a site, and [trees + 1, n, q]: what the first k say of each row.

    Args:
        target: The kind of targets.
        how: Their size, and their shrinkage.
        bins: Of the federation.
        x: [n, columns].
        y: The targets.
        eta: [n, q], of the shared trees and the site's intercept.
        counts: [n], 0 of a row that is not trained on.
    """
    bin, size, slots = bins.of(x), bins.edges.shape[1] + 1, 2 ** (how.depth - 1)
    first = slots * torch.arange(target.trees, device=x.device)  # nodes of a level, of each tree of a step
    anywhere = torch.ones(len(bins.edges), dtype=torch.bool, device=x.device)
    forest, said = no_trees(how.trees, how.depth, x, target), [torch.zeros_like(eta)]
    for number in range(how.trees):
        now, tree = eta + said[-1], torch.tensor(number, device=x.device)
        e, h = target.derivatives(now, y)
        parts = list(zip(*(parted(of_rows, target.trees) for of_rows in (e, h)), strict=True))
        node = torch.zeros_like(first).expand(len(x), -1)
        for level in range(how.depth):
            each = [
                level_sums(bin, at, size, slots, [*e_.unbind(1), *h_.unbind(1)], counts)
                for at, (e_, h_) in zip(torch.split(node, 1, 1), parts, strict=True)
            ]
            splits = best_splits(torch.cat(each, 2), bins.edges, anywhere, how.penalty, how.least)
            depth = torch.tensor(level, device=x.device)
            forest = with_level(forest, tree, depth, splits, how.penalty, how.rate)
            at = (node + first).flatten()
            column, limit = (table.gather(0, at).view_as(node) for table in splits[:2])
            node = 2 * node + (x.gather(1, column) > limit)
        if target.by_median:
            residuals, unit = target.means(y) - now, torch.ones_like(eta[0])
            cells = counts_of_cells(residuals / unit, node, counts, 2**how.depth)
            forest = with_medians(forest, tree, cells, unit, how.penalty, how.rate)
        said.append(said[-1] + forest.said(number, node, eta))
    return forest, torch.stack(said)


def level_sums(
    bin: Tensor, node: Tensor, size: int, slots: int, numbers: Sequence[Tensor], counts: Tensor
) -> Tensor:
    """[len(numbers) + 1, columns, slots, size]: sums of numbers of rows by node and bin, the last of rows.

    Args:
        bin: [n, columns].
        node: [n, 1].
        size: Bins of a column.
        slots: Nodes of a level, at most.
        numbers: [n] each.
        counts: [n], 0 of a row that does not count.
    """
    of_rows = [(counts * one)[:, None] for one in numbers]
    sums = histogram(node * size + bin, [*of_rows, counts[:, None]], slots * size)
    return sums.view(*sums.shape[:2], slots, size)


def no_trees(trees: int, depth: int, like: Tensor, target: Target) -> Forest:
    """As many trees as there is room for, which are not split and say 0.

    Args:
        trees: Steps.
        depth: Of each.
        like: Of the device and the precision of the model.
        target: The kind of targets.
    """
    splits, rows = 2**depth - 1, trees * target.trees
    return Forest(
        torch.zeros(rows, splits, dtype=torch.int32, device=like.device),
        like.new_full((rows, splits), NEVER),
        like.new_zeros(rows, splits + 1, target.outputs // target.trees),
        like.new_zeros(target.outputs),
    )


def counts_of_cells(deviations: Tensor, leaf: Tensor, counts: Tensor, leaves: int) -> Tensor:
    """[q, leaves, CELLS]: how many rows of each leaf have a deviation in each cell.

    Args:
        deviations: [n, q], in the unit of the cells.
        leaf: [n, 1].
        counts: [n], 0 of a row that does not count.
        leaves: Their number.
    """
    place = leaf * CELLS + cell_of(deviations)
    return histogram(place, [counts[:, None]], leaves * CELLS)[0].view(-1, leaves, CELLS)


def rewarded(losses: Tensor, counts: Tensor) -> Tensor:
    """[] int64: the fewest trees whose loss is the least one, up to a standard error (Breiman et al. 1984).

    Losses are of rows that the trees were not grown on; the standard error is that of the difference by row.

    Args:
        losses: [trees + 1, n], of each row by the first k trees.
        counts: [n], 0 of a row that does not count.
    """
    rows = counts.sum().clamp(min=2)
    best = (losses * counts).sum(1).argmin(0, keepdim=True)
    worse = (losses - losses.gather(0, best[:, None].expand(1, losses.shape[1]))) * counts
    mean = worse.sum(1) / rows
    variance = ((worse - mean[:, None]) ** 2 * counts).sum(1) / (rows - 1)
    return (mean <= (variance / rows).sqrt()).long().argmax(0)


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
    if target.by_median:
        curvature = counts.sum() + precision
        return counts.sum() / curvature * median(target.means(y) - eta, counts), curvature
    for _ in range(1 if target.has_scale else TURNS):
        e, h = target.derivatives(eta + u, y)
        curvature = (h * counts[:, None]).sum(0) + precision
        slope = (e * counts[:, None]).sum(0) - precision * u
        u = u + (slope / curvature).clamp(-LONGEST_STEP, LONGEST_STEP)
    return u, curvature
