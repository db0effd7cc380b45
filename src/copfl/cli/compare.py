"""`copfl compare`, `sweep` and `choose`. Torch is imported only when one of them is called."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from copfl.cli import options
from copfl.errors import AGAIN, UsageError, stoppable
from copfl.experiment import config


def compare(given: options.Given, tables: options.Tables) -> None:
    """Compare algorithms on the same clients, with one optimizer and the same tuning for every row.

    The optimizer is Adam by default; `--optimizer own` gives each algorithm its own. Finished runs are used
    again.
    """
    from copfl.comparison import compare as comparing
    from copfl.comparison import entries

    if given.no_tune and given.tune:
        raise UsageError("--tune names values to try, --no-tune tries none; leave one of them out")
    file = entries.File([], {}, {}) if given.config is None else entries.read_file(given.config)
    rows = file.entries if not given.algorithms else entries.entries_of(given.algorithms)
    if not rows:
        raise UsageError("there is nothing to compare; name some algorithms: --algorithms copfl,fedavg,local")
    how = file.options | given.only("trials validation reference last")
    for name in ("seeds", "tune_seeds"):
        if (text := getattr(given, name)) is not None:
            how[name] = entries.seeds_of(text, f"--{name.replace('_', '-')}")
    if given.no_tune or given.tune:
        how["tune"] = {} if given.no_tune else entries.values_of(given.tune, "--tune")
    run = partial(comparing.compare, rows, **how)
    _carry_out("compare", run, _merged(file.base, tables), given)


def sweep(given: options.Given, tables: options.Tables) -> None:
    """Run one algorithm in every cell of a grid. Finished runs are used again."""
    from copfl.comparison import compare as comparing
    from copfl.comparison import entries

    if not given.over:
        raise UsageError("there is nothing to sweep over; name values, such as --over copfl.rate=0.05,0.25")
    file = {} if given.config is None else config.read_file(given.config)
    file.get("run", {}).pop("seed", None)  # a run.toml has one; --seeds names them here
    named = {} if given.algorithm is None else {"algorithm": {"name": given.algorithm}}
    how = given.only("last") | ({} if given.seeds is None else {"seeds": entries.seeds_of(given.seeds)})
    run = partial(comparing.sweep, entries.values_of(given.over, "--over"), **how)
    _carry_out("sweep", run, _merged(file, _merged(tables, named)), given)


def choose(given: options.Given, tables: options.Tables) -> None:
    """Find the best method for this federation: a race of the algorithms on validation samples.

    Test samples are not used. Local training is always in the race.
    """
    from copfl.comparison import choose as racing
    from copfl.comparison import entries

    with stoppable(AGAIN):
        found = racing.choose(
            entries.entries_of(given.algorithms or ["all"]),
            given.budget or "",
            entries.seeds_of(given.seeds or "0,1,2"),
            tables,
            given.out or Path("runs") / f"choose-{options.data_name(tables)}",
            tune=entries.values_of(given.tune or [], "--tune"),
            addons=given.addons,
            validation=entries.VALIDATION if given.validation is None else given.validation,
            retrain=given.retrain,
            jobs=default_jobs(tables.get("run", {})) if given.jobs is None else given.jobs,
            log=options.logger(given.quiet),
        )
    if given.as_json:
        print((found.folder / "ranking.json").read_text("utf-8"))
    elif not given.quiet:
        tested = f"\nTested: {found.tested}" if found.tested else ""
        further = f"go on with `copfl run -c {found.folder / 'run.toml'}`"
        print(f"{found}{tested}\n\nFolder: {found.folder}; {further}")


def _merged(first: options.Tables, second: options.Tables) -> options.Tables:
    """Both tables. The second overrides the first; options of a choice that it replaces are dropped."""
    result = dict(first)
    for title, table in second.items():
        before = first.get(title, {})
        same = table.get("name", before.get("name")) == before.get("name")
        result[title] = {**(before if same else {}), **table}
    return result


def default_jobs(run: dict[str, Any]) -> int:
    """One process per core that a run leaves free; on a GPU one, for start-up is paid once."""
    from copfl.engine.autotune import processors

    if run.get("device", "cpu") != "cpu":
        return 1
    return max(1, processors() // max(1, int(run.get("workers", 1))))


def _carry_out(command: str, run: Callable[..., Any], base: options.Tables, given: options.Given) -> None:
    """Runs a comparison and shows it."""
    from copfl import charts
    from copfl.comparison import executors, tables
    from copfl.comparison import plots as pictures

    log = options.logger(given.quiet)
    folder = given.out or Path("runs") / f"{command}-{options.data_name(base)}"
    if given.jobs is not None and given.on is not None:
        raise UsageError("--jobs is for this machine, and --on names a cluster; leave one of them out")
    own = base.get("run", {})
    processes = default_jobs(own) if given.jobs is None else given.jobs
    cpus = max(int(own.get(key, 1)) for key in ("workers", "threads"))
    with stoppable(AGAIN), executors.opened(given.on, folder, cpus) as executor:
        found: tables.Comparison = run(
            base_tables=base, out=folder, jobs=processes, executor=executor, log=log
        )
    drawn = pictures.write(found, folder) if given.plots else []
    if given.plots and not charts.available():
        log(f"copfl: {charts.MISSING}")
    if given.as_json:
        print(json.dumps(tables.as_json(found)))
    elif not given.quiet:
        names = ", ".join([*tables.FILES, *(path.name for path in drawn)])
        print(f"{tables.as_text(found)}\n\nFolder: {folder}, with {names}")
