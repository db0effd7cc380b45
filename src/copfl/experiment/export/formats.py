"""A bundle for other programs: safetensors, torch, ONNX, an adapter of peft, MLflow, or a bundle to send.

`copfl export` calls it.
"""

import contextlib
import dataclasses
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from copfl.core.task import Experts, Personal, Task
from copfl.data.samples import Inputs, each
from copfl.errors import CopflError, UsageError, one_of
from copfl.experiment.bundle.bundle import Bundle
from copfl.experiment.bundle.description import TABLE, Description
from copfl.experiment.bundle.predictor import Predictor
from copfl.experiment.models.client_models import mixture_tensors, named_tensors, with_entries
from copfl.files import write_bytes
from copfl.models import adapters

FORMATS = ("bundle", "safetensors", "torch", "onnx", "json", "peft", "mlflow")
TOLERANCE = 1e-5  # of the file's probabilities, or of the largest value
EXAMPLES = 3  # samples that a program is traced with
CHECKED = 50  # samples on which a file is compared with the model


def write(bundle: Bundle, format: str, path: Path) -> list[Path]:
    """Writes a model in a format of other programs; returns the files and folders, the path first.

    Args:
        bundle: The model.
        format: One of those below.
        path: A new file or folder.

    bundle        a folder with everything, also the base that the bundles of a run share
    safetensors   the tensors by name, with adapters merged; the description is in the metadata
    torch         a program of torch.export: `torch.export.load(path).module()`
    json          boosted trees, as XGBoost reads them
    onnx          raw columns, images or tokens in, classes and probabilities or values out
    peft          a folder with the adapter alone: `peft.PeftModel.from_pretrained(base, path)`
    mlflow        a folder for `mlflow models serve` and `mlflow.pyfunc.load_model(path)`
    """
    one_of(FORMATS, format=format)
    if format == "bundle":
        return [bundle.save(path)]
    if format == "peft":
        from copfl.experiment.export import peft_folder

        return [peft_folder.write(bundle, path)]
    if format == "mlflow":
        from copfl.experiment.export import mlflow_folder

        return [mlflow_folder.write(bundle, path)]
    if format == "json":
        from copfl.experiment.export import trees_file

        return trees_file.write(bundle, path)
    if format == "onnx":
        from copfl.experiment.export import onnx_file

        return onnx_file.write(bundle, path)
    if format == "torch" and path.suffix != ".pt2":
        raise UsageError(f"torch.export.load reads files that end in .pt2; name {path.stem}.pt2 with --out")
    write_bytes(path, (_safetensors if format == "safetensors" else _torch)(bundle), durable=False)
    return [path]


def about(description: Description) -> str:
    """The description for the metadata of a file."""
    return json.dumps(dataclasses.asdict(description), ensure_ascii=False)


def _safetensors(bundle: Bundle) -> bytes:
    from safetensors.torch import save

    # One entry: safetensors writes several in any order, and the same model should be the same bytes.
    tensors = whole_tensors(bundle.task, bundle.model)
    content: bytes = save(tensors, {"copfl": about(bundle.description)})
    return content


def whole_tensors(task: Task, model: Personal) -> dict[str, Tensor]:
    """`named_tensors` of the whole model: frozen tensors too, adapters merged, the library's names.

    Args:
        task: With the module.
        model: A client's, or the global one.
    """
    if set(task.layout.names) >= {name for name, _ in task.module.named_parameters()}:
        return named_tensors(task.layout, model)
    if isinstance(model, Experts):
        of_experts = {f"{i}/{k}": v for i, w in enumerate(model.w) for k, v in whole_tensors(task, w).items()}
        return of_experts | mixture_tensors(model)
    tensors = adapters.merged(with_entries(task, model)).state_dict()
    return {name.removeprefix("net."): t.cpu().clone().contiguous() for name, t in tensors.items()}


# Programs


