"""One client's model for other programs: safetensors, a torch state dict, ONNX, or an adapter of peft."""

import contextlib
import importlib.util
import io
import json
import logging
import os
import shutil
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
from copfl.data.samples import REGRESSION, Inputs, by_name, each
from copfl.errors import EXTRAS, CopflError, UsageError, library, one_of
from copfl.experiment import records
from copfl.experiment.client_models import named_tensors, with_entries
from copfl.experiment.config import without
from copfl.experiment.inference import RunModels
from copfl.files import write_bytes
from copfl.kernels.modules import arguments_of, logits_of
from copfl.models import adapters, pretrained
from copfl.tables import capital

TOLERANCE = 1e-5  # of the file's probabilities, or of the largest value
TASK_TYPES = {
    "sequence": "SEQ_CLS",
    "token": "TOKEN_CLS",
    "causal": "CAUSAL_LM",
    "embedding": "FEATURE_EXTRACTION",
}
HEAD = "head.safetensors"  # of a base without a head, to which peft can add none
PREFIX = "base_model.model."  # of the names in peft's files
CLASSIFIERS = ("classifier", "score")  # modules that peft stores of its own accord
RANK_TOLERANCE = 1e-7  # of the largest singular value: rounding of float32


def write(models: RunModels, model: Personal, format: str, path: Path) -> Path:
    """The path, once the model is there.

    safetensors   the tensors by name, and as metadata the classes and how samples are normalised
    torch         a state dict: `net.load_state_dict(torch.load(path))`; the same facts as attribute `copfl`
    onnx          raw samples in, probabilities or values out; compared with our own before it is written
    peft          a folder with the adapter alone: `peft.PeftModel.from_pretrained(base, path)`

    The first three contain the whole model, with its adapter merged into it.
    """
    formats = {"safetensors": _safetensors, "torch": _torch, "onnx": _onnx}
    one_of([*formats, "peft"], format=format)
    if format == "peft":
        return _peft(models, model, path)
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
    """The classes, the scale of the samples (pixels / 255, - mean, / std), and that of values to predict."""
    data, module = models.experiment.federation.dataset, models.experiment.task.module
    mean, std = (data.mean and getattr(module, "normalization", None)) or (data.mean, data.std)
    scale = {f"target_{k}": list(v) for k, v in zip(("mean", "std"), data.target_scale, strict=True) if v}
    return {"classes": list(data.classes), "mean": list(mean), "std": list(std)} | scale


def whole_tensors(task: Task, model: Personal) -> dict[str, Tensor]:
    """`named_tensors` of the whole model: frozen tensors too, adapters merged, the library's names."""
    if set(task.layout.names) >= {name for name, _ in task.module.named_parameters()}:
        return named_tensors(task.layout, model)
    if isinstance(model, Experts):
        parts = {f"{i}/{k}": v for i, w in enumerate(model.w) for k, v in whole_tensors(task, w).items()}
        return {**parts, "share": model.share.cpu()}
    tensors = adapters.merged(with_entries(task, model)).state_dict()
    return {name.removeprefix("net."): t.cpu().contiguous() for name, t in tensors.items()}


class Predictor(nn.Module):
    """Raw samples in, predictions out: normalisation, the model or the mixture of models, softmax."""

    def __init__(self, task: Task, model: Personal) -> None:
        super().__init__()
        self.task = task
        experts = model if isinstance(model, Experts) else Experts(model[None], model.new_ones(1))
        self.register_buffer("fractions", experts.share.clone())
        self.nets = nn.ModuleList()
        self.nets.extend(adapters.merged(with_entries(task, w)) for w in experts.w)
        self.eval()

    def forward(self, x: Inputs) -> Tensor:
        x, fractions, criterion = self.task.numbers(x), self.get_buffer("fractions"), self.task.criterion
        predicted = nn.Softmax(-1) if criterion.logarithmic else criterion.predictions
        arguments, keywords = arguments_of(self.task.module, x)
        outputs = [predicted(logits_of(net(*arguments, **keywords))) for net in self.nets]
        return torch.stack([output * fractions[n] for n, output in enumerate(outputs)]).sum(0)


