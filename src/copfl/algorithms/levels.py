"""A linear model with levels (Laird and Ware 1982; Breslow and Clayton 1993): mixed effects, exact from sums."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Metrics, Plan, Task, one_of, tree
from copfl.core.task import STATISTICS_BATCH
from copfl.errors import UsageError
from copfl.parts.mixed_model import (
    LARGEST_CHANGE,
    Responses,
    Site,
    Variances,
    Varying,
    equations,
    own_effects,
    packed,
    responses,
    solved,
    unpacked,
    varying_of,
    with_effects,
)

VARYING = {"none": 0, "intercept": 1, "all": 2}  # and how many variances there are
LARGEST = 2000  # coefficients of a problem: the sums have half their square
FIRST_RATIO, FIRST_PRIOR = -1.5, 0.0  # log λ and log ω² before the first round
ROWS = 16.0  # the sums are of rows / 16, so that more rows fit into the range of a secure sum


class Server(NamedTuple):
    coefficients: Tensor  # [B, q, P], common to all sites; the last column is the intercept
    variances: Variances
    scale: Tensor  # [B], σ²
    covariance: Tensor  # [B, d, d], of the coefficients


class Down(NamedTuple):
    coefficients: Tensor  # [B, q, P]
    log_ratio: Tensor  # [B, t], log λ = log τ²/σ²


class Client(NamedTuple):
    effects: Tensor  # [B, q, c], what its own coefficients have beside the common ones
    own: Server | None  # the solution of its own equations, where it trains alone


class Upload(NamedTuple):
    sums: Tensor  # the working equations, see parts.mixed_model


class Total(NamedTuple):
    sums: Tensor


@dataclass(frozen=True)
class Levels:
    """Common coefficients β, and an intercept per site that is shrunk to the common one: u ~ N(0, τ²).

    Values: least squares. Two classes: logistic regression. Several: multinomial. The variances follow from the
    data. It trains the head alone; `--model linear` has nothing else.

    varying  "intercept"; "all": slopes per site too, shrunk to the common ones, with a variance of their own; "none":
             one model for all
    shrink   whether the common slopes have a prior N(0, ω²), ω² by the marginal likelihood; False: they have none
    alone    whether each site solves its own equations, and sends nothing: what it has without the others

    Paper: all rows are in one place, and slopes have no prior. Here the sums of the sites give the same, and a
    prior is the default, because there may be more columns than rows.
    """

    varying: str = "intercept"
    shrink: bool = True
    alone: bool = False

    head_only = True
    usual_rounds = 16
    only_mean = "its server solves the equations whose sums it receives, and has no step to change"
    total_epochs = 1

    def __post_init__(self) -> None:
        one_of(VARYING, varying=self.varying)

    def trained_alone(self) -> "Levels":
        return replace(self, alone=True)

    def server_init(self, task: Task, clients: int) -> Server:
        kind, columns = _problems(task)
        size = kind.outputs * columns
        if size > LARGEST:
            raise UsageError(
                f"a linear model with levels solves equations of all its coefficients, here {size:,}, and "
                f"{LARGEST:,} are the most; use fewer columns or classes, or choose another algorithm"
            )
        zeros = _double(task).new_zeros
        ratios = zeros(kind.problems, self._variances)
        variances = Variances(ratios + FIRST_RATIO, zeros(kind.problems) + FIRST_PRIOR, ratios)
        coefficients = zeros(kind.problems, kind.outputs, columns)
        covariance = zeros(kind.problems, size, size)
        return Server(coefficients, variances, zeros(kind.problems) + 1, covariance)

    def client_init(self, task: Task) -> Client:
        kind, columns = _problems(task)
        varying = self._varying(task, kind, columns)
        effects = _double(task).new_zeros(kind.problems, kind.outputs, len(varying.columns))
        return Client(effects, self.server_init(task, 1) if self.alone else None)

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return tree.repeat(_message(server), len(ids))

    def personal_model(self, task: Task, client: Client, down: Down) -> Tensor:
        kind, columns = _problems(task)
        common = down.coefficients if client.own is None else client.own.coefficients
        return _model(task, kind, with_effects(self._varying(task, kind, columns), common, client.effects))

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        kind, columns = _problems(task)
        varying, site = self._varying(task, kind, columns), _site(task, data)
        common, log_ratio = down if client.own is None else _message(client.own)
        effects = own_effects(site, kind, varying, common, log_ratio, client.effects)
        own = with_effects(varying, common, effects)
        sums = packed(equations(site, kind, varying, own, log_ratio)) / ROWS
        after, upload = Client(effects, None), Upload(sums)
        if client.own is not None:
            after = Client(effects, self._solved(task, client.own, sums))
            upload = Upload(sums[:0])
        model = self.personal_model(task, after, down)
        loss, _ = task.evaluate(model, data)
        metrics = {"loss": loss, "weight": data.size.to(task.initial.dtype)}
        return ClientOutput(after, upload, model, metrics)

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        return Total(upload.sums)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        if self.alone:
            return server, {}
        after = self._solved(task, server, total.sums)
        metrics = {"coefficient_change": (after.coefficients - server.coefficients).abs().max()}
        if self._variances:  # τ, a mean over several values or labels
            variance = after.scale * after.variances.log_ratio[:, 0].exp()
            metrics["intercept_deviation"] = variance.sqrt().mean()
        return after, metrics

    def _solved(self, task: Task, before: Server, total: Tensor) -> Server:
        """The solution of the equations whose sums these are, which were taken at another one."""
        kind, columns = _problems(task)
        size = kind.outputs * columns
        sums = unpacked(ROWS * total.to(before.scale), kind.problems, size + 1, self._variances)
        is_slope = (torch.arange(size, device=task.device) + 1) % columns > 0
        found = solved(sums, before.variances, is_slope, kind.has_scale, self.shrink)
        change = found.coefficients.view(before.coefficients.shape) - before.coefficients
        if not kind.has_scale:  # a step of Newton's method far from the solution may be much too long
            largest = change.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
            change = change * (LARGEST_CHANGE / largest).clamp(max=1)
        after = Server(before.coefficients + change, found.variances, found.scale, found.covariance)
        # A problem without rows, or whose equations have no solution, stays as it is.
        values = change.flatten(1), found.variances.log_ratio, found.covariance.flatten(1)
        is_solved = (sums.rows > 0) & torch.isfinite(torch.cat(values, 1)).all(1)

        def chosen(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(is_solved.view(-1, *[1] * (new.dim() - 1)), new, old)

        return tree.each(chosen, after, before)

    @property
    def _variances(self) -> int:
        return 0 if self.alone else VARYING[self.varying]

    def _varying(self, task: Task, kind: Responses, columns: int) -> Varying:
        return varying_of(kind.outputs, columns, self._variances, task.device)


def _message(server: Server) -> Down:
    return Down(server.coefficients, server.variances.log_ratio)


def _double(task: Task) -> Tensor:
    """A tensor on the task's device in double precision, where the device has it: sums of squares need it."""
    return task.initial.new_empty(0, dtype=torch.float32 if task.device.type == "mps" else torch.float64)


