"""Which method for this federation? `copfl.choose(...)`: a race by successive halving on validation samples.

Every candidate trains for most of the rounds with the first seed. Those beyond the best third are
dropped. The others train for all rounds, and the last two with a second seed. So the budget is spent on
rounds, as the order after few rounds is not that after all of them. From half of the rounds on, what is
distinguishably worse than the best is dropped too. A run continues from its checkpoint. Test samples
never enter the race. Local training is always in it.

OUT/race/LABEL-seedS-HASH/   a run folder per candidate and seed
    ranking.txt, .md, .json
    curves                   .png and .svg, of the validation samples
    run.toml                 the choice, for `copfl run -c`
    chosen/                  the choice, trained on all training samples and tested
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.comparison import entries as reading
from copfl.comparison.entries import VALIDATION, Base, Entry, cells, check_seeds, described, layers_of
from copfl.comparison.jobs import Job, finished
from copfl.comparison.ranking import ALIKE, CHOSEN, LOCAL, Choice, Ranked, write
from copfl.comparison.results import Record, paired, record_of
from copfl.comparison.runner import Log, all_done
from copfl.comparison.suitability import reasons, refusals
from copfl.core.metrics import MetricInfo
from copfl.errors import RunError, UsageError
from copfl.experiment.components import resolve
from copfl.experiment.config import Tables
from copfl.experiment.folder import RunFolder, claimed
from copfl.experiment.run import Experiment, prepare, reopen, train
from copfl.experiment.run_settings import RunSettings
from copfl.stats import LEVEL, Difference

FINALISTS = 2  # are trained for all rounds, with this many seeds or more
ADDONS: Tables = {"addons": {"ema": 0.95, "lr_schedule": "cosine"}}  # the finalists also run with these


class Rung(NamedTuple):
    """A stage of the race."""

    rounds: int  # that each run has at its end
    seeds: int  # runs of each candidate
    candidates: int  # that take part


class Candidate(NamedTuple):
    """A method in the race: a job per seed, of all rounds."""

    entry: Entry
    layers: list[Tables]
    jobs: list[Job]

    @property
    def label(self) -> str:
        return self.entry.label


def choose(
    entries: Sequence[str | Entry] = ("all",),
    budget: str | int = "",
    seeds: Sequence[int] = (0, 1, 2),
    base_tables: Base | None = None,
    out: str | Path = "runs/choose",
    *,
    tune: Mapping[str, Sequence[Any]] | None = None,
    addons: bool = False,
    validation: float = VALIDATION,
    retrain: bool = True,
    jobs: int = 1,
    log: Log | None = None,
) -> Choice:
    """The best method for this federation by a race on validation samples, and the ranking.

    >>> import copfl
    >>> found = copfl.choose(["fedavg", "fedper", "copfl"], budget=300, out="runs/mine")  # doctest: +SKIP
    >>> print(found.chosen, found)  # doctest: +SKIP

    `budget` is a number of rounds of all runs together, or a time such as "10m"; by default, a third of what
    the full comparison takes. `tune` has values such as {"lr": [0.1, 0.01]}: each method races with each of
    them. With `addons` the last candidates also race with the training add-ons. The choice is trained again
    on all training samples, in `out`/chosen, unless `retrain` is off. Finished runs in `out` are used again.
    """
    out, log = Path(out), log or (lambda line: None)
    given = base_tables or {}
    every = {"checkpoint_every": 1}  # a rung may end after any round
    base = reading.with_optimizer({**given, "run": {**given.get("run", {}), **every}})
    seeds = check_seeds(seeds)
    race = Race(out, base, seeds, validation, jobs, log)
    candidates = race.candidates(_entries(entries), tune or {})
    local = next(one for one in candidates if one.entry.name == LOCAL)
    experiment = prepare([*local.layers, {"run": {"seed": seeds[0]}}], validation=validation)
    candidates = race.suitable(candidates, experiment)
    rounds = int(candidates[0].jobs[0].tables["run"]["rounds"])
    limit = limit_of(budget, rounds * len(seeds) * len(candidates) / 3)
    standing = race.run(candidates, rounds, limit, addons)
    best = standing.best
    settings = best.jobs[0].tables
    result = Choice(
        f"{Path(str(settings['data'].get('name'))).name}, {settings['run']['clients']} clients",
        best.label,
        race.ranking(standing),
        standing.metric,
        race.spent,
        race.notes,
        out,
    )
    usual = {"seed": seeds[0], "checkpoint_every": RunSettings.checkpoint_every}
    tables = resolve([*best.layers, {"run": usual}], {})
    write(result, {label: at.records[label] for label, at in race.last.items()}, tables)
    if retrain:
        log(f"{best.label} is chosen; it is trained on all training samples, in {out / 'chosen'}")
        begun = RunFolder(out / "chosen").begun  # one that was stopped continues
        with claimed(out / "chosen", new=not begun) as folder:
            tested = train(reopen(folder) if begun else prepare([tables]), folder)
        return dataclasses.replace(result, tested=str(tested))
    return result


def limit_of(budget: str | int, usual: float) -> Limit:
    """A number of rounds, or a time such as 90s, 10m or 2h."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smh]?)\s*", str(budget))
    if not str(budget).strip():
        return Limit(usual, usual=True)
    if found is None or not float(found[1]):
        raise UsageError(
            f'--budget "{budget}" is neither a number of rounds, such as 300, nor a time, such as 10m'
        )
    seconds = {"": 0, "s": 1, "m": 60, "h": 3600}[found[2]]
    return Limit(float(found[1]) * (seconds or 1), bool(seconds))


