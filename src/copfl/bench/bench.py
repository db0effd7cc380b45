"""Makes rows: the runs of algorithms in a suite, in several processes, each run kept as it ends.

OUT/runs.jsonl       a line for each run; the same command goes on from there
    NAME.json        the row of each algorithm, a record that `check` can run again
"""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import NamedTuple

from copfl import foreign
from copfl.bench import protocol, rows
from copfl.bench.protocol import BenchJob, BenchMachine, MeasuredRun, Suite
from copfl.bench.rows import BenchRow
from copfl.comparison.jobs.processes import executor_of, sendable
from copfl.comparison.rows.entries import modules_of
from copfl.errors import RunError, at_least, raised_as
from copfl.experiment.process import left_as_found
from copfl.experiment.progress import span
from copfl.files import locked, write_bytes
from copfl.settings import named_code
from copfl.telling import OF_ONE_RUN, Log, heard_by_log

logger = logging.getLogger(__name__)
RUNS = "runs.jsonl"
PAUSE = 10.0  # seconds between two lines of progress


class BenchPlan(NamedTuple):
    """The runs of one algorithm that are known before any."""

    algorithm: str
    code: str
    tuning: list[BenchJob]
    refused: dict[str, str]


@left_as_found()
@heard_by_log(but_of=OF_ONE_RUN)
def bench(
    algorithms: Sequence[str],
    suite: Suite,
    out: Path,
    machine: BenchMachine = BenchMachine(),  # noqa: B008
    *,
    jobs: int = 1,
    code: named_code.Modules = (),
    log: Log | None = print,
) -> list[BenchRow]:
    """A row for each algorithm, written to `out`; runs that are there are used again.

    Args:
        algorithms: Such as "fedavg", "fedprox:mu=0.1" or "mypackage.algos:FedMine".
        suite: The settings.
        out: A folder.
        machine: The device and the data.
        jobs: Runs at the same time, in processes of their own.
        code: Modules of yours, beside those that `algorithms` names.
        log: Gets lines of progress.
    """
    named_code.name(code, modules_of(algorithms))
    at_least(1, jobs=jobs)
    out.mkdir(parents=True, exist_ok=True)
    now = rows.environment(machine)
    plans = []
    for algorithm in algorithms:
        tuning, refused = protocol.tuning_jobs(algorithm, suite, machine)
        plans.append(BenchPlan(algorithm, rows.code_hash(algorithm), tuning, refused))
    logger.info(_estimate(plans, suite, jobs))
    with locked(out / "lock"):
        finished = FinishedRuns(out / RUNS, suite.hash, now, {plan.algorithm: plan.code for plan in plans})
        run = partial(_measured, finished=finished, machine=machine, processes=jobs)
        tuned = run([job for plan in plans for job in plan.tuning], what="runs on validation samples")
        final = {plan.algorithm: protocol.final_jobs([tuned[job] for job in plan.tuning]) for plan in plans}
        tested = run([job for planned in final.values() for job in planned], what="runs on test samples")
    made = []
    for name, code, tuning, refused in plans:
        measured = [tuned[job] for job in tuning], [tested[job] for job in final[name]]
        made.append(BenchRow(name, suite.name, suite.version, suite.hash, code, now, refused, *measured))
        rows.write(made[-1], out / record_name(name))
    return made


def record_name(algorithm: str) -> str:
    """The file name of an algorithm's row."""
    return re.sub(r"[^\w.=-]+", "-", algorithm).strip("-.") + ".json"


def _estimate(plans: Sequence[BenchPlan], suite: Suite, processes: int) -> str:
    """How many runs there are, and how long they may take."""
    count = sum(len(plan.tuning) + len(suite.settings) * len(protocol.SEEDS) for plan in plans)
    known = [row for row in rows.stored(suite) if row.algorithm == "fedavg"]
    if not known:
        return f"{count} runs; the time is known after the first ones"
    fedavg = known[0]
    each = fedavg.seconds / len(fedavg.tuning + fedavg.runs)
    return (
        f"{count} runs; as fast as FedAvg's ({fedavg.environment['processor']}), they take about "
        f"{span(count * each / processes)} with {processes} process{'es' * (processes > 1)}; an algorithm "
        "with more local steps takes longer"
    )


class FinishedRuns:
    """The file of finished runs."""

    def __init__(self, path: Path, settings: str, environment: rows.Environment, codes: dict[str, str]):
        self.path = path
        self.made_with = {
            name: {"code": code, "settings": settings, "environment": environment}
            for name, code in codes.items()
        }
        self.runs: dict[BenchJob, MeasuredRun] = {}
        self.others = 0  # runs of these algorithms with other code, settings or versions
        written = path.read_bytes() if path.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]
        if len(whole) < len(written):  # a process was killed while it wrote the last line
            write_bytes(path, whole)
        for line in whole.splitlines():
            try:
                content = foreign.json_of(line)
                run = protocol.from_json(content)
            except rows.DAMAGED as error:
                raise RunError(
                    f"{path} is damaged ({error}); remove it, and its runs are made again"
                ) from error
            expected = self.made_with.get(run.job.algorithm)
            if expected is not None and all(content[key] == value for key, value in expected.items()):
                self.runs[run.job] = run
            else:
                self.others += expected is not None

    def add(self, run: MeasuredRun) -> None:
        line = json.dumps({**protocol.as_json(run), **self.made_with[run.job.algorithm]})
        with self.path.open("ab") as file:
            file.write(line.encode() + b"\n")
        self.runs[run.job] = run


