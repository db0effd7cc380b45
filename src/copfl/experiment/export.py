"""One client's model for other programs: safetensors, a torch state dict, ONNX, or an adapter of peft."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from copfl.core.task import Experts, Personal, Task
from copfl.data.federation import tensors
from copfl.data.samples import Inputs, by_name, each
from copfl.errors import UsageError, one_of
from copfl.experiment import adapter_export
from copfl.experiment.folder import named_tensors
from copfl.experiment.inference import RunModels
from copfl.files import write_bytes
from copfl.models import adapters

TOLERANCE = 1e-5  # of the file's probabilities


def write(models: RunModels, model: Personal, format: str, path: Path) -> Path:
    """The path, once the model is there.

    safetensors   the tensors by name, and as metadata the classes and how samples are normalised
    torch         a state dict: `net.load_state_dict(torch.load(path))`; the same facts as attribute `copfl`
    onnx          raw samples in, probabilities out; compared with our own before it is written
    peft          a folder with the adapter alone: `peft.PeftModel.from_pretrained(base, path)`

    The first three contain the whole model, with its adapter merged into it.
    """
    formats = {"safetensors": _safetensors, "torch": _torch, "onnx": _onnx}
    one_of([*formats, "peft"], format=format)
    if format == "peft":
        return adapter_export.write(models, model, path)
    write_bytes(path, formats[format](models, model), durable=False)
    return path


def _safetensors(models: RunModels, model: Personal) -> bytes:
    from safetensors.torch import save

    about = _about(models)
    # One entry: safetensors writes several in any order, and the same model should be the same bytes.
    content: bytes = save(whole_tensors(models.experiment.task, model), {"copfl": json.dumps(about)})
    return content


def _torch(models: RunModels, model: Personal) -> bytes:
    if isinstance(model, Experts):
        raise UsageError("the client predicts with a mixture of models, not with one state dict; use onnx")
    file, tensors = io.BytesIO(), OrderedDict(whole_tensors(models.experiment.task, model))
    tensors.copfl = _about(models)  # type: ignore[attr-defined]
    torch.save(tensors, file)  # with the attribute, as of `_metadata` in torch's own state dicts
    return file.getvalue()


def _about(models: RunModels) -> dict[str, list[Any]]:
    """The classes, and how samples are normalised: pixels / 255, minus the mean, divided by the deviation."""
    data, module = models.experiment.federation.dataset, models.experiment.task.module
    mean, std = (data.mean and getattr(module, "normalization", None)) or (data.mean, data.std)
    return {"classes": list(data.classes), "mean": list(mean), "std": list(std)}


def whole_tensors(task: Task, model: Personal) -> dict[str, Tensor]:
    """`named_tensors` of the whole model: frozen tensors too, adapters merged, the library's names."""
    if set(task.layout.names) >= {name for name, _ in task.module.named_parameters()}:
        return named_tensors(task, model)
    if isinstance(model, Experts):
        parts = {f"{i}/{k}": v for i, w in enumerate(model.w) for k, v in whole_tensors(task, w).items()}
        return {**parts, "share": model.share.cpu()}
    tensors = adapters.merged(adapter_export.with_entries(task, model)).state_dict()
    return {name.removeprefix("net."): t.cpu().contiguous() for name, t in tensors.items()}


class Predictor(nn.Module):
    """Raw samples in, probabilities out: normalisation, the model or the mixture of models, softmax."""

    def __init__(self, task: Task, model: Personal) -> None:
        super().__init__()
        self.task = task
        experts = model if isinstance(model, Experts) else Experts(model[None], model.new_ones(1))
        self.register_buffer("fractions", experts.share.clone())
        self.nets = nn.ModuleList()
        self.nets.extend(adapters.merged(adapter_export.with_entries(task, w)) for w in experts.w)
        self.eval()

    def forward(self, x: Inputs) -> Tensor:
        x, fractions = self.task.numbers(x), self.get_buffer("fractions")
        parts = [torch.softmax(net(x), 1) * fractions[number] for number, net in enumerate(self.nets)]
        return torch.stack(parts).sum(0)


def _onnx(models: RunModels, model: Personal) -> bytes:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"ONNX needs {name}; install it with `pip install 'copfl[onnx]'`")
    if isinstance(model, Experts) and model.near is not None:
        raise UsageError("the client mixes two models by the features of each sample; use safetensors")
    x = each(lambda array: np.ascontiguousarray(array[:50]), models.experiment.federation.dataset.train.x)
    samples = {0: torch.export.Dim("samples", min=1)}
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            Predictor(models.experiment.task, model),
            (),
            path,
            kwargs={"x": tensors(each(lambda array: array[:3], x))},
            input_names=list(by_name(x)),
            output_names=["probabilities"],
            dynamo=True,
            verbose=False,
            external_data=False,
            dynamic_shapes={"x": each(lambda _: samples, x)},
        )
        content = path.read_bytes()
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (probabilities,) = session.run(None, by_name(x))
    difference = float(np.abs(probabilities - models.predict(model, x).outputs).max())
    if not difference <= TOLERANCE:
        problem = f"the ONNX file's probabilities differ from the model's by {difference:.2g}"
        raise UsageError(f"{problem}; export as safetensors or torch")
    return content


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's log and warnings about torch itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
