"""Clients that predict with a model of scikit-learn that they trained alone: run.own_models.

`prepare` gives such clients their model, and a first run decides who has one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from copfl.core.layout import Layout
from copfl.data.samples import CLASSIFICATION, REGRESSION
from copfl.engine.mapping import renewed
from copfl.experiment.experiment import Experiment
from copfl.experiment.rivals import TrainedRivals, plan_of, trained_rivals
from copfl.models.trees import Trees, trees_of_step
from copfl.rivals.as_trees import as_trees
from copfl.rivals.estimators import Fitted, Shifted
from copfl.rivals.records import CONSTANT, TITLES
from copfl.settings.checking import SettingError
from copfl.wrappers.own_models import OwnModels


def kinds_of(setting: str, clients: int) -> dict[int, str]:
    """The kind of model of each client that has one of its own.

    Args:
        setting: As of run.own_models.
        clients: Their number.
    """
    if setting in TITLES:
        return dict.fromkeys(range(clients), setting)
    kinds = {}
    for name in filter(None, setting.split(",")):
        number, _, kind = name.strip().partition(":")
        if not number.isdecimal() or int(number) >= clients or kind not in TITLES:
            known = ", ".join(TITLES)
            raise SettingError(
                "run.own_models",
                setting,
                f"must be a kind, or CLIENT:KIND with numbers from 0 to {clients - 1}; kinds are {known}",
            )
        kinds[int(number)] = kind
    return kinds


def written(kinds: Mapping[int, str], clients: int) -> str:
    """The setting of these kinds, as `kinds_of` reads it.

    Args:
        kinds: By client.
        clients: Their number.
    """
    if len(kinds) == clients and len(set(kinds.values())) == 1:
        return next(iter(kinds.values()))
    return ",".join(f"{client}:{kind}" for client, kind in sorted(kinds.items()))


def with_own_models(e: Experiment) -> Experiment:
    """The experiment whose clients of run.own_models keep their own models."""
    kinds = kinds_of(e.settings.own_models, e.clients)
    module, plan = e.task.module, plan_of(e)
    if not isinstance(module, Trees):
        raise SettingError(
            "run.own_models", e.settings.own_models, "needs a model that can hold them: --model trees"
        )
    if plan is None or not plan.inputs.trees:
        raise SettingError(
            "run.own_models", e.settings.own_models, "needs a table of classes or of one value"
        )
    models = models_by_client(trained_rivals(e, plan), kinds, e)
    size, room = size_of(models.values(), e), size_of([module], e)
    if any(wanted > there for wanted, there in zip(size, room, strict=True)):
        trees, nodes, depth = size
        raise SettingError(
            "run.own_models",
            e.settings.own_models,
            f"needs a larger model: --set model.trees={trees} --set model.nodes={nodes} --set model.depth={depth}",
        )
    rows = len(module.ensemble.feature)
    vectors = [_vector(model.resized(rows, *room[1:]), e.task.layout) for model in models.values()]
    algorithm = OwnModels(e.algorithm, tuple(models), torch.stack(vectors).to(e.task.initial))
    return dataclasses.replace(e, algorithm=algorithm, engine=renewed(e.engine))


def models_by_client(trained: TrainedRivals, kinds: Mapping[int, str], e: Experiment) -> dict[int, Trees]:
    """The models of these clients; of one that has none of its kind, the constant answer.

    Args:
        trained: The models of all kinds.
        kinds: By client.
        e: Whose rows they are.
    """
    columns, (mean, deviation) = math.prod(e.federation.shape), (e.federation.dataset.target_scale)
    models = {}
    for client, kind in kinds.items():
        if (rivals := trained.by_site.get(client)) is not None:
            fitted = rivals[kind if kind in rivals else CONSTANT].fitted[0]
            models[client] = _as_trees(fitted, columns, e.task.classes, mean, deviation)
    return models


def _as_trees(
    fitted: Fitted, columns: int, outputs: int, mean: Sequence[float], deviation: Sequence[float]
) -> Trees:
    """A model of classes or of one value; the outputs of values are standardised."""
    if fitted.model is None:
        module = Trees((columns,), outputs, trees=1, depth=1, nodes=1)
        answer = (fitted.constant - mean) / deviation if mean else np.log(fitted.constant)
        with torch.no_grad():
            module.head.bias.copy_(torch.from_numpy(np.atleast_1d(answer)))
        return module
    if not mean:
        prior = fitted.constant.tolist() if fitted.votes else ()
        return as_trees(fitted.model, CLASSIFICATION, columns, outputs, prior=prior)
    shift, model = (
        (fitted.model.shift, fitted.model.model) if isinstance(fitted.model, Shifted) else (0.0, fitted.model)
    )
    return as_trees(model, REGRESSION, columns, outputs, scale=[(mean[0] - shift, deviation[0])])


def size_of(models: Iterable[Trees], e: Experiment) -> tuple[int, int, int]:
    """The settings trees, nodes and depth that are enough for each of the models.

    Args:
        models: Of clients.
        e: Whose task they learn.
    """
    sizes = [(*model.ensemble.feature.shape, model.ensemble.depth) for model in models]
    trees, nodes, depth = (max(of_models) for of_models in zip(*sizes, strict=True))
    return -(-trees // trees_of_step(e.task.criterion.kind, e.task.classes)), nodes, depth


def _vector(module: Trees, layout: Layout) -> Tensor:
    tensors = dict(module.named_parameters())
    return layout.join({name: tensors[name].detach() for name in layout.names})
