"""The server's rounds with secure aggregation."""

import time
from dataclasses import dataclass

from copfl.core import tree
from copfl.core.evaluation import is_evaluated
from copfl.errors import WireError
from copfl.flower import secure_total
from copfl.flower.exchange import Round
from copfl.flower.registry import Event
from copfl.flower.secure_exchange import SecureExchange
from copfl.flower.server import Server


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
            self._likes[evaluated] = secure_total.example(*what, evaluated)
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
        return now


def server_class(secure: bool) -> type[Server]:
    """The server of a run with or without secure aggregation."""
    return SecureServer if secure else Server
