"""`copfl reproduce`. Torch is imported only when it is called."""

import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from copfl.cli import options
from copfl.errors import AGAIN, RunError, UsageError, at_least, one_of, stoppable


def reproduce(given: options.Given) -> None:
    """Run the paper's tables and figures again and compare our numbers with the paper's.

    A run that has a record in the results folder is not run again.
    """
    from copfl import charts
    from copfl.comparison.executors import opened
    from copfl.comparison.jobs import PAUSE
    from copfl.comparison.runner import Runner
    from copfl.experiment.run_settings import device_of
    from copfl.reproduction import experiments, findings, pages, records
    from copfl.reproduction.batch import Batch, count_left

    clock, log = time.monotonic(), options.logger(given.quiet)
    one_of((*experiments.PROTOCOLS, "both"), protocol=given.protocol)
    store = records.opened(given.results)
    for problem in store.unusable:
        log(f"copfl: not used: {problem}")
    if given.from_records and not charts.available():
        log(f"copfl: {charts.MISSING}")
    left, problems, all_found = 0, list[str](), list[findings.Findings]()
    place: dict[str, dict[str, Any]] = {"run": {"device": given.device, "chunk": given.chunk}}
    if given.device == "auto" and given.on is None:  # on a GPU seeds are batched
        place["run"]["device"] = device_of(given.device).type
    if given.data_dir is not None:
        place["data"] = {"dir": str(given.data_dir.absolute())}
    if given.repeat and not given.check:
        raise UsageError("--repeat trains a run of a file again; it needs --check")
    if given.check:
        return _check(Path(given.experiment), store, given.runs if given.repeat else None, place, log)
    cuda = place["run"]["device"].startswith("cuda")
    # A checkpoint of fifty ResNets is gigabytes; on a GPU a run ends before it would pay.
    end = math.inf if given.minutes is None else clock + 60 * given.minutes
    runner = Runner(log, end, pause=math.inf if cuda else PAUSE, batch_seeds=cuda)
    for whole in [experiments.read(name) for name in experiments.named(given.experiment)]:
        chosen = experiments.only(whole, given.column or [], given.row or [])
        protocols = [p for p in chosen.protocols if given.protocol in (p, "both")]
        if not protocols:
            if given.experiment == "all":
                continue
            known = ", ".join(chosen.protocols)
            under = f"is not run under the {given.protocol} protocol; it is under {known}"
            raise UsageError(f"{given.experiment} {under}")
        size = chosen.budget(given.budget)
        wanted = _seeds(given.seeds, size.first_seed)
        plans = list(experiments.plans(chosen, size, protocols, wanted))
        missing = 0 if given.from_records else count_left(plans, store)
        if given.plan:
            print(f"{chosen.name}: {missing} runs are missing")
            continue
        if missing:
            if given.on is None:
                device_of(given.device)  # an error now, and not one for every run
            with stoppable(AGAIN), opened(given.on, given.runs) as executor:
                ready = replace(runner, executor=executor)
                missing, failed = Batch(chosen.name, store, given.runs, place, ready).run(plans)
            left, problems = left + missing, problems + failed
        found = findings.found(chosen, given.budget, protocols, wanted, store)
        if given.from_records:
            all_found.append(found)
            for path in pages.write(found, given.budget, given.docs):
                log(f"written: {path}")
        elif not given.quiet:
            print(pages.summary(found))
        if time.monotonic() > end:
            break
    if given.from_records and given.experiment == "all":
        pages.write_claims(all_found, given.docs)
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
