"""One experiment, from settings or values to a result: `copfl.run(...)`."""

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from copfl.core.algorithm import AnyAlgorithm
from copfl.core.optim import Optimizer
from copfl.data.clients.partition import Partition
from copfl.engine import ranks
from copfl.errors import RunError, UsageError
from copfl.experiment import folder as run_folder
from copfl.experiment import records
from copfl.experiment.folder import RunFolder
from copfl.experiment.preparation import prepare
from copfl.experiment.process import left_as_found
from copfl.experiment.result import Experiment, Result
from copfl.experiment.rounds_search import linear_instead, with_found_rounds
from copfl.experiment.training import OnRound, baseline_of, simulation_of, train
from copfl.settings import named_code, user_code
from copfl.settings.checking import SettingError
from copfl.settings.complete import complete
from copfl.settings.schema import KINDS, Run
from copfl.settings.values import modules_of_values


@left_as_found()
def run(
    algorithm: Run | str | AnyAlgorithm | type[AnyAlgorithm] | None = None,
    dataset: Any = "digits",
    *,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    partition: str | Path | Partition | None = None,
    optimizer: str | Optimizer | Mapping[str, Any] | None = None,
    lr: float | None = None,
    epochs: int | None = None,
    rounds: int | None = None,
    clients: int | None = None,
    batch_size: int | None = None,
    participation: float | None = None,
    seed: int | None = None,
    device: str | None = None,
    data_dir: str | Path | None = None,
    adapter: str | Mapping[str, Any] | None = None,
    preset: str | None = None,
    out: str | Path | None = None,
    code: named_code.Modules = (),
    on_round: OnRound | None = None,
    **settings: Any,
) -> Result:
    """Trains a federation and returns the result.

    >>> import copfl
    >>> result = copfl.run("copfl", "digits", rounds=2)
    >>> result.accuracy.shape
    (2, 10)

    Args:
        algorithm: A name of `copfl list algorithms`, "module:Class" of your code, or an algorithm as a value
            or its class, with the learning rate of the data set where it chooses none. Or a `copfl.Run`: a
            complete one has all settings but `out`, `code` and `on_round`, another one is completed. By default
            what suits the data, see docs/results.md.
        dataset: A name, a file, a folder, "hf:NAME" or "module:function"; or a value: a copfl or torch
            Dataset, a pair (train, test) of torch Datasets, arrays (x, y), or a list of such data, one per
            client.
        model: A name, "module:Class", an nn.Module, or a function of (shape, classes) that makes one.
            Parameters with requires_grad=False are not trained. By default it follows from the samples.
        partition: A scheme, "module:function", a file, or a Partition.
        optimizer: A name, "module:Class", or an optimizer; by default the algorithm's.
        lr: Learning rate; by default the optimizer's for the data set.
        epochs: Local epochs per round.
        rounds: Number of rounds. By default it is found on your own data, with a part of each client's training
            samples held out, and the run trains on all of them for as many rounds, see docs/howto.md.
        clients: Number of clients.
        batch_size: Samples per training step.
        participation: Fraction of the clients in each round.
        seed: Of all randomness.
        device: "cpu", "cuda", "cuda:N" or "auto".
        data_dir: Folder of the data sets.
        adapter: Such as "lora:r=8".
        preset: Settings below all others, such as "demo".
        out: A new run folder to write.
        code: Modules of yours that a `copfl.Run` may name. What the other arguments name needs no mention.
        on_round: Called with each round as it ends, and its seconds.
        settings: Other settings of [run], such as `eval_every=5`; options of a choice, as
            `algorithm_options={"rate": 0.1}`, `partition_options={"per_client": 3}`,
            `model_options={"norm": "batch"}`; and other tables, as `task={"metrics": ["auc"]}`,
            `optimizer={"name": "sgd", "momentum": 0.9}`, `addons={"ema": 0.9}`. `copfl schema` has all of
            them.
    """
    named_code.name(code)
    if dataset is None:  # such as what a function without a return gave; the digits are not meant
        raise UsageError(f"dataset is None; pass the name of a data set, or {user_code.DATA}")
    record = algorithm if isinstance(algorithm, Run) else None
    layer: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    values: dict[str, Any] = {}
    kinds: dict[str, Any] = {
        "model": model,
        "partition": partition,
        "optimizer": optimizer,
        "adapter": adapter,
    }
    if record is None:
        kinds = {"algorithm": algorithm, "data": dataset, **kinds}
    elif not (isinstance(dataset, str) and dataset == "digits"):  # the default of `dataset` is no choice
        kinds = {"data": dataset, **kinds}
    for kind, value in kinds.items():
        if isinstance(value, Mapping) and kind != "data":
            layer[kind] |= value
        elif isinstance(value, str | Path):
            layer[kind]["name"] = str(value)
        elif value is not None:
            values[kind] = value
    short = {"clients": clients, "rounds": rounds, "batch": batch_size, "participation": participation}
    tables: dict[str, dict[str, Any]] = {
        "run": {**short, "seed": seed, "device": device},
        "optimizer": {"lr": lr},
        "algorithm": {"epochs": epochs},
        "data": {"dir": None if data_dir is None else str(data_dir)},
    }
    for kind, keys in tables.items():
        layer[kind] |= {key: value for key, value in keys.items() if value is not None}
    for name, value in settings.items():
        kind = name.removesuffix("_options")
        if isinstance(value, Mapping):
            layer.setdefault(kind, {}).update(value)
        else:
            layer["run"][name] = value
    named_code.name(named_code.modules_in(layer), modules_of_values(values))
    if "data" in values:
        values["data"] = user_code.as_dataset(values["data"])
    if record is not None and record.is_complete:
        beside = {f"{kind}.{key}": value for kind, table in layer.items() for key, value in table.items()}
        for path, value in (beside | values | ({"preset": preset} if preset else {})).items():
            raise SettingError(
                path,
                value if path in beside or path == "preset" else None,
                "cannot be set beside a complete copfl.Run, which has every setting; change the record with "
                'its method `replaced`, as in run.replaced({"run": {"rounds": 5}})',
            )
        description = record
    else:
        below = () if record is None else (record,)
        layer["run"] = {"find_rounds": "auto"} | layer["run"]
        description = complete(*below, layer, preset=preset or "", values=values)
    if description.run.find_rounds == "first":
        instead = None
        if record is None and not preset:
            instead = linear_instead(
                description, [layer], values, lambda more: complete(layer, more, values=values)
            )
        description = with_found_rounds(description, instead=instead)
    experiment = prepare(description)
    opened = contextlib.nullcontext() if out is None else run_folder.claimed(Path(out), new=True)
    with opened as folder:
        return _warned(train(experiment, folder, on_round))


