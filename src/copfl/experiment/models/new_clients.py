"""Clients that never trained, fitted after the last round by the algorithm's own local update.

Training calls `fitted` at its end; a baseline uses `alone_of`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl.algorithms.local import Local
from copfl.charts import Dots, Line, series_of, values_of
from copfl.core import tree
from copfl.core.algorithm import (
    AnyAlgorithm,
    ClientOutput,
    Metrics,
    epochs_in,
    message_to_new_client,
    next_message,
    trained_alone,
    traits,
)
from copfl.core.batches import NO_ROUND
from copfl.core.evaluation import VALIDATED
from copfl.core.task import Data, Personal, Plan, Task
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import generator
from copfl.engine import mapping
from copfl.engine.rounds import Ids, ModelKeeper, State
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.experiment.finding import Finding
from copfl.experiment.recording import Recording
from copfl.measures.metrics import MetricInfo
from copfl.sections import Section
from copfl.settings import schema
from copfl.settings.components import build
from copfl.stats import Numbers, mean_of_known
from copfl.tables import RULE, Table
from copfl.wrappers.base import Wrapper
from copfl.wrappers.even_batches import with_even_batches
from copfl.wrappers.local_steps import with_local_steps

SAMPLES = {"1": 1, "5": 5, "all": None}  # training samples of a new client, by the name of the column
UPDATES = 20  # local updates of a new client
# Colours and symbols of the chart, beside those of the models of trained clients.
ALONE_STYLE, SAMPLE_STYLES = 3, 4


class NewClients(NamedTuple):
    """The primary metric of new clients by the number of their samples, and of training alone on the same."""

    clients: list[int]
    accuracy: dict[str, Numbers]  # by number of samples, [new clients]
    alone: dict[str, Numbers]  # with the same optimizer, learning rate and number of local epochs
    validation: Numbers  # of all samples, [new clients]; nan without validation samples


class Nothing(NamedTuple):
    """A record without content."""

    zero: Tensor


class NewClient(NamedTuple):
    """A new client's record, and the message that it will use in its next local update."""

    client: Any
    down: Any


@dataclass(frozen=True)
class WithoutServer(Wrapper):
    """The local updates of new clients, which have one message from the server and send nothing."""

    message: Any = None
    updates: int = UPDATES

    def epochs_in(self, task: Task, round: int) -> int:
        """The last update is one after the last round of a run: what a client does alone then, it does once."""
        return epochs_in(self.algorithm, task, NO_ROUND if round == self.updates - 1 else 0)

    def server_init(self, task: Task, clients: int) -> Nothing:
        return Nothing(task.initial.new_zeros(()))

    def client_init(self, task: Task) -> NewClient:
        return NewClient(self.algorithm.client_init(task), self.message)

    def downlink(self, server: Nothing, ids: Tensor) -> Nothing:
        return tree.repeat(server, len(ids))

    def client_update(
        self, task: Task, client: NewClient, down: Nothing, data: Data, plan: Plan
    ) -> ClientOutput:
        output = self.algorithm.client_update(task, client.client, client.down, data, plan)
        after = NewClient(output.client, next_message(self.algorithm, task, client.down, output.upload))
        metrics = {name: output.metrics[name] for name in ("loss", "weight")}
        return ClientOutput(after, down, output.trained, metrics)

    def personal_model(self, task: Task, client: NewClient, down: Nothing) -> Personal:
        return self.algorithm.personal_model(task, client.client, client.down)

    def summand(self, task: Task, server: Nothing, id: Tensor, upload: Nothing) -> Nothing:
        return upload

    def server_update(self, task: Task, server: Nothing, total: Nothing) -> tuple[Nothing, Metrics]:
        return server, {}


@dataclass(frozen=True)
class Renumbered:
    """The models of a federation of these clients alone, under their own numbers."""

    models: ModelKeeper
    clients: Ids
    round: int  # the last of the federation

    def wanted(self, client: int) -> bool:
        return self.models.wanted(int(self.clients[client]))

    def put(self, client: int, model: Personal, round: int) -> None:
        self.models.put(int(self.clients[client]), model, self.round)

    def drop(self, client: int) -> None:
        self.models.drop(int(self.clients[client]))


def fitted(
    simulation: Simulation, state: State, trained: Ids, new: Ids, models: ModelKeeper | None = None
) -> NewClients:
    """The new clients after the last round. Their updates depend on the seed and the client alone.

    `models` gets their models, fitted to all their samples.

    Args:
        simulation: What is the same in every round.
        state: After the last round.
        trained: The clients that trained.
        new: Those that did not.
        models: Gets the models of the new clients, fitted to all their samples.
    """
    algorithm, whole, device = simulation.algorithm, simulation.federation, simulation.task.device
    honest = np.setdiff1d(trained, traits(algorithm).attackers)  # a new client attacks nothing
    message = message_to_new_client(algorithm, state.server, torch.from_numpy(honest).to(device))
    fitting, alone = WithoutServer(algorithm, message), local_baseline(algorithm)
    result = NewClients(new.tolist(), {}, {}, np.full(len(new), np.nan))
    for name, count in SAMPLES.items():
        federation = _only(whole, new, count, simulation.seed, device)
        keeper = Renumbered(models, new, state.round) if models is not None and count is None else None
        result.accuracy[name], result.validation[:] = _accuracies(simulation, fitting, federation, keeper)
        result.alone[name], _ = _accuracies(simulation, alone, federation)
    return result


