"""Training alone at a node: its model without the federation, on the same batches. It stays at the node.

`report` calls it, after the training and without the server: so a site learns whether it gained.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from copfl.core import tree
from copfl.core.algorithm import example_output, received
from copfl.core.evaluation import EVAL_MODELS, predicted
from copfl.core.task import Personal
from copfl.data.samples import NEXT_TOKEN
from copfl.errors import RunError
from copfl.experiment.analysis.gains import constant_answer
from copfl.experiment.models.new_clients import alone_of
from copfl.federation.node.data import NodeData
from copfl.federation.node.evaluation import MeasuredModels, is_best, measure, validation_score
from copfl.federation.node.site import Measurement, SiteGain
from copfl.federation.node.update import plan_of
from copfl.federation.protocol.settings import TrainingSettings
from copfl.stats import over_samples
from copfl.wire import Head

Tell = Callable[[int], None]  # a round, from 1, when it ends


class TrainedAlone(NamedTuple):
    """A node's model that was trained alone."""

    model: Personal
    round: int  # the one that it is of, from 1
    scores: MeasuredModels  # of the model
    rounds: list[tuple[int, MeasuredModels]]  # the rounds, from 0


def train_alone(
    settings: TrainingSettings, data: NodeData, client: int, rounds: Sequence[Measurement], tell: Tell
) -> TrainedAlone:
    """The client as the simulation's baseline trains it: in these rounds, on their batches, with their tests.

    Args:
        settings: The federation's.
        data: The node's.
        client: Its number.
        rounds: Those in which it took part.
        tell: Called after each round.
    """
    algorithm, task, run = alone_of(settings.algorithm, settings.run.addons), data.task, settings.run.run
    if algorithm is None:
        raise RunError(f"{settings.run.algorithm.name} has no optimizer to train alone with")
    number, clients = torch.tensor(client, device=task.device), settings.federation.clients
    evaluated = {noted.round: bool(noted.metrics) for noted in rounds}
    server, record = algorithm.server_init(task, clients), algorithm.client_init(task)
    blank = example_output(algorithm, task, data.train, settings.federation.augment, clients).upload
    nothing = tree.each(torch.zeros_like, algorithm.summand(task, server, number, blank))
    best: TrainedAlone | None = None
    measured_rounds: list[tuple[int, MeasuredModels]] = []
    with torch.no_grad():
        for round in range(max(evaluated)):
            if round + 1 in evaluated:
                down = received(algorithm, server, number)
                head = Head("down", "", settings.layout, round, client)
                batches = plan_of(settings, algorithm, record, head, data)
                output = algorithm.client_update(task, record, down, data.train, batches)
                scores = MeasuredModels({}, {})
                if tree.finite((output.client, output.upload)):  # else it keeps its state, as in a simulation
                    if evaluated[round + 1]:
                        models = record, down, output.client, output.trained
                        splits = data.test, data.validation
                        scores = measure(algorithm, task, *models, *splits, EVAL_MODELS["final"])
                        before = validation_score(task.metrics[0], best.scores if best else None)
                        if run.select == "last" or is_best(task.metrics[0], scores, before):
                            best = TrainedAlone(output.trained, round + 1, scores, [])
                    record = output.client
                measured_rounds.append((round, scores))
                tell(round + 1)
            server, _ = algorithm.server_update(task, server, nothing)
    if best is None:
        raise RunError("training alone gave no model that could be evaluated; its training diverged")
    return best._replace(rounds=measured_rounds)


def gain_of(data: NodeData, federated: Personal, alone: TrainedAlone) -> SiteGain:
    """The gain over training alone and over a constant answer, with intervals over the node's test samples.

    Args:
        data: The node's.
        federated: The node's model of the federation.
        alone: The one that was trained alone.
    """
    task, metric = data.task, data.task.metrics[0]
    with torch.no_grad():
        (ours, y), (theirs, _) = (predicted(task, model, data.test) for model in (federated, alone.model))

    def gain(others: NDArray[Any], drawn: Any) -> float:
        our_value, other = (np.asarray(metric.of(outputs[drawn], y[drawn])) for outputs in (ours, others))
        return float(metric.gain(our_value, other))

    values = metric.of(ours, y), metric.of(theirs, y)
    interval = over_samples(partial(gain, theirs), len(y))
    over_alone = SiteGain(len(y), *values, alone.round, gain(theirs, slice(None)), interval)
    training_targets = data.train.y[: int(data.train.size)].cpu().numpy()
    if task.criterion.kind == NEXT_TOKEN or not len(training_targets):
        return over_alone
    answer = constant_answer(task.criterion.kind, task.classes, training_targets)
    constant = np.repeat(answer[None], len(y), axis=0)
    over_constant = over_samples(partial(gain, constant), len(y))
    return over_alone._replace(constant=metric.of(constant, y), over_constant=over_constant)
