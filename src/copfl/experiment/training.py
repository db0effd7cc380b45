"""The training of one experiment: its rounds, new clients, clients' models, and the training alone.

`train` is a run by itself; a comparison calls `execute`, which trains no baseline.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from copfl.core import tree
from copfl.core.algorithm import trained_alone
from copfl.core.evaluation import predicted
from copfl.core.selection import BestRounds, has_ended
from copfl.data.samples import NEXT_TOKEN
from copfl.data.sets.datasets import DATASETS
from copfl.engine import ranks, simulate
from copfl.engine.halves import ClientHalves
from copfl.engine.mapping import renewed
from copfl.engine.rounds import ModelKeeper, Round, State
from copfl.engine.workers import Workers
from copfl.errors import UsageError
from copfl.experiment import final, progress, records
from copfl.experiment import folder as run_folder
from copfl.experiment.analysis import evidence, gains, hints
from copfl.experiment.analysis.against_rivals import RIVALS
from copfl.experiment.analysis.gains import GAINS, Analysis
from copfl.experiment.bundle import known_rows
from copfl.experiment.experiment import Experiment
from copfl.experiment.final import FINAL
from copfl.experiment.finding import Finding, Trained
from copfl.experiment.folder import RunFolder
from copfl.experiment.models import new_clients
from copfl.experiment.models.client_models import (
    RECEIVED,
    TRAINED,
    ClientModels,
    InFolder,
    InMemory,
    received_model,
)
from copfl.experiment.models.new_clients import NEW_CLIENTS
from copfl.experiment.own_models import kinds_of
from copfl.experiment.result import Result
from copfl.experiment.rivals import SLOW_INTERVALS, rivals_of
from copfl.experiment.run_record import FINDINGS
from copfl.experiment.verdict import CHECK, check_of
from copfl.rivals.effort import MOST_SITES
from copfl.rivals.paired import gain_interval, is_fast
from copfl.settings import schema
from copfl.settings.checking import options_of
from copfl.settings.components import WRAPPERS
from copfl.settings.schema import KINDS
from copfl.stats import Interval, Numbers

OnRound = Callable[[Round, float], None]  # a round as it ends, and the seconds it took
Given = Mapping[Finding[Any], Any]  # what was found before the rounds
NOTHING: Given = MappingProxyType({})
logger = logging.getLogger(__name__)


def train(
    experiment: Experiment,
    folder: RunFolder | None,
    on_round: OnRound | None = None,
    on_baseline_round: OnRound | None = None,
    given: Given = NOTHING,
) -> Result:
    """`execute` of a run by itself, the training alone and the rivals: if every client diverges, an error.

    Args:
        experiment: What is trained.
        folder: Where it is stored; None: nowhere.
        on_round: Is called after every round.
        on_baseline_round: Is called after every round of the training alone.
        given: What was found before the rounds, such as why this is trained; a folder that goes on says it itself.
    """
    path = None if folder is None else folder.path
    rounds, server = experiment.settings.rounds, experiment.server_step
    check = hints.DivergenceCheck(experiment.federation, rounds, path, server)
    told = progress.lines(rounds, experiment.task.metrics[0], rounds_alone(experiment))
    after = _each(told.on_round, on_round, check)
    result = execute(experiment, folder, after, given=given)
    if experiment.settings.local_baseline:
        e = experiment
        compared = gains.compared(e.clients)
        logger.debug(f"comparing {len(compared)} models ...")
        cross = gains.cross_evaluation(e.training.task, e.training.federation, result.client_model, compared)
        logger.debug("training alone ...")
        constant = gains.constant_answers(e.federation, e.task.metrics[0])
        alone, trained = _alone(result, _each(told.on_round_alone, on_baseline_round))
        intervals = () if trained is None else _intervals(result, trained, alone)
        GAINS.keep(result, Analysis(alone, cross, constant, intervals))
    if experiment.settings.rivals:
        own = kinds_of(experiment.settings.own_models, experiment.clients)
        RIVALS.keep(result, rivals_of(experiment, result.kept_model, own))
        if result.verdict is not None:
            CHECK.keep(result, check_of(experiment, result.verdict, result.kept_model, own))
    return result


def _each(*listeners: OnRound | None) -> OnRound:
    """Calls all of them after a round."""

    def after(round: Round, seconds: float) -> None:
        for listener in filter(None, listeners):
            listener(round, seconds)

    return after


def rounds_alone(e: Experiment) -> int:
    """The rounds of training alone that follow the run's."""
    alone = baseline_of(e) if e.settings.local_baseline else None
    return 0 if alone is None or alone is e else alone.settings.rounds