def _measured(
    jobs: Sequence[BenchJob],
    *,
    finished: FinishedRuns,
    machine: BenchMachine,
    processes: int,
    what: str,
) -> dict[BenchJob, MeasuredRun]:
    """The measurement of every job; those that are not kept are run."""
    left = [job for job in jobs if job not in finished.runs]
    if len(left) < len(jobs):
        logger.info(f"{len(jobs) - len(left)} of {len(jobs)} {what} are there already")
    if finished.others:
        logger.info(
            f"{finished.others} runs in {finished.path} were made with other code, settings or versions, and do not "
            "count"
        )
    started, printed = time.monotonic(), time.monotonic()
    for count, run in enumerate(in_processes(left, machine, processes), 1):
        finished.add(run)
        if (now := time.monotonic()) - printed >= PAUSE or count == len(left):
            printed = now
            rest = (now - started) / count * (len(left) - count)
            logger.info(
                f"[{count}/{len(left)} {what}] {run.job.title}: {100 * run.value:.1f} %, about {span(rest)} "
                "left"
            )
    return {job: finished.runs[job] for job in jobs}


def in_processes(jobs: Sequence[BenchJob], machine: BenchMachine, processes: int) -> Iterator[MeasuredRun]:
    """Every run as it ends. An error of one ends the others.

    Args:
        jobs: The runs.
        machine: The device and the data.
        processes: How many train at a time.
    """
    if min(processes, len(jobs)) <= 1:
        yield from (protocol.measured(job, machine) for job in jobs)
        return
    pool = executor_of(min(processes, len(jobs)), machine.device)
    complete = False
    try:
        named = named_code.named()
        waiting = [pool.submit(_measured_in_worker, job, machine, named) for job in jobs]
        for future in futures.as_completed(waiting):
            yield future.result()
        complete = True
    except futures.BrokenExecutor as error:
        raise RunError(
            "a process was killed, perhaps for lack of memory; the same command goes on with the runs that "
            "are left, with fewer processes by --jobs"
        ) from error
    finally:
        for process in list((pool._processes or {}).values()) if not complete else ():
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _measured_in_worker(job: BenchJob, machine: BenchMachine, code: Sequence[str]) -> MeasuredRun:
    try:
        named_code.name(code)
        return protocol.measured(job, machine)
    except (Exception, SystemExit) as error:
        raise sendable(error) from None


# A record that is run again


class RowCheck(NamedTuple):
    """What running a record again showed."""

    compared: int  # runs
    differ: list[str]  # those that are not equal to the bit, in words
    environment: str  # in what this machine differs from the record's; empty: in nothing

    @property
    def text(self) -> str:
        machine = f"this machine differs from the record's: {self.environment}"
        if not self.differ:
            equal = f"{self.compared} of {self.compared} runs are equal to the bit"
            return f"{equal}; {machine}" if self.environment else equal
        same = (
            "this machine has the versions and the hardware of the record, so it is not a record of this code"
        )
        count = f"{len(self.differ)} of {self.compared} runs differ ({'; '.join(self.differ)})"
        return f"{count}; {machine if self.environment else same}"


@left_as_found()
@heard_by_log(but_of=OF_ONE_RUN)
def check(
    row: BenchRow,
    machine: BenchMachine,
    *,
    runs: int,
    jobs: int = 1,
    code: named_code.Modules = (),
    log: Log | None = print,
) -> RowCheck:
    """Runs a record again, or a random sample of its runs, and compares every number of every round.

    Args:
        row: The record.
        machine: The device and the data.
        runs: How many; 0: all.
        jobs: Runs at the same time.
        code: The modules of the record's algorithm, where it is not one of copfl's.
        log: Gets lines of progress.
    """
    named_code.name(code)
    at_least(0, runs=runs)
    with raised_as(RunError, "this is no record of `copfl bench` ({})", *rows.DAMAGED):
        problem = rows.fault(row)
    if problem:
        raise RunError(f"the record of {row.algorithm} cannot be checked: {problem}")
    if (code := rows.code_hash(row.algorithm)) != row.code:
        raise RunError(
            f"the code of {row.algorithm} here has the hash {code}, and the record was made with {row.code}; "
            "check it with the code and the version of copfl that it was made with"
        )
    every = {run.job: run for run in (*row.tuning, *row.runs)}
    chosen = random.sample(sorted(every), min(runs, len(every))) if runs else list(every)
    differ = []
    for count, again in enumerate(in_processes(chosen, machine, jobs), 1):
        before = every[again.job]
        equal = again.hash == before.hash and again.accuracy == before.accuracy
        logger.info(f"[{count}/{len(chosen)} runs] {again.job.title}: {'equal' if equal else 'different'}")
        if not equal:
            clients = "" if again.start == before.start else ", other clients or initial weights"
            change = 100 * (again.value - before.value)
            differ.append(f"{again.job.setting}, seed {again.job.seed}: {change:+.2f} points{clients}")
    return RowCheck(len(chosen), differ, rows.differing(row.environment, rows.environment(machine)))
