"""A client's part in secure aggregation of local updates: what it adds, and what it remembers of it.

`local_update` answers every message of a training; without secure aggregation the upload leaves by itself.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from copfl import wire
from copfl.core import tree
from copfl.core.evaluation import is_evaluated
from copfl.core.payload import innermost
from copfl.errors import WireError
from copfl.federation.node import update
from copfl.federation.node.data import LoadData, node_data
from copfl.federation.node.final import evaluate_after_rounds
from copfl.federation.node.halves import compare_halves
from copfl.federation.node.incoming import decode
from copfl.federation.node.node import Node
from copfl.federation.node.secure_memory import RememberedSum, SumMemory, objective_of, rows_of
from copfl.federation.node.secure_phases import KINDS, Contribution, PhaseRequest, added_up, hiding_words
from copfl.federation.protocol import secure_total
from copfl.federation.protocol.halves import HALVES
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.noise import upload_noise
from copfl.federation.protocol.settings import TrainingSettings
from copfl.wire import Packet

_log = logging.getLogger("flwr")


@dataclass(frozen=True)
class UpdateSummand:
    """The sum of the local updates of a round."""

    load_data: LoadData

    def contribution(self, request: PhaseRequest, packet: Packet) -> Contribution:
        """Nothing that leaves says whether the training failed or a value is out of range: only the owner learns it.

        Args:
            request: The phase MASKED.
            packet: The server's message, with the model.
        """
        settings, memory = request.settings, SumMemory(request.node.memory)
        assert isinstance(settings, TrainingSettings)
        data = self.load_data(settings, request.node.numbered(request.head.client))
        samples = memory.name_of(data.samples)
        invited = request.identities(request.session.cohort.values())
        rows, objective = rows_of(settings.federation, request.head.client), objective_of(settings.federation)
        planned_sum = RememberedSum(samples, invited, rows, objective, frozenset())
        memory.history(samples).expect(planned_sum, request.node.config.cohort_changes)  # before it trains
        if (noised := settings.noised) is not None:
            model = innermost(decode(settings, request.node, packet)[1]).w
            secure_total.require_room(model, noised.clip, noised.clip * upload_noise(noised), settings.rules)
        trained = update.train(settings, request.node, packet, lambda *_: data)
        if trained.output is None:
            sums = self.nothing(settings, request.head.round)
            _log.warning(
                "copfl: this node adds nothing to round %d, which has no result: %s",
                request.head.round + 1,
                trained.failure,
            )
        else:
            with torch.no_grad():
                clients, upload = settings.federation.clients, trained.output.upload
                total = secure_total.summand_of(settings.algorithm, settings.task, clients, upload)
            reported = update.reports_metrics(settings, request.node)
            sums = secure_total.sums_of(total, trained.metrics, settings.rules, reported=reported)
            if problem := secure_total.problem_of(sums, settings.rules):
                _log.warning("copfl: what this node adds to round %d: %s", request.head.round + 1, problem)
        fingerprints = " ".join(wire.fingerprint(t) for t in tree.leaves(sums.total))
        words = secure_total.words_of(sums, settings.rules)
        if trained.output is None or not secure_total.fits(sums, settings.rules):
            words = hiding_words(request, len(words))
        return Contribution(
            words,
            samples,
            hashlib.sha256(fingerprints.encode()).hexdigest(),
            {Field.NOTE: trained.note},
            partial(trained.save, request.node),
            trained.noised,
        )

    def nothing(self, settings: TrainingSettings, round: int) -> secure_total.UploadSums:
        """The form of what a node adds whose training failed.

        Args:
            settings: The federation's.
            round: From 0.
        """
        run, federation = settings.run.run, settings.federation
        evaluated = is_evaluated(round, federation.rounds, run.eval_every)
        like = secure_total.example(
            settings.algorithm, settings.task, settings.shape, settings.rules, federation.augment, evaluated
        )
        return tree.each(torch.zeros_like, like)

    def enter(self, request: PhaseRequest, cohort: frozenset[str]) -> None:
        """The data are added up with one cohort, see `secure_memory`.

        Args:
            request: The phase CONSISTENT.
            cohort: The identities of the members whose vectors are in the sum.
        """
        memory, session = SumMemory(request.node.memory), request.session
        assert isinstance(request.settings, TrainingSettings)
        federation, uploads = request.settings.federation, frozenset([session.upload])
        rows = rows_of(federation, request.head.client)
        added = RememberedSum(session.samples, cohort, rows, objective_of(federation), uploads)
        memory.history(session.samples).admit(added, request.node.config.cohort_changes)
        memory.remember(added)


def _in_sum(settings: TrainingSettings, node: Node, packet: Packet, load_data: LoadData) -> Packet:
    """The answer to a message of a phase of a secure sum."""
    return added_up(settings, node, packet, UpdateSummand(load_data))


# By whether aggregation is secure, and the kind of the message: all that a node answers in a round, and after the last.
UPDATES: dict[tuple[bool, str], Callable[[TrainingSettings, Node, Packet, LoadData], Packet]] = {
    (False, "down"): update.local_update,
    (False, HALVES): compare_halves,
    (False, Field.FINAL): evaluate_after_rounds,
    **{(True, kind): _in_sum for kind in KINDS},
}


def round_answer(
    settings: TrainingSettings, node: Node, packet: Packet, load_data: LoadData = node_data
) -> Packet:
    """The answer to a message of a round: the upload, or the answer in a phase of a secure sum.

    Args:
        settings: What the accepted proposal says.
        node: The one that is asked; its proposal has the members of sums.
        packet: The server's message.
        load_data: Reads the node's data.
    """
    how = settings.federation.secure.aggregation, str(wire.opened_head(packet).get("kind"))
    if how not in UPDATES:
        with_or_without = "with" if how[0] else "without"
        raise WireError(
            f"a node does not answer {how[1][:40]!r} in a run {with_or_without} secure aggregation"
        )
    return UPDATES[how](settings, node, packet, load_data)
