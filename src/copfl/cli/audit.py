"""`copfl audit`. Torch loads only when it is called."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from copfl.cli import options
from copfl.errors import AGAIN, UsageError, stoppable


def audit(given: options.Given) -> None:
    """Measure the contribution of each client, and compare it with the scores that weight the clients."""
    from copfl.audit import audit as auditing
    from copfl.audit.shapley import Sampling
    from copfl.audit.synthetic import synthetic_audit
    from copfl.comparison.entries import seeds_of
    from copfl.tables import as_text

    if (given.run is None) != given.synthetic:
        raise UsageError("name one run folder, or --synthetic for digits with anomalous clients")
    if given.orders < 1 or not 0 <= given.truncate < 1:
        numbers = f"orders={given.orders} must be at least 1, and truncate={given.truncate}"
        raise UsageError(f"{numbers} from 0 to below 1")
    folder = given.out or given.run or Path("runs") / "audit-synthetic"
    how: dict[str, Any] = {"sampling": Sampling(given.orders, given.truncate), "cache": folder / "audit"}
    if given.seeds is not None:
        how["seeds"] = seeds_of(given.seeds)
    if given.baselines is not None:
        how["baselines"] = [] if given.baselines == "none" else given.baselines.split(",")
    audited = synthetic_audit if given.run is None else partial(auditing.run_audit, given.run)
    hidden = given.quiet or given.as_json
    with (
        stoppable(AGAIN),
        options.progress("rounds", "MofNCompleteColumn", hidden=hidden, transient=True) as bar,
    ):
        job = bar.add_task("rounds", total=None)

        def start(rounds: int) -> auditing.Tick:
            bar.update(job, total=rounds)
            return partial(bar.advance, job)

        found = audited(**how, retrain=given.retrain, start=start)
    content, remarks = auditing.as_json(found), auditing.remarks(found)
    paths = auditing.write(folder, found, content)
    if given.as_json:
        print(json.dumps(content))
    elif not given.quiet:
        width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
        tables = [as_text(table, width) for table in auditing.tables_of(found, details=False)]
        print("\n\n".join([*tables, *remarks, f"Files: {', '.join(map(str, paths))}"]))
