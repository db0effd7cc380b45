"""What training together is worth to this site alone, by its own held-out rows, which never leave.

`choice` wrote down the losses of these rows; `report` shows what is made of them here.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from copfl.charts import Dots, Line
from copfl.choosing.candidates import ALONE
from copfl.federation.node.choice import OwnLosses
from copfl.rivals.records import CONSTANT, TITLES, Array
from copfl.sections import Section
from copfl.tables import Table
from copfl.verdict.drawn import Ints, Moments
from copfl.verdict.headline import headline, signed
from copfl.verdict.verdict import Verdict, corrected_gain

BEST = "the best of them"


class SiteVerdict(NamedTuple):
    """A sentence or two, and a section with the chart."""

    sentences: str
    section: Section


def verdict_of(own: OwnLosses, taken: str) -> SiteVerdict:
    """The gain of the federation's method over what this site trains alone, with intervals over its own rows.

    Args:
        own: The losses of its rows.
        taken: The method that the federation took.
    """
    rivals = {name: rows for name, rows in own.losses.items() if name not in own.methods}
    whole = _gain(own, taken, rivals)
    each = {name: _gain(own, taken, {name: rows}) for name, rows in rivals.items()}
    loss, ours = "RMSE" if own.is_rmse else "loss", whole.loss_together
    rows = sum(site.rows for site in whole.sites)
    best = _title(whole.sites[0].alone)
    interval = (
        "" if math.isnan(whole.these.low) else f" [{signed(whole.these.low)}, {signed(whole.these.high)}]"
    )
    measured = (
        f"On {rows:,} rows of this site that its models did not see, {taken} of the federation has a {loss} of "
        f"{ours:.3f}, and the best that the site trains alone ({best}) {whole.loss_alone:.3f}: a gain of "
        f"{signed(whole.these.gain)}{interval}."
    )
    sentences = f"{headline(whole)} {measured}"
    found = {BEST: whole, **{_title(name): of_one for name, of_one in each.items()}}
    return SiteVerdict(sentences, _section(found, headline(whole), loss))


def _title(name: str) -> str:
    return TITLES[CONSTANT if name == CONSTANT else name.removesuffix(ALONE)]


def _gain(own: OwnLosses, taken: str, rivals: Mapping[str, Array]) -> Verdict:
    return corrected_gain(
        {taken: [own.losses[taken]], **{name: [rows] for name, rows in rivals.items()}},
        together=[taken],
        alone=list(rivals),
        choose=partial(_of_site, taken=taken),
        units=None if own.unit is None else [own.unit],
        is_rmse=own.is_rmse,
    )


def _of_site(found: Moments, *, taken: str) -> Ints:
    """What the site has, [draws, 1]: the method that the federation took, or the best of its own.

    Args:
        found: What was drawn of its rows.
        taken: The method.
    """
    if taken in found.names:
        return np.full((len(found.means), found.means.shape[2]), found.names.index(taken))
    return np.asarray(np.where(np.isnan(found.means), np.inf, found.means).argmin(1))


def _section(found: Mapping[str, Verdict], head: str, loss: str) -> Section:
    axis = f"{loss} of what the site trains alone minus {loss} together (95 % interval)"
    gains = [verdict.these for verdict in found.values()]
    columns = [
        [None if math.isnan(value) else value for value in column] for column in zip(*gains, strict=True)
    ]
    words = [verdict.sites[0].word for verdict in found.values()]
    about = (
        "Right of the line, together is better; left of it, alone is better. A dot is the gain over what this site "
        "trains alone with scikit-learn, on rows of its own that no model saw. It was made here, and does not leave."
    )
    line = Line("gain", columns[0], columns[1], columns[2], words)
    chart = Dots("verdict", head, about, [*found], axis, [line], digits=3, zero=True, row_title="alone")
    rows = [
        [
            name,
            *("" if math.isnan(value) else f"{value:+.3f}" for value in verdict.these),
            verdict.sites[0].word,
        ]
        for name, verdict in found.items()
    ]
    table = Table("Gain over what this site trains alone", ["alone", "gain", "low", "high", ""], rows)
    return Section("verdict", "Verdict", head, [chart], [table])
