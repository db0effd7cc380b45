"""`copfl choose`. Torch is imported only when it is called."""

from pathlib import Path

from copfl.cli import options
from copfl.cli.compare import default_jobs


def choose(given: options.Given, tables: options.Tables) -> None:
    """Find the best method for this federation: a race of the algorithms on validation samples.

    Test samples are not used. Local training is always in the race.
    """
    from copfl.comparison import choose as racing
    from copfl.comparison import entries
    from copfl.errors import AGAIN, stoppable

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
