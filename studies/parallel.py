"""Runs of a study in several processes, a line of a file each; a study that was stopped goes on."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Record = Callable[[Any], dict[str, Any]]  # the results of a job


def study_parser(description: str | None, source: str = "files") -> argparse.ArgumentParser:
    """The arguments that all studies have: what they read, the file of the records, and those of `run_jobs`.

    Args:
        description: The docstring of the study.
        source: The name of what it reads.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(source, type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no run is started")
    return parser


def _work(queue: Any, results: Any, record: Record) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    while (job := queue.get()) is not None:
        try:
            results.put({**job._asdict(), **record(job)})
        except Exception as error:
            results.put({**job._asdict(), "error": f"{type(error).__name__}: {error}"[:500]})
            traceback.print_exc()
    results.put(None)


def run_jobs(jobs: Sequence[Any], record: Record, out: Path, processes: int, budget: float = 1e9) -> None:
    """Appends the record of each job, a NamedTuple, to the file, unless it has it already.

    Args:
        jobs: In the order in which they are started.
        record: Computes the results of a job; a process of its own imports it.
        out: The file.
        processes: How many run at once.
        budget: Seconds after which no job is started.
    """
    done = set()
    if out.exists():
        lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
        fields = type(jobs[0])._fields
        done = {tuple(line[name] for name in fields) for line in lines if "error" not in line}
    waiting = [job for job in jobs if tuple(job) not in done]
    context = multiprocessing.get_context("spawn")
    queue, results = context.Queue(maxsize=processes), context.Queue()
    workers = [context.Process(target=_work, args=(queue, results, record)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    started, count = time.monotonic(), 0
    with out.open("a", encoding="utf-8") as file:

        def drain(block: bool) -> int:
            """Writes what has ended; with `block`, until a process has. The number of processes that have."""
            while block or not results.empty():
                line = results.get()
                if line is None:
                    return 1
                file.write(json.dumps(line) + "\n")
                file.flush()
            return 0

        for job in waiting:
            if time.monotonic() - started > budget:
                break
            queue.put(job)
            count += 1
            drain(False)
        for _ in workers:
            queue.put(None)
        ended = 0
        while ended < len(workers):
            ended += drain(True)
    for worker in workers:
        worker.join()
    print(f"{count} of {len(waiting)} runs in {time.monotonic() - started:.0f} s")
