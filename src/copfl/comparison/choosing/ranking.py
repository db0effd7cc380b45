"""The table of losses as a ranking: its rows, its table and its files.

`choose` makes a `Choice` and writes it.
"""

import json
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from copfl.choosing.choice import Losses, difference
from copfl.experiment.answer import SITES
from copfl.experiment.choice import Choice as Chosen
from copfl.experiment.choice import title_of
from copfl.files import write_bytes
from copfl.measures.metrics import METRICS
from copfl.settings.schema import Run
from copfl.settings.toml import written
from copfl.stats import LEVEL, Interval, t_quantile
from copfl.tables import Table, as_html, as_markdown, as_text, data_frame, listed, plain
from copfl.verdict.headline import headline, statements
from copfl.verdict.verdict import Verdict
from copfl.verdict.verdict import as_json as verdict_as_json

WIDTH = 110  # of the text
CHOSEN, ALIKE, WORSE, SHOWN = "chosen", "not distinguishable", "worse", "better, and is not trained here"
NORMAL = 1e6  # degrees of freedom of the normal distribution


class Ranked(NamedTuple):
    label: str
    folds: int  # on which it was tried
    seeds: int
    rounds: int  # after which its loss is the lowest; 0: it ends by itself
    value: float  # the mean loss over sites of the rows that it did not see
    gap: float  # to the choice, on common rows; nan: none
    bounds: Interval  # of that difference, 95 %
    status: str  # CHOSEN, ALIKE, WORSE, SHOWN, or when and why it was given up


class Row(NamedTuple):
    """A candidate as it was tried."""

    label: str
    losses: Losses
    folds: int
    seeds: int
    rounds: int
    given_up: str = ""  # when and why; "": it could be chosen


def ranked(rows: Sequence[Row], chosen: str, is_rmse: bool, means: Mapping[str, float]) -> list[Ranked]:
    """The ranking: what could be chosen by its loss, then the others, later given up first.

    Args:
        rows: That were tried.
        chosen: The name of the choice.
        is_rmse: Whether losses are squared errors.
        means: Of what could be chosen, on common rows.
    """
    best = next(row for row in rows if row.label == chosen)
    able = [row for row in rows if not row.given_up]
    narrow, wide = (1 - (1 - LEVEL) / (2 * n) for n in (1, max(1, len(able) - 1)))
    found = []
    for row in rows:
        name = row.label
        if name == chosen:
            gap, error = math.nan, math.nan
        else:
            gap, error = difference(row.losses, best.losses, is_rmse)
        half = t_quantile(narrow, NORMAL) * error
        beyond = t_quantile(wide, NORMAL) * error
        status = row.given_up or (
            CHOSEN if name == chosen else WORSE if gap > beyond else SHOWN if gap < -beyond else ALIKE
        )
        value = means.get(name, math.nan)
        bounds = Interval(gap - half, gap + half)
        found.append(Ranked(name, row.folds, row.seeds, row.rounds, value, gap, bounds, status))
    return sorted(
        found,
        key=lambda one: (
            one.status != CHOSEN,
            math.isnan(one.value),
            one.value if not math.isnan(one.value) else -one.folds,
            one.gap,
        ),
    )


