"""The command of the study: `copfl reproduce EXPERIMENT`. Torch is imported only when it runs."""

import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from copfl.cli import options
from copfl.cli.options import argument, option
from copfl.errors import AGAIN, RunError, UsageError, at_least, one_of, stoppable
from copfl.settings.toml import Tables
from copfl.telling import OF_ONE_RUN, heard

STUDY = Path(__file__).parent
app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)


def main(words: Sequence[str]) -> None:
    """Runs the command with these words of the command line."""
    app(words, standalone_mode=False, prog_name="copfl reproduce")


@app.command(cls=options.Command)
def reproduce(
    *,
    experiment: Annotated[
        str,
        argument(
            "table1, table1-servers, as-published, table-ablation, ablation-ours, table-samples, fig-convergence, "
            "convergence-long, fig-heatmap, fig-mamo, differences, equal-states, equal-steps, newer-methods, plus, "
            "plus-others, all of these, figures (those with a figure or table of the paper), finetuning, or a TOML "
            "file of your own."
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
        Path, option("Output", "Folder of the records; default: studies/paper/results.")
    ] = STUDY / "results",
    runs: Annotated[
        Path, option("Output", "Folder of run folders; finished ones are used. Default: runs/reproduce.")
    ] = Path("runs/reproduce"),
    pages: Annotated[
        Path, option("Output", "Folder that --from-records writes to; default: studies/paper.")
    ] = STUDY,
    from_records: Annotated[
        bool, option("Output", "Run nothing; write the pages from the records.", "--from-records")
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
    from copfl.comparison.jobs.executors import opened
    from copfl.comparison.jobs.job import PAUSE
    from copfl.comparison.jobs.runner import Runner
    from copfl.experiment.preparation import device_of
    from studies.paper import experiments, findings, records
    from studies.paper import pages as writing
    from studies.paper.batch import Batch, count_left

    begin, log = time.monotonic(), options.logger(quiet)
    one_of((*experiments.PROTOCOLS, "both"), protocol=protocol)
    chosen_experiments = [experiments.read(name) for name in experiments.named(experiment)]
    store = records.opened(results)
    for problem in store.unusable:
        log(f"copfl: not used: {problem}")
    if from_records and not charts.available():
        log(f"copfl: {charts.MISSING}")
    machine: Tables = {"run": {"device": device, "chunk": chunk}}
    if device == "auto" and on is None:  # on a GPU seeds are batched
        machine["run"]["device"] = device_of(device).type
    if data_dir is not None:
        machine["data"] = {"dir": str(data_dir.absolute())}
    on_cuda = machine["run"]["device"].startswith("cuda")
    end = math.inf if minutes is None else begin + 60 * minutes
    # A checkpoint of fifty ResNets is gigabytes; on a GPU a run ends before it would pay.
    runner = Runner(end, pause=math.inf if on_cuda else PAUSE, batch_seeds=on_cuda)
    left, problems, all_findings = 0, list[str](), list[findings.Findings]()
    for complete in chosen_experiments:
        part = experiments.only(complete, column or [], row or [])
        protocols = [name for name in part.protocols if protocol in (name, "both")]
        if not protocols:
            if experiment == "all":
                continue
            known = ", ".join(part.protocols)
            under = f"is not run under the {protocol} protocol; it is under {known}"
            raise UsageError(f"{experiment} {under}")
        size = part.budget(budget)
        wanted_seeds = _seeds(seeds, size.first_seed)
        plans = list(experiments.plans(part, size, protocols, wanted_seeds))
        missing = 0 if from_records else count_left(plans, store)
        if plan:
            print(f"{part.name}: {missing} runs are missing")
            continue
        if missing:
            if on is None:
                device_of(device)  # an error now, and not one for every run
            with stoppable(AGAIN), opened(on, runs) as executor, heard(log, but_of=OF_ONE_RUN):
                batch = Batch(part.name, store, runs, machine, replace(runner, executor=executor))
                missing, failed = batch.run(plans)
            left, problems = left + missing, problems + failed
        shown = findings.from_records(part, budget, protocols, wanted_seeds, store)
        if from_records:
            all_findings.append(shown)
            for path in writing.write(shown, budget, pages):
                log(f"written: {path}")
        elif not quiet:
            print(writing.summary(shown))
        if time.monotonic() > end:
            break
    if from_records and experiment == "all":
        writing.write_claims(all_findings, pages)
    if problems:
        raise RunError(f"{len(problems)} runs failed, the others are there. {'; '.join(problems)}")
    if left:
        log(f"copfl: {left} runs are left; the same command continues: copfl {shlex.join(sys.argv[1:])}")


def _seeds(text: str | None, first: int) -> list[int]:
    """A number of seeds from the experiment's first one on, or the seeds that are named; none: its own."""
    from copfl.comparison.rows.entries import seeds_of

    if text is None:
        return []
    if not text.strip().isdecimal():
        return seeds_of(text)
    at_least(1, seeds=int(text))
    return list(range(first, first + int(text)))
