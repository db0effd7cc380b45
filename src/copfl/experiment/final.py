"""The clients that no round evaluated, evaluated once when the run ends.

With partial participation, an evaluated round has the clients of that round only. A client that was in none gets
the model that it has after the last round, as it would begin a further one, and that is evaluated here. Each other
client has the value of the round that its model is taken from, which is in rounds.jsonl.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from copfl import files, foreign
from copfl.core import tree
from copfl.core.algorithm import received, traits
from copfl.core.evaluation import EVAL_MODELS, evaluate, measured
from copfl.core.payload import nbytes
from copfl.engine.rounds import State
from copfl.engine.simulate import Simulation
from copfl.experiment.records import Record
from copfl.settings.schema import RunSettings
from copfl.stats import Numbers
from copfl.tables import listed, plain

FILE = "final.json"
NAMED = 5  # clients that a sentence names


class FinalEvaluation(NamedTuple):
    """What was measured of the clients that no round evaluated."""

    round: int  # the last one, from 1
    clients: list[int]
    values: dict[str, Numbers]  # by metric, as in a round: a value for each of these; nan where undefined
    # The clients that were in no round. Where a message has nothing, as of local training, they have no model of
    # the run and are not in `clients`.
    never_trained: list[int]

    def completed(self, values: Numbers, name: str) -> Numbers:
        """A metric of all clients, with the values of these.

        Args:
            values: Of the clients that a round evaluated, [clients].
            name: Of the metric.
        """
        if name not in self.values:
            return values
        whole = values.copy()
        whole[self.clients] = self.values[name]
        return whole


def evaluated(
    simulation: Simulation, state: State, settings: RunSettings, lines: Sequence[Record]
) -> FinalEvaluation | None:
    """The evaluation after the last round; None with full participation, which leaves nobody out.

    Args:
        simulation: What was trained.
        state: After the last round.
        settings: Of the run.
        lines: The records of all rounds.
    """
    population, task = settings.split_clients[0], simulation.task
    if settings.participants == len(population):
        return None
    primary = task.metrics[0].name
    trained = {n for line in lines for n in line["clients"]}
    measured_in_rounds = {n for line in lines if primary in line["per_client"] for n in line["clients"]}
    honest = np.setdiff1d(population, traits(simulation.algorithm).attackers).tolist()
    found: dict[int, dict[str, float]] = {}
    for n in (n for n in honest if n not in measured_in_rounds):
        id = torch.tensor(n, device=task.device)
        down = received(simulation.algorithm, state.server, id)
        if n in trained or nbytes(down, of=task.initial.dtype):
            record = tree.row(state.clients.rows(id[None]), 0)
            found[n] = _metrics(simulation, n, record, down, settings.eval_models)
    names = sorted({name for values in found.values() for name in values})
    values = {name: np.array([of_one[name] for of_one in found.values()], np.float64) for name in names}
    return FinalEvaluation(state.round, list(found), values, [n for n in honest if n not in trained])


def _metrics(simulation: Simulation, client: int, record: Any, down: Any, models: str) -> dict[str, float]:
    """The metrics of a client's model as it is before it would train, by the names of a round."""
    algorithm, task, federation = simulation.algorithm, simulation.task, simulation.federation
    test, *validation = (tree.row(split.rows([client]), 0) for split in federation.splits[1:])
    with torch.no_grad():
        model = algorithm.personal_model(task, record, down)
        evaluation = evaluate(
            algorithm, task, record, down, record, model, test, EVAL_MODELS[models], *validation
        )
    rows = {name: value[None] for name, value in evaluation.items()}
    targets = ([split.targets(client)] for split in federation.splits[1:])
    return {name: float(value) for name, value in measured(task, rows, *targets).items()}


def write(final: FinalEvaluation, folder: Path) -> None:
    """Writes the file of a run folder.

    Args:
        final: What was measured.
        folder: Of the run.
    """
    files.write_json(folder / FILE, plain(final._asdict()))


def read(folder: Path, rounds: int, clients: int) -> FinalEvaluation | None:
    """The content of the file in a run folder; None where there is none, or it is of a run with other rounds.

    Args:
        folder: Of the run.
        rounds: That the run has now; one that goes on makes the file again at its end.
        clients: Their number.
    """

    def parsed(content: dict[str, Any]) -> FinalEvaluation | None:
        found, never = content["clients"], content["never_trained"]
        for numbers in (found, never):
            if not all(type(n) is int and 0 <= n < clients for n in numbers) or len({*numbers}) < len(
                numbers
            ):
                raise ValueError(f"its clients are not different ones of {clients}")
        values = {str(name): np.array(column, np.float64) for name, column in content["values"].items()}
        if any(column.shape != (len(found),) for column in values.values()):
            raise ValueError("it does not have a value for each of its clients")
        whole = FinalEvaluation(int(content["round"]), list(found), values, list(never))
        return whole if whole.round == rounds else None

    return foreign.of_run(folder / FILE, parsed)


def in_words(final: FinalEvaluation | None, names: Sequence[str]) -> str:
    """Whose values are of a model before local training, and who never trained; "" if nobody.

    Args:
        final: What was measured; None: nothing.
        names: Of all clients.
    """
    if final is None or not (final.clients or final.never_trained):
        return ""
    said = []
    if final.clients:
        said.append(
            f"{len(final.clients)} of {len(names)} clients were in no evaluated round; their values are of the "
            "model that they have after the last one, before local training"
        )
    if final.never_trained:
        never = listed([names[n] for n in final.never_trained], NAMED)
        without = set(final.never_trained) - set(final.clients)
        said.append(f"never trained: {never}{', who get no model and have no value' * bool(without)}")
    return "; ".join(said)
