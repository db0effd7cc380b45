"""The description of a federation: a run, and what only several machines need. Without torch.

It has the tables of run.toml and five more: [network], [secure], [samples], [choice] and [session].
"""

import dataclasses
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from copfl.settings import schema
from copfl.settings.checking import SettingError, unknown_key
from copfl.settings.policy_lines import (
    AtMost,
    CountAtMost,
    FileName,
    Free,
    OneOf,
    ProductAtMost,
    RunName,
    Simulated,
)
from copfl.settings.record import checked_fields, declared, setting
from copfl.settings.schema import Run, in_federation

WIRES = ("fp32", "fp16", "bf16")
KINDS = ("classification", "multilabel", "regression", "next_token", "survival")
LEAST_WEIGHT = 0.001  # of a class in a secure sum, of the largest: rows that count nothing are left out
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
# What of a run the machines of a federation are told. A node has its own data, and decides how it computes:
# of [run] they are told what a policy can allow.
RUN_KEYS = tuple(
    f.name
    for f in declared(schema.RunSettings)
    if not isinstance(f.metadata["policy"], Simulated | types.NoneType)
)
RUN_TABLES = (
    "algorithm",
    "optimizer",
    "model",
    "adapter",
    "task",
    "server",
    "addons",
    "robust",
    "privacy",
    "run",
)


def is_plain_name(run: str) -> bool:
    """Whether the name of a run can be the name of a folder, and of no file that a machine has beside it."""
    return PLAIN_NAME.fullmatch(run) is not None


class CheckedRecord:
    """A record whose values are checked when it is made."""

    title: ClassVar[str]

    def __post_init__(self) -> None:
        checked_fields(self, self.title)


@dataclass(frozen=True, kw_only=True)
class Network(CheckedRecord):
    """[network]: how a round waits for the nodes, and how numbers are sent."""

    title: ClassVar[str] = "network"

    min_replies: int = setting(
        0,
        "Replies that a round needs; 0: half of the selected, in secure sums all.",
        minimum=0,
        policy=AtMost("bounds.clients"),
    )
    deadline: float = in_federation(
        600.0,
        "Seconds that a round waits for more replies than it needs.",
        "--deadline",
        exclusiveMinimum=0,
        policy=AtMost("bounds.deadline"),
    )
    wire: str = in_federation(
        "fp32", "Numbers in messages: fp32, fp16 or bf16.", "--wire", enum=WIRES, policy=Free()
    )


@dataclass(frozen=True, kw_only=True)
class Secure(CheckedRecord):
    """[secure]: sums in which no upload can be seen."""

    title: ClassVar[str] = "secure"

    aggregation: bool = in_federation(
        False,
        "The server receives only the sum of the uploads (SecAgg+).",
        "--secure-aggregation",
        shown="off",
        policy=Free("secure_aggregation.required"),
    )
    threshold: int = setting(
        0,
        "Clients that must stay until the end of a sum; 0: the smallest secure number.",
        minimum=0,
        policy=AtMost("bounds.clients"),
    )
    range: float = setting(
        65536.0, "The largest absolute value of an entry of the sum, of one client.", policy=AtMost(1e15)
    )
    bits: int = setting(36, "Bits of such an entry, with its sign.", policy=AtMost(64, least=2))
    neighbours: int = setting(
        0,
        "Clients with which each client shares its secrets; 0: all.",
        minimum=0,
        policy=AtMost("bounds.clients"),
    )
    change: float = setting(
        10.0,
        "The most by which a sum may change the model, in multiples of its norm or largest change; 0: any.",
        minimum=0,
        policy=AtMost(1e15),
    )


