"""`copfl compare` and `copfl sweep`. Torch is imported only when one of them is called."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from copfl.cli import options
from copfl.cli.options import OUTPUT, TRAINING, option

Seeds = Annotated[str | None, option(TRAINING, "Seeds, such as 0,1,2 or 0-4; default: 0,1,2.", "--seeds")]
Last = Annotated[
    int | None, option(OUTPUT, "Average each metric over the last N evaluations; default: 5.", "--last")
]
Jobs = Annotated[
    int | None,
    option(
        TRAINING,
        "Processes, each with one run at a time; default: one per core, on a GPU one.",
        "--jobs",
        "-j",
    ),
]
Out = Annotated[
    Path | None,
    option(OUTPUT, "Folder of the runs and tables; finished runs in it are used again.", "--out", "-o"),
]
Plots = Annotated[bool, typer.Option(help="Draw pictures with matplotlib.", rich_help_panel=OUTPUT)]


@options.takes_run_options
def compare(
    *,
    tables: options.Tables,
    algorithms: Annotated[
        list[str] | None,
        option(
            TRAINING,
            "Rows of the table, such as copfl,copfl:score=none,fedavg:optimizer=adam:lr=0.001,local.",
            "--algorithms",
            "-a",
        ),
    ] = None,
    seeds: Seeds = None,
    tune: Annotated[
        list[str] | None,
        option(TRAINING, "Values to try on validation samples, as KEY=VALUE,VALUE; repeatable.", "--tune"),
    ] = None,
    tune_seeds: Annotated[str | None, option(TRAINING, "Seeds to tune on; default: the first.")] = None,
    validation: Annotated[
        float | None,
        option(TRAINING, "Fraction of the training samples to tune on, between 0 and 1; default: 0.2."),
    ] = None,
    reference: Annotated[
        str | None, option(OUTPUT, "The row that the others are compared with; default: the first.")
    ] = None,
    config: Annotated[
        Path | None,
        option(TRAINING, "A TOML file with [[entry]] and [compare]; options override it.", "--config", "-c"),
    ] = None,
    last: Last = None,
    jobs: Jobs = None,
    out: Out = None,
    plots: Plots = True,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Compare algorithms on the same clients, each tuned alike. Finished runs are used again."""
    from copfl.comparison import compare as comparing
    from copfl.comparison import entries
    from copfl.errors import AGAIN, stoppable

    file = entries.File([], {}, {}) if config is None else entries.read_file(config)
    base = _merged(file.base, tables)
    rows = file.entries if not algorithms else entries.entries_of(algorithms)
    given: dict[str, Any] = {
        "seeds": None if seeds is None else entries.seeds_of(seeds),
        "tune": None if tune is None else entries.values_of(tune, "--tune"),
        "tune_seeds": None if tune_seeds is None else entries.seeds_of(tune_seeds, "--tune-seeds"),
        "validation": validation,
        "reference": reference,
        "last": last,
    }
    chosen = {**file.options, **{name: value for name, value in given.items() if value is not None}}
    folder = out or Path("runs") / f"compare-{_name(base)}"
    with stoppable(AGAIN):
        found = comparing.compare(
            rows, base_tables=base, out=folder, jobs=_jobs(jobs, base), log=_log(quiet), **chosen
        )
    _show(found, folder, plots, quiet, as_json)


@options.takes_run_options
def sweep(
    *,
    tables: options.Tables,
    over: Annotated[
        list[str] | None,
        option(
            TRAINING,
            "Values of a key, as KEY=VALUE,VALUE such as copfl.rate=0.05,0.25; twice for a grid.",
            "--over",
        ),
    ] = None,
    algorithm: options.Algorithm = None,
    seeds: Seeds = None,
    config: Annotated[
        Path | None, option(TRAINING, "A run.toml to start from; options override it.", "--config", "-c")
    ] = None,
    last: Last = None,
    jobs: Jobs = None,
    out: Out = None,
    plots: Plots = True,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Run one algorithm in every cell of a grid. Finished runs are used again."""
    from copfl.comparison import compare as comparing
    from copfl.comparison import entries
    from copfl.comparison.jobs import LAST
    from copfl.errors import AGAIN, stoppable
    from copfl.experiment import config as configure

    file = {} if config is None else configure.read_file(config)
    file.get("run", {}).pop("seed", None)  # a run.toml has one; --seeds names them here
    named = {} if algorithm is None else {"algorithm": {"name": algorithm}}
    base = _merged(file, _merged(tables, named))
    folder = out or Path("runs") / f"sweep-{_name(base)}"
    with stoppable(AGAIN):
        found = comparing.sweep(
            entries.values_of(over or [], "--over"),
            [0, 1, 2] if seeds is None else entries.seeds_of(seeds),
            base,
            folder,
            jobs=_jobs(jobs, base),
            log=_log(quiet),
            last=LAST if last is None else last,
        )
    _show(found, folder, plots, quiet, as_json)


def _merged(first: options.Tables, second: options.Tables) -> options.Tables:
    """Both tables. The second overrides the first; options of a choice that it replaces are dropped."""
    result = dict(first)
    for title, table in second.items():
        before = first.get(title, {})
        same = table.get("name", before.get("name")) == before.get("name")
        result[title] = {**(before if same else {}), **table}
    return result


def _name(base: options.Tables) -> str:
    """The end of the default folder's name."""
    return Path(str(base.get("data", {}).get("name", "digits"))).stem.replace(":", "-")


def _jobs(jobs: int | None, base: options.Tables) -> int:
    from copfl.engine.autotune import processors

    run = base.get("run", {})
    if jobs is not None:
        return jobs
    if run.get("device", "cpu") != "cpu":  # start-up is paid once, and parallel runs would share its memory
        return 1
    return max(1, processors() // max(1, int(run.get("workers", 1))))


def _log(quiet: bool) -> Callable[[str], None] | None:
    return None if quiet else lambda text: print(text, file=sys.stderr, flush=True)


def _show(found: Any, folder: Path, plots: bool, quiet: bool, as_json: bool) -> None:
    from copfl import charts
    from copfl.comparison import plots as pictures
    from copfl.comparison import tables

    drawn = pictures.write(found, folder) if plots else []
    if plots and not charts.available() and not quiet:
        print(f"copfl: {charts.MISSING}", file=sys.stderr)
    if as_json:
        print(json.dumps(tables.as_json(found)))
    elif not quiet:
        names = ", ".join([*tables.FILES, *(path.name for path in drawn)])
        print(f"{tables.as_text(found)}\n\nFolder: {folder}, with {names}")
