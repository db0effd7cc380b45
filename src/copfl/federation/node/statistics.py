"""A node's sums for the encoders of a federation: means, deviations and categories of an open contract.

They are given once. A node remembers, for its data and whatever the server calls a run, what it was asked and
with whose data its own were added up. Another question about the same rows, the same question about some more
rows, or other members of a sum could be subtracted: they are refused, unless the policy of the node's owner
allows more.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch

from copfl import wire
from copfl.data.contract.statistics import PASSES, Site, Vector, names_of, site_of, sums_of
from copfl.data.tables.files import read_table
from copfl.errors import UsageError, WireError, raised_as
from copfl.federation.node.data import log_problems
from copfl.federation.node.known_data import KnownData, hashes_of
from copfl.federation.node.ledger import Ledger, Release
from copfl.federation.node.message import head_of
from copfl.federation.node.node import Node
from copfl.federation.node.secure_phases import Asked, Contribution, added_up
from copfl.federation.protocol.files import alone, stored, write_json
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.secure_sum import quantised
from copfl.federation.protocol.statistics import KIND, StatisticsTerms, like_centres
from copfl.wire import Head, Packet

FILE = "statistics.json"  # in the folder of known data


# -- what was given ------------------------------------------------------------------------------------------


class Given(KnownData):
    """A node's memory of the statistics that it gave."""

    def ask(self, samples: str, part: int, question: str, allowed: int) -> None:
        """Notes a question before it is answered; WireError if it is another one about the same data."""
        with alone(self.folder / FILE):
            asked, cohorts = self._read()
            known = {(s, q) for s, p, q in asked if p == part and self.overlap(samples, s)}
            if (samples, question) in known:
                return
            if len(known) >= allowed:
                raise WireError(
                    "statistics of this node's data were given: another question, or the same about other "
                    "rows, could be subtracted. Give the means and categories in the contract, or ask the "
                    f"node's owner to raise statistics.questions above {allowed}"
                )
            self._write([*asked, (samples, part, question)], cohorts)

    def add(self, samples: str, cohort: frozenset[str], allowed: int) -> None:
        """Writes down with whom data are added up; WireError if they were with others."""
        with alone(self.folder / FILE):
            asked, cohorts = self._read()
            known = {members for s, members in cohorts if self.overlap(samples, s)}
            if cohort in known:
                return
            if len(known) >= allowed:
                raise WireError(
                    "statistics of this node's data were added up with other members: the difference of "
                    "both sums would reveal single members; ask the node's owner to raise "
                    f"statistics.questions above {allowed}"
                )
            self._write(asked, [*cohorts, (samples, cohort)])

    def _read(self) -> tuple[list[tuple[str, int, str]], list[tuple[str, frozenset[str]]]]:
        return stored(
            self.folder / FILE,
            lambda given: (
                [(str(s), int(p), str(q)) for s, p, q in given["asked"]],
                [(str(s), frozenset(members)) for s, members in given["cohorts"]],
            ),
            {"asked": [], "cohorts": []},
        )

    def _write(self, asked: list[tuple[str, int, str]], cohorts: list[tuple[str, frozenset[str]]]) -> None:
        content = {"asked": asked, "cohorts": [(s, sorted(members)) for s, members in cohorts]}
        write_json(self.folder / FILE, content)


# -- the answer ----------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """A node's contribution, which may leave."""

    samples: str
    vector: Vector
    names: dict[str, list[str]]
    upload: str  # digest of the vector


def answer(terms: StatisticsTerms, node: Node, packet: Packet) -> Packet:
    """The answer to a message of the statistics phase: sums of this node, or that of a phase of a secure sum.

    Args:
        terms: those of the accepted proposal.
        node: the one that is asked; its proposal has the members of sums.
        packet: the server's message.
    """
    if terms.federation.secure.aggregation:
        return added_up(terms, node, packet, Sums())
    head = head_of(terms, node, packet)
    prepared = _prepared(terms, node, head, packet)
    alone = frozenset([node.identity(node.key.public)])
    Given(node.memory).add(prepared.samples, alone, node.policy.statistics.questions)
    about = {Field.CATEGORIES: prepared.names}
    return wire.encode(torch.from_numpy(prepared.vector), head._replace(kind=KIND), about=about)


class Sums:
    """Statistics as what is added up securely."""

    def contribution(self, asked: Asked, packet: Packet) -> Contribution:
        assert isinstance(asked.settings, StatisticsTerms)
        prepared = _prepared(asked.settings, asked.node, asked.head, packet)
        refused = "the statistics cannot be added securely: {}; nothing was sent"
        with raised_as(WireError, refused, WireError):  # the value itself stays here
            words = quantised(prepared.vector, asked.settings.rules)
        about = {Field.STATISTICS: True}
        return Contribution(words, prepared.samples, prepared.upload, about, lambda: None)

    def enter(self, asked: Asked, cohort: frozenset[str]) -> None:
        questions = asked.node.policy.statistics.questions
        Given(asked.node.memory).add(asked.session.samples, cohort, questions)


def _prepared(terms: StatisticsTerms, node: Node, head: Head, packet: Packet) -> Prepared:
    """What this node gives in a pass, after it has written down what it was asked and would answer."""
    if head.round >= PASSES:
        raise WireError(f"statistics have {PASSES} passes, and it asks for pass {head.round + 1}")
    centres = wire.decode(packet, like_centres(terms.question), head).record.numpy()
    site, policy = node_site(terms, node), node.policy
    count, is_second = policy.statistics.smallest_count, head.round > 0
    known = centres[: len(terms.question.numbers)] if is_second else None
    vector = sums_of(terms.question, site, count, known)
    names = {} if is_second else names_of(terms.question, site, count)
    given = Given(node.memory)
    samples = given.name_of(hashes_of({name: cells.astype(str) for name, cells in site.rows.items()}))
    # With the answer: rows that are equal to others are not seen in the hashes.
    asked = [terms.digest, known is not None and known.tolist(), vector.tolist(), names]
    question = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    given.ask(samples, head.round, question, policy.statistics.questions)
    Ledger(node.memory).enter(Release(samples, head.run, head.round, noise=0.0), policy.privacy)
    return Prepared(samples, vector, names, hashlib.sha256(vector.tobytes()).hexdigest())


def node_site(terms: StatisticsTerms, node: Node) -> Site:
    """The rows of the node's table."""
    source, test = Path(node.config.data).expanduser(), node.config.test
    if not node.config.data or not source.is_file():
        raise UsageError("statistics are those of a table: the node's data must be a file")
    files = [source, *([] if test is None else [test])]
    log_problems(terms.contract, read_table(files[0]))
    return site_of(terms.contract, files)
