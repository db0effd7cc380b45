"""An experiment of the paper as data, and the jobs that it needs. Nothing here trains or reads data sets."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from copfl.comparison import entries
from copfl.comparison.entries import Entry, cells, described, grid_of
from copfl.comparison.jobs import Job
from copfl.core.evaluation import EVAL_MODELS
from copfl.errors import UsageError, unknown
from copfl.experiment.components import resolve
from copfl.experiment.config import Tables
from copfl.experiment.presets import preset

PROTOCOLS = {
    "paper": "Paper protocol: CO-PFL with MAMO at the paper's rates, baselines with SGD tuned over its grid",
    "equal": "Equal protocol: the same optimizer (Adam), the same rates and the same tuning for every method",
}
CHARTS = ("none", "curves", "heatmap")
HERE = resources.files("copfl.reproduction")
FILES = HERE / "experiment_files"


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
    title: str
    note: str  # how the data differ from the paper's
    settings: Tables
    rounds: int = 0  # at most so many, where more would take hours; 0: as the budget says
    tuned: Any = None  # the Column whose tuning this one uses; None: its own


class Recipe(NamedTuple):
    """How a method is trained under a protocol."""

    settings: Tables
    tune: dict[str, list[Any]]  # the values to try; empty: nothing is tuned


class Row(NamedTuple):
    """A line of the table."""

    label: str
    algorithm: str
    settings: Tables
    value: str  # the accuracy that is shown
    recipes: dict[str, Recipe]  # by protocol
    ours: bool
    paper_row: str  # its name in the paper's table
    preset: str = ""  # settings below the row's own


class Claim(NamedTuple):
    """A statement of the paper, as a comparison of cells; `findings` has the kinds."""

    text: str
    kind: str
    paper_shows: str  # what its own numbers show
    options: dict[str, Any]


class Map(NamedTuple):
    """The two keys of a heat map, each with its values."""

    down: tuple[str, list[Any]]
    across: tuple[str, list[Any]]


@dataclass(frozen=True, eq=False)
class Experiment:
    """A table or figure of the paper."""

    name: str
    title: str
    about: str
    columns: list[Column]
    rows: list[Row]
    claims: list[Claim]
    budgets: dict[str, Budget]
    base: Tables
    numbers: dict[str, dict[str, float]]  # the paper's, by column and row
    chart: str = "none"
    baselines: bool = True  # whether rows that are not ours are other methods
    aims: bool = False  # whether the claims are ours and not the paper's
    map: Map | None = None
    protocols: dict[str, str] = field(default_factory=dict)  # by name, a description

    def rows_of(self, protocol: str) -> list[Row]:
        return [row for row in self.rows if protocol in row.recipes]

    def budget(self, name: str) -> Budget:
        if name not in self.budgets:
            raise unknown("budget", name, self.budgets)
        return self.budgets[name]


class Trial(NamedTuple):
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

    @property
    def choices(self) -> list[Tables]:
        """The settings to try, or the only ones."""
        return cells(grid_of(self.row.recipes[self.protocol].tune, "tune"))

    def trials(self) -> list[Trial]:
        """The tuning jobs; none, where there is nothing to choose."""
        b, column = self.budget, self.column.tuned or self.column
        rounds, every = b.tune_rounds, b.tune_eval_every
        if column.rounds:  # a third of a shorter run, evaluated more often
            rounds, every = min(rounds, column.rounds // 3), min(every, 4)
        plan = self._replace(column=column)
        run: Tables = {"run": {"rounds": rounds, "eval_every": every}}
        choices = self.choices if len(self.choices) > 1 else []
        made = [plan._job([run, c], b.tune_seed) for c in choices]
        return [
            Trial(c, job._replace(label=f"{job.label}, tuning", validation=b.validation, last=b.tune_last))
            for c, job in zip(choices, made, strict=True)
        ]

    def jobs(self, chosen: Tables, seeds: Sequence[int]) -> list[Job]:
        """The jobs whose results the cell shows."""
        rounds, every = self.budget.rounds, self.budget.eval_every
        if self.column.rounds:
            rounds = min(rounds, self.column.rounds)
            every = min(every, max(1, rounds // 8))  # eight evaluations at least
        run: Tables = {"run": {"rounds": rounds, "eval_every": every}}
        return [self._job([run, chosen], seed) for seed in seeds]

    def _job(self, more: Sequence[Tables], seed: int) -> Job:
        row = self.row
        entry = Entry(row.algorithm, row.label, joined(row.settings, row.recipes[self.protocol].settings))
        *below, settings = entries.layers(entry, joined(self.base, self.column.settings))
        named = [preset(row.preset)] if row.preset else []
        tables = _complete(json.dumps([*below, *named, settings, *more]))
        eval_models = tables["run"]["eval_models"]
        evaluated = [f"accuracy{model}" for model in EVAL_MODELS[eval_models]]
        if row.value not in evaluated:
            raise UsageError(
                f'row "{row.label}" shows {row.value}, but its runs evaluate {", ".join(evaluated)} only '
                f'(eval_models = "{eval_models}"): set eval_models in the row\'s settings.run'
            )
        chosen = described(more[-1], "optimizer", row.algorithm)
        label = f"{self.column.title}: {row.label}, {self.protocol} protocol"
        label = f"{label}, {chosen}" if chosen else label
        return Job(label, joined(tables, {"run": {"seed": seed}}), last=self.budget.last)


@cache
def _complete(layers: str) -> Tables:
    """The tables of these layers (as JSON) with every default; many jobs need the same ones."""
    return resolve(json.loads(layers), {})


def plans(experiment: Experiment, budget: Budget, protocols: Sequence[str]) -> Iterator[Plan]:
    """Every cell of the experiment; a column is complete before the next one begins."""
    for column in experiment.columns:
        for protocol in protocols:
            for row in experiment.rows_of(protocol):
                yield Plan(column, protocol, row, experiment.base, budget)


def joined(*parts: Mapping[str, Mapping[str, Any]]) -> Tables:
    """The tables of all parts; later ones override earlier ones key by key."""
    result: Tables = {}
    for part in parts:
        for title, table in part.items():
            result[title] = {**result.get(title, {}), **table}
    return result


def only(experiment: Experiment, columns: Sequence[str], rows: Sequence[str]) -> Experiment:
    """The experiment with these columns and rows only; all of them, and the claims, where none is named."""
    for what, wanted, there in (
        ("column", columns, [column.name for column in experiment.columns]),
        ("row", rows, [row.label for row in experiment.rows]),
    ):
        for name in wanted:
            if name not in there:
                raise unknown(what, name, there)
    return replace(
        experiment,
        columns=[column for column in experiment.columns if not columns or column.name in columns],
        rows=[row for row in experiment.rows if not rows or row.label in rows],
        claims=[] if columns or rows else experiment.claims,
    )


# Reading


def names() -> list[str]:
    """The experiments that come with copfl."""
    return sorted(Path(file.name).stem for file in FILES.iterdir() if file.name.endswith(".toml"))


def read(name: str) -> Experiment:
    """The experiment by name, or from a file of one's own in the same form."""
    if name not in names() and not name.endswith(".toml"):
        raise unknown("experiment", name, names())
    try:
        text = (FILES / f"{name}.toml" if name in names() else Path(name)).read_text("utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read the experiment {name}: {error}") from error
    except ValueError as error:
        raise UsageError(f"the experiment {name} is not valid TOML: {error}; correct it there") from error
    try:
        return _experiment(Path(name).stem, content, tomllib.loads((HERE / "setup.toml").read_text("utf-8")))
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the experiment {name} is incomplete: {error!r}; see copfl/reproduction/experiment_files"
        ) from error


