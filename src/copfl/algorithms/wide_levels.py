"""A linear model with levels of many coefficients, such as one per word: L-BFGS on sums of gradients."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Metrics, Plan, Task, above, one_of, tree
from copfl.core.task import EVAL_BATCH, Objective
from copfl.errors import UsageError
from copfl.models.networks import Words
from copfl.parts.lbfgs import Search, begun, moved
from copfl.parts.mixed_model import (
    Responses,
    Site,
    own_effects,
    residuals,
    responses,
    varying_of,
    with_effects,
)

VARYING = {"none": 0, "intercept": 1}  # and how many variances there are
LOG_VARIANCES = -14.0, 7.0  # the least and the largest log τ²
ROWS = 16.0  # the sums are of rows / 16, so that more rows fit into the range of a secure sum
USUAL_WEIGHT = 3.0  # of a word by the texts that have it: the weights are about 1


class Server(NamedTuple):
    search: Search  # in the scaled coefficients w / scale
    scale: Tensor  # [d]
    log_variance: Tensor  # [B, 1], log τ²
    rounds: Tensor  # [], that had rows


class Down(NamedTuple):
    coefficients: Tensor  # [d], all parameters of the model, the common intercept among them
    log_variance: Tensor  # [B, 1]


class Client(NamedTuple):
    effects: Tensor  # [B, q, c], u: what its own intercept has beside the common one
    own: Server | None  # the state of its own search, where it trains alone


class Upload(NamedTuple):
    # [d + 2 + B + tokens]: the gradient of the log-likelihood, rows, sites, u² with its variance, and how many texts
    # have each word and each pair of words; [0] where it trains alone.
    sums: Tensor


class Total(NamedTuple):
    sums: Tensor


@dataclass(frozen=True)
class WideLevels:
    """Common coefficients β ~ N(0, s²/penalty), and an intercept per site that is shrunk to the common one.

    As `levels`, for models with too many coefficients for equations: a round is a step of L-BFGS, for which gradients
    are enough. Of the model `words`, s of a word or pair falls with the number of texts that have it (inverse
    document frequency); of other linear models s is 1. τ² follows from the data.

    varying  "intercept"; "none": one model for all
    penalty  of the common coefficients: the precision of their prior
    alone    whether each site has coefficients of its own, and sends nothing: what it has without the others

    Paper: L-BFGS has all rows in one place and a line search that evaluates the loss. Here the rows are at the sites,
    and a step is shortened by the slope at its end, which needs no further message.
    """

    varying: str = "intercept"
    penalty: float = 0.1
    alone: bool = False

    head_only = True
    usual_rounds = 30
    only_mean = "its server searches with the gradients whose sum it receives, and has no step to change"
    total_epochs = 1

    def __post_init__(self) -> None:
        one_of(VARYING, varying=self.varying)
        above(0, penalty=self.penalty)

    def trained_alone(self) -> "WideLevels":
        return replace(self, alone=True)

    def server_init(self, task: Task, clients: int) -> Server:
        kind, start = _problems(task), task.initial[: task.d]
        zero = start.new_zeros(())
        return Server(begun(start), torch.ones_like(start), start.new_zeros(kind.problems, 1), zero)

    def client_init(self, task: Task) -> Client:
        kind = _problems(task)
        effects = task.initial.new_zeros(kind.problems, kind.outputs, self._variances)
        return Client(effects, self.server_init(task, 1) if self.alone else None)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return tree.repeat(_message(server), len(ids))

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        message = down if client.own is None else _message(client.own)
        return _model(task, message.coefficients, client.effects)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        message = down if client.own is None else _message(client.own)
        kind = _problems(task)
        effects, spread = self._own_effects(task, kind, client.effects, message, data)
        model = _model(task, message.coefficients, effects)
        gradient, counts = task.initial.new_zeros(task.d), _no_words(task)
        for x, y, valid in data.in_parts(EVAL_BATCH):
            x = task.numbers(x)
            objective = _log_likelihood(kind)
            part, _, _ = task.gradient(
                model[: task.d], model[task.d :], x, y, valid, objective, training=False
            )
            gradient = gradient + part
            if isinstance(task.module, Words):
                counts = counts + task.module.texts_with(x["input_ids"], x.get("attention_mask"), valid)
        rows = data.size.to(gradient)
        site = (rows > 0).to(gradient)
        squares = site * ((effects**2).flatten(1).sum(1) + spread)
        sums = torch.cat([gradient, torch.stack([rows, site]), squares, counts]) / ROWS
        upload, after = Upload(sums), Client(effects, None)
        if client.own is not None:
            own, _ = self._searched(task, client.own, Total(sums))
            upload, after = Upload(sums[:0]), Client(effects, own)
        loss, _ = task.evaluate(model, data)
        return ClientOutput(after, upload, model, {"loss": loss, "weight": rows})

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        return Total(upload.sums)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        return (server, {}) if self.alone else self._searched(task, server, total)

    def _searched(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        """The next point of the search, by the sums at the last one."""
        kind = _problems(task)
        sizes = [task.d, 1, 1, kind.problems, len(_no_words(task))]
        gradient, rows, sites, squares, counts = torch.split(ROWS * total.sums, sizes)
        is_first = server.rounds == 0
        scale = torch.where(is_first, _scale(task, counts, rows), server.scale)
        is_slope = ~task.where(_intercept(task))[: task.d]
        slope = self.penalty * is_slope * server.search.point - scale * gradient
        search = moved(server.search, slope / rows, self.penalty / rows)  # without rows it is not finite
        variance = squares / (sites * kind.outputs)
        log_variance = (
            variance.log().clamp(*LOG_VARIANCES)[:, None] if self._variances else server.log_variance
        )
        has_rows = rows[0] > 0
        after = Server(search, scale, log_variance, server.rounds + 1)
        metrics = {"gradient": (slope / rows.clamp(min=1)).norm()}
        if self._variances:
            metrics["intercept_deviation"] = after.log_variance.exp().mean().sqrt()
        return tree.each(lambda new, old: torch.where(has_rows, new, old), after, server), metrics

    @property
    def _variances(self) -> int:
        return 0 if self.alone else VARYING[self.varying]

    def _own_effects(
        self, task: Task, kind: Responses, start: Tensor, message: Down, data: Data
    ) -> tuple[Tensor, Tensor]:
        """A site's intercepts [B, q, c] beside the common ones, and the sum of their variances [B]."""
        if not self._variances:
            return start, start.new_zeros(kind.problems)
        common = torch.cat([message.coefficients, task.initial[task.d :]])
        parts = [task.forward(common, task.numbers(x))[0] for x, _, _ in data.in_parts(EVAL_BATCH)]
        eta = _eta(kind, torch.cat(parts)).flatten(1)  # [n, B q]
        counts = (torch.arange(len(eta), device=eta.device) < data.size).to(eta)
        site = Site(torch.cat([eta, torch.ones_like(eta[:, :1])], 1) * counts[:, None], data.y, counts)
        # One coefficient of 1 for each η that the common coefficients give, and the intercept to be found.
        number = eta.shape[1]
        given = torch.eye(number, number + 1, dtype=eta.dtype, device=eta.device)
        given = given.view(kind.problems, kind.outputs, number + 1)
        varying = varying_of(kind.outputs, number + 1, 1, task.device)
        effects = own_effects(site, kind, varying, given, message.log_variance, start)
        _, weights = residuals(site, kind, with_effects(varying, given, effects))
        precision = torch.diag_embed(torch.exp(-message.log_variance).expand(-1, kind.outputs))
        spread = torch.linalg.inv_ex(weights.sum(0) + precision)[0].diagonal(dim1=-2, dim2=-1).sum(-1)
        return effects, spread