def _problems(task: Task) -> tuple[Responses, int]:
    """The kind of targets, and P, the columns of x with the intercept."""
    layout = task.layout
    shape, bias = layout.head_shape, f"{layout.head}.bias"
    trained = layout.names[: layout.trained]
    if len(shape) != 2 or bias not in trained or shape[0] != task.classes:
        raise UsageError(
            "a linear model with levels is the last layer of the model, which must be a Linear with a bias and "
            "an output per class, label or value; use --model linear"
        )
    like = _double(task)
    return responses(task.criterion, task.classes, task.device, like.dtype), shape[1] + 1


def _site(task: Task, data: Data) -> Site:
    """A site's rows as the head sees them."""
    plain = replace(task, batched=None)  # all clients have the same weights
    parts = []
    for x, _, valid in data.in_parts(STATISTICS_BATCH):
        _, features = plain.forward(task.initial, task.numbers(x))
        parts.append(torch.where(valid[:, None], features, 0))
    features = torch.cat(parts).to(_double(task))
    counts = (torch.arange(len(features), device=data.y.device) < data.size).to(features)
    return Site(torch.cat([features, counts[:, None]], 1), data.y, counts)


def _model(task: Task, kind: Responses, coefficients: Tensor) -> Tensor:
    """[D]: w whose head has these coefficients [B, q, P]."""
    rows = coefficients[:, 0] if kind.contrasts is None else kind.contrasts @ coefficients[0]  # [K, P]
    head = task.layout.split_head(task.layout.entries(task.initial, "head"))
    tensors = {f"{task.layout.head}.weight": rows[:, :-1], f"{task.layout.head}.bias": rows[:, -1]}
    values = torch.cat([tensors[name].reshape(-1) for name in head]).to(task.initial.dtype)
    return task.layout.with_entries(task.initial, "head", values)
