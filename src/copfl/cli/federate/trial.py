"""`copfl federate`: a federation on this machine, with real processes."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from copfl.cli.federate.options import (
    AppFolder,
    LogFormat,
    LogLevel,
    Metrics,
    Rounds,
    RunName,
    Secure,
    Settings,
    Wire,
    app_config,
    given,
    require_flower,
    set_environment,
)
from copfl.cli.options import option
from copfl.errors import stoppable, with_code

Nodes = Annotated[int | None, option("Federation", "Number of nodes; default: the app's number of clients.")]
Data = Annotated[
    str | None,
    option("Data", "A data set to partition among the nodes; default: that of init.", "--dataset -d"),
]
Scheme = Annotated[
    str | None, option("Data", "Of `copfl list partitions`; default: that of init.", "--partition")
]
Sites = Annotated[
    list[Path] | None,
    option("Data", "The data of a node, in order; repeatable. Default: a data set is partitioned.", "--site"),
]


def up(
    *,
    folder: AppFolder,
    sites: Sites = None,
    nodes: Nodes = None,
    data: Data = None,
    scheme: Scheme = None,
    secure: Secure = None,
    wire: Wire = None,
    rounds: Rounds = None,
    settings: Settings = None,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Train here, with real processes that end with this command."""
    set_environment(metrics, log_format, log_level)
    config = app_config(settings, **{"network.wire": wire, "run.rounds": rounds})
    local = _local()
    for problem in local.site_problems(folder, sites or []):
        print(f"copfl: warning: {problem}", file=sys.stderr)
    where = given(sites=sites, nodes=nodes, data=data, scheme=scheme, secure=secure)
    _show(folder, local.up(folder, config=config, **where))


def resume(
    *,
    folder: AppFolder,
    run: RunName = None,
    sites: Sites = None,
    nodes: Nodes = None,
    data: Data = None,
    scheme: Scheme = None,
    rounds: Rounds = None,
    rollback: Annotated[
        bool,
        option(
            "Federation", "Set the nodes back to the server's round, if it lost checkpoints.", "--rollback"
        ),
    ] = False,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Continue such a run that was interrupted, with the data options of `up`."""
    set_environment(metrics, log_format, log_level)
    local = _local()
    from copfl.federation.protocol.app_folder import last_run

    run = run or last_run(folder)
    if done := local.finished(folder, run, rounds):
        print(f"the run {run} is finished: it has {done} rounds; --rounds N continues it to N rounds in all")
        return
    config = given(**{"run.rounds": rounds}) | ({"session.rollback": True} if rollback else {})
    where = given(sites=sites, nodes=nodes, data=data, scheme=scheme)
    _show(folder, local.resume(folder, run, config=config, **where))


def personalize(
    *,
    folder: AppFolder,
    data: Annotated[str, option("Data", "The new client's data: a file or a folder.", "--data -d")],
    test: Annotated[
        str | None, option("Data", "The test rows of a table; default: some of its rows.", "--test")
    ] = None,
    run: RunName = None,
    updates: Annotated[int, option("Training", "Number of local updates, at least 1; default: 3.")] = 3,
    state: Annotated[str | None, option("Output", "Folder of its model; default: nodes/new-client.")] = None,
) -> None:
    """Fit the trained model to a new client, and measure it."""
    local = _local()
    from copfl.measures.metrics import MetricInfo

    result = local.join(folder, data, test=test, state=state, run=run, updates=updates)
    name = result["metric"]
    before, after = result[f"{name}_before"], result[f"{name}_after"]
    print(f"{MetricInfo(name).title} {before:.4f} before, {after:.4f} after {updates} local updates")
    if result["note"]:
        print(f"data: {result['note']}")
    print(f"model: {result['model']}")


def _local() -> ModuleType:
    """The module of local federations, with torch."""
    require_flower()
    from copfl.federation.machines import local

    return local


def _show(folder: Path, rounds: Iterator[dict[str, Any]]) -> None:
    """Prints a line per round when it ends, and what each client contributes, where the run measured it."""
    from copfl import tables
    from copfl.federation.operations.sections import contributions_of
    from copfl.federation.operations.watched import read
    from copfl.federation.server.folder import as_text
    from copfl.report import contributions

    print("Starting a SuperLink and the nodes; the first round takes half a minute.", file=sys.stderr)
    with stoppable(f"`copfl federate resume {folder}{with_code()}` continues from the last round"):
        for record in rounds:
            print(as_text(record), flush=True)
    contributed = contributions_of(read(folder))
    if contributed is not None:
        width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
        print(f"\n{tables.as_text(contributions.table(contributed), width)}")
