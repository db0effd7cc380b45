"""Trees beside a linear model, as arrays of fixed size: a vector like the weights of any other model.

  outputs(x) = W x + b + link(Σ_t value[t, leaf of x in tree t])

So boosted trees, a random forest, a linear model and a constant answer are all values of one vector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from copfl.errors import RunError, UsageError, at_least, raised_as
from copfl.foreign import DAMAGE

IDENTITY, LOG, LOGIT = (
    0.0,
    1.0,
    2.0,
)  # links: values are added up to outputs, or to probabilities of classes, or of labels
LEAST = 1e-9  # probability of which a link takes the logarithm
EVERY = 1e30  # a threshold that no row exceeds
TREES = 100  # of a model, unless it is said
MOST = 10_000_000  # numbers in the arrays of all trees
MOST_QUESTIONS = 10_000  # about a row, in a tree


class Ensemble(nn.Module):
    """Binary trees [trees, nodes]: node 0 is a root, a leaf is its own left and right child.

    A row goes to the left where x[feature] <= threshold. All arrays are floats, so that they are a vector.
    """

    def __init__(self, trees: int, nodes: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.depth = depth
        # On a device without data torch.arange imports the compiler: seconds, at every node.
        itself = torch.tensor(range(nodes), dtype=torch.float32).repeat(trees, 1)
        self.feature = nn.Parameter(torch.zeros(trees, nodes))
        self.threshold = nn.Parameter(torch.zeros(trees, nodes))
        self.left = nn.Parameter(itself)
        self.right = nn.Parameter(itself.clone())
        self.value = nn.Parameter(torch.zeros(trees, nodes, outputs))
        self.link = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """The outputs [n, outputs] for rows [n, columns]."""
        trees, nodes = self.feature.shape
        roots = nodes * torch.arange(trees, device=x.device)
        feature, threshold = self.feature.long().flatten(), self.threshold.flatten()
        left, right = ((to.long() + roots[:, None]).flatten() for to in (self.left, self.right))
        at = roots + torch.zeros_like(
            x[:, :1], dtype=torch.int64
        )  # [n, trees], for any n in an exported file too
        for _ in range(self.depth):
            is_left = x.gather(1, feature[at]) <= threshold[at]
            at = torch.where(is_left, left[at], right[at])
        total = self.value.flatten(0, 1)[at].sum(1)
        inside = total.clamp(LEAST, 1 - LEAST)
        log = total.clamp(min=LEAST).log()
        logit = inside.log() - (1 - inside).log()
        return torch.where(self.link == LOG, log, torch.where(self.link == LOGIT, logit, total))


class Trees(nn.Module):
    """Trees beside a linear model, over flattened input (trees, depth)

    Args:
        shape: Of one sample.
        classes: Number of outputs.
        trees: Their number. By settings, of several classes that of each.
        depth: Of a tree: the most questions about a row.
        nodes: Of a tree; 0: as many as this depth may have.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, trees: int = TREES, depth: int = 3, nodes: int = 0
    ) -> None:
        super().__init__()
        at_least(1, trees=trees, depth=depth)
        at_least(0, nodes=nodes)
        nodes = nodes or 2 ** (min(depth, 40) + 1) - 1
        if depth > min(nodes, MOST_QUESTIONS):  # a file may have any number, and each is a step for all rows
            raise UsageError(f"depth={depth} is too deep for trees of {nodes:,} nodes; use a smaller depth")
        if trees * nodes * (4 + classes) > MOST:
            raise UsageError(
                f"{trees:,} trees of {nodes:,} nodes with {classes:,} outputs are too large a model; use fewer "
                "trees or a smaller depth"
            )
        self.ensemble = Ensemble(trees, nodes, depth, classes)
        self.head = nn.Linear(math.prod(shape), classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1)
        outputs: Tensor = self.head(rows) + self.ensemble(rows)
        return outputs

    @torch.no_grad()
    def resized(self, trees: int, nodes: int, depth: int) -> Trees:
        """The same function with more room: further trees say 0, and further nodes are not reached."""
        columns, classes = self.head.in_features, self.head.out_features
        larger = Trees((columns,), classes, trees, depth, nodes)
        larger.head.load_state_dict(self.head.state_dict())
        given = dict(self.ensemble.named_parameters())
        for name, target in larger.ensemble.named_parameters():
            target[tuple(slice(size) for size in given[name].shape)] = given[name]
        return larger


def trees_of_step(kind: str, classes: int) -> int:
    """How many trees boosting adds at a time: one for each of several classes, else one with all outputs.

    Args:
        kind: Of the task; "" where it is not known.
        classes: Or labels, or values.
    """
    return classes if kind == "classification" and classes > 2 else 1


class Leaf(NamedTuple):
    value: tuple[float, ...]  # of each output


class Branch(NamedTuple):
    """A row goes to the left where x[feature] <= threshold."""

    feature: int
    threshold: float
    left: Node
    right: Node


Node = Leaf | Branch


def nodes_of(tensors: Mapping[str, Tensor], number: int) -> Node:
    """One tree of an ensemble, without the questions that all rows answer alike.

    Args:
        tensors: Of the model, by name.
        number: Of the tree; RunError if it is none.
    """
    names = ("feature", "threshold", "left", "right", "value")
    feature, threshold, left, right, value = (tensors[f"ensemble.{name}"][number].tolist() for name in names)
    columns, seen = tensors["head.weight"].shape[1], set[int]()

    def node(at: int) -> Node:
        # What somebody else wrote may be a circle, or reach a node by so many ways that no walk ends.
        if at in seen or not 0 <= at < len(left) or not 0 <= feature[at] < columns:
            raise ValueError(f"node {at} is out of the tree, or reached twice")
        seen.add(at)
        if left[at] == at:
            return Leaf(tuple(value[at]))
        if threshold[at] >= EVERY:
            return node(int(left[at]))
        return Branch(int(feature[at]), threshold[at], node(int(left[at])), node(int(right[at])))

    with raised_as(RunError, f"tree {number} is none ({{}}); restore the model from a copy", *DAMAGE):
        return node(0)
