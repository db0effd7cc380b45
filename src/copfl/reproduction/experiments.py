"""What an item of the paper is made of, and the runs it asks for. Nothing here trains or reads data sets."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from copfl.comparison import entries
from copfl.comparison.entries import Entry, cells, described, grid_of
from copfl.comparison.results import accuracies
from copfl.errors import UsageError, unknown
from copfl.experiment.components import resolve
from copfl.experiment.config import Tables
from copfl.experiment.presets import preset

PROTOCOLS = {
    "paper": "As the paper: CO-PFL with MAMO at its rates, rivals with SGD tuned over the paper's grid",
    "equal": "Equal: the same optimizer (Adam), the same rates and the same tuning for every method",
}
PICTURES = ("none", "curves", "map")
HERE = resources.files("copfl.reproduction")


@dataclass(frozen=True)
class Budget:
    """How long and how often: the same for every method."""

    name: str
    seeds: int
    rounds: int
    eval_every: int
    last: int  # looks that a value is the mean of
    tune_rounds: int
    tune_eval_every: int
    tune_last: int
    validation: float
    tune_seed: int = 0
    first_seed: int = 0
    held_out: float = (
        0.0  # above 0, the runs themselves are tested on this share of the training images, as tuning is
    )


class Column(NamedTuple):
    """A data set and the clients on it."""

    name: str
    title: str
    note: str  # where the data, or what is done with it, is not what the paper had
    settings: Tables
    rounds: int = 0  # at most so many, where more would take hours; 0: as the budget says
    tuned: Any = None  # the Column whose tuning serves this one too; None: its own


class Recipe(NamedTuple):
    """How a method is trained under a protocol."""

    settings: Tables
    tune: dict[str, list[Any]]  # what is tried; nothing: it is as the settings say


class Row(NamedTuple):
    """A line of the table."""

    label: str
    algorithm: str
    settings: Tables
    value: str  # the accuracy that is shown
    recipes: dict[str, Recipe]  # by protocol
    ours: bool
    like: str  # its name in the paper's table
    preset: str = ""  # settings under the row's own


class Claim(NamedTuple):
    """Something the paper says, as a comparison of cells; `findings` knows what `says` means."""

    text: str
    says: str
    paper_shows: str  # what its own numbers say of it
    how: dict[str, Any]


class Map(NamedTuple):
    """The two keys of a heat map."""

    down: tuple[str, list[Any]]
    across: tuple[str, list[Any]]


@dataclass(frozen=True, eq=False)
class Item:
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
    picture: str
    baselines: bool  # whether rows that are not ours are other methods
    aims: bool = False  # whether its claims are ours and not the paper's
    map: Map | None = None
    protocols: dict[str, str] = field(default_factory=dict)  # those that it has, and what they are

    def rows_of(self, protocol: str) -> list[Row]:
        return [row for row in self.rows if protocol in row.recipes]

    def budget(self, name: str) -> Budget:
        if name not in self.budgets:
            raise unknown("budget", name, self.budgets)
        return self.budgets[name]


class Run(NamedTuple):
    """One run that an item asks for."""

    label: str
    tables: Tables  # all of them, with every default
    validation: float  # the share of the training samples it is tested on; 0: on the test samples
    last: int
    tuning: bool = False

    @property
    def seed(self) -> int:
        return int(self.tables["run"]["seed"])


class Trial(NamedTuple):
    """A setting to be tried, and the run that tries it."""

    settings: Tables
    run: Run


class Plan(NamedTuple):
    """What one row needs in one column under one protocol."""

    column: Column
    protocol: str
    row: Row
    base: Tables
    budget: Budget

    @property
    def choices(self) -> list[Tables]:
        """What is tried, or what is used without trying."""
        return cells(grid_of(self.row.recipes[self.protocol].tune, "tune"))

    def trials(self) -> list[Trial]:
        """The tuning runs; none, where there is nothing to choose."""
        b, column = self.budget, self.column.tuned or self.column
        rounds, every = b.tune_rounds, b.tune_eval_every
        if column.rounds:  # a third of a shorter run, and looked at more often
            rounds, every = min(rounds, column.rounds // 3), min(every, 4)
        there = self._replace(column=column)
        run: Tables = {"run": {"rounds": rounds, "eval_every": every}}
        choices = self.choices
        if len(choices) < 2:
            return []
        return [
            Trial(c, there._run([run, c], b.tune_seed, b.validation, b.tune_last, tuning=True))
            for c in choices
        ]

    def runs(self, chosen: Tables, seeds: Sequence[int]) -> list[Run]:
        """The runs that the cell is made of."""
        rounds, every = self.budget.rounds, self.budget.eval_every
        if self.column.rounds:
            rounds = min(rounds, self.column.rounds)
            every = min(every, max(1, rounds // 8))  # eight looks at least
        run: Tables = {"run": {"rounds": rounds, "eval_every": every}}
        return [self._run([run, chosen], seed, self.budget.held_out, self.budget.last) for seed in seeds]

    def _run(
        self, more: Sequence[Tables], seed: int, validation: float, last: int, tuning: bool = False
    ) -> Run:
        recipe = self.row.recipes[self.protocol]
        own = joined(self.row.settings, recipe.settings)
        entry = Entry(self.row.algorithm, self.row.label, own)
        base = joined(self.base, self.column.settings)
        *below, settings = entries.layers(entry, base)
        named = [preset(self.row.preset)] if self.row.preset else []
        tables = _complete(json.dumps([*below, *named, settings, *more]))
        eval_models = tables["run"]["eval_models"]
        if self.row.value not in (seen := accuracies(eval_models)):
            raise UsageError(
                f'row "{self.row.label}" shows {self.row.value}, but its runs look at {", ".join(seen)} alone '
                f'(eval_models = "{eval_models}"): set eval_models in the row\'s settings.run'
            )
        chosen = described(more[-1], "optimizer", self.row.algorithm)
        what = f"{self.column.title}: {self.row.label}, {self.protocol} protocol"
        label = ", ".join(filter(None, [what, chosen, "tuning" if tuning else "", f"seed {seed}"]))
        return Run(label, joined(tables, {"run": {"seed": seed}}), validation, last, tuning)


@cache
def _complete(layers: str) -> Tables:
    """The tables of these layers (as JSON) with every default; items and seeds ask for the same ones many times."""
    return resolve(json.loads(layers), {})


def plans(item: Item, budget: Budget, protocols: Sequence[str]) -> Iterator[Plan]:
    """Every cell of the item: column by column, so that columns are whole one after the other."""
    for column in item.columns:
        for protocol in protocols:
            for row in item.rows_of(protocol):
                yield Plan(column, protocol, row, item.base, budget)


def joined(*parts: Mapping[str, Mapping[str, Any]]) -> Tables:
    """The tables one over the other."""
    result: Tables = {}
    for part in parts:
        for title, table in part.items():
            result[title] = {**result.get(title, {}), **table}
    return result


# Reading


def names() -> list[str]:
    """The items there are."""
    return sorted(Path(file.name).stem for file in (HERE / "items").iterdir() if file.name.endswith(".toml"))


def read(item: str) -> Item:
    """The item by name, or from a file of one's own in the same form."""
    if item in names():
        text, name = (HERE / "items" / f"{item}.toml").read_text("utf-8"), item
    elif item.endswith(".toml"):
        try:
            text, name = Path(item).read_text("utf-8"), Path(item).stem
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the item {item}: {error}") from error
    else:
        raise unknown("item", item, names())
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"the item {item} is not valid TOML: {error}; mend it there") from error
    try:
        return _item(name, content, tomllib.loads((HERE / "setup.toml").read_text("utf-8")))
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the item {item} is not whole: {error!r}; see copfl/reproduction/items for examples"
        ) from error