def _message(server: Server) -> Down:
    return Down(server.scale * server.search.point, server.log_variance)


def _problems(task: Task) -> Responses:
    """The kind of targets; UsageError if the model has no intercept for each output."""
    names, shapes = task.layout.names[: task.layout.trained], task.layout.shapes
    if dict(zip(names, shapes, strict=False)).get(_intercept(task)) != (task.classes,):
        raise UsageError(
            "a linear model with levels has an intercept for each class, label or value, and this model's last layer "
            "has no such bias; use --model words for texts, else --model linear"
        )
    return responses(task.criterion, task.classes, task.device, task.initial.dtype)


def _intercept(task: Task) -> str:
    """The name of the intercept among the parameters."""
    return f"{task.layout.head}.bias"


def _eta(kind: Responses, logits: Tensor) -> Tensor:
    """[n, B, q]: the linear predictors of logits [n, K]."""
    return logits[..., None] if kind.contrasts is None else (2 * logits @ kind.contrasts)[:, None]


def _logits(kind: Responses, eta: Tensor) -> Tensor:
    """[..., K]: the logits of linear predictors [..., B, q], and of their derivatives half of them."""
    return eta[..., 0] if kind.contrasts is None else eta[..., 0, :] @ kind.contrasts.T


def _model(task: Task, coefficients: Tensor, effects: Tensor) -> Tensor:
    """[D]: w with these coefficients [d], the site's own intercept beside the common one."""
    w = torch.cat([coefficients, task.initial[task.d :]])
    if not effects.shape[-1]:
        return w
    name = _intercept(task)
    own = _logits(_problems(task), effects[..., 0])
    return task.layout.with_entries(w, name, task.layout.entries(w, name) + own)


def _log_likelihood(kind: Responses) -> Objective:
    """An objective with the gradient of the log-likelihood of the valid samples; its value is not that."""

    def objective(logits: Tensor, features: Tensor, targets: Tensor, valid: Tensor | None) -> Tensor:
        e, _ = kind.residuals(_eta(kind, logits.detach()), targets)
        e = _logits(kind, e) * (1 if kind.contrasts is None else 2)
        return (e * logits if valid is None else torch.where(valid[:, None], e * logits, 0)).sum()

    return objective


def _no_words(task: Task) -> Tensor:
    """Zeros [tokens] of a model of words; of others [0]."""
    return task.initial.new_zeros(len(task.module.embedding.weight) if isinstance(task.module, Words) else 0)


def _scale(task: Task, texts_with: Tensor, rows: Tensor) -> Tensor:
    """[d]: s of each coefficient, of a word by the number of texts that have it."""
    ones = torch.ones_like(task.initial[: task.d])
    if not len(texts_with):
        return ones
    weight = (1 + torch.log((1 + rows) / (1 + texts_with))) / USUAL_WEIGHT
    name = "embedding.weight"
    return task.layout.with_entries(ones, name, weight[:, None].expand(-1, task.classes).flatten())
