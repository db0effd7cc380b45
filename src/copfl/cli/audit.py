"""`copfl audit`. Torch loads only when it is called."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer


def audit(
    run: Annotated[Path | None, typer.Argument(help="The folder of a run that has ended.")] = None,
    planted: Annotated[
        bool,
        typer.Option(
            "--planted", help="Instead of a run: digits with four clients that are known to be odd."
        ),
    ] = False,
    seeds: Annotated[
        str | None,
        typer.Option(help="Such as 0,1,2: the same clients under more seeds. --planted: default 0,1,2."),
    ] = None,
    beside: Annotated[
        str | None, typer.Option(help="Algorithms whose scores are tried too; default: fedce. Or none.")
    ] = None,
    retrain: Annotated[
        bool,
        typer.Option(
            "--retrain/--no-retrain", help="Train again without each client; a run for each of them."
        ),
    ] = True,
    orders: Annotated[int, typer.Option(help="Sampled orders a round for Shapley values, at most.")] = 40,
    truncate: Annotated[
        float, typer.Option(help="What gains less accuracy than this gains nothing.")
    ] = 0.002,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for audit.json and audit.md; default: the run's own."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Ask whether the weight is deserved: what each client is worth, beside what the scores say."""
    from copfl.audit import audit as auditing
    from copfl.audit import study as studying
    from copfl.audit import tables
    from copfl.audit.games import Sampling
    from copfl.errors import AGAIN, UsageError, stoppable

    if (run is None) != planted:
        raise UsageError("name one run folder, or --planted for a federation made to be audited")
    if orders < 1 or not 0 <= truncate < 1:
        raise UsageError(f"orders={orders} must be at least 1, and truncate={truncate} from 0 to below 1")
    sampling, more = Sampling(orders, truncate), _seeds(seeds)
    with stoppable(AGAIN), _progress(quiet or as_json) as start:
        if run is None:
            folder = out or Path("runs") / "audit-planted"
            study = studying.study(more or (0, 1, 2), sampling=sampling, notes=folder / "audit", start=start)
            title, grids, said = studying.TITLE, studying.sheets(study), tables.remarks(study.audit)
            content = studying.as_json(study)
        else:
            folder = out or run
            names = None if beside is None else [] if beside == "none" else beside.split(",")
            found = auditing.run_audit(
                run,
                seeds=more,
                beside=names,
                retrain=retrain,
                sampling=sampling,
                notes=folder / "audit",
                start=start,
            )
            title, grids, said = f"Audit: {found.title}", tables.sheets(found), tables.remarks(found)
            content = tables.as_json(found)
    paths = tables.write(folder, title, grids, said, content)
    if as_json:
        print(json.dumps(content))
    elif not quiet:
        tables.show(grids, [*said, f"Files: {', '.join(map(str, paths))}"], sys.stdout)


def _seeds(text: str | None) -> list[int]:
    from copfl.errors import UsageError

    try:
        found = [int(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        found = [-1]
    if any(seed < 0 for seed in found):
        raise UsageError(
            f'--seeds "{text}" must be whole numbers from 0 on with commas between them, such as 0,1,2'
        )
    return found


@contextlib.contextmanager
def _progress(silent: bool) -> Iterator[Callable[[int], Callable[[int], None]] | None]:
    """What is told how much there is to do and gives what to tell of each round; None where nobody looks."""
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("rounds"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        job = bar.add_task("rounds", total=None)

        def start(total: int) -> Callable[[int], None]:
            bar.update(job, total=total)
            return lambda rounds: bar.advance(job, rounds)

        yield start
