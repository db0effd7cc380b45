"""A node's sums for the encoders of a federation: means, deviations and categories of an open contract.

They are given once. A node remembers, for its data and whatever the server calls a run, what it was asked and
with whose data its own were added up. Another question about the same rows, the same question about some more
rows, or other members of a sum could be subtracted: they are refused, unless the policy of the node's owner
allows more. The second pass is answered for the contract and the members of a first one alone.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from copfl import wire
from copfl.data.contract.statistics import PASSES, HeldOut, SiteValues, Vector, names_of, sums_of, values_of
from copfl.data.tables.files import read_table
from copfl.errors import UsageError, WireError
from copfl.federation.node import secure_phases
from copfl.federation.node.data import log_problems
from copfl.federation.node.incoming import head_of
from copfl.federation.node.known_data import KnownData, cells_of, hashes_of
from copfl.federation.node.ledger import Ledger, Release
from copfl.federation.node.node import Node
from copfl.federation.node.remembered_rows import remembered
from copfl.federation.node.secure_memory import Objective, RememberedSum, SumMemory, rows_of
from copfl.federation.node.secure_phases import KINDS, Contribution, added_up, hiding_words
from copfl.federation.protocol import secure_sum
from copfl.federation.protocol.files import alone, stored, write_json
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.secure_sum import quantised
from copfl.federation.protocol.statistics import KIND, StatisticsTerms, like_centres
from copfl.wire import Head, Packet

FILE = "statistics.json"  # in the folder of known data


# -- what was given ------------------------------------------------------------------------------------------


class StatisticsPass(NamedTuple):
    """A pass of a question about some data."""

    samples: str  # the data, as `KnownData` names them
    contract: str  # digest of all that determines what a node gives
    number: int  # of the pass, from 0
    answer: str  # digest of the centres and of what the node gives


class StatisticsCohort(NamedTuple):
    """With whom the answer to a question was added up: both passes with the same members."""

    samples: str
    contract: str
    cohort: frozenset[str]


class GivenStatistics(KnownData):
    """A node's memory of the statistics that it gave.

    A question is a contract about some data, with both passes: the second pass of another contract, or with
    other members, would be subtracted from what is known of the first.
    """

    def ask(self, wanted: StatisticsPass, allowed: int) -> None:
        """Notes a pass before it is answered; WireError if it is of another question about the same data.

        Args:
            wanted: What is to be answered.
            allowed: How many questions about the same data the owner allows.
        """
        with alone(self.folder / FILE):
            given, cohorts = self._read()
            if wanted in given:
                return
            related = [other for other in given if self.overlap(wanted.samples, other.samples)]
            questions = {other[:2] for other in related} | {wanted[:2]}
            answers = {other for other in related if other.number == wanted.number} | {wanted}
            if max(len(questions), len(answers)) > allowed:
                raise WireError(
                    "statistics of this node's data were given: another question, or the same about other "
                    "rows, could be subtracted. Give the means and categories in the contract, or ask the "
                    f"node's owner to raise statistics.questions above {allowed}"
                )
            if wanted.number and not any(added[:2] == wanted[:2] for added in cohorts):
                raise WireError("this node has not answered the first pass of this contract")
            self._write([*given, wanted], cohorts)

    def add(self, added: StatisticsCohort, number: int, allowed: int) -> None:
        """Writes down with whom data are added up; WireError if they were with others.

        Args:
            added: The members.
            number: Of the pass: the members of the second are the members of the first.
            allowed: With how many sets of members the owner allows.
        """
        with alone(self.folder / FILE):
            passes, cohorts = self._read()
            if added in cohorts:
                return
            if number:
                raise WireError("the first pass of this contract was added up with other members")
            earlier_cohorts = {
                other.cohort for other in cohorts if self.overlap(added.samples, other.samples)
            }
            if len(earlier_cohorts | {added.cohort}) > allowed:
                raise WireError(
                    "statistics of this node's data were added up with other members: the difference of "
                    "both sums would reveal single members; ask the node's owner to raise "
                    f"statistics.questions above {allowed}"
                )
            self._write(passes, [*cohorts, added])

    def _read(self) -> tuple[list[StatisticsPass], list[StatisticsCohort]]:
        return stored(
            self.folder / FILE,
            lambda content: (
                [StatisticsPass(str(s), str(c), int(n), str(a)) for s, c, n, a in content["asked"]],
                [
                    StatisticsCohort(str(s), str(c), frozenset(members))
                    for s, c, members in content["cohorts"]
                ],
            ),
            {"asked": [], "cohorts": []},
        )

    def _write(self, passes: list[StatisticsPass], cohorts: list[StatisticsCohort]) -> None:
        content = {"asked": passes, "cohorts": [(*added[:2], sorted(added.cohort)) for added in cohorts]}
        write_json(self.folder / FILE, content)


# -- the answer ----------------------------------------------------------------------------------------------


class SiteStatistics(NamedTuple):
    """A node's contribution, which may leave."""

    samples: str
    vector: Vector
    names: dict[str, list[str]]
    upload: str  # digest of the vector


def answer(terms: StatisticsTerms, node: Node, packet: Packet) -> Packet:
    """The answer to a message of the statistics phase: its sums, or its answer in a phase of a secure sum.

    Args:
        terms: What the accepted proposal says.
        node: The one that is asked; its proposal has the members of sums.
        packet: The server's message.
    """
    how = terms.federation.secure.aggregation, str(wire.opened_head(packet).get("kind"))
    if how not in ANSWERS:
        with_or_without = "with" if how[0] else "without"
        raise WireError(
            f"a node does not answer {how[1][:40]!r} in statistics {with_or_without} secure aggregation"
        )
    return ANSWERS[how](terms, node, packet)


