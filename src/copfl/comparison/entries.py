"""What is compared, as people write it: algorithms with options, grids, seeds, and files of them.

The settings of a row are layers of tables; with a seed they make a job.
"""

import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from copfl.comparison.jobs import Job, placed
from copfl.core.algorithm import AnyAlgorithm
from copfl.errors import UsageError, raised_as, unknown
from copfl.settings import user_code
from copfl.settings.checking import SettingError, parameters_of
from copfl.settings.complete import complete
from copfl.settings.components import algorithms, factory_of, name_of, usual_optimizer
from copfl.settings.schema import KINDS
from copfl.settings.toml import Tables, value_of
from copfl.settings.values import layer_of

Base = Mapping[str, Mapping[str, Any]]  # tables for every entry
Place = tuple[str, str]  # (table, key)
Grid = dict[Place, list[Any]]  # the values to try

VALIDATION = 0.2  # of each client's training samples
OPTIMIZER = "adam"  # of every row, where none is named
OWN = "own"  # in place of a name: each algorithm's own optimizer
MOST_SEEDS = 10_000  # more is taken for a mistake
SHORT = {"lr": ("optimizer", "lr"), "optimizer": ("optimizer", "name")}  # keys that need no table
# What every row of a comparison has in common; None: the whole table.
COMMON: dict[str, tuple[str, ...] | None] = {
    "data": None,
    "partition": None,
    "run": ("seed", "clients", "new_clients"),
}


class Range(NamedTuple):
    """Values to search in, such as log:1e-4..1e-1 or 1..5."""

    low: float
    high: float
    log: bool
    whole: bool  # whole numbers alone

    def __str__(self) -> str:
        return f"{'log:' if self.log else ''}{self.low:g}..{self.high:g}"

    @property
    def ends(self) -> list[Any]:
        kind = int if self.whole else float
        return [kind(self.low), kind(self.high)]

    def at_an_end(self, value: float, part: float = 0.05) -> bool:
        """Whether the value is in the first or last twentieth."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return not low + part * (high - low) < at < high - part * (high - low)


Space = Mapping[Place, list[Any] | Range]  # a grid, or a space to search in


class Entry(NamedTuple):
    """A row of the table: an algorithm, and the settings for it alone."""

    name: str
    label: str
    settings: Tables
    optional: bool = False  # left out, if it cannot train on the task


def entries_of(given: Sequence[str | Entry | AnyAlgorithm]) -> list[Entry]:
    """The rows of a table.

    Args:
        given: Texts such as "copfl,copfl:score=none,mymodule:FedMine:lr=0.001", entries, and algorithms as values.
            "all" are all algorithms that can train on the task.
    """
    rows = list[Entry]()
    for row in given:
        if isinstance(row, Entry):
            rows.append(checked(row))
        elif not isinstance(row, str):
            rows.append(checked(entry_of_value(row)))
        else:
            for text in split(row):
                every = [Entry(name, name, {}, optional=True) for name in algorithms()]
                rows += every if text == "all" else [entry_of(text)]
    return rows


def entry_of_value(algorithm: AnyAlgorithm) -> Entry:
    """The entry of an algorithm as a value; its optimizer counts if it is not the class's own."""
    layer, title = layer_of("algorithm", algorithm), type(algorithm).__name__
    if not layer:
        raise UsageError(
            f"{title} cannot be a row: a comparison stores a name and plain options; make it a dataclass of plain "
            "fields, in a module that can be imported"
        )
    name = str(layer["algorithm"].pop("name"))
    usual = parameters_of(type(algorithm))
    options = {key: value for key, value in layer["algorithm"].items() if value != usual[key].default}
    settings: Tables = {"algorithm": options} if options else {}
    if getattr(algorithm, "optimizer", None) != usual_optimizer(name):
        settings["optimizer"] = layer["optimizer"]
    title = title if ":" in name else name
    return Entry(name, f"{title} {described(settings, 'algorithm')}".strip(), settings)


