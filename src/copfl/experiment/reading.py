"""The record of a run from its folder, finished or not, without the data set, the model or the user's code.

The report reads runs of others: nothing of them is imported or unpickled.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from copfl import foreign
from copfl.engine import checkpoint
from copfl.errors import RunError, UsageError, raised_as
from copfl.experiment import records
from copfl.experiment.analysis.gains import MODELS
from copfl.experiment.folder import RunFolder
from copfl.experiment.recording import algorithm_of, label_counts_of
from copfl.experiment.run_record import Masks, RunRecord, findings_in
from copfl.measures.metrics import metrics_of
from copfl.settings.schema import optimizer_text

AUDIT_FORMAT = "copfl audit 2"
RESTORE = "restore it from a copy, or start the run again"


def read_all(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs, each with a unique label: the algorithm, of several runs also its optimizer, and the folder.

    The folder is named where the rest is ambiguous.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError("a run was named twice; name each run folder once")
    tables = [RunFolder(path).tables() for path in paths]
    names = [algorithm_of(settings) for settings in tables]
    if len(paths) > 1:
        names = [
            ", ".join(filter(None, (algorithm_of(settings), optimizer_text(settings)))) for settings in tables
        ]
    folders = [path.resolve() for path in paths]
    labels = names
    for details in ([folder.name for folder in folders], folders):
        labels = [
            label if labels.count(label) == 1 else f"{name} ({detail})"
            for label, name, detail in zip(labels, names, details, strict=True)
        ]
    return [read(path, label) for path, label in zip(paths, labels, strict=True)]


def read(path: Path, label: str) -> RunRecord:
    """The current data of the folder; a running run may be read at any time.

    Args:
        path: Of the run folder.
        label: Its name on the page.
    """
    folder = RunFolder(path)
    tables, partition = folder.tables(), folder.partition()
    rounds = tables["run"].get("rounds")
    if type(rounds) is not int or not 0 < rounds < 2**63:
        raise RunError(f"{path / 'run.toml'} has no valid number of rounds; restore it from a copy")
    environment = _environment(path / "environment.json")
    lines = records.read(path / "rounds.jsonl")
    timing = path / "timing.jsonl"
    seconds = [line["seconds"] for line in records.read(timing)] if timing.exists() else []
    return RunRecord(
        tables=tables,
        environment=environment,
        partition=partition,
        records=lines,
        seconds=seconds[: len(lines)],
        folder=path,
        findings=findings_in(path, len(lines), partition.clients),
        label=label,
        toml=foreign.printable_lines((path / "run.toml").read_text(encoding="utf-8")),
        masks=_masks(path / "checkpoint" / "state.safetensors", environment.get("layers", {})),
        audit=_audit(path / "audit.json", partition.clients),
    )


def _readable(path: Path, advice: str) -> AbstractContextManager[None]:
    """Errors in the content of a file are reported with its path."""
    return raised_as(RunError, f"cannot read {path} ({{}}); {advice}", OSError, *foreign.DAMAGE)


def _environment(path: Path) -> dict[str, Any]:
    """The content of the file."""
    with _readable(path, RESTORE):
        content = foreign.read_json(path)
        layers = content.get("layers", {})
        if not all(type(size) is int and 0 < size < 2**63 for size in layers.values()):
            raise ValueError("the sizes of its layers are not positive numbers")
        if type(number := content.get("parameters", 0)) is not int or not 0 <= number < 2**63:
            raise ValueError("its number of parameters is not a number")
        counts = label_counts_of(content)
        if counts is not None and counts.shape[1] != len(content["classes"]):
            raise ValueError("it does not count every class for every client")
        if not metrics_of(content):
            raise ValueError("it has no metric")
        return dict(content)


def _audit(path: Path, clients: int) -> dict[str, Any] | None:
    """The audit of the run; None where there is none of these clients in this format."""
    if not path.is_file():
        return None
    with _readable(path, f"`copfl audit {path.parent}` makes it again"):
        content = dict(foreign.read_json(path))
        return content if content["format"] == AUDIT_FORMAT and len(content["clients"]) == clients else None


def _masks(path: Path, layers: Mapping[str, int]) -> Masks | None:
    """The clients' masks by layer; None where there is no checkpoint, or the algorithm has no masks.

    Only the masks are read, because the whole state of ten ResNets takes gigabytes.
    """
    if not layers or not path.is_file():
        return None
    inside, about = checkpoint.peek(path, re.compile(r"clients:(client\.)*mask"))  # also that of a wrapper
    if inside is None:
        return None
    mask = inside.numpy()
    if sum(layers.values()) != mask.shape[1]:
        raise RunError(f"{path} has other layers than environment.json; restore both from a copy")
    names = [name.rpartition(".")[0] or name for name in layers]  # a layer's weight and bias are one row
    modules = list(dict.fromkeys(names))
    module_of = np.repeat([modules.index(name) for name in names], list(layers.values()))  # of each parameter
    sizes = np.bincount(module_of)
    personal = np.stack([np.bincount(module_of, row, len(modules)) for row in mask])
    shared = np.bincount(module_of, ~mask.any(0), len(modules))
    overlap = np.zeros((0, 0))
    if len(mask) <= MODELS:
        both, of_client = np.array([[np.count_nonzero(a & b) for b in mask] for a in mask]), mask.sum(1)
        overlap = both / np.maximum(of_client[:, None] + of_client - both, 1)
    return Masks(int(about["round"]), modules, sizes.tolist(), personal / sizes, shared / sizes, overlap)
