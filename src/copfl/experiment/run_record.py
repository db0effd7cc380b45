"""The record of a run: what it recorded, and everything that was found out about it.

A finding is a line of `RunRecord`, and nothing else names it: its file is written, kept by `Result.save`, read again,
shown in the terminal, in `--json` and in the report because it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from copfl.experiment.analysis.against_rivals import RIVALS
from copfl.experiment.analysis.gains import GAINS, Gains
from copfl.experiment.choice import CHOICE
from copfl.experiment.final import FINAL
from copfl.experiment.finding import Finding
from copfl.experiment.models.new_clients import NEW_CLIENTS
from copfl.experiment.probabilities import PROBABILITIES
from copfl.experiment.recording import Recording
from copfl.experiment.survival import SURVIVAL
from copfl.experiment.tree_views import TREES
from copfl.experiment.verdict import CHECK, VERDICT
from copfl.sections import Section
from copfl.stats import Numbers


class Masks(NamedTuple):
    """The clients' masks by layer, at the last checkpoint."""

    round: int
    layers: list[str]
    sizes: list[int]
    fraction: Numbers  # [clients, layers], of the parameters that are personal
    shared_by_all: Numbers  # [layers], fraction of the parameters that every client shares
    overlap: Numbers  # [clients, clients], the entries that are personal for both, of those for either


@dataclass(eq=False, repr=False, kw_only=True)
class RunRecord(Recording):
    """One run, in memory or read from its folder, finished or not.

    Its findings, each None where there is none, are in the order in which they are shown.

    Args:
        label: Unique among the runs of a report.
        toml: The text of run.toml.
        masks: Of an algorithm that has some.
        audit: What `copfl audit` measured.
    """

    label: str = ""
    toml: str = ""
    masks: Masks | None = None
    audit: Mapping[str, Any] | None = None

    verdict = VERDICT  # what training together is worth, where candidates were tried on rows held out
    check = CHECK  # what the test rows say of it
    final_evaluation = FINAL  # the clients that no round evaluated
    new_clients = NEW_CLIENTS  # the clients that did not train, see run.new_clients
    analysis = GAINS  # the comparison with training alone, with run.local_baseline
    choice = CHOICE  # why this was trained, where nobody named it
    rivals = RIVALS  # what each client has alone by scikit-learn, with run.rivals
    probabilities = PROBABILITIES  # log loss, AUC and calibration, where targets are classes
    survival = SURVIVAL  # the probabilities of survival
    trees = TREES  # what trees say of the columns

    @property
    def gains(self) -> Gains | None:
        """Each client's metric alone, with the global model and with its own; None without a baseline."""
        if self.analysis is None:
            return None
        name = self.primary.name
        of_global, personal = (self.final(one) for one in (f"{name}_global", name))
        return Gains(self.analysis.alone, of_global, personal, self.primary, self.analysis.constant)

    @property
    def known_gains(self) -> Gains | None:
        """The gains, if that of any client is known."""
        gains = self.gains
        return None if gains is None or np.isnan(gains.gain).all() else gains

    def found(self) -> Iterator[tuple[Finding[Any], Any]]:
        """The findings that there are, with what was found."""
        return (
            (finding, self.findings[finding.name]) for finding in FINDINGS if finding.name in self.findings
        )


FINDINGS: tuple[Finding[Any], ...] = tuple(
    one for one in vars(RunRecord).values() if isinstance(one, Finding)
)


def sections_at_site(folder: Path) -> list[Section]:
    """What the findings in a node's folder of a run show its owner."""
    return [
        finding.at_site(found)
        for finding in FINDINGS
        if finding.at_site is not None and (found := finding.read(folder)) is not None
    ]


def findings_in(folder: Path, rounds: int, clients: int) -> dict[str, Any]:
    """The findings of a run folder, by name.

    Args:
        folder: Of the run.
        rounds: That it has now: what was found after fewer is none.
        clients: Of the run.
    """
    read = {finding.name: finding.read(folder, rounds, clients) for finding in FINDINGS}
    return {name: found for name, found in read.items() if found is not None}
