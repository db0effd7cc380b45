"""Metrics and loss of a client's model and of the global model, on the client's test samples.

Accuracy and loss are sums over samples, computed with the model. Other metrics are computed on the host, from
the collected predictions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.memory import Memory
from copfl.core.task import EVAL_BATCH, Data, Experts, Personal, Task
from copfl.measures.metrics import Array, Metric

PREDICTIONS = "predictions"  # in the metrics of an evaluation, until `measured` replaces them
# A name among the models of an evaluation: the metrics also have the model after the local update, by path,
# until `without_model` takes it out.
MODEL = "model"
VALIDATION_LOSS = "validation_loss"
VALIDATED = "_validation"  # the suffix of metrics on a client's validation samples
FINITE = f"{MODEL}.finite"  # with it, whether its loss is: of a huge model it may not be

# The models of an evaluation, by the suffix of their metrics' names: the client's model after its local
# update, before it, and the global model. Each is one more pass over the test samples.
EvalModels = tuple[str, ...]
EVAL_MODELS: dict[str, EvalModels] = {
    "all": ("", "_before", "_global"),
    "personal": ("", "_before"),
    "final": ("",),
}


def is_evaluated(round: int, rounds: int, every: int) -> bool:
    """Whether models are evaluated in this round, from 0: in every so manieth, and in the last one."""
    return (round + 1) % every == 0 or round + 1 == rounds


class Personalised(Protocol):
    """The part of an Algorithm that returns models."""

    def client_init(self, task: Task) -> Any: ...

    def personal_model(self, task: Task, client: Any, down: Any) -> Personal: ...


def evaluate(
    algorithm: Personalised,
    task: Task,
    client: Any,
    down: Any,
    after: Any,
    trained: Personal,
    test: Data,
    models: EvalModels = EVAL_MODELS["all"],
    validation: Data | None = None,
) -> dict[str, Tensor]:
    """Accuracy, loss and, for metrics that need them, the predictions on a client's test samples.

    With validation samples, those of `trained` on these as well.

    `client` and `after` are its records before and after the local update that led to `trained`. The global
    model is evaluated as a new client would have it, with the batch-norm statistics of `global_statistics`
    where those stay with the client.
    """

    def model(name: str) -> Personal:
        if name == "_before":
            return algorithm.personal_model(task, client, down)
        if name == "_global":
            global_model = algorithm.personal_model(task, algorithm.client_init(task), down)
            if task.buffers != "local":
                return global_model
            statistics = global_statistics(algorithm, task, after)
            if statistics is None:  # of an algorithm that does not say
                first = trained.w[0] if isinstance(trained, Experts) else trained
                statistics = first[task.d :]
            return with_statistics(task, global_model, statistics)
        return trained

    metrics: dict[str, Tensor] = dict(tree.named(trained, MODEL)) if MODEL in models else {}
    passes = [(name, test) for name in models if name != MODEL]
    passes += [(VALIDATED, validation)] if validation is not None and "" in models else []
    for name, samples in passes:
        loss, score, predictions, count = task.scores(model(name), samples)
        if MODEL in models and name == "":
            metrics[FINITE] = torch.isfinite(loss)
        defined = torch.isfinite(loss) & (count > 0)  # nan without samples, or after divergence
        if task.criterion.correct is not None:
            metrics[f"accuracy{name}"] = torch.where(defined, score.double(), torch.nan)
        loss_name = VALIDATION_LOSS if name == VALIDATED else f"test_loss{name}"
        metrics[loss_name] = torch.where(defined, loss.double(), torch.nan)
        if on_host(task):
            metrics[f"{PREDICTIONS}{name}"] = collected(task, predictions, samples.y)
    return metrics


class Measured(NamedTuple):
    """The models of some clients [N, ...], and whether the loss of each is finite."""

    model: Personal
    finite: Tensor  # [N] bool


def without_model(metrics: dict[str, Tensor]) -> tuple[dict[str, Tensor], Measured | None]:
    """The clients' metrics alone, and their models where the evaluation was asked for them."""
    if FINITE not in metrics:
        return metrics, None
    parts = {name.removeprefix(f"{MODEL}."): t for name, t in metrics.items() if name.startswith(f"{MODEL}.")}
    model: Personal = metrics[MODEL] if MODEL in metrics else mixture_of(parts)
    rest = {name: t for name, t in metrics.items() if name.partition(".")[0] != MODEL}
    return rest, Measured(model, metrics[FINITE])


def mixture_of(tensors: Mapping[str, Tensor]) -> Experts:
    """The mixture, from its tensors by the paths of `tree.named`; other names are none of its."""
    whole = {name: tensors[name] for name in Experts._fields if name in tensors}
    remembered = {name: tensors[f"memory.{name}"] for name in Memory._fields if f"memory.{name}" in tensors}
    return Experts(**whole, memory=Memory(**remembered) if remembered else None)


