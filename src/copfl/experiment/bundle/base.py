"""The base of bundles: what was not trained.

A run writes it once; its bundles refer to it.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.core.task import Task
from copfl.files import write_bytes
from copfl.models import pretrained, text

FROZEN = "frozen.safetensors"
PRETRAINED = "pretrained.safetensors"  # the initial values of adapted layers that were trained too
TOKENIZER = "tokenizer"
CONFIGS = ("config.json", "preprocessor_config.json", "README.md")


def write_base(folder: Path, task: Task, model: Mapping[str, Any], takes_text: bool) -> bool:
    """Writes what was not trained: frozen tensors, the configuration of a base, the tokenizer.

    False, if there is nothing of that.

    Args:
        folder: Of the base.
        task: With the model.
        model: Its table of settings.
        takes_text: Whether it tokenises texts.
    """
    from safetensors.torch import save

    tensors = {
        name: t.cpu().clone().contiguous()
        for name, t in task.module.state_dict().items()
        if name not in task.layout.names and not name.endswith("num_batches_tracked")
    }
    if tensors:
        write_bytes(folder / FROZEN, save(tensors), durable=False)
    initial = task.layout.split(task.initial[: task.d])
    if layers := {
        name: t.cpu().clone() for name, t in initial.items() if name.endswith(".base_layer.weight")
    }:
        write_bytes(folder / PRETRAINED, save(layers), durable=False)
    copied: list[tuple[Path, Path]] = []  # from, to
    name = str(model.get("name", ""))
    pretrained_name = Path(pretrained.base_of(name, "none").name) if name.startswith("hf:") else None
    if pretrained_name is not None:
        copied += [
            (pretrained_name / file, folder / file) for file in CONFIGS if (pretrained_name / file).is_file()
        ]
    tokens = Path(model["tokenizer"]) if "tokenizer" in model else pretrained_name
    if takes_text and tokens is not None:
        patterns = (*text.TOKENIZER_FILES, "config.json")
        token_files = sorted(
            {path for pattern in patterns for path in tokens.glob(pattern) if path.is_file()}
        )
        copied += [(path, folder / TOKENIZER / path.name) for path in token_files]
    for source, target in copied:
        write_bytes(target, source.read_bytes(), durable=False)
    return bool(tensors or copied)


def copy_base(source: Path, target: Path) -> None:
    """A copy of the base for a bundle that leaves its run folder.

    Args:
        source: The base.
        target: A new folder.
    """
    shutil.copytree(source, target)


def portable(model: Mapping[str, Any]) -> dict[str, Any]:
    """The table [model] without paths of this machine: the base and its tokenizer are in the bundle."""
    table = dict(model)
    source, _, path_or_name = str(table.get("name", "")).partition(":")
    if source == "hf" and Path(path_or_name).is_absolute():
        table["name"] = f"hf:{Path(path_or_name).name}"
    if "tokenizer" in table:
        table["tokenizer"] = TOKENIZER
    if table.get("weights") not in (None, "default", "none"):
        table["weights"] = Path(table["weights"]).name
    return table
