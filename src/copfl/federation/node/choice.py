"""A node's part in the choice of a method: the rows that it holds out, and what their losses are.

The losses of rows stay here, for the verdict of the site's report (`verdict`); what leaves are the numbers of
`protocol.choice.names_of`.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from copfl import foreign
from copfl.choosing.choice import site_losses
from copfl.choosing.folds import folds_of_site
from copfl.core import tree
from copfl.core.evaluation import predicted
from copfl.core.task import Data, Task
from copfl.data.samples import REGRESSION
from copfl.errors import UsageError, raised_as
from copfl.experiment.rivals import NUMBERS, effort_for, inputs_of, site_rows
from copfl.federation.node.data import NodeData
from copfl.federation.node.few_rows import alike
from copfl.federation.node.node import Node
from copfl.federation.protocol.choice import (
    ALONE_NAMES,
    GAIN,
    LOSS,
    NEVER,
    REPORTS,
    VARIANCE,
    InFolds,
    name_of_rival,
)
from copfl.federation.protocol.files import write_json
from copfl.federation.protocol.settings import TrainingSettings
from copfl.measures.losses import row_losses
from copfl.rivals.records import CONSTANT, Array
from copfl.rivals.site import judged_by, site_rivals
from copfl.verdict.drawn import site_gains

FILE = "choice.json"  # in the node's state-dir: the losses of its rows, which stay here
LEAST_HELD_OUT = 0.5  # of a site's rows: of fewer, the losses would be of the most frequent kind of row alone
NOWHERE = -2  # the fold of a row that does not count


class HeldOut(NamedTuple):
    """The node's training rows that count, and the fold of each."""

    train: Data
    of: NDArray[np.int64]  # NEVER: it is always trained on
    left_out: int  # rows that do not count
    rows: NDArray[np.bool_]  # of all training rows, those that count