def entry_of(text: str) -> Entry:
    """The entry NAME:KEY=VALUE:KEY=VALUE; a key is the algorithm's own, `lr`, `optimizer` or TABLE.KEY."""
    name, *options = re.split(r":(?=\s*[\w.]+\s*=)", text)  # a colon inside a value is no separator
    name = name.strip()
    user_code.check_no_file("algorithm", name)
    before, colon, _ = name.partition(":")
    if "=" in name or (colon and (before in algorithms() or not user_code.is_reference(name))):
        raise UsageError(f'entry "{text}" must have the form NAME or NAME:KEY=VALUE:KEY=VALUE')
    settings: Tables = {}
    for option in options:
        key, _, value = option.partition("=")
        put(settings, key.strip(), value_of(value))
    return checked(Entry(name, " ".join([name, *(option.strip() for option in options)]), settings))


def checked(entry: Entry) -> Entry:
    """The entry, if there is such an algorithm and it does not set what all rows have in common."""
    factory_of("algorithm", entry.name)
    check_own(entry.label, [(table, key) for table, own in entry.settings.items() for key in own])
    return entry


def check_own(who: str, places: Iterable[tuple[str, str]]) -> None:
    """Nothing, if none of these keys is one that all rows must have in common."""
    for table, key in places:
        if table in COMMON and key in (COMMON[table] or key):
            advice = "set it for all of them, or sweep over it"
            raise UsageError(f"{who}: {table}.{key} is the same for every row of a comparison; {advice}")


def put(settings: Tables, key: str, value: Any) -> None:
    """Sets a key of an entry in its table; one without a table is the algorithm's."""
    table, dot, inner = key.partition(".")
    title, inner = (table, inner) if dot else SHORT.get(key, ("algorithm", key))
    settings.setdefault(title, {})[inner] = value


def values_of(texts: Sequence[str], option: str) -> dict[str, list[Any]]:
    """The values to try by key, out of texts such as "lr=1e-2,1e-3" or "copfl.rate=0.05,0.25"."""
    result: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not (equals and key):
            raise UsageError(f'{option} "{text}" must have the form KEY=VALUE,VALUE, such as lr=1e-2,1e-3')
        if key in result:
            raise UsageError(f"{option} names {key} twice; give all its values at once")
        result[key] = [value_of(value) for value in split(values)]
    return result


def grid_of(values: Mapping[str, Sequence[Any]], option: str) -> Grid:
    """The grid of these values; a key is `lr`, `optimizer` or TABLE.KEY."""
    grid: Grid = {}
    for place, found in space_of(values, option).items():
        if isinstance(found, Range):
            raise UsageError(
                f"{option} {'.'.join(place)}={found} is a range, which only tuning searches; name values"
            )
        grid[place] = found
    return grid


def space_of(values: Mapping[str, Sequence[Any] | str], option: str) -> dict[Place, list[Any] | Range]:
    """The same, in which a range such as "log:1e-4..1e-1" may be in place of the values."""
    space: dict[Place, list[Any] | Range] = {}
    for path, found in values.items():
        table, _, key = path.partition(".")
        place = SHORT.get(path) or (table, key)
        if not all(place):
            form = f"{', '.join(SHORT)} or TABLE.KEY, such as copfl.rate or run.batch"
            raise UsageError(f'{option}: the key "{path}" must be {form}')
        alone = found if isinstance(found, str) else found[0] if len(found) == 1 else None
        if isinstance(alone, str) and ".." in alone:
            space[place] = _range(alone, f"{option} {path}")
            continue
        if isinstance(found, str) or not found or len(set(map(repr, found))) < len(found):
            raise UsageError(f"{option} {path} must have several values, none of them twice")
        space[place] = list(found)
    return space


def _range(text: str, where: str) -> Range:
    """The range in "log:1e-4..1e-1", "0.1..0.9" or "1..5"."""
    low, _, high = text.strip().removeprefix("log:").partition("..")
    log, whole = text.strip().startswith("log:"), all(re.fullmatch(r"[-+]?\d+", end) for end in (low, high))
    try:
        found = Range(float(low), float(high), log, whole)
    except ValueError:
        found = Range(0.0, 0.0, log, whole)
    if not -math.inf < found.low < found.high < math.inf or (log and found.low <= 0):
        form = "LOW..HIGH with LOW < HIGH, or log:LOW..HIGH with LOW > 0, such as log:1e-4..1e-1"
        raise UsageError(f'{where}: the range "{text}" must be {form}')
    return found


def space_text(space: Space) -> str:
    """Such as "lr=log:0.0001..0.1"."""
    return " ".join(f"{key}={values}" for (_, key), values in space.items())


