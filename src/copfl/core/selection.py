"""Which round a client's model is taken from: the best by the client's own validation samples; when a run ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from copfl.core.evaluation import VALIDATED, VALIDATION_LOSS
from copfl.measures.metrics import MetricInfo

Ids = NDArray[np.int64]
Values = NDArray[np.float64]


@dataclass
class BestRounds:
    """Each client's best round so far, a function of the metrics of the rounds alone.

    Of equal values the later round counts: few validation samples allow few values, and the later model has
    trained for longer. A client without a value so far, for lack of validation samples, has its last
    evaluation. A round whose result is not finite never counts.
    """

    metric: MetricInfo
    rounds: Ids  # [clients], from 1; 0: never evaluated
    values: Values  # [clients], on the validation samples; nan: none
    unimproved: int = 0  # evaluations since a client was better than ever before

    @classmethod
    def none_of(cls, metric: MetricInfo, clients: int) -> Self:
        """Before the first round."""
        return cls(metric, np.zeros(clients, np.int64), np.full(clients, np.nan))

    def replaced(self, ids: Ids, metrics: Mapping[str, Values]) -> NDArray[np.bool_]:
        """Of which of these clients this evaluation is the best so far."""
        new, before = self._new(metrics), self.values[ids]
        is_as_good = np.isnan(before) | (self.metric.gain(new, before) >= 0)
        return np.asarray(_finite(metrics) & is_as_good)

    def add(self, number: int, ids: Ids, metrics: Mapping[str, Values]) -> None:
        """Takes in a round, numbered from 1; without an evaluation nothing changes."""
        if f"{self.metric.name}{VALIDATED}" not in metrics:
            return
        new, before, replaced = self._new(metrics), self.values[ids], self.replaced(ids, metrics)
        is_better = ~np.isnan(new) & ~(self.metric.gain(new, before) <= 0)  # also than none
        self.unimproved = 0 if is_better.any() else self.unimproved + 1
        self.rounds[ids[replaced]] = number
        self.values[ids[replaced]] = new[replaced]

    def _new(self, metrics: Mapping[str, Values]) -> Values:
        """The values of an evaluation; nan where the update or the model's outputs were not finite."""
        return np.where(_finite(metrics), metrics[f"{self.metric.name}{VALIDATED}"], np.nan)


def has_ended(done: int, rounds: int, best: BestRounds | None, patience: int) -> bool:
    """Whether a run ends here: it has all its rounds, or no client improved in so many evaluations.

    Args:
        done: The rounds that it has.
        rounds: Those that were asked for.
        best: The best round of each client; None where the last one counts.
        patience: The number of evaluations, see `run.patience`; 0: it ends with its rounds.
    """
    return done >= rounds or (best is not None and best.unimproved >= patience > 0)


def _finite(metrics: Mapping[str, Values]) -> NDArray[np.bool_]:
    """Whether the update and the outputs of each client were finite, as far as it has samples to tell."""
    losses = [metrics[name] for name in ("test_loss", VALIDATION_LOSS)]  # nan also without samples
    return np.asarray((metrics["healthy"] > 0) & np.isfinite(losses).any(0))
