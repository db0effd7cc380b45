"""Two halves of a federation's rounds: who is in them, and the messages about them.

After a round the server sends the models of both halves to its clients (`HALVES`), and each finds its loss
with either on its own samples. Without secure aggregation it answers with the two losses. With it, the losses
stay at the nodes: after the last round the server asks a `Question`, and the nodes add up in a secure sum
what they conclude from them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.core.batches import choose
from copfl.core.halves import first_half
from copfl.errors import UsageError, WireError
from copfl.experiment.analysis.benefit import Judgement, no_judgement
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.secure_sum import SMALLEST_COHORT, Floats, Rules, Words, quantised
from copfl.settings.federation import Federation

HALVES, LOSSES = "halves", Field.LOSSES  # kinds of messages: the models of both halves, and a client's answer
COMPARED = "half_compared"  # a metric of a client: 1 if it has two losses, which stay with it
SAMPLES = "samples"  # a metric of a client, where its upload has it
MESSAGE = "halves"  # in the record of a round: the SHA-256 of both models
DIGEST = 32  # bytes of a SHA-256
BENEFIT = "benefit.json"  # in the folder of a run with secure sums


def first_clients(federation: Federation, round: int) -> frozenset[int]:
    """The clients in the first half of a round, from the seed alone: the server cannot choose them."""
    seed = federation.run.run.seed
    ids = np.asarray(choose(seed, round, federation.clients, federation.selected), np.int64)
    return frozenset(first_half(seed, round, ids).tolist())


def memberships(federation: Federation, rounds: Sequence[int]) -> Floats:
    """[rounds, clients], 1 in the first half, -1 in the second, of rounds in which every client took part."""
    return np.array(
        [
            [1.0 if n in first else -1.0 for n in range(federation.clients)]
            for first in (first_clients(federation, round) for round in rounds)
        ]
    ).reshape(-1, federation.clients)


def check_halves(federation: Federation) -> None:
    """UsageError if halves are too small: all members see both models, and what a small sum reveals."""
    if (half := federation.selected // 2) < SMALLEST_COHORT:
        raise UsageError(
            f"run.benefit=true shows all members the means of two halves, here of {half} clients, and "
            f"{SMALLEST_COHORT} are the least: it needs {2 * SMALLEST_COHORT} clients in a round, not "
            f"{federation.selected}"
        )
    if federation.secure.aggregation and federation.selected < federation.clients:
        raise UsageError(
            "run.benefit=true with secure.aggregation needs every client in every round; set "
            "run.participation=1"
        )


# -- what the nodes conclude, in a secure sum ----------------------------------------------------------------


class Question(NamedTuple):
    """Of which rounds each judge concludes what the clients are worth: the same for all judges."""

    rounds: Tensor  # [rounds], from 0
    messages: Tensor  # [rounds, DIGEST] uint8, of the models that were compared


def like_question(rounds: int) -> Question:
    """The structure of a question about so many rounds."""
    return Question(torch.zeros(rounds, dtype=torch.int64), torch.zeros(rounds, DIGEST, dtype=torch.uint8))


def question_of(rounds: Sequence[int], messages: Sequence[str]) -> Question:
    """The question about these rounds."""
    digests = np.array([list(bytes.fromhex(message)) for message in messages], np.uint8)
    return Question(torch.tensor(list(rounds), dtype=torch.int64), torch.from_numpy(digests))


def size_of(rounds: int, clients: int) -> int:
    """The entries of a judgement in a sum."""
    return (rounds + 3) * clients + 1


def words_of(judgement: Judgement, rules: Rules) -> Words:
    """One judge's part of the sum: log scale, value, judges, errors, and whether an error is not known.

    A judge whose scale is below 1 / range says nothing: its losses hardly differ, and no digit leaves it.
    """
    largest = math.log(rules.range)
    if judgement.log_scale < -largest:
        judgement = no_judgement(*judgement.errors.shape)
    value, judges, log_scale, errors = judgement
    is_known = np.isfinite(errors) & (np.abs(errors) <= rules.range)
    parts = np.minimum(log_scale, largest), value, judges, np.where(is_known, errors, 0.0), (~is_known).any(0)
    return quantised(np.concatenate([part.reshape(-1).astype(np.float64) for part in parts]), rules)


def judgement_from(values: Floats, rounds: int, clients: int, rules: Rules) -> Judgement:
    """The sum over the judges; WireError if none of theirs have it, so that a member added other numbers.

    What a judge says of the others adds up to nothing, and it judges all of them and not itself. A member that
    makes up its losses, and adds what follows from them, is not found.
    """
    log_scale, (value, judges, *errors, unknown) = values[0], values[1:].reshape(rounds + 3, clients)
    table, judges, unknown = np.array(errors).reshape(rounds, clients), np.rint(judges), np.rint(unknown)
    # Each entry is rounded by each judge, and up to twice as many are added up.
    rounding = clients**2 * rules.step
    own = judges.sum() / (clients - 1) - judges  # of each client, how often it judges
    balances = [value.sum(), *(() if unknown.any() else table.sum(1))]
    is_sum = (
        np.isin(own, (0, 1)).all()
        and abs(log_scale) <= (own * math.log(rules.range)).sum() + rounding
        and (np.abs(balances) <= rounding).all()
        and ((unknown >= 0) & (unknown < clients)).all()
    )
    if not is_sum:
        raise WireError("a member added numbers that no losses give")
    return Judgement(value, judges, np.asarray(log_scale), np.where(unknown > 0, np.inf, table))
