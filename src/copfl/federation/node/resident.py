"""What a node keeps in memory between messages, and its answers. With torch.

`worker` has one for its life; a node without a worker makes one per message. Here an error becomes a refusal, and
the kind of the message chooses the answer.
"""

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
from copfl.data.contract.contract import Contract
from copfl.data.samples import shape_of
from copfl.errors import CopflError, DataError, UsageError, raised_as
from copfl.federation.node import secure_update, statistics
from copfl.federation.node.data import NodeData, node_data
from copfl.federation.node.incoming import count_refusal, refused_today
from copfl.federation.node.join import personalise
from copfl.federation.node.node import Accepted, Node, NodeAnswer
from copfl.federation.node.secure_phases import MASKED
from copfl.federation.policy import own_code
from copfl.federation.policy.model_size import require_size
from copfl.federation.policy.record import AllowedCode, RequestBounds, StatisticsRules
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.federation.policy.request import check_tables
from copfl.federation.protocol.messages import JOIN, Content, refusal
from copfl.federation.protocol.noise import epsilon_of_upload
from copfl.federation.protocol.settings import TrainingSettings, settings_of
from copfl.federation.protocol.statistics import terms_of
from copfl.settings import named_code
from copfl.settings.flat import nested
from copfl.wire import Packet

UPLOADS = ("upload", MASKED)  # kinds of answers


class Resident:
    """The settings of the last run config, and the samples of the last node configuration."""

    def __init__(self) -> None:
        self._settings: tuple[str, TrainingSettings] | None = None
        self._data: tuple[object, NodeData] | None = None
        self._random = torch.random.get_rng_state()

    def answer(self, accepted: Accepted, kind: str, content: Content) -> NodeAnswer:
        """The answer to a message, as a new process would give it, bit for bit. An error becomes a refusal.

        Args:
            accepted: The node, and what it trains on.
            kind: Of the message: TRAIN or JOIN.
            content: Of the message.
        """
        node, packet = accepted.node, Packet(*content)
        torch.set_num_threads(node.config.threads)
        torch.random.set_rng_state(self._random)  # a custom model may draw from it
        try:
            if len(refused_today(node)) >= node.policy.bounds.refusals_per_day:
                why = "too many requests within a day could not be answered with this node's data"
                raise PolicyError((Refusal("bounds.refusals_per_day", why),), "request")
            if nested(accepted.run_config).get("session", {}).get("agree"):
                _require_member(node, kind)
                return NodeAnswer(statistics.answer(terms_of(accepted.run_config), node, packet))
            own_code.load(accepted.code)
            settings = self.settings(accepted.run_config, accepted.code, node.policy.bounds)
            check_tables(node.policy, settings.federation.tables())
            if (kind == JOIN) != bool(settings.federation.session.join):
                raise UsageError(
                    f"a node does not answer {kind!r} in this run; session.join says which it does"
                )
            if kind == JOIN:
                return NodeAnswer(personalise(settings, node, packet, self.data))
            _require_member(node, kind)
            is_secure = settings.federation.secure.aggregation
            epsilon = epsilon_of_upload(settings.algorithm, secure=is_secure)
            reply = secure_update.round_answer(settings, node, packet, self.data)
            return NodeAnswer(reply, epsilon if json.loads(reply.head)["kind"] in UPLOADS else None)
        except DataError as error:
            count_refusal(node)
            return NodeAnswer(refusal(error))
        except CopflError as error:
            return NodeAnswer(refusal(error, [*node.config.private_texts, *map(str, node.policy.paths)]))
        except Exception as error:  # it may describe samples: its text stays on the node
            logging.getLogger("flwr").exception("copfl: the local update failed")
            count_refusal(node)
            return NodeAnswer(refusal(DataError(f"its program failed: {error}")))

    def settings(
        self, run_config: Mapping[str, Any], code: tuple[AllowedCode, ...], bounds: RequestBounds
    ) -> TrainingSettings:
        """The settings of a run config; made again if it, the code or the bounds are others than before.

        Args:
            run_config: What was accepted.
            code: The owner's, which the run config names.
            bounds: What the owner allows a model of copfl's.
        """
        hashes = [entry.sha256 for entry in code]
        key = json.dumps([dict(run_config), hashes, dataclasses.asdict(bounds)], sort_keys=True)
        if self._settings is None or self._settings[0] != key:
            self._settings = key, settings_of(run_config, bounds)
        return self._settings[1]

    def data(self, settings: TrainingSettings, node: Node) -> NodeData:
        """The node's samples; read again if the files have changed since.

        Args:
            settings: The federation's.
            node: The one whose owner named the data.
        """
        named = [Path(node.config.data).expanduser()] if node.config.data else []
        files = [_version(path) for path in (*named, *filter(None, [node.config.test]))]
        key = id(settings), node.config, files
        if self._data is None or self._data[0] != key:
            self._data = None  # not both in memory
            named_code.name(named_code.modules_in(node.config.data))  # by the node's owner
            data = node_data(settings, node)
            _require_batch(node.policy.bounds, settings, data.train)
            self._data = key, data
        _require_rows(node.policy.statistics, settings, self._data[1])
        return self._data[1]


def _require_member(node: Node, kind: str) -> None:
    """UsageError if the node is asked for what only a member of the proposal is asked for."""
    if kind == JOIN or (node.proposal is not None and node.config.client < 0):
        raise UsageError("this node is no member in the proposal")


def _require_batch(bounds: RequestBounds, settings: TrainingSettings, train: Data) -> None:
    """DataError if a batch of the node's own samples needs more memory than the owner allows."""
    run, samples = settings.run, settings.federation.samples
    # The length of texts is the node's.
    shape = shape_of(train.x) if isinstance(train.x, dict) else settings.shape
    batch = min(run.run.batch, int(train.size))
    with raised_as(DataError, "{}", PolicyError):
        require_size(bounds, run.model, run.adapter, shape, samples.outputs, samples.kind, batch)


def _require_rows(statistics: StatisticsRules, settings: TrainingSettings, data: NodeData) -> None:
    """DataError if the contract chooses so few of the node's rows that an upload would reveal them.

    It chooses by columns that lack values, and by those that say which rows are before the test rows, or with them.
    """
    if int(data.train.size) >= statistics.smallest_count:
        return
    text = settings.federation.samples.contract
    contract = Contract.read(text) if text else None
    if data.left_out or (contract is not None and (contract.group or contract.time)):
        raise DataError(
            f"the data contract leaves fewer than {statistics.smallest_count} rows to train on, by columns that lack "
            "values, a group or a time, and an upload would reveal them; fill missing values, or leave such a column "
            "out [statistics.smallest_count]"
        )


def _version(path: Path) -> tuple[int, int, int]:
    """The number of files, their bytes and the time of the last change: they differ if files have changed."""
    files = [Path(folder) / name for folder, _, names in os.walk(path) for name in names] or [path]
    states = [file.stat() for file in files if file.exists()]
    return len(states), sum(s.st_size for s in states), max((s.st_mtime_ns for s in states), default=0)


def resident_memory() -> int:
    """The bytes of memory that this process has now; on other systems than Linux, the most that it had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
