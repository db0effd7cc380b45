"""Trees by sums (Friedman 2001; Chen and Guestrin 2016): boosted trees that a federation grows together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from copfl.core import ClientOutput, Data, Metrics, Plan, Task, tree
from copfl.core.criteria import mean_of_valid
from copfl.core.payload import nbytes
from copfl.core.task import Epoch
from copfl.errors import UsageError, above, at_least, fraction_of
from copfl.kernels.fused import either_rows
from copfl.kernels.histograms import PAIRED, in_pairs, sums_by_bin, sums_of_children
from copfl.parts.boosting import (
    CELLS,
    FIRST_RATIO,
    NEVER,
    Bins,
    Forest,
    Growth,
    Target,
    allowed_columns,
    best_splits,
    bins_of,
    counts_of_cells,
    histogram,
    in_units,
    joined,
    median_of_cells,
    merged,
    no_trees,
    own_intercept,
    own_trees,
    parted,
    rewarded,
    target_of,
    with_level,
    with_medians,
)

LARGEST = 8_000_000  # numbers of an upload
ROWS = 16.0  # the sums are of rows / 16, so that more rows fit into the range of a secure sum
# Rounds before the first tree, for the bins: each counts rows in cells that lie where the rows are.
BEFORE = 3


class Grown(NamedTuple):
    """What the sites have grown together so far."""

    rounds: Tensor  # [] int64, whose sums are in it
    bins: Bins
    forest: Forest
    log_ratio: Tensor  # [q], log τ²/σ², of the sites' intercepts
    log_scale: Tensor  # [q], log σ²; of classes and labels 0


class Server(NamedTuple):
    grown: Grown
    gain: Tensor  # [columns], of all splits so far


class Down(NamedTuple):
    grown: Grown


class Client(NamedTuple):
    intercept: Tensor  # [q], u
    own: Server | None  # the trees that it grows alone
    trees: Forest | None  # those that it grows after the shared ones


class Upload(NamedTuple):
    sums: Tensor


class Total(NamedTuple):
    sums: Tensor


class RowUpload(NamedTuple):
    """What a site's sums are of, where `total_of` adds up the rows of many sites."""

    numbers: Tensor  # [different channels, n]: of each output -∂loss/∂η, of each its second derivative, then counts
    rest: Tensor  # the sums beside the histograms


class Rows(NamedTuple):
    """What the trees of a round say of rows; the next round needs one level more."""

    bin: Tensor  # [n, columns] int32, or in pairs of columns
    eta: Tensor  # [n, q]
    leaf: Tensor  # [n, trees of a step], in the trees that grow
    trees: Tensor  # [], how many are in η
    level: Tensor  # [], how many levels of the next trees are in the leaf


class Level(NamedTuple):
    """The histograms of a level of all rows of some sites, from which those of the next level follow."""

    round: int
    numbers: Tensor  # [different channels, sites, n]
    sums: list[NDArray[np.float64]]  # of each tree of the step [channels, columns, nodes, bins]


