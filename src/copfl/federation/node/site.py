"""What a site of a federation knows about its own model: the content of its report, which `report` makes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from copfl.experiment.bundle.description import Description
from copfl.federation.node.verdict import SiteVerdict
from copfl.measures.metrics import MetricInfo
from copfl.rivals.records import Rivals
from copfl.sections import Section
from copfl.stats import Interval


class Measurement(NamedTuple):
    """The site's models in a round that it trained in, on its own samples."""

    round: int  # from 1
    metrics: dict[str, float]  # empty where the round was not evaluated; nan where not defined


class SiteGain(NamedTuple):
    """The model of the federation beside one that was trained alone, on the site's test samples."""

    samples: int
    federated: float  # the primary metric
    alone: float
    alone_round: int
    gain: float  # positive is better
    interval: Interval  # of the gain, over the test samples
    constant: float = math.nan  # the metric of a constant answer, see `copfl.experiment.analysis.gains`
    over_constant: Interval = Interval(math.nan, math.nan)  # of the gain over it

    @property
    def constant_may_be_as_good(self) -> bool:
        """Whether a constant answer is known, and the model not shown to be better."""
        return math.isfinite(self.over_constant.low) and self.over_constant.low <= 0

    @property
    def verdict(self) -> str:
        """What the interval allows."""
        if not self.interval.without_zero:
            return "not distinguishable"
        return "better" if self.gain > 0 else "worse"


class SentKind(NamedTuple):
    """What left the site of one kind."""

    kind: str
    messages: int
    bytes: int


class AuditSummary(NamedTuple):
    """The site's audit log."""

    left: list[SentKind]  # of this run
    refused: int  # requests of this run
    epsilon: float | None  # the sum over the answers of this run; None: none was noised
    other_runs: int  # messages
    lines: int
    problem: str  # empty: no line was changed, removed or moved
    last_hash: str


@dataclass(frozen=True, kw_only=True)
class SiteReport:
    """Everything that the report of a site shows."""

    state: Path
    run: str
    model: Path  # the bundle
    description: Description
    metric: MetricInfo
    rounds: list[Measurement]
    alone: list[Measurement]
    gain: SiteGain | None
    no_gain: str  # why it is not known
    log: AuditSummary | None
    spent: str  # over all runs on the same data; empty: nothing was noted
    rivals: Rivals | None = None  # what the site has alone by scikit-learn, as of a federation of one client
    name: str = ""  # of the site, by the invitation with which it joined
    no_rivals: str = ""  # why that is not known; empty also where such samples have none
    verdict: SiteVerdict | None = (
        None  # by rows that the site held out when the federation chose; None: a named method
    )
    found: Sequence[Section] = ()  # of the findings that the node has
