"""The ranking of a race: its rows, its table and its files.

`choose` makes a `Choice` of a race and writes it.
"""

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from copfl import charts
from copfl.comparison.choosing.verdict import STAY_ALONE, Verdict
from copfl.comparison.results.results import Record
from copfl.files import write_bytes
from copfl.measures.metrics import MetricInfo
from copfl.rivals.file import as_json as rivals_as_json
from copfl.rivals.records import TITLES, Rivals
from copfl.settings.schema import Run
from copfl.settings.toml import written
from copfl.stats import LAST, Difference
from copfl.tables import Table, as_html, as_markdown, as_text, data_frame, listed, plain

LOCAL = "local"
WIDTH = 110  # of the text
CHOSEN, ALIKE = "chosen", "not distinguishable"


class Ranked(NamedTuple):
    label: str
    rounds: int  # that each of its runs was trained for
    seeds: int  # its runs
    value: float  # the primary metric on the validation samples: mean over clients and seeds
    gap: Difference | None  # to the choice, after as many rounds; None of the choice itself
    status: str  # CHOSEN, ALIKE, "worse", why it cannot be compared, or when and why it was dropped


@dataclass(frozen=True, eq=False, repr=False)
class Choice:
    """The result of a race; `print` shows the ranking."""

    title: str
    chosen: str
    ranking: list[Ranked]
    verdict: Verdict  # whether it pays to federate
    metric: MetricInfo
    spent: float  # rounds of training, of all runs of the race
    notes: list[str]
    folder: Path
    tested: str = ""  # the choice, trained on all training samples, on the test samples
    rivals: Rivals | None = None  # what each client has alone, on the validation samples of the first seed

    @property
    def rival(self) -> str:
        """The kind of model that each client should train alone; "" where the choice is a method."""
        return self.rivals.chosen if self.rivals is not None and self.verdict.kind == STAY_ALONE else ""

    @property
    def answer(self) -> list[str]:
        """What to do, in sentences: the method, whether to federate, and how good both are."""
        (best,) = (row for row in self.ranking if row.status == CHOSEN)
        alike = [row.label for row in self.ranking if row.status == ALIKE]
        first = f"Of the methods, {self.chosen} is the best." if self.rival else f"{self.chosen} is chosen."
        equal = (
            f" It has the best mean, and is not shown to be better than {listed(alike, 5)}." if alike else ""
        )
        values = [f"{self.chosen} {self.metric.text(best.value)}{self.metric.unit}"]
        if self.rivals is not None:
            mean = self.rivals.means(self.rivals.chosen)[self.metric.name]
            values.append(f"{TITLES[self.rivals.chosen]} alone {self.metric.text(mean)}{self.metric.unit}")
        measured = f"Mean {self.metric.title} on validation samples: {', '.join(values)}."
        tested = [f"Tested: {self.tested}"] if self.tested else []
        return [f"{first}{equal}", f"Does it pay to federate? {self.verdict.answer}. {measured}", *tested]

    def __str__(self) -> str:
        """The answer, the ranking, and then what it rests on."""
        table, reasons = table_of(self), dict[str, list[str]]()
        rows = []
        for row in table.rows:
            short, _, _ = row[-1].partition(",")
            if short != row[-1]:
                reasons.setdefault(row[-1], []).append(row[0])
            rows.append([*row[:-1], short])
        details = [*table.notes[1:], *(f"{why}: {', '.join(labels)}." for why, labels in reasons.items())]
        return "\n".join(
            [
                table.title,
                *(line for sentence in self.answer for line in textwrap.wrap(sentence, WIDTH)),
                "",
                as_text(table._replace(title="", rows=rows, notes=()), WIDTH),
                "",
                "Details",
                *(
                    textwrap.fill(
                        note, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
                    )
                    for note in details
                ),
            ]
        )

    def __repr__(self) -> str:
        tested = [f"  {self.tested}"] if self.tested else []
        return "\n".join([f"{self.chosen} for {self.title}", f"  {self.verdict.text}", *tested])

    def _repr_html_(self) -> str:
        return as_html(table_of(self))

    def to_pandas(self) -> Any:
        """A data frame of pandas with a row per candidate, the best first."""
        rows = [(row.label, row.rounds, row.seeds, row.value, row.status) for row in self.ranking]
        head = ("method", "rounds", "seeds", self.metric.name, "status")
        return data_frame({title: [row[n] for row in rows] for n, title in enumerate(head)})