class Limit(NamedTuple):
    """What the race may cost."""

    amount: float
    seconds: bool = False  # of training, or else rounds
    usual: bool = False  # not the user's


def plan(rounds: int, seeds: int, candidates: int, limit: float) -> list[Rung]:
    """The stages of the race, whose cost is within the limit, in rounds.

    Each stage keeps a third of the candidates, until there are FINALISTS. The runs of a candidate are in a
    row: the rounds of the first seed, then those of the second. What a candidate has of them grows in
    proportion from stage to stage; beyond the first seed it has whole runs. The first stage, which drops
    most, is as long as the limit allows. If it has all rounds, the last one has as many seeds as it allows.
    """
    counts = [candidates]
    while counts[-1] > FINALISTS:
        counts.append(max(FINALISTS, math.ceil(counts[-1] / 3)))
    steps = len(counts) - 1

    def stages(first: int, last: int) -> list[Rung]:
        amounts = [first * (rounds * last / first) ** (stage / steps) for stage in range(steps)]
        within = [(min(round(amount), rounds), max(1, round(amount / rounds))) for amount in amounts]
        return [Rung(*run, count) for run, count in zip([*within, (rounds, last)], counts, strict=True)]

    least = min(seeds, FINALISTS)
    lengths = [(first, least) for first in range(1, rounds + 1)]
    more = [(rounds, last) for last in range(least + 1, seeds + 1)]
    fitting = [pair for pair in lengths + more if cost(stages(*pair)) <= limit]
    return stages(*max(fitting, default=(1, least)))


def cost(rungs: Sequence[Rung]) -> int:
    """The rounds of all runs, each of which continues where the stage before ended."""
    before = [0, *(rung.rounds * rung.seeds for rung in rungs)]
    return sum(
        rung.candidates * (rung.rounds * rung.seeds - done) for rung, done in zip(rungs, before, strict=False)
    )


class Standing(NamedTuple):
    """The candidates after a stage, the best first."""

    order: list[Candidate]
    records: dict[str, list[Record]]  # by label, one of each seed
    rounds: int

    @property
    def metric(self) -> MetricInfo:
        return self.records[self.order[0].label][0].metric

    @property
    def seeds(self) -> int:
        return len(self.records[self.order[0].label])

    @property
    def best(self) -> Candidate:
        return self.order[0]

    def value(self, label: str) -> float:
        return float(np.mean([record.mean() for record in self.records[label]]))

    def gap(self, label: str, other: str, level: float = LEVEL) -> Difference:
        """The paired difference of two candidates over the same clients and seeds."""
        return paired(self.records[label], self.records[other], self.metric.name, level)

    def worse(self, label: str) -> bool:
        """Whether it is distinguishably worse than the best, corrected for the number of candidates."""
        level = 1 - (1 - LEVEL) / max(1, len(self.order) - 1)
        found = self.gap(label, self.best.label, level).clients
        return found.high < 0 if self.metric.higher_is_better else found.low > 0


