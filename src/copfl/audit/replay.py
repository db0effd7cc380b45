"""A run again, with the door to its server open.

Every engine hands the server what each client adds to a round's total. Standing at that door one can keep a client's
part away, which is a run without it, or note the parts down and work out the servers that any subset of them would
have made. Neither needs to know the algorithm: totals add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from copfl.core import tree
from copfl.core.task import with_statistics
from copfl.engine import mapping
from copfl.engine.mapping import Mapping, Submission
from copfl.experiment.run import Experiment, OnRound, Result, execute

Numbers = NDArray[np.float64]


class Heard(NamedTuple):
    """What some clients, trained side by side, brought to the server: trees of rows."""

    ids: Tensor
    parts: Any  # what each adds to the total
    clients: Any  # their own records afterwards


def at_the_door(engine: Mapping, hear: Callable[[Heard], Any]) -> Mapping:
    """The engine, with `hear` called for what its clients bring; what it gives back is what the server gets."""
    if engine.name == "cuda_graph":  # a recording is played back without anybody standing there
        engine = mapping.vmap(engine.chunk)

    def over(f: Callable[[Any], Any], rows: Any) -> Any:
        found = engine.over(f, rows)
        return hear(Heard(rows.id, found, rows.client)) if isinstance(rows, Submission) else found

    return engine._replace(over=over)


def silenced(parts: Any, keep: Tensor) -> Any:
    """The parts with zeros for those who are not kept, as for a client whose numbers are not finite."""
    return tree.each(
        lambda t: torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, torch.zeros_like(t)), parts
    )


def without(experiment: Experiment, gone: Sequence[int], on_round: OnRound | None = None) -> Result:
    """The run in which nothing that these clients send arrives; same seed, same batches.

    They still receive and train, so their own figures are those of a client that takes and does not give.
    """
    missing = torch.tensor(list(gone), dtype=torch.int64, device=experiment.task.device)

    def hear(heard: Heard) -> Any:
        return silenced(heard.parts, ~torch.isin(heard.ids, missing))

    return execute(
        dataclasses.replace(experiment, engine=at_the_door(experiment.engine, hear)), None, on_round
    )


@dataclasses.dataclass(frozen=True, eq=False)
class RoundSnapshot:
    """A round between the clients' training and the server's step."""

    experiment: Experiment
    server: Any  # before the round
    heard: list[Heard]
    clients: Any  # every client's record after the round, a tree of rows

    @property
    def players(self) -> list[int]:
        """Who took part."""
        return [int(n) for heard in self.heard for n in heard.ids]

    def server_of(self, who: frozenset[int]) -> Any:
        """The server that these clients' uploads alone would have made; of nobody's, the one there was.

        The parts are added up as the engine does, the others' as zeros: of all clients it is the run's own, bit by bit.
        """
        if not who:
            return self.server
        fingerprints = [
            torch.tensor([int(n) in who for n in heard.ids], device=heard.ids.device) for heard in self.heard
        ]
        parts = (
            tree.total(silenced(heard.parts, keep))
            for heard, keep in zip(self.heard, fingerprints, strict=True)
        )
        e = self.experiment
        with torch.no_grad():
            return e.algorithm.server_update(e.task, self.server, tree.summed(parts))[0]

    def worth(self, sets: Sequence[frozenset[int]]) -> Numbers:
        """How good each set's server would be, [sets, 2]: the mean accuracy over all clients of its broadcast alone,
        and of what each client predicts with once it has the broadcast.
        """
        found = accuracies(self.experiment, [self.server_of(who) for who in sets], self.clients)
        return np.stack([np.nanmean(one, 1) for one in found], 1)


def accuracies(e: Experiment, servers: Sequence[Any], clients: Any) -> tuple[Numbers, Numbers]:
    """Every client's accuracy on its own test samples with a server's broadcast alone, and with its own part as well,
    [servers, clients] each.

    A broadcast is tried with the client's own batch-norm statistics where those are not shared.
    """
    algorithm, task = e.algorithm, e.task

    def look(given: tuple[Any, Any, Any]) -> tuple[Tensor, Tensor]:
        client, down, test = given
        personal = algorithm.personal_model(task, client, down)
        everybody = algorithm.personal_model(task, algorithm.client_init(task), down)
        if task.buffers == "local":
            everybody = with_statistics(task, everybody, personal)
        broadcast, own = (task.evaluate(model, test)[1].double() for model in (everybody, personal))
        known = test.size > 0
        return torch.where(known, broadcast, torch.nan), torch.where(known, own, torch.nan)

    chunk = e.engine.chunk
    # Small models are looked at many at a time: what costs is the call, not the arithmetic.
    many = 1 if e.engine.name == "sequential" else max(1, min(256, 2**24 // task.d) // min(chunk, e.clients))
    found = []
    for start in range(0, len(servers), many):
        block = servers[start : start + many]
        columns = []
        for part in np.split(np.arange(e.clients), range(chunk, e.clients, chunk)):
            ids = torch.from_numpy(part).to(task.device)
            down = tree.concatenate([algorithm.downlink(server, ids) for server in block])
            own, test = tree.rows(clients, ids), e.federation.test.rows(part)
            own, test = (tree.concatenate([each] * len(block)) for each in (own, test))
            with torch.no_grad():
                pair = e.engine.over(look, (own, down, test))
            columns.append(tuple(t.view(len(block), -1) for t in pair))  # [servers, clients of the chunk]
        found.append(tuple(torch.cat(parts, 1) for parts in zip(*columns, strict=True)))
    broadcast, personal = (t.cpu().numpy() for t in tree.concatenate(found))
    return broadcast, personal


class Watched(NamedTuple):
    """A run that was watched."""

    result: Result
    same: bool  # whether the server that was worked out along the way is the run's own, bit by bit


def watched(experiment: Experiment, see: Callable[[int, RoundSnapshot], None]) -> Watched:
    """The run once more, with `see` called for every round (from 0) before the next begins."""
    e = experiment
    server, heard = e.algorithm.server_init(e.task, e.clients), list[Heard]()
    clients = tree.each(torch.clone, tree.repeat(e.algorithm.client_init(e.task), e.clients))

    def hear(one: Heard) -> Any:
        heard.append(Heard(one.ids, one.parts, None))
        tree.put_rows(clients, one.ids, one.clients)
        return one.parts

    def on_round(round: Any, seconds: float) -> None:
        nonlocal server
        moment = RoundSnapshot(e, server, list(heard), clients)
        see(round.number, moment)
        server = moment.server_of(frozenset(moment.players))
        heard.clear()

    result = execute(dataclasses.replace(e, engine=at_the_door(e.engine, hear)), None, on_round)
    pairs = zip(tree.leaves(server), tree.leaves(result.state.server), strict=True)
    return Watched(result, all(torch.equal(a, b) for a, b in pairs))
