"""What a machine's owner lets others ask of it: the policy, and the one check of a run config against it.

A node and the ServerApp check every run config before they import, open or construct anything that it names.
All names are lists of what is allowed: copfl's own algorithms, models and metrics, and code and files that the
owner entered. Code is entered with its folder and SHA-256, a file with its path on this machine; a run config
has the name alone. No message changes a policy: it is a file of the owner. Without torch.
"""

import dataclasses
import math
import os
import re
import stat
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from copfl.errors import CopflError, UsageError, raised_as, unknown
from copfl.flower.keys import FINGERPRINT
from copfl.settings.federation import RUN_KEYS, TITLES, Network, Samples, is_plain_name
from copfl.settings.flat import flattened, nested
from copfl.settings.schema import RunSettings, declared
from copfl.settings.toml import Tables

FILE = "policy.toml"  # in the folder of a server's app, or in a node's state-dir
VARIABLE = "COPFL_POLICY"  # the path of a server's policy, if it is another file
SOURCES = ("hf", "torchvision", "timm")  # prefixes of pretrained models
ALGORITHMS = (
    "apfl",
    "copfl",
    "ditto",
    "fedala",
    "fedavg",
    "fedavg_ft",
    "fedbabu",
    "fedbn",
    "fedcalm",
    "fedce",
    "feddbe",
    "feddpa",
    "fedex_lora",
    "fedpac",
    "fedper",
    "fedpoe",
    "fedprox",
    "fedrep",
    "fedrod",
    "fedsa_lora",
    "fedselect",
    "ffa_lora",
    "flex_lora",
    "gpfl",
    "ifca",
    "ktpfl",
    "lg_fedavg",
    "local",
    "mr_mtl",
    "perfedavg",
    "pfedme",
    "player_fl",
    "potara",
    "reads",
    "scaffold",
    "splitnn",
)
MODELS = ("causal_cnn", "cnn", "cnn1d", "embedding", "mlp", "resnet18")
OPTIMIZERS = ("adam", "mamo", "sgd")
SERVERS = ("adagrad", "adam", "fedexp", "mean", "momentum", "yogi")
ADDONS = ("bn_stats", "ema", "lr_rounds", "lr_schedule")
ROBUST = ("clip", "median", "trimmed_mean")
ADAPTERS = ("lora",)
TASKS = ("classification", "multilabel", "next_token", "regression")
LOSSES = ("absolute", "binary_cross_entropy", "cross_entropy", "huber", "squared")
METRICS = (
    "accuracy",
    "auc",
    "balanced_accuracy",
    "calibration_error",
    "macro_f1",
    "mae",
    "perplexity",
    "r2",
    "rmse",
)
# What a run config means that leaves keys out, of the tables whose values the policy bounds.
DEFAULTS: dict[str, dict[str, Any]] = {
    title: {f.name: f.default for f in declared(record)}
    for title, record in (("run", RunSettings), ("network", Network), ("samples", Samples))
} | {"algorithm": {"name": "copfl"}}
DEFAULT_CLIP = 1.0  # of noised uploads
USUAL_LOSS = {
    "classification": "cross_entropy",
    "multilabel": "binary_cross_entropy",
    "next_token": "cross_entropy",
    "regression": "squared",
}
USUAL_METRIC = {
    "classification": "accuracy",
    "multilabel": "macro_f1",
    "next_token": "perplexity",
    "regression": "rmse",
}
FILE_KEYS = ("public", "tokenizer", "weights")  # keys of a run config that name files
REPORTS = ("all", "sums", "none")

REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
DIGEST = re.compile(r"[0-9a-f]{64}")
OPTION = re.compile(r"[a-z][a-z0-9_]{0,39}")
WORD = re.compile(r"[A-Za-z0-9_.*?+, -]{0,200}")  # no path, no address, no module:attribute, no variable
ADAPTER = re.compile(r"[a-z_]+(:[a-z_]+=[A-Za-z0-9_.*+-]{1,200}(,[a-z_]+=[A-Za-z0-9_.*+-]{1,200})*)?")
MOST_TEXT, MOST_KEYS, MOST_LIST = 100_000, 300, 1000  # characters, keys, entries
# Tables that choose a component by its name, and the policy's lines of the names; the model's has several.
NAMES = {
    "algorithm": "algorithms",
    "optimizer": "optimizers",
    "adapter": "adapters",
    "server": "servers",
    "robust": "robust",
}
COMPONENTS = ("algorithm", "optimizer", "model", "adapter", "server", "addons", "robust", "task")
KEYS = "keys"  # in place of a policy's line: what a run config may contain at all


