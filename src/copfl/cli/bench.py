"""`copfl bench`: where an algorithm stands among the stored ones. Torch is imported when it is called."""

import json
from pathlib import Path
from typing import Annotated

import typer

from copfl.cli import options
from copfl.cli.options import option
from copfl.errors import AGAIN, RunError, UsageError, stoppable

SAMPLE = 6  # runs of a record that are run again


def bench(
    *,
    algorithm: Annotated[
        str | None, typer.Argument(help="Such as mypackage.algos:FedMine, fedavg or fedprox:mu=0.1.")
    ] = None,
    suite: Annotated[
        str,
        option(
            "Data", "quick: seven small federations, needs no files; full: 22, needs --files; default: quick."
        ),
    ] = "quick",
    files: Annotated[
        Path | None,
        option(
            "Data", "Folder that studies/defaults/prepare.py of the repository wrote, for the full suite."
        ),
    ] = None,
    device: Annotated[str, option("Training", "cpu or cuda; default: cpu.")] = "cpu",
    jobs: options.Jobs = None,
    check: Annotated[
        Path | None,
        option("Training", "A record, as this command writes it: run it again and compare to the bit."),
    ] = None,
    runs: Annotated[
        int | None,
        option("Training", f"Runs of the record that are run again, 0 for all; default: {SAMPLE}."),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "Output", "Folder; finished runs in it are used again; default: runs/bench-SUITE.", "--out -o"
        ),
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Train an algorithm under the protocol of studies/bench/README.md and show its row beside the stored
    ones.

    In every federation it tries three rates and three steps of the server on validation samples; the best of
    them trains with three seeds, and only those runs see test samples. The row is written as a record that
    --check can run again.
    """
    if (algorithm is None) == (check is None):
        raise UsageError(
            "name one algorithm, such as `copfl bench mymodule:FedMine`, or a record with --check"
        )
    options.check_algorithms([algorithm] if algorithm else [])  # before torch is imported
    from copfl.bench import bench as running
    from copfl.bench import rows, standings
    from copfl.bench.protocol import BenchMachine
    from copfl.engine.machine import processors

    machine, log = BenchMachine(device, files), options.logger(quiet)
    processes = jobs or (processors() if device == "cpu" else 1)
    if runs is not None and check is None:
        raise UsageError("--runs is for --check; without it every run of the protocol is needed")
    if check is not None:
        with stoppable():
            row = rows.read(check)
            checked = running.check(
                row, machine, runs=SAMPLE if runs is None else runs, jobs=processes, log=log
            )
        if checked.differ:
            raise RunError(f"{check}: {checked.text}")
        if not quiet:
            print(f"{check}: {checked.text}")
        return
    assert algorithm is not None
    chosen = rows.suite_of(suite)
    folder = out or Path("runs") / f"bench-{suite}"
    with stoppable(AGAIN):
        (row,) = running.bench([algorithm], chosen, folder, machine, jobs=processes, log=log)
    if as_json:
        print(json.dumps(row.as_json))
    elif not quiet:
        others = [other for other in rows.stored(chosen) if other.algorithm != row.algorithm]
        record = folder / running.record_name(algorithm)
        print(
            f"{standings.comparison(row, others)}\n\nRecord: {record}; `copfl bench --check {record}` runs "
            "it again"
        )
