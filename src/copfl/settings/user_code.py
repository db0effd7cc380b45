"""The user's models and data: named as "module:attribute", or passed as values.

`components` imports with it what a setting names.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader

from copfl.data import arrays
from copfl.data.samples import Dataset
from copfl.data.tables import frames
from copfl.errors import COMMAND_LINE, CopflError, UsageError, unknown, warn
from copfl.kernels.draws import seeded
from copfl.settings import named_code
from copfl.settings.named_code import is_reference as is_reference

DATA = (
    "a pandas DataFrame, a torch Dataset, a pair (train, test) of these, arrays (x, y) or (x, y, x_test, y_test), "
    "a dict of such arrays, a copfl Dataset, or a list or a dict of such data, one per client"
)


def check_no_file(kind: str, name: str) -> None:
    """UsageError for a file in place of a module, "mine.py:FedMine", with what to write.

    Args:
        kind: Such as "algorithm", for the error.
        name: As it was set.
    """
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py"):
        return
    folders_and_name = Path(file).with_suffix("").parts
    remedy = f"write {'.'.join(folders_and_name)}:{attribute}"
    if not all(map(str.isidentifier, folders_and_name)):  # elsewhere
        remedy = f"start copfl in {Path(file).parent} and write {folders_and_name[-1]}:{attribute}"
    raise UsageError(f'{kind} "{name}" names a file, and not a module; {remedy}')


def in_current_folder(kind: str, name: str) -> str:
    """What to write for a name without colon that is a module of the current folder; empty if it is none.

    The file is parsed and not imported: the name may be a file's.

    Args:
        kind: Such as "algorithm".
        name: As it was set.
    """
    module = str(Path(name)).removesuffix(".py")
    if not module.isidentifier() or not os.path.isfile(
        f"{module}.py"
    ):  # Path.is_file fails if a name is too long
        return ""
    with calling(kind, name, "reading it"):
        statements = ast.parse(Path(f"{module}.py").read_bytes()).body
    defined = [s.name for s in statements if isinstance(s, ast.ClassDef | ast.FunctionDef)]
    listed = ", ".join(f"{module}:{one}" for one in defined if not one.startswith("_"))
    return f"is a module of this folder; write {listed or f'{module}:NAME, but it has no {kind}'}"


def candidates(kind: str, module: str, holder: Any) -> list[str]:
    """The names in a module or class that can be components of this kind: its own, not what it imports.

    Args:
        kind: Such as "algorithm".
        module: Its name.
        holder: The module, or a class in it.
    """

    def fits(value: Any) -> bool:
        if not inspect.isclass(value) and not inspect.isfunction(value):
            return kind in ("data", "model") and not inspect.ismodule(value)
        is_own = value.__module__.partition(".")[0] == module.partition(".")[0]
        is_of_kind = kind != "algorithm" or not inspect.isclass(value) or hasattr(value, "client_update")
        return is_own and is_of_kind

    return [name for name, value in vars(holder).items() if not name.startswith("_") and fits(value)]


def attribute(kind: str, reference: str, recorded: str | None = None) -> Any:
    """The value of "module:attribute": the one door through which code that is not copfl's comes in.

    The module is one that this command names, of an installed package, of PYTHONPATH or of the current folder.
    The attribute is what the module defines itself, not what it imports: a file that names `mymodule:os.system`
    gets nothing.

    Args:
        kind: Of the component, such as "model".
        reference: Such as "mymodule:MyNet".
        recorded: The module's hash of when it was trained, see `named_code.digests`.
    """
    check_no_file(kind, reference)
    named_code.check(kind, reference, recorded)
    module, _, path = reference.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does
    try:
        with calling(kind, reference, "importing it", ModuleNotFoundError):
            value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        remedy = f"pip install {missing.partition('.')[0]}"
        if module == missing or module.startswith(missing + "."):
            searched = f"copfl searches the installed packages and {folder}"
            remedy = f"{searched}; start it in the folder that contains {missing}"
        raise UsageError(f'{kind} "{reference}": there is no module {missing}; {remedy}') from error
    for name in path.split("."):
        if not hasattr(value, name):
            raise unknown(f"{kind} in {module}", name, candidates(kind, module, value))
        value = getattr(value, name)
        if name.startswith("__") or not _defines(module, value):
            defined_in = getattr(value, "__module__", None) or type(value).__module__
            raise UsageError(
                f'{kind} "{reference}": {module} does not define {name}, it is of {defined_in}; name the module that '
                "defines it, or define it there"
            )
    if warning := named_code.changed(reference, recorded):
        _warn(f"{kind} {reference}: {warning}")
    return value


def _defines(module: str, value: Any) -> bool:
    """Whether a value is the module's own, or of a module inside it: no module, class or function of others."""
    if isinstance(value, functools.partial):
        return _defines(module, value.func)
    if isinstance(value, nn.Module) or not (callable(value) or isinstance(value, ModuleType)):
        return True
    return f"{getattr(value, '__module__', None)}.".startswith(f"{module}.")