def _alone(terms: StatisticsTerms, node: Node, packet: Packet) -> Packet:
    """The sums of this node."""
    head = head_of(terms, node, packet)
    prepared = _prepared(terms, node, head, packet)
    alone = frozenset([node.identity(node.key.public)])
    added = StatisticsCohort(prepared.samples, terms.digest, alone)
    GivenStatistics(node.memory).add(added, head.round, node.policy.statistics.questions)
    fields = {Field.CATEGORIES: prepared.names}
    return wire.encode(torch.from_numpy(prepared.vector), head._replace(kind=KIND), about=fields)


class StatisticsSummand:
    """Statistics as what is added up securely."""

    def contribution(self, request: secure_phases.PhaseRequest, packet: Packet) -> Contribution:
        """The sums of this node's table, as words.

        Args:
            request: The phase MASKED.
            packet: The server's message, with the means of the first pass.
        """
        assert isinstance(request.settings, StatisticsTerms)
        rules = request.settings.rules
        prepared = _prepared(request.settings, request.node, request.head, packet)
        words, fields = quantised(prepared.vector, rules), {Field.STATISTICS: True}
        if not secure_sum.fits(prepared.vector, rules):
            logging.getLogger("flwr").warning(
                "copfl: values of this node are so far out of the contract's minimum and maximum that the statistics "
                "have no result; `copfl site check` says which"
            )
            words = hiding_words(request, len(words))
        return Contribution(words, prepared.samples, prepared.upload, fields, lambda: None)

    def enter(self, request: secure_phases.PhaseRequest, cohort: frozenset[str]) -> None:
        """The data are added up with one cohort, in both passes, and in a training.

        Args:
            request: The phase CONSISTENT.
            cohort: The identities of the members whose vectors are in the sum.
        """
        assert isinstance(request.settings, StatisticsTerms)
        node = request.node
        added = StatisticsCohort(request.session.samples, request.settings.digest, cohort)
        GivenStatistics(node.memory).add(added, request.head.round, node.policy.statistics.questions)
        _remember(request, cohort)


def _remember(request: secure_phases.PhaseRequest, cohort: frozenset[str]) -> None:
    """Notes the sum where the sums of a training are, which could be subtracted from it; WireError if one could."""
    memory, rows = SumMemory(request.node.memory), rows_of(request.settings.federation, request.head.client)
    samples = memory.name_of(hashes_of(cells_of(read_table(_file_of(request.node)))))
    added = RememberedSum(samples, cohort, rows, Objective(), frozenset([request.session.upload]))
    memory.history(samples).admit(added, request.node.config.cohort_changes)
    memory.remember(added)


def _in_sum(terms: StatisticsTerms, node: Node, packet: Packet) -> Packet:
    """The answer to a message of a phase of a secure sum."""
    return added_up(terms, node, packet, StatisticsSummand())


# By whether sums are secure, and the kind of the message: all that a node answers before the training.
ANSWERS: dict[tuple[bool, str], Callable[[StatisticsTerms, Node, Packet], Packet]] = {
    (False, "down"): _alone,
    **{(True, kind): _in_sum for kind in KINDS},
}


def _prepared(terms: StatisticsTerms, node: Node, head: Head, packet: Packet) -> SiteStatistics:
    """What this node gives in a pass, after it has written down what it was asked and would answer."""
    if head.round >= PASSES:
        raise WireError(f"statistics have {PASSES} passes, and it asks for pass {head.round + 1}")
    centres = wire.decode(packet, like_centres(terms.question), head).record.numpy()
    site, policy = node_site(terms, node, head.client), node.policy
    count, is_second = policy.statistics.smallest_count, head.round > 0
    known_means = centres[: len(terms.question.numbers)] if is_second else None
    vector = sums_of(terms.question, site, count, known_means)
    names = {} if is_second else names_of(terms.question, site, count)
    memory = GivenStatistics(node.memory)
    samples = memory.name_of(hashes_of({name: cells.astype(str) for name, cells in site.rows.items()}))
    # With the answer: rows that are equal to others are not seen in the hashes.
    content = [known_means is not None and known_means.tolist(), vector.tolist(), names]
    wanted = StatisticsPass(
        samples, terms.digest, head.round, hashlib.sha256(json.dumps(content).encode()).hexdigest()
    )
    memory.ask(wanted, policy.statistics.questions)
    Ledger(node.memory).enter(Release(samples, head.run, head.round, noise=0.0), policy.privacy)
    return SiteStatistics(samples, vector, names, hashlib.sha256(vector.tobytes()).hexdigest())


def node_site(terms: StatisticsTerms, node: Node, client: int) -> SiteValues:
    """The rows of the node's table that it will train on.

    Args:
        terms: What all members agree on.
        node: The one whose owner named the table.
        client: Its number, which decides on the draw of validation rows.
    """
    test = node.config.test
    tables = [read_table(file) for file in (_file_of(node), *([] if test is None else [test]))]
    log_problems(terms.contract, tables[0])
    run, is_secure = terms.federation.run.run, terms.federation.secure.aggregation
    held_out = HeldOut(run.validation, run.seed, client) if run.validation else None
    chosen = remembered(node, terms.contract, tables, is_secure)
    return values_of(terms.contract, chosen.tables, held_out, chosen.leave_out)


def _file_of(node: Node) -> Path:
    """The node's table."""
    source = Path(node.config.data).expanduser()
    if not node.config.data or not source.is_file():
        raise UsageError("statistics are those of a table: the node's data must be a file")
    return source
