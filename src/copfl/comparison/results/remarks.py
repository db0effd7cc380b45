"""What the reader of a comparison must know: its title, and notes on seeds, values and tuning.

`compare` and `sweep` collect the notes of a table here.
"""

from collections.abc import Sequence
from pathlib import Path

from copfl.comparison.jobs.job import Job
from copfl.comparison.results.tables import ComparisonRow
from copfl.comparison.rows.spaces import Grid, Range, Space
from copfl.errors import UsageError
from copfl.settings.toml import Tables

ENOUGH_SEEDS = 3  # fewer give a warning


def unequal(rows: Sequence[ComparisonRow]) -> list[str]:
    """A remark for the title if the rows differ in the optimizer or in the learning rates tried."""
    kinds = {
        repr(sorted((key, value) for key, value in row.optimizer.items() if key != "lr")) for row in rows
    }
    tried = [
        {row.tuned.space}
        if row.tuned.space
        else {t.settings.get("optimizer", {}).get("lr") for t in row.tuned.trials} - {None}
        for row in rows
    ]
    rates = {frozenset(of_row or {row.optimizer.get("lr")}) for of_row, row in zip(tried, rows, strict=True)}
    if len(kinds) > 1:
        return ["unequal optimizers"]
    return ["unequal learning rates"] if len(rates) > 1 else []


def title_of(jobs: Sequence[Job], seeds: Sequence[int], grid: Grid | None = None) -> str:
    """Such as "digits, 10 clients, 40 rounds, seeds 0, 1, 2"; without the keys of the sweep.

    Args:
        jobs: A run of each row.
        seeds: Of every row.
        grid: Of a sweep; its settings differ, so they are not in the title.
    """
    settings, rounds = jobs[0].run.run, [job.run.run.rounds for job in jobs]
    how_many = f"{min(rounds)} to {max(rounds)}" if min(rounds) < max(rounds) else str(rounds[0])
    texts = {"clients": f"{settings.clients} clients", "rounds": f"{how_many} rounds"}
    counts = [text for key, text in texts.items() if ("run", key) not in (grid or {})]
    if settings.new_clients:
        counts[0] += f" ({settings.new_clients:.0%} of them new)"
    word = "seeds" if len(seeds) > 1 else "seed"
    return ", ".join([Path(jobs[0].run.data.title).name, *counts, f"{word} {', '.join(map(str, seeds))}"])


def found_rounds(jobs: Sequence[Job], seed: int) -> list[str]:
    """How many rounds each row trains, where the number was found.

    Args:
        jobs: A run of each row.
        seed: With which it was found.
    """
    found = [f"{job.label} {job.run.run.rounds}" for job in jobs if job.run.run.find_rounds == "done"]
    how = f"those with the lowest loss on training samples that were held out, with seed {seed}"
    return [f"Rounds, {how}: {', '.join(found)}. Named rounds are the same for all rows."] if found else []


def few_seeds(seeds: Sequence[int]) -> list[str]:
    """A warning where the interval over seeds cannot tell much."""
    if len(seeds) >= ENOUGH_SEEDS:
        return []
    little = "One seed says nothing about the next: no difference is distinguishable"
    if len(seeds) > 1:
        little = "Two seeds give intervals so wide that only large differences are distinguishable"
    return [f"{little}. Use {ENOUGH_SEEDS} seeds or more."]


def undefined_values(rows: Sequence[ComparisonRow]) -> list[str]:
    """Which rows have values that are not defined or not finite; UsageError if their metrics differ."""
    metric = rows[0].metric
    if any(row.metric != metric for row in rows):
        named = ", ".join(f"{row.label} {row.metric.name}" for row in rows)
        raise UsageError(f"the rows have different primary metrics ({named}); name one for all of them")
    undefined = {row.label: sum(int(run.cost.get("undefined", 0)) for run in row.outcomes) for row in rows}
    broken = {row.label: sum(int(run.cost["broken"]) for run in row.outcomes) for row in rows}
    return [
        f"{label}: {count} evaluations of a model without a finite output count as {metric.title} "
        f"{metric.worst_value:g}."
        for label, count in broken.items()
        if count
    ] + [
        f"{label}: the {metric.title} of {count} evaluations is not defined by the client's test samples, "
        "such as those of one class; they are left out of the means."
        for label, count in undefined.items()
        if count
    ]


def values_at_the_end(rows: Sequence[ComparisonRow]) -> list[str]:
    """How many values are of a model before local training, and how many clients never trained, over the seeds."""
    labels: dict[str, list[str]] = {}  # by what is said of the rows
    for row in rows:
        at_the_end = [run.final_evaluation for run in row.outcomes if run.final_evaluation is not None]
        late, never = (
            sum(map(len, parts))
            for parts in ([f.clients for f in at_the_end], [f.never_trained for f in at_the_end])
        )
        without = sum(len({*one.never_trained} - {*one.clients}) for one in at_the_end)
        said = []
        if late:
            clients = sum(len(run.clients[row.metric.name]) for run in row.outcomes)
            said.append(
                f"{late} of {clients} values are of clients in no evaluated round, with the model that they have after "
                "the last one, before local training"
            )
        if never:
            lacking = f"; {without} of these get no model and have no value" if without else ""
            said.append(f"{never} clients never trained{lacking}")
        if said:
            labels.setdefault("; ".join(said), []).append(row.label)
    return [f"{', '.join(of_rows)}: {text}." for text, of_rows in labels.items()]


def tuning_notes(rows: Sequence[ComparisonRow], spaces: Sequence[Space]) -> list[str]:
    """Warnings where a wider grid may do better, or where the rows did not try equally many settings.

    Args:
        rows: The rows.
        spaces: What each of them tried.
    """
    ends = {row.label: at_an_end(row.tuned.chosen, space) for row, space in zip(rows, spaces, strict=True)}
    at_ends = ", ".join(f"{label} {' '.join(values)}" for label, values in ends.items() if values)
    notes = [f"At an end of the values tried, so a wider grid may do better: {at_ends}."] if at_ends else []
    budgets = {row.label: len(row.tuned.trials) for row in rows}
    if len(set(budgets.values())) > 1:
        counts = ", ".join(f"{label} {count}" for label, count in budgets.items())
        advantage = "those with more had an advantage"
        notes.append(f"The rows did not try equally many settings ({counts}): {advantage}.")
    return notes


def at_an_end(chosen: Tables, space: Space) -> list[str]:
    """Chosen values at an end of those tried, such as "lr=0.1"; there may be better ones beyond.

    Args:
        chosen: The settings that a row chose.
        space: What it tried.
    """
    result = []
    for (table, key), values in space.items():
        value = chosen.get(table, {}).get(key)
        if isinstance(values, Range):
            at_end = value is not None and values.at_an_end(value)
        else:
            numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
            at_end = len(numbers) > 1 and value in (min(numbers), max(numbers))
        if at_end:
            result.append(f"{key}={value:g}")
    return result