def _onnx(models: RunModels, model: Personal) -> bytes:
    for name in EXTRAS["onnx"]:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"ONNX needs {name}; install it with `pip install 'copfl[onnx]'`")
    if isinstance(model, Experts) and model.near is not None:
        raise UsageError("the client mixes two models by the features of each sample; use safetensors")
    what = "values" if models.experiment.task.criterion.kind == REGRESSION else "probabilities"
    x = each(lambda array: np.ascontiguousarray(array[:50]), models.experiment.federation.dataset.train.x)
    samples: dict[int, Any] = {0: torch.export.Dim("samples", min=1)}
    if isinstance(x, dict) and "input_ids" in x:  # sentences of any length, where the model allows it
        samples[1] = torch.export.Dim.AUTO
    failed = "torch cannot write this model as ONNX ({}); export as safetensors or torch"
    with tempfile.TemporaryDirectory() as folder, _quiet(), _exporting(failed):
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            Predictor(models.experiment.task, model),
            (),
            path,
            kwargs={"x": tensors(each(lambda array: array[:3], x))},
            input_names=list(by_name(x)),
            output_names=[what],
            dynamo=True,
            verbose=False,
            external_data=False,
            dynamic_shapes={"x": each(lambda _: samples, x)},
        )
        content = path.read_bytes()
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (found,), own = session.run(None, by_name(x)), models.predict(model, x).outputs
    difference = float(np.abs(found.reshape(own.shape) - own).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(own).max())):
        problem = f"the ONNX file's {what} differ from the model's by {difference:.2g}"
        raise UsageError(f"{problem}; export as safetensors or torch")
    return content


@contextlib.contextmanager
def _exporting(message: str) -> Iterator[None]:
    """UsageError in place of any error of the exporter, with the last line of its cause."""
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
def _quiet() -> Iterator[None]:
    """Without the exporter's log and warnings about torch itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


# A client's adapter as a folder that peft loads, with a model card


def _peft(models: RunModels, model: Personal, path: Path) -> Path:
    """The folder, with adapter_config.json, adapter_model.safetensors and README.md; it must not exist."""
    if isinstance(model, Experts):
        raise UsageError("the client predicts with a mixture of models, which is no single adapter; use onnx")
    task = models.experiment.task
    module = with_entries(task, model)
    if not any(adapters.is_adapter(name) for name, _ in module.named_parameters()):
        raise UsageError(
            "the run has no adapter; --format peft is for runs with --adapter, others use safetensors"
        )
    if path.exists():
        raise UsageError(f"{path} exists already; name a new folder with --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        _write_files(models, module, set(task.layout.names), folder)
        (folder / "README.md").write_text(_card(models), encoding="utf-8")
        folder.chmod(0o755)  # a temporary folder is private
        for file in folder.iterdir():
            file.chmod(0o644)
        os.replace(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return path


def _write_files(models: RunModels, module: nn.Module, trained: set[str], folder: Path) -> None:
    from safetensors.torch import save_file

    net = module.net if isinstance(module, pretrained.Pretrained) else module
    if hasattr(net, "peft_config"):  # a PeftModel of the user
        net.save_pretrained(folder)  # type: ignore[operator]
        return
    inner = "net." if net is not module else ""
    task, table, adapter = (
        models.experiment.task,
        *(models.experiment.tables[t] for t in ("model", "adapter")),
    )
    initial = task.layout.split(task.initial[: task.d])
    layers = {name: layer for name, layer in net.named_modules() if hasattr(layer, "lora_A")}
    tensors, ranks = {}, dict[str, int]()
    for name, layer in layers.items():
        path = f"{inner}{name}"
        tensors |= _factors(name, layer)
        if (weight := f"{path}.base_layer.weight") in trained:
            factors = _with_residual(name, layer, initial[weight])
            tensors |= factors
            ranks[name] = len(factors[f"{name}.lora_A.weight"])
        if (bias := f"{path}.base_layer.bias") in trained:  # as peft writes the biases of bias="all"
            tensors[f"{name}.base_layer.bias"] = layer.get_base_layer().bias
    within = tuple(f"{inner}{name}." for name in layers)
    beside = {name for name in trained if name.startswith(inner) and not name.startswith(within)}
    kept = sorted({name.removeprefix(inner).rpartition(".")[0] for name in beside})
    task_type = TASK_TYPES.get(table.get("task", ""))
    # peft replaces every module whose name ends so, and wants the whole state of each.
    ends = (*kept, *(CLASSIFIERS if task_type in ("SEQ_CLS", "TOKEN_CLS") else ()))
    for name, part in net.named_modules():
        if ends and name.endswith(ends):
            if not name or any(hasattr(inside, "lora_A") for inside in part.modules()):
                problem = (
                    f'"{name or "the model itself"}" has trained parameters of its own and adapters inside'
                )
                raise UsageError(f"{problem}, which peft cannot store; export as safetensors, torch or onnx")
            tensors |= {f"{name}.{key}": t for key, t in part.state_dict().items()}
    config = library("peft").LoraConfig(
        r=adapter["r"],
        lora_alpha=adapter["alpha"],
        lora_dropout=adapter["dropout"],
        target_modules=sorted(layers),
        rank_pattern=ranks,
        alpha_pattern=ranks,  # such factors have the scale in them
        bias="all" if any(name.endswith(".base_layer.bias") for name in tensors) else "none",
        fan_in_fan_out=any(layer.fan_in_fan_out for layer in layers.values()),
        modules_to_save=kept or None,
        task_type=task_type,
        base_model_name_or_path=table.get("name", "").partition(":")[2] or None,
        inference_mode=True,
    )
    config.save_pretrained(folder)
    content = {f"{PREFIX}{name}": t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(content, folder / "adapter_model.safetensors", {"format": "pt"})
    if outside := sorted(name for name in trained if not name.startswith(inner)):
        parameters = dict(module.named_parameters())
        head = {name.removeprefix("head."): parameters[name].detach().cpu().contiguous() for name in outside}
        save_file(head, folder / HEAD)


def _factors(name: str, layer: Any) -> dict[str, Tensor]:
    """The matrices A and B of an adapted layer, under the names of peft's files."""
    (adapter,) = layer.lora_A
    return {f"{name}.lora_{m}.weight": getattr(layer, f"lora_{m}")[adapter].weight for m in "AB"}


