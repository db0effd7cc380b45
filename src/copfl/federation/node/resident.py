"""What a node keeps in memory between messages, and its answers: `node` with torch imported."""

import dataclasses
import json
import logging
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from copfl.core.task import Data
from copfl.data.samples import shape_of
from copfl.errors import CopflError, UsageError
from copfl.federation.node import secure_update, statistics
from copfl.federation.node.acceptance import accepted, as_member
from copfl.federation.node.data import NodeData, node_data
from copfl.federation.node.join import personalise
from copfl.federation.node.message import node_policy
from copfl.federation.node.request import Request
from copfl.federation.node.secure_phases import MASKED
from copfl.federation.policy import own_code
from copfl.federation.policy.components import check_tables
from copfl.federation.policy.file import policy_of
from copfl.federation.policy.model_size import require_size
from copfl.federation.policy.record import Bounds, Code, Statistics
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.federation.protocol.messages import JOIN, Content, refusal
from copfl.federation.protocol.node_config import NodeConfig, state_dir
from copfl.federation.protocol.noise import epsilon_of_upload
from copfl.federation.protocol.settings import Settings, settings_of
from copfl.federation.protocol.statistics import terms_of
from copfl.settings import named_code
from copfl.settings.flat import nested
from copfl.wire import Packet

UPLOADS = ("upload", MASKED)  # kinds of answers


class Resident:
    """The settings of the last run config, and the samples of the last node configuration."""

    def __init__(self) -> None:
        self._settings: tuple[str, Settings] | None = None
        self._data: tuple[object, NodeData] | None = None
        self._bounds: Bounds | None = None  # those under which the settings were made
        self._random = torch.random.get_rng_state()
        self.epsilon: float | None = None  # of the last answer, if it was noised

    def answer(self, request: Request) -> Content:
        """The answer to a message: that of a new process, bit for bit. An error becomes a refusal."""
        torch.set_num_threads(int(request.node_config.get("threads", 1)))
        torch.random.set_rng_state(self._random)  # a custom model may draw from it
        places = [str(value) for value in request.node_config.values()]
        self.epsilon = None
        try:
            policy = policy_of(request.node_config, state_dir(request.node_config))
            places += map(str, policy.paths)
            # Before anything that the run config names is loaded.
            run_config, code, proposal = accepted(policy, request.node_config, request.run_config)
            node_config, packet = as_member(request.node_config, proposal), Packet(*request.content)
            if nested(run_config).get("session", {}).get("agree"):
                if request.kind == JOIN or (proposal is not None and node_config["client"] < 0):
                    raise UsageError("this node is no member in the proposal")
                return statistics.answer(terms_of(run_config), node_config, packet, proposal)
            own_code.load(code)
            settings = self.settings(run_config, code, policy.bounds)
            check_tables(policy, settings.federation.tables())
            if request.kind == JOIN:
                return personalise(settings, node_config, packet, self.data)
            if proposal is not None and node_config["client"] < 0:
                raise UsageError("this node is no member in the proposal")
            is_secure = settings.federation.secure.aggregation
            epsilon = epsilon_of_upload(settings.algorithm, secure=is_secure)
            answer = secure_update.local_update(settings, node_config, packet, self.data, proposal)
            self.epsilon = epsilon if json.loads(answer.head)["kind"] in UPLOADS else None
            return answer
        except CopflError as error:
            return refusal(error, places)
        except Exception as error:  # it may describe samples: its text stays on the node
            logging.getLogger("flwr").exception("copfl: the local update failed")
            return refusal(CopflError(f"its program failed ({type(error).__name__}); see the node's log"))

    def settings(
        self, run_config: Mapping[str, Any], code: tuple[Code, ...] = (), bounds: Bounds | None = None
    ) -> Settings:
        hashes = [entry.sha256 for entry in code]
        limits = None if bounds is None else dataclasses.asdict(bounds)
        key = json.dumps([dict(run_config), hashes, limits], sort_keys=True)
        if self._settings is None or self._settings[0] != key:
            self._settings, self._bounds = (key, settings_of(run_config, bounds)), bounds
        return self._settings[1]

    def data(self, settings: Settings, node_config: NodeConfig) -> NodeData:
        """The node's samples; read again if the files have changed since."""
        named = [Path(str(node_config[key])) for key in ("data", "test") if node_config.get(key)]
        files = [_version(path.expanduser()) for path in named]
        key = (id(settings), json.dumps(dict(node_config), sort_keys=True), files)
        if self._data is None or self._data[0] != key:
            self._data = None  # not both in memory
            named_code.name(named_code.modules_in(node_config.get("data")))  # by the node's owner
            found = node_data(settings, node_config)
            if self._bounds is not None:
                _require_batch(self._bounds, settings, found.train)
            self._data = key, found
        _require_rows(node_policy(node_config).statistics, self._data[1])
        return self._data[1]


def _require_batch(bounds: Bounds, settings: Settings, train: Data) -> None:
    """PolicyError if a batch of the node's own samples needs more memory than the owner allows."""
    run, samples = settings.run, settings.federation.samples
    # The length of texts is the node's.
    shape = shape_of(train.x) if isinstance(train.x, dict) else settings.shape
    batch = min(run.run.batch, int(train.size))
    require_size(bounds, run.model, run.adapter, shape, samples.outputs, batch)


def _require_rows(statistics: Statistics, found: NodeData) -> None:
    """PolicyError if the contract chooses so few of the node's rows that an upload would reveal them."""
    if found.left_out and int(found.train.size) < statistics.smallest_count:
        why = (
            f"fewer than {statistics.smallest_count} rows to train on have a value in every column of the "
            "data contract, and an upload would reveal them; fill missing values, or leave such a column out"
        )
        raise PolicyError((Refusal("statistics.smallest_count", why),), "request")


def _version(path: Path) -> tuple[int, int, int]:
    """The number of files, their bytes and the time of the last change: they differ if files have changed."""
    found = [Path(folder) / name for folder, _, names in os.walk(path) for name in names] or [path]
    states = [file.stat() for file in found if file.exists()]
    return len(states), sum(s.st_size for s in states), max((s.st_mtime_ns for s in states), default=0)


def resident_memory() -> int:
    """The bytes of memory that this process has now; on other systems than Linux, the most that it had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
