"""One client's model as a file for elsewhere: safetensors, a torch state dict, or ONNX."""

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
from copfl.errors import UsageError, unknown
from copfl.experiment.folder import named_tensors
from copfl.experiment.inference import Trained
from copfl.files import write_bytes

FORMATS = ("safetensors", "torch", "onnx")
MISSING = "ONNX needs {}, which is not installed; `pip install 'copfl[onnx]'` brings it"
CLOSE = 1e-5  # how near the file's probabilities must come to ours


def write(trained: Trained, model: Personal, format: str, path: Path) -> Path:
    """The path, once the model is there.

    safetensors   the tensors by name, and as metadata the classes and how samples are normalised
    torch         a state dict: `net.load_state_dict(torch.load(path))`
    onnx          raw samples in, probabilities out; checked against our own before it is written
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    encode = {"safetensors": _safetensors, "torch": _torch, "onnx": _onnx}[format]
    write_bytes(path, encode(trained, model), durable=False)
    return path


def _safetensors(trained: Trained, model: Personal) -> bytes:
    from safetensors.torch import save

    data = trained.experiment.federation.dataset
    about = {"classes": list(data.classes), "mean": list(data.mean), "std": list(data.std)}
    # One entry: safetensors writes several in any order, and the same model should be the same bytes.
    content: bytes = save(named_tensors(trained.experiment.task, model), {"copfl": json.dumps(about)})
    return content


def _torch(trained: Trained, model: Personal) -> bytes:
    if isinstance(model, Experts):
        raise UsageError(
            "the client predicts with a mixture of models, which no one state dict holds; use onnx"
        )
    file = io.BytesIO()
    torch.save(named_tensors(trained.experiment.task, model), file)
    return file.getvalue()


class Predictor(nn.Module):
    """Raw samples in, probabilities out: normalisation, the model or the mixture of models, softmax."""

    def __init__(self, task: Task, model: Personal) -> None:
        super().__init__()
        self.task = task
        weights = model.w if isinstance(model, Experts) else model[None]
        share = model.share if isinstance(model, Experts) else weights.new_ones(1)
        self.register_buffer("share", share.clone())
        self.nets = nn.ModuleList()
        for w in weights:
            net = copy.deepcopy(task.module)
            net.load_state_dict(
                named_tensors(task, w), strict=False
            )  # whole-number buffers keep their values
            self.nets.append(net)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.task.numbers(x)
        parts = [torch.softmax(net(x), 1) for net in self.nets]
        shares = self.get_buffer("share")
        return torch.stack([part * shares[number] for number, part in enumerate(parts)]).sum(0)


def _onnx(trained: Trained, model: Personal) -> bytes:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(MISSING.format(name))
    task, split = trained.experiment.task, trained.experiment.federation.dataset.train
    predictor = Predictor(task, model)
    x = torch.from_numpy(np.ascontiguousarray(split.x[:3]))
    with tempfile.TemporaryDirectory() as folder, _in_silence():
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            predictor, (x,), path, input_names=["x"], output_names=["probabilities"], dynamo=True, verbose=False,
            external_data=False, dynamic_shapes={"x": {0: torch.export.Dim("samples", min=1)}},
        )  # fmt: skip
        content = path.read_bytes()
    _check(trained, model, content, split.x[:50])
    return content


@contextlib.contextmanager
def _in_silence() -> Iterator[None]:
    """Without what torch's exporter says of itself: libraries that it could use, names that it will drop."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _check(
    trained: Trained, model: Personal, content: bytes, x: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> None:
    """Nothing, if onnxruntime gives our own probabilities."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.ascontiguousarray(x)})
    off = float(np.abs(found - trained.answers(model, x).probabilities).max())
    if not off <= CLOSE:
        raise UsageError(
            f"the ONNX file's answers differ from the model's by {off:.2g}; export as safetensors or torch"
        )
