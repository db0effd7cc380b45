"""FedAvg rounds on a CPU: copfl against a plain loop, pfl-research and Flower. `python benchmarks/cpu.py`

The same round for all: 1,000 clients with 20 digits each, 100 of them a round, a small CNN, batches of 8 and
SGD. With --cases digits,resnet also ResNet-18: 10 clients with 100 images of 32x32. Rounds of copfl and of
the plain loop alternate, so that other load on the machine affects both; the table shows medians. The other
tools run afterwards, in a Python that has them: --baselines PYTHON (pip install pfl "flwr[simulation]"
scikit-learn, with the same torch). pfl_research.py has the conditions of pfl-research's own table.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import digits
import images
import numpy as np
import torch
from common import CLASSES, MEAN, STD, federation, random_images
from plain import plain_fedavg_round

from copfl import models
from copfl.algorithms import FedAvg
from copfl.core.optim import Sgd
from copfl.core.task import Task, task_of
from copfl.data.clients.federation import FederatedData
from copfl.engine import autotune, mapping
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.engine.workers import Workers

HERE = Path(__file__).parent
Step = Callable[[], object]


class Case(NamedTuple):
    """One setting: its data and its model."""

    title: str
    net: Callable[[], torch.nn.Module]
    federation: FederatedData
    participants: int
    batch: int

    @property
    def task(self) -> Task:
        channels = self.federation.shape[0]
        return task_of(self.net(), CLASSES, mean=(MEAN,) * channels, std=(STD,) * channels)


def built_in(model: str, federation: FederatedData) -> Callable[[], torch.nn.Module]:
    """copfl's network of this name."""
    return lambda: models.build(model, federation.shape, CLASSES, 0)


def digits_case() -> Case:
    title = "1,000 clients with 20 digits, 100 a round, small CNN"
    data = federation(*digits.samples(), digits.SIZE)
    return Case(title, built_in("cnn", data), data, digits.PARTICIPANTS, digits.BATCH)


def resnet_case() -> Case:
    title = "10 clients with 100 images of 32x32, ResNet-18"
    data = federation(*random_images(images.CLIENTS, images.SIZE), images.SIZE)
    return Case(title, built_in("resnet18", data), data, images.PARTICIPANTS, images.BATCH)


# Implementations: each returns a function that runs one more round


def copfl_rounds(case: Case, stack: contextlib.ExitStack, engine: mapping.Mapping, workers: int) -> Step:
    """copfl's rounds without evaluation, as in the other implementations."""
    task = case.task if engine.name == "sequential" else case.task.with_batching()
    algorithm = FedAvg(Sgd(lr=digits.RATE, momentum=0.0, weight_decay=0.0))
    state = begin(algorithm, task, case.federation.clients)
    simulation = Simulation(algorithm, task, case.federation, engine, batch=case.batch)
    executor = None
    if workers > 1:
        executor = stack.enter_context(Workers(simulation, state, workers))
    rounds = simulate(
        simulation,
        state,
        rounds=10**9,
        participation=case.participants / case.federation.clients,
        eval_every=10**9,
        executor=executor,
    )
    return lambda: next(rounds)


def plain_rounds(case: Case, mkldnn: bool) -> Step:
    """A plain PyTorch loop; the batches are made in advance."""
    model, batches = case.net(), plain_batches(case)
    server = dict(copy.deepcopy(model.state_dict()))
    return with_mkldnn(lambda: plain_fedavg_round(model, server, batches, digits.RATE), mkldnn)


def plain_batches(case: Case) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    data = case.federation.train.rows(range(case.participants))
    x = (data.x.float() / 255 - MEAN) / STD
    order = torch.randperm(x.shape[1]).split(case.batch)
    return [[(x[n][part], data.y[n][part]) for part in order] for n in range(case.participants)]


def plain_processes(case: Case, stack: contextlib.ExitStack, mkldnn: bool) -> Step:
    """The plain loop in two processes with half of the clients each."""
    context = multiprocessing.get_context("spawn")
    model, batches = case.net(), plain_batches(case)
    server = {name: value.numpy() for name, value in copy.deepcopy(model.state_dict()).items()}
    pipes = []
    for part in (batches[::2], batches[1::2]):
        pipe, other_end = context.Pipe()
        process = context.Process(target=_plain_process, args=(other_end, model, part, mkldnn), daemon=True)
        process.start()
        stack.callback(process.terminate)
        pipes.append(pipe)

    def step() -> None:
        for pipe in pipes:
            pipe.send(server)
        for pipe in pipes:
            pipe.recv()

    return step


def _plain_process(pipe: Any, model: torch.nn.Module, batches: Any, mkldnn: bool) -> None:
    torch.set_num_threads(1)
    autotune.keep_freed_memory()  # in favour of the plain loop: a script would not do this
    with contextlib.suppress(EOFError), torch.backends.mkldnn.flags(enabled=mkldnn):
        while True:
            server = {name: torch.from_numpy(np.array(value)) for name, value in pipe.recv().items()}
            total = plain_fedavg_round(model, server, batches, digits.RATE)
            pipe.send({name: value.detach().numpy() for name, value in total.items()})


