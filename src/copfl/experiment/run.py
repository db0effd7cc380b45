"""One experiment, from settings or values to a result: `copfl.run(...)`."""

import contextlib
import dataclasses
import math
import os
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm
from copfl.core.task import task_of
from copfl.data.federation import Federation
from copfl.data.partition import Partition, hold_out
from copfl.engine import autotune, features, ranks, simulate
from copfl.engine.mapping import renewed
from copfl.engine.rounds import Round, State
from copfl.engine.workers import Workers
from copfl.errors import RunError, UsageError, how_to_set
from copfl.experiment import components, gains, hints, model_tables, new_clients, presets, records, user_code
from copfl.experiment import folder as run_folder
from copfl.experiment.client_models import RECEIVED, TRAINED, ClientModels, InFolder, InMemory, received_model
from copfl.experiment.config import Tables, partition_text
from copfl.experiment.folder import RunFolder
from copfl.experiment.gains import Analysis
from copfl.experiment.progress import expected
from copfl.experiment.result import Experiment as Experiment
from copfl.experiment.result import Result as Result
from copfl.experiment.run_settings import device_of
from copfl.experiment.task_tables import build_task, check_task
from copfl.models import pretrained
from copfl.stats import Numbers
from copfl.wrappers.addons import with_addons

OnRound = Callable[[Round, float], None]  # a round as it ends, and the seconds it took


def prepare(
    layers: Sequence[Tables],
    *,
    algorithm: AnyAlgorithm | None = None,
    data: Any = None,
    model: Any = None,
    partition: Partition | None = None,
    validation: float = 0.0,
    tell: Callable[[str], None] | None = None,
) -> Experiment:
    """The experiment that the tables describe, see `resolve`; a value given here replaces its table.

    Nothing is written, so that what cannot run fails before there is a folder. With `validation`, that
    fraction of each client's training samples replaces its test samples, except in a given partition.
    `tell` gets a line about each step that may take long.
    """
    tell = tell or (lambda line: None)
    data = None if data is None else user_code.as_dataset(data)
    values = {"algorithm": algorithm, "data": data, "model": model, "partition": partition}
    fixed = {kind: value for kind, value in values.items() if value is not None}
    tables, settings, algorithm = components.resolved(layers, fixed)
    torch.set_num_threads(settings.threads)
    device = device_of(settings.device)
    threads, workers = settings.threads, settings.workers
    if workers > 1 and device.type != "cpu":
        cpu = how_to_set("run.device", "cpu", "--device")
        raise UsageError(f"workers={workers} needs {cpu}; a GPU trains all clients in one process")
    if workers > 1 and threads > 1:
        raise UsageError(f"workers={workers} have one thread each; leave out threads={threads}")
    if ranks.joined():
        ranks.check(settings.workers, settings.store, settings.device)
    precision = settings.precision_on(device)
    dataset = components.build_data(tables["data"]) if data is None else data
    dataset.check_test_classes()
    is_large = pretrained.is_pretrained(str(tables["model"].get("name", "")))
    if is_large and getattr(dataset.train.x, "dtype", np.dtype(float)).kind in "UO":
        tell(f"tokenising {len(dataset.train) + len(dataset.test):,} sentences")
    dataset = model_tables.tokenized(dataset, tables["model"])
    tell(hints.padding(dataset, tables["model"].get("max_length", 0)))
    dataset = dataset if settings.augment else dataclasses.replace(dataset, augment=False)
    if partition is None:
        partition = components.build_partition(tables["partition"], dataset, settings)
        if validation:
            partition = hold_out(partition, validation, dataset, settings.seed)
    federation = Federation(dataset, partition, device)
    shape, classes = federation.shape, len(dataset.classes)
    adapter = tables.get("adapter")
    if model is None:
        module = model_tables.build_model(tables["model"], shape, classes, settings.seed, adapter)
    else:
        module = user_code.model_of(model, shape, classes, settings.seed, {})
        module = model_tables.adapted(module, tables["model"], settings.seed, adapter)
    mean, std = getattr(module, "normalization", None) or (dataset.mean, dataset.std)
    criterion, metrics = build_task(tables.get("task", {}), dataset.kind, dataset.target_scale)
    task = task_of(
        module,
        classes,
        criterion=criterion,
        metrics=metrics,
        mean=mean if dataset.mean else (),
        std=std if dataset.std else (),
        head=tables["model"].get("head"),
        buffers=settings.buffers,
        device=device,
        dtype=settings.dtype,
    )
    first = tree.row(federation.train.rows([0]), 0)
    if is_large:
        total = sum(parameter.numel() for parameter in module.parameters())
        tell(f"the model has {total:,} parameters; {task.d:,} are trained and sent")
    task = task.probed(first)
    check_task(tables.get("task", {}), task, first)
    if public := getattr(algorithm, "public", 0):
        task = dataclasses.replace(task, public=federation.unassigned(public))
    own_cut = getattr(algorithm, "cut", "")  # of split learning, which may lie in the front
    algorithm = components.build_wrappers(algorithm, tables, task, federation, settings)
    training = features.training_of(task, federation, "off" if own_cut else settings.cache_features)
    if training.front is not None:
        tell(
            f"the input of {training.front.cut} is computed once for each sample: what comes before is frozen"
        )
    most = autotune.processors() if not workers and threads == 1 and device.type == "cpu" else 1
    sizes = (settings.batch, settings.participants, settings.rounds)
    load = autotune.Workload(algorithm, *training[:2], *sizes, processes=most)
    if is_large and device.type == "cpu":
        tell("timing the engines on a few samples")
    engine = autotune.choose_engine(
        load, engine=settings.engine, chunk=settings.chunk, mkldnn=settings.mkldnn
    )
    if engine.name != "sequential":
        products, own = torch.bfloat16 if precision == "bf16" else None, training.federation.train.rows([0])
        training = training._replace(task=training.task.with_batching(products, tree.row(own, 0)))
        task = training.task if training.front is None else task
    if precision == "bf16" and training.task.batched is None:
        raise UsageError("precision bf16 needs an engine that batches clients, and a model of known layers")
    if not workers and threads == 1:
        states = federation.clients if settings.store == "memory" else 0
        load = load._replace(task=training.task)
        seconds = autotune.total_seconds(load, engine) if device.type == "cpu" else 0.0
        workers = autotune.processes(load, engine, states, seconds)
        estimate = expected(seconds / workers, settings.rounds, workers, settings.local_baseline)
        if estimate or device.type != "cpu":  # of a short run, the table at its end has it
            tell(partition_text(tables))
        tell(estimate)
    settings = dataclasses.replace(
        settings,
        device=str(device),
        engine=engine.name,
        chunk=engine.chunk,
        precision=precision,
        mkldnn="on" if autotune.mkldnn_enabled() else "off",
        workers=workers or 1,
        cache_features="off" if training.front is None else "on",
    )
    tables = {**tables, "run": vars(settings)}
    return Experiment(algorithm, task, federation, engine, settings, tables, training)