def _item(name: str, content: dict[str, Any], setup: dict[str, Any]) -> Item:
    columns = {key: {**setup["columns"].get(key, {}), **own} for key, own in _own_columns(content).items()}
    columns = {**setup["columns"], **columns}
    recipes = {**setup["recipes"], **content.get("recipes", {})}
    grid, under = content.get("grid"), content.get("under", list(PROTOCOLS))
    for protocol in under:
        if protocol not in PROTOCOLS:
            raise unknown("protocol", protocol, PROTOCOLS)
    known = content.get("rows", [])
    common = [row for group in ([known] if isinstance(known, str) else known) for row in setup[group]]
    rows = [*common, *content.get("row", []), *(_grid_rows(grid) if grid else [])]
    rows = [
        {key: value for key, value in row.items() if key not in PROTOCOLS or key in under} for row in rows
    ]
    budgets = {key: {**setup["budget"].get(key, {}), **own} for key, own in content.get("budget", {}).items()}
    numbers = json.loads((HERE / "paper.json").read_text("utf-8"))
    made = [_row(row, recipes) for row in rows]
    picture = str(content.get("picture", "none"))
    if picture not in PICTURES:
        raise unknown("picture", picture, PICTURES)
    return Item(
        name=name,
        title=content["title"],
        about=content.get("about", ""),
        columns=[_column(key, columns) for key in content["show"]],
        rows=made,
        claims=[_claim(claim) for claim in content.get("claim", [])],
        budgets={key: Budget(key, **values) for key, values in {**setup["budget"], **budgets}.items()},
        base=content.get("base", setup["base"]),
        numbers=numbers.get(content.get("paper", ""), {}),
        picture=picture,
        baselines=not content.get("no_rivals", False),
        aims=bool(content.get("aims", False)),
        map=None if grid is None else Map(*((grid[k]["key"], grid[k]["values"]) for k in ("down", "across"))),
        protocols={
            name: content.get("protocols", {}).get(name, text)
            for name, text in PROTOCOLS.items()
            if any(name in row.recipes for row in made)
        },
    )


