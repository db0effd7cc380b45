"""What a node notes of each round of a run: its models on its own samples. The file never leaves the node.

`update` enters a round, `report` reads them all and enters the rounds of training alone in a file of their own.
"""

import json
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from copfl import foreign
from copfl.errors import RunError, raised_as
from copfl.experiment import records
from copfl.federation.node.evaluation import MeasuredModels
from copfl.federation.node.site import Measurement
from copfl.files import write_bytes
from copfl.wire import plain

FILE = "measured.jsonl"  # in the run's folder in the state-dir
ALONE = "alone.jsonl"  # the same of training alone


def enter(folder: Path, round: int, measured: MeasuredModels, file: str = FILE) -> None:
    """Notes a round, from 0, in place of what was noted of it and of later ones before a rollback.

    Args:
        folder: The folder of the run, in the node's state-dir.
        round: From 0.
        measured: The node's models in it.
        file: FILE, or ALONE for what was trained alone.
    """
    values = {
        name: plain(float(value)) for name, value in sorted((measured.tested | measured.validated).items())
    }
    path, line = folder / file, {"round": round + 1, "metrics": values}
    content = path.read_bytes() if path.exists() else b""
    with _reading(path):
        follows = content.endswith(b"\n") and json.loads(content.splitlines()[-1])["round"] <= round
    if follows:
        return records.append(path, line)
    earlier = [noted for noted in _lines(path) if noted["round"] <= round]
    return write_bytes(path, b"".join(map(records.encoded, (*earlier, line))), private=True)


def read(folder: Path, file: str = FILE) -> list[Measurement]:
    """The rounds of a run, in order.

    Args:
        folder: The folder of the run, in the node's state-dir.
        file: FILE, or ALONE for what was trained alone.
    """
    return [
        Measurement(line["round"], {k: math.nan if v is None else v for k, v in line["metrics"].items()})
        for line in _lines(folder / file)
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with _reading(path):
        *whole, _ = path.read_bytes().split(b"\n")  # a kill may have cut off the last one
        lines = [foreign.json_of(line) for line in whole]
        return [{"round": int(line["round"]), "metrics": dict(line["metrics"])} for line in lines]


def _reading(path: Path) -> AbstractContextManager[None]:
    damaged = f"{path} is damaged ({{}}); restore it from a copy, or remove it"
    return raised_as(RunError, damaged, OSError, ValueError, KeyError, TypeError)