EVERYDAY = {  # keyword arguments of `run` that are settings of other tables
    "adapter": ("adapter", "name"),
    "batch_size": ("run", "batch"),
    "epochs": ("algorithm", "epochs"),
    "lr": ("optimizer", "lr"),
    "optimizer": ("optimizer", "name"),
}


def run(
    algorithm: str | AnyAlgorithm = "copfl",
    dataset: Any = "digits",
    *,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    partition: str | Path | Partition | None = None,
    clients: int | None = None,
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    preset: str | None = None,
    **settings: Any,
) -> Result:
    """Trains a federation and returns the result; with `out`, also writes a run folder.

    >>> import copfl
    >>> result = copfl.run("copfl", "digits", rounds=2)
    >>> result.accuracy.shape
    (2, 10)

    A name may be "module:attribute" of your code. Instead of a name you may pass a value: an algorithm, an
    nn.Module or a function of (shape, classes) that makes one, a Partition, and as data a copfl or torch
    Dataset, a pair (train, test) of torch Datasets, arrays (x, y), or a list of such data, one per client.

    `settings` are those of [run] (rounds, seed, batch, ...; see RunSettings), `epochs`, `batch_size`, `lr`
    and `optimizer="adam"` as on the command line, and tables for the rest: `copfl={"rate": 0.1}`,
    `optimizer={"name": "sgd", "momentum": 0.9}`, `partition_options={"per_client": 3}`,
    `model_options={"norm": "batch"}`, `data_options={"severity": 5}`, `task={"metrics": ["auc"]}`,
    `adapter="lora:r=8"`. Of an nn.Module, the parameters with requires_grad=False are not trained.
    `preset="demo"` has the settings of `copfl run` without options; `settings` override a preset.
    """
    tables: Tables = {"run": {} if clients is None else {"clients": clients}}
    values: dict[str, Any] = {}
    if dataset is None:  # such as what a function without a return gave; the digits are not meant
        raise UsageError(f"dataset is None; pass the name of a data set, or {user_code.DATA}")
    given = {"algorithm": algorithm, "data": dataset, "model": model, "partition": partition}
    for name, value in given.items():
        if isinstance(value, str | Path):
            tables[name] = {"name": str(value)}
        elif value is not None:
            values[name] = value
    if data_dir is not None:
        tables.setdefault("data", {})["dir"] = str(data_dir)
    for name, value in settings.items():
        if isinstance(value, Mapping):
            tables.setdefault(name.removesuffix("_options"), {}).update(value)
        else:
            table, key = EVERYDAY.get(name, ("run", name))
            tables.setdefault(table, {})[key] = value
    layers = [tables] if preset is None else [presets.preset(preset), tables]
    experiment = prepare(layers, **values)
    opened = contextlib.nullcontext() if out is None else run_folder.claimed(Path(out), new=True)
    with opened as folder:
        return _warned(train(experiment, folder, on_round))


