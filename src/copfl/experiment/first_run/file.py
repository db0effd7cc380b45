"""The choice of a first run as a finding: choice.json, and why it was made, as a table."""

from __future__ import annotations

from typing import Any

import numpy as np

from copfl.experiment.analysis.against_rivals import BESIDE
from copfl.experiment.finding import Finding
from copfl.experiment.first_run.candidates import FirstRunChoice, Validated, title_of
from copfl.measures.metrics import METRICS
from copfl.sections import Section
from copfl.tables import Table, listed, plain

NAMED = 5  # sites that a sentence names


def as_json(choice: FirstRunChoice) -> dict[str, Any]:
    """The content of the file; null where a site has no loss."""
    return dict(plain({**choice._asdict(), "validated": choice.validated._asdict()}))


def _choice(content: dict[str, Any]) -> FirstRunChoice:
    read = content["validated"]
    validated = Validated(
        by_site={name: np.array(values, np.float64) for name, values in read["by_site"].items()},
        left_out={name: str(why) for name, why in read["left_out"].items()},
        is_rmse=bool(read["is_rmse"]),
        folds=int(read["folds"]),
    )
    return FirstRunChoice(str(content["federation"]), tuple(map(str, content["sites"])), validated)


def choice_table(choice: FirstRunChoice) -> Table:
    """A row per candidate: its cross-validated loss, and how many clients have it."""
    validated, metric = choice.validated, METRICS["rmse" if choice.validated.is_rmse else "log_loss"]
    rows = []
    for name, mean in sorted(validated.means.items(), key=lambda pair: pair[1]):
        status = "chosen" if name == choice.federation else ""
        rows.append([title_of(name), metric.text(mean), f"{choice.sites.count(name)}", status])
    folds = f"{validated.folds} folds of" if validated.folds > 1 else "a fifth of"
    notes = [
        f"The mean over clients of the {validated.loss} on {folds} the training rows, which the models did not see. "
        "All rows were trained on then."
    ]
    if choice.exceptions:
        names = [f"client {n} ({title_of(name)})" for n, name in choice.exceptions.items()]
        notes.append(
            "A client keeps another model where that is better on its own rows by two standard errors, given what all "
            "clients show: "
            f"{listed(names, NAMED)}."
        )
    notes += [f"Left out: {title_of(name)}, {why}." for name, why in validated.left_out.items()]
    head = ["", f"cross-validated {validated.loss}", "clients", ""]
    return Table("What was chosen, by cross-validation", head, rows, notes)


CHOICE = Finding(
    file="choice.json",
    as_json=as_json,
    parse=_choice,
    given=True,
    tables=lambda choice, run: [choice_table(choice)],
    section=lambda choice, run: Section("rivals", "Rivals", BESIDE, [], [choice_table(choice)]),
)