@dataclass(frozen=True, eq=False, repr=False)
class Choice:
    """The result; `print` shows the ranking."""

    title: str
    chosen: str
    ranking: list[Ranked]
    found: Chosen  # as a run has it
    verdict: Verdict | None  # whether it pays to federate; None: only one of together and alone is known
    sites: list[str]  # their names
    spent: int  # rounds of training, of all candidates
    left_out: dict[str, str]  # why others have no row
    notes: list[str]
    folder: Path
    tested: str = ""  # the choice, trained on all training samples, on the test samples
    rival: str = ""  # the kind of model that each client trains alone; "" where the choice is a method

    @property
    def loss(self) -> str:
        return self.found.validated.loss

    @property
    def answer(self) -> list[str]:
        """What to do, in sentences: the method, whether to federate, and how good both are."""
        alike = [title_of(row.label) for row in self.ranking if row.status == ALIKE]
        equal = f" It is not shown to be better than {listed(alike, 5)}." if alike else ""
        if self.verdict is None:
            pays = "Does it pay to federate? Nothing is known of what is trained together, or of what is trained alone."
        else:
            alone = statistics.mode(site.alone for site in self.verdict.sites)
            best = title_of(alone).removesuffix(" at each site alone")
            pays = f"Does it pay to federate? {headline(self.verdict, SITES)}"
            pays += f" Of what each site has alone, {best} is the best."
        tested = [f"Tested: {self.tested}"] if self.tested else []
        return [f"{title_of(self.chosen)} is chosen.{equal}", pays, *tested]

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
        return "\n".join([f"{title_of(self.chosen)} for {self.title}", *(f"  {s}" for s in self.answer[1:])])

    def _repr_html_(self) -> str:
        return as_html(table_of(self))

    def to_pandas(self) -> Any:
        """A data frame of pandas with a row per candidate, the best first."""
        rows = [(row.label, row.folds, row.seeds, row.rounds, row.value, row.status) for row in self.ranking]
        head = ("method", "folds", "seeds", "rounds", self.loss.replace(" ", "_"), "status")
        return data_frame({title: [row[n] for row in rows] for n, title in enumerate(head)})


def table_of(choice: Choice) -> Table:
    metric, rows = METRICS["rmse" if choice.found.validated.is_rmse else "log_loss"], []
    for row in choice.ranking:
        gap = ["", ""]
        if not math.isnan(row.gap):
            gap = [metric.text(row.gap, sign="+"), metric.interval(*row.bounds)]
        value = "" if math.isnan(row.value) else metric.text(row.value)
        rounds = f"{row.rounds}" if row.rounds else ""
        rows.append([title_of(row.label), f"{row.folds}", f"{row.seeds}", rounds, value, *gap, row.status])
    head = ["", "folds", "seeds", "rounds", choice.loss, "to the choice", "95 %", ""]
    notes = [" ".join(choice.answer)]
    if choice.verdict is not None:
        notes += statements(choice.verdict, SITES)
    if choice.found.exceptions:
        count, sites = len(choice.found.exceptions), len(choice.found.sites)
        notes.append(
            f"{count} of {sites} sites keep a model of their own, which is better on their own rows."
        )
    for why in dict.fromkeys(choice.left_out.values()):
        labels = [title_of(label) for label, reason in choice.left_out.items() if reason == why]
        notes.append(f"Not tried: {listed(labels, 5)} ({why}).")
    notes.append(
        f"On rows that the models did not see, of folds of the training rows, and on no test row; {choice.spent:,} "
        f"rounds in all. The {choice.loss} is the mean over sites, on the rows of all candidates that could be chosen. "
        "To the choice: the paired difference on common rows, with its interval over rows or sites. A candidate is "
        "worse if that interval excludes 0 when corrected for the number of candidates."
    )
    return Table(f"Which method for {choice.title}?", head, rows, [*notes, *choice.notes])


def write(choice: Choice, run: Run) -> None:
    """Writes the ranking and run.toml into the folder.

    Args:
        choice: The result.
        run: The settings of the choice.
    """
    table, out = table_of(choice), choice.folder
    content = {
        "answer": choice.answer,
        "table": {**table._asdict(), "notes": table.notes[1:]},  # without the answer
        "chosen": choice.chosen,
        "loss": choice.loss,
        "verdict": None if choice.verdict is None else verdict_as_json(choice.verdict),
        "sites": choice.sites,
        "spent": choice.spent,
        "ranking": [row._asdict() for row in choice.ranking],
        "rival": choice.rival,
        "left_out": choice.left_out,
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