def resume(
    path: str | Path, *, rounds: int | None = None, on_round: OnRound | None = None, **values: Any
) -> Result:
    """Continues a stopped run, to the same bytes as without the stop.

    Of the values that were passed to `run`, `algorithm` and `model` must be passed again. The folder has the
    data, unless they are larger than half a gigabyte.
    """
    with run_folder.claimed(Path(path), new=False) as folder:
        return _warned(train(reopen(folder, rounds, **values), folder, on_round))


def _warned(result: Result) -> Result:
    for warning in result.warnings:
        warnings.warn(warning, RuntimeWarning, stacklevel=3)
    return result


def reopen(folder: RunFolder, rounds: int | None = None, **values: Any) -> Experiment:
    """The experiment of a run folder; with `rounds`, continued to this many rounds in all."""
    before: Tables = {"run": {"cache_features": "off"}}  # as it was where a folder has no such setting
    layers = [before, folder.tables(), {} if rounds is None else {"run": {"rounds": rounds}}]
    if ranks.joined():
        layers.append({"run": {"workers": 1}})
    experiment = prepare(layers, partition=folder.partition(), **{**folder.values(), **values})
    if rounds is not None and rounds < (done := len(records.read(folder.path / "rounds.jsonl"))):
        raise RunError(f"{folder.path} has {done} rounds already; rounds={rounds} must be at least as many")
    return experiment


def follow() -> None:
    """A rank of torchrun other than 0: it trains its part of the run that rank 0 leads, see `lead`."""
    tables, partition, fingerprints = ranks.announce()
    e = prepare([tables], partition=partition)
    for what, own in e.fingerprints().items():
        if own != fingerprints[what]:
            raise RunError(
                f"the {what} of rank {os.environ['RANK']} are not those of rank 0; every machine needs the "
                "same version of copfl, the same data under --data-dir, and the same code"
            )
    e.training.compute()
    ranks.serve(simulation_of(e))
    alone = _baseline(e) if e.settings.local_baseline else None
    if alone is not None and alone is not e:
        ranks.serve(simulation_of(alone))


def lead(e: Experiment) -> str:
    """Rank 0: tells the other ranks what to train; the result is a warning, or empty."""
    ranks.announce((e.tables, e.federation.partition, e.fingerprints()))
    processes, parts = ranks.started(), math.ceil(e.settings.participants / e.engine.chunk)
    if processes <= parts:
        return ""
    smaller = math.ceil(e.settings.participants / processes)
    return (
        f"{processes - parts} of {processes} processes have nothing to train: the {e.settings.participants} "
        f"clients of a round are trained in {parts} batch(es) of {e.engine.chunk}. With "
        f"--set run.chunk={smaller} each has a batch; the result then differs from this one in rounding"
    )


def train(
    experiment: Experiment,
    folder: RunFolder | None,
    on_round: OnRound | None = None,
    on_baseline_round: OnRound | None = None,
) -> Result:
    """`execute` of a run by itself: if every client diverges, it ends with an error."""
    path = None if folder is None else folder.path
    check = hints.DivergenceCheck(experiment.federation, experiment.settings.rounds, path)

    def after(round: Round, seconds: float) -> None:
        if on_round is not None:
            on_round(round, seconds)
        check(round, seconds)

    result = execute(experiment, folder, after)
    if experiment.settings.local_baseline:
        e = experiment
        cross = gains.cross_evaluation(e.training.task, e.training.federation, result.client_model)
        result.analysis = Analysis(_alone(result, on_baseline_round), cross)
        if path is not None:
            gains.write(result.analysis, path)
    return result


def _alone(result: Result, on_round: OnRound | None) -> Numbers:
    """The primary metric of each client at its last evaluation, trained alone on the same batches.

    With the algorithm's optimizer, number of epochs and training add-ons; nan if it has no optimizer. It is a
    run of its own in the folder baseline/, so that it continues where it was stopped.
    """
    e, primary = result.experiment, result.primary.name
    alone = _baseline(e)
    if alone is e:
        return result.latest(primary)
    if alone is None:
        return np.full(e.clients, np.nan)
    folder = None if result.folder is None else RunFolder(result.folder / run_folder.BASELINE)
    return train_rounds(alone, folder, on_round).latest(primary)


