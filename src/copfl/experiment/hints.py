"""Hints about a model and samples that can be trained, but rarely learn: no logits, unscaled inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn

from copfl.core.task import Task
from copfl.data.samples import CLASSIFICATION, MULTILABEL, NEXT_TOKEN, Dataset, by_name, each

SAMPLES, OUTPUTS = 1000, 4  # from which the inputs are judged, and the outputs
USUAL, MUCH = 0.95, 1.4  # of sentences, and how much longer the longest must be for a hint
LARGE = 20.0  # a standard deviation; models and learning rates are made for about 1


def hints(task: Task, dataset: Dataset) -> list[str]:
    """A sentence for outputs that are no logits, and one for inputs that are not scaled; usually none."""
    samples = each(lambda array: array[:: max(1, len(array) // SAMPLES)], dataset.train.x)
    x = task.numbers(each(lambda array: torch.tensor(array, device=task.device), samples))
    found = (_outputs(task, each(lambda tensor: tensor[:OUTPUTS], x)), _inputs(by_name(x)))
    return [sentence for sentence in found if sentence]


def padding(dataset: Dataset, max_length: int) -> str:
    """The hint for sentences most of which are much shorter than the longest, to which all are padded."""
    mask = by_name(dataset.train.x).get("attention_mask")
    if mask is None or max_length or not len(mask):
        return ""
    lengths = mask.sum(1)
    longest, usual = mask.shape[1], int(np.quantile(lengths, USUAL, method="higher"))
    if longest < MUCH * usual:
        return ""
    return (
        f"sentences are padded to the {longest} tokens of the longest, but {USUAL:.0%} have at most {usual}; "
        f"--set model.max_length={usual} cuts the others and trains about {longest / usual:.1f} times as fast"
    )


def _outputs(task: Task, x: Any) -> str:
    """The hint for a model that returns probabilities.

    A log-softmax before a classification loss has no effect, and gets none.
    """
    if task.criterion.kind not in (CLASSIFICATION, MULTILABEL, NEXT_TOKEN):
        return ""
    with torch.no_grad():
        outputs = dataclasses.replace(task, batched=None).forward(task.initial, x)[0]
    sums = outputs.sum(-1)
    if (
        outputs.shape[-1] > 1
        and bool((outputs >= 0).all())
        and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
    ):
        last = "a softmax"
    elif isinstance([*task.module.modules()][-1], nn.Sigmoid):
        last = "a sigmoid"
    else:
        return ""
    return (
        f"the model ends in {last}, but the loss applies one itself and expects logits, so training is slow "
        "or stops early; remove that layer and return the output of the last linear one"
    )


def _inputs(x: dict[str, Any]) -> str:
    """The hint for numbers far from a standard deviation of 1; tokens are whole numbers, and get none."""
    numbers = [tensor.double().flatten(1) for tensor in x.values() if tensor.is_floating_point()]
    spread = max((float(one.std(0, correction=0).max()) for one in numbers), default=0.0)
    if not (np.isfinite(spread) and spread > LARGE):
        return ""
    largest = max(float(one.abs().max()) for one in numbers)
    return (
        f"the inputs are not scaled: values reach {largest:.4g}, with a standard deviation of up to "
        f"{spread:.3g}, and models learn best where it is about 1; divide pixels by 255 or pass them as "
        "uint8, and standardise features, (x - mean) / std"
    )
