"""One client's model as a file for other programs: safetensors, a torch state dict, or ONNX."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from copfl.core.task import Experts, Personal, Task
from copfl.errors import UsageError, one_of
from copfl.experiment.folder import named_tensors
from copfl.experiment.inference import RunModels
from copfl.files import write_bytes

TOLERANCE = 1e-5  # of the file's probabilities


def write(models: RunModels, model: Personal, format: str, path: Path) -> Path:
    """The path, once the model is there.

    safetensors   the tensors by name, and as metadata the classes and how samples are normalised
    torch         a state dict: `net.load_state_dict(torch.load(path))`
    onnx          raw samples in, probabilities out; compared with our own before it is written
    """
    formats = {"safetensors": _safetensors, "torch": _torch, "onnx": _onnx}
    one_of(formats, format=format)
    write_bytes(path, formats[format](models, model), durable=False)
    return path


def _safetensors(models: RunModels, model: Personal) -> bytes:
    from safetensors.torch import save

    data = models.experiment.federation.dataset
    about = {"classes": list(data.classes), "mean": list(data.mean), "std": list(data.std)}
    # One entry: safetensors writes several in any order, and the same model should be the same bytes.
    content: bytes = save(named_tensors(models.experiment.task, model), {"copfl": json.dumps(about)})
    return content


def _torch(models: RunModels, model: Personal) -> bytes:
    if isinstance(model, Experts):
        raise UsageError("the client predicts with a mixture of models, not with one state dict; use onnx")
    file = io.BytesIO()
    torch.save(named_tensors(models.experiment.task, model), file)
    return file.getvalue()


class Predictor(nn.Module):
    """Raw samples in, probabilities out: normalisation, the model or the mixture of models, softmax."""

    def __init__(self, task: Task, model: Personal) -> None:
        super().__init__()
        self.task = task
        experts = model if isinstance(model, Experts) else Experts(model[None], model.new_ones(1))
        self.register_buffer("fractions", experts.share.clone())
        self.nets = nn.ModuleList()
        for w in experts.w:
            net = copy.deepcopy(task.module)
            net.load_state_dict(named_tensors(task, w), strict=False)  # integer buffers keep their values
            self.nets.append(net)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x, fractions = self.task.numbers(x), self.get_buffer("fractions")
        parts = [torch.softmax(net(x), 1) * fractions[number] for number, net in enumerate(self.nets)]
        return torch.stack(parts).sum(0)


def _onnx(models: RunModels, model: Personal) -> bytes:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"ONNX needs {name}; install it with `pip install 'copfl[onnx]'`")
    x = np.ascontiguousarray(models.experiment.federation.dataset.train.x[:50])
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            Predictor(models.experiment.task, model),
            (torch.from_numpy(x[:3]),),
            path,
            input_names=["x"],
            output_names=["probabilities"],
            dynamo=True,
            verbose=False,
            external_data=False,
            dynamic_shapes={"x": {0: torch.export.Dim("samples", min=1)}},
        )
        content = path.read_bytes()
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (probabilities,) = session.run(None, {"x": x})
    difference = float(np.abs(probabilities - models.predict(model, x).probabilities).max())
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