class Code(NamedTuple):
    """A function or class of the owner's, imported from this folder if its file has this hash."""

    reference: str  # module:attribute
    folder: Path
    sha256: str  # of the module's file

    @property
    def module(self) -> str:
        return self.reference.partition(":")[0]


class Base(NamedTuple):
    """A pretrained model on this machine. A run config names it, or has its hash."""

    name: str  # such as hf:bert-tiny
    sha256: str = ""  # as `copfl federate init` writes it into [model]; empty: without its weights
    path: Path | None = None  # of hf: its folder


class File(NamedTuple):
    """A file or folder of this machine under the name by which a run config asks for it."""

    key: str  # of FILE_KEYS
    name: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The most that one run config may ask for."""

    rounds: int = 10_000
    clients: int = 10_000
    epochs: int = 100  # of one local update, in every option that counts epochs
    steps: int = 1000  # in every option that counts steps
    batch: int = 100_000
    updates: int = 100  # of a new client
    numbers: int = 10_000_000  # in one sample
    classes: int = 100_000
    layers: int = 1000  # of a model
    parameters: int = 200_000_000  # of a model of copfl's, with its adapter
    option: float = 1e6  # the absolute value of any other number
    runs_per_day: int = 100  # that begin on this machine
    deadline: float = 7 * 24 * 3600.0  # seconds that a round waits
    seconds: float = 3600.0  # of one request: then the worker that answers it is ended
    memory: float = 64.0  # GiB of the worker while it answers


@dataclass(frozen=True, kw_only=True)
class SecureAggregation:
    """When uploads may leave."""

    required: bool = False
    cohort: int = 3  # least number of clients in a sum


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The noise that uploads must have."""

    noise: float = (
        0.0  # least, in multiples of the clip: of a sum, or without secure aggregation of each upload
    )
    clip: float = 1e6  # most
    lifetime_epsilon: float = 0.0  # most, of all runs on the same data together; 0: no limit
    delta: float = 1e-5  # of that epsilon


@dataclass(frozen=True, kw_only=True)
class Proposals:
    """Who may propose runs to this node."""

    coordinators: tuple[str, ...] = ()  # fingerprints of their keys
    by_hand: bool = False  # whether each proposal needs `copfl federate approve` as well
    unsigned: bool = False  # whether run configs are accepted that nobody signed


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a run config may ask of this machine. Without a file: copfl's own names, no code and no files."""

    algorithms: tuple[str, ...] = ALGORITHMS
    models: tuple[str, ...] = MODELS
    optimizers: tuple[str, ...] = OPTIMIZERS
    adapters: tuple[str, ...] = ADAPTERS
    servers: tuple[str, ...] = SERVERS
    addons: tuple[str, ...] = ()  # options of [addons] that may be set
    robust: tuple[str, ...] = ROBUST
    tasks: tuple[str, ...] = TASKS
    losses: tuple[str, ...] = LOSSES
    metrics: tuple[str, ...] = METRICS
    rollback: bool = False  # whether a run may continue from an earlier round than this node's
    reports: str = "all"  # which metrics may leave: all, only in secure sums, none
    proposals: Proposals = field(default_factory=Proposals)
    secure_aggregation: SecureAggregation = field(default_factory=SecureAggregation)
    privacy: Privacy = field(default_factory=Privacy)
    bounds: Bounds = field(default_factory=Bounds)
    code: tuple[Code, ...] = ()
    bases: tuple[Base, ...] = ()
    files: tuple[File, ...] = ()

    def __post_init__(self) -> None:
        known = {"algorithms": ALGORITHMS, "models": MODELS, "optimizers": OPTIMIZERS, "adapters": ADAPTERS}
        known |= {"addons": ADDONS}
        known |= {"servers": SERVERS, "robust": ROBUST, "tasks": TASKS, "losses": LOSSES, "metrics": METRICS}
        for line, names in known.items():
            for name in getattr(self, line):
                if name not in names:
                    raise unknown(f"{line} in a policy", name, names)
        if self.reports not in REPORTS:
            raise unknown("reports in a policy", self.reports, REPORTS)
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


OPEN = Policy(rollback=True, proposals=Proposals(unsigned=True))  # of a server without a file


