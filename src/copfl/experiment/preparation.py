"""The steps from the settings of a run to the values that train: each is a function of typed values.

`prepare` is the one way from a `Run` to an `Experiment`: of runs, comparisons, audits and the bench.
"""

import dataclasses
import logging
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, example_output, traits
from copfl.core.layout import Layout
from copfl.core.task import Data, Task
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition, hold_out, of_indices, with_validation
from copfl.data.samples import CLASSIFICATION, REGRESSION, SURVIVAL, Dataset
from copfl.data.tables.tables import learned_from
from copfl.engine import autotune, features, ranks
from copfl.engine.features import TrainedPart
from copfl.engine.machine import processors
from copfl.engine.mapping import Mapping as Engine
from copfl.errors import DataError, UsageError, how_to_set, option
from copfl.experiment import own_models, rivals
from copfl.experiment.analysis import hints
from copfl.experiment.analysis.halves import check_benefit, check_evidence
from copfl.experiment.experiment import Experiment
from copfl.experiment.models.network import build_model, tokenized
from copfl.experiment.progress import expected
from copfl.experiment.tasks import check_task, learned_task, with_intervals
from copfl.models import MODELS, pretrained
from copfl.settings.checking import SettingError
from copfl.settings.components import WRAPPERS, build
from copfl.settings.data import data_of
from copfl.settings.schema import Run, RunSettings
from copfl.wrappers.even_batches import with_even_batches
from copfl.wrappers.local_steps import with_local_steps
from copfl.wrappers.privacy import check_sums

logger = logging.getLogger(__name__)
of_device = logging.getLogger("copfl.device")  # a comparison tells of its device, too, and not of each run


def prepare(run: Run, *, validation: float = 0.0) -> Experiment:
    """The experiment that a complete record describes.

    Nothing is written, so that what cannot run fails before there is a folder.

    Args:
        run: The settings, see `copfl.settings.complete`.
        validation: Fraction of each client's training samples that replaces its test samples, except in a
            partition that the record has as a value.
    """
    run = on_device(run)
    device = computing(run.run)
    samples = dataset(run)
    parts = partition(run, samples, validation)
    samples = without_held_out(samples, parts)
    clients = FederatedData(samples, parts, device)
    if run.run.select == "best":
        held_out = f"{run.run.validation:g} of each client's training samples is for validation"
        logger.info(f"{held_out}, which chooses its best round; {option('validation')} sets the fraction")
    outputs, seed = len(samples.classes), run.run.seed
    module = build_model(run.model, run.adapter, clients.shape, outputs, seed, samples.kind)
    made = build("algorithm", run.algorithm, optimizer=run.optimizer)
    learned = task(run, module, clients, made)
    wrapped = algorithm(run, made, learned, clients)
    check_evidence(run)
    if run.run.benefit:
        if ranks.joined():
            raise UsageError(
                "run.benefit=true needs one process or run.workers; torchrun has no halves of the uploads"
            )
        first = tree.row(clients.train.rows([0]), 0)
        example = example_output(wrapped, learned, first, clients.dataset.augment, clients.clients)
        check_benefit(run, wrapped, learned, example, clients.clients)
    computed = engine(run, wrapped, learned, clients)
    run = dataclasses.replace(run, run=computed.settings)
    experiment = Experiment(wrapped, computed.task, clients, computed.engine, run, computed.training)
    if run.run.own_models:
        experiment = own_models.with_own_models(experiment)
    planned = rivals.plan_of(experiment) if run.run.rivals else None
    if (
        planned is not None
        and planned.effort.seconds >= rivals.SAID
        and not rivals.are_known(experiment, planned)
    ):
        logger.info(f"after the rounds, {planned.text}")
    return experiment