def global_statistics(algorithm: Any, task: Task, client: Any) -> Tensor | None:
    """[D - d], the batch-norm statistics that this client has for the weights of the global model.

    They are those of the model that it trained from them, which need not be the model that it predicts with.
    None: the algorithm has no method of this name.
    """
    rule = getattr(algorithm, "global_statistics", None)
    return None if rule is None else rule(task, client)


def vectors_of(model: Personal) -> Tensor:
    """[D] of one model, [k, D] of a mixture."""
    return model.w if isinstance(model, Experts) else model


def with_statistics(task: Task, model: Personal, statistics: Tensor) -> Personal:
    """The model with these batch-norm statistics: [D - d] for all models of a mixture, or a row for each."""
    w = vectors_of(model)
    w = torch.cat([w[..., : task.d], statistics.expand(*w.shape[:-1], -1)], -1)
    return model._replace(w=w) if isinstance(model, Experts) else w


def on_host(task: Task) -> list[Metric]:
    """The metrics that are computed from collected predictions."""
    return [m for m in task.metrics if m.name != "accuracy" or task.criterion.correct is None]


def collected(task: Task, predictions: Sequence[Tensor], y: Tensor) -> Tensor:
    """Predictions as one tensor [n, ...]; of tokens only the target's, as all would be gigabytes."""
    result = torch.cat(list(predictions))
    if task.criterion.kind == "next_token":
        result = result.gather(-1, torch.where(y >= 0, y, 0)[..., None])[..., 0]
    return result


def on_host_arrays(task: Task, predictions: Tensor, y: Tensor) -> tuple[Array, Array]:
    """Collected predictions and targets as the metrics take them: of classes, probabilities in float64."""
    wide = predictions.double().cpu()
    return (wide.exp() if task.criterion.kind == "classification" else wide).numpy(), y.cpu().numpy()


def primary_metrics(task: Task, personal: Personal, clients: Sequence[Data]) -> list[float]:
    """The primary metric of a model on each client's samples, in common passes; nan where none is defined."""
    metric = task.metrics[0]
    correct = None if metric in on_host(task) else task.criterion.correct
    sizes = [int(data.size) for data in clients]
    valid = [tree.each(lambda t, n=n: t[:n], data[:2]) for data, n in zip(clients, sizes, strict=True)]
    x, y = tree.concatenate(valid)
    if not len(y):
        return [float("nan")] * len(clients)
    losses, values = [], []  # of the samples, in parts
    for inputs, targets, _ in Data(x, y, torch.tensor(len(y), device=y.device)).in_parts(EVAL_BATCH):
        predicted = task.predict(personal, inputs)
        # In common passes no risk set is a client's: of a survival, only what is not finite is looked for.
        losses.append(
            predicted.sum(1)
            if task.criterion.kind == "survival"
            else task.criterion.test_losses(predicted, targets)
        )
        values.append(correct(predicted, targets) if correct else collected(task, [predicted], targets))

    def of_client(loss: Tensor, value: Tensor, target: Tensor) -> float:
        if not len(loss) or not bool(torch.isfinite(loss.sum())):
            return float("nan")
        if correct:
            counted = task.criterion.counted(target, None)
            return float((value if counted is None else value[counted]).to(loss.dtype).mean())  # of none, nan
        return metric.of(*on_host_arrays(task, value, target))

    parts = tree.split((torch.cat(losses), torch.cat(values), y), sizes)
    return [of_client(*client) for client in parts]


def predicted(task: Task, personal: Personal, data: Data) -> tuple[Array, Array]:
    """The predictions of a model for one client's samples, and their targets, as the metrics take them.

    The model may be on another device: those that are kept of a training on a GPU are in the host's memory.
    """
    personal = tree.each(lambda t: t.to(task.device), personal)
    parts = data.in_parts(EVAL_BATCH)
    found = torch.cat([collected(task, [task.predict(personal, x)], y) for x, y, _ in parts])
    size = int(data.size)
    return on_host_arrays(task, found[:size], data.y[:size])


def measured(
    task: Task, metrics: dict[str, Tensor], targets: Sequence[Tensor], validation: Sequence[Tensor] = ()
) -> dict[str, Tensor]:
    """The clients' metrics [N, ...] with the task's metrics in place of predictions.

    `targets` and `validation` are the targets of each client's test and validation samples.
    """
    wanted = on_host(task)
    result = {name: values for name, values in metrics.items() if not name.startswith(PREDICTIONS)}
    if len(result) == len(metrics):
        return metrics
    for name in metrics.keys() - result.keys():
        suffix = name.removeprefix(PREDICTIONS)
        pairs = zip(metrics[name].cpu(), validation if suffix == VALIDATED else targets, strict=True)
        rows = [on_host_arrays(task, row[: len(y)], y) for row, y in pairs]
        for metric in wanted:
            values = [metric.of(*row) for row in rows]
            result[f"{metric.name}{suffix}"] = torch.tensor(values, dtype=torch.float64)
    return result