class Refusal(NamedTuple):
    """One thing that a run config asks for and the policy does not allow."""

    line: str  # of the policy, such as bounds.rounds
    why: str

    def __str__(self) -> str:
        return f"{self.why} [{self.line}]"


class PolicyError(UsageError):
    """A run config, or another request, that this machine's policy refuses."""

    def __init__(self, refusals: tuple[Refusal, ...], what: str = "run config") -> None:
        shown = "; ".join(map(str, refusals[:5]))
        more = f"; and {len(refusals) - 5} more" if len(refusals) > 5 else ""
        super().__init__(f"the policy of this machine's owner refuses the {what}: {shown}{more}")
        self.refusals = refusals


# -- the check -----------------------------------------------------------------------------------------------


def refusals(policy: Policy, run_config: Mapping[str, Any]) -> tuple[Refusal, ...]:
    """What the run config asks for and the policy does not allow. It opens, imports and constructs nothing."""
    if malformed := tuple(_malformed(run_config)):
        return malformed
    try:
        tables = nested(run_config)
    except CopflError as error:
        return (Refusal(KEYS, "".join(c if c.isprintable() else "?" for c in str(error)[:300])),)
    if unknown_titles := [title for title in tables if title not in TITLES]:
        return (Refusal(KEYS, f"{unknown_titles[0]} is no table of a run config"),)
    completed = _completed(tables)
    return (*_value_refusals(policy, completed), *_component_refusals(policy, completed))


def _completed(tables: Tables) -> Tables:
    """The tables with the defaults of the keys that are left out. Those of components are in `check_tables`."""
    completed = {title: {**DEFAULTS.get(title, {}), **tables.get(title, {})} for title in TITLES}
    completed["run"] = {
        key: value
        for key, value in completed["run"].items()
        if key in RUN_KEYS or key in tables.get("run", {})
    }
    if completed["privacy"]:
        completed["privacy"].setdefault("clip", DEFAULT_CLIP)
    kind, task = str(completed["samples"]["kind"]), completed["task"]
    metrics = task.get("metrics", ())
    texts = metrics if isinstance(metrics, list | tuple) else [metrics]
    if not any(str(text).replace(",", "").strip() for text in texts):  # as in `complete.task`
        task["metrics"] = USUAL_METRIC.get(kind, "")
    task.setdefault("loss", USUAL_LOSS.get(kind, ""))
    return completed


def _malformed(run_config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Keys and values that no run config of Flower has, before anything reads them."""
    if not isinstance(run_config, Mapping) or len(run_config) > MOST_KEYS:
        yield Refusal(KEYS, f"a run config is a table of at most {MOST_KEYS} keys")
        return
    for key, value in run_config.items():
        if not isinstance(key, str) or not re.fullmatch(r"[a-z][a-z0-9_.-]{0,79}", key):
            yield Refusal(KEYS, f"{_shown(key)} is no key of a run config")
        elif isinstance(value, Mapping):
            if key not in TITLES or len(value) > MOST_KEYS:
                yield Refusal(KEYS, f"{key} is no table of a run config")
            for name, option in value.items():
                if not isinstance(name, str) or not OPTION.fullmatch(name):
                    yield Refusal(KEYS, f"{_shown(name)} is no option of {key}")
                elif not _is_plain(option):
                    yield Refusal(KEYS, f"{key}.{name} is too large, or no number, word or list of them")
        elif not _is_plain(value):
            yield Refusal(KEYS, f"{key} is too large, or no number, word or list of them")


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or a list of them, of a size that can be read."""
    if isinstance(value, list | tuple):
        return len(value) <= MOST_LIST and all(
            not isinstance(v, list | tuple) and _is_plain(v) for v in value
        )
    if isinstance(value, str):
        return len(value) <= MOST_TEXT
    return isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < 2**63)


def _shown(value: object) -> str:
    """Another machine's value in a sentence: short, and in one line."""
    text = repr(value)[:60] if isinstance(value, str | int | float) else type(value).__name__
    return "".join(c if c.isprintable() else "?" for c in text)


Check = Callable[[Any], str]  # what is wrong with a value; "" if nothing is


def _whole(low: int, high: float) -> Check:
    def check(value: Any) -> str:
        is_within = type(value) is int and low <= value <= high
        return "" if is_within else f"must be a whole number of {low} to {high:.15g}"

    return check


