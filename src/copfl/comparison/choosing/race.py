"""The race of choose: candidates on their way through stages, and what is left of them.

`choose` makes a `Race`, fills it with candidates, runs it, and asks it for the ranking and the verdict. A race is in
one of two units. In rounds its cost is known before, so its stages are planned once (`run`). In seconds nothing is
known before something was trained, so it is planned anew after each stage (`run_timed`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.comparison.choosing import verdict as judging
from copfl.comparison.choosing.budget import (
    FINALISTS,
    Budget,
    Rung,
    Speed,
    affordable,
    cost,
    plan,
    raceable,
)
from copfl.comparison.choosing.deciding import Decidable
from copfl.comparison.choosing.ranking import ALIKE, CHOSEN, LOCAL, Ranked
from copfl.comparison.choosing.verdict import Against, Verdict
from copfl.comparison.jobs.forecast import Forecast
from copfl.comparison.jobs.job import Job, finished
from copfl.comparison.jobs.processes import Pool
from copfl.comparison.jobs.runner import all_done
from copfl.comparison.jobs.submission import TimeIsUp
from copfl.comparison.results.results import Record, paired, read_record
from copfl.comparison.rows.entries import Entry, check_own, described
from copfl.comparison.rows.entry_settings import RowSettings, job_of, row_settings
from copfl.comparison.rows.spaces import cells, grid_of
from copfl.comparison.rows.suitability import reasons, refusals
from copfl.errors import RunError, UsageError
from copfl.experiment.analysis.convergence import rises
from copfl.experiment.analysis.gains import EQUAL, Gains
from copfl.experiment.experiment import Experiment
from copfl.experiment.progress import span
from copfl.measures.metrics import MetricInfo
from copfl.settings.toml import Tables
from copfl.stats import LEVEL, Difference, Numbers
from copfl.tables import capital

logger = logging.getLogger(__name__)
RETRAINED = 1 / 3  # of the time that is left, that training the choice again may take
FEW_BETTER = "few with a quarter of the rounds and more decide more than all with less"
ADDONS: Tables = {"addons": {"ema": 0.95, "lr_schedule": "cosine"}}  # the finalists also run with these


class Contestant(NamedTuple):
    """A method in the race: a job per seed, of all rounds."""

    entry: Entry
    layers: list[Tables]
    jobs: list[Job]

    @property
    def label(self) -> str:
        return self.entry.label


class StageResult(NamedTuple):
    """The candidates after a stage, the best first."""

    order: list[Contestant]
    records: dict[str, list[Record]]  # by label, one of each seed
    rounds: int

    @property
    def metric(self) -> MetricInfo:
        return self.records[self.order[0].label][0].metric

    @property
    def seeds(self) -> int:
        return len(self.records[self.order[0].label])

    @property
    def best(self) -> Contestant:
        return self.order[0]

    def of(self, candidates: Sequence[Contestant]) -> StageResult:
        """The same of these candidates only."""
        order = [candidate for candidate in self.order if candidate in candidates]
        return self._replace(order=order, records={one.label: self.records[one.label] for one in order})

    def value(self, label: str) -> float:
        return float(np.mean([record.mean() for record in self.records[label]]))

    @property
    def by_loss(self) -> list[Contestant]:
        """The candidates by their loss, which tells them apart before they leave the constant answer.

        Where the metric is no fraction of right answers, or a loss is not known, by the metric.
        """
        losses = {
            label: np.mean([run.curves.get("test_loss", [math.nan])[-1] for run in runs])
            for label, runs in self.records.items()
        }
        if not self.metric.fraction or np.isnan(list(losses.values())).any():
            return self.order
        return sorted(self.order, key=lambda candidate: float(losses[candidate.label]))

    def gap(self, label: str, other: str, level: float = LEVEL) -> Difference:
        """The paired difference of two candidates over the same clients and seeds.

        Args:
            label: Of a candidate.
            other: The label of the one it is compared with.
            level: Of the interval.
        """
        return paired(self.records[label], self.records[other], self.metric.name, level)

    def worse(self, label: str) -> bool:
        """Whether it is distinguishably worse than the best, corrected for the number of candidates."""
        level = 1 - (1 - LEVEL) / max(1, len(self.order) - 1)
        return judging.gain(self.gap(label, self.best.label, level).clients, self.metric).high < 0


@dataclass(eq=False)
class Race:
    """The candidates on their way through the stages, and what was spent and noted so far.

    Args:
        out: The folder of the runs.
        base: Settings of every run.
        seeds: In the order in which stages use them.
        validation: Fraction of each client's training samples on which candidates are compared.
        pool: The processes that train the runs.
        end: Of the race, by the monotonic clock.
        passes: Trainings of the choice that must end before that: the choice and its baseline.
        forecast: Says how long the rest takes.
        constant: The metric of each client's constant answer, on the samples that decide with the first seed.
        samples: For validation, of each client with the first seed; none: not known.
    """

    out: Path
    base: Tables
    seeds: list[int]
    validation: float
    pool: Pool
    end: float = math.inf
    passes: int = 0
    forecast: Forecast = field(default_factory=Forecast)
    constant: Numbers | None = None
    samples: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.spent, self.notes, self.rounds = 0.0, list[str](), 0
        self.stages: list[StageResult] = []  # those that were finished
        self.algorithms: dict[str, str] = {}  # by label
        self.rates: dict[str, float] = {}  # by label, the learning rate of what was not left out
        self.left: dict[str, str] = {}  # by label, when and why a candidate was dropped
        self.last: dict[str, StageResult] = {}  # by label, the last stage that it took part in
        self.trained: dict[str, int] = {}  # by label, the rounds of all runs

    def candidates(self, rows: Sequence[Entry], tune: Mapping[str, Sequence[Any]]) -> list[Contestant]:
        """Every entry with every value of the grid that concerns it.

        Args:
            rows: The methods.
            tune: Values by setting; each method races with each of them.
        """
        grid = grid_of(tune, "tune")
        check_own("tune", grid)
        candidates = []
        alone = [row for row in rows if row.name == LOCAL][:1]  # first: others are compared with it
        for entry in [*alone, *(row for row in rows if row not in alone)]:
            row = row_settings(entry, self.base)
            concerned = {key: values for key, values in grid.items() if row.concerns(key[0])}
            for cell in cells(concerned):
                label = f"{entry.label} {described(cell, 'optimizer', 'algorithm', entry.title)}".strip()
                candidates.append(self.candidate(row._replace(entry=entry._replace(label=label)), cell))
        return candidates

    def candidate(self, row: RowSettings, more: Tables) -> Contestant:
        """A row with more settings, with a job per seed.

        Args:
            row: The method.
            more: What is set on top, such as a learning rate.
        """
        layers = row.with_settings(more)
        make = partial(job_of, self.out / "race", row.label, layers, validation=self.validation)
        candidate = Contestant(row.entry, layers, [make(seed) for seed in self.seeds])
        self.register([candidate])
        return candidate

    def register(self, candidates: Sequence[Contestant]) -> None:
        """Notes the algorithm of each candidate, and the learning rate that it races with."""
        for entry, _, jobs in candidates:
            self.algorithms[entry.label] = entry.name
            if jobs and (rate := jobs[0].run.optimizer.lr) is not None:
                self.rates[entry.label] = rate

    def suitable(self, candidates: list[Contestant], experiment: Experiment) -> list[Contestant]:
        """Those that can train on the task; the others are named.

        Args:
            candidates: All of them.
            experiment: Of one of them, prepared.
        """
        refused = refusals({candidate.label: candidate.layers for candidate in candidates}, experiment)
        self.left |= dict.fromkeys(refused, "could not run")
        if refused:
            self.note(f"These cannot train on the task: {reasons(refused)}.")
        return [candidate for candidate in candidates if candidate.label not in refused]

    def run(self, candidates: list[Contestant], rounds: int, limit: Budget, addons: bool) -> StageResult:
        """The stages of the race, up to all rounds or to what the limit allows; the last finished one.

        Args:
            candidates: Those that race.
            rounds: Of a complete run.
            limit: What the race may cost.
            addons: Whether the last candidates also race with training add-ons.
        """
        self.rounds = rounds
        if limit.seconds:
            return self.run_timed(candidates, addons)
        # The finalists train a second time with add-ons, from the first round: add-ons change the whole run.
        extra = FINALISTS * rounds * len(self.seeds) if addons else 0
        if (
            not limit.usual
        ):  # a budget of nobody follows from the number of candidates, and so leaves none out
            most = raceable(rounds, len(self.seeds), len(candidates), limit.amount - extra)
            candidates = self.first(candidates, most, f"a budget of {limit.amount:,.0f} rounds", FEW_BETTER)
        self.say_what_can_be_decided(len(candidates))
        stages = plan(rounds, len(self.seeds), len(candidates), limit.amount - extra)
        if not limit.usual and cost(stages) + extra > limit.amount:
            wanted = cost(stages) + extra
            stages = affordable(rounds, len(self.seeds), len(candidates), limit.amount - extra)
            if not stages:
                raise UsageError(
                    f"a budget of {limit.amount:,.0f} rounds is too small for {len(candidates)} candidates"
                    f"{' with add-ons' if addons else ''}; the shortest race has {len(candidates) + extra:,}"
                )
            self.note(self.shortened(stages[-1], f"a budget of {limit.amount:,.0f} rounds", f"{wanted:,}"))
        again = self.passes * rounds * self.pool.size  # of the choice, which one process trains
        for number, rung in enumerate(stages):
            done = stages[number - 1].total if number else 0
            following = cost(stages) - cost(stages[: number + 1]) + extra + again
            self.forecast.later = len(candidates) * (rung.total - done) + following
            standing = self.stage(candidates, rung.rounds, rung.seeds)
            if number + 1 < len(stages):
                rest, budget = stages[number + 1 :], limit.amount - extra - self.spent

                # Defaults bind the values of this stage: a closure would see those of the last one.
                def pays(
                    count: int, done: Rung = rung, rest: list[Rung] = rest, budget: float = budget
                ) -> bool:
                    further = [done, rest[0]._replace(candidates=count), *rest[1:]]
                    return cost(further) - cost(further[:1]) <= budget

                candidates = self.kept(standing, rest[0].candidates, pays)
        return self.with_addons(standing) if addons else standing

    def run_timed(self, candidates: list[Contestant], addons: bool) -> StageResult:
        """The same in a time: the first rounds tell what a round costs, and each stage tells it again.

        Args:
            candidates: Those that race.
            addons: Whether the last candidates also race with training add-ons.
        """
        begin, spent = time.monotonic(), self.spent
        self.say_what_can_be_decided(len(candidates))
        first = min(self.rounds, max(2, self.rounds // 16))  # a first round warms up
        standing = self.stage(candidates, first)
        # The order of preference again, and not the order after so few rounds, which is luck: `first` cuts its end.
        candidates = [candidate for candidate in candidates if candidate in standing.order]
        left = self.end - time.monotonic()
        speed = self.speed(standing, time.monotonic() - begin, self.spent - spent)
        again = self.passes * self.rounds * speed.round
        if again > RETRAINED * left:
            self.passes, again = 0, 0.0
            self.note(
                f"The choice is not trained on all training samples: that would take about "
                f"{span(self.rounds * speed.round)} or more of {span(max(0.0, left))} that are left. "
                f"{self.out / 'run.toml'} has its settings."
            )
        self.end -= again  # the race ends earlier, so that the choice can be trained in the time, too
        last = Rung(self.rounds, len(self.seeds), FINALISTS)
        extra = speed.seconds([last]) if addons else 0.0

        def price(rungs: Sequence[Rung]) -> float:
            return speed.seconds(rungs, first)

        left = self.end - time.monotonic()
        most = raceable(self.rounds, len(self.seeds), len(candidates), left - extra, price)
        candidates = self.first(
            candidates, most, f"the time that is left ({span(max(0.0, left))})", FEW_BETTER
        )
        standing = standing.of(candidates)
        stages = affordable(self.rounds, len(self.seeds), len(candidates), left - extra, price)
        if addons and not stages:
            self.note(f"The add-ons do not race: that would take about {span(extra)}.")
            addons, stages = False, affordable(self.rounds, len(self.seeds), len(candidates), left, price)
        least = min(len(self.seeds), FINALISTS)
        if not stages or stages[-1].rounds < self.rounds or stages[-1].seeds < least:
            whole = price(plan(self.rounds, len(self.seeds), len(candidates), 0.0))
            reached = stages[-1] if stages else Rung(first, 1, len(candidates))
            limit = f"the time that is left ({span(max(0.0, left))})"
            self.note(self.shortened(reached, limit, f"about {span(whole)}"))
        try:
            while stages := [rung for rung in stages if rung.total > standing.rounds * standing.seeds]:
                begin, spent = time.monotonic(), self.spent
                rung, left = stages.pop(0), self.end - begin
                expected = speed.seconds([rung], standing.rounds * standing.seeds)
                if expected > left:  # a stage that is begun and not ended has cost its time for nothing
                    self.note(
                        f"The rounds are slower than at first: the stage to round {rung.rounds} would take "
                        f"about {span(expected)} of {span(max(0.0, left))} that are left, and is not begun."
                    )
                    return standing
                done = standing.rounds * standing.seeds

                def pays(
                    count: int, rung: Rung = rung, speed: Speed = speed, done: int = done, left: float = left
                ) -> bool:
                    return speed.seconds([rung._replace(candidates=count)], done) <= left / 2

                standing = self.stage(self.kept(standing, rung.candidates, pays), rung.rounds, rung.seeds)
                speed = self.speed(standing, time.monotonic() - begin, self.spent - spent)
                if not stages:  # the rounds may be faster than at first
                    done, left = standing.rounds * standing.seeds, self.end - time.monotonic() - extra
                    further = partial(speed.seconds, done=done)
                    stages = affordable(self.rounds, len(self.seeds), len(standing.order), left, further)
            return self.with_addons(standing) if addons else standing
        except TimeIsUp:
            self.note(
                "The time was up in a stage, which does not count: the ranking is that after round "
                f"{standing.rounds}."
            )
            return standing

    def shortened(self, last: Rung, limit: str, wanted: str) -> str:
        """What is said before a race that cannot have all rounds and seeds.

        Args:
            last: The last stage that the race reaches.
            limit: What makes it shorter, such as "a budget of 300 rounds".
            wanted: What the whole race takes.
        """
        return (
            f"With {limit} the race ends after {last.rounds} of {self.rounds} rounds with {last.seeds} "
            f"seed{'s' * (last.seeds > 1)}; a race of all rounds takes {wanted}."
        )

    def speed(self, standing: StageResult, seconds: float, rounds: float) -> Speed:
        """What a round takes, by the timing of the runs, and what the stage took beside its rounds.

        Args:
            standing: After a stage.
            seconds: That the stage took.
            rounds: That it trained, of all runs.
        """
        each = float(np.mean([run.cost["seconds"] for runs in standing.records.values() for run in runs]))
        parallel = min(self.pool.size, len(standing.order) * standing.seeds)
        return Speed(each, max(0.0, seconds - rounds * each / parallel), self.pool.size)

    def with_addons(self, standing: StageResult) -> StageResult:
        """All rounds of the last candidates, and of the best of them with add-ons."""
        candidates = list(standing.order)
        for candidate in standing.order[:FINALISTS]:
            entry = candidate.entry._replace(label=f"{candidate.label} + add-ons")
            candidates.append(
                self.candidate(row_settings(entry, self.base), {**candidate.layers[-1], **ADDONS})
            )
        return self.stage(candidates, self.rounds, len(self.seeds))

    def stage(self, candidates: Sequence[Contestant], until: int, seeds: int = 1) -> StageResult:
        """Trains the candidates up to this round with the first seeds; those that cannot run are left out.

        TimeIsUp where the time ends in it; in the first stage, what was reached until then is its result.

        Args:
            candidates: Those that take part.
            until: The round that each run has at its end.
            seeds: How many runs of each candidate.
        """

        def stopped(job: Job) -> Job:  # a method may end by itself before the others: 0 is to its end
            is_whole = until >= min(self.rounds, job.run.run.rounds)
            return job._replace(until=0 if is_whole else until)

        runs = {candidate.label: [stopped(job) for job in candidate.jobs[:seeds]] for candidate in candidates}
        logger.info(f"{len(candidates)} candidates to round {until} of {self.rounds}; seeds: {seeds}")
        missing = "could not run"
        try:
            jobs = [job for jobs in runs.values() for job in jobs]
            all_done(jobs, self.pool, end=self.end, forecast=self.forecast)
        except RunError as error:
            self.note(str(error))
        except TimeIsUp:
            if self.stages:
                raise  # the ranking of the stage before counts: in this one some have more rounds than others
            missing = "not reached in the time"
        ready = [candidate for candidate in candidates if all(finished(job) for job in runs[candidate.label])]
        if not ready and missing != "could not run":
            raise RunError(
                f"the time was up before any candidate had trained {until} rounds; allow more time"
            )
        if not ready:
            raise RunError(f"no candidate could run. {' '.join(self.notes)}")
        records = {
            candidate.label: [read_record(job) for job in runs[candidate.label]] for candidate in ready
        }
        for candidate in ready:
            before = self.trained.get(candidate.label, 0)  # runs continue, so only further rounds are spent
            self.trained[candidate.label] = max(before, until * seeds)
            self.spent += self.trained[candidate.label] - before
        for candidate in candidates:
            if candidate not in ready:
                self.left[candidate.label] = missing
        standing = StageResult(ready, records, until)
        score = standing.metric.score
        order = sorted(ready, key=lambda candidate: -score(standing.value(candidate.label)))
        standing = standing._replace(order=order)
        self.last |= {candidate.label: standing for candidate in ready}
        self.stages.append(standing)
        return standing

    def first(self, candidates: list[Contestant], most: int, limit: str, why: str) -> list[Contestant]:
        """The first candidates, where a limit allows no more; by their order, for no value tells them apart yet.

        Args:
            candidates: In the order of preference.
            most: How many may race.
            limit: What allows no more, such as "4 clients".
            why: It is better so.
        """
        if len(candidates) > most:
            for candidate in candidates[most:]:
                self.left[candidate.label] = f"left out, with {limit}"
                self.rates.pop(candidate.label, None)  # it was not tuned, and the verdict says what was
            self.note(f"With {limit}, {most} of {len(candidates)} candidates race: {why}.")
        return candidates[:most]

    def say_what_can_be_decided(self, candidates: int) -> None:
        """A note before so many candidates race, where clients are few."""
        if len(self.samples) and (
            text := Decidable(len(self.samples), candidates, int(np.median(self.samples))).text
        ):
            self.note(text)

    def at_constant(self, standing: StageResult, candidate: Contestant) -> bool:
        """Whether a candidate is not better than each client's constant answer, on average over the clients.

        Args:
            standing: After a stage.
            candidate: One of it.
        """
        if self.constant is None:
            return False
        record = standing.records[candidate.label][0]
        values = np.array(record.clients[record.metric.name], np.float64)
        gain = record.metric.gain(values, self.constant)
        known = gain[~np.isnan(gain)]
        return bool(len(known)) and float(known.mean()) <= EQUAL

    def kept(
        self, standing: StageResult, most: int, pays: Callable[[int], bool] = lambda count: False
    ) -> list[Contestant]:
        """Those that go on: the best ones, without what is distinguishably worse.

        Before half of the rounds, methods that begin slowly would be lost. So nothing counts as worse then, the loss
        says what is best, and what has not left the constant answer yet goes on as well, as far as the budget can
        pay for it.

        Args:
            standing: After a stage.
            most: Candidates of the next stage.
            pays: Whether the budget is enough for so many candidates in it.
        """
        at = f"at round {standing.rounds}"
        late = 2 * standing.rounds >= self.rounds
        order = standing.order if late else standing.by_loss
        # A candidate that is shown to be worse leaves even if there is room: its rounds are better spent on others.
        worse = [candidate for candidate in order if late and standing.worse(candidate.label)]
        undecided = (
            [] if late else [candidate for candidate in order if self.at_constant(standing, candidate)]
        )
        result = [candidate for candidate in order if candidate not in worse][:most]
        more = [candidate for candidate in undecided if candidate not in result]
        while more and not pays(len(result) + len(more)):
            more = more[:-1]
        if more:
            dropped = sum(candidate not in [*result, *more] for candidate in undecided)
            so = (
                f"the budget can keep all but {dropped} of them" if dropped else "none of them is dropped yet"
            )
            self.note(
                f"{capital(at)} of {self.rounds}, {len(undecided)} of {len(order)} candidates are not better than a "
                f"constant answer, so {so}."
            )
            result += more
        for candidate in order:
            if candidate not in result:
                why = "worse" if candidate in worse else "dropped for the budget"
                unseen = ", not better than a constant answer yet" if candidate in undecided else ""
                self.left[candidate.label] = f"{why}, {at}{unseen}"
        return result

    def ranking(self, final: StageResult) -> list[Ranked]:
        """Every candidate: the last stage by value, then the others, the later dropped first."""
        rows = []
        for candidate in final.order:
            gap = None if candidate is final.best else final.gap(candidate.label, final.best.label)
            if gap is None:
                status = CHOSEN
            elif gap.unknown:
                status = gap.verdict
            else:
                status = "worse" if final.worse(candidate.label) else ALIKE
            rows.append(
                Ranked(candidate.label, final.rounds, final.seeds, final.value(candidate.label), gap, status)
            )
        dropped = [label for label in self.last if label not in final.records]
        for label in sorted(dropped, key=lambda label: -self.last[label].rounds):
            # The choice has more rounds by now; a fair difference is to what it had then. If it was not in that
            # stage (it has add-ons), to the best one there.
            at = self.last[label]
            other = final.best.label if final.best.label in at.records else at.best.label
            gap = at.gap(label, other)
            rows.append(Ranked(label, at.rounds, at.seeds, at.value(label), gap, self.left[label]))
        unable = [label for label in self.left if label not in self.last]
        return rows + [Ranked(label, 0, 0, math.nan, None, self.left[label]) for label in unable]

    def verdict(self, final: StageResult) -> Verdict:
        """Whether it pays to federate: each method against training alone, in their last common stage."""
        ranked = [row.label for row in self.ranking(final) if row.label in self.last]
        alone = next((label for label in ranked if self.algorithms[label] == LOCAL), "")
        methods = [label for label in ranked if self.algorithms[label] != LOCAL]
        level = 1 - (1 - LEVEL) / max(1, len(methods))  # the best of many is good by luck, too (Bonferroni)
        compared = []
        for label in methods:
            common = [at for at in self.stages if {label, alone} <= at.records.keys()]
            if common:
                at, metric = common[-1], final.metric
                curves = [run.curves[metric.name] for run in at.records[label]]
                gap = at.gap(label, alone, level)
                compared.append(Against(label, gap, at.rounds, at.seeds, rises(curves, metric)))
        value, alone_rises = math.nan, 0.0
        if alone:
            at = self.last[alone]
            value = at.value(alone)
            alone_rises = rises([run.curves[at.metric.name] for run in at.records[alone]], at.metric)
        rates: dict[str, set[float]] = {}  # none of a method that the time left out after the first rounds
        for label in methods:
            if label in self.rates:
                rates.setdefault(self.algorithms[label], set()).add(self.rates[label])
        gains = self._gains(compared[0].label) if compared else None
        return judging.verdict(compared, value, alone_rises, final.metric, self.rounds, rates, gains)

    def _gains(self, label: str) -> Gains:
        """What a candidate's models gain over constant answers, with the first seed."""
        values, metric = self.first_values(label), self.last[label].metric
        unknown = np.full(len(values), np.nan)
        return Gains(unknown, unknown, values, metric, self.constant)

    def first_values(self, label: str) -> Numbers:
        """The primary metric of a candidate at each client, with the first seed."""
        record = self.last[label].records[label][0]
        return np.array(record.clients[record.metric.name])

    def note(self, text: str) -> None:
        self.notes.append(text)
        logger.info(text)
