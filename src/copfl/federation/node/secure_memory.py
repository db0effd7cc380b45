"""A node's memory of the secure sums that contain its data, whatever the server calls the runs.

Two sums over different cohorts can be subtracted. The difference is a single upload if the cohorts differ by
one member, and if the other members' uploads are equal, or nearly so: as in a second run with the same seed,
after a rollback, or if the server changes the model by a little. The same holds for two sums if one of them
leaves out rows of a node or counts them otherwise, and for sums of statistics as for sums of a training. So a
node's data are added up with one cohort, one selection of rows and one objective for each target only, unless the
node's owner allows them to change.
"""

import json
import logging
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from copfl.data.contract.contract import ARRAYS, Contract
from copfl.data.samples import CLASSIFICATION
from copfl.errors import WireError
from copfl.federation.node.known_data import KnownData
from copfl.federation.policy.names import USUAL_LOSS
from copfl.federation.protocol import keys
from copfl.federation.protocol.files import stored, write_json
from copfl.settings.federation import Federation

FILE = "sums.json"
HELD_OUT = 5  # CO-PFL's every so manieth sample, see `core.batches.training_split`
CHANGES = "cohort-changes"  # key of the node's configuration


class Objective(NamedTuple):
    """What a row adds to a sum: of statistics nothing of a target."""

    targets: frozenset[str] = frozenset()  # the columns that are predicted; none: the one target of arrays
    counts: str = ""  # how much each row counts by its target; empty: there is no objective

    def last_related(self, others: Sequence["Objective"]) -> "Objective | None":
        """The last of the objectives that has a target in common with this one; None: none has."""
        related = [other for other in others if other.targets & self.targets or other.targets == self.targets]
        return related[-1] if related else None


class RememberedSum(NamedTuple):
    """Sums of the same data with the same cohort, one after another."""

    samples: str  # the name of the data
    cohort: frozenset[str]  # members
    rows: str  # which of the data train; empty: all of them
    objective: "Objective"
    uploads: frozenset[str]  # digests


class SumHistory(tuple[RememberedSum, ...]):
    """The sums that contain some data, in order."""

    def changes(self, *further: RememberedSum) -> int:
        """How often the cohort, the rows or the objective of a target have changed, with further sums."""
        sums = (*self, *further)
        of_members = [(added.cohort, added.rows) for added in sums]
        objectives = [added.objective for added in sums if added.objective.counts]
        return sum(before != after for before, after in pairwise(of_members)) + sum(
            bool(objective != before)
            for n, objective in enumerate(objectives)
            if (before := objective.last_related(objectives[:n])) is not None
        )

    def expect(self, invited: RememberedSum, allowed: int) -> None:
        """WireError if no sum of some of the invited members would be admitted.

        Args:
            invited: A sum of all members that sent keys.
            allowed: How often cohort, rows or objective may change.
        """
        # Members may be lost until the sum: the last cohort may still become this one's, if all of it is invited.
        is_likely = self and self[-1].cohort <= invited.cohort
        likely = invited._replace(cohort=self[-1].cohort) if is_likely else invited
        if self.changes(likely) > allowed:
            raise self._refusal(likely)

    def admit(self, wanted: RememberedSum, allowed: int) -> None:
        """WireError if a sum over the cohort could be subtracted from an earlier one.

        Args:
            wanted: The sum that the node is about to sign.
            allowed: How often cohort, rows or objective may change.
        """
        # Whatever the owner allows: with an upload that is the same, one further sum is enough to subtract.
        for added in self:
            if added.uploads & wanted.uploads and added.cohort != wanted.cohort:
                raise WireError(
                    "the same upload of this node was added up with other members than "
                    f"{fingerprint(wanted.cohort)}: the difference of both sums would reveal single uploads; the "
                    "coordinator starts a run with another run.seed"
                )
        if self.changes(wanted) > allowed:
            raise self._refusal(wanted)

    def _refusal(self, wanted: RememberedSum) -> WireError:
        changes, cohort, rows = self.changes(wanted), wanted.cohort, wanted.rows
        if self[-1].rows != rows:
            return WireError(
                f'of this node\'s data the rows "{self[-1].rows or "all"}" were added up, and "{rows or "all"}" are '
                "asked for: the difference of two sums over different rows reveals them; keep missing values, "
                f"validation and what is held out as they were, or ask the node's owner to set {CHANGES}={changes}"
            )
        earlier = wanted.objective.last_related([sums.objective for sums in self if sums.objective.counts])
        if self[-1].cohort == cohort and earlier not in (None, wanted.objective):
            return WireError(
                f"this node's rows were added up by the objective {earlier and earlier.counts}, and are asked for with "
                f"{wanted.objective.counts}: the difference of two sums in which rows count differently reveals them; "
                "keep the objective and its options as they were, or ask the node's owner to set "
                f"{CHANGES}={changes}"
            )
        before = ", ".join(dict.fromkeys(fingerprint(added.cohort) for added in self))
        return WireError(
            f"this node's data were added up with the members {before}, and are asked for with "
            f"{fingerprint(cohort)}: the difference of two sums over different members reveals single "
            f"uploads; wait for the same members, or ask the node's owner to set {CHANGES}={changes}"
        )


