"""`copfl choose`. Torch is imported only when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from copfl.cli import options
from copfl.cli.compare import Jobs, default_jobs
from copfl.cli.options import OUTPUT, TRAINING, option


@options.takes_run_options
def choose(
    *,
    tables: options.Tables,
    algorithms: Annotated[
        list[str] | None,
        option(TRAINING, "Candidates, as fedavg,copfl:rate=0.1; default: all.", "--algorithms", "-a"),
    ] = None,
    budget: Annotated[
        str | None,
        option(
            TRAINING,
            "Rounds of all runs together, as 300, or a time, as 10m; default: a third of a comparison.",
            "--budget",
        ),
    ] = None,
    seeds: Annotated[
        str | None, option(TRAINING, "Seeds, such as 0,1,2 or 0-4; default: 0,1,2.", "--seeds")
    ] = None,
    tune: Annotated[
        list[str] | None,
        option(TRAINING, "Values that each candidate races with, as lr=1e-2,1e-3; repeatable.", "--tune"),
    ] = None,
    addons: Annotated[
        bool,
        option(TRAINING, "The last candidates also race with training add-ons; default: off.", "--addons"),
    ] = False,
    validation: Annotated[
        float | None,
        option(TRAINING, "Fraction of the training samples to race on, between 0 and 1; default: 0.2."),
    ] = None,
    retrain: Annotated[
        bool,
        option(TRAINING, "Train the choice on all training samples; default: on.", "--retrain/--no-retrain"),
    ] = True,
    jobs: Jobs = None,
    out: Annotated[
        Path | None, option(OUTPUT, "Folder; finished runs in it are used again.", "--out", "-o")
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Find the best method for this federation: a race of the algorithms on validation samples.

    Test samples are not used. Local training is always in the race.
    """
    from copfl.comparison import choose as racing
    from copfl.comparison import entries
    from copfl.comparison.layers import VALIDATION
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
            validation=VALIDATION if validation is None else validation,
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