@left_as_found()
def resume(
    path: str | Path,
    *,
    rounds: int | None = None,
    code: named_code.Modules = (),
    on_round: OnRound | None = None,
    **values: Any,
) -> Result:
    """Continues a stopped run, to the same bytes as without the stop.

    Args:
        path: The run folder.
        rounds: Continue to this many rounds in all; by default to those of the run.
        code: Modules of yours that the folder may name, such as "mypackage.nets"; it executes no other code.
        on_round: Called with each round as it ends, and its seconds.
        values: What was passed to `run` as a value: `algorithm` and `model` must be passed again. The folder
            has the data, unless they are larger than half a gigabyte.
    """
    named_code.name(code)
    with run_folder.claimed(Path(path), new=False) as folder:
        return _warned(train(reopen(folder, rounds, **values), folder, on_round))


def _warned(result: Result) -> Result:
    for warning in result.warnings:
        warnings.warn(warning, RuntimeWarning, stacklevel=3)
    return result


def reopen(
    folder: RunFolder, rounds: int | None = None, tell: Callable[[str], None] | None = None, **values: Any
) -> Experiment:
    """The experiment of a run folder; with `rounds`, continued to this many rounds in all."""
    named_code.name(modules_of_values(values))
    now = ({} if rounds is None else {"rounds": rounds}) | ({"workers": 1} if ranks.joined() else {})
    written = folder.tables()  # first: it says so, if this is no run folder
    own = {"partition": folder.partition(), **folder.values(), **values}
    experiment = prepare(complete(written, {"run": now}, values=own), tell=tell)
    if rounds is not None and rounds < (done := len(records.read(folder.path / "rounds.jsonl"))):
        raise RunError(f"{folder.path} has {done} rounds already; rounds={rounds} must be at least as many")
    return experiment


def follow() -> None:
    """A rank of torchrun other than 0: it trains its part of the run that rank 0 leads, see `lead`."""
    run, partition, fingerprints = ranks.announce()
    chosen = dataclasses.replace(run.partition, value=partition)
    e = prepare(dataclasses.replace(run, partition=chosen))
    for what, own in e.fingerprints().items():
        if own != fingerprints[what]:
            raise RunError(
                f"the {what} of rank {os.environ['RANK']} are not those of rank 0; every machine needs the "
                "same version of copfl, the same data under --data-dir, and the same code"
            )
    e.training.compute()
    ranks.serve(simulation_of(e))
    alone = baseline_of(e) if e.settings.local_baseline else None
    if alone is not None and alone is not e:
        ranks.serve(simulation_of(alone))


def lead(e: Experiment) -> str:
    """Rank 0: tells the other ranks what to train; the result is a warning, or empty."""
    ranks.announce((e.run, e.federation.partition, e.fingerprints()))
    processes, parts = ranks.started(), math.ceil(e.settings.participants / e.engine.chunk)
    if processes <= parts:
        return ""
    smaller = math.ceil(e.settings.participants / processes)
    return (
        f"{processes - parts} of {processes} processes have nothing to train: the {e.settings.participants} "
        f"clients of a round are trained in {parts} batch(es) of {e.engine.chunk}. With "
        f"--set run.chunk={smaller} each has a batch; the result then differs from this one in rounding"
    )