def table_of(choice: Choice) -> Table:
    metric, rows = choice.metric, []
    for row in choice.ranking:
        if not row.rounds:
            continue  # a note has their number
        gap = ["", ""]
        if row.gap is not None:
            gap = [metric.text(row.gap.mean, sign="+"), metric.interval(*row.gap.clients)]
        rows.append([row.label, f"{row.rounds}", f"{row.seeds}", metric.text(row.value), *gap, row.status])
    if choice.rivals is not None:
        for name in choice.rivals.values:
            mean = choice.rivals.means(name)[metric.name]
            status = "the best one alone" if name == choice.rivals.chosen else ""
            rows.append([f"{TITLES[name]}, alone", "", "1", metric.text(mean), "", "", status])
    head = ["", "rounds", "seeds", metric.label, "to the best", "95 % over sites", ""]
    notes = [" ".join(choice.answer), choice.verdict.text]
    if choice.rivals is not None:
        notes.append(
            f"alone: {choice.rivals.models} at each site, on the samples that the race trains on; the best one "
            "by cross-validation within them. They can be left out (rivals)."
        )
    untrained = [row for row in choice.ranking if not row.rounds]
    for status in dict.fromkeys(row.status for row in untrained):
        labels = [row.label for row in untrained if row.status == status]
        notes.append(f"{len(labels)} of {len(choice.ranking)} candidates: {status} ({listed(labels, 5)}).")
    notes.append(
        f"On validation samples of each site, no test sample; {choice.spent:,.0f} rounds in all. A value is "
        f"the mean of the last third of the evaluations, at most {LAST}. to the "
        "best: the paired difference to the choice after as many rounds, or to the best then; a candidate is "
        "worse if its interval excludes 0 when corrected for the number of candidates."
    )
    return Table(f"Which method for {choice.title}?", head, rows, [*notes, *choice.notes])


def write(choice: Choice, curves: Mapping[str, list[Record]], run: Run) -> None:
    """Writes the ranking, the curves and run.toml into the folder.

    Args:
        choice: The result of the race.
        curves: The records of the candidates by label, one of each seed.
        run: The settings of the choice.
    """
    table, out = table_of(choice), choice.folder
    content = {
        "answer": choice.answer,
        "table": {**table._asdict(), "notes": table.notes[2:]},  # without the answer and the verdict
        "chosen": choice.chosen,
        "metric": choice.metric.as_json(),
        "verdict": choice.verdict._asdict(),
        "spent": choice.spent,
        "ranking": [row._asdict() for row in choice.ranking],
        "rival": choice.rival,
        "rivals": None if choice.rivals is None else rivals_as_json(choice.rivals),
        "curves": {
            label: [
                {"rounds": run.rounds, choice.metric.name: run.curves[choice.metric.name]} for run in runs
            ]
            for label, runs in curves.items()
        },
        "notes": choice.notes,
    }
    texts = {
        "ranking.txt": str(choice),
        "ranking.md": as_markdown(table),
        "ranking.json": json.dumps(plain(content), indent=1),
        "run.toml": written(run.tables()),
    }
    for name, text in texts.items():
        write_bytes(out / name, f"{text}\n".encode())
    if charts.available():
        for kind, picture in charts.pictures([[_curves(choice, curves)]], choice.title).items():
            write_bytes(out / f"curves.{kind}", picture)


def _curves(choice: Choice, curves: Mapping[str, list[Record]]) -> charts.Lines:
    from copfl.comparison.results.plots import axis, curve  # only pictures need it

    shown = [row for row in choice.ranking if row.rounds]
    lines = [curve(row.label, curves[row.label], choice.metric, number) for number, row in enumerate(shown)]
    return charts.Lines("curves", choice.title, "", [], f"validation: {axis(choice.metric)}", lines)
