"""The adapter of a bundle as a folder that peft loads, with a model card.

`formats` calls it.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from copfl.core.task import Experts
from copfl.errors import UsageError, library
from copfl.experiment.bundle.base import PRETRAINED
from copfl.experiment.bundle.bundle import Bundle, base_of
from copfl.experiment.models.client_models import with_entries
from copfl.models import adapters, pretrained
from copfl.tables import capital

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


def write(bundle: Bundle, path: Path) -> Path:
    """The folder, with adapter_config.json, adapter_model.safetensors and README.md; it must not exist.

    Args:
        bundle: The model.
        path: Of the new folder.
    """
    model, task = bundle.model, bundle.task
    if isinstance(model, Experts):
        raise UsageError("the client predicts with a mixture of models, which is no single adapter; use onnx")
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
        _write_files(bundle, module, set(task.layout.names), folder)
        (folder / "README.md").write_text(_card(bundle), encoding="utf-8")
        folder.chmod(0o755)  # a temporary folder is private
        for file in folder.iterdir():
            file.chmod(0o644)
        os.replace(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return path


def _write_files(bundle: Bundle, module: nn.Module, trained: set[str], folder: Path) -> None:
    from safetensors.torch import save_file

    net = module.net if isinstance(module, pretrained.Pretrained) else module
    if hasattr(net, "peft_config"):  # a PeftModel of the user
        net.save_pretrained(folder)  # type: ignore[operator]
        return
    inner = "net." if net is not module else ""
    table, adapter = bundle.description.model, bundle.description.adapter
    initial = _initial(bundle)
    layers = {name: layer for name, layer in net.named_modules() if hasattr(layer, "lora_A")}
    tensors, ranks = dict[str, Tensor](), dict[str, int]()
    for name, layer in layers.items():
        path = f"{inner}{name}"
        tensors |= _factors(name, layer)
        if (weight := f"{path}.base_layer.weight") in trained:
            factors = _with_residual(name, layer, initial[weight])
            tensors |= factors
            ranks[name] = len(factors[f"{name}.lora_A.weight"])
        if f"{path}.base_layer.bias" in trained:  # as peft writes the biases of bias="all"
            tensors[f"{name}.base_layer.bias"] = layer.get_base_layer().bias
    within = tuple(f"{inner}{name}." for name in layers)
    beside = {name for name in trained if name.startswith(inner) and not name.startswith(within)}
    trained_modules = sorted({name.removeprefix(inner).rpartition(".")[0] for name in beside})
    task_type = TASK_TYPES.get(table.get("task", ""))
    # peft replaces every module whose name ends so, and wants the whole state of each.
    ends = (*trained_modules, *(CLASSIFIERS if task_type in ("SEQ_CLS", "TOKEN_CLS") else ()))
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
        modules_to_save=trained_modules or None,
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


def _initial(bundle: Bundle) -> dict[str, Tensor]:
    """The pretrained values of adapted layers that were trained too."""
    from safetensors.torch import load_file

    base = None if bundle.path is None else base_of(bundle.path, bundle.description)
    there = base is not None and (base / PRETRAINED).is_file()
    return load_file(base / PRETRAINED) if base is not None and there else {}


def _card(bundle: Bundle) -> str:
    """README.md: what the adapter is of, how it was trained, how good it is, and how it is loaded."""
    from jinja2 import StrictUndefined, Template

    facts, metric = bundle.description, bundle.task.metrics[0]
    source, _, base_name = str(facts.model.get("name", facts.model.get("value", ""))).partition(":")
    task = facts.model.get("task", "") if source == "hf" else ""
    base = None if bundle.path is None else base_of(bundle.path, facts)
    licence = None if base is None else _licence(base / "README.md")
    text = (Path(__file__).parent / "peft_card.md").read_text("utf-8")
    template = Template(text, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    value = next((f"{score.value:.4f}" for score in facts.scores if score.metric == metric.name), "not known")
    card: str = template.render(
        base=json.dumps(base_name),
        quoted=repr(base_name),
        licence=licence,
        data=facts.origin.data,
        note=facts.origin.note,
        classes=facts.output.names,
        count=facts.output.count,
        data_name=json.dumps(facts.origin.data),
        metric=metric.name,
        source=f"{source}:{base_name}",
        sha256=facts.model.get("sha256", "not known"),
        adapter=json.dumps(facts.adapter),
        method=facts.origin.title,
        trained=f"{facts.origin.clients} clients, {facts.origin.rounds} rounds",
        title=capital(metric.title),
        value=value,
        task=task,
        model_class=pretrained.TASKS.get(task),
        head=HEAD,
    )
    return card


def _licence(readme: Path) -> str | None:
    """The licence in the front matter of the base's own card."""
    lines = readme.read_text("utf-8", errors="replace").splitlines() if readme.is_file() else []
    licences = [line.partition(":")[2].strip() for line in lines[:50] if line.startswith("license:")]
    return licences[0] if licences else None
