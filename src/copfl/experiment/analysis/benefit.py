"""What each client is worth to the others: main effects from the means of random halves of the clients.

In round t the uploads are also averaged in two random halves, and client j measures on its own samples

    d_tj = loss of the second half's model - loss of the first half's     positive: the first is better for j

A regression over the rounds, d_tj = Σ_i x_ti b_ij + error, with the membership x_ti = 1 in the first half, -1
in the second and 0 for an absent client, estimates by how much a half with client i lowers the loss of j. The
benefit of i is the mean over the others j ≠ i of b_ij minus the mean of b_kj over all k ≠ j. So it is
relative to the mean client, and no client's judgement of itself counts, neither for itself nor in what the
others are compared with.

Judge j counts in units of the root mean square s_j of its d_tj, less its own effect. Otherwise those whose
losses are large would decide: clients with wrong labels, or that report false numbers. The benefit of every
client is in one unit, the geometric mean of all s_j. So they can be compared, and a judge with a false s_j
hardly changes them.

The rounds train with all uploads, whatever the halves are. Intervals are over the draws of the halves: they
cover the mean over the rounds of this run of the main effects in them. Errors differ from round to round, as
gains shrink, which HC2 standard errors allow for.

A judge needs the memberships and its own differences; all that is needed of several judges is a sum
(`Judgement`).
"""

import math
from typing import NamedTuple

import numpy as np

from copfl.core.halves import DIFFERENCE, HALF
from copfl.experiment import records
from copfl.stats import LEVEL, Interval, Numbers, holm, outside, t_quantile

NOTHING = 1e-8  # unexplained by a regression that fits a round exactly, whatever its difference is


class Judgement(NamedTuple):
    """What one judge, or the sum over several, says of each client."""

    value: Numbers  # [clients], the sum over judges j of the estimates / s_j
    judges: Numbers  # [clients], how many say something of each client
    log_scale: Numbers  # [], the sum over judges of ln s_j
    errors: Numbers  # [rounds, clients], what the error of each round may have added to the value

    def plus(self, other: "Judgement") -> "Judgement":
        return Judgement(*(a + b for a, b in zip(self, other, strict=True)))


class Benefit(NamedTuple):
    """The benefit of each client to the others, as loss per round; nan where not known. [clients] each."""

    value: Numbers
    error: Numbers  # standard errors
    freedom: int  # degrees of freedom of the t intervals; 0 where nothing is known

    def interval(self, client: int) -> Interval:
        """The t interval of one client, without correction for the number of clients."""
        half = t_quantile((1 + LEVEL) / 2, self.freedom) * self.error[client] if self.freedom else math.nan
        return Interval(float(self.value[client] - half), float(self.value[client] + half))

    @property
    def p_values(self) -> Numbers:
        """Of a benefit like the mean client's, by Holm for the number of clients; nan where not known."""
        known = np.flatnonzero(np.isfinite(self.error))
        distance = np.abs(self.value[known])
        ratio = np.divide(distance, self.error[known], out=np.zeros(len(known)), where=distance > 0)
        result = np.full(len(self.value), np.nan)
        result[known] = holm(outside(ratio, self.freedom).tolist()) if self.freedom else np.nan
        return result

    @property
    def verdicts(self) -> list[str]:
        """What may be said of each client against the mean client."""

        def verdict(p: float, value: float) -> str:
            if math.isnan(p):
                return "not known"
            if p >= 1 - LEVEL:
                return "not distinguishable"
            return "higher" if value > 0 else "lower"

        return list(map(verdict, self.p_values.tolist(), self.value.tolist()))

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """The ranks that each client may have, 1 is the highest benefit: those that no interval excludes.

        (1, number of clients) for a client that no other is distinguishable from.
        """
        clients = range(len(self.value))
        low, high = np.array([self.interval(n) for n in clients]).reshape(-1, 2).T
        return [(1 + int((low > high[n]).sum()), len(low) - int((high < low[n]).sum())) for n in clients]


class Design(NamedTuple):
    """The regression on the memberships of some rounds: the same for all who judge in these rounds."""

    rows: Numbers  # [rounds, clients], the memberships
    inverse: Numbers  # [clients, rounds], the pseudo-inverse of the rows
    rank: int

    @property
    def freedom(self) -> int:
        return len(self.rows) - self.rank

    @property
    def unexplained(self) -> Numbers:
        """[rounds], 1 minus the leverage of each round."""
        return np.asarray(1 - np.einsum("tn,nt->t", self.rows, self.inverse))


def design(rows: Numbers) -> Design | None:
    """The regression on these memberships, [rounds, clients]; None where they do not determine it."""
    least = rows.shape[1] - 1  # halves of equal size leave open what all clients have in common
    if least < 2 or len(rows) <= least:  # before the inverse, whose cost grows with the clients
        return None
    regression = Design(rows, np.asarray(np.linalg.pinv(rows), np.float64), int(np.linalg.matrix_rank(rows)))
    return regression if regression.rank >= least and regression.freedom > 0 else None


