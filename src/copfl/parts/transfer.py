"""Knowledge transfer on public samples: clients exchange predictions instead of weights."""

import torch
from torch import Tensor
from torch.nn import functional as F

from copfl.core import tree
from copfl.core.criteria import mean_of_valid
from copfl.core.task import STATISTICS_BATCH, Batch, Data, Epoch, Objective, Task
from copfl.errors import UsageError
from copfl.kernels.draws import mixed
from copfl.kernels.modules import Inputs


def public_of(task: Task) -> Inputs:
    """The public samples [p, ...]; a UsageError if the task has none, or no classes."""
    if task.criterion.kind != "classification":
        raise UsageError(
            f"ktpfl exchanges probabilities of classes; this task is {task.criterion.kind}. Choose another "
            "algorithm"
        )
    if task.public is None or not _count(task.public):
        raise UsageError(
            "ktpfl needs public samples that no client holds, and there are none; leave some training "
            "samples over (fewer clients, or fewer samples a client), or give some, such as "
            "task_of(..., public=samples)"
        )
    return task.public


def _count(samples: Inputs) -> int:
    return len(tree.leaves(samples)[0])


def softened(task: Task, w: Tensor, samples: Inputs, temperature: float) -> Tensor:
    """The model's probabilities for these raw samples [p, C], softmax(logits / temperature)."""
    count = _count(samples)
    sizes = [min(STATISTICS_BATCH, count - start) for start in range(0, count, STATISTICS_BATCH)]
    logits = [task.forward(w, task.numbers(x))[0] for x in tree.split(samples, sizes)]
    return F.softmax(torch.cat(logits) / temperature, 1)


def lesson(
    samples: Inputs, teacher: Tensor, ready: Tensor, batch: int, key: Tensor | None = None
) -> tuple[Data, Epoch]:
    """The samples with the teacher's predictions [p, C] as labels; none is valid if not `ready`.

    The `key` is that of random numbers inside the model, see Batch.
    """
    order = torch.arange(_count(samples), device=teacher.device)
    steps = (
        Batch(index, ready.expand(len(index)), None, None, None if key is None else mixed(key, number))
        for number, index in enumerate(torch.split(order, batch))
    )
    return Data(samples, teacher, order[-1] + 1), tuple(steps)


def distillation(temperature: float) -> Objective:
    """KL(teacher || student), softened: the mean over the samples of sum_c t_c (log t_c - log p_c)."""

    def loss(logits: Tensor, features: Tensor, teacher: Tensor, valid: Tensor | None) -> Tensor:
        logs = F.log_softmax(logits / temperature, 1)
        return mean_of_valid((torch.xlogy(teacher, teacher) - teacher * logs).sum(1), valid)

    return loss


def coefficients_after(c: Tensor, answers: Tensor, known: Tensor, penalty: float) -> Tensor:
    """The rows c [N, N] after a step 1/L on |p_i - sum_j c_ij p_j|^2 + penalty * mean (c_ij - 1/N)^2.

    p are the predictions [N, samples, classes], of which `known` [N] exist; the distance is the mean over the
    samples and the sum over the classes. L is the largest curvature, so no step overshoots. The rows still
    add up to 1, but may leave the simplex.
    """
    flat, n = answers.flatten(1), known.sum().clamp(min=1)
    even = known.to(flat.dtype) / n
    flat = torch.where(known[:, None], flat - even @ flat, 0)  # rows add up to 1: only differences count
    gram = flat @ flat.T / answers.shape[1]
    c = torch.where(known[:, None], c, even)
    slope = 2 * (c - torch.eye(len(c), device=c.device, dtype=c.dtype)) @ gram + 2 * penalty / n * (c - even)
    steepest: Tensor = 2 * torch.linalg.eigvalsh(gram)[-1] + 2 * penalty / n
    return c - slope / steepest.clamp(min=1e-30)