def on_device(run: Run) -> Run:
    """The run with its device named: of "auto" the GPU if there is one and the rounds take less time on it.

    The CPU's time is estimated first. Where it is not much more than a GPU takes to begin, that decides; else local
    updates are timed on both. A search for the rounds looks at their largest number, so its time is that too.

    Args:
        run: The settings.
    """

    def on(device: str) -> Run:
        return dataclasses.replace(run, run=dataclasses.replace(run.run, device=device))

    if run.run.device != "auto":
        return run
    one_of_several = ranks.joined() and torch.cuda.is_available()  # each with a GPU: nothing is compared
    if one_of_several:
        return on("cuda")
    if not torch.cuda.is_available() or run.run.workers > 1 or run.run.threads > 1:
        return on("cpu")
    quiet = dataclasses.replace(run.run, rivals=False, device="cpu")
    seconds = {"cpu": autotune.total_seconds(*_load_of(dataclasses.replace(run, run=quiet)))}
    if seconds["cpu"] > WORTH_A_GPU:
        quiet = dataclasses.replace(quiet, device="cuda")
        seconds["cuda"] = autotune.gpu_seconds(*_load_of(dataclasses.replace(run, run=quiet)))
    device = min(seconds, key=lambda name: seconds[name])
    times = " and ".join(f"{value:.0f} s on {name}" for name, value in seconds.items())
    of_device.info(f"device {device}: the rounds take about {times}, at most; --device names one")
    return on(device)


WORTH_A_GPU = 10.0  # seconds on the CPU: a GPU takes as long to begin, to compile its kernels and to record


def _load_of(run: Run) -> tuple[autotune.Workload, Engine]:
    """The local updates of a run, and their engine."""
    e = prepare(run)
    e.training.compute()
    settings = e.settings
    sizes = (settings.batch, settings.participants, settings.rounds)
    return autotune.Workload(e.algorithm, *e.training[:2], *sizes), e.engine


def computing(settings: RunSettings) -> torch.device:
    """The device, with the number of threads and the precision set up in torch."""
    torch.set_num_threads(settings.threads)
    device = device_of(settings.device)
    if settings.workers > 1 and device.type != "cpu":
        raise SettingError(
            "run.workers",
            settings.workers,
            f"needs {how_to_set('run.device', 'cpu', '--device')}; a GPU trains all clients in one process",
        )
    if settings.workers > 1 and settings.threads > 1:
        raise SettingError(
            "run.workers", settings.workers, f"have one thread each; leave out threads={settings.threads}"
        )
    if ranks.joined():
        ranks.check(settings.workers, settings.store, settings.device)
    precision = precision_on(device, settings.precision)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    return device