def _alone(result: Result, on_round: OnRound | None) -> tuple[Numbers, Result | None]:
    """The primary metric of each client at its last evaluation, trained alone on the same batches, and that training.

    With the algorithm's optimizer, number of epochs and training add-ons; nan if it has no optimizer, and of a
    client that was in no round. It is a run of its own in the folder baseline/, so that it continues where it was
    stopped.
    """
    e, primary = result.experiment, result.primary.name
    alone = baseline_of(e)
    if alone is None:
        return np.full(e.clients, np.nan), None
    trained = result
    if alone is not e:
        folder = None if result.folder is None else RunFolder(result.folder / run_folder.BASELINE)
        trained = train_rounds(alone, folder, on_round)
    values = trained.final(primary).copy()
    if trained.final_evaluation is not None:
        values[trained.final_evaluation.never_trained] = np.nan
    return values, trained


def _intervals(result: Result, alone: Result, values: Numbers) -> list[Interval]:
    """Of each client's gain over training alone, over its test samples; nan where it has none.

    The models trained alone are those of the state after the last round: a client whose value is of another round
    has no interval.

    Args:
        result: Of the federation, with the clients' models.
        alone: The training alone.
        values: The primary metric of the clients alone.
    """
    e, metric = result.experiment, result.primary
    found, measured = [Interval(math.nan, math.nan)] * e.clients, 0
    if alone is result or e.clients > MOST_SITES or e.task.criterion.kind == NEXT_TOKEN:
        return found
    (our_task, our_data), (their_task, their_data) = e.training[:2], alone.experiment.training[:2]
    ours_at_end = result.final(metric.name)
    for n in np.flatnonzero(np.isfinite(values) & np.isfinite(ours_at_end)).tolist():
        if (kept := result.kept_model(n)) is None:
            continue
        theirs = received_model(alone.experiment.algorithm, their_task, alone.state, n)
        ours, y = predicted(our_task, kept, tree.row(our_data.test.rows([n]), 0))
        others, _ = predicted(their_task, theirs, tree.row(their_data.test.rows([n]), 0))
        measured_here = [metric.of(ours, y), metric.of(others, y)]
        is_same = np.allclose(measured_here, [ours_at_end[n], values[n]], rtol=1e-4, atol=1e-6)
        if is_same and (is_fast(metric, y) or measured < SLOW_INTERVALS):
            found[n] = gain_interval(metric, ours, others, y)
            measured += 1
    return found


def baseline_of(e: Experiment) -> Experiment | None:
    """The experiment in which each client trains alone; None if the algorithm has no optimizer for it."""
    algorithm = new_clients.alone_of(e.algorithm, e.run.addons)
    if algorithm is None:
        return None
    rounds = e.settings.rounds_alone or e.settings.rounds
    settings = dataclasses.replace(e.settings, eval_models="final", benefit=False, rounds=rounds)
    none = {kind: KINDS[kind]() for kind in WRAPPERS}
    chosen = schema.Algorithm(name="local", epochs=algorithm.total_epochs)
    if (own := trained_alone(e.algorithm)) is not None:
        chosen = e.run.algorithm.with_arguments({**e.run.algorithm.arguments, **options_of(own)})
    run = dataclasses.replace(e.run, **{**none, "addons": e.run.addons}, algorithm=chosen, run=settings)
    if algorithm == e.algorithm:
        return e
    return dataclasses.replace(e, algorithm=algorithm, engine=renewed(e.engine), run=run)