def _number(low: float, high: float) -> Check:
    def check(value: Any) -> str:
        is_within = type(value) in (int, float) and low <= value <= high
        return "" if is_within else f"must be a number of {low:g} to {high:g}"

    return check


def _name(*allowed: str) -> Check:
    shown = ", ".join(filter(None, allowed))
    wrong = f"must be one of: {shown}" if shown else "is not allowed, nor is any other"

    def check(value: Any) -> str:
        return "" if isinstance(value, str) and value in allowed else wrong

    return check


def _flag(value: Any) -> str:
    return "" if type(value) is bool else "must be true or false"


def _text(value: Any) -> str:
    is_text = isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable()
    return "" if is_text else f"must be a text of at most {MOST_TEXT:,} characters"


def _run_name(value: Any) -> str:
    is_name = isinstance(value, str) and (not value or is_plain_name(value))
    return "" if is_name else 'must be letters, digits, "-" and "_", at most 100'


def _parts(value: Any) -> list[Any]:
    """The entries of a list; a list of one may be written as its entry."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _numbers(value: Any) -> str:
    parts = _parts(value)
    is_list = len(parts) <= MOST_LIST and all(type(v) in (int, float) and abs(v) < math.inf for v in parts)
    return "" if is_list else f"must be at most {MOST_LIST} numbers"


def _shape(most: int) -> Check:
    def check(value: Any) -> str:
        parts = _parts(value)
        is_shape = len(parts) <= 5 and all(type(part) is int and 0 <= part < 10**9 for part in parts)
        is_small = is_shape and math.prod(parts) <= most
        return "" if is_small else f"must be at most 5 whole numbers, whose product is at most {most}"

    return check


def _classes(most: int) -> Check:
    def check(value: Any) -> str:
        if type(value) is int:
            return "" if value <= most else f"must be at most {most}"
        are_names = all(isinstance(name, str) and name.isprintable() for name in _parts(value))
        is_short = are_names and len(_parts(value)) <= most
        return "" if is_short else f"must be a whole number of at most {most}, or as many names"

    return check


def _adapter(policy: Policy, value: Any) -> str:
    if value == "":
        return ""
    if not isinstance(value, str) or not ADAPTER.fullmatch(value):
        return "must be such as lora:r=8,alpha=16,targets=query+value"
    name, _, words = value.partition(":")
    if name not in policy.adapters:
        return _name(*policy.adapters)(name)
    for word in filter(None, words.split(",")):
        option, _, text = word.partition("=")
        if option != "targets" and not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?", text):
            return f"has {option}, which must be a number below a million"
    return ""


def _value_refusals(policy: Policy, tables: Tables) -> Iterator[Refusal]:
    """What is refused of the tables that have no component."""
    most, secure, privacy = policy.bounds, policy.secure_aggregation, policy.privacy
    rules: dict[str, tuple[str, Check]] = {
        "session.run": (KEYS, _run_name),
        "session.resume": (KEYS, _flag),
        "session.rollback": ("rollback", _flag),
        "session.join": ("bounds.updates", _whole(0, most.updates)),
        "run.rounds": ("bounds.rounds", _whole(1, most.rounds)),
        "run.clients": ("bounds.clients", _whole(1, most.clients)),
        "run.participation": (KEYS, _number(0, 1)),
        "run.seed": (KEYS, _whole(0, 2**63 - 1)),
        "run.batch": ("bounds.batch", _whole(1, most.batch)),
        "run.buffers": (KEYS, _name("local", "average")),
        "run.augment": (KEYS, _flag),
        "network.min_replies": ("bounds.clients", _whole(0, most.clients)),
        "network.deadline": ("bounds.deadline", _number(0, most.deadline)),
        "network.wire": (KEYS, _name("fp32", "fp16", "bf16")),
        "samples.shape": ("bounds.numbers", _shape(most.numbers)),
        "samples.text": (KEYS, _flag),
        "samples.classes": ("bounds.classes", _classes(most.classes)),
        "samples.mean": (KEYS, _numbers),
        "samples.std": (KEYS, _numbers),
        "samples.target_mean": (KEYS, _numbers),
        "samples.target_std": (KEYS, _numbers),
        "samples.kind": ("tasks", _name(*policy.tasks)),
        "samples.augment": (KEYS, _flag),
        "samples.encoders": (KEYS, _text),
        "samples.public": ("files", _name("", *_files(policy, "public"))),
        "privacy.noise": ("privacy.noise", _number(0, most.option)),
        "privacy.clip": ("privacy.clip", _number(0, privacy.clip)),
        "privacy.delta": (KEYS, _number(0, 1)),
        "secure.aggregation": ("secure_aggregation.required", _flag),
        "secure.threshold": ("bounds.clients", _whole(0, most.clients)),
        "secure.range": (KEYS, _number(0, 1e15)),
        "secure.bits": (KEYS, _whole(2, 64)),
        "secure.neighbours": ("bounds.clients", _whole(0, most.clients)),
    }
    for title in (title for title in TITLES if title not in COMPONENTS):
        for key, value in tables[title].items():
            line, check = rules.get(f"{title}.{key}", (KEYS, lambda _: "is no key of a run config"))
            if wrong := check(value):
                yield Refusal(line, f"{title}.{_plain(key)}={_shown(value)} {wrong}")
    if tables["session"].get("rollback") is True and not policy.rollback:
        yield Refusal("rollback", "session.rollback=true is not allowed")
    is_secure = tables["secure"].get("aggregation", False) is True
    if secure.required and not is_secure:
        yield Refusal("secure_aggregation.required", "secure.aggregation must be true")
    clients, fraction = tables["run"]["clients"], tables["run"]["participation"]
    is_counted = _all_numbers(clients, fraction) and 0 <= fraction <= 1
    # As `core.batches.participants`, which needs torch: of a part of a client, a whole one takes part.
    selected = max(1, math.ceil(clients * fraction - 1e-9)) if is_counted else 0
    if is_secure and selected < secure.cohort:
        yield Refusal("secure_aggregation.cohort", f"a round must select at least {secure.cohort} clients")
    # A table without the noise has that of the wrapper, which the node does not count on.
    noise = tables["privacy"].get("noise", 0.0)
    # The noise of a sum is divided among the clients of a round, however many there really are.
    shared = 1.0 if is_secure else max(selected, 1) ** 0.5
    if privacy.noise and not (_all_numbers(noise) and noise >= privacy.noise * shared):
        least = f"privacy.noise must be at least {privacy.noise * shared:g}"
        each = (
            ""
            if is_secure
            else f": {privacy.noise:g} for each of {selected:g} uploads, which the server receives"
        )
        yield Refusal("privacy.noise", least + each)
    if privacy.lifetime_epsilon and not (_all_numbers(noise) and noise > 0):
        yield Refusal(
            "privacy.lifetime_epsilon", "privacy must be above 0: uploads without noise have no epsilon"
        )


def _all_numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) for value in values)


def _component_refusals(policy: Policy, tables: Tables) -> Iterator[Refusal]:
    """What is refused of the components and their options."""
    model = tables["model"].get("name", "cnn")
    base = base_of(policy, model, tables["model"])
    codes = tuple(code.reference for code in policy.code)
    if model not in (*policy.models, *codes) and base is None:
        source, colon, _ = str(model).partition(":")
        line = "bases" if colon and source in SOURCES else "code" if colon else "models"
        allowed = {"bases": [b.name for b in policy.bases], "code": codes, "models": policy.models}[line]
        yield Refusal(line, f"model.name={_shown(model)} {_name(*allowed)(None)}")
    if base is not None and not base.sha256 and tables["model"].get("weights") != "none":
        yield Refusal("bases", f"model.name={_shown(model)} is allowed with model.weights=none alone")
    for title in COMPONENTS:
        for option, value in tables[title].items():
            if (title, option) == ("model", "name"):
                continue
            line, wrong = _option(policy, title, option, value, base)
            if wrong:
                yield Refusal(line, f"{title}.{_plain(option)}={_shown(value)} {wrong}")


def _plain(option: object) -> str:
    return str(option) if OPTION.fullmatch(str(option)) else "?"


def _option(policy: Policy, title: str, option: Any, value: Any, base: Base | None) -> tuple[str, str]:
    """The policy's line for one option of a table, and what is wrong with it; "" if nothing is."""
    most = policy.bounds
    if not isinstance(option, str) or not OPTION.fullmatch(option):
        return KEYS, "is no option"
    if option == "code":
        return "code", "names a folder; a machine's owner enters it in the policy"
    if title == "addons" and option not in policy.addons:
        return "addons", _name(*policy.addons)(None)
    if option == "name" and title in NAMES:
        if title == "adapter" and value not in [code.reference for code in policy.code]:
            return "adapters", _adapter(policy, value)
        line = NAMES[title]
        is_reference = isinstance(value, str) and ":" in value
        allowed = [code.reference for code in policy.code] if is_reference else getattr(policy, line)
        return "code" if is_reference else line, _name(*allowed)(value)
    if option in ("name", "value"):
        return KEYS, "is no option"
    if title == "task" and option in ("loss", "metrics"):
        names = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(text, str) for text in names) or (option == "loss" and type(value) is not str):
            return KEYS, "must be names"
        words = [
            word.strip() for text in names for word in (text.split(",") if option == "metrics" else [text])
        ]
        allowed = policy.losses if option == "loss" else policy.metrics
        known = {*allowed, *(code.reference for code in policy.code)}
        wrong = [word for word in filter(None, words) if word not in known]
        line = "code" if any(":" in word for word in wrong) else "losses" if option == "loss" else "metrics"
        return line, _name(*sorted(known))(None) if wrong else ""
    if title == "model" and option == "sha256":
        is_right = base is not None and value == base.sha256
        return "bases", "" if is_right else "is the hash of no base that the policy has"
    if title == "model" and option == "weights":
        if base is None:
            return "bases", "is of a base that the policy does not have"
        return "files", _name("none", *(["default"] if base.sha256 else []), *_files(policy, "weights"))(
            value
        )
    if title == "model" and option == "tokenizer":
        return "files", _name(*_files(policy, "tokenizer"))(value)
    if option.endswith("epochs"):
        return "bounds.epochs", _whole(0, most.epochs)(value)
    if option.endswith("layers"):
        return "bounds.layers", _whole(0, most.layers)(value)
    if option.endswith("steps"):
        return "bounds.steps", _whole(0, most.steps)(value)
    values = value if isinstance(value, list | tuple) else [value]
    if len(values) > MOST_LIST:
        return KEYS, f"must have at most {MOST_LIST} entries"
    for part in values:
        if type(part) in (int, float) and not abs(part) <= most.option:
            return "bounds.option", f"must be at most {most.option:g}"
        if isinstance(part, str) and not WORD.fullmatch(part):
            return KEYS, "must be a word: letters, digits and _.*?+,- alone"
        if not isinstance(part, bool | int | float | str):
            return KEYS, "must be a number, a word or a list of them"
    return KEYS, ""


