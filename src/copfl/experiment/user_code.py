"""Models and data of one's own: named as "module:attribute", or given as the values people have at hand."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from copfl.data import arrays
from copfl.data.samples import Dataset
from copfl.errors import CopflError, UsageError, unknown

DATA = (
    "a copfl Dataset, a torch Dataset, a pair (train, test) of torch Datasets, arrays (x, y) or "
    "(x, y, x_test, y_test), or a dict of such arrays"
)


def is_reference(name: str) -> bool:
    """Whether the name is of the form "module:attribute"."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def attribute(kind: str, reference: str, folder: str | None = None) -> Any:
    """What "module:attribute" names; modules of `folder`, or else of the current folder, can be imported too."""
    module, _, path = reference.partition(":")
    place = folder or os.getcwd()
    if place not in sys.path:
        sys.path.insert(0, place)  # as `python -m` does
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        remedy = (
            f"copfl looks among the installed packages and in {place}; start it in the folder that holds {missing}"
            if module == missing or module.startswith(missing + ".")
            else f"pip install {missing.partition('.')[0]}"
        )
        raise UsageError(f'{kind} "{reference}": there is no module {missing}; {remedy}') from error
    except Exception as error:  # whatever the user's own code raises
        raise failed(kind, reference, "importing it", error) from error
    for name in path.split("."):
        if not hasattr(found, name):
            known = [n for n, v in vars(found).items() if not n.startswith("_") and not inspect.ismodule(v)]
            raise unknown(f"{kind} in {module}", name, known)
        found = getattr(found, name)
    return found


def folder_of(reference: str) -> str | None:
    """The folder that an imported "module:attribute" came from, unless it is an installed package: for run.toml."""
    top = sys.modules[reference.partition(":")[0].partition(".")[0]]
    where = next(iter(top.__path__), None) if hasattr(top, "__path__") else getattr(top, "__file__", None)
    return (
        None if where is None or "site-packages" in Path(where).parts else str(Path(where).resolve().parent)
    )


def takes(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a function, none where Python cannot tell."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: p for name, p in parameters.items() if p.kind not in kinds}


def takes_any(factory: Callable[..., Any]) -> bool:
    """Whether a function takes keywords that it does not name."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def given_by_copfl(factory: Callable[..., Any]) -> dict[str, str]:
    """The parameters that get the samples' shape and the number of classes, and which of the two each gets.

    Those called `shape` and `classes`; or else the two without a default, in this order, if there are just two.
    """
    facts = ("shape", "classes")
    named = {name: name for name in facts if name in takes(factory)}
    required = [name for name, p in takes(factory).items() if p.default is inspect.Parameter.empty]
    return named or (dict(zip(required, facts, strict=True)) if len(required) == 2 else {})


def model_of(
    what: object,
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    options: Mapping[str, Any],
    called: str = "model",
) -> nn.Module:
    """The module itself, or what a class or function makes of the shape and the classes under this seed."""
    if isinstance(what, nn.Module):
        return what
    if not callable(what):
        raise UsageError(
            f'"{called}" is {type(what).__name__}; a model is an nn.Module, or a function that makes one'
        )
    facts = {"shape": shape, "classes": classes}
    known = {name: facts[fact] for name, fact in given_by_copfl(what).items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = what(**{**known, **options})
        except CopflError:
            raise
        except Exception as error:
            raise failed("model", called, f"making it for samples of shape {list(shape)}", error) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f'"{called}" gave {type(model).__name__}; a model is a torch nn.Module')
    return model


def dataset_of(what: object, folder: Path | None, options: Mapping[str, Any], called: str) -> Dataset:
    """The data set that a value is, or that a function loads; it gets `data_dir` if it has such a parameter."""
    name = called.rpartition(":")[2].rpartition(".")[2]
    if isinstance(what, type) or (callable(what) and not hasattr(what, "__getitem__")):
        keywords = {"data_dir": folder, **options} if "data_dir" in takes(what) else dict(options)
        try:
            what = what(**keywords)
        except CopflError:
            raise
        except Exception as error:
            raise failed("data", called, "loading it", error) from error
    elif options:
        raise UsageError(f'"{called}" is no function, so it has no option "{next(iter(options))}"')
    return as_dataset(what, name)


def as_dataset(what: Any, name: str = "own") -> Dataset:
    """A copfl Dataset out of torch Datasets or arrays."""
    if isinstance(what, Dataset):
        return what
    if isinstance(what, Mapping):
        known = tuple(n for n in takes(arrays.from_arrays))
        for key in what:
            if key not in known:
                raise unknown("array", key, known)
        return arrays.from_arrays(**{"name": name, **what})
    parts = list(what) if isinstance(what, tuple | list) else []
    if not parts and _has_items(what):
        return arrays.from_torch(what, name=name)
    if len(parts) in (2, 4) and all(map(_is_array, parts)):
        return arrays.from_arrays(*map(_plain, parts), name=name)
    if len(parts) == 2 and all(
        isinstance(p, tuple) and len(p) == 2 and all(map(_is_array, p)) for p in parts
    ):
        return arrays.from_arrays(*map(_plain, (*parts[0], *parts[1])), name=name)
    if len(parts) == 2 and all(map(_has_items, parts)):
        return arrays.from_torch(parts[0], parts[1], name=name)
    raise UsageError(f"data of your own is {DATA}, not {type(what).__name__}")


def failed(kind: str, reference: str, doing: str, error: Exception) -> UsageError:
    """The error for code of the user's own that raised one, with the place where it did."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    line = (
        getattr(error, "lineno", None)
        if isinstance(error, SyntaxError)
        else frames[-1].lineno
        if frames
        else None
    )
    file = error.filename if isinstance(error, SyntaxError) else frames[-1].filename if frames else "?"
    text = error.msg if isinstance(error, SyntaxError) else error
    return UsageError(
        f'{kind} "{reference}": {doing} raised {type(error).__name__}: {text} ({file}, line {line})'
    )


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | Tensor)


def _has_items(value: object) -> bool:
    """Whether it may be a torch Dataset, which is anything that gives (x, y) items."""
    items = hasattr(value, "__getitem__") or hasattr(value, "__iter__")
    return items and not isinstance(value, np.ndarray | Tensor | str | tuple | list | dict)


def _plain(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value
