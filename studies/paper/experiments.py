"""An experiment of the paper as data, and the jobs that it needs. Nothing here trains or reads data sets."""

import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from copfl.comparison.jobs.job import Job, accuracies
from copfl.comparison.rows.entries import Entry, described
from copfl.comparison.rows.entry_settings import optimizer_of, row_settings
from copfl.comparison.rows.spaces import Grid, cells, grid_of
from copfl.errors import UsageError, one_of, raised_as, unknown
from copfl.settings.complete import complete
from copfl.settings.presets import content, counted
from copfl.settings.schema import KINDS, Run
from copfl.settings.toml import Tables
from studies.paper.records import STATISTICS

PROTOCOLS = {
    "paper": "Paper protocol: CO-PFL with MAMO at the paper's rates, baselines with SGD tuned over its grid",
    "equal": "Equal protocol: the same optimizer (Adam), the same rates and the same tuning for every method",
}
CHARTS = ("none", "curves", "heatmap", "beside")
GROUPS = {
    "finetuning": (
        "finetuning-text",
        "finetuning-servers",
        "finetuning-images",
    ),  # past the paper: not among "all"
    "figures": ("table1", "fig-convergence", "fig-heatmap", "fig-mamo", "table-ablation", "table-samples"),
}
STUDY = Path(__file__).parent
FILES = STUDY / "experiment_files"


@dataclass(frozen=True)
class Budget:
    """Rounds, evaluations and seeds: the same for every method."""

    name: str
    seeds: int
    rounds: int
    eval_every: int
    last: int  # evaluations that a value is the mean of
    tune_rounds: int
    tune_eval_every: int
    tune_last: int
    validation: float  # fraction of the training samples that tuning is tested on
    tune_seed: int = 0
    first_seed: int = 0


class Column(NamedTuple):
    """A data set and the clients on it."""

    name: str
    title: str = ""
    note: str = ""  # how the data differ from the paper's
    settings: Mapping[str, Any] = {}  # a row's preset and its own settings win against these
    fixed: Mapping[str, Any] = {}  # and these against its preset
    rounds: int = 0  # at most so many, where more would take hours; 0: as the budget says
    seeds: int = 0  # 0: as the budget says
    statistic: str = "last"  # what a cell shows of its runs, see records.STATISTICS
    tuned: Any = None  # the Column whose tuning this one uses; None: its own
    paper_column: str = ""  # its name among the paper's numbers, if it is not `name`


class Recipe(NamedTuple):
    """How a method is trained under a protocol."""

    settings: Mapping[str, Any] = {}
    tune: Mapping[str, list[Any]] = {}  # the values to try; empty: nothing is tuned


class Row(NamedTuple):
    """A line of the table."""

    label: str
    algorithm: str
    recipes: dict[str, Recipe]  # by protocol
    settings: Mapping[str, Any] = {}
    value: str = "accuracy"  # the one that is shown
    ours: bool = False
    paper_row: str = ""  # its name in the paper's table, if it is not the label
    preset: str = ""  # settings below the row's own


class Claim(NamedTuple):
    """A statement of the paper, as a comparison of cells; `findings` has the kinds."""

    text: str
    kind: str
    options: dict[str, Any]
    paper_shows: str = ""  # what its own numbers show


@dataclass(frozen=True, eq=False)
class Experiment:
    """A table or figure of the paper."""

    name: str
    title: str
    about: str
    columns: list[Column]
    rows: list[Row]
    protocols: dict[str, str]  # by name, a description
    claims: list[Claim] = field(default_factory=list)
    budgets: dict[str, Budget] = field(default_factory=dict)
    base: Tables = field(default_factory=dict)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # the paper's, by column and row
    chart: str = "none"
    baselines: bool = True  # whether rows that are not ours are other methods
    aims: bool = False  # whether the claims are ours and not the paper's
    of_paper: bool = True  # whether the paper has it, too
    cost: bool = False  # whether bytes and seconds are shown
    differences: list[list[str]] = field(default_factory=list)  # pairs of rows, the first minus the second
    map: Grid = field(default_factory=dict)  # the two keys of a heat map, each with its values

    def rows_of(self, protocol: str) -> list[Row]:
        return [row for row in self.rows if protocol in row.recipes]

    def budget(self, name: str) -> Budget:
        one_of(self.budgets, budget=name)
        return self.budgets[name]


class TuningJob(NamedTuple):
    """Settings to try, and the job that tries them."""

    settings: Tables
    job: Job


