"""The server's rounds with secure aggregation."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from copfl import wire
from copfl.core import tree
from copfl.core.evaluation import is_evaluated
from copfl.errors import WireError
from copfl.experiment import records
from copfl.experiment.analysis.benefit import design, of_sum
from copfl.federation.protocol import secure_total
from copfl.federation.protocol.events import Event
from copfl.federation.protocol.files import write_json
from copfl.federation.protocol.halves import (
    BENEFIT,
    COMPARED,
    LOSSES,
    MESSAGE,
    Question,
    judgement_from,
    memberships,
    question_of,
    size_of,
)
from copfl.federation.protocol.messages import Field, read_json
from copfl.federation.server.exchange import Round
from copfl.federation.server.rounds import Server
from copfl.federation.server.secure_exchange import REVEALING, SecureExchange
from copfl.tables import plain
from copfl.wire import Packet


@dataclass
class SecureServer(Server, SecureExchange):
    """A server that adds up what it cannot read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._likes: dict[bool, secure_total.Sums] = {}  # by whether a round is evaluated

    @property
    def like(self) -> secure_total.Sums:
        """The structure of the sums of this round."""
        evaluated = is_evaluated(self.round, self.federation.rounds, self.settings.run.run.eval_every)
        if evaluated not in self._likes:
            what = self.algorithm, self.task, self.settings.shape, self.rules, self.federation.augment
            self._likes[evaluated] = secure_total.example(*what, evaluated, self.settings.run.run.benefit)
        return self._likes[evaluated]

    def _run_round(self, selected: list[int]) -> Round:
        self.size = sum(t.numel() for t in tree.leaves(self.like))
        if self._was_revealing():
            now = Round(self.round, failures=dict.fromkeys(selected, "the server ended while it added up"))
            return self._without_result(now, "the server ended while it added up")
        now = Round(self.round)
        while True:
            connected = self._connected(selected)
            now.failures = {n: "not connected" for n in selected if n not in connected}
            try:
                return self._summed(now, connected)
            except WireError as error:
                text = f"round {now.number + 1} begins again with fresh keys: {error}"
                self.log(text, Event.WAITING, round=now.number + 1)
                time.sleep(self.retry)

    def _summed(self, now: Round, clients: list[int]) -> Round:
        """The round after all phases; WireError if too few clients are left before they reveal shares."""
        values = self._added(now, clients)
        if values is not None:
            sums = secure_total.sums_from(values, self.like)
            now.total, now.dtypes = sums.total, [t.dtype for t in tree.leaves(self.like.total)]
            now.means = secure_total.means(sums)
            now.half = sums.half if self.settings.run.run.benefit else None
        return now

    # -- the benefit -----------------------------------------------------------------------------------------

    compared = COMPARED
    question: Question | None = None  # what the nodes are asked after the last round

    def down(self, client: int, **further: Any) -> Packet:
        """The message to one client: of a round, or the question after the last one."""
        if self.question is None:
            return super().down(client, **further)
        about = {Field.ROUNDS: len(self.question.rounds), **further}
        return wire.encode(self.question, self._head("down", self.round, client), about=about)

    def _losses(self, client: int, packet: Packet) -> float | None:
        """1 if a client has compared the halves, 0 if it has no losses; they stay with it."""
        about = wire.decode(packet, (), self._head(LOSSES, self.round, client)).about
        if type(about.get(Field.COMPARED)) is not bool:
            raise WireError("it does not say whether it has compared the halves")
        return float(about[Field.COMPARED])

    def _conclude(self) -> None:
        """Writes the benefit, from the sum of what clients conclude; the log says why where there is none.

        Of the rounds in which every client has compared the same models.
        """
        clients, lines = self.federation.clients, self.folder.rounds()
        path = self.folder.path / BENEFIT
        if read_json(path).get("rounds") == len(lines):
            return
        compared = records.table(lines, COMPARED, clients)
        is_common = np.array([len(line.get(MESSAGE, {}).get("sha256", ())) == 1 for line in lines])
        rounds: list[int] = np.flatnonzero(is_common & (np.nan_to_num(compared) > 0).all(axis=1)).tolist()
        regression = design(memberships(self.federation, rounds))
        if regression is None:
            self.log(
                f"{len(rounds)} rounds in which all {clients} clients compared halves do not give a benefit"
            )
            return
        messages = [lines[round][MESSAGE]["sha256"][0] for round in rounds]
        self.question = question_of(rounds, messages)
        self.size = size_of(len(rounds), clients)
        values, why = None, "too few clients revealed their shares"
        until = time.monotonic() + self.federation.network.deadline
        while values is None and time.monotonic() < until:
            try:
                values = self._added(Round(self.round), self._connected(list(range(clients)), until))
            except WireError as error:
                why = str(error)
                self.log(f"the benefit is asked for again with fresh keys: {error}")
                time.sleep(min(self.retry, 5.0))
            finally:  # it may be asked for again: the same sum of the same clients
                (self.folder.path / REVEALING).unlink(missing_ok=True)
        if values is None:
            self.log(f"there is no benefit: {why}; session.resume=true asks for it again")
            return
        try:
            judgement = judgement_from(values, len(rounds), clients, self.rules)
        except WireError as error:
            self.log(f"there is no benefit: {error}")
            return
        benefit = of_sum(judgement, regression.freedom)
        write_json(path, {"rounds": len(lines), **plain(benefit._asdict())})
        self.log(f"the benefit of {clients} clients, from {len(rounds)} rounds, is in {BENEFIT}")


def server_class(secure: bool) -> type[Server]:
    """The server of a run with or without secure aggregation."""
    return SecureServer if secure else Server
