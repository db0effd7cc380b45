"""The arguments that `run`, `compare`, `choose` and `sweep` share: declared and explained once, and made settings.

Each of these functions makes its first layer of settings with `tables`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar, get_args, get_type_hints

import numpy as np
import torch
from torch import nn

from copfl.core.algorithm import AnyAlgorithm
from copfl.core.optim import Optimizer
from copfl.data.clients.partition import INDICES, Partition, of_indices
from copfl.data.sets import datasets
from copfl.data.tables import frames
from copfl.errors import UsageError
from copfl.settings import named_code, torch_optimizers, user_code
from copfl.settings.checking import SettingError, parameters_of, unknown_key
from copfl.settings.components import CONTEXT, FACTORIES, factory_of
from copfl.settings.record import declared_types
from copfl.settings.schema import KINDS, RunSettings
from copfl.settings.toml import Tables, value_of
from copfl.settings.values import modules_of_values
from copfl.wrappers.addons import SCHEDULES

Options = Mapping[str, Any]
Data = Any  # what `dataset` may be, see DATASET
WIDTH = 108  # of a line of a docstring


class _Default(str):
    """The data set of a call that names none: no choice, as a record or `base_tables` may have one."""


DIGITS = _Default("digits")
DATASET = (
    'A name such as "heart", a file, a folder, "hf:NAME" or "module:function"; or a value: arrays (x, y) or (x, y, '
    "x_test, y_test), torch Datasets or a pair (train, test) of them, a pandas DataFrame with `target` and `client`, a "
    'pair of DataFrames, or one of such data per client, as a list or as a dict {"north": data, ...}.'
)


class Everyday(TypedDict, total=False):
    """The settings with a short name."""

    model: Annotated[
        str | nn.Module | Callable[..., nn.Module] | Options,
        "A name, an nn.Module, or a class or function of (shape, classes) that makes one. Parameters with "
        "requires_grad=False are not trained. By default it follows from the samples.",
    ]
    partition: Annotated[
        str | Path | Partition | Options,
        'Which client has which samples: a scheme such as "dirichlet", "module:function", a file, or a Partition.',
    ]
    optimizer: Annotated[
        str
        | Optimizer
        | type[Optimizer]
        | Callable[..., torch.optim.Optimizer]
        | torch.optim.Optimizer
        | Options,
        'A name, "module:Class", an optimizer, or torch.optim.SGD or Adam: the class, a partial of it, a function of '
        "the parameters, or an instance, whose numbers are taken. By default the algorithm's.",
    ]
    lr: Annotated[float, "Learning rate; by default what suits the optimizer and the data."]
    epochs: Annotated[int, "Local epochs per round."]
    rounds: Annotated[
        int,
        "Number of rounds. By default a run finds it on your own data, with a part of each client's training samples "
        "held out, and trains on all of them for as many rounds, see docs/howto.md.",
    ]
    clients: Annotated[int, "Number of clients."]
    batch_size: Annotated[int, "Samples per training step."]
    participation: Annotated[float, "Fraction of the clients in each round."]
    seed: Annotated[int, "Of all randomness of a run; a comparison has `seeds`."]
    device: Annotated[str, '"cpu", "cuda", "cuda:N" or "auto", a GPU if there is one and it is faster.']
    data_dir: Annotated[str | Path, "Folder of the data sets."]
    target: Annotated[str, "The column of a table to predict; several with commas."]
    client: Annotated[str, "The column of a table that names the client."]
    text: Annotated[str, "The column of a table with the texts to learn from."]
    group: Annotated[
        str, "The column of a table that says what of a site belongs together, on one side of every split."
    ]
    time: Annotated[str, "The column of a table that says when: the later rows of each client are test."]
    split: Annotated[int, "Seed of the draw of a table's test rows, which `seed` does not change."]
    event: Annotated[
        str,
        "Of survival, the column of a table that says whether the event was seen at the time in `target`.",
    ]
    start: Annotated[str, "Of survival, the column of a table with the time after which a row is at risk."]
    adapter: Annotated[str | Options, 'Such as "lora:r=8".']
    preset: Annotated[str, 'Settings below all others, such as "demo".']
    base_tables: Annotated[
        Mapping[str, Mapping[str, Any]],
        'Settings below the keywords, by table as in run.toml: {"model": {"name": "mlp"}}.',
    ]


class Settings(Everyday, total=False):
    """Settings by keyword: beside the everyday ones options of a choice, other tables, and all of [run].

    The settings of [run] are here for type checkers and editors alone: what is accepted is what the schema has.
    """

    algorithm_options: Options
    data_options: Options
    partition_options: Options
    model_options: Options
    optimizer_options: Options
    task: str | Options
    server: str | Options
    robust: str | Options
    privacy: Options
    attack: str | Options
    run: Options
    batch: int
    steps: int
    even_batches: bool
    new_clients: float
    eval_every: int
    eval_models: str
    select: str
    patience: int
    find_rounds: str
    temperature: float
    rounds_alone: int
    checkpoint_every: int
    buffers: str
    augment: bool
    engine: str
    chunk: int
    precision: str
    threads: int
    workers: int
    store: str
    cache_features: str
    local_baseline: bool
    rivals: bool
    own_models: str
    benefit: bool
    save_models: bool


class WithAddons(Settings, total=False):
    """All but what a choice of a method decides itself."""

    addons: Options


class OfRun(WithAddons, total=False):
    """All: the tuning of a comparison has validation samples of its own."""

    validation: float


MORE = (
    'settings: Others of [run], such as `eval_every=5`; options of a choice, as `algorithm_options={"rate": 0.1}`, '
    '`partition_options={"per_client": 3}`, `model_options={"norm": "batch"}`; and other tables, as '
    '`task={"metrics": ["auc"]}`, `optimizer={"name": "sgd", "momentum": 0.9}`, `addons={"ema": 0.9}`. '
    "`copfl schema` has all of them."
)
# Keywords that are settings of another name.
PLACES = {
    "lr": ("optimizer", "lr"),
    "epochs": ("algorithm", "epochs"),
    "batch_size": ("run", "batch"),
    "data_dir": ("data", "dir"),
    "target": ("data", "target"),
    "client": ("data", "client"),
    "text": ("data", "text"),
    "group": ("data", "group"),
    "time": ("data", "time"),
    "split": ("data", "split"),
    "event": ("data", "event"),
    "start": ("data", "start"),
}
VALUES = ("algorithm", "data", "model", "optimizer", "partition")  # what may be a value of the program
# What other libraries call settings that are in another table.
OTHER_TABLES = {"criterion": "loss", "metric": "metrics", "objective": "loss", "scheduler": "lr_schedule"}
# What other libraries call a bound of the gradients' norm, which copfl does not have.
CLIPPING = ("clip", "clip_grad", "clip_grad_norm", "grad_clip", "gradient_clip", "max_grad_norm", "max_norm")
OPTIONS = r":(?=\s*[\w.]+\s*=)"  # what separates options; a colon inside a value does not
SHORT = {"lr": ("optimizer", "lr"), "optimizer": ("optimizer", "name")}  # keys that need no table
F = TypeVar("F", bound=Callable[..., Any])


def shared(function: F) -> F:
    """The function with the shared keywords in its signature and its docstring, for `help` and editors."""
    signature = inspect.signature(function)
    hints = get_type_hints(Everyday, include_extras=True)
    about = {name: get_args(hint) for name, hint in hints.items()}
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_as_read(hint))
        for name, (hint, _) in about.items()
    ]
    *named, rest = signature.parameters.values()
    first = [parameter for parameter in named if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    last = [parameter for parameter in named if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*first, *keywords, *last, rest.replace(annotation=Any)]
    )
    texts = [f"dataset: {DATASET}", *(f"{name}: {words[1]}" for name, words in about.items()), MORE]
    lines = "\n".join(
        textwrap.fill(text, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 12) for text in texts
    )
    function.__doc__ = re.sub(r"^ +settings: .*$", lambda _: lines, str(function.__doc__), flags=re.MULTILINE)
    return function


def _as_read(hint: Any) -> str:
    """The annotation as people read it."""
    text = inspect.formatannotation(hint)
    for long, short in (
        ("collections.abc.", ""),
        ("typing.", ""),
        ("pathlib.", ""),
        ("torch.nn.modules.module.", "nn."),
    ):
        text = text.replace(long, short)
    for name in ("copfl.data.clients.partition.", "copfl.core.optim.", "torch.optim.optimizer."):
        text = text.replace(name, "torch.optim." if name.startswith("torch") else "")
    return text


def tables(dataset: Data, settings: Mapping[str, Any], algorithm: Any = None) -> Tables:
    """The settings of these arguments by title and key; what is a value and no name is the key `value`.

    The modules that they name may be imported from now on, see `named_code`; not those of `base_tables`, which a
    file may have had.

    Args:
        dataset: See DATASET.
        settings: Of `Settings`, but the preset.
        algorithm: Of a run: a name, or an algorithm as a value or its class.
    """
    if _is_data(given := settings.get("data")):  # as `resume` has it
        if not isinstance(dataset, _Default):
            raise UsageError("dataset and data are both set; leave out data")
        dataset, settings = given, {name: value for name, value in settings.items() if name != "data"}
    below: Mapping[str, Any] = settings.get("base_tables") or {}
    layer: Tables = {}
    if dataset is None:  # such as what a function without a return gave; the digits are not meant
        raise UsageError(f"dataset is None; pass the name of a data set, or {user_code.DATA}")
    if (isinstance(algorithm, str) and "," in spelled(algorithm)[0]) or _are_names(algorithm):
        raise UsageError(f"a run has one algorithm, and {algorithm!r} names several; use copfl.compare")
    if algorithm is not None:
        is_named = isinstance(algorithm, str | Mapping)
        _choose(layer, "algorithm", algorithm if is_named else algorithm_of(algorithm))
    for name, given in settings.items():
        if given is None or name in ("preset", "base_tables"):
            continue
        value = plain(given)
        title = name.removesuffix("_options")
        if name in PLACES or (name == "task" and isinstance(value, str)):
            table, key = PLACES.get(name, ("data", "kind"))  # the command line's --task
            # A path, or columns as a data frame has them, such as 4 or ["age", "sex"].
            if table == "data" and key != "split":
                value = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            layer.setdefault(table, {})[key] = value
        elif title in KINDS and (title != "run" or isinstance(value, Mapping)):
            is_of_torch = title == "optimizer" and torch_optimizers.is_torch(value)
            _choose(layer, title, torch_optimizers.settings_of(value) if is_of_torch else value)
        elif isinstance(value, Mapping):  # of an algorithm or optimizer of this name, in a comparison
            layer.setdefault(title, {}).update(value)
        elif name in declared_types(RunSettings):
            layer.setdefault("run", {})[name] = value
        else:
            raise _unknown(name, value, layer.get("algorithm", {}).get("name"))
    if isinstance(dataset, str | Path) and not isinstance(dataset, _Default):
        _choose(layer, "data", dataset)
    elif not isinstance(dataset, str | Path):
        layer["data"] = _data(dataset, {**below.get("data", {}), **layer.get("data", {})})
        below = {title: table for title, table in below.items() if title != "data"}
    values = {title: table["value"] for title, table in layer.items() if "value" in table}
    named_code.name(named_code.modules_in(layer), modules_of_values(values))
    return {title: {**below.get(title, {}), **layer.get(title, {})} for title in (*below, *layer)}


def _unknown(name: str, value: Any, algorithm: str | None) -> SettingError:
    """The error for a keyword that there is not, with the place of the setting where another table has it."""
    if algorithm and name in parameters_of(factory_of("algorithm", algorithm)):
        advice = f"is an option of {algorithm}: algorithm_options={{{name!r}: {value!r}}}"
        return SettingError(name, value, advice)
    meant = OTHER_TABLES.get(name, name)
    shown = "'mymodule:myfunction'" if callable(value) else repr(value)
    if name == "kind":
        return SettingError(name, value, f"is called task: task={shown}")
    if name in CLIPPING:
        uploads = f"privacy={{'noise': 1.0, 'clip': {shown}}}"
        advice = (
            "is no setting: none clips gradients. A method of your own does, with adjust= of its fit "
            f"(CONTRIBUTING.md); {uploads} clips the uploads, and adds noise to their sum"
        )
        return SettingError(name, value, advice)
    if meant == "lr_schedule" and value not in SCHEDULES:
        schedules = " or ".join(f"addons={{'lr_schedule': {one!r}}}" for one in SCHEDULES[1:])
        return SettingError(name, value, f"is no schedule of copfl: use {schedules}")
    for title, record in KINDS.items():
        if meant in declared_types(record):
            place = f"{title}_options" if f"{title}_options" in Settings.__annotations__ else title
            return SettingError(
                name, value, f"is a setting of the table {title}: {place}={{{meant!r}: {shown}}}"
            )
    for title in ("partition", "optimizer", "addons", "privacy", "attack", "robust", "model"):
        for component, factory in FACTORIES[title]().items():
            if meant in parameters_of(factory, CONTEXT.get(title, ())):
                of = f"{component}, as {title}={{'name': {component!r}, " if component else f"{title}={{"
                return SettingError(name, value, f"is an option of {of}{meant!r}: {shown}}}")
    owners = [one for one, factory in FACTORIES["algorithm"]().items() if name in parameters_of(factory)]
    if owners:  # a comparison has several algorithms, so the option is named with the one that it is of
        others = f" (as of {', '.join(owners[1:])})" if owners[1:] else ""
        advice = (
            f'is an option of {owners[0]}{others}: write it behind the name, "{owners[0]}:{name}={value}"'
        )
        return SettingError(name, value, advice)
    return unknown_key(name, value, {*get_type_hints(WithAddons), *declared_types(RunSettings)})


def plain(value: Any) -> Any:
    """A setting as a file has it: numbers of numpy and devices of torch are words and numbers of Python.

    Args:
        value: What the program passed.
    """
    if isinstance(value, np.generic):  # float32's 0.01 is 0.01, and not 0.009999999776
        return float(str(value)) if isinstance(value, np.floating) else value.item()
    if isinstance(value, torch.device):
        return str(value)
    if type(value) is dict:
        return {key: plain(one) for key, one in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def spelled(text: str, title: str = "algorithm") -> tuple[str, Tables]:
    """The name in NAME:KEY=VALUE:KEY=VALUE, and its settings by table.

    Args:
        text: As a person wrote it.
        title: The table of a key that names none; of an algorithm, but `lr` and `optimizer`.
    """
    name, *options = re.split(OPTIONS, text)
    settings: Tables = {}
    for option in options:
        key, _, value = option.partition("=")
        put(settings, key.strip(), value_of(value), title)
    return name.strip(), settings


def put(settings: Tables, key: str, value: Any, title: str = "algorithm") -> None:
    """Sets a key in its table; one without a table is that of `title`.

    Args:
        settings: Tables, which it changes.
        key: Such as "lr", "rate" or "run.batch".
        value: Of the setting.
        title: Of the table.
    """
    table, dot, inner = key.partition(".")
    short = SHORT if title == "algorithm" else {}  # a step of the server has a rate of its own
    title, inner = (table, inner) if dot else short.get(key, (title, key))
    settings.setdefault(title, {})[inner] = value


def _are_names(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, str) for one in value)


def _is_function(value: object) -> bool:
    """Whether it is a function, or a list that has one."""
    return callable(value) or (isinstance(value, list | tuple) and any(map(callable, value)))


def _is_data(value: object) -> bool:
    """Whether `data` are samples, and neither the name of a data set nor a table of settings."""
    if isinstance(value, Mapping):
        return any(not isinstance(of_key, str | int | float | Path | None) for of_key in value.values())
    return not isinstance(value, str | Path | None)


def _choose(layer: Tables, title: str, value: Any) -> None:
    """Puts a choice into its table: a name, options as a mapping, or a value.

    Args:
        layer: The tables.
        title: Such as "model".
        value: What the program passed.
    """
    table = layer.setdefault(title, {})
    if isinstance(value, str | Path):
        # The name of an adapter has options of its own form, and that of a data set may be a file.
        has_options = isinstance(value, str) and title not in ("adapter", "data")
        name, options = spelled(str(value), title) if has_options else (str(value), {})
        table["name"] = name
        for other, settings in options.items():
            layer.setdefault(other, {}).update(settings)
    elif isinstance(value, Mapping):
        if title == "task" and (functions := [key for key, one in value.items() if _is_function(one)]):
            where = "'mymodule:myfunction', of a module that Python can import, so that a run can be repeated"
            raise SettingError(f"task.{functions[0]}", None, f"is a function; name it: {where}")
        table.update(value)
    elif title == "partition" and not isinstance(value, Partition | tuple | list):
        function = " A function is named: 'mymodule:myfunction'" if callable(value) else ""
        raise SettingError(title, value, f"must be a name, a mapping of settings, or {INDICES}.{function}")
    elif title not in VALUES:
        raise SettingError(title, value, "must be a name or a mapping of settings")
    elif title == "partition":
        table["value"] = of_indices(value, "the partition")
    else:
        table["value"] = value


def _data(value: Any, table: Options) -> dict[str, Any]:
    """The table of data that a program passed; the settings of columns are those of data frames."""
    options = {key: v for key, v in table.items() if key not in ("name", "value", "dir")}
    of_tables = [key for key in options if key != "kind"]
    if of_tables and not frames.has_frames(value):
        raise UsageError(
            f"{of_tables[0]} names a column or an option of a table, and the data are {type(value).__name__}; "
            'pass a DataFrame or a file, or give the clients of arrays as {"x": x, "y": y, "group": clients}'
        )
    return {"value": user_code.as_dataset(value, **options)}


def algorithm_of(value: Any) -> AnyAlgorithm:
    """An algorithm that a program passed, as a value or its class; UsageError for what is none."""
    if hasattr(value, "client_update"):
        algorithm = value() if isinstance(value, type) else value
        fields = getattr(algorithm, "__dataclass_fields__", {})
        if absent := [name for name in fields if not hasattr(algorithm, name)]:
            raise UsageError(
                f"the algorithm {type(algorithm).__name__} has no {absent[0]}, as its __init__ leaves it out; make it "
                "a dataclass with its options as fields: @dataclass(frozen=True)"
            )
        return algorithm  # type: ignore[no-any-return]
    if isinstance(value, type) or not (frames.is_frame(value) or isinstance(value, list | tuple | nn.Module)):
        name = value.__name__ if isinstance(value, type) else type(value).__name__
        raise UsageError(
            f"the algorithm is {name}, which has no method client_update; copfl.ALGORITHMS has those of copfl"
        )
    what = "model" if isinstance(value, nn.Module) else "dataset"
    raise UsageError(
        f"the first argument is the algorithm, here {type(value).__name__}; name the argument: {what}=..., and "
        "leave the algorithm out for what suits the data"
    )


def check_no_data_set(names: Any) -> None:
    """UsageError for the name of a data set where methods are named.

    Args:
        names: What the program passed as methods.
    """
    is_data_set = isinstance(names, str) and names in datasets.DATASETS
    first = names[0] if isinstance(names, list | tuple) and names else names
    if is_data_set or frames.is_frame(first) or isinstance(first, np.ndarray | torch.Tensor):
        name = f'"{names}"' if is_data_set else type(names).__name__
        what = f'"{names}"' if is_data_set else "..."
        raise UsageError(f"{name} is a data set and no method; pass it as dataset={what}")