def with_mkldnn(step: Step, enabled: bool) -> Step:
    def step_with_mkldnn() -> object:
        with torch.backends.mkldnn.flags(enabled=enabled):
            return step()

    return step_with_mkldnn


def baseline(python: str, processes: int, script: str, *arguments: str) -> list[float]:
    """The seconds of another tool's rounds but the first; none if it fails, and the reason is printed."""
    several = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    command = [python, *several, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    try:
        seconds: list[float] = json.loads(done.stdout.strip().splitlines()[-1])["wall"]
        return seconds[1:]
    except (IndexError, ValueError):
        print(f"{script} failed: {' '.join(done.stderr.strip().splitlines()[-1:])}", file=sys.stderr)
        return []


def baselines(python: str, case: str, rounds: int, settings: tuple[str, ...]) -> dict[str, list[float]]:
    """The seconds of the other tools' rounds, with mkldnn "on" or "off"."""
    times = {}
    for mkldnn in settings:
        arguments, suffix = (case, str(rounds), mkldnn), "mkldnn" if mkldnn == "on" else "no mkldnn"
        pfl, flower = "baseline_pfl.py", "baseline_flower.py"
        times[f"pfl-research, {suffix}"] = baseline(python, 1, pfl, *arguments)
        times[f"pfl-research, {suffix}, 2 processes"] = baseline(python, 2, pfl, *arguments)
        times[f"Flower with Ray, {suffix}, 2 actors"] = baseline(python, 1, flower, *arguments)
    return {name: seconds for name, seconds in times.items() if seconds}


# Measurement


def measured(steps: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """The seconds of each implementation's rounds, which alternate; the first round of each is left out."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if repeat:
                times[name].append(time.perf_counter() - started)
    return times


@contextlib.contextmanager
def implementations(case: Case) -> Iterator[dict[str, Step]]:
    """Every implementation of this case's rounds that needs no other tool."""
    parameters = case.task.d
    is_small = parameters < 1_000_000
    chunk = autotune.clients_per_batch(case.task, case.participants)
    engine = mapping.vmap(chunk) if is_small else mapping.sequential()
    name = f"copfl, {engine.name} {engine.chunk}"
    with contextlib.ExitStack() as stack:
        steps: dict[str, Step] = {
            name: copfl_rounds(case, stack, engine, 1),
            f"{name}, 2 workers": copfl_rounds(case, stack, engine, 2),
        }
        for mkldnn, suffix in ((True, "mkldnn"), (False, "no mkldnn")):
            steps[f"plain loop, {suffix}"] = plain_rounds(case, mkldnn)
            steps[f"plain loop, {suffix}, 2 processes"] = plain_processes(case, stack, mkldnn)
        yield steps


def table(title: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row per implementation, the fastest first; ratios are to the fastest one of copfl."""
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    ours = min(seconds for name, seconds in median.items() if name.startswith("copfl"))
    print(f"\n{title}\n{'':52} {'s a round':>10} {'best':>8} {'copfl is':>10}")
    rows = []
    for name in sorted(median, key=lambda name: median[name]):
        best, ratio = min(times[name]), median[name] / ours
        print(f"{name:52} {median[name]:10.3f} {best:8.3f} {ratio:9.1f}x", flush=True)
        row = {"way": name, "seconds": median[name], "best": best, "times_copfl": ratio}
        rows.append({"case": title, **row, "all": times[name]})
    return rows


def measure_digits(repeats: int, python: str | None) -> list[dict[str, Any]]:
    case = digits_case()
    with implementations(case) as steps:
        times = measured(steps, repeats)
    if python:
        times |= baselines(python, "digits", repeats + 1, ("on", "off"))
    return table(case.title, times)


def measure_resnet(repeats: int, python: str | None) -> list[dict[str, Any]]:
    case = resnet_case()
    with implementations(case) as steps:
        slow = {name: step for name, step in steps.items() if "no mkldnn" in name}
        times = measured({name: step for name, step in steps.items() if name not in slow}, repeats)
        times |= measured(slow, 1)
    if python:  # without mkldnn, torch's convolutions take four times as long
        times |= baselines(python, "images", repeats + 1, ("on",))
    return table(case.title, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cases", default="digits", help="digits, resnet, or both with a comma")
    parser.add_argument("--baselines", help="a Python that has pfl-research and Flower")
    parser.add_argument("--out", type=Path, default=Path("cpu.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    autotune.keep_freed_memory()  # as `copfl run` does; it affects the plain loops of this process too
    rows: list[dict[str, Any]] = []
    if "digits" in args.cases:
        rows += measure_digits(args.repeats, args.baselines)
    if "resnet" in args.cases:
        rows += measure_resnet(args.repeats, args.baselines)
    load = os.getloadavg()
    about = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "load": load,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(f"\nload of the machine at the end: {load[0]:.1f}; written to {args.out}")


if __name__ == "__main__":
    main()