def judged(regression: Design, differences: Numbers, judge: int) -> Judgement:
    """The estimates of one judge, from its own differences [rounds].

    Args:
        regression: What each client was in, in each round.
        differences: Of the judge's losses, [rounds].
        judge: The number of the client.
    """
    rows, inverse, _ = regression
    others = np.delete(np.arange(rows.shape[1]), judge)
    contrast = inverse[others] - inverse[others].mean(0)
    residuals, unexplained = differences - rows @ (inverse @ differences), regression.unexplained
    errors = contrast * residuals / np.sqrt(np.maximum(unexplained, NOTHING))
    of_judge = rows[:, judge]
    of_others = differences - of_judge * (of_judge @ differences) / (of_judge @ of_judge)
    scale = math.sqrt((of_others**2).mean())
    judgement = no_judgement(*rows.shape)
    if scale > 0:
        judgement.value[others], judgement.judges[others] = contrast @ differences / scale, 1
        of_rounds = np.where(unexplained > NOTHING, errors / scale, np.inf)  # inf: error not known
        judgement.errors[:, others] = of_rounds.T
        judgement = judgement._replace(log_scale=np.log(scale))
    return judgement


def no_judgement(rounds: int, clients: int) -> Judgement:
    """The judgement of a judge whose losses never differ.

    Args:
        rounds: Of the run.
        clients: How many there are.
    """
    return Judgement(np.zeros(clients), np.zeros(clients), np.zeros(()), np.zeros((rounds, clients)))


def group_benefit(membership: Numbers, differences: Numbers) -> Benefit:
    """The benefit of each client to the others.

    Args:
        membership: [rounds, clients], 1 in the first half, -1 in the second, 0 absent.
        differences: [rounds, clients], each client's loss with the second half's model minus that with the
            first's; nan where it does not judge.
    """
    present = (membership != 0).any(0)
    if not present.all():  # new clients never take part, and nothing is known of them
        known = group_benefit(membership[:, present], differences[:, present])
        value, error = np.full((2, len(present)), np.nan)
        value[present], error[present] = known.value, known.error
        return Benefit(value, error, known.freedom)
    total = no_judgement(*membership.shape)
    judging = np.isfinite(differences)
    freedom: list[int] = []
    for rounds in np.unique(judging, axis=1).T:
        regression = design(membership[rounds])
        if regression is None:
            continue
        freedom.append(regression.freedom)
        for judge in np.flatnonzero((judging == rounds[:, None]).all(0)).tolist():
            one = judged(regression, differences[rounds, judge], judge)
            errors = np.zeros(membership.shape)
            errors[rounds] = one.errors
            total = total.plus(one._replace(errors=errors))
    return of_sum(total, min(freedom, default=0))


def worth_to_itself(membership: Numbers, differences: Numbers) -> Benefit:
    """How much more a client's uploads lower its own loss than others' do: b_ii - mean of b_ki over k ≠ i.

    Only the client itself measures it: it is no evidence against one that lies.

    Args:
        membership: As in `group_benefit`.
        differences: As in `group_benefit`.
    """
    present = (membership != 0).any(0)
    value, error = np.full((2, len(present)), np.nan)
    freedom: list[int] = []
    for client in np.flatnonzero(present).tolist():
        judging = np.isfinite(differences[:, client])
        regression = design(membership[judging][:, present])
        if regression is None:
            continue
        position = int(present[:client].sum())  # its place among those that take part
        column, (rows, inverse, _) = differences[judging, client], regression
        if (regression.unexplained <= NOTHING).any():  # a value without an interval is not reported
            continue
        contrast = inverse[position] - np.delete(inverse, position, 0).mean(0)
        residuals = (column - rows @ (inverse @ column)) / np.sqrt(regression.unexplained)
        freedom.append(regression.freedom)
        value[client], error[client] = contrast @ column, math.sqrt(((contrast * residuals) ** 2).sum())
    return Benefit(value, error, min(freedom, default=0))


class RunHalves(NamedTuple):
    """What the rounds of a run say, [rounds, clients] each; see `group_benefit`."""

    membership: Numbers
    differences: Numbers


def halves_of(lines: list[records.Record], clients: int) -> RunHalves | None:
    """The halves in the records of a run; None where no round has any.

    Args:
        lines: The records of the run.
        clients: How many there are.
    """
    if not any(DIFFERENCE in line["per_client"] for line in lines):
        return None
    membership, differences = (records.table(lines, name, clients) for name in (HALF, DIFFERENCE))
    return RunHalves(np.nan_to_num(membership), differences)


def of_sum(total: Judgement, freedom: int) -> Benefit:
    """The benefit from the sum over the judges.

    Args:
        total: The sum of their judgements.
        freedom: The smallest number of degrees of freedom of a judge: its rounds minus the rank of their
            memberships, T - n + 1 if all clients take part in T rounds with halves of equal size.
    """
    clients = len(total.judges)
    if not total.judges.any():
        return Benefit(np.full(clients, np.nan), np.full(clients, np.nan), freedom)
    unit = np.exp(total.log_scale * (clients - 1) / total.judges.sum())  # the geometric mean of all s_j
    per_judge = np.divide(unit, total.judges, out=np.full(clients, np.nan), where=total.judges > 0)
    error = np.sqrt((total.errors**2).sum(0)) * per_judge
    known = np.isfinite(error)  # a value without an interval is not reported
    return Benefit(np.where(known, total.value * per_judge, np.nan), np.where(known, error, np.nan), freedom)


def rounds_wanted(clients: int) -> int:
    """The number of rounds below which most intervals are too wide to say anything."""
    return 2 * clients + 10