def execute(
    experiment: Experiment,
    folder: RunFolder | None,
    on_round: OnRound | None = None,
    executor: simulate.Executor | None = None,
    given: Given = NOTHING,
) -> Result:
    """Trains the rounds that are left, fits the new clients, and keeps every client's model.

    Args:
        experiment: What is trained.
        folder: Where it is stored; None: nowhere.
        on_round: Is called after every round.
        executor: Trains the clients; None: what suits the settings.
        given: As of `train`.
    """
    e, settings, models = experiment, experiment.settings, _models(experiment, folder)
    result = train_rounds(e, folder, on_round, executor, models, given)
    if settings.new_clients and e.federation.partition.test_from == "test":  # not while tuning
        simulation, clients = simulation_of(e), settings.split_clients
        logger.debug(f"fitting {len(clients[1])} new clients ...")
        NEW_CLIENTS.keep(result, new_clients.fitted(simulation, result.state, *clients, models))
    if models is not None:
        logger.debug(f"saving {e.clients} models ...")
        models.settle(result.state.round)
        for n in filter(models.wanted, range(e.clients)):
            stage = models.stage(n)
            if stage is None or stage.name != TRAINED:  # it was never evaluated, or diverged
                received = received_model(e.algorithm, e.task, result.state, n)
                models.put(n, received, result.state.round, RECEIVED)
        models.settle(result.state.round)
        trained = Trained(settings, *e.training[:2], e.federation.dataset, result.state, models, result)
        for finding in FINDINGS:
            if finding.measured is not None:
                finding.keep(result, finding.measured(trained))
        if isinstance(models, InFolder):
            result.write_bundles(models)
            if folder is not None and e.run.data.name not in DATASETS:
                known_rows.write(folder.path, e.federation, result.client_names)
    return result


def _models(e: Experiment, folder: RunFolder | None) -> ClientModels | None:
    """Where the models of the run are kept; None: nowhere."""
    if e.settings.save_models and (folder is None or folder.keeps_models):
        return InMemory() if folder is None else folder.models(e.task)
    return InMemory(gains.compared(e.clients)) if e.settings.local_baseline else None


