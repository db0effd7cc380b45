"""`copfl choose`. Torch is imported only when it is called."""

from __future__ import annotations

from pathlib import Path

from copfl.cli import options
from copfl.cli.compare import default_jobs


def choose(
    *,
    tables: options.Tables,
    algorithms: list[str] | None = None,
    budget: str | None = None,
    seeds: str | None = None,
    tune: list[str] | None = None,
    addons: bool = False,
    validation: float | None = None,
    retrain: bool = True,
    jobs: int | None = None,
    out: Path | None = None,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Find the best method for this federation: a race of the algorithms on validation samples.

    Test samples are not used. Local training is always in the race.
    """
    from copfl.comparison import choose as racing
    from copfl.comparison import entries
    from copfl.errors import AGAIN, stoppable

    with stoppable(AGAIN):
        found = racing.choose(
            entries.entries_of(algorithms or ["all"]),
            budget or "",
            entries.seeds_of(seeds or "0,1,2"),
            tables,
            out or Path("runs") / f"choose-{options.data_name(tables)}",
            tune=entries.values_of(tune or [], "--tune"),
            addons=addons,
            validation=entries.VALIDATION if validation is None else validation,
            retrain=retrain,
            jobs=default_jobs(tables.get("run", {})) if jobs is None else jobs,
            log=options.logger(quiet),
        )
    if as_json:
        print((found.folder / "ranking.json").read_text("utf-8"))
    elif not quiet:
        tested = f"\nTested: {found.tested}" if found.tested else ""
        further = f"go on with `copfl run -c {found.folder / 'run.toml'}`"
        print(f"{found}{tested}\n\nFolder: {found.folder}; {further}")