def rows_of(federation: Federation, client: int) -> str:
    """Which of a node's rows train, by the settings that leave some out or draw test rows; empty: all of them.

    By what is asked for alone: whether it leaves out a row depends on the data. Another target and other columns
    are another model, which is allowed: the node takes the test rows that it drew before (`remembered_rows`).
    Validation rows are drawn class by class in the order of the classes, so there they are a choice as well.

    Args:
        federation: Its settings.
        client: The number of the node's client, which decides on the draw of validation rows.
    """
    run, samples, options = federation.run.run, federation.samples, federation.run.algorithm.arguments
    contract = Contract.read(samples.contract) if samples.contract else None
    choices = []
    if run.validation:
        choices.append(f"but {run.validation!r} for validation with seed {run.seed} as client {client}")
        if contract is not None and contract.data != ARRAYS:
            choices.append(f"drawn by {', '.join(contract.target_names)} of {', '.join(_columns(contract))}")
        is_open = (
            contract is not None and not contract.is_frozen
        )  # then the classes will have the usual order
        names = list(samples.names) or ([] if is_open else [str(number) for number in range(samples.outputs)])
        if samples.kind == CLASSIFICATION and names != sorted(names):
            choices.append(f"in the order {', '.join(names)}")
    if "fraction" in options:  # of FedALA: its first steps are of a part of the rows
        choices.append(f"{options['fraction']!r} of them at first")
    # What an algorithm never trains on: every so manieth sample, which may be one alone.
    if every := options.get("holdout") or (HELD_OUT if options.get("trust") == "held_out" else 0):
        choices.append(f"but samples at multiples of {every}")
    if federation.choice.names:  # the folds follow from the targets
        targets = "" if contract is None else f" by {', '.join(contract.target_names)}"
        choices.append(f"in {federation.choice.folds} folds{targets} with seed {run.seed}")
    of_table = "" if contract is None else choices_of(contract)
    return "; ".join(filter(None, [*choices, of_table]))


def objective_of(federation: Federation) -> Objective:
    """How much each row counts by its target: all that is set of the objective, but for the metrics.

    With other weights, other intervals or another scale of the target some rows count more than before, or others do.

    Args:
        federation: Its settings.
    """
    run, samples = federation.run, federation.samples
    contract = Contract.read(samples.contract) if samples.contract else None
    names = () if contract is None else contract.target_names
    loss = run.task.loss or USUAL_LOSS[samples.kind]
    counts = {"kind": samples.kind, "loss": loss, "code": run.task.code, **run.task.options}
    counts |= {
        "classes": samples.classes,
        "columns": names,
        "scale": samples.scale if any(samples.scale) else (),
    }
    counts["max_length"] = run.model.max_length  # of texts: longer ones are cut
    chosen = {name: value for name, value in counts.items() if value not in (None, "", 0, ())}
    return Objective(frozenset(names), json.dumps(chosen, sort_keys=True))


def choices_of(contract: Contract) -> str:
    """Which rows of a table train by its contract, whatever its target and its columns are; empty: all of them.

    Args:
        contract: What the members' data are.
    """
    together = contract.group, contract.time
    choices = []
    if contract.missing == "drop":
        choices.append(f"complete in {', '.join(sorted(filter(None, (*_columns(contract), *together))))}")
    named = {"together by": contract.group, "before the last by": contract.time, "split": contract.split}
    return "; ".join([*choices, *(f"{what} {value}" for what, value in named.items() if value)])


def _columns(contract: Contract) -> list[str]:
    """The columns that a federation reads, in no order."""
    return sorted((*contract.target_names, *(column.name for column in contract.features)))


def fingerprint(members: Collection[str]) -> str:
    """A short name of a set of members, which people can compare."""
    return keys.fingerprint("\n".join(sorted(members)))


class SumMemory(KnownData):
    """The files of the memory, in one folder of the node."""

    @property
    def is_empty(self) -> bool:
        """Whether no data of this node have been in a sum."""
        return not (self.folder / FILE).exists()

    def history(self, samples: str) -> SumHistory:
        """The sums that contain one of these samples."""
        return SumHistory(added for added in self._read() if self.overlap(samples, added.samples))

    def remember(self, added: RememberedSum) -> None:
        """Writes down a sum, before this node takes part in it."""
        earlier = self._read()
        # One entry for sums of the same data, cohort, rows and objective, one after another: a run has a sum in each
        # round.
        if earlier and earlier[-1][:4] == added[:4]:
            added = added._replace(uploads=added.uploads | earlier.pop().uploads)
        else:
            text = "copfl: this node's data are added up with %d members, fingerprint %s"
            logging.getLogger("flwr").info(text, len(added.cohort), fingerprint(added.cohort))
        content = [
            (
                sums.samples,
                sorted(sums.cohort),
                sums.rows,
                [sorted(sums.objective.targets), sums.objective.counts],
                sorted(sums.uploads),
            )
            for sums in (*earlier, added)
        ]
        write_json(self.folder / FILE, content)

    def _read(self) -> list[RememberedSum]:
        return stored(
            self.folder / FILE,
            lambda sums: [
                RememberedSum(
                    str(name),
                    frozenset(members),
                    str(rows),
                    Objective(frozenset(map(str, targets)), str(counts)),
                    frozenset(map(str, uploads)),
                )
                for name, members, rows, (targets, counts), uploads in sums
            ],
            [],
        )