def _experiment(name: str, content: dict[str, Any], setup: dict[str, Any]) -> Experiment:
    columns = {
        key: {**setup["columns"].get(key, {}), **own} for key, own in content.get("columns", {}).items()
    }
    columns = {**setup["columns"], **columns}
    recipes = {**setup["recipes"], **content.get("recipes", {})}
    grid, only = content.get("grid"), content.get("only_protocols", list(PROTOCOLS))
    for protocol in only:
        if protocol not in PROTOCOLS:
            raise unknown("protocol", protocol, PROTOCOLS)
    common = [row for group in content.get("rows", []) for row in setup[group]]
    given = [*common, *content.get("row", []), *(_grid_rows(grid) if grid else [])]
    rows = [_row(row, recipes, only) for row in given]
    usual, changed = setup["budget"], content.get("budget", {})
    budgets = {key: {**usual.get(key, {}), **changed.get(key, {})} for key in {**usual, **changed}}
    numbers = json.loads((HERE / "paper.json").read_text("utf-8"))
    chart = content.get("chart", "none")
    if chart not in CHARTS:
        raise unknown("chart", chart, CHARTS)
    return Experiment(
        name=name,
        title=content["title"],
        about=content.get("about", ""),
        columns=[_column(key, columns) for key in content["show"]],
        rows=rows,
        claims=[_claim(claim) for claim in content.get("claim", [])],
        budgets={key: Budget(key, **values) for key, values in budgets.items()},
        base=content.get("base", setup["base"]),
        numbers=numbers.get(content.get("paper", ""), {}),
        chart=chart,
        baselines=not content.get("no_baselines", False),
        aims=bool(content.get("aims", False)),
        map=None if grid is None else Map(*((grid[k]["key"], grid[k]["values"]) for k in ("down", "across"))),
        protocols={
            name: content.get("protocols", {}).get(name, text)
            for name, text in PROTOCOLS.items()
            if any(name in row.recipes for row in rows)
        },
    )


