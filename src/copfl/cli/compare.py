"""`copfl compare`, `sweep` and `choose`. Torch is imported only when one of them is called."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from copfl.cli import options
from copfl.cli.options import Tables, option
from copfl.engine import machine as this_machine
from copfl.errors import AGAIN, UsageError, stoppable, with_code
from copfl.experiment import process
from copfl.settings import named_code, toml


class ComparisonOptions(NamedTuple):
    """Where a comparison runs, and what is shown of it."""

    out: Path | None
    jobs: int | None
    on: str | None
    plots: bool
    quiet: bool
    as_json: bool


NOTHING = "there is nothing to compare; name some algorithms: --algorithms copfl,fedavg,local"
ONE_OPTIMIZER = {
    "optimizer.name": "sgd, adam, mamo or module:Class for every row; own: each algorithm's; default: adam."
}


@options.training(helps=ONE_OPTIMIZER, has_rows=True)
def compare(
    line: Tables,
    *,
    algorithms: Annotated[
        list[str] | None,
        option(
            "Training",
            "Rows of the table, such as copfl,copfl:score=none,mymodule:FedMine; all: every one. "
            "Modules are searched in the current folder too.",
            "--algorithms -a",
        ),
    ] = None,
    seeds: options.Seeds = None,
    tune: Annotated[
        list[str] | None,
        option("Training", "KEY=VALUE,VALUE or lr=log:1e-4..1e-1; default: three learning rates."),
    ] = None,
    trials: Annotated[int | None, option("Training", "Settings tried in a range; default: 20.")] = None,
    no_tune: Annotated[bool, option("Training", "Tune nothing; default: off.", "--no-tune")] = False,
    tune_seeds: Annotated[str | None, option("Training", "Seeds to tune on; default: the first.")] = None,
    validation: Annotated[
        float | None,
        option("Training", "Fraction of the training samples to tune on, between 0 and 1; default: 0.2."),
    ] = None,
    reference: Annotated[str | None, option("Output", "The row to compare with; default: the first.")] = None,
    config: Annotated[
        Path | None,
        option("Training", "A TOML file with [[entry]] and [compare]; options override it.", "--config -c"),
    ] = None,
    last: options.Last = None,
    jobs: options.Jobs = None,
    on: options.On = None,
    out: options.Out = None,
    plots: options.Plots = True,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Compare algorithms on the same clients, with one optimizer and the same tuning for every row.

    The optimizer is Adam by default; `--optimizer own` gives each algorithm its own. Finished runs are used
    again.
    """
    options.check_algorithms(algorithms or [])  # before torch is imported
    if not (algorithms or config):
        raise UsageError(NOTHING)
    if no_tune and tune:
        raise UsageError("--tune names values to try, --no-tune tries none; leave one of them out")
    _start_early(line, jobs, on)
    with process.importing():
        from copfl.comparison import compare as comparing
        from copfl.comparison.rows import entries, entry_file, spaces

    file = entry_file.EntryFile([], {}, {}) if config is None else entry_file.read_file(config)
    named_code.name(entries.modules_of(algorithms or []))
    rows = entries.entries_of(algorithms) if algorithms else file.entries
    if not rows:
        raise UsageError(NOTHING)
    of_file = {"trials": trials, "validation": validation, "reference": reference, "last": last}
    how = file.options | {name: value for name, value in of_file.items() if value is not None}
    how |= {} if seeds is None else {"seeds": entries.seeds_of(seeds)}
    how |= {} if tune_seeds is None else {"tune_seeds": entries.seeds_of(tune_seeds, "--tune-seeds")}
    if no_tune or tune:
        how["tune"] = spaces.tried_values(tune or [], "--tune")
        named_code.name(named_code.modules_in(how["tune"]))
    run = partial(comparing.compare, rows, **how)
    machine = ComparisonOptions(out, jobs, on, plots, quiet, as_json)
    _carry_out("compare", run, _merged(file.base, line), machine)