@dataclass(frozen=True, kw_only=True)
class SampleDescription(CheckedRecord):
    """[samples]: what a sample is at every node. None of it is computed from a node's samples."""

    title: ClassVar[str] = "samples"

    shape: tuple[int, ...] = setting(
        (1, 8, 8), "Of one sample, without that of texts.", minimum=1, policy=ProductAtMost("bounds.numbers")
    )
    text: bool = setting(False, "Whether samples are texts, which a node tokenises.", policy=Free())
    classes: int | tuple[str, ...] = setting(
        10, "Their names, or their number; of others the outputs.", policy=CountAtMost("bounds.classes")
    )
    kind: str = setting(KINDS[0], "Of the targets.", enum=KINDS, policy=OneOf("tasks"))
    mean: tuple[float, ...] = setting(
        (), "Of pixels in 0..1, a number per channel; none: 0.5.", policy=Free()
    )
    std: tuple[float, ...] = setting((), "Of pixels in 0..1, a number per channel; none: 0.5.", policy=Free())
    target_mean: tuple[float, ...] = setting(
        (), "Of each number to predict; training standardises them.", policy=Free()
    )
    target_std: tuple[float, ...] = setting((), "Of each number to predict.", policy=Free())
    augment: bool = setting(
        False, "Whether the data set has random crops and flips; run.augment uses them.", policy=Free()
    )
    contract: str = setting(
        "",
        "What the members' data are: JSON of copfl.data.contract.contract; none: not agreed.",
        policy=Free(),
    )
    public: str = setting(
        "",
        "An .npz file of public samples x, the same on every machine; for ktpfl.",
        policy=FileName("public"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outputs < 1:
            raise SettingError("samples.classes", self.classes, "must be at least 1, or the names of classes")
        if len(self.target_mean) != len(self.target_std) or len(self.target_mean) not in (0, self.outputs):
            raise SettingError(
                "samples.target_mean",
                self.target_mean,
                f"and samples.target_std must have a number for each of {self.outputs} targets",
            )
        channels = self.shape[0] if len(self.shape) == 3 and not self.text else 0
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            if channels and numbers and len(numbers) != channels:
                raise SettingError(
                    f"samples.{name}", numbers, f"must have {channels} numbers, one for each channel"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes; empty if only their number is known."""
        return () if isinstance(self.classes, int) else self.classes

    @property
    def outputs(self) -> int:
        """The number of classes, labels, targets or tokens."""
        return self.classes if isinstance(self.classes, int) else len(self.classes)

    def names_of_outputs(self, others: tuple[str, ...]) -> tuple[str, ...]:
        """The names of what a model returns: of the classes as the federation agreed on them, else these."""
        if self.kind == "next_token":
            return ()
        numbers = tuple(map(str, range(self.outputs)))
        if self.kind == "survival":
            return ("risk",) if self.outputs == 1 else numbers
        return (self.names if self.kind == "classification" else others) or numbers

    @property
    def scale(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of the targets of a regression."""
        return self.target_mean, self.target_std

    @property
    def channels(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of the channels; none of samples that are no images."""
        if len(self.shape) != 3 or self.text:
            return (), ()
        usual = (0.5,) * self.shape[0]
        return self.mean or usual, self.std or usual


@dataclass(frozen=True, kw_only=True)
class Choice(CheckedRecord):
    """[choice]: methods among which the federation chooses by losses of rows that each site holds out."""

    title: ClassVar[str] = "choice"

    candidates: str = setting(
        "",
        "Names of methods, separated by commas: levels, levels with slopes; none: the method is named.",
        policy=Free(),
    )
    folds: int = setting(
        5, "Parts of each site's rows, each held out once.", minimum=2, maximum=5, policy=AtMost(5)
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the candidates, the simplest first."""
        return tuple(name.strip() for name in self.candidates.split(",") if name.strip())


@dataclass(frozen=True, kw_only=True)
class Session(CheckedRecord):
    """[session]: one start of a run. It changes nothing of what is learned."""

    title: ClassVar[str] = "session"

    run: str = setting("", "The run's name; empty: the server chooses one.", policy=RunName())
    resume: bool = setting(False, "Continue from the run's last checkpoint.", policy=Free())
    rollback: bool = setting(
        False, "Set nodes back that are ahead of the server, which lost checkpoints.", policy=Free("rollback")
    )
    agree: bool = setting(
        False,
        "No training, but sums for the encoders that the contract leaves open.",
        policy=Free("statistics.allowed"),
    )
    choose: bool = setting(
        False, "Measure the candidates of [choice] on held-out rows, instead of training.", policy=Free()
    )
    taken: str = setting(
        "", "The candidate of [choice] that is trained; none: as [algorithm] says.", policy=Free()
    )
    join: int = setting(
        0,
        "Above 0: no training, but so many local updates for every new client.",
        minimum=0,
        policy=AtMost("bounds.updates"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run and not is_plain_name(self.run):
            raise SettingError(
                "session.run", self.run, 'must be a plain name: letters, digits, "-" and "_", at most 100'
            )


@dataclass(frozen=True, kw_only=True)
class Federation:
    """A federation: the run, and what only several machines need."""

    run: Run = field(default_factory=Run)
    network: Network = field(default_factory=Network)
    secure: Secure = field(default_factory=Secure)
    samples: SampleDescription = field(default_factory=SampleDescription)
    choice: Choice = field(default_factory=Choice)
    session: Session = field(default_factory=Session)

    def __post_init__(self) -> None:
        if self.session.taken not in ("", *self.choice.names):
            known = ", ".join(self.choice.names) or "there are none"
            raise SettingError(
                "session.taken",
                self.session.taken,
                f"is none of the candidates that members agreed on: {known}",
            )
        if self.session.choose and not self.choice.names:
            raise SettingError("session.choose", True, "needs the names of methods in choice.candidates")
        if self.network.min_replies > self.selected:
            raise SettingError(
                "network.min_replies",
                self.network.min_replies,
                f"must be at most {self.selected}: so many clients a round selects",
            )
        weights = self.run.task.class_weights
        if self.secure.aggregation and weights and not 0 < LEAST_WEIGHT * max(weights) <= min(weights):
            raise SettingError(
                "task.class_weights",
                weights,
                "leaves rows out by their class, and with secure.aggregation all rows of a site are in its sums; each "
                f"weight must be at least {LEAST_WEIGHT:g} of the largest",
            )
        if self.secure.aggregation and self.run.robust.name == "evidence":
            raise SettingError(
                "robust.name",
                self.run.robust.name,
                "decides during the run by each member's losses, and with secure.aggregation these stay at "
                "the nodes, which add up what they conclude once, at its end; leave one of them out",
            )
        if self.secure.aggregation and self.run.robust:
            raise SettingError(
                "robust.name",
                self.run.robust.name,
                "compares single uploads, and with secure.aggregation the server sees only their sum; leave "
                "one of them out",
            )

    @property
    def clients(self) -> int:
        """Number of clients, connected or not."""
        return self.run.run.clients

    @property
    def rounds(self) -> int:
        return self.run.run.rounds

    @property
    def selected(self) -> int:
        """Number of clients that a round selects."""
        return self.run.run.participants

    @property
    def minimum(self) -> int:
        """Number of replies that a round needs."""
        usual = self.selected if self.secure.aggregation else (self.selected + 1) // 2
        return self.network.min_replies or usual

    @property
    def augment(self) -> bool:
        """Whether training has random crops and flips."""
        return self.samples.augment and self.run.run.augment

    def tables(self) -> dict[str, dict[str, Any]]:
        """What the machines of the federation are told, by title and key."""
        run = self.run.tables()
        tables = {title: run[title] for title in RUN_TABLES if title in run}
        tables["run"] = {key: run["run"][key] for key in RUN_KEYS}
        return tables | {
            title: {f.name: getattr(getattr(self, title), f.name) for f in declared(record)}
            for title, record in OWN.items()
        }

    def replaced(self, **session: Any) -> Self:
        """The federation with another session."""
        return dataclasses.replace(self, session=dataclasses.replace(self.session, **session))


OWN: dict[str, type[Any]] = {
    record.title: record for record in (Network, Secure, SampleDescription, Choice, Session)
}
# The tables that a federation has, with the record of each.
RECORDS: dict[str, type[Any]] = {title: schema.KINDS[title] for title in RUN_TABLES} | OWN
TITLES = tuple(RECORDS)


def own_record(title: str, table: Mapping[str, Any]) -> Any:
    """The record of one of the tables that only a federation has."""
    known = {f.name for f in declared(OWN[title])}
    for key, value in table.items():
        if key not in known:
            raise unknown_key(f"{title}.{key}", value, known, paths())
    return OWN[title](**table)


def check_not_simulated(title: str, table: Mapping[str, Any]) -> None:
    """SettingError for a setting that only a simulation has.

    Args:
        title: Of the table.
        table: Settings of a run.
    """
    for f in declared(schema.KINDS[title]):
        line = f.metadata["policy"]
        if isinstance(line, Simulated) and f.name in table and table[f.name] not in line.unless:
            raise SettingError(f"{title}.{f.name}", table[f.name], line.why)


def check_run_keys(table: Mapping[str, Any]) -> None:
    """SettingError if the table [run] has a key that is no setting of a federation."""
    for key, value in table.items():
        check_not_simulated("run", {key: value})
        if key not in RUN_KEYS:
            raise unknown_key(f"run.{key}", value, RUN_KEYS, [p for p in paths() if not p.startswith("run.")])


def paths() -> list[str]:
    """Every declared setting of a federation, such as "network.deadline"."""
    own_paths = [f"{title}.{f.name}" for title, record in OWN.items() for f in declared(record)]
    return [*schema.paths(), *own_paths]
