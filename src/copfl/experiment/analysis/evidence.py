"""Weights by evidence: equal weights, but none for a client that is known to do harm.

    w_i = 0  once  benefit_i + t se_i < 0  and  b_ii < mean of b_ki over k ≠ i,  else 1

with the symbols of `experiment.benefit`.

The benefit to the others is relative to the mean client, so many honest clients are below it: with few
classes each, their updates disturb the others. What distinguishes them is the second condition: their uploads
lower their own loss. So no client loses its weight whose own losses speak for it. One that reports false
losses keeps it: this is for clients that are broken; `clip`, `trimmed_mean` and `median` are for those that
attack.

There are few looks, as each may err: after 2n rounds with n clients, then every n rounds. A client without
weight is in no half, so nothing more is learned about it, and it does not return.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from copfl.core.algorithm import AnyAlgorithm, leave_out
from copfl.experiment import records
from copfl.experiment.analysis.benefit import group_benefit, halves_of, worth_to_itself
from copfl.stats import Numbers
from copfl.wrappers.base import Wrapper
from copfl.wrappers.evidence import ByEvidence


def weighs(algorithm: Any) -> bool:
    """Whether the algorithm, also one inside wrappers, has weights by evidence."""
    return isinstance(algorithm, ByEvidence) or (
        hasattr(algorithm, "algorithm") and weighs(algorithm.algorithm)
    )


def without_weight(algorithm: Any, server: Any) -> frozenset[int]:
    """The clients that have lost their weight, by the server of the algorithm.

    Args:
        algorithm: With its wrappers.
        server: Its record.
    """
    while isinstance(algorithm, Wrapper) and not isinstance(algorithm, ByEvidence):
        algorithm, server = algorithm.algorithm, algorithm.inner("server", server)
    weights = server.weight.tolist() if isinstance(algorithm, ByEvidence) else []
    return frozenset(client for client, weight in enumerate(weights) if not weight)


def looks(rounds: int, clients: int) -> bool:
    """Whether the weights are decided on after so many rounds with so many clients.

    Args:
        rounds: That are trained.
        clients: That train.
    """
    return rounds >= 2 * clients and rounds % clients == 0


def harmful(membership: Numbers, differences: Numbers) -> NDArray[np.bool_]:
    """Which clients are known to do harm, [clients] bool.

    Args:
        membership: [rounds, clients], see `group_benefit`.
        differences: [rounds, clients], see `group_benefit`.
    """
    benefit, to_itself = group_benefit(membership, differences), worth_to_itself(membership, differences)
    high = np.array([benefit.interval(n).high for n in range(len(to_itself.value))])
    return np.asarray((high < 0) & (to_itself.value < 0))


def reweighted(algorithm: AnyAlgorithm, server: Any, lines: list[records.Record], clients: int) -> Any:
    """The server without the clients that the rounds until now show to do harm.

    Args:
        algorithm: One that weighs by evidence.
        server: Its server after these rounds.
        lines: The records of all rounds until now.
        clients: How many clients there are.
    """
    halves = halves_of(lines, clients)
    return server if halves is None else leave_out(algorithm, server, torch.from_numpy(harmful(*halves)))