def example(bundle: Bundle, count: int) -> Inputs:
    """Inputs of the network, drawn: a program is traced with them and compared on them.

    Args:
        bundle: The model.
        count: Samples.
    """
    rng, tokens = np.random.default_rng(0), bundle.description.input
    sizes = (count, 7)

    def array(name: str) -> Any:
        info = tokens.arrays[name]
        shape = sizes if bundle.description.input.text is not None else (count, *info.shape)
        if name == "attention_mask":
            return np.arange(shape[1]) < rng.integers(1, shape[1] + 1, (count, 1))
        kind = np.dtype(info.dtype)
        if kind.kind == "f":
            return rng.normal(size=shape)
        return rng.integers(
            0, _largest(bundle) if name == "input_ids" else 256 if kind.itemsize == 1 else 2, shape
        )

    arrays = {name: np.asarray(array(name)).astype(tokens.arrays[name].dtype) for name in tokens.arrays}
    return arrays["x"] if arrays.keys() == {"x"} else arrays


def _largest(bundle: Bundle) -> int:
    """The number of tokens that the network knows."""
    embeddings = [m for m in bundle.task.module.modules() if isinstance(m, nn.Embedding)]
    return max((m.num_embeddings for m in embeddings), default=2)


class Columns(nn.Module):
    """The features of a table's columns: numbers are standardised, categories one number each.

    numbers     float64 [n, k], the columns of numbers in the bundle's order; nan: missing
    categories  int64 [n, c], the place of each category in its list; -1: unknown or missing
    """

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        columns = bundle.description.input.columns
        self.widths = [len(column.categories) for column in columns]
        self.indicators = [column.indicator for column in columns]
        numbers = [column for column in columns if not column.categories]
        for name, values in (("mean", [c.mean for c in numbers]), ("std", [c.std for c in numbers])):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))
        self.predictor = Predictor(bundle.task, bundle.model, bundle.description.output.temperature)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        scaled = (numbers - self.get_buffer("mean")) / self.get_buffer("std")
        is_missing = torch.isnan(scaled)
        scaled = torch.where(is_missing, torch.zeros_like(scaled), scaled).to(torch.float32)
        features, number, category = [], 0, 0
        for width, indicator in zip(self.widths, self.indicators, strict=True):
            if width:
                codes = torch.arange(width, device=categories.device)
                features.append((categories[:, category, None] == codes).to(torch.float32))
                category += 1
            else:
                features.append(scaled[:, number, None])
                features += [is_missing[:, number, None].to(torch.float32)] if indicator else []
                number += 1
        result: Tensor = self.predictor(torch.cat(features, 1))
        return result


def _torch(bundle: Bundle) -> bytes:
    """A program that loads with torch alone; its extra file copfl.json has the description."""
    program: nn.Module = bundle.module
    inputs: dict[str, Any] = {"x": each(torch.from_numpy, example(bundle, EXAMPLES))}
    if bundle.description.input.kind == TABLE:
        program = Columns(bundle).eval()
        counts = [sum(bool(w) == wanted for w in program.widths) for wanted in (False, True)]
        inputs = {
            "numbers": torch.zeros(EXAMPLES, counts[0], dtype=torch.float64),
            "categories": torch.zeros(EXAMPLES, counts[1], dtype=torch.int64),
        }
    with quiet(), exporting("torch cannot trace this model ({}); export as safetensors"):
        exported = torch.export.export(
            program, (), inputs, dynamic_shapes=dynamic(bundle, inputs), strict=False
        )
        file = io.BytesIO()
        torch.export.save(exported, file, extra_files={"copfl.json": about(bundle.description)})
    return file.getvalue()


def dynamic(bundle: Bundle, inputs: dict[str, Any]) -> dict[str, Any]:
    """The axes of a program's inputs that may have any length: the samples, and the tokens of texts."""
    axes: dict[int, Any] = {0: torch.export.Dim("samples", min=1)}
    if bundle.description.input.text is not None:  # where the model allows it
        axes[1] = torch.export.Dim.AUTO
    return {name: each(lambda _: axes, value) for name, value in inputs.items()}


@contextlib.contextmanager
def exporting(message: str) -> Iterator[None]:
    """UsageError in place of any error of the exporter, with the first line of its cause."""
    try:
        yield
    except CopflError:
        raise
    except Exception as error:  # the exporter's own have the traceback in their text
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = [line for line in str(cause).splitlines() if line.strip()]
        reason = f"{type(cause).__name__}: {lines[0] if lines else ''}"[:200]
        raise UsageError(message.replace("{}", reason)) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the exporter's log and warnings about torch itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
