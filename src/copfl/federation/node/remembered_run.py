"""What a node remembers of a run to train without the server: the settings, and where its data are.

`update` and `join` write it, `report` reads it.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl import foreign
from copfl.data.copies import row_hashes
from copfl.data.tables.files import read_table
from copfl.federation.node.known_data import KnownData, cells_of
from copfl.federation.node.node import Node
from copfl.federation.protocol.files import stored
from copfl.federation.protocol.node_config import MEMORY
from copfl.federation.protocol.settings import TrainingSettings
from copfl.files import write_bytes
from copfl.measures.metrics import MetricInfo, metrics_of
from copfl.settings.flat import flattened

FILE = "settings.json"  # in the run's folder in the state-dir
MOST_THREADS = 4096  # torch starts as many as it is told
NODE_KEYS = ("data", "test", "device", "threads")  # of the node's configuration


class NodeRun(NamedTuple):
    """A run that a node takes part in."""

    run_config: dict[str, Any]
    options: dict[str, Any]  # what the node's owner set, with the client's number
    samples: str  # the name of its data, see `KnownData`
    metrics: tuple[MetricInfo, ...]


def remember(folder: Path, settings: TrainingSettings, node: Node, samples: str) -> None:
    """Writes the file of a run, if it has changed.

    Args:
        folder: The folder of the run, in the node's state-dir.
        settings: The federation's.
        node: With the number of its client.
        samples: The name of its data.
    """
    options = {key: node.config.options[key] for key in NODE_KEYS if key in node.config.options}
    for key in ("data", "test"):
        if key in options and Path(str(options[key])).expanduser().exists():
            options[key] = str(Path(str(options[key])).expanduser().resolve())
    content = {
        "settings": _run_config(settings),
        "node": {**options, "client": node.config.client},
        "samples": samples,
        "metrics": [metric.as_json() for metric in settings.task.metrics],
    }
    encoded = json.dumps(content, indent=1).encode()
    if not (folder / FILE).exists() or (folder / FILE).read_bytes() != encoded:
        write_bytes(folder / FILE, encoded, private=True)


@functools.lru_cache(maxsize=1)  # a worker has the same settings in every round
def _run_config(settings: TrainingSettings) -> dict[str, Any]:
    return flattened(settings.federation.tables())


def known_rows(folder: Path, data: Path) -> int:
    """How many rows of a table are among those that the node trained and tested with.

    0 where the folder was moved without the rest of the state-dir, which knows them.

    Args:
        folder: The folder of the run, in the node's state-dir.
        data: The table.
    """
    known_data = KnownData(folder.parent / MEMORY)
    if not (folder / FILE).exists() or not known_data.has(name := recall(folder).samples):
        return 0
    return int(np.isin(row_hashes(cells_of(read_table(data))), known_data.hashes(name)).sum())


def recall(folder: Path) -> NodeRun:
    """The run of a folder in the node's state-dir; RunError if the file is damaged."""
    damaged = f"{folder / FILE} cannot be used ({{}}); restore the node's state-dir"
    return stored(foreign.inside(folder, folder / FILE), _node_run, damaged=damaged)


def _node_run(content: Mapping[str, Any]) -> NodeRun:
    remembered = NodeRun(
        dict(content["settings"]), dict(content["node"]), str(content["samples"]), metrics_of(content)
    )
    threads = remembered.options.get("threads", 1)
    if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads is {threads!r}")
    if not remembered.metrics:
        raise ValueError("it has no metric")
    return remembered