def device_of(name: str) -> torch.device:
    """The device by its name, if this machine has it; "auto" is the GPU where there is one, see `on_device`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingError("run.device", name, "is unknown; use cpu, cuda, cuda:N or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise SettingError("run.device", name, "is not supported; use cpu, cuda, cuda:N or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        cpu = how_to_set("run.device", "cpu", "--device")
        raise SettingError("run.device", name, f"needs a CUDA GPU and a CUDA build of PyTorch; use {cpu}")
    return device


def precision_on(device: torch.device, precision: str) -> str:
    """The precision, with "auto" decided.

    Args:
        device: Where the run trains.
        precision: As it was set.
    """
    usual = "tf32" if device.type == "cuda" else "fp32"
    return usual if precision == "auto" else precision


def dataset(run: Run) -> Dataset:
    """The samples, with token numbers in place of sentences.

    Args:
        run: The settings.
    """
    samples = data_of(run.data)
    samples.check_test_classes()
    if samples.kind == CLASSIFICATION and len(samples.classes) < 2:
        raise DataError(
            f'all samples of "{samples.name}" are of one class, {samples.classes[0]}, so there is nothing to '
            "learn: is it the right target?"
        )
    if samples.kind == REGRESSION and not np.ptp(samples.train.y, axis=0).any():
        raise DataError(
            f'all training samples of "{samples.name}" have the same value, so there is nothing to learn: is it '
            "the right target?"
        )
    if samples.kind == SURVIVAL and not samples.train.y[:, 1].any():
        raise DataError(
            f'no training sample of "{samples.name}" has the event: all times are censored, so there is nothing to '
            "learn: is the column of the event the right one?"
        )
    samples = with_intervals(samples, run.task)
    is_text = getattr(samples.train.x, "dtype", np.dtype(float)).kind in "UO"
    if is_text and pretrained.is_pretrained(run.model.name):
        logger.info(f"tokenising {len(samples.train) + len(samples.test):,} sentences")
    samples = tokenized(samples, run.model)
    # The tokens of the model words are no sequence: more of them are pairs than words.
    if run.model.name != "words" and (much_padding := hints.padding(samples, run.model.max_length or 0)):
        logger.info(much_padding)
    return samples if run.run.augment else dataclasses.replace(samples, augment=False)


def partition(run: Run, samples: Dataset, validation: float = 0.0) -> Partition:
    """The samples of each client: by a scheme, a file or a value; with validation samples if asked for.

    Args:
        run: The settings.
        samples: The data set.
        validation: The fraction of each client's training samples that is tested on; 0: none.
    """
    chosen, settings = run.partition, run.run
    if chosen.value is not None:
        parts: Partition = chosen.value
    elif chosen.name.endswith(".json"):
        parts = Partition.load(chosen.name)
    else:
        made = build("partition", chosen, dataset=samples, clients=settings.clients, seed=settings.seed)
        parts = of_indices(made, f"what {chosen.name} returned")
    if validation and chosen.value is None:
        parts = hold_out(parts, validation, samples, settings.seed)
    if settings.validation and not parts.validation:  # a run that goes on has them
        parts = with_validation(parts, settings.validation, samples, settings.seed)
    return parts


def without_held_out(samples: Dataset, parts: Partition) -> Dataset:
    """The data set whose encoders and scales are learned of the samples that train; unchanged where none is held out.

    Args:
        samples: The data set.
        parts: The samples of each client.
    """
    if not parts.validation and parts.test_from == "test":
        return samples
    return learned_from(samples, np.unique(np.concatenate(parts.train)))


def data_set_of(run: Run) -> Dataset:
    """The data set as a training of the run has it, with texts as they are.

    Args:
        run: The settings.
    """
    samples = data_of(run.data)
    return without_held_out(samples, partition(run, samples)) if run.run.validation else samples


def task(run: Run, module: nn.Module, clients: FederatedData, algorithm: AnyAlgorithm) -> Task:
    """What every client learns, tried on two samples.

    Args:
        run: The settings.
        module: The network.
        clients: Their samples.
        algorithm: What they train with.
    """
    samples = clients.dataset
    channels, device = (samples.mean, samples.std), clients.train.y.device
    learned = learned_task(
        run, module, samples.kind, len(samples.classes), channels, samples.target_scale, device
    )
    if pretrained.is_pretrained(run.model.name):
        total = sum(parameter.numel() for parameter in module.parameters())
        logger.info(f"the model has {total:,} parameters; {learned.d:,} are trained and sent")
    first = tree.row(clients.train.rows([0]), 0)
    learned = learned.without_constants(first).probed(first)
    check_task(run.task, learned, first)
    if public := traits(algorithm).public:
        learned = dataclasses.replace(learned, public=clients.unassigned(public))
    return learned


def algorithm(run: Run, inner: AnyAlgorithm, task: Task, clients: FederatedData) -> AnyAlgorithm:
    """The algorithm in its wrappers: local steps, add-ons, robust aggregation, private uploads, simulated attacks.

    Args:
        run: The settings.
        inner: The algorithm without wrappers.
        task: What the clients learn.
        clients: Their samples.
    """
    inner = with_local_steps(with_even_batches(inner, run.run.even_batches), run.run.steps)
    given = [kind for kind in WRAPPERS if getattr(run, kind)]
    if not given:
        return inner
    autotune.check_fit(task, clients)  # before the examples below
    settings, augment = run.run, clients.dataset.augment
    samples = tree.row(clients.train.rows([0]), 0)
    trained = settings.split_clients[0]
    context: dict[str, dict[str, Any]] = {
        "privacy": {"clients": len(trained), "taking_part": settings.participants, "seed": settings.seed},
        # A new client is honest.
        "attack": {"clients": trained, "seed": settings.seed, "attack": run.attack.name},
    }
    wrapped = inner
    for kind in given:
        if kind == "privacy":
            check_sums(wrapped, task, example_output(wrapped, task, samples, augment, 2).upload)
        wrapped = build(kind, getattr(run, kind), algorithm=wrapped, **context.get(kind, {}))
    # One server update on an example, so that wrappers that do not fit fail before the run.
    upload = example_output(wrapped, task, samples, augment, clients.clients).upload
    server = wrapped.server_init(task, clients.clients)
    with torch.no_grad():
        total = wrapped.summand(task, server, torch.tensor(0, device=task.device), upload)
        wrapped.server_update(task, server, total)
    return wrapped


class Computed(NamedTuple):
    """How the rounds are computed."""

    engine: Engine
    training: TrainedPart
    task: Task  # with the model that this engine trains
    settings: RunSettings  # with every "auto" decided


def _with_batching(task: Task, products: torch.dtype | None, data: Data) -> Task:
    """The task with a model for batched clients, where it computes the same on these samples.

    What a model of copfl's own computes follows from its layers, so one comparison serves all runs of the process.
    """
    layers = (repr(task.module), task.layout, task.criterion.kind)
    if type(task.module) not in MODELS.values():
        return task.with_batching(products, data)
    batched = task.with_batching(products, None if layers in _COMPARED else data)
    if batched.batched is not None:
        _COMPARED.add(layers)
    return batched


_COMPARED: set[tuple[str, Layout, str]] = set()  # the layers of models that were found to compute the same


def engine(run: Run, algorithm: AnyAlgorithm, task: Task, clients: FederatedData) -> Computed:
    """The engine, chosen by a short measurement where the settings leave it open.

    Args:
        run: The settings.
        algorithm: What the clients train with.
        task: What they learn.
        clients: Their samples.
    """
    settings, device = run.run, task.device
    # The cut of split learning may lie in the front.
    cache = "off" if traits(algorithm).cut else settings.cache_features
    training = features.training_of(task, clients, cache)
    if training.front is not None:
        cut = training.front.cut
        logger.info(f"the input of {cut} is computed once for each sample: what comes before is frozen")
    is_open = not settings.workers and settings.threads == 1
    most = processors() if is_open and device.type == "cpu" else 1
    sizes = (settings.batch, settings.participants, settings.rounds)
    load = autotune.Workload(algorithm, *training[:2], *sizes, processes=most)
    if pretrained.is_pretrained(run.model.name) and device.type == "cpu":
        logger.info("timing the engines on a few samples")
    chosen = autotune.choose_engine(load, engine=settings.engine, chunk=settings.chunk)
    precision = precision_on(device, settings.precision)
    if chosen.name != "sequential":
        products = torch.bfloat16 if precision == "bf16" else None
        first = tree.row(training.federation.train.rows([0]), 0)
        training = training._replace(task=_with_batching(training.task, products, first))
        task = training.task if training.front is None else task
    if precision == "bf16" and training.task.batched is None:
        raise UsageError("precision bf16 needs an engine that batches clients, and a model of known layers")
    workers = settings.workers
    if is_open:
        states = clients.clients if settings.store == "memory" else 0
        load = load._replace(task=training.task)
        seconds = autotune.total_seconds(load, chosen) if device.type == "cpu" else 0.0
        workers = autotune.processes(load, chosen, states, seconds)
        estimate = expected(seconds / workers, settings.rounds, workers, settings.local_baseline)
        if estimate or device.type != "cpu":  # of a short run, the table at its end has it
            logger.info(run.partition_text)
        if estimate:
            logger.info(estimate)
    decided = dataclasses.replace(
        settings,
        device=str(device),
        engine=chosen.name,
        chunk=chosen.chunk,
        precision=precision,
        workers=workers or 1,
        cache_features="off" if training.front is None else "on",
    )
    return Computed(chosen, training, task, decided)
