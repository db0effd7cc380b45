"""The content of bundle.json as typed records, checked when it is read.

`writing` writes it; everything that reads a bundle begins with it.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from copfl import foreign
from copfl.data.samples import KINDS, NEXT_TOKEN, REGRESSION, SURVIVAL, Inputs
from copfl.data.tables.encoders import Encoder
from copfl.errors import RunError, raised_as
from copfl.experiment.bundle.places import FILE
from copfl.files import write_bytes
from copfl.measures.survival import Curve
from copfl.settings.user_code import is_reference

FORMAT = 1
DTYPES = ("float32", "float64")  # of the weights
MOST_VALUES = 2**25  # of one sample, or outputs: what is larger is no description of a model of copfl
TABLE, TEXT, IMAGE, ARRAYS = "table", "text", "image", "arrays"  # the kinds of input
TEST, VALIDATION = "test", "validation"  # the splits of scores
Tokenizer = Callable[[Sequence[str]], Inputs]  # texts as inputs of the network


@dataclass(frozen=True)
class Array:
    """An input of the network: type and shape of one sample."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Input:
    """What the model takes."""

    arrays: dict[str, Array]  # of the network, by name; a single one is "x"
    columns: tuple[Encoder, ...] = ()  # of a table, in the order of the features
    missing: str = "refuse"  # values of a table: "fill" was trained with them
    text: str | None = None  # the column of the texts, where the model takes texts
    mean: tuple[float, ...] = ()  # per channel, of pixels scaled to 0..1
    std: tuple[float, ...] = ()
    group: str = ""  # the column of a table that says what belongs together, where rows are divided
    time: str = ""  # the column that says when a row was

    @property
    def kind(self) -> str:
        if self.columns:
            return TABLE
        if self.text is not None:
            return TEXT
        first = next(iter(self.arrays.values()))
        return IMAGE if first.dtype == "uint8" and len(first.shape) == 3 else ARRAYS

    @property
    def shape(self) -> Any:
        """The shape of one sample: a tuple, or several by name."""
        shapes = {name: array.shape for name, array in self.arrays.items()}
        return shapes["x"] if shapes.keys() == {"x"} else shapes


@dataclass(frozen=True)
class Hazard:
    """The cumulative hazard of a sample of risk 0 at one site, by Breslow's estimate from its training samples."""

    times: tuple[float, ...]
    values: tuple[float, ...]
    followed: float  # the longest time of a training sample: nothing is known beyond it

    @property
    def curve(self) -> Curve:
        return Curve(np.array(self.times), np.array(self.values))


@dataclass(frozen=True)
class Output:
    """What the model returns."""

    kind: str  # of copfl.data.samples.KINDS
    count: int  # of classes, labels, values or tokens
    names: tuple[str, ...] = ()  # of those; none for tokens
    targets: tuple[str, ...] = ()  # the columns of a table that it was trained to predict
    mean: tuple[float, ...] = ()  # of the values of a regression
    std: tuple[float, ...] = ()
    temperature: float = 1.0  # of the probabilities of classes, fitted on the client's validation samples
    hazard: Hazard | None = None  # of Cox's model of a site

    @property
    def classes(self) -> list[Any]:
        """The names; whole numbers where all of them are."""
        are_numbers = all(
            name.removeprefix("-").isdecimal() and str(int(name)) == name for name in self.names
        )
        return [int(name) for name in self.names] if are_numbers else list(self.names)

    @property
    def is_regression(self) -> bool:
        return self.kind == REGRESSION

    @property
    def is_survival(self) -> bool:
        return self.kind == SURVIVAL


@dataclass(frozen=True)
class Score:
    """A metric of the model, measured when it was trained."""

    metric: str
    split: str  # TEST, or VALIDATION: training samples of the client that nobody trained on
    value: float
    samples: int


@dataclass(frozen=True)
class Origin:
    """Where the model comes from."""

    title: str  # such as "copfl on digits"
    data: str
    stage: str  # of copfl.experiment.models.client_models
    rounds: int  # of the run
    clients: int
    round: int = 0  # the one that the model is of, from 1; 0: it is of none, as a later training's
    select: str = "last"  # how this round was chosen: run.select
    client: int | None = None  # None: the global model, or a new client's
    name: str = ""  # of the client, where it has one
    note: str = ""  # about the data


@dataclass(frozen=True)
class Description:
    """Everything about a model but its tensors."""

    model: dict[str, Any]  # the tables of run.toml
    adapter: dict[str, Any]
    task: dict[str, Any]
    seed: int
    dtype: str
    input: Input
    output: Output
    origin: Origin
    scores: tuple[Score, ...] = ()
    base: str = ""  # the folder of the base, relative to the bundle's; empty: there is none
    copfl: str = ""  # the version
    format: int = field(default=FORMAT)

    def write(self, folder: Path) -> None:
        """Writes the file of a bundle."""
        content = dataclasses.asdict(self)
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_bytes(folder / FILE, text.encode(), durable=False)


