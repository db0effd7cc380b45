"""FedAvg rounds on a CPU: copfl against the plain loop, pfl-research and Flower. `python benchmarks/cpu.py`

The same round for all: 1,000 clients with 20 digits each, 100 of them a round, a small CNN, batches of 8, SGD; with
--cases digits,resnet also ResNet-18, 10 clients with 100 images of 32x32. copfl and the plain loop are interleaved
several times, so that other load affects both; the table shows medians. The other tools run afterwards;
name a Python that has them: --baselines PYTHON (pip install pfl "flwr[simulation]" scikit-learn, with the same torch).
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
from plain import plain_fedavg_round

from copfl import models
from copfl.algorithms import FedAvg
from copfl.core.optim import Sgd
from copfl.core.task import task_of
from copfl.data.federation import Federation
from copfl.data.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.engine import autotune, mapping
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.engine.workers import Workers

HERE = Path(__file__).parent
Step = Callable[[], object]


class Case(NamedTuple):
    """One experiment: its data and its model."""

    name: str
    federation: Federation
    model: torch.nn.Module
    participants: int
    batch: int


def digits_case(clients: int = digits.CLIENTS) -> Case:
    clients_data = federation(*digits.holdings(clients), digits.SIZE)
    return Case(
        "digits, cnn", clients_data, models.build("cnn", (1, 8, 8), 10, 0), digits.PARTICIPANTS, digits.BATCH
    )


def resnet_case(clients: int = images.CLIENTS) -> Case:
    clients_data = federation(*images.holdings(clients), images.SIZE)
    return Case("32x32 images, ResNet-18", clients_data, images.net(), images.PARTICIPANTS, images.BATCH)


def federation(x: Any, y: Any, size: int) -> Federation:
    samples, clients = Samples(x, y), len(y) // size
    parts = tuple(np.arange(n * size, (n + 1) * size) for n in range(clients))
    few = tuple(part[:1] for part in parts)
    channels = x.shape[1]
    data = Dataset(
        "bench", samples, samples, tuple("0123456789"), mean=(0.5,) * channels, std=(0.25,) * channels
    )
    return Federation(data, Partition(parts, few, "by hand", {}))


# -- the ways: each gives a function that does one more round --------------------------------------------------------


def copfl_rounds(
    case: Case, stack: contextlib.ExitStack, engine: mapping.Mapping, workers: int, mkldnn: bool
) -> Step:
    """copfl's round loop; without evaluation, as in the others."""
    task = task_of(case.model, 10, mean=case.federation.dataset.mean, std=case.federation.dataset.std)
    task = task.with_batching() if engine.name != "sequential" else task
    algorithm = FedAvg(Sgd(lr=digits.RATE, momentum=0.0, weight_decay=0.0))
    state = begin(algorithm, task, case.federation.clients)
    before = autotune.mkldnn_enabled()
    autotune.set_mkldnn(mkldnn)
    executor = None
    if workers > 1:
        setting = Simulation(algorithm, task, case.federation, engine, 0, case.batch)
        executor = stack.enter_context(Workers(setting, state, workers))
    autotune.set_mkldnn(before)
    rounds = simulate(
        algorithm, task, case.federation, engine, state, rounds=10**9, batch=case.batch,
        participation=case.participants / case.federation.clients, eval_every=10**9, executor=executor,
    )  # fmt: skip
    return with_mkldnn(lambda: next(rounds), mkldnn)


def plain_rounds(case: Case, mkldnn: bool) -> Step:
    """The loop one would write; batches are drawn beforehand."""
    model, server = copy.deepcopy(case.model), dict(copy.deepcopy(case.model.state_dict()))
    batches = plain_batches(case)
    return with_mkldnn(lambda: plain_fedavg_round(model, server, batches, digits.RATE), mkldnn)


def plain_batches(case: Case) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    data = case.federation.train.rows(range(case.participants))
    x = (data.x.float() / 255 - 0.5) / 0.25
    order = torch.randperm(x.shape[1]).split(case.batch)
    return [[(x[n][part], data.y[n][part]) for part in order] for n in range(case.participants)]


def plain_processes(case: Case, stack: contextlib.ExitStack, mkldnn: bool) -> Step:
    """The plain loop in two processes with half of the clients each."""
    context = multiprocessing.get_context("spawn")
    batches = plain_batches(case)
    server = dict(copy.deepcopy(case.model.state_dict()))
    lines = []
    for part in (batches[::2], batches[1::2]):
        here, there = context.Pipe()
        process = context.Process(target=_plain_process, args=(there, case.model, part, mkldnn), daemon=True)
        process.start()
        stack.callback(process.terminate)
        lines.append(here)

    def step() -> None:
        for line in lines:
            line.send({k: v.numpy() for k, v in server.items()})
        for line in lines:
            line.recv()

    return step


def _plain_process(line: Any, model: torch.nn.Module, batches: Any, mkldnn: bool) -> None:
    torch.set_num_threads(1)
    autotune.keep_freed_memory()  # a plain loop in a script would not, and be slower for it
    autotune.set_mkldnn(mkldnn)
    with contextlib.suppress(EOFError):
        while True:
            server = {k: torch.from_numpy(np.array(v)) for k, v in line.recv().items()}
            total = plain_fedavg_round(model, server, batches, digits.RATE)
            line.send({k: v.detach().numpy() for k, v in total.items()})


