"""Which totals are determined by one weighted sum of the uploads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from copfl.algorithms import ALGORITHMS
from copfl.algorithms.copfl import COPFL
from copfl.algorithms.fedavg import FedAvg
from copfl.core import AnyAlgorithm, Task, tree
from copfl.core.algorithm import ClientOutput, example_output
from copfl.core.sums import total_is_one_sum
from copfl.parts.averaging import Total
from copfl.parts.server_steps import Momentum
from copfl.testing import small_federation
from copfl.wrappers.addons import with_addons
from copfl.wrappers.server_optimizer import ServerOptimizer


@dataclass(frozen=True)
class Squares(FedAvg):
    """The mean of squares, which no sum of uploads determines."""

    def summand(self, task: Task, server: Any, id: Tensor, upload: Any) -> Total:
        return Total(upload.size * upload.w**2, upload.size)


@dataclass(frozen=True)
class Doubled(FedAvg):
    """A linear function of the sum."""

    def summand(self, task: Task, server: Any, id: Tensor, upload: Any) -> Total:
        return Total(2 * upload.size * upload.w, 3 * upload.size)


class Numbered(NamedTuple):
    w: Tensor
    size: Tensor
    cluster: Tensor  # [] int64


class SumWithSquares(NamedTuple):
    w: Tensor
    size: Tensor
    squares: Tensor  # [1]


@dataclass(frozen=True)
class Clustered(FedAvg):
    """Adds up the square of a whole number, from which single clients' can be computed."""

    def client_update(self, *args: Any) -> ClientOutput:
        output = super().client_update(*args)
        return output._replace(upload=Numbered(output.upload.w, output.upload.size, torch.tensor(3)))

    def summand(self, task: Task, server: Any, id: Tensor, upload: Any) -> SumWithSquares:
        squares = upload.cluster.double().square().reshape(1)
        return SumWithSquares(upload.size * upload.w, upload.size, squares)


def is_one_sum(algorithm: AnyAlgorithm, *, private: bool) -> bool:
    task, federation = small_federation("batch", (5, 9), needs=getattr(algorithm, "needs", ()))
    upload = example_output(algorithm, task, tree.row(federation.train.rows([0]), 0), clients=2).upload
    return total_is_one_sum(algorithm, task, algorithm.server_init(task, 2), upload, private=private)


@pytest.mark.parametrize(
    ("algorithm", "private", "secure"),
    [
        (FedAvg(), True, True),
        (Doubled(), True, True),
        (Squares(), False, False),
        (Clustered(), False, False),
        (COPFL(), True, False),  # noised uploads have constant masks and scores
        (COPFL(merge="union"), True, False),
        (COPFL(merge="common"), True, True),
        (ALGORITHMS["fedex_lora"](), False, False),
        (ALGORITHMS["ffa_lora"](), True, True),
        (ALGORITHMS["flex_lora"](), False, False),
        (ALGORITHMS["flex_lora"](send="products"), True, True),
        (ServerOptimizer(FedAvg()), False, True),  # FedExP: the sum of squared norms is no sum of uploads
        (ALGORITHMS["feddbe"](), True, True),
        (ALGORITHMS["ifca"](), False, False),  # a sum for each cluster
        (ALGORITHMS["scaffold"](), False, False),
        (with_addons(ServerOptimizer(FedAvg(), Momentum()), ema=0.5, bn_stats="local"), True, True),
    ],
)
def test_a_total_is_one_sum(algorithm: AnyAlgorithm, private: bool, secure: bool) -> None:
    assert is_one_sum(algorithm, private=True) == private
    assert is_one_sum(algorithm, private=False) == secure
