"""The clients that no round evaluated, evaluated once when the run ends.

With partial participation, an evaluated round has the clients of that round only. A client that was in none gets
the model that it has after the last round, as it would begin a further one, and that is evaluated here. Each other
client has the value of the round that its model is taken from, which is in rounds.jsonl.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from copfl.core import tree
from copfl.core.algorithm import received, traits
from copfl.core.evaluation import EVAL_MODELS, evaluate, measured
from copfl.core.payload import nbytes
from copfl.engine.rounds import State
from copfl.engine.simulate import Simulation
from copfl.experiment.finding import Finding
from copfl.experiment.recording import Recording
from copfl.experiment.records import FinalEvaluation, Record
from copfl.settings.schema import RunSettings
from copfl.tables import capital, listed

NAMED = 5  # clients that a sentence names


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


def _parsed(content: dict[str, Any]) -> FinalEvaluation:
    found, never = content["clients"], content["never_trained"]
    for numbers in (found, never):
        if not all(type(n) is int for n in numbers) or len({*numbers}) < len(numbers):
            raise ValueError("its sites are not different ones")
    values = {str(name): np.array(column, np.float64) for name, column in content["values"].items()}
    if any(column.shape != (len(found),) for column in values.values()):
        raise ValueError("it does not have a value for each of its sites")
    return FinalEvaluation(int(content["round"]), list(found), values, list(never))


def _fits(final: FinalEvaluation, rounds: int, clients: int) -> bool:
    """Not of a run with other rounds: one that goes on makes the file again at its end."""
    if not all(0 <= n < clients for n in (*final.clients, *final.never_trained)):
        raise ValueError(f"its sites are not different ones of {clients}")
    return final.round == rounds


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
            f"{len(final.clients)} of {len(names)} sites were in no evaluated round; their values are of the "
            "model that they have after the last one, before local training"
        )
    if final.never_trained:
        never = listed([names[n] for n in final.never_trained], NAMED)
        without = set(final.never_trained) - set(final.clients)
        said.append(f"never trained: {never}{', who get no model and have no value' * bool(without)}")
    return "; ".join(said)


def _sentences(final: FinalEvaluation, run: Recording) -> list[str]:
    text = in_words(final, run.short_names)
    return [f"{capital(text)}."] if text else []


FINAL = Finding(
    file="final.json",
    as_json=FinalEvaluation._asdict,
    parse=_parsed,
    fits=_fits,
    sentences=_sentences,
    summary=lambda final, run: {
        "evaluated_at_the_end": final.clients,
        "never_trained": final.never_trained,
    },
)
