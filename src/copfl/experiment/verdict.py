"""What training together is worth, a finding: verdict.json.

`copfl.choosing` finds it before the rounds, from the losses of rows that no model saw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from copfl.core import tree
from copfl.data.samples import CLASSIFICATION
from copfl.experiment.experiment import Experiment
from copfl.experiment.finding import Finding
from copfl.experiment.rivals import ModelOf, answers_of, plan_of, trained_rivals
from copfl.measures.calibration import tempered
from copfl.measures.losses import row_losses
from copfl.rivals.records import Array
from copfl.verdict.headline import Check, checked
from copfl.verdict.verdict import Estimate, Verdict, as_json, from_json


def check_of(e: Experiment, verdict: Verdict, model_of: ModelOf, own: Mapping[int, str]) -> Check | None:
    """What the test rows say, which nobody looked at; None where no site has a rival to compare with.

    Args:
        e: The run.
        verdict: Of its training rows.
        model_of: Each client's model; None of one that has none.
        own: The kind of model of the clients that predict with their rival.
    """
    if (plan := plan_of(e)) is None:
        return None
    trained, kind = trained_rivals(e, plan), e.task.criterion.kind
    losses: list[tuple[Array, Array]] = []
    for site, rivals in trained.by_site.items():
        y, model = trained.targets[site], model_of(site)
        best = rivals.get(verdict.sites[site].alone.removesuffix(" alone"))
        if best is None or model is None:
            continue
        test = tree.row(e.training.federation.test.rows([site]), 0)
        answers = answers_of(e.training.task, model, test)
        if site in own and own[site] in rivals:
            answers = rivals[own[site]].answers
        elif kind == CLASSIFICATION:
            answers = tempered(answers, e.settings.temperature)
        losses.append((row_losses(answers, y, kind), row_losses(best.answers, y, kind)))
    return checked(verdict, *map(list, zip(*losses, strict=True))) if losses else None


CHECK = Finding(
    file="verdict-check.json",
    as_json=lambda check: {**check.test._asdict(), "agrees": check.agrees},
    parse=lambda content: Check(
        Estimate(*(math.nan if content[name] is None else float(content[name]) for name in Estimate._fields)),
        bool(content["agrees"]),
    ),
)
VERDICT = Finding(
    file="verdict.json",
    as_json=as_json,
    parse=from_json,
    fits=lambda verdict, rounds, clients: len(verdict.sites) == clients,
    given=True,
)