def with_mkldnn(step: Step, enabled: bool) -> Step:
    def one() -> object:
        before = autotune.mkldnn_enabled()
        autotune.set_mkldnn(enabled)
        try:
            return step()
        finally:
            autotune.set_mkldnn(before)

    return one


def baseline(python: str, processes: int, script: str, *words: str) -> dict[str, list[float]] | None:
    """The seconds of another tool's rounds, from a process of its own; None if it does not run, with the reason."""
    several = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    done = subprocess.run(
        [python, *several, str(HERE / script), *words], capture_output=True, text=True, cwd=HERE
    )
    try:
        found: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
        return found
    except (IndexError, ValueError):
        print(f"{script} did not run: {' '.join(done.stderr.strip().splitlines()[-1:])}", file=sys.stderr)
        return None


def baselines(python: str, case: str, rounds: int, settings: tuple[str, ...]) -> dict[str, list[float]]:
    """The seconds of the other tools' rounds, without the first of each, with mkldnn "on" or "off"."""
    ways: dict[str, tuple[Any, ...]] = {}
    for mkldnn in settings:
        words, kernels = (case, str(rounds), mkldnn), "mkldnn" if mkldnn == "on" else "no mkldnn"
        ways[f"pfl-research, {kernels}"] = (1, "baseline_pfl.py", *words)
        ways[f"pfl-research, {kernels}, 2 processes"] = (2, "baseline_pfl.py", *words)
        ways[f"Flower with Ray, {kernels}, 2 actors"] = (1, "baseline_flower.py", *words)
    found = {name: baseline(python, *words) for name, words in ways.items()}
    return {name: times["wall"][1:] for name, times in found.items() if times}


# -- measuring -------------------------------------------------------------------------------------------------------


def measured(ways: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """The seconds of each way's rounds; interleaved; the first repeat does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, step in ways.items():
            start = time.perf_counter()
            step()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return times


@contextlib.contextmanager
def ways_of(case: Case, processes: bool) -> Iterator[dict[str, Step]]:
    """Every way of doing this case's rounds that is in this process's power."""
    task = task_of(case.model, 10)
    small = task.d < 1_000_000
    chunk = autotune.chunk_of(task, case.participants)
    engine = mapping.vmap(chunk) if small else mapping.sequential()
    with contextlib.ExitStack() as stack:
        ways: dict[str, Step] = {}
        for mkldnn in (True, False):
            kernels = "mkldnn" if mkldnn else "no mkldnn"
            if small or mkldnn:
                ways[f"copfl, {engine.name} {engine.chunk}, {kernels}"] = copfl_rounds(
                    case, stack, engine, 1, mkldnn
                )
                ways[f"copfl, {engine.name} {engine.chunk}, {kernels}, 2 workers"] = copfl_rounds(
                    case, stack, engine, 2, mkldnn
                )
            ways[f"plain loop, {kernels}"] = plain_rounds(case, mkldnn)
            if processes:
                ways[f"plain loop, {kernels}, 2 processes"] = plain_processes(case, stack, mkldnn)
        yield ways


def table(case: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row per way, quickest first; ratios are to the quickest way of copfl."""
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    ours = min(seconds for name, seconds in median.items() if name.startswith("copfl"))
    print(f"\n{case}\n{'':52} {'s a round':>10} {'best':>8} {'copfl is':>10}")
    rows = []
    for name in sorted(median, key=lambda name: median[name]):
        row = {
            "way": name,
            "seconds": median[name],
            "best": min(times[name]),
            "times_copfl": median[name] / ours,
        }
        print(f"{name:52} {row['seconds']:10.3f} {row['best']:8.3f} {row['times_copfl']:9.1f}x", flush=True)
        rows.append({"case": case, **row, "all": times[name]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cases", default="digits", help="digits, resnet or digits,resnet")
    parser.add_argument("--baselines", help="a Python that has pfl-research and Flower")
    parser.add_argument("--out", default="cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    autotune.keep_freed_memory()  # as `copfl run` does; the plain loops of this process have it too
    rows: list[dict[str, Any]] = []
    if "digits" in args.cases:
        with ways_of(digits_case(), processes=True) as ways:
            times = measured(ways, args.repeats)
        if args.baselines:
            times |= baselines(args.baselines, "digits", args.repeats + 1, ("on", "off"))
        rows += table("1,000 clients with 20 digits, 100 a round, small CNN", times)
    if "resnet" in args.cases:
        with ways_of(resnet_case(), processes=True) as ways:
            slow = {name: step for name, step in ways.items() if "no mkldnn" in name}
            times = measured({name: step for name, step in ways.items() if name not in slow}, args.repeats)
            times |= measured(slow, 1)
        if args.baselines:  # without mkldnn, whatever calls torch's convolutions takes four times as long
            times |= baselines(args.baselines, "images", args.repeats + 1, ("on",))
        rows += table("10 clients with 100 images of 32x32, ResNet-18", times)
    load = os.getloadavg()
    about = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "load": load,
    }
    about["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(args.out).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(f"\nload of the machine at the end: {load[0]:.1f}; written to {args.out}")


if __name__ == "__main__":
    main()