def _files(policy: Policy, key: str) -> list[str]:
    return [file.name for file in policy.files if file.key == key]


def base_of(policy: Policy, model: Any, options: Mapping[str, Any]) -> Base | None:
    """The base that the model's name or the hash in its options means, of the same library; None if none."""
    source = str(model).partition(":")[0]
    of_source = [base for base in policy.bases if base.name.partition(":")[0] == source and ":" in str(model)]
    by_name = [base for base in of_source if base.name == model]
    digest = options.get("sha256")
    if digest is None:
        return by_name[0] if by_name else None
    same = [base for base in (*by_name, *of_source) if base.sha256 == digest]
    # Of torchvision and timm the name is the architecture too.
    return next((base for base in same if source == "hf" or base.name == model), None)


def require_cohort(policy: Policy, members: int) -> None:
    """PolicyError if a sum is of fewer clients than the owner wants."""
    least = policy.secure_aggregation.cohort
    if members < least:
        why = f"a sum of {members} clients, and {least} are the least"
        raise PolicyError((Refusal("secure_aggregation.cohort", why),), "request")


def check_tables(policy: Policy, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """PolicyError if a default of an algorithm, an optimizer or a model is not allowed.

    Args:
        policy: that of this machine's owner.
        tables: those of the settings, which have every default.
    """
    refused = []
    for title in (title for title in COMPONENTS if title != "addons"):  # their defaults add nothing
        for option, value in tables.get(title, {}).items():
            is_number = type(value) in (int, float)  # others are checked where a run config has them
            if is_number or (title, option) == ("optimizer", "name"):
                line, wrong = _option(policy, title, option, value, None)
                refused += (
                    [Refusal(line, f"{title}.{_plain(option)}={_shown(value)} {wrong}")] if wrong else []
                )
    if refused:
        raise PolicyError(tuple(refused))


# -- a run config on this machine ----------------------------------------------------------------------------


class Admitted(NamedTuple):
    """A run config that the policy allows, with this machine's paths, and the code that it needs."""

    run_config: dict[str, Any]
    code: tuple[Code, ...]


def admitted(policy: Policy, run_config: Mapping[str, Any]) -> Admitted:
    """The run config with the owner's paths in place of names; PolicyError if anything of it is refused."""
    if refused := refusals(policy, run_config):
        raise PolicyError(refused)
    tables = nested(run_config)
    model, task = tables.setdefault("model", {}), tables.get("task", {})
    name = model.get("name", "cnn")
    if base := base_of(policy, name, model):
        if base.name.startswith("hf:"):
            model["name"] = f"hf:{base.path}"
        if model.get("weights") != "none":
            model["sha256"] = base.sha256
    paths = {(file.key, file.name): str(file.path) for file in policy.files}
    if public := tables.get("samples", {}).get("public"):
        tables["samples"]["public"] = paths["public", public]
    for key in ("tokenizer", "weights"):
        if (key, model.get(key)) in paths:
            model[key] = paths[key, model[key]]
    in_task = {word.strip() for text in _parts(task.get("metrics", ())) for word in text.split(",")}
    in_task |= {task.get("loss")}
    needed = []
    for code in policy.code:
        titles = [title for title in NAMES if tables.get(title, {}).get("name") == code.reference]
        titles += ["model"] if code.reference == name else []
        titles += ["task"] if code.reference in in_task else []
        needed += [code] if titles else []
        for title in titles:
            tables[title]["code"] = str(code.folder)
    return Admitted(flattened(tables), tuple(needed))


# -- the file ------------------------------------------------------------------------------------------------


def read_policy(path: Path) -> Policy:
    """The policy in a TOML file; UsageError names a line that is none, or of another type."""
    with raised_as(UsageError, f"the policy {path} cannot be read: {{}}", OSError):
        content = path.read_bytes()
        if path.stat().st_mode & stat.S_IWOTH:
            raise UsageError(f"everybody on this machine can write the policy {path}; chmod o-w it")
    return _parsed(path, content)


@lru_cache(maxsize=8)  # a node reads it for every message
def _parsed(path: Path, content: bytes) -> Policy:
    with raised_as(UsageError, f"the policy {path} is not valid TOML: {{}}", ValueError, RecursionError):
        table = tomllib.loads(content.decode())
    with raised_as(UsageError, f"the policy {path}: {{}}", UsageError):
        policy: Policy = _record(Policy, table, "")
    return policy


def _record(kind: Any, table: Any, title: str) -> Any:
    """The record that a table describes."""
    if not isinstance(table, dict):
        raise UsageError(f"{title} must be a table")
    hints = typing.get_type_hints(kind)
    for name in table:
        if name not in hints:
            raise unknown(f"line in {title or 'the policy'}", name, hints)
    values = {
        name: _value(hints[name], value, f"{title}.{name}".lstrip(".")) for name, value in table.items()
    }
    needed = [name for name in getattr(kind, "_fields", ()) if name not in kind._field_defaults]
    if missing := [name for name in needed if name not in values]:
        raise UsageError(f"{title} needs {missing[0]}")
    return kind(**values)


def _value(hint: Any, value: Any, line: str) -> Any:
    """The value as the type of a record's field."""
    if isinstance(hint, types.GenericAlias):
        if not isinstance(value, list):
            raise UsageError(f"{line} must be a list")
        return tuple(_value(hint.__args__[0], entry, line) for entry in value)
    if hint in (Path, Path | None) and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) in (int, float):
        return float(value)
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return _record(hint, value, line)
    if hint not in (bool, int, str) or type(value) is not hint:
        raise UsageError(f"{line}={_shown(value)} must be {getattr(hint, '__name__', hint)}")
    return value


def policy_of(node_config: Mapping[str, Any], state_dir: Path) -> Policy:
    """A node's policy: the file that its configuration names, or the one in its state-dir."""
    named = node_config.get("policy")
    if named is not None and not isinstance(named, str):
        raise UsageError("policy must be the path of a file")
    path = Path(named).expanduser() if named else state_dir / FILE
    return read_policy(path) if named or path.exists() else Policy()


def server_policy() -> Policy:
    """The policy of a server: the file that COPFL_POLICY names, or the one in the folder of its SuperLink."""
    named = os.environ.get(VARIABLE)
    path = Path(named) if named else Path(FILE)
    return read_policy(path) if named or path.exists() else OPEN  # nodes have their own say
