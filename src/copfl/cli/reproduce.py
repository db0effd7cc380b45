"""`copfl reproduce`. Torch is imported only when it is called."""

from __future__ import annotations

import math
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from copfl.reproduction.experiments import Item
    from copfl.reproduction.store import Store

RESULTS, DOCS, RUNS = Path("results/reproduction"), Path("docs"), Path("runs/reproduce")


def reproduce(
    item: Annotated[
        str,
        typer.Argument(
            help="table1, table-ablation, table-samples, fig-convergence, fig-heatmap, fig-mamo, plus, "
            "plus-others, all, or a .toml."
        ),
    ],
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    chunk: Annotated[
        int,
        typer.Option(
            min=0, help="Clients side by side, where processes share a GPU; 0: what is free decides."
        ),
    ] = 0,
    seeds: Annotated[
        str | None,
        typer.Option(help="How many, from the item's first on; or which, such as 3-7; default: the item's."),
    ] = None,
    budget: Annotated[str, typer.Option(help="full: 200 rounds; short: 60 rounds.")] = "full",
    protocol: Annotated[str, typer.Option(help="paper, equal or both.")] = "both",
    column: Annotated[
        list[str] | None,
        typer.Option("--column", help="Only this column, such as cifar10-10; may be repeated."),
    ] = None,
    row: Annotated[list[str] | None, typer.Option("--row", help="Only this row; may be repeated.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop when they are over; the same command goes on.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", help="Where the data sets are; default: the variable COPFL_DATA."),
    ] = None,
    results: Annotated[Path, typer.Option(help="The records of the runs.")] = RESULTS,
    runs: Annotated[Path, typer.Option(help="Run folders, for going on in the middle of a run.")] = RUNS,
    docs: Annotated[
        Path, typer.Option(help="Where --from-records writes reproduction.md and reproduction/.")
    ] = DOCS,
    from_records: Annotated[
        bool, typer.Option("--from-records", help="Run nothing: write the pages out of the records.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Run nothing: say what is missing.")] = False,
    taken_in: Annotated[
        list[Path] | None,
        typer.Option(
            "--import", help="Take over this run folder of `copfl compare`, if the item asks for it."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Run the paper's tables and figures again, and set ours beside the paper's.

    What has a record in the results folder is not run again, so a table may be finished over several sittings.
    """
    from copfl.errors import AGAIN, RunError, UsageError, stoppable, unknown
    from copfl.experiment.loop import device_of
    from copfl.reproduction import batch, experiments, findings, pages, store

    clock = time.monotonic()

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    if protocol not in (*experiments.PROTOCOLS, "both"):
        raise unknown("protocol", protocol, (*experiments.PROTOCOLS, "both"))
    kept = store.opened(results)
    for odd in kept.odd:
        say(f"copfl: not used: {odd}")
    left, problems = 0, list[str]()
    shared: dict[str, Any] = {
        "store": kept,
        "folder": runs,
        "place": _place(device, chunk, data_dir),
        "say": say,
    }
    session = batch.Sitting(**shared, end=math.inf if minutes is None else clock + 60 * minutes)
    for whole in [experiments.read(name) for name in (experiments.names() if item == "all" else [item])]:
        chosen = _only(whole, column, row)
        protocols = [p for p in chosen.protocols if protocol in (p, "both")]
        if not protocols:
            if item == "all":
                continue
            raise UsageError(
                f"{item} is not run under the {protocol} protocol; it is under {', '.join(chosen.protocols)}"
            )
        how = chosen.budget(budget)
        wanted = _seeds(seeds, how.seeds, how.first_seed)
        if taken_in:
            _import(chosen, budget, protocols, wanted, taken_in, kept, say)
            continue
        if from_records:
            for path in _write(chosen, budget, protocols, wanted, kept, docs, say):
                say(f"written: {path}")
            continue
        plans = list(experiments.plans(chosen, chosen.budget(budget), protocols))
        if plan:
            print(f"{chosen.name}: {batch.count_left(plans, wanted, kept)} runs are missing")
            continue
        if batch.count_left(plans, wanted, kept):
            device_of(device)  # an error now, and not one for every run
        with stoppable(AGAIN):
            missing, failed = batch.carry_on(plans, wanted, session)
        left, problems = left + missing, problems + failed
        if not quiet:
            seen = findings.found(chosen, budget, protocols, wanted, kept)
            print(pages.summary(seen, chosen.budget(budget)))
        if time.monotonic() > session.end:
            break
    if problems:
        raise RunError(f"{len(problems)} runs failed, the others are there. {'; '.join(problems)}")
    if left:
        say(f"copfl: {left} runs are left; the same command goes on: copfl {shlex.join(sys.argv[1:])}")


def _place(device: str, chunk: int, data_dir: Path | None) -> dict[str, dict[str, Any]]:
    if device == "auto":  # what is run depends on it: on a GPU seeds go in step
        from copfl.experiment.loop import device_of

        device = device_of(device).type
    data = {} if data_dir is None else {"dir": str(data_dir.absolute())}
    return {"run": {"device": device, "chunk": chunk}, "data": data}


def _seeds(given: str | None, usual: int, first: int) -> list[int]:
    """So many from the item's first on, or those that are named."""
    from copfl.comparison.entries import seeds_of
    from copfl.errors import at_least

    if given is None or given.strip().isdecimal():
        count = usual if given is None else int(given)
        at_least(1, seeds=count)
        return list(range(first, first + count))
    return seeds_of(given)


def _only(item: Item, columns: list[str] | None, rows: list[str] | None) -> Item:
    """The item with some columns and rows."""
    import dataclasses

    from copfl.errors import unknown

    for what, wanted, there in (
        ("column", columns, [column.name for column in item.columns]),
        ("row", rows, [row.label for row in item.rows]),
    ):
        for name in wanted or []:
            if name not in there:
                raise unknown(what, name, there)
    return dataclasses.replace(
        item,
        columns=[column for column in item.columns if not columns or column.name in columns],
        rows=[row for row in item.rows if not rows or row.label in rows],
        claims=[] if columns or rows else item.claims,
    )


def _write(
    item: Item, budget: str, protocols: list[str], seeds: list[int], kept: Store, docs: Path, say: Any
) -> list[Path]:
    """The item's page and pictures, and its place in reproduction.md."""
    from copfl.charts import MISSING, available
    from copfl.files import write_bytes
    from copfl.reproduction import figures, findings, pages

    seen, how = findings.found(item, budget, protocols, seeds, kept), item.budget(budget)
    stem = item.name if budget == "full" else f"{item.name}-{budget}"
    folder = docs / "reproduction"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.write(seen, stem, folder)
    if figures.names(seen, stem) and not available():
        say(f"copfl: {MISSING}")
    names = figures.names(seen, stem)
    page = folder / f"{stem}.md"
    write_bytes(page, pages.page(seen, how, names).encode())
    written = [page, *drawn]
    front = docs / "reproduction.md"
    if front.exists() and f"<!-- {stem} -->" in (text := front.read_text("utf-8")):
        linked = [f"reproduction/{name}" for name in names]
        made = (
            pages.summary(seen, how, linked)
            + f"\nMore, down to every seed: [{item.title}](reproduction/{page.name})."
        )
        write_bytes(front, pages.put(text, stem, made).encode())
        written.append(front)
    return written


def _import(
    item: Item,
    budget: str,
    protocols: list[str],
    seeds: list[int],
    folders: list[Path],
    kept: Store,
    say: Any,
) -> None:
    """Takes over finished runs of `copfl compare` that are what the item asks for, setting by setting."""
    from copfl.errors import CopflError
    from copfl.reproduction import experiments, store

    how = item.budget(budget)
    asked: dict[str, experiments.Run] = {}
    for plan in experiments.plans(item, how, protocols):
        asked |= {store.id_of(trial.run): trial.run for trial in plan.trials()}
        asked |= {store.id_of(run): run for choice in plan.choices for run in plan.runs(choice, seeds)}
    for folder in folders:
        try:
            run = store.run_in(folder, {True: how.tune_last, False: how.last})
            wanted = asked.get(store.id_of(run))
            if wanted is None:
                say(f"{folder}: not what {item.name} asks for")
            elif kept.get(wanted) is not None:
                say(f"{folder}: there is a record of it already")
            elif not store.serves(record := store.record_of(folder, run), wanted):
                say(f"{folder}: not taken over: it looked at less than {item.name} shows")
            else:
                say(f"{folder}: {kept.add(record)}")
        except CopflError as error:
            say(f"{folder}: not taken over: {error}")