def _with_residual(name: str, layer: Any, pretrained: Tensor) -> dict[str, Tensor]:
    """`_factors` whose product is all that was added to the pretrained W: scaling · B A, and W's own change.

    An adapter cannot store W, but it can have the rank of the whole difference, here at scale 1.
    """
    (adapter,), (first, second) = layer.lora_A, _factors(name, layer).values()
    change = (layer.get_base_layer().weight - pretrained).double()
    change = (change.T if layer.fan_in_fan_out else change).flatten(1)
    whole = change + layer.scaling[adapter] * (second.flatten(1).double() @ first.flatten(1).double())
    left, sizes, right = torch.linalg.svd(whole, full_matrices=False)
    rank = max(1, int((sizes > RANK_TOLERANCE * sizes.max()).sum()))
    root = sizes[:rank].sqrt()
    shapes = (rank, *first.shape[1:]), (second.shape[0], rank, *second.shape[2:])
    factors = (root[:, None] * right[:rank]).reshape(shapes[0]), (left[:, :rank] * root).reshape(shapes[1])
    return {f"{name}.lora_{m}.weight": t.to(first.dtype) for m, t in zip("AB", factors, strict=True)}


def _card(models: RunModels) -> str:
    """README.md: what the adapter is of, how it was trained, how good it is, and how it is loaded."""
    from jinja2 import StrictUndefined, Template

    e = models.experiment
    model, data = e.tables["model"], e.federation.dataset
    name = str(model.get("name", model.get("value", "")))
    source, _, base = name.partition(":")
    # The card may be published: no paths of this machine.
    place = Path(base).name if os.path.isdir(base) else base
    metric, lines = e.task.metrics[0], records.read(models.path / "rounds.jsonl")
    value = np.nanmean(records.table(lines, metric.name, e.clients)[-1])
    task = model.get("task", "") if source == "hf" else ""
    text = (Path(__file__).parent / "card.md").read_text("utf-8")
    template = Template(text, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    card: str = template.render(
        base=json.dumps(place),
        quoted=repr(place),
        licence=_licence(Path(base) / "README.md"),
        data=data,
        data_name=json.dumps(data.name),
        metric=metric.name,
        source=f"{source}:{place}",
        sha256=model.get("sha256", "not known"),
        adapter=json.dumps(e.tables.get("adapter", {})),
        method=f"{e.title}: {json.dumps(without(e.tables['algorithm'], 'name'))}",
        trained=f"{e.clients} clients, {e.settings.rounds} rounds",
        title=capital(metric.title),
        value=f"{value:.4f}",
        task=task,
        model_class=pretrained.TASKS.get(task),
        head=HEAD,
    )
    return card


def _licence(readme: Path) -> str | None:
    """The licence in the front matter of the base's own card."""
    lines = readme.read_text("utf-8", errors="replace").splitlines() if readme.is_file() else []
    found = [line.partition(":")[2].strip() for line in lines[:50] if line.startswith("license:")]
    return found[0] if found else None
