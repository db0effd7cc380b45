"""`copfl audit`. Torch loads only when it is called."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from copfl.cli import options
from copfl.cli.options import argument, option
from copfl.errors import AGAIN, UsageError, at_least, stoppable
from copfl.experiment.known_runs import check_folder


def audit(
    *,
    run: Annotated[Path | None, argument("The folder of a finished run.")] = None,
    synthetic: Annotated[
        bool, option("Training", "Audit digits with four anomalous clients; default: off.", "--synthetic")
    ] = False,
    seeds: Annotated[
        str | None,
        option("Training", "More seeds for the same clients, such as 0,1,2; default: the run's, or 0,1,2."),
    ] = None,
    baselines: Annotated[
        str | None,
        option(
            "Training", "Algorithms whose scores are computed too, such as fedce, or none; default: fedce."
        ),
    ] = None,
    retrain: Annotated[
        bool, option("Training", "Train again without each client; default: on.", "--retrain/--no-retrain")
    ] = True,
    orders: Annotated[
        int, option("Training", "Sampled orders per round for Shapley values, at least 1; default: 40.")
    ] = 40,
    out: Annotated[
        Path | None,
        option("Output", "Folder for audit.json and audit.md; default: the run folder.", "--out -o"),
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Measure the contribution of each client, and compare it with the scores that weight the clients."""
    if (run is None) != synthetic:
        raise UsageError("name one run folder, or --synthetic for digits with anomalous clients")
    at_least(1, orders=orders)
    if run is not None:
        check_folder(run)
    from copfl.audit import audit as auditing
    from copfl.audit import tables as audit_tables
    from copfl.audit.shapley import Sampling
    from copfl.audit.synthetic import synthetic_audit
    from copfl.comparison.rows.entries import seeds_of
    from copfl.experiment.progress import counted
    from copfl.settings import named_code
    from copfl.tables import as_text

    folder = out or run or Path("runs") / "audit-synthetic"
    how: dict[str, Any] = {"sampling": Sampling(orders), "cache": folder / "audit"}
    if seeds is not None:
        how["seeds"] = seeds_of(seeds)
    if baselines is not None:
        how["baselines"] = [] if baselines == "none" else baselines.split(",")
        named_code.name(named_code.modules_in(baselines))
    audited = synthetic_audit if run is None else partial(auditing.run_audit, run)
    hidden = quiet or as_json
    with (
        stoppable(AGAIN),
        options.progress("rounds", "MofNCompleteColumn", hidden=hidden, transient=True) as bar,
    ):
        job = bar.add_task("rounds", total=None)

        def start(rounds: int) -> auditing.Tick:
            if not sys.stderr.isatty():
                return counted("audit", rounds, options.logger(hidden))
            bar.update(job, total=rounds)
            return partial(bar.advance, job)

        result = audited(**how, retrain=retrain, start=start)
    content, remarks = audit_tables.as_json(result), audit_tables.remarks(result)
    paths = audit_tables.write(folder, result, content)
    if as_json:
        print(json.dumps(content))
    elif not quiet:
        width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
        tables = [as_text(table, width) for table in audit_tables.tables_of(result, details=False)]
        print("\n\n".join([*tables, *remarks, f"Files: {', '.join(map(str, paths))}"]))
