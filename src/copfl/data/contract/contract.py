"""The data contract of a federation: what the members' data must be, as a file that people agree on.

It has columns with types, units, ranges and categories, the targets, and what happens to missing values. Its
means, deviations and categories are given, or agreed by sums (`copfl.data.contract.statistics`); with all of them it
is frozen, and every site's table becomes the same numbers. As text for people it is TOML (`data.contract.file`),
in messages JSON.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from copfl.data.contract.agreed_encoders import MISSING, Encoders
from copfl.data.samples import CLASSIFICATION, KINDS, NEXT_TOKEN, REGRESSION, RISK, SURVIVAL, Dataset, Samples
from copfl.data.tables.encoders import MOST_CATEGORIES, Encoder
from copfl.errors import DataError, raised_as

TABLE, TEXT, ARRAYS = DATA = ("table", "text", "arrays")
NUMBER, CATEGORY, BOOLEAN, DATE, FREE_TEXT = TYPES = ("number", "category", "boolean", "date", "text")
LEARNED = (
    NUMBER,
    CATEGORY,
    BOOLEAN,
)  # types of columns that a model learns from; the others are checked alone
FORMAT = 1
MOST_COLUMNS = 5000
MOST_NAMES = 20_000  # categories of all columns together
LONGEST_NAME = 500  # characters of a column or a category
EXAMPLE_ROWS = 1000
LABEL = "label"  # the name of the target of data that has no columns
OF_SURVIVAL = ("time", "event", "start")  # the targets of arrays, which may have no start


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table: of a feature, or of a target."""

    name: str
    type: str
    unit: str = ""
    minimum: float | None = None  # of values; None: not agreed
    maximum: float | None = None
    guess: bool = False  # whether the range is a draft's, of one site's rows
    missing: bool = False  # whether a value may be missing
    indicator: bool = False  # of numbers: whether a second feature says where one is missing
    categories: tuple[str, ...] = ()  # all of them, of a target the names of the classes; none: to be agreed
    candidates: tuple[str, ...] = ()  # of which those that a site has become the categories
    mean: float | None = None  # of numbers; None: to be agreed
    deviation: float | None = None

    @property
    def problem(self) -> str:
        """What a column may not say; empty if nothing."""
        numbers = (self.minimum, self.maximum, self.mean, self.deviation)
        names = (*self.categories, *self.candidates)
        if not self.name or len(self.name) > LONGEST_NAME:
            return f"a column needs a name of at most {LONGEST_NAME} characters"
        if self.type not in TYPES:
            return f"its type is {self.type!r}; a type is one of {', '.join(TYPES)}"
        if any(number is not None and not math.isfinite(number) for number in numbers):
            return "its numbers must be finite"
        if self.type != NUMBER and any(number is not None for number in numbers):
            return f"a {self.type} has no range, mean or deviation"
        if self.indicator and not (self.type == NUMBER and self.missing):
            return "an indicator is of numbers that may be missing"
        if names and self.type not in (CATEGORY, BOOLEAN):
            return f"a {self.type} has no categories"
        if self.minimum is not None and self.maximum is not None:
            half = self.maximum / 2 - self.minimum / 2
            if not 0 < half < math.inf:
                return "its minimum must be below its maximum"
        if (self.mean is None) != (self.deviation is None):
            return "it has a mean or a deviation alone; give both or none"
        if self.deviation is not None and self.deviation <= 0:
            return "its deviation must be above 0"
        if self.type == BOOLEAN and (len(self.categories) != 2 or self.candidates):
            return 'a boolean has two categories, such as ["0", "1"] or ["no", "yes"]'
        if self.categories and self.candidates:
            return "it has categories and candidates; give one of them"
        if max(len(self.categories), len(self.candidates)) > MOST_CATEGORIES:
            return f"it has more than {MOST_CATEGORIES:,} categories"
        if len(set(names)) < len(names) or any(len(name) > LONGEST_NAME for name in names):
            return f"a category is there twice, or has more than {LONGEST_NAME} characters"
        return ""

    @property
    def is_open(self) -> bool:
        """Whether something is missing that turns the column into numbers."""
        if self.type == NUMBER:
            return self.mean is None
        return self.type in (CATEGORY, BOOLEAN) and not self.categories


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What the members of a federation have agreed on about their data."""

    data: str = TABLE  # or text, arrays
    task: str = CLASSIFICATION
    missing: str = "refuse"  # or fill, drop: what happens to a missing value
    columns: tuple[Column, ...] = ()  # of text: the column of the texts alone
    targets: tuple[Column, ...] = ()
    shape: tuple[int, ...] = ()  # of arrays: of a sample; images are channels, height, width
    group: str = ""  # the column that says what belongs together, such as the patient; "": none
    time: str = ""  # the column that says when; the later rows of each site are test; "": any rows are
    split: int = 0  # the seed of the draw of the test rows

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise DataError(f"the data contract cannot be used: {problem}")

    def _problems(self) -> Iterator[str]:
        for name, known in (("data", DATA), ("task", KINDS), ("missing", MISSING)):
            if getattr(self, name) not in known:
                yield f"{name} is {str(getattr(self, name))[:40]!r}, and must be one of {', '.join(known)}"
        every = (*self.columns, *self.targets)
        for column in every:
            if column.problem:
                yield f"the column {column.name[:40]!r}: {column.problem}"
        if len({column.name for column in every}) < len(every) or len(every) > MOST_COLUMNS:
            yield f"two columns have the same name, or there are more than {MOST_COLUMNS:,}"
        if sum(len(column.categories) + len(column.candidates) for column in every) > MOST_NAMES:
            yield f"it has more than {MOST_NAMES:,} categories"
        if self.missing == "refuse" and any(column.missing for column in every):
            yield 'a column allows missing values, and missing = "refuse"; set missing = "fill" or "drop"'
        if self.task != NEXT_TOKEN and not self.targets:
            yield "it has no target"
        if self.task == CLASSIFICATION and [target.type for target in self.targets] not in (
            [CATEGORY],
            [BOOLEAN],
        ):
            yield "a classification has one target, whose type is category"
        if self.task == REGRESSION and any(target.type != NUMBER for target in self.targets):
            yield "the targets of a regression are numbers"
        if self.task == SURVIVAL and [target.type for target in self.targets] not in (
            [NUMBER] * 2,
            [NUMBER] * 3,
        ):
            yield "survival has two targets, the time and the event, or with a start three, whose type is number"
        if self.data == TABLE and not self.features:
            yield "no column is left to learn from: of type number, category or boolean"
        if self.data == TEXT and [column.type for column in self.columns] != [FREE_TEXT]:
            yield "a contract of texts has one column, of type text"
        labelling = [name for name in (self.group, self.time) if name]
        if any(type(name) is not str or len(name) > LONGEST_NAME for name in (self.group, self.time)):
            yield f"group and time are names of columns, of at most {LONGEST_NAME} characters"
        elif len({*labelling, *(column.name for column in every)}) < len(labelling) + len(every):
            columns = [column.name for column in every]
            twice = next((name for name in labelling if name in columns), "")
            yield (
                f'"{twice}" is the column of the group or of the time, and no model learns from it: take it out of '
                "the columns and targets"
                if twice
                else "two columns, or group and time, have one name"
            )
        elif labelling and self.data == ARRAYS:
            yield "arrays have no columns, so no group and no time"
        if type(self.split) is not int or self.split < 0:
            yield "split is a whole number from 0 on"
        is_shape = all(type(size) is int and size > 0 for size in self.shape)
        if (self.data == ARRAYS) != bool(self.shape) or not is_shape:
            yield "arrays have the shape of a sample, and other data none"

    # -- what follows from it --------------------------------------------------------------------------------

    @property
    def features(self) -> tuple[Column, ...]:
        """The columns that a model learns from, in the order of the model's inputs."""
        return tuple(c for c in self.columns if c.type in LEARNED) if self.data == TABLE else ()

    @property
    def open(self) -> tuple[Column, ...]:
        """The columns whose mean and deviation, or categories, are not agreed yet."""
        return tuple(column for column in (*self.features, *self.targets) if self._is_open(column))

    def _is_open(self, column: Column) -> bool:
        is_class = column not in self.targets or self.task in (CLASSIFICATION, REGRESSION)
        return is_class and column.is_open

    @property
    def is_frozen(self) -> bool:
        """Whether every site's data become the same numbers by it."""
        return not self.open

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the classes, or of the targets."""
        if self.task == SURVIVAL:
            return RISK
        if self.task != CLASSIFICATION:
            return tuple(target.name for target in self.targets)
        return self.targets[0].categories

    @property
    def width(self) -> int:
        """The number of features of a row, as far as it is agreed."""
        return sum(len(c.categories) or len(c.candidates) or 1 + c.indicator for c in self.features)

    @property
    def digest(self) -> str:
        """A short name of the contract, which people can compare."""
        return hashlib.sha256(self.as_json().encode()).hexdigest()[:16]

    @property
    def encoders(self) -> Encoders:
        """How columns become numbers; DataError if that is not agreed yet."""
        if self.open:
            names = ", ".join(column.name for column in self.open[:5])
            raise DataError(f"the data contract is not frozen: {names} have no mean or categories yet")
        text = self.columns[0].name if self.data == TEXT else None
        return Encoders(
            self.target_names,
            tuple(map(_encoder, self.features)),
            self.missing,
            text,
            self.group,
            self.time,
            self.split,
        )

    def is_encoded(self, dataset: Dataset) -> bool:
        """Whether arrays have the features of this contract's columns, or its texts, and not the columns themselves."""
        if self.data == ARRAYS or not self.is_frozen or dataset.table is not None:
            return False
        x = dataset.train.x
        return isinstance(x, np.ndarray) and (
            x.dtype.kind in "UO" if self.data == TEXT else x.shape[1:] == (self.width,)
        )

    @property
    def target_names(self) -> tuple[str, ...]:
        return tuple(target.name for target in self.targets) if self.data != ARRAYS else ()

    def example(self) -> Dataset:
        """Samples of the form that the contract describes; all their values are made up."""
        rows, classes = EXAMPLE_ROWS, self.outputs or ("0", "1")
        x: Any = np.zeros((rows, *(self.shape or (self.width,))), np.float32)
        if self.data == TEXT:
            x = np.array(["text"] * rows)
        y: Any = np.arange(rows) % len(classes)
        if self.task != CLASSIFICATION:
            y = np.zeros((rows, len(self.targets)), np.float32)
            y = y[:, 0] if self.task == REGRESSION and len(self.targets) == 1 else y
        part = Samples(x, y)
        return Dataset("contract", part, part, classes, kind=self.task)

    @property
    def scale(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of each number to predict; none before they are agreed."""
        if self.task != REGRESSION or any(target.is_open for target in self.targets):
            return (), ()
        means, deviations = zip(*((t.mean or 0.0, t.deviation or 1.0) for t in self.targets), strict=True)
        return means, deviations

    def replaced(self, agreed: Mapping[str, Mapping[str, Any]]) -> Self:
        """The contract with fields of columns by name, such as their mean."""

        def of(columns: tuple[Column, ...]) -> tuple[Column, ...]:
            return tuple(dataclasses.replace(c, **agreed.get(c.name, {})) for c in columns)

        return dataclasses.replace(self, columns=of(self.columns), targets=of(self.targets))

    # -- as text ---------------------------------------------------------------------------------------------

    def as_table(self) -> dict[str, Any]:
        """Plain values, without those that are defaults."""
        listed = {"columns": [_plain(c) for c in self.columns], "targets": [_plain(t) for t in self.targets]}
        fields = {**vars(self), **listed, "shape": list(self.shape)}
        return {
            "format": FORMAT,
            **{name: value for name, value in fields.items() if value not in ([], (), "", 0)},
        }

    def as_json(self) -> str:
        """The contract as text that `read` gives back exactly."""
        return json.dumps(self.as_table(), separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Self:
        """The contract of a text; DataError if it is none."""
        with raised_as(DataError, "this is no data contract: {}", ValueError, RecursionError):
            content = json.loads(text)
        return cls.of_table(content)

    @classmethod
    def of_table(cls, content: Any) -> Self:
        """The contract of plain values; DataError names what is wrong."""
        malformed = ValueError, TypeError, KeyError, AttributeError, OverflowError
        with raised_as(DataError, "this is no data contract: {}", *malformed):
            known = {field.name for field in dataclasses.fields(cls)} | {"format"}
            if unknown := sorted(set(content) - known):
                raise ValueError(f"it has {unknown[0][:40]!r}; known: {', '.join(sorted(known))}")
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {str(content['format'])[:20]}; this version reads {FORMAT}")
            names = ("data", "task", "missing", "group", "time", "split")
            given = {name: content[name] for name in names if name in content}
            columns, targets = (
                tuple(_column(entry) for entry in content.get(name, [])) for name in ("columns", "targets")
            )
            return cls(columns=columns, targets=targets, shape=tuple(content.get("shape", ())), **given)

    @classmethod
    def of(cls, dataset: Dataset) -> Self | None:
        """The frozen contract of a data set whose values may be told; None of tokens and of named arrays."""
        table, x = dataset.table, dataset.train.x
        is_class = dataset.kind == CLASSIFICATION
        if (
            isinstance(x, dict)
            or dataset.kind == NEXT_TOKEN
            or (is_class and len(dataset.classes) > MOST_CATEGORIES)
        ):
            return None
        names = (LABEL,) if table is None and is_class else dataset.classes
        names = OF_SURVIVAL[: dataset.train.y.shape[1]] if dataset.kind == SURVIVAL else names
        names = table.targets if table is not None and table.targets else names
        if is_class:
            targets = [Column(name=names[0], type=CATEGORY, categories=dataset.classes)]
        else:
            none = (None,) * len(names)
            means, deviations = dataset.target_scale if dataset.kind == REGRESSION else (none, none)
            targets = [
                Column(name=name, type=NUMBER, mean=mean, deviation=deviation)
                for name, mean, deviation in zip(names, means, deviations, strict=True)
            ]
        general: dict[str, Any] = {"task": dataset.kind, "targets": tuple(targets)}
        if table is None and x.dtype.kind in "UO":
            return None  # an array of texts has no column to agree on
        if table is not None:
            general |= {"group": table.group, "time": table.time, "split": table.split}
        if table is None:
            return cls(data=ARRAYS, shape=tuple(map(int, x.shape[1:])), **general)
        if table.text:
            return cls(data=TEXT, columns=(Column(name=table.text, type=FREE_TEXT),), **general)
        columns = tuple(_of_encoder(encoder, table.missing != "refuse") for encoder in table.columns)
        return cls(columns=columns, missing=table.missing, **general)


def _encoder(column: Column) -> Encoder:
    if column.type == NUMBER:
        numbers = column.mean or 0.0, column.deviation or 1.0
        return Encoder(column.name, *numbers, indicator=column.indicator)
    return Encoder(column.name, categories=column.categories)


def _of_encoder(encoder: Encoder, missing: bool) -> Column:
    if encoder.categories:
        return Column(name=encoder.name, type=CATEGORY, categories=encoder.categories, missing=missing)
    return Column(
        name=encoder.name,
        type=NUMBER,
        mean=encoder.mean,
        deviation=encoder.std,
        missing=missing,
        indicator=encoder.indicator,
    )


def _plain(column: Column) -> dict[str, Any]:
    """The fields of a column that are no defaults."""
    usual = {field.name: field.default for field in dataclasses.fields(Column)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(column).items()
        if value != usual[name]
    }


def _column(entry: Any) -> Column:
    known = {field.name for field in dataclasses.fields(Column)}
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"a column has {unknown[0][:40]!r}; known: {', '.join(sorted(known))}")
    fields = dict(entry)
    for name in ("categories", "candidates"):
        words = fields.get(name, [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{name} must be a list of texts")
        fields[name] = tuple(words)
    for name in ("minimum", "maximum", "mean", "deviation"):
        if type(fields.get(name, 0)) not in (int, float):
            raise ValueError(f"{name} must be a number")
        if name in fields:
            fields[name] = float(fields[name])
    if not all(isinstance(fields.get(name, ""), str) for name in ("name", "type", "unit")):
        raise ValueError("name, type and unit must be texts")
    if any(type(fields.get(name, False)) is not bool for name in ("missing", "indicator")):
        raise ValueError("missing and indicator of a column must be true or false")
    if fields.get("type") == BOOLEAN and not fields["categories"]:
        fields["categories"] = ("0", "1")
    return Column(**fields)
