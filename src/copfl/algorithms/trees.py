"""Trees by sums (Friedman 2001; Chen and Guestrin 2016): boosted trees that a federation grows together."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.core import ClientOutput, Data, Metrics, Plan, Task, tree
from copfl.core.criteria import mean_of_valid
from copfl.errors import UsageError, above, at_least, fraction_of
from copfl.parts.boosting import (
    CELLS,
    FIRST_RATIO,
    NEVER,
    Bins,
    Forest,
    Target,
    allowed_columns,
    best_splits,
    histogram,
    merged,
    own_intercept,
    target_of,
    with_level,
)

LARGEST = 8_000_000  # numbers of an upload
ROWS = 16.0  # the sums are of rows / 16, so that more rows fit into the range of a secure sum
BEFORE = 2  # rounds before the first tree: the columns' means and deviations, then their bins


class Grown(NamedTuple):
    """What the sites have grown together so far."""

    rounds: Tensor  # [] int64, whose sums are in it
    bins: Bins
    forest: Forest
    log_ratio: Tensor  # [q], log τ²/σ², of the sites' intercepts


class Server(NamedTuple):
    grown: Grown
    log_scale: Tensor  # [q], log σ²; of classes and labels 0


class Down(NamedTuple):
    grown: Grown


class Client(NamedTuple):
    intercept: Tensor  # [q], u
    own: Server | None  # the trees that it grows alone


class Upload(NamedTuple):
    sums: Tensor


class Total(NamedTuple):
    sums: Tensor


@dataclass(frozen=True)
class Trees:
    """Boosted trees of all sites, and an intercept per site that is shrunk to the common one: u ~ N(0, τ²).

    A round grows one level of a tree. It trains `--model trees`, whose options say how many trees, and how deep.

    rate       the fraction of a Newton step that a leaf takes
    penalty    λ, in rows of a leaf (values), or in their second derivatives (classes, labels)
    least      rows of a leaf at least, of all sites together
    bins       of a column
    rows       the fraction of its rows that a site uses for a level
    group      rows of a bin that a site sends at least: smaller ones are merged with their neighbours
    columns    the fraction of the columns that a tree uses
    seed       of the choice of columns
    intercept  whether each site has an intercept of its own
    alone      whether each site grows its own trees, and sends nothing: what it has without the others

    Paper: all rows are in one place. Here the sums of the sites give the same. With several classes a tree has a
    value for each.
    """

    rate: float = 0.05
    penalty: float = 1.0
    least: int = 10
    bins: int = 32
    rows: float = 1.0
    group: int = 1
    columns: float = 1.0
    seed: int = 0
    intercept: bool = True
    alone: bool = False

    trains = "trees"
    usual_rounds = 302
    only_mean = "its server grows trees from the sums that it receives, and has no step to change"
    total_epochs = 1

    def __post_init__(self) -> None:
        above(0, rate=self.rate)
        at_least(0, penalty=self.penalty, seed=self.seed)
        at_least(1, least=self.least, group=self.group)
        at_least(2, bins=self.bins)
        if self.bins > CELLS // 2:
            raise UsageError(f"bins={self.bins} must be at most {CELLS // 2}")
        fraction_of("the rows", rows=self.rows)
        fraction_of("the columns", columns=self.columns)

    def trained_alone(self) -> "Trees":
        return replace(self, alone=True)

    def server_init(self, task: Task, clients: int) -> Server:
        target, like = _target(task), task.initial
        trees, nodes = _shape(task, "ensemble.feature")
        columns, splits = task.layout.head_shape[1], nodes // 2
        edges = like.new_full((columns, self.bins - 1), NEVER)
        bins = Bins(like.new_zeros(columns), like.new_ones(columns), edges)
        forest = Forest(
            torch.zeros(trees, splits, dtype=torch.int32, device=task.device),
            like.new_full((trees, splits), NEVER),
            like.new_zeros(trees, splits + 1, target.outputs),
            like.new_zeros(target.outputs),
        )
        if (numbers := columns * self._room(forest)) > LARGEST:
            raise UsageError(
                f"trees send sums by column, node and bin, here {numbers:,}, and {LARGEST:,} are the most; use fewer "
                "columns, a smaller model.depth, or fewer algorithm.bins"
            )
        rounds = torch.zeros((), dtype=torch.int64, device=task.device)
        zeros = _double(task).new_zeros(target.outputs)
        return Server(Grown(rounds, bins, forest, zeros + FIRST_RATIO), zeros)

    def client_init(self, task: Task) -> Client:
        own = self.server_init(task, 1) if self.alone else None
        return Client(_double(task).new_zeros(_target(task).outputs), own)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return tree.repeat(Down(server.grown), len(ids))

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        grown = down.grown if client.own is None else client.own.grown
        return _model(task, _target(task), grown.forest, client.intercept)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        target, like = _target(task), _double(task)
        grown = down.grown if client.own is None else client.own.grown
        forest, bins, depth = grown.forest, grown.bins, grown.forest.depth
        x = _columns(task, data)
        counts = (torch.arange(len(x), device=x.device) < data.size).to(like)
        leaves = forest.leaves(x)
        eta = forest.eta(leaves, like)
        intercept, curvature = client.intercept, torch.exp(-grown.log_ratio)
        if self.intercept and not self.alone:
            intercept, curvature = own_intercept(target, eta, data.y, counts, grown.log_ratio, intercept)
        e, h = target.derivatives(eta + intercept, data.y)

        # The sums by node of the tree that grows, column and bin; before, those that the bins are made from.
        used = counts if self.rows == 1 else _drawn(plan, counts, data.size, self.rows)
        growing, level = _growing(grown.rounds, forest)
        at = growing.clamp(0, forest.feature.shape[0] - 1).expand(len(x), 1)
        node = leaves.gather(1, at) >> (depth - level)  # [n, 1]
        wide, is_first, is_second = x.to(like), grown.rounds == 0, grown.rounds == 1
        derivatives = [(used * one)[:, None] for one in (*e.unbind(1), *h.unbind(1))]
        numbers = [*derivatives, used[:, None]]
        numbers[0] = torch.where(is_first, wide, torch.where(is_second, 1.0, numbers[0])) * counts[:, None]
        numbers[1] = torch.where(is_first, wide**2 * counts[:, None], numbers[1])
        # In the round of the cells, other channels than the first have no sum.
        numbers[1:] = [torch.where(is_second, 0.0, one) for one in numbers[1:]]
        first, slots = node * self.bins + bins.of(x), self._slots(forest)  # 0 as long as there are no edges
        index = [first + channel * slots for channel in range(len(numbers))]
        index[0] = torch.where(is_second, bins.cells(x), first)
        sums = histogram(index, numbers, self._room(forest))
        if self.group > 1:
            sums = self._grouped(sums, slots, len(numbers), is_second)
        means = (target.means(data.y) * counts[:, None]).sum(0)
        spread = torch.stack(
            [intercept**2, 1 / curvature, ((e**2) * counts[:, None]).sum(0), counts.sum() / curvature]
        )
        site = torch.stack([counts.sum(), (counts.sum() > 0).to(like)])
        upload = Upload(torch.cat([sums.flatten(), means, spread.flatten(), site]) / ROWS)

        after = Client(intercept, None)
        if client.own is not None:
            after = Client(intercept, self._with(task, client.own, upload.sums))
            upload = Upload(upload.sums[:0])
        loss = mean_of_valid(task.criterion.losses(target.outputs_of(eta + intercept), data.y), counts > 0)
        metrics = {"loss": loss.to(task.initial.dtype), "weight": data.size.to(task.initial.dtype)}
        return ClientOutput(after, upload, self.personal_model(task, after, down), metrics)

    def _grouped(self, sums: Tensor, slots: int, channels: int, is_cells: Tensor) -> Tensor:
        """[columns, room]: the sums, in which no bin has fewer rows than `group`, and no cell."""
        columns = len(sums)
        of_bins = sums[:, : slots * channels].view(columns, channels, -1, self.bins).transpose(1, 2)
        of_bins = merged(of_bins, self.group).transpose(1, 2).flatten(1)
        of_cells = merged(sums[:, None, :CELLS], self.group)[:, 0]
        ends = (0, sums.shape[1] - of_bins.shape[1]), (0, sums.shape[1] - CELLS)
        padded = [F.pad(one, end) for one, end in zip((of_bins, of_cells), ends, strict=True)]
        return torch.where(is_cells, padded[1], padded[0])

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        return Total(upload.sums)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        if self.alone:
            return server, {}
        after = self._with(task, server, total.sums)
        growing, _ = _growing(after.grown.rounds, after.grown.forest)
        metrics = {"trees": growing.clamp(0, after.grown.forest.feature.shape[0])}
        if self.intercept:
            metrics["intercept_deviation"] = ((after.grown.log_ratio + after.log_scale) / 2).exp().mean()
        return after, metrics

    def _with(self, task: Task, before: Server, sums: Tensor) -> Server:
        """What the sites have after a round with these sums."""
        target, grown = _target(task), before.grown
        forest, bins, room, q = grown.forest, grown.bins, self._room(grown.forest), target.outputs
        columns = len(bins.centre)
        parts = torch.split(ROWS * sums.to(before.log_scale), [columns * room, q, 4 * q, 2])
        histograms, means, (rows, sites) = parts[0].view(columns, room), parts[1], parts[3]
        # Before the first tree: the bins, and the prediction without trees.
        slots, channels = self._slots(forest), 2 * q + 1
        scaled = bins.scaled(rows, histograms[:, 0], histograms[:, slots])
        edged = bins.with_edges(histograms[:, :CELLS])
        start = target.start(means / rows.clamp(min=1)).to(forest.bias)
        # Then one level of a tree.
        growing, level = _growing(grown.rounds, forest)
        of_bins = histograms[:, : slots * channels].view(columns, channels, -1, self.bins).transpose(0, 1)
        allowed = allowed_columns(growing, columns, self.columns, self.seed)
        splits = best_splits(of_bins, bins.edges, allowed, self.penalty, self.least)
        larger = with_level(forest, growing, level, splits, self.penalty, self.rate)

        first, second = grown.rounds == 0, grown.rounds == 1
        new_bins = tree.each(lambda a, b: torch.where(first, a, b), scaled, bins)
        new_bins = tree.each(lambda a, b: torch.where(second, a, b), edged, new_bins)
        forest = tree.each(lambda a, b: torch.where(first | second, b, a), larger, forest)
        forest = forest._replace(bias=torch.where(first, start, forest.bias))
        ratio, scale = self._variances(before, parts[2].view(4, q), rows, sites, target.has_scale)
        after = Server(Grown(grown.rounds + 1, new_bins, forest, ratio), scale)
        return tree.each(lambda new, old: torch.where(rows > 0, new, old), after, before)

    def _variances(
        self, before: Server, spread: Tensor, rows: Tensor, sites: Tensor, has_scale: bool
    ) -> tuple[Tensor, Tensor]:
        """log τ²/σ² and log σ² by one step of the EM algorithm."""
        squares, inverse, residuals, inverse_rows = spread
        scale = before.log_scale.exp()
        between = (squares + scale * inverse) / sites.clamp(min=1)
        within = (
            (residuals + scale * inverse_rows) / rows.clamp(min=1) if has_scale else torch.ones_like(scale)
        )
        return (between / within.clamp(min=1e-12)).clamp(1e-6, 1e3).log(), within.clamp(min=1e-12).log()

    def _room(self, forest: Forest) -> int:
        """Numbers of a column."""
        return max(CELLS, (2 * forest.bias.shape[0] + 1) * self._slots(forest))

    def _slots(self, forest: Forest) -> int:
        """Bins of all nodes of the last level."""
        return 2 ** (forest.depth - 1) * self.bins  # type: ignore[no-any-return]


def _growing(rounds: Tensor, forest: Forest) -> tuple[Tensor, Tensor]:
    """Which tree grows in a round, and which of its levels; before the first round of a tree, none does."""
    step = rounds - BEFORE
    return torch.where(step < 0, -1, step // forest.depth), step % forest.depth


def _drawn(plan: Plan, counts: Tensor, size: Tensor, fraction: float) -> Tensor:
    """[n]: 1 of the rows that this round uses, the first of the plan's order."""
    index = torch.cat([batch.index for batch in plan[0]])
    valid = torch.cat([torch.ones_like(b.index).bool() if b.valid is None else b.valid for b in plan[0]])
    first = torch.arange(len(index), device=index.device) < (fraction * size).ceil()
    return torch.zeros_like(counts).scatter_add(0, index, (first & valid).to(counts))