@dataclass(eq=False)
class Race:
    out: Path
    base: Tables
    seeds: list[int]
    validation: float
    processes: int
    log: Log

    def __post_init__(self) -> None:
        self.spent, self.notes, self.rounds = 0.0, list[str](), 0
        self.left: dict[str, str] = {}  # by label, when and why a candidate was dropped
        self.last: dict[str, Standing] = {}  # by label, the last stage that it took part in
        self.trained: dict[str, int] = {}  # by label, the rounds of all runs

    def candidates(self, rows: Sequence[Entry], tune: Mapping[str, Sequence[Any]]) -> list[Candidate]:
        """Every entry with every value of the grid that concerns it."""
        grid = reading.grid_of(tune, "--tune")
        reading.check_own("--tune", grid)
        found = []
        for entry in rows:
            own = {at: values for at, values in grid.items() if reading.concerns(entry, self.base, at[0])}
            for cell in cells(own):
                label = f"{entry.label} {described(cell, 'optimizer', entry.name)}".strip()
                found.append(self.candidate(entry._replace(label=label), cell))
        return found

    def candidate(self, entry: Entry, more: Tables) -> Candidate:
        layers = [*layers_of(entry, self.base), more]
        make = partial(reading.job_of, self.out / "race", entry.label, layers, validation=self.validation)
        return Candidate(entry, layers, [make(seed) for seed in self.seeds])

    def suitable(self, candidates: list[Candidate], experiment: Experiment) -> list[Candidate]:
        """Those that can train on the task; the others are named."""
        layers = {one.label: one.layers for one in candidates}
        refused = refusals([one.entry for one in candidates], lambda entry: layers[entry.label], experiment)
        self.left |= dict.fromkeys(refused, "could not run")
        if refused:
            self.note(f"These cannot train on the task: {reasons(refused)}.")
        return [one for one in candidates if one.label not in refused]

    def run(self, candidates: list[Candidate], rounds: int, limit: Limit, addons: bool) -> Standing:
        """The stages of the race, up to all rounds."""
        self.rounds = rounds
        extra = FINALISTS * rounds * len(self.seeds) if addons else 0
        amount = limit.amount
        if limit.seconds:  # the first rounds tell what a round costs
            first = self.stage(candidates, max(1, rounds // 16))
            candidates = first.order
            seconds = np.mean([run.cost["seconds"] for runs in first.records.values() for run in runs])
            amount = amount / max(float(seconds), 1e-6)
        stages = plan(rounds, len(self.seeds), len(candidates), amount - extra)
        total = cost(stages) + extra
        if total > amount and not limit.usual:
            self.note(f"The budget is {amount:,.0f} rounds; the shortest race has {total:,}, and is run.")
        for place, rung in enumerate(stages):
            standing = self.stage(candidates, rung.rounds, rung.seeds)
            if place + 1 < len(stages):
                candidates = self.kept(standing, stages[place + 1].candidates)
        if addons:
            candidates = list(standing.order)
            for one in standing.order[:FINALISTS]:
                entry = one.entry._replace(label=f"{one.label} + add-ons")
                candidates.append(self.candidate(entry, {**one.layers[-1], **ADDONS}))
            standing = self.stage(candidates, rounds, len(self.seeds))
        return standing

    def stage(self, candidates: Sequence[Candidate], until: int, seeds: int = 1) -> Standing:
        """Trains the candidates up to this round with the first seeds; those that cannot run are left out."""
        stop = 0 if until >= self.rounds else until
        runs = {
            one.label: [job._replace(until=stop) for job in one.jobs[:seeds]] for one in candidates
        }
        self.log(f"{len(candidates)} candidates to round {until} of {self.rounds}; seeds: {seeds}")
        try:
            all_done([job for jobs in runs.values() for job in jobs], self.processes, self.log)
        except RunError as error:
            self.note(str(error))
        ready = [one for one in candidates if all(finished(job) for job in runs[one.label])]
        if not ready:
            raise RunError(f"no candidate could run. {' '.join(self.notes)}")
        records = {one.label: [record_of(job) for job in runs[one.label]] for one in ready}
        for one in ready:
            before = self.trained.get(one.label, 0)
            self.trained[one.label] = max(before, until * seeds)
            self.spent += self.trained[one.label] - before
        for one in candidates:
            if one not in ready:
                self.left[one.label] = "could not run"
        standing = Standing(ready, records, until)
        score = standing.metric.score
        order = sorted(ready, key=lambda one: -score(standing.value(one.label)))
        standing = standing._replace(order=order)
        self.last |= {one.label: standing for one in ready}
        return standing

    def kept(self, standing: Standing, most: int) -> list[Candidate]:
        """Those that go on: the best ones, without what is distinguishably worse."""
        at = f"at round {standing.rounds}"
        late = 2 * standing.rounds >= self.rounds  # earlier, methods that begin slowly would be lost
        worse = [one for one in standing.order if late and standing.worse(one.label)]
        result = [one for one in standing.order if one not in worse][:most]
        for one in standing.order:
            if one not in result:
                self.left[one.label] = f"worse, {at}" if one in worse else f"dropped for the budget, {at}"
        return result

    def ranking(self, final: Standing) -> list[Ranked]:
        """Every candidate: those of the last stage by value, then the others, the later dropped first."""
        rows = []
        for one in final.order:
            gap = None if one is final.best else final.gap(one.label, final.best.label)
            status = CHOSEN if gap is None else "worse" if final.worse(one.label) else ALIKE
            rows.append(Ranked(one.label, final.rounds, final.seeds, final.value(one.label), gap, status))
        dropped = [label for label in self.last if label not in final.records]
        for label in sorted(dropped, key=lambda label: -self.last[label].rounds):
            at = self.last[label]
            other = final.best.label if final.best.label in at.records else at.best.label
            gap = at.gap(label, other)
            rows.append(Ranked(label, at.rounds, at.seeds, at.value(label), gap, self.left[label]))
        unable = [label for label in self.left if label not in self.last]
        return rows + [Ranked(label, 0, 0, math.nan, None, self.left[label]) for label in unable]

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.log(text)


def _entries(given: Sequence[str | Entry]) -> list[Entry]:
    """The entries, and local training."""
    rows = reading.entries_of(given)
    if not any(row.name == LOCAL for row in rows):
        rows.append(reading.entry_of(LOCAL))
    labels = [row.label for row in rows]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UsageError(f'two candidates are called "{twice[0]}"; remove one')
    return rows