def cells(space: Space) -> list[Tables]:
    """Every combination of the values, as tables; an empty grid has one cell, in which nothing is set.

    The values of a range are its ends.
    """
    result = []
    for values in itertools.product(*(v.ends if isinstance(v, Range) else v for v in space.values())):
        tables: Tables = {}
        for (table, key), value in zip(space, values, strict=True):
            tables.setdefault(table, {})[key] = value
        result.append(tables)
    return result


def described(tables: Mapping[str, Mapping[str, Any]], *silent: str) -> str:
    """Such as "lr=0.01 rate=0.05": the settings, with the title of their table unless it is `silent`."""
    flat = [(t, key, value) for t, table in tables.items() for key, value in table.items()]
    words = [(k if t in silent else f"{t}.{k}", f"{v:g}" if isinstance(v, float) else v) for t, k, v in flat]
    return " ".join(f"{key}={value}" for key, value in words)


def seeds_of(text: str, option: str = "--seeds") -> list[int]:
    """The seeds in "0,1,2" or "0-4"."""
    seeds: list[int] = []
    for part in split(text):
        ends = re.fullmatch(r"([0-9]{1,19})(?:-([0-9]{1,19}))?", part)
        if ends is None:
            raise UsageError(f'{option}: "{part}" is no seed; write whole numbers such as 0,1,2 or 0-4')
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last - first >= MOST_SEEDS:
            raise UsageError(f'{option} "{text}" names too many seeds; at most {MOST_SEEDS:,} are allowed')
        seeds += range(first, last + 1)
    return check_seeds(seeds, option)


def check_seeds(seeds: Sequence[int], option: str = "seeds") -> list[int]:
    """The seeds, if there are any and none is there twice."""
    if not seeds:
        raise UsageError(f"{option} names no seed; name one at least, better three or more: 0,1,2")
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"{option} names a seed twice: {', '.join(map(str, seeds))}")
    return list(seeds)


def layers(entry: Entry, base: Base) -> list[Tables]:
    """The layers of `resolve` for an entry: the settings of all that concern it, then its own."""
    plain = {title: dict(table) for title, table in base.items() if title in KINDS}
    titled = {title: table for title, table in base.items() if title not in KINDS}
    name, optimizer = applies(entry, base)
    named: Tables = {"algorithm": {"name": name}}
    chosen: Tables = {"optimizer": {"name": optimizer}} if optimizer else {}
    if not optimizer:  # of an algorithm that has none
        plain.pop("optimizer", None)
    return [named, plain, chosen, by_kind(entry, base, titled), by_kind(entry, base, entry.settings)]


def by_kind(entry: Entry, base: Base, tables: Base) -> Tables:
    """The tables that concern an entry, by kind: [copfl] is [algorithm] of its rows, and not of others."""
    algorithm, optimizer = applies(entry, base)
    kinds = {algorithm: "algorithm", optimizer: "optimizer"}
    result: Tables = {}
    for title, table in tables.items():
        if title in KINDS or title in kinds:
            kind = title if title in KINDS else kinds[title]
            result[kind] = {**result.get(kind, {}), **table}
    return result


def applies(entry: Entry, base: Base) -> tuple[str, str]:
    """The names of the entry's algorithm and optimizer: tables named after others do not concern it."""
    if (usual := usual_optimizer(entry.name)) is None:
        return entry.name, ""
    given = entry.settings.get("optimizer", {}).get("name") or base.get("optimizer", {}).get("name")
    return entry.name, str(given or name_of("optimizer", usual))


def concerns(entry: Entry, base: Base, title: str) -> bool:
    """Whether a table of this title is for this entry; one named after another algorithm is not."""
    return title in applies(entry, base) or title in KINDS


def job_of(
    folder: Path,
    label: str,
    layers: Sequence[Tables],
    seed: int,
    *,
    validation: float = 0.0,
    last: int | None = None,
) -> Job:
    """The run of these layers of settings and this seed."""
    run = complete(*layers, {"run": {"seed": seed}})
    if run.run.patience:
        raise SettingError(
            "run.patience", run.run.patience, "does not fit a comparison, whose rows have equal rounds; use 0"
        )
    return placed(Job(label, run, validation=validation, last=last), folder)


