"""What secure aggregation adds up: the summand of a client, which it computes itself, and its metrics.

Without secure aggregation the server computes the summand of each upload. Here the node does (`summand_of`), turns
it into words (`words_of`), and the server turns the sum of all words back (`sums_from`). `check` refuses an
algorithm where that is not possible, or where the sum would reveal single uploads.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from copfl import wire
from copfl.core import tree
from copfl.core.algorithm import AnyAlgorithm, blank_samples, example_output, received
from copfl.core.evaluation import evaluate, measured
from copfl.core.payload import WEIGHT_FIELDS
from copfl.core.sums import total_is_one_sum
from copfl.core.task import Task
from copfl.errors import UsageError, WireError
from copfl.federation.protocol import secure_sum
from copfl.federation.protocol.choice import InFolds
from copfl.federation.protocol.secure_sum import LARGEST_ERROR, Floats, Rules, Words, quantised

WHO_KNOWS = "where a member's training failed, or its numbers do not fit, its own log says so"
REMEDY = "choose another algorithm, or leave secure.aggregation out"


class UploadSums(NamedTuple):
    """One client's contribution, or the sum of several."""

    total: Any  # of the algorithm
    metrics: dict[str, Tensor]  # [2] each: the sum, and the number of clients that report it


def summand_of(algorithm: AnyAlgorithm, task: Task, clients: int, upload: Any) -> Any:
    """The summand, computed by the client: `check` has shown that it depends on the upload alone.

    Args:
        algorithm: The federation's.
        task: What is trained.
        clients: How many there are.
        upload: What the client would send without secure aggregation.
    """
    server = algorithm.server_init(task, clients)
    return algorithm.summand(task, server, torch.tensor(0, device=task.device), upload)


def sums_of(total: Any, metrics: Mapping[str, Tensor], rules: Rules, *, reported: bool = True) -> UploadSums:
    """The contribution. A metric that is not a number, or out of range, is not reported.

    Args:
        total: The client's summand.
        metrics: Its metrics.
        rules: What all clients of the sum agree on.
        reported: Whether any metric leaves the node.
    """
    values = {name: float(value) for name, value in sorted(metrics.items())}
    is_reported = {n: reported and math.isfinite(v) and abs(v) <= rules.range for n, v in values.items()}
    pairs = {n: torch.tensor([v, 1.0] if is_reported[n] else [0.0, 0.0]).double() for n, v in values.items()}
    return UploadSums(total, pairs)


def words_of(sums: UploadSums, rules: Rules) -> Words:
    """All numbers of a contribution, quantised. None is refused, see `quantised`.

    Args:
        sums: One client's contribution.
        rules: What all clients of the sum agree on.
    """
    return np.concatenate([quantised(_numbers(t), rules) for t in tree.leaves(sums)])


def fits(sums: UploadSums, rules: Rules) -> bool:
    """Whether a sum can have a contribution as it is.

    Args:
        sums: The node's contribution.
        rules: What all clients of the sum agree on.
    """
    return all(secure_sum.fits(_numbers(t), rules) for t in tree.leaves(sums.total))


def problem_of(sums: UploadSums, rules: Rules) -> str:
    """What the owner of a node should know of its contribution: the field, and what a sum does to it.

    Args:
        sums: The node's contribution.
        rules: What all clients of the sum agree on.
    """
    for path, t in tree.named(sums.total):  # metrics may be near zero
        if problem := secure_sum.problem_of(_numbers(t), rules):
            return f"{path}: {problem}"
    return ""


def _numbers(t: Tensor) -> Floats:
    return np.asarray(t.detach().cpu().double().reshape(-1).numpy(), np.float64)


def require_room(model: Tensor, clip: float, deviation: float, rules: Rules) -> None:
    """WireError if noised uploads of this model would be out of range, or too small for the step of a sum.

    By the model and the noise alone. Whether one upload is out of range would tell the server about it, and
    it has a part of the noise that the sum has.

    Args:
        model: That the client received.
        clip: The largest norm of its change.
        deviation: Of the noise of one upload.
        rules: Of the sum.
    """
    largest = float(model.abs().max()) + clip + 8 * deviation
    if not largest <= rules.range:
        raise WireError(
            f"a noised value may be {largest:.3g}, and {rules.range:g} is the most; raise secure.range"
        )
    typical = math.sqrt(float(model.double().square().mean()) + deviation**2)
    if rules.step / math.sqrt(12) > LARGEST_ERROR * typical:
        raise WireError(
            f"noised values of about {typical:.2g} are too small for steps of {rules.step:.2g}; raise "
            "secure.bits, or lower secure.range"
        )


def sums_from(values: Floats, like: UploadSums) -> UploadSums:
    """The sums in the structure of `like`; counts are rounded to whole numbers.

    Args:
        values: The sum of all vectors.
        like: The structure of contributions, see `example`.
    """

    def tensors() -> Iterator[Tensor]:
        start = 0
        for t in tree.leaves(like):
            piece = torch.from_numpy(values[start : start + t.numel()]).view(t.shape)
            yield piece if t.is_floating_point() else piece.round().to(torch.int64)
            start += t.numel()

    return tree.rebuild(like, list(tensors()))