@dataclass(frozen=True)
class Trees:
    """Boosted trees of all sites, and an intercept per site that is shrunk to the common one: u ~ N(0, τ²).

    A round grows one level of a tree, of several classes of a tree for each; of absolute errors, a further one gives
    the leaves their medians. It trains
    `--model trees`, whose options say how many trees, and how deep. The last `own` of them are those of a site: it
    grows them on what the shared trees and its intercept leave to it, and keeps the fewest within a standard error of
    the best on its own folds.

    rate       the fraction of a Newton step that a leaf takes
    penalty    λ, in rows of a leaf (values), or in their second derivatives (classes, labels)
    least      rows of a leaf at least, of all sites together
    bins       of a column
    rows       the fraction of its rows that a site uses for a level
    group      rows of a bin that a site sends at least: smaller ones are merged with their neighbours
    columns    the fraction of the columns that a tree uses
    seed       of the choice of columns
    intercept  whether each site has an intercept of its own
    own        trees that each site grows for itself after the shared ones, at most; 0: all trees are shared
    own_rate   of a site's own trees
    own_penalty  λ of a site's own trees
    folds      of its rows, by which a site chooses how many of its own trees it keeps
    alone      whether each site grows its own trees, and sends nothing: what it has without the others

    Paper: all rows are in one place. Here the sums of the sites give the same.
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
    own: int = 0
    own_rate: float = 0.05
    own_penalty: float = 10.0
    folds: int = 5
    alone: bool = False

    trains = "trees"
    usual_rounds = 303
    only_mean = "its server grows trees from the sums that it receives, and has no step to change"
    total_epochs = 1

    def __post_init__(self) -> None:
        above(0, rate=self.rate, own_rate=self.own_rate)
        at_least(0, penalty=self.penalty, own_penalty=self.own_penalty, seed=self.seed, own=self.own)
        at_least(1, least=self.least, group=self.group)
        at_least(2, bins=self.bins, folds=self.folds)
        if self.bins > CELLS // 2:
            raise UsageError(f"bins={self.bins} must be at most {CELLS // 2}")
        fraction_of("the rows", rows=self.rows)
        fraction_of("the columns", columns=self.columns)
        if self.alone and self.own:
            raise UsageError(
                "alone=true grows all trees at the sites; leave out own, which is for trees after shared ones"
            )

    def trained_alone(self) -> "Trees":
        return replace(self, alone=True, own=0)

    @property
    def adds_up_rows(self) -> bool:
        """Whether `total_of` may add up the rows of many sites: where no site merges its own bins."""
        return self.group == 1

    def epochs_in(self, task: Task, round: int) -> int:
        """The first draws rows; a second one, after the last shared tree, divides a site's rows into folds."""
        trees, splits = self._size(task)
        last = BEFORE + trees * _steps(_target(task), (splits + 1).bit_length() - 1)
        return 2 if self.own and round >= last else int(self.rows < 1)

    @staticmethod
    def rounds_of(tables: Mapping[str, Mapping[str, Any]]) -> int:
        """Until all trees have grown, by the settings of a run."""

        def number(kind: str, key: str, usual: int) -> int:
            value = tables.get(kind, {}).get(key)
            return value if isinstance(value, int) else usual

        own, by_median = number("algorithm", "own", 0), tables.get("task", {}).get("loss") == "absolute"
        trees, depth = max(1, number("model", "trees", 100) - own), max(1, number("model", "depth", 3))
        return BEFORE + trees * (depth + by_median) + (own > 0)

    def server_init(self, task: Task, clients: int) -> Server:
        target, like = _target(task), task.initial
        trees, splits = self._size(task)
        columns = task.layout.head_shape[1]
        bins = bins_of(columns, self.bins, like)
        forest = no_trees(trees, (splits + 1).bit_length() - 1, like, target)
        if (numbers := columns * self._room(forest) + _cells(target, forest)) > LARGEST:
            raise UsageError(
                f"trees send sums by column, node and bin, here {numbers:,}, and {LARGEST:,} are the most; use fewer "
                "columns, a smaller model.depth, or fewer algorithm.bins"
            )
        rounds = torch.zeros((), dtype=torch.int64, device=task.device)
        zeros = _double(task).new_zeros(target.outputs)
        return Server(
            Grown(rounds, bins, forest, zeros + FIRST_RATIO, zeros), _double(task).new_zeros(columns)
        )

    def client_init(self, task: Task) -> Client:
        target, (_, splits) = _target(task), self._size(task)
        own = self.server_init(task, 1) if self.alone else None
        depth = (splits + 1).bit_length() - 1
        trees = no_trees(self.own, depth, task.initial, target) if self.own else None
        return Client(_double(task).new_zeros(target.outputs), own, trees)

    def _size(self, task: Task) -> tuple[int, int]:
        """How many shared trees of each class the model has room for, and the splits of each."""
        rows, nodes = _shape(task, "ensemble.feature")
        if not (trees := rows // _target(task).trees):
            raise UsageError(
                f"of {task.classes} classes each needs a tree, and the model has {rows}; use more model.trees"
            )
        if self.own >= trees:
            raise UsageError(
                f"algorithm.own={self.own} must be below model.trees={trees}, as the first trees are shared; use a "
                "smaller own, or alone=true for trees of each site alone"
            )
        return trees - self.own, nodes // 2

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return tree.repeat(Down(server.grown), len(ids))

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        grown = down.grown if client.own is None else client.own.grown
        forest = grown.forest if client.trees is None else joined(grown.forest, client.trees)
        return _model(task, _target(task), forest, client.intercept)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        target, like = _target(task), _double(task)
        grown = down.grown if client.own is None else client.own.grown
        forest, bins, depth = grown.forest, grown.bins, grown.forest.depth
        growing, level = _growing(grown.rounds, forest, target)
        counts = (torch.arange(len(data.y), device=data.y.device) < data.size).to(like)
        known: Rows | None = data.known
        is_together = known is not None and self.adds_up_rows  # then `total_of` makes the histograms
        if known is None:
            x = _columns(task, data)
            leaves = forest.leaves(x)
            at = forest.each * growing.clamp(0, forest.steps - 1) + torch.arange(forest.each, device=x.device)
            leaf, eta = leaves.gather(1, at.expand(len(x), -1)), forest.eta(leaves, like)
        else:
            leaf, eta = known.leaf, known.eta
        intercept, curvature = client.intercept, torch.exp(-grown.log_ratio)
        if self.intercept and not self.alone:
            intercept, curvature = own_intercept(target, eta, data.y, counts, grown.log_ratio, intercept)
        now = eta + intercept
        e, h = map(in_units, target.derivatives(now, data.y))
        used = counts if self.rows == 1 else _drawn(plan, counts, data.size, self.rows)
        is_over = growing >= forest.steps  # then nothing is asked for

        # The sums beside the histograms.
        values = target.means(data.y)
        means = (in_units(values) * counts[:, None]).sum(0)
        distances = (values - now).abs() if target.by_median else e**2
        spread = torch.stack(
            [intercept**2, 1 / curvature, (distances * counts[:, None]).sum(0), counts.sum() / curvature]
        )
        site = torch.stack([counts.sum(), (counts.sum() > 0).to(like)])
        parts = [means, spread.flatten(), site]
        if target.by_median:  # the residuals by leaf; before the first tree all rows are in one
            deviations = (values - now) / (grown.log_scale / 2).exp()
            by_leaf = counts_of_cells(deviations, leaf, used, forest.value.shape[1])
            parts.append(merged(by_leaf[..., None, :], self.group).flatten())
        rest = torch.where(is_over, 0, torch.cat(parts)) / ROWS

        after = client._replace(intercept=intercept)
        loss = mean_of_valid(task.criterion.losses(target.outputs_of(now), data.y), counts > 0)
        metrics = {"loss": loss.to(task.initial.dtype), "weight": data.size.to(task.initial.dtype)}
        if client.trees is not None and len(plan) > 1:  # of a round after the last shared tree
            after = after._replace(trees=self._own_trees(task, grown, data, counts, now, plan))
        if is_together:
            different = [e] if target.has_scale else [e, h]
            numbers = torch.cat([*(used[:, None] * one for one in different), used[:, None]], 1).T
            size = len(bins.edges) * self._room(forest) + len(rest)
            whole = nbytes(Upload(like.new_zeros(()).expand(size)), of=task.initial.dtype)
            metrics["bytes_up"] = torch.zeros_like(loss) + whole
            return ClientOutput(after, RowUpload(numbers, rest), cast(Tensor, None), metrics)

        bin = bins.of(x) if known is None else known.bin.long()
        node = leaf >> (depth - level.clamp(max=depth - 1))
        sums = self._histograms(target, forest, bin, node, e, h, used)
        if known is None:  # it may be a round before the first tree: those that the bins are made from
            cells = histogram(bins.cells(x), [counts[:, None]], self._room(forest))[0]
            cells = merged(cells[:, None], self.group)[:, 0]
            sums = torch.where(grown.rounds < BEFORE, cells, sums)
        upload = Upload(torch.cat([torch.where(is_over, 0, sums.flatten()) / ROWS, rest]))
        if client.own is not None:
            after = after._replace(own=self._with(task, client.own, upload.sums))
            upload = Upload(upload.sums[:0])
        return ClientOutput(after, upload, self.personal_model(task, after, down), metrics)

    def _histograms(
        self, target: Target, forest: Forest, bin: Tensor, node: Tensor, e: Tensor, h: Tensor, used: Tensor
    ) -> Tensor:
        """[columns, room]: the sums of a site's rows by column, node of the trees that grow, and bin."""
        of_rows, by_tree = used[:, None], []
        for at, *both in zip(
            torch.split(node, 1, 1), *(parted(one, forest.each) for one in (e, h)), strict=True
        ):
            first, second = ([of_rows * one[:, None] for one in part.unbind(1)] for part in both)
            numbers = [*first, *([of_rows] * len(second) if target.has_scale else second), of_rows]
            channels = histogram(at * self.bins + bin, numbers, self._slots(forest))
            if self.group > 1:  # the last channel counts the rows
                by_node = channels.view(*channels.shape[:2], -1, self.bins).permute(1, 2, 0, 3)
                channels = merged(by_node, self.group).permute(2, 0, 1, 3).flatten(2)
            by_tree.append(channels)
        sums = torch.cat(by_tree).transpose(0, 1).flatten(1)
        return torch.cat([sums, sums.new_zeros(len(sums), self._room(forest) - sums.shape[1])], 1)

    def rows_for(self, task: Task, server: Server, data: Data, before: Rows | None) -> Rows | None:
        """The bins of rows and what the trees say of them, for rows of several clients; see core.algorithm."""
        grown, like, target = server.grown, _double(task), _target(task)
        forest = grown.forest
        growing, level = (int(number) for number in _growing(grown.rounds, forest, target))
        if self.alone or (growing < 0 and not self.adds_up_rows):
            return None
        clients, rows = data.y.shape[:2]
        if growing < 0:
            eta = forest.bias.to(like).expand(clients, rows, -1)
            leaf = torch.zeros_like(eta[..., : forest.each], dtype=torch.int64)
            return Rows(leaf[..., :0].int(), eta, leaf, *torch.full((2, clients), -1))
        x = _columns(task, data._replace(x=tree.each(lambda t: t.flatten(0, 1), data.x)))
        end = (growing, level) if growing < forest.steps else (forest.steps, 0)
        if before is None or not 0 <= int(before.trees[0]) <= growing:
            bin = self._binned(grown, x).view(-1, clients, rows).permute(1, 2, 0)
            eta = forest.bias.to(like).repeat(len(x), 1)
            leaf, at = torch.zeros_like(eta[:, : forest.each], dtype=torch.int64), (0, 0)
        else:
            bin, eta, leaf = before.bin, before.eta.flatten(0, 1), before.leaf.flatten(0, 1)
            at = int(before.trees[0]), int(before.level[0])
        while at < end:
            number, done = at
            if done < forest.depth:
                leaf, at = forest.after_level(number, done, leaf, x), (number, done + 1)
            if at[1] >= forest.depth and at < end:
                eta = eta + forest.said(number, leaf, like)
                leaf, at = torch.zeros_like(leaf), (number + 1, 0)
        trees_and_level = (torch.full((clients,), number) for number in at)
        return Rows(bin, eta.view(clients, rows, -1), leaf.view(clients, rows, -1), *trees_and_level)

    def _binned(self, grown: Grown, x: Tensor) -> Tensor:
        """[columns, n] int32: the bins of rows; of many rows those of two columns together."""
        bin = grown.bins.of(x).T.to(torch.int32).contiguous()
        cells = self._slots(grown.forest) * self.bins
        if not self.adds_up_rows or len(bin) == 1 or bin.shape[1] < PAIRED * cells:
            return bin
        return torch.from_numpy(in_pairs(bin.numpy(), self.bins))

    def total_of(
        self, task: Task, server: Server, data: Data, uploads: Any, counted: Tensor, before: Level | None
    ) -> tuple[Total, Level | None]:
        """The sum of several clients' uploads, from their rows; see core.algorithm.

        The rows of a level whose derivatives are those of the level before are added up in one half of the nodes:
        those of the other half are the difference, exactly.
        """
        target, grown, known = _target(task), server.grown, data.known
        forest, columns, q = grown.forest, len(grown.bins.edges), target.outputs
        growing, level = (int(number) for number in _growing(grown.rounds, forest, target))
        numbers, rest = uploads
        if not counted.all():
            numbers, rest = (either_rows(counted, part, torch.zeros_like(part)) for part in uploads)
        if growing < 0:
            first = self._first_total(task, grown, data, counted)
            return Total(torch.cat([first.flatten() / ROWS, rest.sum(0)])), None
        numbers = numbers.transpose(0, 1).contiguous()  # [channels, clients, n]
        level, round, is_over = min(level, forest.depth - 1), int(grown.rounds), growing >= forest.steps
        parents: list[Any] = [None] * forest.each
        if before is not None and before.round == round - 1 and torch.equal(before.numbers, numbers):
            parents = before.sums
        node = (known.leaf >> (forest.depth - level)).flatten(0, 1).numpy()
        bin, channels = known.bin.permute(2, 0, 1).flatten(1).numpy(), list(numbers.flatten(1).numpy())
        used, per_tree, found = channels[-1], q // forest.each, list[NDArray[np.float64]]()
        by_tree = numbers.new_zeros(columns, forest.each, 2 * per_tree + 1, self._slots(forest))
        for number, parent in enumerate(parents):
            if is_over:
                break
            own = slice(number * per_tree, (number + 1) * per_tree)
            second = [used] * per_tree if target.has_scale else channels[q:-1][own]
            how = bin, columns, node[:, number], [*channels[:q][own], *second, used]
            if parent is None or not level:
                found.append(sums_by_bin(*how, self.bins, 2**level))
            elif parent.shape[2] == 2**level:  # a round of medians
                found.append(parent)
            else:
                found.append(sums_of_children(*how, parent))
            flat = torch.from_numpy(found[-1]).flatten(2).transpose(0, 1)
            by_tree[:, number, :, : flat.shape[2]] = flat / ROWS
        sums = by_tree.flatten(1)
        sums = F.pad(sums, (0, self._room(forest) - sums.shape[1]))
        return Total(torch.cat([sums.flatten(), rest.sum(0)])), Level(round, numbers, found)

    def _first_total(self, task: Task, grown: Grown, data: Data, counted: Tensor) -> Tensor:
        """[columns, room]: what the bins are made from, of several clients, column after column."""
        x = _columns(task, data._replace(x=tree.each(lambda t: t.flatten(0, 1), data.x)))
        is_valid = torch.arange(data.y.shape[1], device=x.device) < data.size[:, None]
        counts = (is_valid & counted[:, None]).flatten().to(_double(task))
        sums = counts.new_zeros(len(grown.bins.edges), self._room(grown.forest))
        for row, cell in zip(sums, grown.bins.cells(x).T, strict=True):
            row[:CELLS] = torch.from_numpy(np.bincount(cell.numpy(), counts.numpy(), CELLS))
        return sums

    def _own_trees(
        self, task: Task, grown: Grown, data: Data, counts: Tensor, eta: Tensor, plan: Plan
    ) -> Forest:
        """A site's own trees, as many as reduce the loss of rows that they were not grown on; the others say 0."""
        target, depth, x = _target(task), grown.forest.depth, _columns(task, data)
        how = Growth(self.own, depth, self.own_rate, self.own_penalty, self.least)
        place = _places(plan[1], counts)
        held_out = counts.new_zeros(self.own + 1, len(counts))
        for fold in range(self.folds):
            is_out = (place % self.folds == fold).to(counts)
            _, said = own_trees(target, how, grown.bins, x, data.y, eta, counts * (1 - is_out))
            losses = [task.criterion.losses(target.outputs_of(eta + one), data.y) for one in said]
            held_out = held_out + torch.stack(losses) * is_out
        kept = rewarded(held_out, counts)
        forest, _ = own_trees(target, how, grown.bins, x, data.y, eta, counts)
        is_kept = torch.arange(len(forest.value), device=x.device) < forest.each * kept
        return forest._replace(value=torch.where(is_kept[:, None, None], forest.value, 0))

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        return Total(upload.sums)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        if self.alone:
            return server, {}
        after = self._with(task, server, total.sums)
        growing, _ = _growing(after.grown.rounds, after.grown.forest, _target(task))
        metrics = {"trees": growing.clamp(0, after.grown.forest.steps)}
        if self.intercept:
            metrics["intercept_deviation"] = (
                ((after.grown.log_ratio + after.grown.log_scale) / 2).exp().mean()
            )
        return after, metrics

    def _with(self, task: Task, before: Server, sums: Tensor) -> Server:
        """What the sites have after a round with these sums."""
        target, grown = _target(task), before.grown
        forest, bins, room, q = grown.forest, grown.bins, self._room(grown.forest), target.outputs
        columns = len(bins.edges)
        sizes = [columns * room, q, 4 * q, 2, _cells(target, forest)]
        parts = torch.split(ROWS * sums.to(grown.log_scale), sizes)
        histograms, means, (rows, sites) = parts[0].view(columns, room), parts[1], parts[3]
        # Before the first tree: the bins, and the prediction without trees.
        slots, channels = self._slots(forest), 2 * forest.value.shape[2] + 1
        counts = histograms[:, :CELLS].round()
        counted = bins.with_edges(counts).moved(counts)
        start = target.start(means / rows.clamp(min=1)).to(forest.bias)
        # Then one level of a tree.
        growing, level = _growing(grown.rounds, forest, target)
        by_tree = histograms[:, : slots * channels * forest.each]
        by_tree = by_tree.view(columns, forest.each, channels, -1, self.bins)
        of_bins = by_tree.permute(2, 0, 1, 3, 4).flatten(2, 3)  # of all nodes of all trees of the step
        allowed = allowed_columns(growing, columns, self.columns, self.seed)
        splits = best_splits(of_bins, bins.edges, allowed, self.penalty, self.least)
        rate = 0.0 if target.by_median else self.rate  # a median comes in a round of its own
        larger = with_level(forest, growing, level, splits, self.penalty, rate)
        residuals, unit = parts[4].view(q, -1, CELLS), (grown.log_scale / 2).exp()
        if target.by_median:
            with_leaves = with_medians(forest, growing, residuals, unit, self.penalty, self.rate)
            larger = tree.each(lambda a, b: torch.where(level == forest.depth, a, b), with_leaves, larger)

        first, second, is_before = grown.rounds == 0, grown.rounds == 1, grown.rounds < BEFORE
        new_bins = tree.each(lambda a, b: torch.where(is_before, a, b), counted, bins)
        forest = tree.each(lambda a, b: torch.where(is_before, b, a), larger, forest)
        bias = torch.where(first, start, forest.bias)
        if target.by_median:
            centre = (unit * median_of_cells(residuals.sum(1))).to(bias)
            bias = torch.where(second, bias + centre, bias)
        forest = forest._replace(bias=bias)
        variances = self._variances(grown, parts[2].view(4, q), rows, sites, target)
        is_level = (grown.rounds >= BEFORE) & (growing < forest.steps) & (level < forest.depth)
        gain = before.gain.scatter_add(0, splits.feature, splits.gain * is_level)
        after = Server(Grown(grown.rounds + 1, new_bins, forest, *variances), gain)
        return tree.each(lambda new, old: torch.where(rows > 0, new, old), after, before)

    def _variances(
        self, before: Grown, spread: Tensor, rows: Tensor, sites: Tensor, target: Target
    ) -> tuple[Tensor, Tensor]:
        """log τ²/σ² and log σ² by one step of the EM algorithm.

        Of absolute errors σ is that of normal residuals with the same mean distance.
        """
        squares, inverse, residuals, inverse_rows = spread
        scale = before.log_scale.exp()
        between = (squares + scale * inverse) / sites.clamp(min=1)
        within = torch.ones_like(scale)
        if target.by_median:
            within = math.pi / 2 * (residuals / rows.clamp(min=1)) ** 2
        elif target.has_scale:
            within = (residuals + scale * inverse_rows) / rows.clamp(min=1)
        return (between / within.clamp(min=1e-12)).clamp(1e-6, 1e3).log(), within.clamp(min=1e-12).log()

    def _room(self, forest: Forest) -> int:
        """Numbers of a column."""
        return max(CELLS, forest.each * (2 * forest.value.shape[2] + 1) * self._slots(forest))

    def _slots(self, forest: Forest) -> int:
        """Bins of all nodes of the last level."""
        return 2 ** (forest.depth - 1) * self.bins  # type: ignore[no-any-return]


def _steps(target: Target, depth: int) -> int:
    """Rounds of a tree: one for each level, and one for medians in the leaves."""
    return depth + target.by_median


def _cells(target: Target, forest: Forest) -> int:
    """Numbers of an upload that count residuals by leaf."""
    return forest.value[0].numel() * CELLS if target.by_median else 0


def _growing(rounds: Tensor, forest: Forest, target: Target) -> tuple[Tensor, Tensor]:
    """Which step's trees grow in a round, and which of their levels; before the first round of a tree, none do."""
    step, steps = rounds - BEFORE, _steps(target, forest.depth)
    return torch.where(step < 0, -1, step // steps), step % steps


def _filled(forest: Forest, trees: int) -> Forest:
    """As many trees; the further ones say 0."""
    if not (more := trees - len(forest.value)):
        return forest
    feature, value = (
        F.pad(part, (0, 0) * (part.ndim - 1) + (0, more)) for part in (forest.feature, forest.value)
    )
    return Forest(feature, F.pad(forest.threshold, (0, 0, 0, more), value=NEVER), value, forest.bias)


def _one(forest: Forest, number: int) -> Forest:
    """The trees of one of its steps."""
    of_step = slice(number * forest.each, (number + 1) * forest.each)
    feature, threshold, value = (part[of_step] for part in forest[:3])
    return Forest(feature, threshold, value, forest.bias)


def _drawn(plan: Plan, counts: Tensor, size: Tensor, fraction: float) -> Tensor:
    """[n]: 1 of the rows that this round uses, the first of the plan's order."""
    return counts * (_places(plan[0], counts) < (fraction * size).ceil())


def _places(epoch: Epoch, counts: Tensor) -> Tensor:
    """[n]: the place of each row in this order; of padding 0."""
    index = torch.cat([batch.index for batch in epoch])
    valid = torch.cat([torch.ones_like(b.index).bool() if b.valid is None else b.valid for b in epoch])
    place = torch.arange(len(index), device=index.device) * valid
    return torch.zeros_like(counts).scatter_add(0, index, place.to(counts))


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
    trees, splits = _shape(task, "ensemble.feature")[0], forest.feature.shape[1]
    forest = _filled(forest, trees)
    like = task.initial
    inner = torch.arange(splits, device=task.device)
    itself = torch.arange(splits, 2 * splits + 1, device=task.device)
    padded = like.new_zeros(trees, splits + 1)
    place = torch.arange(trees, device=task.device) % forest.each  # the outputs of a tree
    is_here = torch.eye(forest.each, dtype=intercept.dtype, device=task.device)[place]
    value = forest.value.to(intercept)[:, :, None] * is_here[:, None, :, None]
    value = target.outputs_of(value.flatten(2)).to(like)
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
