"""`copfl reproduce`. Torch is imported only when it is called."""

import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from copfl.cli import options
from copfl.cli.options import argument, option
from copfl.errors import AGAIN, RunError, UsageError, at_least, one_of, stoppable


def reproduce(
    *,
    experiment: Annotated[
        str,
        argument(
            "table1, as-published, table-ablation, table-samples, fig-convergence, fig-heatmap, fig-mamo, differences, "
            "equal-states, equal-steps, plus, plus-others, all of these, finetuning, or a TOML file of your own; "
            "with --check, a file of records."
        ),
    ],
    device: Annotated[str, option("Training", "cpu, cuda, cuda:N or auto; default: auto.")] = "auto",
    chunk: Annotated[
        int, option("Training", "Clients in one batch on a GPU; default: 0, as many as fit.")
    ] = 0,
    seeds: Annotated[
        str | None,
        option("Training", "Number of seeds, or the seeds, such as 3-7; default: the experiment's."),
    ] = None,
    budget: Annotated[
        str, option("Training", "full (200 rounds) or short (60 rounds); default: full.")
    ] = "full",
    protocol: Annotated[str, option("Training", "paper, equal or both; default: both.")] = "both",
    column: Annotated[
        list[str] | None, option("Data", "Run this column only, such as cifar10-10; repeatable.")
    ] = None,
    row: Annotated[list[str] | None, option("Training", "Run this row only; repeatable.")] = None,
    minutes: Annotated[
        float | None,
        option("Training", "Stop after so many minutes; the same command continues. Default: no limit."),
    ] = None,
    on: options.On = None,
    data_dir: options.DataDir = None,
    results: Annotated[
        Path, option("Output", "Folder of the records; default: results/reproduction.")
    ] = Path("results/reproduction"),
    runs: Annotated[
        Path, option("Output", "Folder of run folders; finished ones are used. Default: runs/reproduce.")
    ] = Path("runs/reproduce"),
    docs: Annotated[Path, option("Output", "Folder that --from-records writes to; default: docs.")] = Path(
        "docs"
    ),
    from_records: Annotated[
        bool, option("Output", "Run nothing; write the pages from the records.", "--from-records")
    ] = False,
    check: Annotated[
        bool, option("Output", "Run nothing; check a file of records that somebody submits.", "--check")
    ] = False,
    repeat: Annotated[
        bool, option("Training", "With --check: train its shortest run again, and compare.", "--repeat")
    ] = False,
    plan: Annotated[
        bool, option("Output", "Run nothing; print how many runs are missing.", "--plan")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Run the paper's tables and figures again and compare our numbers with the paper's.

    A run that has a record in the results folder is not run again.
    """
    from copfl import charts
    from copfl.comparison.executors import opened
    from copfl.comparison.jobs import PAUSE
    from copfl.comparison.runner import Runner
    from copfl.experiment.preparation import device_of
    from copfl.reproduction import experiments, findings, pages, records
    from copfl.reproduction.batch import Batch, count_left

    clock, log = time.monotonic(), options.logger(quiet)
    one_of((*experiments.PROTOCOLS, "both"), protocol=protocol)
    store = records.opened(results)
    for problem in store.unusable:
        log(f"copfl: not used: {problem}")
    if from_records and not charts.available():
        log(f"copfl: {charts.MISSING}")
    left, problems, all_found = 0, list[str](), list[findings.Findings]()
    place: dict[str, dict[str, Any]] = {"run": {"device": device, "chunk": chunk}}
    if device == "auto" and on is None:  # on a GPU seeds are batched
        place["run"]["device"] = device_of(device).type
    if data_dir is not None:
        place["data"] = {"dir": str(data_dir.absolute())}
    if repeat and not check:
        raise UsageError("--repeat trains a run of a file again; it needs --check")
    if check:
        return _check(Path(experiment), store, runs if repeat else None, place, log)
    cuda = place["run"]["device"].startswith("cuda")
    # A checkpoint of fifty ResNets is gigabytes; on a GPU a run ends before it would pay.
    end = math.inf if minutes is None else clock + 60 * minutes
    runner = Runner(log, end, pause=math.inf if cuda else PAUSE, batch_seeds=cuda)
    for whole in [experiments.read(name) for name in experiments.named(experiment)]:
        chosen = experiments.only(whole, column or [], row or [])
        protocols = [p for p in chosen.protocols if protocol in (p, "both")]
        if not protocols:
            if experiment == "all":
                continue
            known = ", ".join(chosen.protocols)
            under = f"is not run under the {protocol} protocol; it is under {known}"
            raise UsageError(f"{experiment} {under}")
        size = chosen.budget(budget)
        wanted = _seeds(seeds, size.first_seed)
        plans = list(experiments.plans(chosen, size, protocols, wanted))
        missing = 0 if from_records else count_left(plans, store)
        if plan:
            print(f"{chosen.name}: {missing} runs are missing")
            continue
        if missing:
            if on is None:
                device_of(device)  # an error now, and not one for every run
            with stoppable(AGAIN), opened(on, runs) as executor:
                ready = replace(runner, executor=executor)
                missing, failed = Batch(chosen.name, store, runs, place, ready).run(plans)
            left, problems = left + missing, problems + failed
        found = findings.found(chosen, budget, protocols, wanted, store)
        if from_records:
            all_found.append(found)
            for path in pages.write(found, budget, docs):
                log(f"written: {path}")
        elif not quiet:
            print(pages.summary(found))
        if time.monotonic() > end:
            break
    if from_records and experiment == "all":
        pages.write_claims(all_found, docs)
    if problems:
        raise RunError(f"{len(problems)} runs failed, the others are there. {'; '.join(problems)}")
    if left:
        log(f"copfl: {left} runs are left; the same command continues: copfl {shlex.join(sys.argv[1:])}")


def _check(
    path: Path, store: Any, runs: Path | None, place: dict[str, dict[str, Any]], log: Callable[[str], None]
) -> None:
    """Prints the row of submitted records for docs/results.md; a RunError if they cannot be used."""
    from copfl.reproduction import submission
    from copfl.tables import as_markdown

    checked = submission.check(path, store)
    problems = [f"{one.record.title}: {problem}" for one in checked for problem in one.problems]
    if runs is not None and not problems:
        record = min((one.record for one in checked), key=lambda found: found.length)
        far = submission.distance(record, submission.repeated(record, runs, place, log))
        log(f"{record.title}: run again, a client differs by {100 * far:.2f} points at most")
        if far > submission.FAR:
            problems.append(f"{record.title}: run again, a client differs by {100 * far:.1f} points")
    if problems:
        raise RunError(f"{path} cannot be used. {'; '.join(problems)}")
    print(as_markdown(submission.table_of(checked)))


def _seeds(text: str | None, first: int) -> list[int]:
    """A number of seeds from the experiment's first one on, or the seeds that are named; none: its own."""
    from copfl.comparison.entries import seeds_of

    if text is None:
        return []
    if not text.strip().isdecimal():
        return seeds_of(text)
    at_least(1, seeds=int(text))
    return list(range(first, first + int(text)))
