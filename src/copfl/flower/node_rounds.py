"""What a node notes of each round of a run: its models on its own samples. The file never leaves the node."""

import json
import math
from pathlib import Path
from typing import Any

from copfl.errors import RunError, raised_as
from copfl.experiment import records
from copfl.experiment.site import Measurement
from copfl.files import write_bytes
from copfl.flower.node_evaluation import Measured
from copfl.wire import plain

FILE = "measured.jsonl"  # in the run's folder in the state-dir
ALONE = "alone.jsonl"  # the same of training alone


def enter(folder: Path, round: int, found: Measured, file: str = FILE) -> None:
    """Notes a round, from 0, in place of what was noted of it and of later ones before the run went back to it."""
    values = {name: plain(float(value)) for name, value in sorted((found.tested | found.validated).items())}
    path = folder / file
    earlier = [line for line in _lines(path) if line["round"] <= round]
    lines = [*earlier, {"round": round + 1, "metrics": values}]
    write_bytes(path, b"".join(map(records.encoded, lines)), private=True)


def read(folder: Path, file: str = FILE) -> list[Measurement]:
    """The rounds of a run, in order."""
    return [
        Measurement(line["round"], {k: math.nan if v is None else v for k, v in line["metrics"].items()})
        for line in _lines(folder / file)
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    damaged = f"{path} is damaged ({{}}); restore it from a copy, or remove it"
    with raised_as(RunError, damaged, OSError, ValueError, KeyError, TypeError):
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        return [{"round": int(line["round"]), "metrics": dict(line["metrics"])} for line in lines]
