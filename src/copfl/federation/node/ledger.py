"""What a node has given away of its data over all runs: a line per release, and the epsilon of all.

A line has the mechanism, its noise, its sampling and its steps. The accountant composes the lines of the same
data by Renyi divergences: a sum of epsilons would be larger, and would add up their deltas too. Lines belong
to data by the hashes of their samples, so neither another run name nor a rollback begins a new budget. A line
is on disk before its value leaves. It has the least noise that a receiver can see: a secure sum counts as
one of the fewest clients that can be in it, until the node has seen who was. A value that is sent again is one
release. Without torch until an epsilon is computed.
"""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from copfl.errors import RunError, UsageError
from copfl.federation.node.known_data import KnownData
from copfl.federation.policy.record import PrivacyRules
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.federation.protocol.chained_log import append, verified
from copfl.federation.protocol.events import Event
from copfl.federation.protocol.files import alone
from copfl.federation.protocol.node_config import MEMORY

FILE = "ledger.jsonl"  # in the folder of known data
# The same in every line: one client's data are replaced by any others, the server knows who takes part, and a
# round is one step. `noise` is the deviation over the clip, as `wrappers.privacy.epsilon_of` takes it.
MECHANISM = {"mechanism": "gaussian", "relation": "replace-one-client", "sampling": 1.0, "steps": 1}
UPLOAD, SUM = "upload", "sum"  # where the noise is that protects a release


class Release(NamedTuple):
    """A value that leaves the node and depends on its data."""

    samples: str  # the data, as `KnownData` names them
    run: str
    round: int
    noise: float  # deviation over the clip, at least; 0: none
    clip: float = 0.0
    place: str = UPLOAD
    value: str = ""  # digest of what leaves
    is_settled: bool = False  # whether the noise is certain


class Ledger:
    """The releases of a node, in order."""

    def __init__(self, folder: Path) -> None:
        self.path, self.known = folder / FILE, KnownData(folder)

    def releases(self) -> list[Release]:
        """All of them, each with the noise that it turned out to have."""
        if not self.path.exists():
            return []
        log = verified(self.path)
        if log.problem:
            raise RunError(f"the ledger of spent epsilon is damaged: {log.problem}; restore the state-dir")
        releases: dict[int, Release] = {}
        of_value: dict[str, int] = {}
        for number, line in enumerate(log.lines):
            if line["event"] == Event.RELEASED:
                release = Release(**{name: line[name] for name in Release._fields})
                releases[number] = release
                of_value[release.value] = number
            elif line["event"] == Event.SETTLED:
                number = of_value[line["value"]]
                releases[number] = releases[number]._replace(noise=line["noise"], is_settled=True)
        return list(releases.values())

    def of(self, samples: str) -> list[Release]:
        """The releases of data that have a sample in common with these."""
        return [release for release in self.releases() if self.known.overlap(samples, release.samples)]

    def enter(self, release: Release, privacy: PrivacyRules) -> None:
        """Writes the release down; PolicyError if it would exceed the lifetime epsilon of its data.

        Args:
            release: What is about to leave.
            privacy: What the policy of the node's owner allows.
        """
        with alone(self.path):
            earlier = self.of(release.samples)
            if any(_is_same(release, other) for other in earlier):
                return
            limit = privacy.lifetime_epsilon
            if limit and (after := epsilon([*earlier, release], privacy.delta)) > limit:
                spent = epsilon(earlier, privacy.delta)
                further = "more without a limit" if math.isinf(after) else f"{after - spent:.3g} more"
                why = f"these data have spent epsilon {spent:.3g}, the request asks for {further}, and the"
                line = f"{why} limit is {limit:g} at delta {privacy.delta:g}"
                raise PolicyError((Refusal("privacy.lifetime_epsilon", line),), "request")
            append(self.path, {"event": Event.RELEASED, **release._asdict(), **MECHANISM})

    def settle(self, value: str, noise: float) -> None:
        """Writes down that a secure sum has this noise: its members are certain.

        Args:
            value: The digest of what is in the sum.
            noise: Of the sum, over the clip.
        """
        with alone(self.path):
            current = [release.noise for release in self.releases() if release.value == value]
            if current and current[-1] < noise:
                append(self.path, {"event": Event.SETTLED, "value": value, "noise": noise})


def _is_same(release: Release, other: Release) -> bool:
    """Whether a release adds nothing to another: the same value again, or data that left without noise."""
    if release.noise == 0:
        return other.noise == 0 and other.samples == release.samples
    # A sum whose members are certain is the only one of its value: the others refuse it with any other
    # members.
    is_certain = other.is_settled and other.place == release.place
    return other.value == release.value and (other.noise <= release.noise or is_certain)


def epsilon(releases: Iterable[Release], delta: float) -> float:
    """The epsilon of all releases together, against a server that knows who took part.

    Args:
        releases: Of the same data.
        delta: The probability that the bound fails.
    """
    from copfl.wrappers.privacy import epsilon_of

    noises = Counter(release.noise for release in releases)
    return math.inf if 0 in noises else epsilon_of(noises, delta) if noises else 0.0


class Spent(NamedTuple):
    """What the data of a node have given away."""

    epsilon: float | None  # None: the accountant is not installed
    delta: float
    limit: float  # 0: none
    releases: int
    runs: int
    without_noise: tuple[str, ...]  # runs

    def __str__(self) -> str:
        limit = f" of {self.limit:g}" if self.limit else ""
        amount = (
            "unknown: dp-accounting is not installed"
            if self.epsilon is None
            else f"{self.epsilon:.3g}{limit}"
        )
        why = f"; without noise: {', '.join(self.without_noise)}" if self.without_noise else ""
        return f"epsilon {amount} at delta {self.delta:g}, {self.releases} releases in {self.runs} runs{why}"


def spent(state_dir: Path, privacy: PrivacyRules, *further: float) -> Spent | None:
    """What the node's last used data have spent, and with further releases of these noises; None: nothing.

    Args:
        state_dir: The node's.
        privacy: What the policy of the node's owner allows.
        further: The noise of each release that is planned.
    """
    ledger = Ledger(state_dir / MEMORY)
    everything = ledger.releases()
    releases = ledger.of(everything[-1].samples) if everything else []
    if not (releases or further):
        return None
    planned = [Release("", "", 0, noise) for noise in further]
    try:
        amount = epsilon([*releases, *planned], privacy.delta)
    except UsageError:  # status works without the accountant
        amount = None
    runs = dict.fromkeys(release.run for release in releases)
    bare = dict.fromkeys(release.run for release in releases if not release.noise)
    return Spent(amount, privacy.delta, privacy.lifetime_epsilon, len(releases), len(runs), tuple(bare))
