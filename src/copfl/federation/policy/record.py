"""The policy of a machine's owner, with every default.

`strict.txt` has one that allows little, with a comment on each line; `copfl site policy FILE` writes it.
"""

import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from copfl.errors import UsageError, unknown
from copfl.federation.policy.names import (
    ADAPTERS,
    ADDONS,
    ALGORITHMS,
    FILE_KEYS,
    LOSSES,
    MEMBERS,
    METRICS,
    MODELS,
    OPTIMIZERS,
    REPORTS,
    ROBUST,
    SERVERS,
    SOURCES,
    TASKS,
    USUAL_ADDONS,
)

FINGERPRINT = re.compile("[0-9a-f]{4}(-[0-9a-f]{4}){7}")  # of a key: people can compare it by telephone
REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
DIGEST = re.compile(r"[0-9a-f]{64}")
SMALLEST_SUM = (
    3  # clients in a secure sum, whatever the owner allows: each of two would know the other's vector
)


class AllowedCode(NamedTuple):
    """A function or class of the owner's, imported from this folder if its file has this hash."""

    reference: str  # module:attribute
    folder: Path
    sha256: str  # of the module's file

    @property
    def module(self) -> str:
        return self.reference.partition(":")[0]


class AllowedBase(NamedTuple):
    """A pretrained model on this machine. A run config names it, or has its hash."""

    name: str  # such as hf:bert-tiny
    sha256: str = ""  # as `copfl federate init` writes it into [model]; empty: without its weights
    path: Path | None = None  # of hf: its folder


class AllowedFile(NamedTuple):
    """A file or folder of this machine under the name by which a run config asks for it."""

    key: str  # of FILE_KEYS
    name: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class RequestBounds:
    """The most that one run config may ask for."""

    rounds: int = 10_000
    clients: int = 10_000
    epochs: int = 100  # of one local update, in every option that counts epochs
    steps: int = 1000  # in every option that counts steps
    batch: int = 100_000
    updates: int = 100  # of a new client
    numbers: int = 10_000_000  # in one sample
    classes: int = 100_000  # or labels, or values to predict
    intervals: int = 1000  # of discrete time
    layers: int = 1000  # of a model
    parameters: int = 200_000_000  # of a model of copfl's, with its adapter
    option: float = 1e6  # the absolute value of any other number
    runs_per_day: int = 100  # that begin on this machine
    refusals_per_day: int = 100  # because the data cannot be used: each may tell something about them
    deadline: float = 7 * 24 * 3600.0  # seconds that a round waits
    seconds: float = 3600.0  # of one request: then the worker that answers it is ended
    memory: float = 64.0  # GiB of the worker while it answers, and of a batch as it is estimated before


@dataclass(frozen=True, kw_only=True)
class SumRules:
    """When uploads may leave."""

    required: bool = False
    cohort: int = 3  # least number of clients in a sum
    even_batches: bool = False  # whether run.even_batches must be true: else a last batch may be of one row
    parts: bool = (
        False  # whether a sum may be of some of a node's rows: run.steps, or algorithm.rows of trees
    )


@dataclass(frozen=True, kw_only=True)
class PrivacyRules:
    """The noise that uploads must have."""

    noise: float = 0.0  # least, in multiples of the clip: in a sum, or without secure sums in each upload
    clip: float = 1e6  # most
    lifetime_epsilon: float = 0.0  # most, of all runs on the same data together; 0: no limit
    delta: float = 1e-5  # of that epsilon


@dataclass(frozen=True, kw_only=True)
class StatisticsRules:
    """What may leave before the training, for the encoders of tables: sums and names of categories."""

    allowed: str = "all"  # or only in secure sums, or none
    smallest_count: int = 5  # rows: a sum or a category of fewer does not leave
    questions: int = 1  # about the same data: other columns, rows or members


