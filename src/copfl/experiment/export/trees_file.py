"""Trees as a JSON file that XGBoost reads: its format, with a tree for each output.

Its columns are the encoded ones, as the model gets them: numbers standardised, a column of 0 and 1 for each category.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from copfl.data.samples import CLASSIFICATION, MULTILABEL
from copfl.errors import UsageError
from copfl.experiment.bundle.bundle import Bundle
from copfl.experiment.export.formats import about, whole_tensors
from copfl.files import write_bytes
from copfl.models.trees import IDENTITY, Branch, Leaf, Node, Trees, nodes_of, trees_of_step

VERSION = [3, 0, 0]  # of XGBoost, whose format this is
NO_PARENT = 2**31 - 1


def write(bundle: Bundle, path: Path) -> list[Path]:
    """The file of a model of trees; UsageError of another model.

    Args:
        bundle: The model.
        path: Of the file.
    """
    tensors = whole_tensors(bundle.task, bundle.model)
    is_trees = isinstance(bundle.task.module, Trees)
    if not is_trees or float(tensors["ensemble.link"]) != IDENTITY or bool(tensors["head.weight"].any()):
        raise UsageError(
            "JSON is for boosted trees, which add up, and this model is another one; use --format onnx"
        )
    write_bytes(path, (json.dumps(_content(bundle, tensors)) + "\n").encode(), durable=False)
    return [path]


def _content(bundle: Bundle, tensors: dict[str, Tensor]) -> dict[str, Any]:
    kind, outputs, columns = bundle.task.criterion.kind, *tensors["head.weight"].shape
    rows = np.eye(outputs)
    if kind == CLASSIFICATION and outputs == 2:  # the log odds of the second class
        rows = np.array([[-1.0, 1.0]])
    scale, shift = np.ones(outputs), np.zeros(outputs)
    if (output := bundle.description.output).std:
        scale, shift = np.array(output.std), np.array(output.mean)
    bias = rows @ (scale * tensors["head.bias"].double().numpy() + shift)
    forest = [nodes_of(tensors, number) for number in range(len(tensors["ensemble.feature"]))]
    start = Leaf(tuple(bias.tolist()))
    number = len(rows)
    trees = [_tree(start, columns, output, np.eye(number), 1.0) for output in range(number)]
    if trees_of_step(kind, outputs) > 1 and _has_one_output_each(forest, number):
        trees += [_tree(root, columns, n % number, rows, scale) for n, root in enumerate(forest)]
    else:
        trees += [_tree(root, columns, output, rows, scale) for root in forest for output in range(number)]
    objectives = {
        CLASSIFICATION: "binary:logistic" if number == 1 else "multi:softprob",
        MULTILABEL: "binary:logistic",
    }
    objective = objectives.get(kind, "reg:squarederror")
    classes, targets = (number, 1) if objective == "multi:softprob" else (0, number)
    options: dict[str, Any] = {"name": objective}
    if objective == "multi:softprob":
        options["softmax_multiclass_param"] = {"num_class": str(classes)}
    else:
        options["reg_loss_param"] = {"scale_pos_weight": "1"}
    return {
        "version": VERSION,
        "learner": {
            "attributes": {"copfl": about(bundle.description)},
            "feature_names": [],
            "feature_types": [],
            "gradient_booster": {
                "name": "gbtree",
                "model": {
                    "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(trees))},
                    "iteration_indptr": list(range(0, len(trees) + 1, number)),
                    "tree_info": [n % number for n in range(len(trees))],
                    "trees": [{"id": n, **tree} for n, tree in enumerate(trees)],
                },
            },
            "learner_model_param": {
                "base_score": "5E-1" if objective == "binary:logistic" else "0E0",
                "boost_from_average": "1",
                "num_class": str(classes),
                "num_feature": str(columns),
                "num_target": str(targets),
            },
            "objective": options,
        },
    }


def _has_one_output_each(forest: list[Node], number: int) -> bool:
    """Whether the trees are those of the first output, the second, and so on, again and again."""

    def outputs(node: Node) -> set[int]:
        if isinstance(node, Branch):
            return outputs(node.left) | outputs(node.right)
        return {place for place, value in enumerate(node.value) if value}

    return len(forest) % number == 0 and all(outputs(root) <= {n % number} for n, root in enumerate(forest))


def _tree(root: Node, columns: int, output: int, rows: Any, scale: Any) -> dict[str, Any]:
    """The arrays of one tree with one output, in the order in which its nodes are met."""
    arrays: dict[str, list[Any]] = {
        name: []
        for name in ("left_children", "right_children", "parents", "split_indices", "split_conditions")
    }

    def add(node: Node, parent: int) -> int:
        place = len(arrays["parents"])
        for values in arrays.values():
            values.append(-1)
        arrays["parents"][place] = parent
        arrays["split_indices"][place] = 0
        if isinstance(node, Branch):
            # Here a row with less than the number goes to the left.
            arrays["split_conditions"][place] = float(
                np.nextafter(np.float32(node.threshold), np.float32(np.inf))
            )
            arrays["split_indices"][place] = node.feature
            arrays["left_children"][place] = add(node.left, place)
            arrays["right_children"][place] = add(node.right, place)
        else:
            arrays["split_conditions"][place] = float(rows[output] @ (scale * np.array(node.value)))
        return place

    add(root, NO_PARENT)
    nodes = len(arrays["parents"])
    nothing = [0.0] * nodes
    return {
        **arrays,
        "base_weights": nothing,
        "loss_changes": nothing,
        "sum_hessian": nothing,
        "default_left": [1] * nodes,
        "split_type": [0] * nodes,
        "categories": [],
        "categories_nodes": [],
        "categories_segments": [],
        "categories_sizes": [],
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(columns),
            "num_nodes": str(nodes),
            "size_leaf_vector": "1",
        },
    }
