"""The values to try: grids of them, and spaces to search in.

`--tune` and `--over` are parsed here; a comparison, a sweep and a choice go through the cells.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from copfl.comparison.rows.entries import at_commas
from copfl.errors import UsageError
from copfl.settings.arguments import PLACES, SHORT, plain
from copfl.settings.record import declared_types
from copfl.settings.schema import RunSettings
from copfl.settings.toml import Tables, value_of

EXAMPLE = '{"lr": [0.01, 0.1], "copfl.rate": [0.05, 0.25]}'
Place = tuple[str, str]  # (table, key)
Grid = dict[Place, list[Any]]  # the values to try


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

    def at_an_end(self, value: float, margin: float = 0.05) -> bool:
        """Whether the value is in the first or last twentieth.

        Args:
            value: In the range.
            margin: The part of the range that counts as its end.
        """
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return not low + margin * (high - low) < at < high - margin * (high - low)


Space = Mapping[Place, list[Any] | Range]  # a grid, or a space to search in


def tried_values(texts: Sequence[str], option: str) -> dict[str, list[Any]]:
    """The values to try by key, out of texts such as "lr=1e-2,1e-3" or "copfl.rate=0.05,0.25".

    Args:
        texts: From the command line.
        option: Where they stand, for the error.
    """
    result: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = (piece.strip() for piece in text.partition("="))
        if not (equals and key):
            raise UsageError(f'{option} "{text}" must have the form KEY=VALUE,VALUE, such as lr=1e-2,1e-3')
        if key in result:
            raise UsageError(f"{option} names {key} twice; give all its values at once")
        result[key] = [value_of(value) for value in at_commas(values)]
    return result


def grid_of(values: Mapping[str, Sequence[Any]], option: str) -> Grid:
    """The grid of these values; a key is `lr`, `optimizer` or TABLE.KEY.

    Args:
        values: By setting.
        option: Where they stand, for the error.
    """
    grid: Grid = {}
    for path, tried in space_of(values, option).items():
        if isinstance(tried, Range):
            raise UsageError(
                f"{option} {'.'.join(path)}={tried} is a range, which only tuning searches; name values"
            )
        grid[path] = tried
    return grid


def space_of(values: Mapping[str, Sequence[Any] | str], option: str) -> dict[Place, list[Any] | Range]:
    """The same, in which a range such as "log:1e-4..1e-1" may be in place of the values.

    Args:
        values: By setting.
        option: Where they stand, for the error.
    """
    check_by_setting(values, option)
    space: dict[Place, list[Any] | Range] = {}
    for path, given in values.items():
        if not (isinstance(given, str) or (hasattr(given, "__len__") and hasattr(given, "__iter__"))):
            raise UsageError(f"{option} {path}={given!r} is one value; pass several, as in {EXAMPLE}")
        tried = given if isinstance(given, str) else [plain(value) for value in given]
        table, _, key = path.partition(".")
        of_run = ("run", path) if path in declared_types(RunSettings) else None
        setting = SHORT.get(path) or PLACES.get(path) or of_run or (table, key)
        if not all(setting):
            form = f"a setting such as {', '.join(SHORT)} or rounds, or TABLE.KEY, such as copfl.rate or run.batch"
            raise UsageError(f'{option}: the key "{path}" must be {form}')
        alone = tried if isinstance(tried, str) else tried[0] if len(tried) == 1 else None
        if isinstance(alone, str) and ".." in alone:
            space[setting] = _range(alone, f"{option} {path}")
            continue
        if isinstance(tried, str) or not tried or len(set(map(repr, tried))) < len(tried):
            raise UsageError(f"{option} {path} must have several values, none of them twice")
        space[setting] = list(tried)
    return space


def check_by_setting(values: object, option: str) -> None:
    """UsageError for what has no settings with values.

    Args:
        values: What the program passed.
        option: Where they stand, for the error.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"{option} is {type(values).__name__}; pass values by setting: {EXAMPLE}")


def _range(text: str, where: str) -> Range:
    """The range in "log:1e-4..1e-1", "0.1..0.9" or "1..5"."""
    low, _, high = text.strip().removeprefix("log:").partition("..")
    log, whole = text.strip().startswith("log:"), all(re.fullmatch(r"[-+]?\d+", end) for end in (low, high))
    try:
        span = Range(float(low), float(high), log, whole)
    except ValueError:
        span = Range(0.0, 0.0, log, whole)
    if not -math.inf < span.low < span.high < math.inf or (log and span.low <= 0):
        form = "LOW..HIGH with LOW < HIGH, or log:LOW..HIGH with LOW > 0, such as log:1e-4..1e-1"
        raise UsageError(f'{where}: the range "{text}" must be {form}')
    return span


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