def _baseline(e: Experiment) -> Experiment | None:
    """The experiment in which each client trains alone; None if the algorithm has no optimizer for it."""
    local = new_clients.local_baseline(e.algorithm)
    if local is None:
        return None
    settings = dataclasses.replace(e.settings, eval_models="final")
    tables = {title: table for title, table in e.tables.items() if title not in components.WRAPPERS}
    tables |= {"algorithm": {"name": "local", "epochs": local.epochs}, "run": vars(settings)}
    algorithm: AnyAlgorithm = local
    if "addons" in e.tables:
        tables["addons"] = {**e.tables["addons"], "server_momentum": 0.0}  # it has no server
        algorithm = with_addons(local, **tables["addons"])
    if algorithm == e.algorithm:
        return e
    return dataclasses.replace(
        e, algorithm=algorithm, engine=renewed(e.engine), settings=settings, tables=tables
    )


def execute(
    experiment: Experiment,
    folder: RunFolder | None,
    on_round: OnRound | None = None,
    executor: simulate.Executor | None = None,
) -> Result:
    """Trains the rounds that are left, fits the new clients, and keeps every client's model."""
    e, settings, models = experiment, experiment.settings, _models(experiment, folder)
    result = train_rounds(e, folder, on_round, executor, models)
    if settings.new_clients and e.federation.partition.test_from == "test":  # not while tuning
        simulation, clients = simulation_of(e), settings.split_clients
        result.new_clients = new_clients.fitted(simulation, result.state, *clients, models)
        if folder is not None:
            new_clients.write(result.new_clients, folder.path)
    if models is not None:
        for n in filter(models.wanted, range(e.clients)):
            if models.stage(n) != TRAINED:  # it was never evaluated, or diverged
                models.put(n, received_model(e.algorithm, e.task, result.state, n), RECEIVED)
        if isinstance(models, InFolder):
            result.write_bundles(models)
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
) -> Result:
    """Trains the rounds that are left and writes each to the folder; an `executor` trains the clients.

    `models` gets each client's model of its last evaluation.
    """
    settings = e.settings
    if settings.store == "disk" and folder is None:
        raise UsageError("store=disk keeps the client states in the run folder; name one with out=...")
    disk = folder.states if folder is not None and settings.store == "disk" else None
    state = simulate.begin(e.algorithm, e.task, e.clients, disk)
    result = Result(e, [], state, None if folder is None else folder.path, models=models)
    fingerprints = {} if folder is None else e.fingerprints()
    if folder is not None and folder.begun:
        result.records, result.seconds = folder.restore(state, fingerprints, e.contents)
        folder.write_tables(e.tables)  # the number of rounds or the device may be new
    elif folder is not None:
        folder.begin(e.tables, e.federation.partition, e.about())
    clock = time.perf_counter()
    with contextlib.closing(_rounds(e, state, executor, models)) as rounds:
        for round in rounds:
            seconds, clock = time.perf_counter() - clock, time.perf_counter()
            result.records.append(records.as_record(round))
            result.seconds.append(seconds)
            if folder is not None:
                folder.append(result.records[-1], seconds)
                if state.round % settings.checkpoint_every == 0 or state.round == settings.rounds:
                    folder.checkpoint(state, fingerprints)
            if on_round is not None:
                on_round(round, seconds)
    return result


def simulation_of(e: Experiment) -> simulate.Simulation:
    """The part of the experiment that an executor needs."""
    task, federation = e.training[:2]
    return simulate.Simulation(e.algorithm, task, federation, e.engine, e.settings.seed, e.settings.batch)


def _rounds(
    e: Experiment, state: State, executor: simulate.Executor | None, models: ClientModels | None
) -> Generator[Round, None, None]:
    settings = e.settings
    e.training.compute()
    opened: contextlib.AbstractContextManager[simulate.Executor | None] = contextlib.nullcontext(executor)
    if ranks.joined():
        opened = ranks.Ranks(simulation_of(e), state)
    elif settings.workers > 1 and state.round < settings.rounds and executor is None:
        opened = Workers(simulation_of(e), state, settings.workers)
    with opened as executor:
        yield from simulate.simulate(
            e.algorithm,
            e.training.task,
            e.training.federation,
            e.engine,
            state,
            rounds=settings.rounds,
            seed=settings.seed,
            batch=settings.batch,
            participation=settings.participation,
            eval_every=settings.eval_every,
            eval_models=settings.eval_models,
            population=settings.split_clients[0],
            executor=executor,
            models=models,
        )