@dataclass(frozen=True, kw_only=True)
class ProposalRules:
    """Who may propose runs to this node."""

    coordinators: tuple[str, ...] = ()  # fingerprints of their keys
    by_hand: bool = False  # whether each proposal needs `copfl site approve` as well
    members: str = "first"  # whose members are accepted without it: see MEMBERS
    unsigned: bool = False  # whether run configs are accepted that nobody signed


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a run config may ask of this machine. Without a file: copfl's own names, no code and no files."""

    algorithms: tuple[str, ...] = ALGORITHMS
    models: tuple[str, ...] = MODELS
    optimizers: tuple[str, ...] = OPTIMIZERS
    adapters: tuple[str, ...] = ADAPTERS
    servers: tuple[str, ...] = SERVERS
    addons: tuple[str, ...] = USUAL_ADDONS  # options of [addons] that may be set
    robust: tuple[str, ...] = ROBUST
    tasks: tuple[str, ...] = TASKS
    losses: tuple[str, ...] = LOSSES
    metrics: tuple[str, ...] = METRICS
    rollback: bool = False  # whether a run may continue from an earlier round than this node's
    reports: str = "all"  # which metrics may leave: all, only in secure sums, none
    benefit: bool = False  # whether halves of the clients may be compared, with two losses a round
    # Of an update of some steps and of a bin of trees, as far as settings say; and of this node's rows with one target,
    # as a class: fewer do not count.
    least_rows: int = 1
    first_model: bool = False  # whether a run must begin with the model of its settings and its seed
    statistics: StatisticsRules = field(default_factory=StatisticsRules)
    proposals: ProposalRules = field(default_factory=ProposalRules)
    secure_aggregation: SumRules = field(default_factory=SumRules)
    privacy: PrivacyRules = field(default_factory=PrivacyRules)
    bounds: RequestBounds = field(default_factory=RequestBounds)
    code: tuple[AllowedCode, ...] = ()
    bases: tuple[AllowedBase, ...] = ()
    files: tuple[AllowedFile, ...] = ()

    def __post_init__(self) -> None:
        copfls_names = {
            "algorithms": ALGORITHMS,
            "models": MODELS,
            "optimizers": OPTIMIZERS,
            "adapters": ADAPTERS,
        }
        copfls_names |= {"addons": tuple(ADDONS)}
        copfls_names |= {
            "servers": SERVERS,
            "robust": ROBUST,
            "tasks": TASKS,
            "losses": LOSSES,
            "metrics": METRICS,
        }
        for line, names in copfls_names.items():
            for name in getattr(self, line):
                if name not in names:
                    raise unknown(f"{line} in a policy", name, names)
        if self.reports not in REPORTS:
            raise unknown("reports in a policy", self.reports, REPORTS)
        if self.statistics.allowed not in REPORTS:
            raise unknown("statistics.allowed in a policy", self.statistics.allowed, REPORTS)
        if min(self.statistics.smallest_count, self.statistics.questions) < 1:
            raise UsageError(
                "statistics.smallest_count and statistics.questions in a policy must be at least 1"
            )
        if self.least_rows < 1:
            raise UsageError(f"least_rows={self.least_rows} in a policy must be at least 1")
        if self.proposals.members not in MEMBERS:
            raise unknown("proposals.members in a policy", self.proposals.members, MEMBERS)
        for name in self.proposals.coordinators:
            if not FINGERPRINT.fullmatch(name):
                raise UsageError(
                    f'proposals.coordinators "{name[:60]}" in a policy must be the fingerprint of a key, '
                    "as `copfl federate members` prints it"
                )
        if not (self.bounds.seconds > 0 and self.bounds.memory > 0):
            raise UsageError("bounds.seconds and bounds.memory in a policy must be above 0")
        for table in (self.secure_aggregation, self.privacy, self.bounds):
            for name, number in vars(table).items():
                if not 0 <= number < math.inf:
                    raise UsageError(f"{name}={number} in a policy must be at least 0 and finite")
        if not 0 < self.privacy.delta < 1:
            raise UsageError(f"delta={self.privacy.delta:g} in a policy must be above 0 and below 1")
        for code in self.code:
            if not REFERENCE.fullmatch(code.reference):
                raise UsageError(f'code "{code.reference[:60]}" in a policy must be module:attribute')
            top = code.module.partition(".")[0]
            if top in sys.stdlib_module_names or top == "copfl":
                raise UsageError(
                    f'code "{code.reference}" in a policy: {top} is a module of Python or of copfl; '
                    "only your own modules can be entered"
                )
        for base in self.bases:
            source, _, rest = base.name.partition(":")
            if source not in SOURCES or not rest:
                raise UsageError(
                    f'bases "{base.name[:60]}" in a policy must begin with hf:, torchvision: or timm:'
                )
            if source == "hf" and base.path is None:
                raise UsageError(f'bases "{base.name[:60]}" in a policy needs the path of its folder')
        for file in self.files:
            if file.key not in FILE_KEYS:
                raise unknown("key of files in a policy", file.key, FILE_KEYS)
        digests = {code.reference: code.sha256 for code in self.code}
        for name, digest in (
            digests | {base.name: base.sha256 for base in self.bases if base.sha256}
        ).items():
            if not DIGEST.fullmatch(digest):
                raise UsageError(f'"{name}" in a policy needs its SHA-256, 64 digits in lower case')
        for path in self.paths:
            if not path.is_absolute():
                raise UsageError(f"{path} in a policy must be an absolute path")

    @property
    def paths(self) -> list[Path]:
        """The folders and files of this machine that are entered."""
        paths = [*(code.folder for code in self.code), *(file.path for file in self.files)]
        return [*paths, *(base.path for base in self.bases if base.path is not None)]

    def file_names(self, key: str) -> list[str]:
        """The names that a run config may give to a key of FILE_KEYS."""
        return [file.name for file in self.files if file.key == key]


OPEN = Policy(rollback=True, proposals=ProposalRules(unsigned=True))  # of a server without a file