class Plan(NamedTuple):
    """The jobs of one row in one column under one protocol."""

    column: Column
    protocol: str
    row: Row
    base: Tables
    budget: Budget
    seeds: list[int]

    @property
    def choices(self) -> list[Tables]:
        """The settings to try, or the only ones."""
        return cells(grid_of(self.row.recipes[self.protocol].tune, "tune"))

    def trials(self) -> list[TuningJob]:
        """The tuning jobs; none, where there is nothing to choose."""
        budget, column = self.budget, self.column.tuned or self.column
        rounds, every = budget.tune_rounds, budget.tune_eval_every
        if column.rounds:  # a third of a shorter run, evaluated more often
            rounds, every = min(rounds, column.rounds // 3), min(every, 4)
        plan, trials = self._replace(column=column), []
        for settings in self.choices if len(self.choices) > 1 else []:
            job = plan._job(rounds, every, settings, budget.tune_seed)
            label = f"{job.label}, tuning"
            job = job._replace(label=label, validation=budget.validation, last=budget.tune_last)
            trials.append(TuningJob(settings, job))
        return trials

    def jobs(self, chosen: Tables) -> list[Job]:
        """The jobs whose results the cell shows."""
        rounds, every = self.budget.rounds, self.budget.eval_every
        if self.column.rounds:
            rounds = min(rounds, self.column.rounds)
            every = min(every, max(1, rounds // 8))  # eight evaluations at least
        if not self.seeds:
            return []
        job = self._job(rounds, every, chosen, self.seeds[0])
        return [job._replace(run=with_seed(job.run, seed)) for seed in self.seeds]

    def _job(self, rounds: int, eval_every: int, chosen: Tables, seed: int) -> Job:
        row = self.row
        entry = Entry(row.algorithm, row.label, joined(row.settings, row.recipes[self.protocol].settings))
        # A recipe may have options of several algorithms.
        names = (*KINDS, entry.name, optimizer_of(entry, {}))
        entry = entry._replace(settings={t: table for t, table in entry.settings.items() if t in names})
        settled = row_settings(entry, joined(self.base, self.column.settings), keeps_state=True)
        *below, settings = settled.layers
        preset = [content(row.preset)] if row.preset else []
        length = {"run": {"rounds": rounds, "eval_every": eval_every}}
        fixed = settled.concerning(self.column.fixed)
        layers = [*below, *preset, fixed, settings, length, settled.concerning(chosen)]
        complete_run = _complete(json.dumps([counted(layer, rounds) for layer in layers]))
        evaluated = accuracies(complete_run.run.eval_models)
        if row.value not in evaluated:
            raise UsageError(
                f'row "{row.label}" shows {row.value}, but its runs evaluate {", ".join(evaluated)} only: '
                "set eval_models in the row's settings.run"
            )
        words = [f"{self.column.title}: {row.label}", f"{self.protocol} protocol"]
        words += [described(chosen, "optimizer", "algorithm", row.algorithm)] if chosen else []
        return Job(", ".join(words), with_seed(complete_run, seed), last=self.budget.last)


def with_seed(run: Run, seed: int) -> Run:
    """The run with another seed."""
    return replace(run, run=replace(run.run, seed=seed))


@cache
def _complete(layers: str) -> Run:
    """The record of these layers (as JSON); many jobs need the same one."""
    return complete(*json.loads(layers))


def plans(
    experiment: Experiment, budget: Budget, protocols: Sequence[str], seeds: Sequence[int] = ()
) -> Iterator[Plan]:
    """Every cell of the experiment; a column is complete before the next one begins.

    Args:
        experiment: Its rows and columns.
        budget: Rounds, evaluations and seeds of a run.
        protocols: Those that are run.
        seeds: The seeds of a cell; none: as many as its column or else the budget says.
    """
    for column in experiment.columns:
        count = column.seeds or budget.seeds
        column_seeds = list(seeds or range(budget.first_seed, budget.first_seed + count))
        for protocol in protocols:
            for row in experiment.rows_of(protocol):
                yield Plan(column, protocol, row, experiment.base, budget, column_seeds)


def joined(*parts: Mapping[str, Mapping[str, Any]]) -> Tables:
    """The tables of all parts; later ones override earlier ones key by key."""
    result: Tables = {}
    for part in parts:
        for title, table in part.items():
            result[title] = {**result.get(title, {}), **table}
    return result


def only(experiment: Experiment, columns: Sequence[str], rows: Sequence[str]) -> Experiment:
    """The experiment with these columns and rows only; all of them, and the claims, where none is named."""
    for name in columns:
        one_of([column.name for column in experiment.columns], column=name)
    for name in rows:
        one_of([row.label for row in experiment.rows], row=name)
    return replace(
        experiment,
        columns=[column for column in experiment.columns if not columns or column.name in columns],
        rows=[row for row in experiment.rows if not rows or row.label in rows],
        claims=[] if columns or rows else experiment.claims,
        differences=[] if columns or rows else experiment.differences,
    )


# Reading


def names() -> list[str]:
    """The experiments of the study."""
    return sorted(path.stem for path in FILES.glob("*.toml"))


def named(word: str) -> list[str]:
    """The experiments that a word stands for: one, those of a group, or all of the paper's."""
    papers = [name for name in names() if name not in GROUPS["finetuning"]]
    return papers if word == "all" else list(GROUPS.get(word, [word]))


def read(name: str) -> Experiment:
    """The experiment by name, or from a file of one's own in the same form."""
    if name not in names() and not name.endswith(".toml"):
        raise unknown("experiment", name, [*names(), *GROUPS])
    with raised_as(UsageError, f"cannot read the experiment {name}: {{}}", OSError, UnicodeDecodeError):
        text = (FILES / f"{name}.toml" if name in names() else Path(name)).read_text("utf-8")
    invalid = f"the experiment {name} is not valid TOML: {{}}; correct it there"
    with raised_as(UsageError, invalid, tomllib.TOMLDecodeError):
        content = tomllib.loads(text)
    wrong = f"the experiment {name} is incomplete or wrong: {{}}; see studies/paper/experiment_files"
    with raised_as(UsageError, wrong, KeyError, TypeError, AttributeError, ValueError):
        return _experiment(Path(name).stem, content)


def _experiment(name: str, content: dict[str, Any]) -> Experiment:
    setup = tomllib.loads((STUDY / "setup.toml").read_text("utf-8"))
    numbers = json.loads((STUDY / "paper.json").read_text("utf-8"))
    columns, budgets = (joined(setup[key], content.get(key, {})) for key in ("columns", "budget"))
    recipes = {**setup["recipes"], **content.get("recipes", {})}
    grid, protocols = content.get("grid", {}), content.get("only_protocols", PROTOCOLS)
    one_of(CHARTS, chart=content.get("chart", "none"))
    for protocol in protocols:
        one_of(PROTOCOLS, protocol=protocol)
    common = [row for group in content.get("rows", []) for row in setup[group]]
    map = grid_of({grid[k]["key"]: grid[k]["values"] for k in ("down", "across") if grid}, "grid")
    described_rows = [*common, *content.get("row", []), *(_grid_rows(grid, map) if grid else [])]
    left_out = content.get("leave_out", [])
    rows = [_row(row, recipes, protocols) for row in described_rows if row["label"] not in left_out]
    for label in (label for pair in content.get("differences", []) for label in pair):
        one_of([row.label for row in rows], row=label)
    return Experiment(
        name=name,
        title=content["title"],
        about=content.get("about", ""),
        columns=[_column(key, columns) for key in content["show"]],
        rows=rows,
        claims=[Claim(c["text"], c["kind"], c, c.get("paper_shows", "")) for c in content.get("claim", [])],
        budgets={key: Budget(key, **values) for key, values in budgets.items()},
        base=content.get("base", setup["base"]),
        numbers=numbers.get(content.get("paper", ""), {}),
        baselines=not content.get("no_baselines", False),
        map=map,
        **{
            key: content[key]
            for key in ("chart", "aims", "of_paper", "cost", "differences")
            if key in content
        },
        protocols={
            name: content.get("protocols", {}).get(name, text)
            for name, text in PROTOCOLS.items()
            if any(name in row.recipes for row in rows)
        },
    )


def _column(name: str, known: Mapping[str, Any]) -> Column:
    one_of(known, column=name)
    fields = dict(known[name])
    parent = _column(fields.pop("extends"), known) if "extends" in fields else Column(name)
    tuned = _column(fields.pop("tuned_on"), known) if "tuned_on" in fields else None
    settings = joined(parent.settings, fields.pop("settings", {}))
    one_of(STATISTICS, statistic=fields.get("statistic", "last"))
    return parent._replace(name=name, settings=settings, tuned=tuned, **fields)


def _row(fields: Mapping[str, Any], known: Mapping[str, Any], protocols: Collection[str]) -> Row:
    """The row of these fields, with `known` recipes by name, for the protocols that are run."""
    recipes = {protocol: fields[protocol] for protocol in PROTOCOLS if protocol in fields}
    for name in recipes.values():
        one_of(known, recipe=name)
    chosen = {protocol: Recipe(**known[name]) for protocol, name in recipes.items() if protocol in protocols}
    return Row(recipes=chosen, **{key: value for key, value in fields.items() if key not in PROTOCOLS})


def _grid_rows(fields: Mapping[str, Any], grid: Grid) -> Iterator[dict[str, Any]]:
    """A row per cell of a map; with `at_most = [A, B]`, a value of A above B counts as B."""
    common = {key: value for key, value in fields.items() if key not in ("down", "across", "at_most")}
    for settings in cells(grid):
        label = described(settings, fields["algorithm"])
        if "at_most" in fields:
            (title, name), (other, limit) = (key.split(".") for key in fields["at_most"])
            settings[title][name] = min(settings[title][name], settings[other][limit])
        yield {**common, "label": label, "settings": settings}
