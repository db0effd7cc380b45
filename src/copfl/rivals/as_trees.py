"""A model of scikit-learn as the model `trees`: arrays, which are stored and sent without pickling.

The outputs equal its predictions: of classes their log-probabilities, up to a constant, and of values the
standardised ones. Constants, linear models, decision trees, forests and boosted trees by histograms are known, also
behind a scaling of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from copfl.data.samples import CLASSIFICATION, MULTILABEL
from copfl.errors import UsageError
from copfl.models.trees import IDENTITY, LOG, LOGIT, Trees
from copfl.rivals.records import Array

UNSEEN = -20.0  # the output of a class that the training rows do not have, beside the others


class Tree(NamedTuple):
    """One binary tree; a row goes to the left where x[feature] <= threshold."""

    feature: NDArray[np.int64]
    threshold: Array
    left: NDArray[np.int64]  # of a leaf, itself
    right: NDArray[np.int64]
    value: Array  # [nodes, outputs]

    @property
    def depth(self) -> int:
        """The most questions about a row."""
        reached, depth = np.array([0]), 0
        while True:
            inner = reached[self.left[reached] != reached]
            if not len(inner):
                return depth
            reached, depth = np.concatenate([self.left[inner], self.right[inner]]), depth + 1


class TreeSum(NamedTuple):
    """outputs = W x + b + link(Σ trees)."""

    weight: Array  # [outputs, columns]
    bias: Array  # [outputs]
    trees: list[Tree]
    link: float = IDENTITY


def as_trees(
    models: Any,
    kind: str,
    columns: int,
    outputs: int,
    *,
    scale: Sequence[tuple[float, float]] = (),
    prior: Sequence[float] = (),
) -> Trees:
    """The fitted model of scikit-learn with the same predictions; UsageError if it is of no known kind.

    Args:
        models: It; of labels and of several values one for each.
        kind: Of the task, see `copfl.data.samples`.
        columns: Numbers in a row.
        outputs: Classes, labels or values.
        scale: The mean and the deviation of each value, if the outputs are standardised.
        prior: Of a forest of classes, the probabilities that one more tree has for every row; none: no such tree.
    """
    each = list(models) if isinstance(models, list | tuple) else [models]
    if kind == CLASSIFICATION:
        return _module(_of_classes(each[0], columns, outputs, np.array(prior)), outputs)
    if len(each) == 1 < outputs:
        raise UsageError(f"there is one model for {outputs} outputs; there must be one for each")
    sums = [_of_label(one, columns) if kind == MULTILABEL else _of_values(one, columns) for one in each]
    if len({one.link for one in sums}) > 1:
        raise UsageError("the models of the labels are of different kinds; use the same for all")
    whole = TreeSum(
        np.concatenate([s.weight for s in sums]), np.concatenate([s.bias for s in sums]), [], sums[0].link
    )
    for n, one in enumerate(sums):
        for tree in one.trees:
            value = np.zeros((len(tree.value), outputs))
            value[:, n] = tree.value[:, 0]
            whole.trees.append(tree._replace(value=value))
    if scale:
        mean, std = np.array(scale).T
        trees = [tree._replace(value=tree.value / std) for tree in whole.trees]
        whole = TreeSum(whole.weight / std[:, None], (whole.bias - mean) / std, trees, whole.link)
    return _module(whole, outputs)


def _module(whole: TreeSum, outputs: int) -> Trees:
    trees = whole.trees or [_leaf(np.zeros(outputs))]
    nodes, depth = max(len(t.feature) for t in trees), max(1, *(t.depth for t in trees))
    module = Trees((whole.weight.shape[1],), outputs, len(trees), depth, nodes)
    arrays = module.ensemble
    with torch.no_grad():
        for row, tree in enumerate(trees):
            used = slice(len(tree.feature))
            arrays.feature[row, used] = torch.from_numpy(tree.feature).float()
            arrays.threshold[row, used] = torch.from_numpy(_rounded_down(tree.threshold))
            arrays.left[row, used] = torch.from_numpy(tree.left).float()
            arrays.right[row, used] = torch.from_numpy(tree.right).float()
            arrays.value[row, used] = torch.from_numpy(tree.value).float()
        arrays.link.fill_(whole.link)
        module.head.weight.copy_(torch.from_numpy(whole.weight))
        module.head.bias.copy_(torch.from_numpy(whole.bias))
    return module


def _rounded_down(threshold: Array) -> NDArray[np.float32]:
    """The largest numbers of single precision that are not above: the same rows in single precision are."""
    limits = threshold.clip(-1e30, 1e30)
    near = limits.astype(np.float32)
    return np.where(near > limits, np.nextafter(near, np.float32(-np.inf)), near)


# -- kinds of targets ----------------------------------------------------------------------------------------


def _of_classes(model: Any, columns: int, classes: int, prior: Array) -> TreeSum:
    """Log-probabilities; a class that the training rows do not have is very improbable."""
    steps, model = _steps(model)
    outputs, known = _raw(model, columns), np.asarray(model.classes_, np.int64)
    if outputs.link == LOG:  # probabilities: a missing class has 0
        trees = [tree._replace(value=_spread(tree.value, known, classes)) for tree in outputs.trees]
        weight, bias = np.zeros((classes, columns)), np.zeros(classes)
        if len(prior):
            share = len(trees) / (len(trees) + 1)
            trees = [tree._replace(value=tree.value * share) for tree in trees]
            trees.append(_leaf(prior * (1 - share)))
        return _unscaled(TreeSum(weight, bias, trees, LOG), steps)
    halves = np.array([[-0.5], [0.5]])
    if len(outputs.bias) == 1 and len(known) == 2:  # log odds
        trees = [tree._replace(value=tree.value @ halves.T) for tree in outputs.trees]
        outputs = TreeSum(halves @ outputs.weight, (halves @ outputs.bias[:, None])[:, 0], trees)
    bias = np.full(classes, UNSEEN + outputs.bias.mean())
    bias[known] = outputs.bias
    weight = _spread(outputs.weight.T, known, classes).T
    trees = [tree._replace(value=_spread(tree.value, known, classes)) for tree in outputs.trees]
    return _unscaled(TreeSum(weight, bias, trees), steps)


def _of_label(model: Any, columns: int) -> TreeSum:
    """The log odds of a label, from a model of the classes 0 and 1."""
    steps, model = _steps(model)
    known = np.asarray(model.classes_, np.int64).tolist()
    outputs = _raw(model, columns)
    if outputs.link == LOG:
        chosen = [
            tree._replace(value=_spread(tree.value, np.array(known), 2)[:, 1:]) for tree in outputs.trees
        ]
        return _unscaled(TreeSum(outputs.weight[:1], outputs.bias[:1], chosen, LOGIT), steps)
    if known != [0, 1]:
        return TreeSum(np.zeros((1, columns)), np.array([-UNSEEN if known == [1] else UNSEEN]), [])
    return _unscaled(outputs, steps)


def _of_values(model: Any, columns: int) -> TreeSum:
    steps, model = _steps(model)
    return _unscaled(_raw(model, columns), steps)


def _spread(values: Array, known: NDArray[np.int64], classes: int) -> Array:
    """[n, classes]: these columns [n, known] in their places among all classes."""
    whole = np.zeros((len(values), classes))
    whole[:, known] = values
    return whole


# -- kinds of models -----------------------------------------------------------------------------------------


def _raw(model: Any, columns: int) -> TreeSum:
    """What the model adds up, for the classes that it knows."""
    name = type(model).__name__
    if hasattr(model, "_predictors"):  # boosted by histograms
        base = np.asarray(model._baseline_prediction, np.float64).ravel()
        trees = [
            _of_histograms(predictor.nodes, output, len(base))
            for step in model._predictors
            for output, predictor in enumerate(step)
        ]
        return TreeSum(np.zeros((len(base), columns)), base, trees)
    if name.startswith("Dummy"):
        if hasattr(model, "class_prior_"):
            prior = np.log(np.maximum(np.asarray(model.class_prior_, np.float64), 1e-9))
            prior = prior[1:] - prior[:1] if len(prior) == 2 else prior
            return TreeSum(np.zeros((len(prior), columns)), prior, [])
        constant = np.asarray(model.constant_, np.float64).ravel()
        return TreeSum(np.zeros((len(constant), columns)), constant, [])
    if hasattr(model, "coef_"):
        weight = np.atleast_2d(np.asarray(model.coef_, np.float64))
        return TreeSum(
            weight, np.broadcast_to(np.asarray(model.intercept_, np.float64), len(weight)).copy(), []
        )
    if hasattr(model, "tree_") or "Forest" in name or "ExtraTrees" in name:
        inner = list(getattr(model, "estimators_", [model]))
        is_classifier = hasattr(model, "classes_")
        trees = [_of_tree(one.tree_, is_classifier, len(inner)) for one in inner]
        outputs = trees[0].value.shape[1]
        return TreeSum(
            np.zeros((outputs, columns)), np.zeros(outputs), trees, LOG if is_classifier else IDENTITY
        )
    raise UsageError(
        f"a {name} cannot be told as trees beside a linear model; known are constants, linear models, forests and "
        "boosted trees by histograms"
    )


def _of_tree(tree: Any, is_classifier: bool, count: int) -> Tree:
    """One of `count` trees, whose mean is the answer."""
    itself = np.arange(tree.node_count)
    is_leaf = tree.children_left < 0
    value = np.asarray(tree.value[:, 0], np.float64)
    if is_classifier:
        value = value / value.sum(1, keepdims=True)
    return Tree(
        np.where(is_leaf, 0, tree.feature),
        np.where(is_leaf, 0.0, tree.threshold),
        np.where(is_leaf, itself, tree.children_left),
        np.where(is_leaf, itself, tree.children_right),
        np.where(is_leaf[:, None], value, 0.0) / count,
    )


def _of_histograms(nodes: Any, output: int, outputs: int) -> Tree:
    """A tree of one output; nodes on categories, or on missing values, are none that an encoded table has."""
    if nodes["is_categorical"].any():
        raise UsageError("its trees split categories; encode them as columns of 0 and 1 first")
    itself, is_leaf = np.arange(len(nodes)), nodes["is_leaf"].astype(bool)
    value = np.zeros((len(nodes), outputs))
    value[:, output] = np.where(is_leaf, nodes["value"], 0.0)
    return Tree(
        np.where(is_leaf, 0, nodes["feature_idx"]),
        np.where(is_leaf, 0.0, nodes["num_threshold"]),
        np.where(is_leaf, itself, nodes["left"]),
        np.where(is_leaf, itself, nodes["right"]),
        value,
    )


def _leaf(value: Array) -> Tree:
    """A tree that answers every row alike."""
    itself = np.zeros(1, np.int64)
    return Tree(itself, np.zeros(1), itself, itself, value[None])


# -- scaling -------------------------------------------------------------------------------------------------


def _steps(model: Any) -> tuple[list[Any], Any]:
    """The scalings before a model, and the model."""
    steps = [step for _, step in model.steps] if hasattr(model, "steps") else [model]
    for step in steps[:-1]:
        if type(step).__name__ != "StandardScaler":
            raise UsageError(
                f"a {type(step).__name__} before a model is not known; scale with StandardScaler"
            )
    return steps[:-1], steps[-1]


def _unscaled(whole: TreeSum, steps: Sequence[Any]) -> TreeSum:
    """The same for columns that are not scaled."""
    for step in reversed(steps):
        columns = whole.weight.shape[1]
        std = np.ones(columns) if step.scale_ is None else np.asarray(step.scale_)
        mean = np.zeros(columns) if step.mean_ is None else np.asarray(step.mean_)
        weight = whole.weight / std
        trees = [
            tree._replace(threshold=tree.threshold * std[tree.feature] + mean[tree.feature])
            for tree in whole.trees
        ]
        whole = TreeSum(weight, whole.bias - weight @ mean, trees, whole.link)
    return whole