def _own_columns(content: dict[str, Any]) -> dict[str, Any]:
    """The columns that the item describes itself."""
    own: dict[str, Any] = content.get("columns", {})
    return own


def _column(name: str, known: Mapping[str, Any]) -> Column:
    if name not in known:
        raise unknown("column", name, known)
    own = known[name]
    parent = _column(own["like"], known) if "like" in own else Column("", "", "", {})
    settings = joined(parent.settings, own.get("settings", {}))
    tuned = (
        _column(own["tuned_on"], known) if "tuned_on" in own else None
    )  # what is `like` it tunes for itself
    rounds = own.get("rounds", parent.rounds)
    return Column(name, own.get("title", parent.title), own.get("note", parent.note), settings, rounds, tuned)


def _row(own: Mapping[str, Any], recipes: Mapping[str, Any]) -> Row:
    chosen = {}
    for protocol in PROTOCOLS:
        if protocol in own:
            if own[protocol] not in recipes:
                raise unknown("recipe", own[protocol], recipes)
            recipe = recipes[own[protocol]]
            chosen[protocol] = Recipe(recipe.get("settings", {}), recipe.get("tune", {}))
    return Row(
        own["label"], own["algorithm"], own.get("settings", {}), own.get("value", "accuracy"), chosen,
        bool(own.get("ours", False)), own.get("as", own["label"]), own.get("preset", ""),
    )  # fmt: skip


def _grid_rows(grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per cell of a map; with `at_most = [A, B]`, cells that differ only in how far A is above B are one run."""
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
    how = {key: value for key, value in own.items() if key not in ("text", "says", "paper_shows")}
    return Claim(own["text"], own["says"], own.get("paper_shows", ""), how)