def _columns(task: Task, data: Data) -> Tensor:
    """[n, columns]: the rows as the model sees them."""
    x = task.numbers(data.x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise UsageError(
            "trees need a table of numbers, and these samples are none; choose another algorithm"
        )
    return x.flatten(1)


def _double(task: Task) -> Tensor:
    """A tensor on the task's device in double precision, where the device has it."""
    return task.initial.new_empty(0, dtype=torch.float32 if task.device.type == "mps" else torch.float64)


def _target(task: Task) -> Target:
    return target_of(task.criterion, task.classes, _double(task))


def _shape(task: Task, name: str) -> tuple[int, ...]:
    """The shape of an array of the model."""
    shapes = dict(zip(task.layout.names, task.layout.shapes, strict=True))
    if name not in shapes or (shapes[name][1] + 1).bit_count() != 1:
        raise UsageError("the algorithm trees grows the trees of a model that has them; use --model trees")
    return shapes[name]


def _model(task: Task, target: Target, forest: Forest, intercept: Tensor) -> Tensor:
    """[D]: the model of these trees."""
    trees, splits = forest.feature.shape
    like = task.initial
    inner = torch.arange(splits, device=task.device)
    itself = torch.arange(splits, 2 * splits + 1, device=task.device)
    padded = like.new_zeros(trees, splits + 1)
    value = target.outputs_of(forest.value.to(intercept)).to(like)
    children = {
        name: torch.cat([2 * inner + side, itself]).to(like).expand(trees, -1)
        for name, side in (("left", 1), ("right", 2))
    }
    arrays = {
        "feature": torch.cat([forest.feature.to(like), padded], 1),
        "threshold": torch.cat([forest.threshold.to(like), padded], 1),
        **children,
        "value": torch.cat([like.new_zeros(trees, splits, value.shape[2]), value], 1),
        "link": like.new_zeros(1),
    }
    head = task.layout.head
    bias = target.outputs_of(forest.bias.to(intercept) + intercept).to(like)
    columns = task.layout.head_shape[1]
    tensors = {f"ensemble.{name}": array for name, array in arrays.items()} | {
        f"{head}.weight": like.new_zeros(task.classes, columns),
        f"{head}.bias": bias,
    }
    return task.layout.join(tensors)