def local_baseline(algorithm: AnyAlgorithm) -> AnyAlgorithm | None:
    """Local training with the algorithm's optimizer and number of epochs, or its own rule; None: it has neither."""
    steps, even, optimizer = (
        traits(algorithm).local_steps,
        traits(algorithm).even_batches,
        traits(algorithm).optimizer,
    )
    alone = trained_alone(algorithm)
    if alone is None and optimizer is not None:
        alone = Local(optimizer, algorithm.total_epochs)
    return None if alone is None else with_local_steps(with_even_batches(alone, even), steps)


def alone_of(algorithm: AnyAlgorithm, addons: schema.Addons) -> AnyAlgorithm | None:
    """Local training with the algorithm's optimizer, epochs and training add-ons; None: no optimizer.

    Args:
        algorithm: Of the run.
        addons: Its training add-ons.
    """
    local = local_baseline(algorithm)
    return build("addons", addons, algorithm=local) if local is not None and addons else local


def _only(
    whole: FederatedData, ids: Ids, count: int | None, seed: int, device: torch.device
) -> FederatedData:
    """A federation of these clients, each with at most `count` of its training samples: the first drawn."""
    partition = whole.partition
    drawn = [generator(seed, 3, int(n)).permutation(partition.train[n])[:count] for n in ids]
    train, test = tuple(map(np.sort, drawn)), tuple(partition.test[n] for n in ids)
    labels = None if partition.labels is None else partition.labels[ids]
    validation = tuple(partition.validation[n] for n in ids) if partition.validation else ()
    chosen = dataclasses.replace(partition, train=train, test=test, labels=labels, validation=validation)
    return FederatedData(whole.dataset, chosen, device)


def _accuracies(
    simulation: Simulation,
    algorithm: AnyAlgorithm | None,
    federation: FederatedData,
    models: ModelKeeper | None = None,
) -> tuple[Numbers, Numbers]:
    """The primary metric of each client's model after all local updates, on test and validation samples.

    nan without an algorithm, and without such samples.
    """
    task, unknown = simulation.task, np.full(federation.clients, np.nan)
    if algorithm is None:
        return unknown, unknown
    *_, last = simulate(
        simulation._replace(
            algorithm=algorithm, federation=federation, mapping=mapping.renewed(simulation.mapping)
        ),
        begin(algorithm, task, federation.clients),
        rounds=UPDATES,
        eval_every=UPDATES,
        eval_models="final",
        models=models,
    )
    name = task.metrics[0].name
    return last.clients[name], last.clients.get(f"{name}{VALIDATED}", unknown)


def _parsed(content: dict[str, Any]) -> NewClients:
    accuracy, alone = (
        {name: np.array(values, np.float64) for name, values in content[key].items()}
        for key in ("accuracy", "alone")
    )
    validation = np.array(content["validation"], np.float64)
    return NewClients(content["clients"], accuracy, alone, validation)


def new_clients_table(new: NewClients, metric: MetricInfo, names: Sequence[str]) -> Table:
    """The new clients' primary metric by the number of their samples, and training alone.

    Args:
        new: What was measured with them.
        metric: The primary one of the run.
        names: Of all clients.
    """
    accuracies = [values for name in new.accuracy for values in (new.accuracy[name], new.alone[name])]
    rows = [
        [names[n], *(metric.text(float(values[row])) for values in accuracies)]
        for row, n in enumerate(new.clients)
    ]
    means = ["mean", *(metric.text(float(mean_of_known(values))) for values in accuracies)]
    head = [title for name in new.accuracy for title in (f"{name} sample{'s' * (name != '1')}", "alone")]
    note = f"Fitted after the last round, by {UPDATES} local updates; alone: the same without the federation."
    return Table(f"New sites: {metric.in_unit}", ["site", *head], [*rows, RULE, means], [note])


def _section(new: NewClients, run: Recording) -> Section:
    """A dot for each number of their samples, and for training alone."""
    metric = run.primary
    accuracies = {f"{name} sample{'s' * (name != '1')}": values for name, values in new.accuracy.items()}
    series = series_of(accuracies, metric.factor, first=SAMPLE_STYLES)
    alone = values_of(metric.factor * new.alone["all"])
    series.append(Line("alone, all samples", alone, colour=ALONE_STYLE, symbol=ALONE_STYLE))
    about = (
        "Sites that did not train, fitted after the last round by the algorithm's own local update with 1, "
        "5 or all of their samples. Alone: the same without the federation."
    )
    names = [run.client_titles[n] for n in new.clients]
    dots = Dots("new", "New sites", about, names, metric.label, series, metric.unit)
    return Section("gain", "Gain", "Does it pay for each site?", [dots])


NEW_CLIENTS = Finding(
    file="new_clients.json",
    as_json=lambda new: {"updates": UPDATES, **new._asdict()},
    parse=_parsed,
    indent=1,
    tables=lambda new, run: [new_clients_table(new, run.primary, run.short_names)],
    section=_section,
    summary=lambda new, run: {"new_clients": new._asdict()},
)