def held_out(settings: TrainingSettings, node: Node, data: NodeData) -> HeldOut:
    """The folds that the node draws by itself, as the simulation draws them for this site.

    A sum over all rows, less that over the rows without a fold, is one over the rows of the fold. So the owner's least
    rows hold for each fold by itself: a row that is rare in its fold is always trained on, and one that is rare among
    those does not count. Whatever is subtracted from whatever is a sum of such parts. A site of which hardly half could
    be held out so trains on all, and reports no loss.

    Args:
        settings: The federation's.
        node: The one that is asked.
        data: The node's.
    """
    federation, least, train = settings.federation, node.policy.least_rows, data.train
    unit = None if data.unit is None else data.unit[: len(train.y)]
    of = folds_of_site(train.y.cpu().numpy(), federation.run.run.seed, unit)
    of = np.where(of < federation.choice.folds, of, NEVER)
    if least > 1:

        def enough(rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
            return alike(settings.task.criterion, train, rows, least, has_products=True)

        of = _with_enough(of, federation.choice.folds, enough)
    counted = of != NOWHERE
    mask = torch.from_numpy(counted).to(train.y.device)
    x, y = tree.each(lambda t: t[mask], (train.x, train.y))
    size = torch.tensor(len(y), device=train.y.device)
    return HeldOut(Data(x, y, size), of[counted], int((~counted).sum()), counted)


def _with_enough(
    of: NDArray[np.int64], folds: int, enough: Callable[[NDArray[np.bool_]], NDArray[np.bool_]]
) -> NDArray[np.int64]:
    """The part of each row, where each part has enough rows that are alike: few rows are divided into fewer parts.

    Args:
        of: The folds.
        folds: Their number.
        enough: Those of some rows that are alike.
    """
    for number in range(folds, 1, -1):
        part = np.full(len(of), NOWHERE)
        for fold in range(number):
            part[enough((of >= 0) & (of % number == fold))] = fold
        if (part >= 0).sum() >= LEAST_HELD_OUT * len(of):
            part[enough(part == NOWHERE)] = NEVER
            return part
    return np.where(enough(np.ones(len(of), bool)), NEVER, NOWHERE)


def measured(
    algorithm: InFolds,
    node: Node,
    task: Task,
    records: tuple[Any, Any],
    held: HeldOut,
    data: NodeData,
    settings: TrainingSettings,
    samples: str,
) -> dict[str, torch.Tensor]:
    """What leaves of the losses of held-out rows: see `names_of`. The losses themselves are written down here.

    Args:
        algorithm: With the folds.
        node: Where they are written.
        task: What is trained.
        records: The client's record after the round, and the server's message.
        held: The rows that count, and their folds.
        data: The node's.
        settings: The federation's.
        samples: The data, as `KnownData` names them.
    """
    kind, y = task.criterion.kind, held.train.y.cpu().numpy()
    losses = {name: np.full(len(y), np.nan) for name in algorithm.names}
    models = iter(algorithm.models(task, *records))
    for name in algorithm.names:
        for fold in range(algorithm.folds):
            model, rows = next(models), algorithm.held_out(fold, len(y)).numpy()
            if not rows.any():
                continue
            mask = torch.from_numpy(rows).to(held.train.y.device)
            x_held, y_held = tree.each(lambda t, mask=mask: t[mask], (held.train.x, held.train.y))
            answers, _ = predicted(task, model, Data(x_held, y_held, torch.tensor(len(y_held))))
            losses[name][rows] = row_losses(answers, y[rows], kind)
    losses |= _of_rivals(settings, task, held, data)
    common = np.isfinite(list(losses.values())).all(0)
    losses = {name: np.where(common, of_rows, np.nan) for name, of_rows in losses.items()}
    unit = None if data.unit is None else data.unit[: len(held.rows)][held.rows]
    content = {
        "samples": samples,
        "is_rmse": kind == REGRESSION,
        "methods": list(algorithm.names),
        "losses": {name: of_rows[common].tolist() for name, of_rows in losses.items()},
        "rows": len(y),
        "unit": None if unit is None else unit[common].tolist(),
    }
    write_json(node.folder / FILE, content)
    return {name: torch.tensor(value) for name, value in _reported(algorithm, losses, kind).items()}


def _of_rivals(settings: TrainingSettings, task: Task, held: HeldOut, data: NodeData) -> dict[str, Array]:
    """The losses of what the site trains alone on all its rows, of the rows that count.

    A kind that this site cannot train has the losses of the constant answer.
    """
    kind, run = task.criterion.kind, settings.run
    inputs = inputs_of(task, data.train.x, run.model.name)
    unit = None if data.unit is None else data.unit[: len(held.rows)]
    rows = site_rows(inputs, task, [data.train], data.test, unit)
    effort = effort_for(inputs, task, [len(held.rows)], NUMBERS[inputs.how] or int(rows.x.shape[1]))
    metrics = judged_by(kind, task.metrics)
    rivals = site_rivals(rows, kind, task.classes, metrics[0], effort, run.run.seed)
    found = {
        name_of_rival(name): row_losses(one.inside, rows.y, kind)[held.rows] for name, one in rivals.items()
    }
    return {name: found.get(name, found[CONSTANT]) for name in ALONE_NAMES}


def _reported(algorithm: InFolds, losses: dict[str, Array], kind: str) -> dict[str, float]:
    found = dict.fromkeys(algorithm.reported, math.nan)  # what is not known is not reported
    is_rmse = kind == REGRESSION
    found[REPORTS] = float(np.isfinite(next(iter(losses.values()))).any())
    for name, of_rows in losses.items():
        found[LOSS + name] = float(site_losses([of_rows], is_rmse)[0])
    for alone in ALONE_NAMES:
        for method in algorithm.names:
            gains = site_gains([losses[alone]], [losses[method]])
            found[f"{GAIN}{alone} over {method}"] = float(gains.mean[0])
            found[f"{VARIANCE}{alone} over {method}"] = float(gains.variance[0])
    return found


class OwnLosses(NamedTuple):
    """The losses of a site's held-out rows, by candidate."""

    samples: str
    is_rmse: bool
    methods: tuple[str, ...]
    losses: dict[str, Array]  # nan: not held out
    unit: Array | None

    @property
    def has_rows(self) -> bool:
        """Whether any row was held out."""
        return any(bool(np.isfinite(rows).any()) for rows in self.losses.values())


def own_losses(state: Path) -> OwnLosses | None:
    """What the last choice measured at a node; None: there was none.

    Args:
        state: Its state-dir.
    """
    path = state / FILE
    if not path.is_file():
        return None
    damaged = f"{path} is damaged ({{}}); remove it, and the report has no verdict"
    with raised_as(UsageError, damaged, OSError, *foreign.DAMAGE):
        content = foreign.read_json(foreign.inside(state, path))
        losses = {str(name): np.array(rows, np.float64) for name, rows in content["losses"].items()}
        size = int(content["rows"])
        padded = {
            name: np.concatenate([rows, np.full(size - len(rows), np.nan)]) for name, rows in losses.items()
        }
        unit = content["unit"]
        units = None if unit is None else np.concatenate([np.array(unit), np.arange(size - len(unit)) - size])
        methods = tuple(map(str, content["methods"]))
        return OwnLosses(str(content["samples"]), bool(content["is_rmse"]), methods, padded, units)