def common_of(base_tables: Base | None, dataset: str | Path | None, rounds: int | None) -> Tables:
    """The settings of every row: the tables, with the data set and the rounds where they are named apart."""
    tables = {title: dict(table) for title, table in (base_tables or {}).items()}
    if dataset is not None and not isinstance(dataset, str | Path):
        raise UsageError(
            f'dataset is {type(dataset).__name__}; a comparison stores a name: "digits", "mine.csv" or '
            '"mymodule:load" for data of your own; seeds and settings are keywords: seeds=[0, 1]'
        )
    for title, key, value in (("data", "name", dataset), ("run", "rounds", rounds)):
        before = tables.get(title, {}).get(key, value)
        if value is not None and str(before) != str(value):
            raise UsageError(f"{title}.{key} is {value} and in base_tables {before}; leave one of them out")
        if value is not None:
            tables.setdefault(title, {})[key] = str(value) if isinstance(value, Path) else value
    return tables


def with_optimizer(base: Base) -> Tables:
    """The tables with one optimizer for every row, or with none for each algorithm's own."""
    table = {"name": OPTIMIZER, **base.get("optimizer", {})}
    if table["name"] == OWN:
        del table["name"]
    return {**{title: dict(own) for title, own in base.items()}, "optimizer": table}


def layers_of(entry: Entry, base: Base) -> list[Tables]:
    """The layers of an entry. With one optimizer for every row, each phase has a new state.

    A state that two phases share makes the steps of the second one smaller.
    """
    result = layers(entry, base)
    phased = "state_per_phase" in parameters_of(factory_of("algorithm", entry.name))
    if phased and "name" in base.get("optimizer", {}) and not complete(*result).optimizer.options["keep"]:
        result.insert(1, {"algorithm": {"state_per_phase": True}})
    return result


class File(NamedTuple):
    """The contents of a comparison's file."""

    entries: list[Entry]
    base: Tables  # for every run
    options: dict[str, Any]  # the table [compare]


OPTIONS = {
    "seeds": list,
    "tune": dict,
    "trials": int,
    "tune_seeds": list,
    "validation": float,
    "reference": str,
    "last": int,
}


def read_file(path: Path) -> File:
    """A file with an [[entry]] per row, a table [compare] of options, and tables for all rows."""
    damaged = f"{path} is not valid TOML: {{}}; correct it there"
    with raised_as(UsageError, f"cannot read {path}: {{}}", OSError):
        text = path.read_bytes()
    with raised_as(UsageError, damaged, ValueError, RecursionError):  # numbers or brackets without end
        content = tomllib.loads(text.decode())
    rows, options = content.pop("entry", []), content.pop("compare", {})
    for name, table in [("compare", options), *content.items()]:
        if not isinstance(table, dict):
            raise UsageError(f'{path}: "{name}" is outside any table; it belongs under [compare] or [run]')
    for name, value in options.items():
        if name not in OPTIONS:
            raise unknown("option in [compare]:", name, OPTIONS)
        if not isinstance(value, OPTIONS[name]):
            raise UsageError(f"{path}: [compare] {name} must be a {OPTIONS[name].__name__}, not {value!r}")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path}: write the rows as [[entry]], each with a name")
    return File([_entry(path, **row) for row in rows], content, options)


def _entry(path: Path, /, name: str = "", label: str = "", settings: Any = (), **unknown_keys: Any) -> Entry:
    for key in unknown_keys:
        raise unknown("key in [[entry]]:", key, ("name", "label", "settings"))
    if settings and not isinstance(settings, dict):
        raise UsageError(f"{path}: the settings of {name} must be a table, such as {{ score = 'none' }}")
    tables: Tables = {}
    for key, value in dict(settings).items():
        if isinstance(value, dict):
            tables.setdefault(key, {}).update(value)
        else:
            put(tables, key, value)
    label = label or f"{name} {described(tables, 'algorithm', 'optimizer')}".strip()
    return checked(Entry(str(name), str(label), tables))


def split(text: str) -> list[str]:
    """The parts between commas, but not those inside brackets or quotes; empty ones are left out."""
    parts = re.findall(r"""(?:"[^"]*"|'[^']*'|\[[^\]]*\]|[^,"'\[]|["'\[])+""", text)
    return [part.strip() for part in parts if part.strip()]
