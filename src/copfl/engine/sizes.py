"""Which clients of a batch take their steps together, where they have different numbers of samples.

A batch of clients takes as many steps as its largest client, and each step computes all of them. In groups of
similar size few of these steps are padding. The grouping is a function of the sizes, so a repeated or resumed
run has the same one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# What a step costs beside its clients, in clients: launching its operations. More groups have more steps.
OVERHEAD = {"vmap": 20.0, "cuda_graph": 2.0}
MOST_GROUPS = 4  # each group is a program of its own, which is recorded at the start of a run
WORTH = 0.7  # of the cost of one group, at most: the groups' records are copied, and recording takes seconds


def groups_of(sizes: NDArray[np.int64], batch: int, engine: str) -> list[NDArray[np.int64]]:
    """The rows of each group, the group of the largest clients first; one group where more are not worth it.

    Args:
        sizes: Training samples of each client, [N].
        batch: Samples of a step.
        engine: The name of the mapping.
    """
    everybody = [np.arange(len(sizes))]
    if engine not in OVERHEAD:
        return everybody
    order = np.argsort(-sizes, kind="stable")
    steps = -(-sizes[order] // batch)
    cuts, cost = _cheapest_cuts(steps.tolist(), OVERHEAD[engine])
    if cost > WORTH * float(steps[0]) * (OVERHEAD[engine] + len(sizes)):
        return everybody
    return [np.sort(rows) for rows in np.split(order, cuts)]


def _cheapest_cuts(steps: Sequence[int], overhead: float) -> tuple[list[int], float]:
    """Where to cut clients, the largest first, into groups, and what a round then costs.

    The cost of a group is its first client's number of steps times (overhead + clients).

    Args:
        steps: Of each client, falling.
        overhead: Of a step, in clients.
    """
    count = len(steps)
    # A group begins where the number of steps falls; clients with equally many stay together.
    begins = np.array([n for n in range(count) if n == 0 or steps[n] < steps[n - 1]])
    ends = np.append(begins[1:], count)
    # of_group[i, j]: the cost of a group from begins[i] to ends[j], j >= i.
    lengths = ends[None, :] - begins[:, None]
    of_group = np.where(lengths > 0, np.asarray(steps)[begins][:, None] * (overhead + lengths), np.inf)
    lowest = of_group[0]  # of clients up to ends[j], in the groups so far
    choices: list[NDArray[np.int64]] = []
    best_cost, best_groups = float(lowest[-1]), 1
    for groups in range(2, min(MOST_GROUPS, len(begins)) + 1):
        # The last group begins at begins[i]; the others end at ends[i - 1].
        totals = lowest[:-1, None] + of_group[1:, :]
        choices.append(np.argmin(totals, axis=0))
        lowest = totals.min(axis=0)
        if lowest[-1] < best_cost:
            best_cost, best_groups = float(lowest[-1]), groups
    cuts: list[int] = []
    last = len(ends) - 1
    for choice in reversed(choices[: best_groups - 1]):
        cuts.append(int(begins[choice[last] + 1]))
        last = int(choice[last])
    return sorted(cuts), best_cost