def check_weights(sums: UploadSums, clients: int, rules: Rules, *, noised: bool) -> None:
    """WireError if so many clients cannot have added up these weights, or reports of metrics.

    Args:
        sums: Of all clients.
        clients: How many there are.
        rules: Of the sum.
        noised: Whether the summands have noise, the weights too.
    """
    rounding = clients * rules.step
    for path, t in tree.named(sums.total):
        is_weight = path.rpartition(".")[2] in WEIGHT_FIELDS and not noised
        if (
            is_weight
            and not -rounding <= float(t.min()) <= float(t.max()) <= clients * rules.range + rounding
        ):
            raise WireError(f"{path} of the sum is {float(t.min()):g}: no weights give it; {WHO_KNOWS}")
    for name, pair in sums.metrics.items():
        if not -rounding <= float(pair[1]) <= clients + rounding:
            raise WireError(f"{float(pair[1]):g} of {clients} clients report {name}; {WHO_KNOWS}")
    weights = [t for path, t in tree.named(sums.total) if path.rpartition(".")[2] in WEIGHT_FIELDS]
    if weights and not any(bool(t.any()) for t in weights):
        raise WireError("the weights of all clients are zero: their logs say why")


def means(sums: UploadSums) -> dict[str, float | None]:
    """The mean of every metric over the clients that report it."""
    pairs = {name: pair.tolist() for name, pair in sums.metrics.items()}
    return {name: wire.plain(value / round(count)) for name, (value, count) in pairs.items() if round(count)}


def example(
    algorithm: AnyAlgorithm,
    task: Task,
    shape: Any,
    rules: Rules,
    augment: bool,
    evaluated: bool = True,
) -> UploadSums:
    """The structure of contributions to a round, evaluated or not, from an update on blank samples.

    Args:
        algorithm: The federation's.
        task: What is trained.
        shape: Of one sample.
        rules: What all clients of the sum agree on.
        augment: Whether samples are augmented.
        evaluated: Whether the round is evaluated.
    """
    data, clients = blank_samples(task, shape), rules.clients
    output = example_output(algorithm, task, data, augment, clients)
    down = received(algorithm, algorithm.server_init(task, clients), torch.tensor(0, device=task.device))
    with torch.no_grad():
        records = algorithm.client_init(task), down, output.client
        total = summand_of(algorithm, task, clients, output.upload)
        if isinstance(algorithm, InFolds):
            reported = algorithm.reported if evaluated else ()
            return sums_of(total, dict.fromkeys(reported, torch.tensor(0.0)), rules)
        evaluation = evaluate(algorithm, task, *records, output.trained, data) if evaluated else {}
    tested = measured(task, {name: value.unsqueeze(0) for name, value in evaluation.items()}, [data.y])
    return sums_of(total, output.metrics | tested, rules)


def check(algorithm: AnyAlgorithm, task: Task, shape: Any, clients: int, augment: bool) -> None:
    """UsageError if the server needs more of an upload than a plain sum that the client can compute.

    Args:
        algorithm: The federation's.
        task: What is trained.
        shape: Of one sample.
        clients: How many there are.
        augment: Whether samples are augmented.
    """
    upload = example_output(algorithm, task, blank_samples(task, shape), augment, clients).upload
    server = algorithm.server_init(task, clients)

    def summand(server: Any, client: int) -> Any:
        return algorithm.summand(task, server, torch.tensor(client, device=task.device), upload)

    with torch.no_grad():
        plain = summand(server, 0)
        if any(tree.gathered(plain)):
            raise UsageError(f"its server needs every upload by itself, so a sum is not enough; {REMEDY}")
        if not _equal(plain, summand(server, clients - 1)):
            revealed = "its total has a part for every client, so the sum would reveal each upload"
            raise UsageError(f"{revealed}; {REMEDY}")
        for other in (torch.zeros_like, lambda t: ~t if t.dtype == torch.bool else t + 1):
            if not _equal(plain, summand(tree.each(other, server), 0)):
                raise UsageError(
                    "its server compares each upload with its own record (such as a bound on the weight) "
                    f"before it adds it, which it cannot do with a masked one; {REMEDY}"
                )
        if not total_is_one_sum(algorithm, task, server, upload):
            setting = " and ".join(f"algorithm.{key}={value}" for key, value in summable(algorithm).items())
            raise UsageError(
                "its total has more than the weighted sum of the vectors and the sum of the weights (such as "
                "how many clients share each entry), from which single uploads can be computed; "
                + (f"set {setting}, {REMEDY}" if setting else REMEDY)
            )


def summable(algorithm: Any) -> Mapping[str, Any]:
    """The options under which a sum of the algorithm's uploads hides them; empty if there are none.

    Args:
        algorithm: A value, or a class of the registry; None: one that is not in it.
    """
    inner = getattr(algorithm, "algorithm", None)
    return getattr(algorithm, "summable", {}) if inner is None else summable(inner)


def _equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))