def _column(name: str, known: Mapping[str, Any]) -> Column:
    if name not in known:
        raise unknown("column", name, known)
    own = known[name]
    parent = _column(own["extends"], known) if "extends" in own else Column("", "", "", {})
    tuned = _column(own["tuned_on"], known) if "tuned_on" in own else None
    changed = {key: own[key] for key in ("title", "note", "rounds") if key in own}
    settings = joined(parent.settings, own.get("settings", {}))
    return parent._replace(name=name, settings=settings, tuned=tuned, **changed)


def _row(own: Mapping[str, Any], recipes: Mapping[str, Any], protocols: Sequence[str]) -> Row:
    chosen = {}
    for protocol in PROTOCOLS:
        if protocol in own and protocol in protocols:
            if own[protocol] not in recipes:
                raise unknown("recipe", own[protocol], recipes)
            recipe = recipes[own[protocol]]
            chosen[protocol] = Recipe(recipe.get("settings", {}), recipe.get("tune", {}))
    return Row(
        label=own["label"],
        algorithm=own["algorithm"],
        settings=own.get("settings", {}),
        value=own.get("value", "accuracy"),
        recipes=chosen,
        ours=bool(own.get("ours", False)),
        paper_row=own.get("paper_row", own["label"]),
        preset=own.get("preset", ""),
    )


def _grid_rows(grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per cell of a map; with `at_most = [A, B]`, a value of A above B counts as B."""
    values = {grid[k]["key"]: grid[k]["values"] for k in ("down", "across")}
    same = {key: value for key, value in grid.items() if key not in ("down", "across", "at_most")}
    rows = []
    for cell in cells(grid_of(values, "grid")):
        label, settings = described(cell, grid["algorithm"]), joined(cell)
        if "at_most" in grid:
            (title, name), (other, limit) = (key.split(".") for key in grid["at_most"])
            settings[title][name] = min(settings[title][name], settings[other][limit])
        rows.append({**same, "label": label, "settings": settings})
    return rows


def _claim(own: dict[str, Any]) -> Claim:
    options = {key: value for key, value in own.items() if key not in ("text", "kind", "paper_shows")}
    return Claim(own["text"], own["kind"], own.get("paper_shows", ""), options)
