"""Which candidates are tried on which folds and with which seeds, as far as the budget allows it.

All are tried on a first fold, and what ends after a few rounds on all folds at once. What is worse than the best by
more than a standard error is given up. Of the others as many go on as can be tried on all folds, and a third at least;
then the best are tried with more seeds. What the budget left on fewer folds is given up, unless it is better.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from copfl.choosing.choice import difference, is_worse, on_common_rows, site_losses
from copfl.choosing.evaluate import Evaluated
from copfl.comparison.choosing.trying import Attempt, Trying, again, joined
from copfl.comparison.halving import promoted
from copfl.experiment.progress import span

logger = logging.getLogger(__name__)
FINALISTS = 2  # candidates, or more, that go on
RETRAINED = 1 / 3  # of the time that is left, that training the choice again may take
BUDGET = "given up for the budget"


@dataclass(eq=False)
class Standing:
    """What is known of the candidates so far.

    Args:
        trying: What was tried.
        rivals: What sites train alone by scikit-learn, by the names of the candidates.
        alone: The labels of what else is alone.
        is_rmse: Whether losses are squared errors.
        only_shown: Whether no site can take a rival, so that nothing is given up because of one.
    """

    trying: Trying
    rivals: Mapping[str, Evaluated]
    alone: Collection[str]
    is_rmse: bool
    only_shown: bool = False
    given_up: dict[str, str] = field(default_factory=dict)  # by label, when and why

    @property
    def evaluated(self) -> dict[str, Evaluated]:
        """All candidates that were tried, on all their folds and seeds."""
        return {label: joined(trials) for label, trials in self.trying.trials.items()} | dict(self.rivals)

    @property
    def able(self) -> dict[str, Evaluated]:
        """Those that were not given up."""
        return {label: found for label, found in self.evaluated.items() if label not in self.given_up}

    def folds(self, label: str) -> int:
        """On how many folds it was tried."""
        if label in self.rivals:
            return self.trying.room.folds.number
        return len({number for attempt, _ in self.trying.trials[label] for number in attempt.numbers})

    def seeds(self, label: str) -> int:
        """With how many seeds it was tried."""
        return len({attempt.run.run.seed for attempt, _ in self.trying.trials.get(label, [])}) or 1

    def give_up(self) -> None:
        """Gives up what diverged, and what is worse than the best by more than a standard error.

        What is alone is worse than what is alone: a verdict needs the best of it, whatever the methods are.
        """
        for label, found in self.able.items():
            if np.isinf(np.concatenate(found.losses)).any():
                self.given_up[label] = "diverged, or is sure of what is wrong"
        losses = {label: found.losses for label, found in self.able.items()}
        alone = {label: own for label, own in losses.items() if label in self.alone or label in self.rivals}
        takeable = {label: own for label, own in losses.items() if self._can_be_taken(label)}
        kept = self._best_of_each(self.order())
        for label in losses:
            is_decided = label in self.rivals or self.folds(label) == self.trying.room.folds.number
            if is_decided or label in kept:
                continue
            if is_worse(label, alone if label in self.alone else takeable, self.is_rmse):
                self.given_up[label] = self._after("worse than the best", label)

    def end(self) -> None:
        """Gives up what the budget left on fewer folds than others, unless it is better by a standard error.

        All are compared on common rows, so that it would cost the others most of theirs.
        """
        able, losses = self.able, {label: found.losses for label, found in self.able.items()}
        most = max((self.folds(label) for label in able if label not in self.rivals), default=0)
        could = [label for label in able if self.folds(label) >= most and self._can_be_taken(label)]
        if not could:
            return
        means = {label: float(np.nanmean(site_losses(losses[label], self.is_rmse))) for label in could}
        best = min(could, key=lambda label: means[label])
        needed = {} if self.rivals else self._best_of_each(self.order())
        for label in able:
            if label not in needed and self.folds(label) < most:
                excess, error = difference(losses[label], losses[best], self.is_rmse)
                if not excess < -error:
                    self.given_up[label] = self._after(BUDGET, label)

    def _can_be_taken(self, label: str) -> bool:
        return not (self.only_shown and label in self.rivals)

    def order(self) -> list[str]:
        """The candidates that could be chosen, without rivals, the best first: by common rows."""
        losses = (
            on_common_rows({label: found.losses for label, found in self.able.items()}) if self.able else {}
        )
        means = {label: float(np.nanmean(site_losses(own, self.is_rmse))) for label, own in losses.items()}
        return sorted((label for label in means if label not in self.rivals), key=lambda label: means[label])

    def keep(self, labels: Sequence[str], among: Sequence[str]) -> None:
        """Gives up the others for the budget.

        Args:
            labels: That go on.
            among: All of them.
        """
        for label in among:
            if label not in labels:
                self.given_up[label] = self._after(BUDGET, label)

    def first_of(self, waiting: Sequence[str], cost: Callable[[str], float], left: float) -> list[str]:
        """The best of these, as many as the budget can pay for.

        Args:
            waiting: The best first.
            cost: Of a candidate.
            left: Of the budget, in the same unit.
        """
        order = self._best_of_each(waiting)
        order += [label for label in waiting if label not in order]
        found = []
        for label in order:
            left -= cost(label)
            if left < 0:
                break
            found.append(label)
        return found

    def _best_of_each(self, order: Sequence[str]) -> list[str]:
        """The best method, and the best of what is alone where no rival is: a verdict compares the two."""
        sides = [[label for label in order if (label in self.alone) == alone] for alone in (False, True)]
        return [side[0] for side in sides[: 1 if self.rivals else 2] if side]

    def _after(self, why: str, label: str) -> str:
        folds = self.folds(label)
        return f"{why}, after {folds} fold{'s' * (folds > 1)} of {self.trying.room.folds.number}"


def fill(
    trying: Trying,
    attempts: Sequence[Attempt],
    rivals: Callable[[], Mapping[str, Evaluated]],
    *,
    alone: Collection[str],
    is_rmse: bool,
    only_shown: bool,
    seeds: Sequence[int],
    more: Callable[[Sequence[str]], Sequence[Attempt]] = lambda best: (),
    after_first: Callable[[Standing], None] = lambda standing: None,
) -> Standing:
    """Tries the candidates as far as the budget allows it.

    Args:
        trying: Has the budget.
        attempts: The first one of each candidate.
        rivals: As of `Standing`; waits for them.
        alone: As of `Standing`.
        is_rmse: As of `Standing`.
        only_shown: As of `Standing`.
        seeds: Of the runs.
        more: Further candidates, by the best of the first ones.
        after_first: Is called when the first fold is done, before anything is given up.
    """
    trying.all_of(attempts)
    standing = Standing(trying, rivals(), alone, is_rmse, only_shown)
    if not trying.trials:
        return standing
    after_first(standing)
    if further := more(standing.order()[:FINALISTS]):
        trying.all_of(further)
    standing.give_up()
    every = range(trying.room.folds.number)
    for fold in every[1:]:
        waiting = [label for label in standing.order() if standing.folds(label) == fold]
        if not waiting or trying.is_over:
            break
        cost, left = _price(trying)
        through = standing.first_of(waiting, cost, left / (len(every) - fold))
        once = standing.first_of(waiting, cost, left)[: max(FINALISTS, promoted(len(waiting)))]
        going = max(through, once, key=len)
        if not going:
            break
        standing.keep(going, waiting)
        logger.info(f"{len(going)} of {len(waiting)} candidates go on to fold {fold + 1} of {len(every)}")
        trying.all_of([again(*trying.trials[label][0], [fold], seeds[0]) for label in going])
        standing.give_up()
    for seed in seeds[1:]:
        waiting = [label for label in standing.order() if trying.trials[label][0][0].steps]
        cost, left = _price(trying)
        folds = max(map(standing.folds, waiting), default=0)
        going = [] if trying.is_over or not folds else standing.first_of(waiting, cost, left / folds)
        if not going:
            break
        logger.info(f"{len(going)} of {len(waiting)} candidates are tried with seed {seed}")
        trying.all_of([again(*trying.trials[label][0], range(folds), seed) for label in going])
    standing.end()
    return standing


def _price(trying: Trying) -> tuple[Callable[[str], float], float]:
    """What a fold of a candidate costs, and what is left of the budget: in rounds, or in seconds."""
    is_time = math.isfinite(trying.end)

    def cost(label: str) -> float:
        attempt, trial = trying.trials[label][0]
        whole = trial.seconds / trying.pool.size if is_time else trial.trained
        return whole / len(attempt.numbers)

    return cost, trying.end - time.monotonic() if is_time else trying.rounds - trying.spent


def time_for_the_choice(standing: Standing, passes: int) -> str:
    """Keeps time for training the choice again; why there is none, or "".

    Args:
        standing: After the first fold.
        passes: Trainings of the choice and of what it is compared with.
    """
    trying = standing.trying
    left = trying.end - time.monotonic()
    order = standing.order()
    if math.isinf(left) or not order or not passes:
        return ""
    attempt, trial = trying.trials[order[0]][0]
    again = 1.5 * passes * trial.seconds / len(attempt.numbers)
    if again > RETRAINED * left:
        return (
            f"The choice is not trained on all training samples: that would take about {span(again)} or more of "
            f"{span(max(0.0, left))} that are left."
        )
    trying.end -= again
    return ""