def train_rounds(
    e: Experiment,
    folder: RunFolder | None,
    on_round: OnRound | None = None,
    executor: simulate.Executor | None = None,
    models: ClientModels | None = None,
    given: Given = NOTHING,
) -> Result:
    """Trains the rounds that are left and writes each to the folder; then who was in none is evaluated.

    `models` gets each client's model of its last evaluation, or of its best with run.select="best".

    Args:
        e: What is trained.
        folder: Where it is stored; None: nowhere.
        on_round: Is called after every round.
        executor: Trains the clients; None: what suits the settings.
        models: Gets each client's model of its last evaluation, or of its best with run.select="best".
        given: As of `train`.
    """
    settings = e.settings
    if settings.store == "disk" and folder is None:
        raise UsageError("store=disk keeps the client states in the run folder; name one with out=...")
    disk = folder.states if folder is not None and settings.store == "disk" else None
    state = simulate.begin(e.algorithm, e.task, e.clients, disk)
    result = Result(
        tables=e.run.tables(),
        environment=e.about(),
        partition=e.federation.partition,
        folder=None if folder is None else folder.path,
        experiment=e,
        state=state,
        kept=models,
    )
    fingerprints = {} if folder is None else e.fingerprints()
    if folder is not None and folder.begun:
        result.records, result.seconds = folder.restore(state, fingerprints)
        if models is not None:
            models.settle(state.round)
        folder.write_tables(result.tables)  # the number of rounds or the device may be new
    elif folder is not None:
        folder.begin(result.tables, result.partition, result.environment)
    for finding in FINDINGS:
        if finding in given:
            finding.keep(result, given[finding])
        elif finding.given and folder is not None:
            finding.__set__(result, finding.read(folder.path))
    primary = e.task.metrics[0]
    best = records.best_rounds(result.records, primary, e.clients) if settings.select == "best" else None
    clock = time.perf_counter()
    decides, trained = evidence.weighs(e.algorithm), len(settings.split_clients[0])
    with contextlib.ExitStack() as stack:
        loop = rounds_left(e, stack, state, executor, models, best)
        for round in stack.enter_context(contextlib.closing(loop)):
            seconds, clock = time.perf_counter() - clock, time.perf_counter()
            result.records.append(records.as_record(round))
            result.seconds.append(seconds)
            if decides and evidence.looks(state.round, trained):
                state.server = evidence.reweighted(e.algorithm, state.server, result.records, e.clients)
            if folder is not None:
                folder.append(result.records[-1], seconds)
                is_last = has_ended(state.round, settings.rounds, best, settings.patience)
                if is_last or state.round % settings.checkpoint_every == 0:
                    folder.checkpoint(state, fingerprints)
                    if models is not None:
                        models.settle(state.round)
            if on_round is not None:
                on_round(round, seconds)
    # Here, where all records are in this process again.
    FINAL.keep(result, final.evaluated(simulation_of(e), state, settings, result.records))
    return result


def rounds_left(
    e: Experiment,
    stack: contextlib.ExitStack,
    state: State | None = None,
    executor: simulate.Executor | None = None,
    models: ModelKeeper | None = None,
    best: BestRounds | None = None,
    models_of_all: bool = False,
) -> Generator[Round, None, None]:
    """The rounds of an experiment that are left, as they end.

    Args:
        e: The experiment.
        stack: Ends the processes that train the rounds.
        state: Where they begin, which changes with each round; None: before the first round.
        executor: Trains the clients; None: what suits the settings.
        models: Gets each client's model of its last evaluation, or of its best one.
        best: The best rounds of the clients so far, where the best one counts; it decides when to stop.
        models_of_all: `models` gets those of all evaluations instead, for a caller that may end before the last one.
    """
    settings, simulation = e.settings, simulation_of(e)
    if state is None:
        state = simulate.begin(e.algorithm, e.task, e.clients)
    e.training.compute()
    return simulate.simulate(
        simulation,
        state,
        rounds=settings.rounds,
        participation=settings.participation,
        eval_every=settings.eval_every,
        eval_models=settings.eval_models,
        population=settings.split_clients[0],
        executor=stack.enter_context(executor_of(simulation, state, settings, executor)),
        models=models,
        models_of_all=models_of_all,
        best=best,
        patience=settings.patience,
    )


def simulation_of(e: Experiment) -> simulate.Simulation:
    """The part of the experiment that an executor needs."""
    task, federation = e.training[:2]
    settings = e.settings
    halves = ClientHalves(settings.split_clients[0], settings.participants) if settings.benefit else None
    return simulate.Simulation(e.algorithm, task, federation, e.engine, settings.seed, settings.batch, halves)


def executor_of(
    simulation: simulate.Simulation,
    state: State,
    settings: schema.RunSettings,
    executor: simulate.Executor | None,
) -> contextlib.AbstractContextManager[simulate.Executor | None]:
    """What trains the clients: the ranks of torchrun, several processes, or this one (None).

    Args:
        simulation: What is the same in every round.
        state: Where the rounds begin.
        settings: Of the run.
        executor: That the caller has; None: it has none.
    """
    if ranks.joined():
        return ranks.Ranks(simulation, state)
    if settings.workers > 1 and state.round < settings.rounds and executor is None:
        return Workers(simulation, state, settings.workers)
    return contextlib.nullcontext(executor)
