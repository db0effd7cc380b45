"""Two halves of a federation's rounds: who is in them, and the messages about them.

After a round the server sends the models of both halves to its clients (`HALVES`), and each answers with its
loss with either on its own samples (`LOSSES`). It needs to see each upload: with secure sums, and from as
many rounds as there are clients, halves would reveal what is alike in the uploads of each.
"""

import numpy as np

from copfl.core.batches import choose
from copfl.core.halves import first_half
from copfl.errors import UsageError
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.secure_sum import SMALLEST_COHORT
from copfl.settings.federation import Federation

HALVES, LOSSES = "halves", Field.LOSSES  # kinds of messages: the models of both halves, and a client's answer
SAMPLES = "samples"  # a metric of a client, where its upload has it


def first_clients(federation: Federation, round: int) -> frozenset[int]:
    """The clients in the first half of a round, from the seed alone: the server cannot choose them.

    Args:
        federation: The settings.
        round: From 0.
    """
    seed = federation.run.run.seed
    ids = np.asarray(choose(seed, round, federation.clients, federation.selected), np.int64)
    return frozenset(first_half(seed, round, ids).tolist())


def check_halves(federation: Federation) -> None:
    """UsageError with secure sums, and if halves are too small: all members see both models."""
    if federation.secure.aggregation:
        raise UsageError(
            "run.benefit=true is not possible with secure.aggregation=true: sums of halves reveal single "
            "uploads over the rounds; leave out one of them, or measure the benefit in a simulation"
        )
    if (half := federation.selected // 2) < SMALLEST_COHORT:
        raise UsageError(
            f"run.benefit=true shows all members the means of two halves, here of {half} clients, and "
            f"{SMALLEST_COHORT} are the least: it needs {2 * SMALLEST_COHORT} clients in a round, not "
            f"{federation.selected}"
        )
