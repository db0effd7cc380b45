"""`copfl compare` and `copfl sweep`. Torch is imported only when one of them is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from copfl.cli import options


def compare(
    *,
    tables: options.Tables,
    algorithms: list[str] | None = None,
    seeds: str | None = None,
    tune: list[str] | None = None,
    trials: int | None = None,
    no_tune: bool = False,
    tune_seeds: str | None = None,
    validation: float | None = None,
    reference: str | None = None,
    config: Path | None = None,
    last: int | None = None,
    jobs: int | None = None,
    on: str | None = None,
    out: Path | None = None,
    plots: bool = True,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Compare algorithms on the same clients, with one optimizer and the same tuning for every row.

    The optimizer is Adam by default; `--optimizer own` gives each algorithm its own. Finished runs are used
    again.
    """
    from copfl.comparison import compare as comparing
    from copfl.comparison import entries
    from copfl.errors import UsageError

    if no_tune and tune:
        raise UsageError("--tune names values to try, --no-tune tries none; leave one of them out")
    file = entries.File([], {}, {}) if config is None else entries.read_file(config)
    rows = file.entries if not algorithms else entries.entries_of(algorithms)
    given = {
        "seeds": seeds and entries.seeds_of(seeds),
        "tune": {} if no_tune else tune and entries.values_of(tune, "--tune"),
        "trials": trials,
        "tune_seeds": tune_seeds and entries.seeds_of(tune_seeds, "--tune-seeds"),
        "validation": validation,
        "reference": reference,
        "last": last,
    }
    run = partial(comparing.compare, rows, **file.options | _without_none(given))
    base = _merged(file.base, tables)
    _carry_out("compare", run, base, Where(jobs, on), out, plots=plots, quiet=quiet, as_json=as_json)


def sweep(
    *,
    tables: options.Tables,
    over: list[str] | None = None,
    algorithm: str | None = None,
    seeds: str | None = None,
    config: Path | None = None,
    last: int | None = None,
    jobs: int | None = None,
    on: str | None = None,
    out: Path | None = None,
    plots: bool = True,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Run one algorithm in every cell of a grid. Finished runs are used again."""
    from copfl.comparison import compare as comparing
    from copfl.comparison import entries
    from copfl.experiment import config as configure

    file = {} if config is None else configure.read_file(config)
    file.get("run", {}).pop("seed", None)  # a run.toml has one; --seeds names them here
    named = {} if algorithm is None else {"algorithm": {"name": algorithm}}
    base = _merged(file, _merged(tables, named))
    given = {"seeds": seeds and entries.seeds_of(seeds), "last": last}
    run = partial(comparing.sweep, entries.values_of(over or [], "--over"), **_without_none(given))
    _carry_out("sweep", run, base, Where(jobs, on), out, plots=plots, quiet=quiet, as_json=as_json)


class Where(NamedTuple):
    """Where runs are trained."""

    jobs: int | None
    on: str | None


def _without_none(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


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


def _carry_out(
    command: str,
    run: Callable[..., Any],
    base: options.Tables,
    where: Where,
    out: Path | None,
    *,
    plots: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Runs a comparison and shows it."""
    from copfl import charts
    from copfl.comparison import executors, tables
    from copfl.comparison import plots as pictures
    from copfl.errors import AGAIN, UsageError, stoppable

    log, folder = options.logger(quiet), out or Path("runs") / f"{command}-{options.data_name(base)}"
    if where.jobs is not None and where.on is not None:
        raise UsageError("--jobs is for this machine, and --on names a cluster; leave one of them out")
    own = base.get("run", {})
    processes = default_jobs(own) if where.jobs is None else where.jobs
    cpus = max(int(own.get(key, 1)) for key in ("workers", "threads"))
    with stoppable(AGAIN), executors.opened(where.on, folder, cpus) as executor:
        found: tables.Comparison = run(
            base_tables=base, out=folder, jobs=processes, executor=executor, log=log
        )
    drawn = pictures.write(found, folder) if plots else []
    if plots and not charts.available():
        log(f"copfl: {charts.MISSING}")
    if as_json:
        print(json.dumps(tables.as_json(found)))
    elif not quiet:
        names = ", ".join([*tables.FILES, *(path.name for path in drawn)])
        print(f"{tables.as_text(found)}\n\nFolder: {folder}, with {names}")
