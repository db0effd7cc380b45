"""Why a first run trained what it did, as a table.

The summary of a run and its report show it.
"""

from copfl.experiment.choice import Choice, title_of
from copfl.measures.metrics import METRICS
from copfl.tables import Table, listed

NAMED = 5  # sites that a sentence names


def choice_table(choice: Choice) -> Table:
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