def _warn(text: str) -> None:
    if COMMAND_LINE in os.environ:
        print(f"copfl: warning: {text}", file=sys.stderr, flush=True)
    else:
        warn(text)


def takes(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, none where Python cannot find out."""
    try:
        return dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        return {}


def given_by_copfl(factory: Callable[..., Any]) -> dict[str, str]:
    """The parameters that get the samples' shape and the number of classes, and which of the two each gets.

    Those called `shape` and `classes`; or else the two without a default, if there are just two.
    """
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {name: p for name, p in takes(factory).items() if p.kind not in variadic}
    facts = ["shape", "classes"]
    required = [name for name, p in named.items() if p.default is inspect.Parameter.empty]
    in_order = dict(zip(required, facts, strict=True)) if len(required) == 2 else {}
    return {name: name for name in facts if name in named} or in_order


def model_of(
    maker: object,
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    options: Mapping[str, Any],
    name: str = "model",
) -> nn.Module:
    """The module itself, or the one that a class or function makes of shape and classes with this seed.

    Args:
        maker: A module, or what makes one.
        shape: Of a sample.
        classes: Or other outputs.
        seed: Of the initial weights.
        options: Keywords of the maker.
        name: For the error.
    """
    if isinstance(maker, nn.Module):
        return maker
    if not callable(maker):
        kind = type(maker).__name__
        raise UsageError(f'"{name}" is {kind}; a model is an nn.Module, or a function that makes one')
    facts = {"shape": shape, "classes": classes}
    known = {parameter: facts[fact] for parameter, fact in given_by_copfl(maker).items()}
    doing = f"making it for samples of shape {list(shape)}"
    with seeded(seed), calling("model", name, doing):
        model = maker(**known, **options)
    if not isinstance(model, nn.Module):
        raise UsageError(f'"{name}" gave {type(model).__name__}; a model is a torch nn.Module')
    return model


def dataset_of(data: object, folder: Path | None, options: Mapping[str, Any], name: str) -> Dataset:
    """The data set that a value is, or that a function loads, with `data_dir` if it has that parameter.

    Args:
        data: The value, or the function that loads it.
        folder: Of data files.
        options: Keywords of the function.
        name: "module:attribute".
    """
    if isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__")):
        keywords = {"data_dir": folder, **options} if "data_dir" in takes(data) else options
        with calling("data", name, "loading it"):
            data = data(**keywords)
    elif options:
        raise UsageError(f'"{name}" is no function, so it has no option "{next(iter(options))}"')
    return as_dataset(data, name.rpartition(":")[2].rpartition(".")[2])


def as_dataset(user_data: Any, name: str = "own", **options: Any) -> Dataset:
    """A copfl Dataset out of data frames, torch Datasets or arrays.

    Args:
        user_data: See DATA.
        name: Of the data set.
        options: `kind` of the targets, and of data frames others, such as `target`.
    """
    kind = options.get("kind")
    if isinstance(user_data, Dataset):
        if kind not in (None, user_data.kind):
            raise UsageError(f"the targets of the data set are {user_data.kind}, and cannot be made {kind}")
        return user_data
    if isinstance(user_data, DataLoader):  # its batches are another matter than those of the clients
        return as_dataset(user_data.dataset, name, **options)
    if frames.has_frames(user_data):
        return frames.dataset_of(user_data, name, **options)
    if (
        isinstance(user_data, Mapping) and hasattr(user_data, "target") and hasattr(user_data, "data")
    ):  # as of scikit-learn
        return as_dataset((user_data.data, user_data.target), name, kind=kind)
    if isinstance(user_data, Mapping) and not any(key in user_data for key in arrays.NPZ_ARRAYS):
        if unfit := [key for key, of_client in user_data.items() if not _is_data(of_client)]:
            raise unknown("array", unfit[0], takes(arrays.from_arrays))
        of_clients = [
            as_dataset(of_client, f"client {key}", kind=kind) for key, of_client in user_data.items()
        ]
        return arrays.joined(of_clients, name, list(map(str, user_data)))
    if isinstance(user_data, Mapping):
        for key in user_data:
            if key not in takes(arrays.from_arrays):
                raise unknown("array", key, takes(arrays.from_arrays))
        return arrays.from_arrays(**{"name": name, "kind": kind, **user_data})
    if isinstance(user_data, list) and user_data and not isinstance(user_data[0], np.ndarray | Tensor):
        return arrays.joined(
            [as_dataset(of_client, f"client {n}", kind=kind) for n, of_client in enumerate(user_data)], name
        )
    arrays_or_sets = list(user_data) if isinstance(user_data, tuple | list) else []
    if len(arrays_or_sets) == 2 and all(isinstance(p, tuple) and len(p) == 2 for p in arrays_or_sets):
        arrays_or_sets = [*arrays_or_sets[0], *arrays_or_sets[1]]
    if len(arrays_or_sets) in (2, 4):
        arrays_or_sets = [np.asarray(p) if _is_column(p) else p for p in arrays_or_sets]
        if all(isinstance(p, np.ndarray | Tensor | Mapping) for p in arrays_or_sets):
            return arrays.from_arrays(*arrays_or_sets, name=name, kind=kind)
    if not arrays_or_sets and _has_items(user_data):
        return arrays.from_torch(user_data, name=name, kind=kind)
    if len(arrays_or_sets) == 2 and all(map(_has_items, arrays_or_sets)):
        return arrays.from_torch(arrays_or_sets[0], arrays_or_sets[1], name=name, kind=kind)
    raise UsageError(f"data of your own is {DATA}, not {type(user_data).__name__}")


def _is_data(value: object) -> bool:
    """Whether it may be the data of one client, and is no array of all of them."""
    return isinstance(value, Dataset | Mapping | tuple) or frames.is_frame(value) or _has_items(value)


def _is_column(value: object) -> bool:
    """Whether it is a Series, or rows in lists of Python."""
    is_series = hasattr(value, "to_numpy") and getattr(value, "ndim", 0) == 1
    is_list = (
        isinstance(value, list) and bool(value) and isinstance(value[0], bool | int | float | str | list)
    )
    return is_series or is_list


def _has_items(value: object) -> bool:
    """Whether it may be a torch Dataset, which is anything that has items (x, y)."""
    items = hasattr(value, "__getitem__") or hasattr(value, "__iter__")
    return items and not isinstance(value, np.ndarray | Tensor | str | tuple | list | dict)


@contextlib.contextmanager
def calling(kind: str, name: str, doing: str, *others: type[Exception]) -> Iterator[None]:
    """UsageError, with the line, in place of an error of the user's code that is none of `others`.

    Args:
        kind: Such as "model", for the error.
        name: "module:attribute", for the error.
        doing: What is done, such as "making it".
        others: Errors that pass as they are.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, (CopflError, *others)):
            raise
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")
        ]
        file, line, text = frames[-1].filename, frames[-1].lineno, str(error)
        if isinstance(error, SyntaxError):
            file, line, text = error.filename or "?", error.lineno, error.msg
        raised = f"{type(error).__name__}: {text} ({file}, line {line})"
        if isinstance(error, SystemExit):
            raised += '; what a module does as a script belongs inside `if __name__ == "__main__":`'
        raise UsageError(f'{kind} "{name}": {doing} raised {raised}') from error
