"""Why a run trains what it does, a finding: choice.json.

`copfl.choosing` makes the record before the rounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from copfl.experiment.analysis.against_rivals import BESIDE
from copfl.experiment.finding import Finding
from copfl.measures.metrics import METRICS
from copfl.rivals.records import TITLES
from copfl.sections import Section
from copfl.stats import Numbers
from copfl.tables import Table, listed, plain

NAMED = 5  # sites that a sentence names


class Validated(NamedTuple):
    """What the cross-validation says of the candidates, the simplest first."""

    by_site: dict[str, Numbers]  # of each candidate its mean loss at each site, nan: not known
    left_out: dict[str, str]  # why a candidate was not validated, or not to its end
    is_rmse: bool  # the loss of a site is a root mean squared error, and not a mean
    folds: int
    measure: str = ""  # the name of the loss, where it is neither RMSE nor log loss

    @property
    def loss(self) -> str:
        """The name of the loss."""
        return self.measure or ("RMSE" if self.is_rmse else "log loss")

    @property
    def means(self) -> dict[str, float]:
        """The mean over the sites at which all candidates have a loss; inf where there is none."""
        known = ~np.isnan(np.stack(list(self.by_site.values()))).any(0)
        return {name: float(v[known].mean()) if known.any() else np.inf for name, v in self.by_site.items()}


class Choice(NamedTuple):
    """What the federation takes, and each site."""

    federation: str  # the name of a candidate
    sites: tuple[str, ...]  # the same, but for the exceptions
    validated: Validated

    @property
    def exceptions(self) -> dict[int, str]:
        """The candidate of each site that departs."""
        return {n: name for n, name in enumerate(self.sites) if name != self.federation}


def title_of(name: str) -> str:
    """A candidate in words.

    Args:
        name: Of the candidate.
    """
    kind = name.removesuffix(" alone")
    return f"{TITLES[kind]} at each site alone" if kind in TITLES else name


def text_of(choice: Choice) -> str:
    """What was chosen and why, in a sentence or two."""
    validated = choice.validated
    means = ", ".join(f"{title_of(name)} {mean:.4g}" for name, mean in validated.means.items())
    lowest = min(validated.means, key=lambda name: validated.means[name])
    text = f"{title_of(lowest)} has the lowest cross-validated {validated.loss} ({means})"
    if lowest != choice.federation:
        text += f"; by less than a standard error, so that {title_of(choice.federation)} is taken"
    if choice.exceptions:
        count, clients = len(choice.exceptions), len(choice.sites)
        text += f"; {count} of {clients} sites keep a model that is better on their own rows by two standard errors"
    return text


def as_json(choice: Choice) -> dict[str, Any]:
    """The content of the file; null where a site has no loss."""
    return dict(plain({**choice._asdict(), "validated": choice.validated._asdict()}))


def _choice(content: dict[str, Any]) -> Choice:
    read = content["validated"]
    validated = Validated(
        by_site={name: np.array(values, np.float64) for name, values in read["by_site"].items()},
        left_out={name: str(why) for name, why in read["left_out"].items()},
        is_rmse=bool(read["is_rmse"]),
        folds=int(read["folds"]),
        measure=str(read["measure"]),
    )
    return Choice(str(content["federation"]), tuple(map(str, content["sites"])), validated)


def choice_table(choice: Choice) -> Table:
    """A row per candidate: its cross-validated loss, and how many clients have it."""
    validated, metric = choice.validated, METRICS["rmse" if choice.validated.is_rmse else "log_loss"]
    rows = []
    for name, mean in sorted(validated.means.items(), key=lambda pair: pair[1]):
        status = "chosen" if name == choice.federation else ""
        rows.append([title_of(name), metric.text(mean), f"{choice.sites.count(name)}", status])
    folds = f"{validated.folds} folds of" if validated.folds > 1 else "a fifth of"
    notes = [
        f"The mean over sites of the {validated.loss} on {folds} the training rows, which the models did not see. "
        "All rows were trained on then."
    ]
    if choice.exceptions:
        names = [f"site {n} ({title_of(name)})" for n, name in choice.exceptions.items()]
        notes.append(
            "A site keeps another model where that is better on its own rows by two standard errors, given what all "
            "sites show: "
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