@options.training(has_rows=True)
def sweep(
    line: Tables,
    *,
    over: Annotated[
        list[str] | None,
        option("Training", "Values of a key, such as algorithm.rate=0.05,0.25; twice for a grid."),
    ] = None,
    seeds: options.Seeds = None,
    config: Annotated[
        Path | None, option("Training", "A run.toml to start from; options override it.", "--config -c")
    ] = None,
    last: options.Last = None,
    jobs: options.Jobs = None,
    on: options.On = None,
    out: options.Out = None,
    plots: options.Plots = True,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Run one algorithm in every cell of a grid, without --algorithm CO-PFL. Finished runs are used again."""
    if not over:
        raise UsageError(
            "there is nothing to sweep over; name values, such as --over algorithm.rate=0.05,0.25"
        )
    _start_early(line, jobs, on)
    with process.importing():
        from copfl.comparison import compare as comparing
        from copfl.comparison.rows import entries, spaces

    file = {} if config is None else toml.read_file(config)
    file.get("run", {}).pop("seed", None)  # a run.toml has one; --seeds names them here
    how: dict[str, Any] = {} if seeds is None else {"seeds": entries.seeds_of(seeds)}
    how |= {} if last is None else {"last": last}
    grid = spaces.tried_values(over, "--over")
    named_code.name(named_code.modules_in(grid))
    run = partial(comparing.sweep, grid, **how)
    _carry_out("sweep", run, _merged(file, line), ComparisonOptions(out, jobs, on, plots, quiet, as_json))


@options.training(helps=ONE_OPTIMIZER, has_rows=True)
def choose(
    line: Tables,
    *,
    algorithms: Annotated[
        list[str] | None,
        option(
            "Training",
            "Candidates, as fedavg,mymodule:FedMine; default: all, some also with a step of the server. "
            "Modules are searched in the current folder too.",
            "--algorithms -a",
        ),
    ] = None,
    budget: Annotated[
        str,
        option(
            "Training",
            "Rounds of all training together, as 300, or a time, as 10m; default: what all take on one fold.",
        ),
    ] = "",
    seeds: options.Seeds = None,
    tune: Annotated[
        list[str] | None,
        option("Training", "Values that each candidate is tried with, as lr=1e-2,1e-3; repeatable."),
    ] = None,
    addons: Annotated[
        bool,
        option(
            "Training", "The best candidates are also tried with training add-ons; default: off.", "--addons"
        ),
    ] = False,
    retrain: Annotated[
        bool,
        option(
            "Training", "Train the choice on all training samples; default: on.", "--retrain/--no-retrain"
        ),
    ] = True,
    jobs: options.Jobs = None,
    out: Annotated[
        Path | None, option("Output", "Folder; what was tried in it is used again.", "--out -o")
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Find the best method for this federation, on folds of its training samples.

    Test samples are not used. Local training is always among the candidates.
    """
    options.check_algorithms(algorithms or [])  # before torch is imported
    _start_early(line, jobs, None)
    with process.importing():
        from copfl.comparison.choosing import choose as choosing
        from copfl.comparison.rows import entries, spaces

    values = spaces.tried_values(tune or [], "--tune")
    named_code.name(named_code.modules_in(values))
    with stoppable(AGAIN), _runs_shown(quiet) as (log, forecast):
        choice = choosing.choose(
            algorithms or ["all"],
            budget=budget,
            seeds=entries.seeds_of("0,1,2" if seeds is None else seeds),
            base_tables=line,
            out=out or Path("runs") / f"choose-{options.data_name(line)}",
            tune=values,
            addons=addons,
            retrain=retrain,
            jobs=jobs or 0,
            log=log,
            forecast=forecast,
        )
    if as_json:
        print((choice.folder / "ranking.json").read_text("utf-8"))
    elif not quiet:
        further = f"go on with `copfl run -c {choice.folder / 'run.toml'}{with_code()}`"
        print(f"{choice}\n\nFolder: {choice.folder}; {further}")


def _start_early(line: Tables, jobs: int | None, on: str | None) -> None:
    """Begins the processes of the runs before this one imports torch."""
    if on is None and jobs != 1 and this_machine.processors() > 1:
        from copfl.comparison.jobs import copies

        copies.process_context(str(line.get("run", {}).get("device", "cpu")))


@contextlib.contextmanager
def _runs_shown(quiet: bool) -> Iterator[tuple[Callable[[str], None], Any]]:
    """What prints lines about the runs of a command, and their forecast, which a terminal shows as a bar."""
    from copfl.comparison.jobs.forecast import Forecast
    from copfl.experiment.progress import bar_of_runs

    forecast = Forecast()
    if quiet or not sys.stderr.isatty():
        yield options.logger(quiet), forecast
        return
    with bar_of_runs(sys.stderr, forecast.left) as log:
        yield log, forecast


def _merged(first: Tables, second: Tables) -> Tables:
    """Both tables. The second overrides the first; options of a choice that it replaces are dropped."""
    result = dict(first)
    for title, table in second.items():
        before = first.get(title, {})
        same = table.get("name", before.get("name")) == before.get("name")
        result[title] = {**(before if same else {}), **table}
    return result


def _carry_out(command: str, run: Callable[..., Any], base: Tables, machine: ComparisonOptions) -> None:
    """Runs a comparison and shows it."""
    from copfl import charts
    from copfl.comparison.jobs import executors
    from copfl.comparison.results import plots as pictures
    from copfl.comparison.results import tables, writing

    folder = machine.out or Path("runs") / f"{command}-{options.data_name(base)}"
    if machine.jobs is not None and machine.on is not None:
        raise UsageError("--jobs is for this machine, and --on names a cluster; leave one of them out")
    run_settings = base.get("run", {})
    cpus = max(int(run_settings.get(key, 1)) for key in ("workers", "threads"))
    shown = _runs_shown(machine.quiet)
    with stoppable(AGAIN), executors.opened(machine.on, folder, cpus) as executor, shown as (log, forecast):
        comparison: tables.Comparison = run(
            base_tables=base,
            out=folder,
            jobs=machine.jobs or 0,
            executor=executor,
            log=log,
            forecast=forecast,
        )
    drawn = pictures.write(comparison, folder) if machine.plots else []
    if machine.plots and not charts.available():
        options.logger(machine.quiet)(f"copfl: {charts.MISSING}")
    if machine.as_json:
        print(json.dumps(writing.as_json(comparison)))
    elif not machine.quiet:
        names = ", ".join([*writing.FILES, *(path.name for path in drawn)])
        print(f"{tables.as_text(comparison)}\n\nFolder: {folder}, with {names}")
