"""`copfl audit`. Torch loads only when it is called."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from copfl.cli import options


def audit(
    *,
    run: Path | None = None,
    synthetic: bool = False,
    seeds: str | None = None,
    baselines: str | None = None,
    retrain: bool = True,
    orders: int = 40,
    truncate: float = 0.002,
    out: Path | None = None,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Measure the contribution of each client, and compare it with the scores that weight the clients."""
    from copfl.audit import audit as auditing
    from copfl.audit.shapley import Sampling
    from copfl.audit.synthetic import synthetic_audit
    from copfl.comparison.entries import seeds_of
    from copfl.errors import AGAIN, UsageError, stoppable
    from copfl.tables import as_text

    if (run is None) != synthetic:
        raise UsageError("name one run folder, or --synthetic for digits with anomalous clients")
    if orders < 1 or not 0 <= truncate < 1:
        raise UsageError(f"orders={orders} must be at least 1, and truncate={truncate} from 0 to below 1")
    folder = out or run or Path("runs") / "audit-synthetic"
    how: dict[str, Any] = {"sampling": Sampling(orders, truncate), "cache": folder / "audit"}
    if seeds is not None:
        how["seeds"] = seeds_of(seeds)
    if baselines is not None:
        how["baselines"] = [] if baselines == "none" else baselines.split(",")
    audited = synthetic_audit if run is None else partial(auditing.run_audit, run)
    with (
        stoppable(AGAIN),
        options.progress("rounds", "MofNCompleteColumn", hidden=quiet or as_json, transient=True) as bar,
    ):
        job = bar.add_task("rounds", total=None)

        def start(rounds: int) -> auditing.Tick:
            bar.update(job, total=rounds)
            return partial(bar.advance, job)

        found = audited(**how, retrain=retrain, start=start)
    content, remarks = auditing.as_json(found), auditing.remarks(found)
    paths = auditing.write(folder, found, content)
    if as_json:
        print(json.dumps(content))
    elif not quiet:
        width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
        tables = [as_text(table, width) for table in auditing.tables_of(found, details=False)]
        print("\n\n".join([*tables, *remarks, f"Files: {', '.join(map(str, paths))}"]))