def own_code(table: Mapping[str, Any]) -> list[str]:
    """The names in a table of a bundle that are of the form module:attribute: code that the bundle lacks."""
    names = [table.get("name"), table.get("loss"), *table.get("metrics", ())]
    return [name for name in names if isinstance(name, str) and is_reference(name)]


def read(folder: Path) -> Description:
    """The description of the bundle in this folder; RunError if it is damaged."""
    path = folder / FILE
    with raised_as(RunError, f"{path} cannot be read ({{}}); restore it from a copy", OSError, ValueError):
        content = foreign.read_json(path)
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise RunError(
            f"{path} has the format {content.get('format')!r}, and this version of copfl reads {FORMAT}; use "
            f"the version that wrote it ({content.get('copfl')}), or run it again"
        )
    found: Description = _value(Description, content, str(path))
    if wrong := _wrong(found):
        raise RunError(f"{path} is damaged: {wrong}; restore it from a copy")
    return found


def _wrong(found: Description) -> str:
    """What in a description cannot be; empty if all of it can."""
    output, columns = found.output, found.input.columns
    known = {np.dtype(code).name for code in "?bBhHiIlLefd"}
    for name, array in found.input.arrays.items():
        if array.dtype not in known:
            return (
                f"the input {name} has the type {array.dtype!r}, which is none of {', '.join(sorted(known))}"
            )
        if min(array.shape, default=1) < 0 or math.prod(array.shape) > MOST_VALUES:
            return f"the input {name} has the shape {list(array.shape)}"
    checks = (
        (found.dtype in DTYPES, f"dtype is {found.dtype!r}, which is none of {', '.join(DTYPES)}"),
        (bool(found.input.arrays), "it has no input"),
        (1e-3 <= output.temperature <= 1e3, f"the temperature of its probabilities is {output.temperature}"),
        (output.kind in KINDS, f"the output is {output.kind!r}, which is none of {', '.join(KINDS)}"),
        (0 < output.count <= MOST_VALUES, f"it has {output.count} outputs"),
        (
            len(output.names) in (0, output.count),
            f"it has {len(output.names)} names of {output.count} outputs",
        ),
        (bool(output.names) or output.kind == NEXT_TOKEN, "its outputs have no names"),
        (len(set(output.names)) == len(output.names), "two outputs have the same name"),
        (_is_rising(output.hazard), "the baseline hazard of its risks does not rise over the times"),
        (0 <= found.seed < 2**63, f"its seed is {found.seed}"),
        (not found.input.std or min(found.input.std) > 0, "a deviation of its input is not positive"),
        (len(found.input.mean) == len(found.input.std), "its input has means without deviations"),
        (len(output.mean) == len(output.std), "its output has means without deviations"),
        (len({column.name for column in columns}) == len(columns), "two of its columns have the same name"),
    )
    return next((wrong for holds, wrong in checks if not holds), "")


def _is_rising(hazard: Hazard | None) -> bool:
    """Whether it is a hazard: positive steps, at times that follow each other."""
    if hazard is None:
        return True
    columns = [np.diff([0.0, *column]) for column in (hazard.times, hazard.values)]
    return len(columns[0]) == len(columns[1]) > 0 and all((steps > 0).all() for steps in columns)


def _value(hint: Any, value: Any, where: str) -> Any:
    """The JSON value as a value of this type; RunError names the place of one that is not."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is types.UnionType:
        options = [option for option in arguments if option is not types.NoneType]
        return None if value is None else _value(options[0], value, where)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        hints, fields = typing.get_type_hints(hint), {f.name: f for f in dataclasses.fields(hint)}
        if extra := sorted(value.keys() - fields.keys()):
            raise RunError(f'{where} is damaged: there is no "{extra[0]}"; restore it from a copy')
        for name, one in fields.items():
            needed = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
            if needed and name not in value:
                raise RunError(f'{where} is damaged: it lacks "{name}"; restore it from a copy')
        values = {name: _value(hints[name], item, f"{where}, {name}") for name, item in value.items()}
        return hint(**values)  # type: ignore[operator]
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], item, f"{where}, {n}") for n, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {str(name): _value(arguments[1], item, f"{where}, {name}") for name, item in value.items()}
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise RunError(f"{where} is damaged: {str(value)[:40]!r} is no {hint}; restore it from a copy")
