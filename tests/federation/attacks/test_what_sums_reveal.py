"""Attacks on secure sums: single uploads, from everything that the server has.

The server has the sum of every round, knows who took part, and sent every message to the clients. Each attack
first reads single uploads of an algorithm that is refused, so that it is known to work, and then tries the
allowed ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from copfl.algorithms import ALGORITHMS
from copfl.algorithms.copfl import COPFL
from copfl.algorithms.fedavg import FedAvg
from copfl.algorithms.fedce import FedCE
from copfl.algorithms.fedselect import FedSelect
from copfl.algorithms.trees import BEFORE, ROWS, Trees
from copfl.core import AnyAlgorithm, Sgd, Task, received, task_of, tree
from copfl.core.algorithm import example_output, traits
from copfl.core.batches import plan
from copfl.core.halves import first_half
from copfl.core.payload import VECTOR_FIELDS, WEIGHT_FIELDS, other_fields, with_reported_weight
from copfl.core.sums import total_is_one_sum
from copfl.data.clients.federation import FederatedData
from copfl.errors import UsageError
from copfl.federation.protocol import secure_total
from copfl.federation.protocol.secure_sum import Rules, dequantised
from copfl.models import MLP
from copfl.parts.mamo import Mamo
from copfl.parts.phases import Phases
from copfl.parts.pwpm import Pwpm
from copfl.testing import small_federation
from tests.algorithms import test_trees
from tests.slow import slow
from tests.toys import divided

NUMBERS = (3, 5, 10, 30)  # of clients
BITS = 48  # the most that a federation can set: the attacks see the finest sums
NEVER = {"fedcalm", "fedpac", "ktpfl", "reads"}  # refused: their server needs more than sums
SUMMED = NEVER | {"fedselect", "fedex_lora", "ifca", "scaffold"}  # refused: their sums reveal single uploads
ALLOWED = sorted(ALGORITHMS.keys() - SUMMED)
CASES = [*((name, 3) for name in ALLOWED), *(("fedavg", n) for n in NUMBERS if n != 3), ("copfl", 30)]


def as_allowed(name: str) -> AnyAlgorithm:
    """The algorithm with the options that a federation with secure aggregation has."""
    algorithm: AnyAlgorithm = ALGORITHMS[name](**secure_total.summable(ALGORITHMS[name]))
    return algorithm


# -- what a server has ---------------------------------------------------------------------------------------


class Round(NamedTuple):
    ids: tuple[int, ...]  # who took part
    down: Any  # the message to one of them, without what only it receives
    total: Any  # what the server reads from the masked vectors
    after: Any  # the server's record after the round
    uploads: dict[int, Any]  # what it must not read


def sum_of(algorithm: AnyAlgorithm, task: Task, uploads: Iterable[Any], clients: int) -> Any:
    """The total that the server reads: of the quantised summands, whose masks cancel out."""
    rules = Rules(clients, bits=BITS)
    contributions = []
    for upload in uploads:
        with torch.no_grad():
            total = secure_total.summand_of(algorithm, task, clients, upload)
        contributions.append(secure_total.sums_of(total, {}, rules))
    words = np.stack([secure_total.words_of(sums, rules) for sums in contributions]).sum(0, dtype=np.uint64)
    return secure_total.sums_from(dequantised(words, rules), contributions[0]).total


def rounds_of(
    algorithm: AnyAlgorithm, task: Task, federation: FederatedData, sets: Iterable[tuple[int, ...]]
) -> list[Round]:
    """The rounds in which these sets of clients take part."""
    clients = federation.clients
    server = algorithm.server_init(task, clients)
    states = dict.fromkeys(range(clients), algorithm.client_init(task))
    rounds = []
    for number, ids in enumerate(sets):
        uploads = {}
        down = None
        for n in ids:
            down = received(algorithm, server, torch.tensor(n))
            sizes = federation.train.sizes[[n]]
            order = plan(0, number, [n], sizes, batch=8, epochs=algorithm.total_epochs, augment=False)
            data = tree.row(federation.train.rows([n]), 0)
            with torch.no_grad():
                output = algorithm.client_update(task, states[n], down, data, tree.row(order, 0))
            states[n], uploads[n] = output.client, output.upload
        total = sum_of(algorithm, task, uploads.values(), clients)
        with torch.no_grad():
            server, _ = algorithm.server_update(task, server, total)
        rounds.append(Round(ids, down, total, server, uploads))
    return rounds


def random_federation(clients: int) -> tuple[Task, FederatedData]:
    """A model of 1,155 parameters, and clients with different numbers of samples."""
    rng, sizes = np.random.default_rng(0), [5 + n % 7 for n in range(clients)]
    x, y = rng.normal(size=(sum(sizes), 30)), rng.integers(0, 3, sum(sizes))
    torch.manual_seed(0)
    return task_of(MLP((30,), 3, width=33), 3, dtype=torch.float64), divided(x, y, sizes)


@cache
def allowed_rounds(name: str, clients: int) -> tuple[Task, list[Round]]:
    """Two rounds of all clients, as a server with secure aggregation sees them."""
    algorithm = as_allowed(name)
    how, sizes = traits(algorithm), tuple(3 + n % 5 for n in range(clients))
    task, federation = small_federation("none", sizes, needs=how.needs, trains=how.trains)
    everybody = tuple(range(clients))
    return task, rounds_of(algorithm, task, federation, [everybody] * 2)


# -- an attack on counts and subset sums ---------------------------------------------------------------------


class Found(NamedTuple):
    """What the attack reads from one total."""

    values: dict[int, float]  # by entry: the weight of the only client that shares it
    scores: list[float]
    masks: Tensor | None  # [clients, s] bool in the order of the scores; None: not found


def attack(total: Any, clients: int) -> Found:
    """Single uploads, from how many clients share each entry and from the sums of their scores."""
    vectors = [leaf.double().reshape(-1) for leaf in tree.leaves(total) if leaf.numel() > 50]
    counts = [v for v in vectors if torch.equal(v, v.round()) and len(set(v.tolist())) <= clients + 1]
    others = [v for v in vectors if not any(v is count for count in counts)]
    if not counts or not others:
        return Found({}, [], None)
    # Where nobody shares an entry, the sum of its values is zero.
    empty = others[0] == 0
    sharers = counts[0] if (counts[0][empty] == 0).all() and empty.any() else clients - counts[0]
    alone = (sharers == 1).nonzero()[:, 0].tolist()
    if len(others) == 1:  # all weigh the same
        return Found({entry: float(others[0][entry]) for entry in alone}, [], None)
    weighted, weights = others
    values = {entry: float(weighted[entry] / weights[entry]) for entry in alone}
    single = [float(w) for w in weights[sharers == 1]]
    single += [float(weights.max() - w) for w in weights[sharers == clients - 1]]
    scores: list[float] = []
    for score in sorted(single):
        if not scores or score - scores[-1] > 1e-6:
            scores.append(score)
    return Found(values, scores, masks_from(weights, sharers, scores) if len(scores) == clients else None)


def masks_from(weights: Tensor, sharers: Tensor, scores: list[float]) -> Tensor | None:
    """[clients, s] bool, which clients keep each entry personal: the subset of the scores with this sum."""
    if len(scores) > 10:
        return None
    subsets = [s for size in range(len(scores) + 1) for s in combinations(range(len(scores)), size)]
    shared = torch.zeros(len(subsets), len(scores), dtype=torch.float64)
    for place, subset in enumerate(subsets):
        shared[place, list(subset)] = 1
    sums, sizes = shared @ torch.tensor(scores, dtype=torch.float64), shared.sum(1)
    distance = (sums[:, None] - weights).abs() + 1e3 * (sizes[:, None] != sharers)
    return shared[distance.argmin(0)].T == 0


def is_read(value: float, entry: int, uploads: dict[int, Any]) -> bool:
    """Whether a client's upload has this value at this entry."""
    return any(abs(value - float(vector_of(upload)[entry])) < 1e-5 for upload in uploads.values())


def vector_of(upload: Any) -> Tensor:
    """[s], zero where personal."""
    vector = next(getattr(upload, name) for name in VECTOR_FIELDS if hasattr(upload, name))
    return torch.as_tensor(vector.values if isinstance(vector, tree.Masked) else vector)


@pytest.mark.parametrize("clients", NUMBERS)
def test_the_attack_reads_scores_masks_and_weights_of_a_mask_per_client(clients: int) -> None:
    """CO-PFL with merge="sharers", which is refused."""
    task, federation = random_federation(clients)
    algorithm = COPFL(Mamo(lr=1e-2), Pwpm(), phases=Phases())  # masks that grow
    if clients == 30:  # with larger masks no entry is personal for one client alone
        algorithm = replace(algorithm, growth=replace(algorithm.growth, rate=0.03))
    everybody = tuple(range(clients))
    rounds = rounds_of(algorithm, task, federation, [everybody] * (3 if clients < 30 else 1))
    found = attack(rounds[-1].total, clients)
    uploads = rounds[-1].uploads
    true_scores = sorted((float(upload.score), n) for n, upload in uploads.items())
    assert np.allclose(found.scores, [score for score, _ in true_scores], atol=1e-6)
    if clients == 30:
        return
    assert found.masks is not None
    masks = torch.stack([uploads[n].shared.personal for _, n in true_scores])
    assert float((found.masks == masks).double().mean()) > 0.99
    assert len(found.values) > {3: 300, 5: 100, 10: 5}[clients]
    assert all(is_read(value, entry, uploads) for entry, value in found.values.items())


@pytest.mark.parametrize("clients", [3, 5, 10])
def test_the_attack_reads_weights_of_fedselect(clients: int) -> None:
    task, federation = random_federation(clients)
    algorithm = FedSelect(Sgd(lr=0.05), interval=1, rate=0.5)
    rounds = rounds_of(algorithm, task, federation, [tuple(range(clients))] * 3)
    found = attack(rounds[-1].total, clients)
    assert len(found.values) > 20
    assert all(is_read(value, entry, rounds[-1].uploads) for entry, value in found.values.items())


@pytest.mark.parametrize(("name", "clients"), CASES)
def test_the_attack_reads_nothing_of_an_allowed_algorithm(name: str, clients: int) -> None:
    _, rounds = allowed_rounds(name, clients)
    for seen in rounds:
        assert attack(seen.total, clients) == Found({}, [], None)
        # One vector of the upload's length: nothing says who shares an entry.
        length = len(vector_of(seen.uploads[0]))
        assert sum(2 * leaf.numel() > length for leaf in tree.leaves(seen.total) if leaf.dim()) <= 1


# -- for every upload of a client there are uploads of the others with the same sum --------------------------


@pytest.mark.parametrize(("name", "clients"), CASES)
def test_another_upload_gives_the_same_sum_and_the_same_next_message(name: str, clients: int) -> None:
    """So a sum, and all that a server computes from it, tells nothing about one upload without the others."""
    algorithm = as_allowed(name)
    task, rounds = allowed_rounds(name, clients)
    server = algorithm.server_init(task, clients)
    for seen in rounds:
        first, second = seen.uploads[0], seen.uploads[1]
        generator = torch.Generator().manual_seed(1)
        values = torch.randn(vector_of(first).shape, generator=generator, dtype=torch.float64)
        values = values.masked_fill(vector_of(first) == 0, 0)  # a common mask is known
        weights = [weight_of(upload) for upload in (first, second)]
        a, b = (torch.ones(()) if w is None else w for w in weights)
        new_a, new_b = (0.3 * a + 0.7 * b, 0.7 * a + 0.3 * b)  # the same sum
        rest = (a * vector_of(first) + b * vector_of(second) - new_a * values) / new_b
        first_others = {name: getattr(first, name) + 1 for name in other_fields(first)}
        second_others = {
            name: (a * getattr(first, name) + b * getattr(second, name) - new_a * value) / new_b
            for name, value in first_others.items()
        }
        others = seen.uploads | {
            0: with_vector(with_reported_weight(first, new_a), values)._replace(**first_others),
            1: with_vector(with_reported_weight(second, new_b), rest)._replace(**second_others),
        }
        total = sum_of(algorithm, task, others.values(), clients)
        step = Rules(clients, bits=BITS).step
        for one, other in zip(tree.leaves(seen.total), tree.leaves(total), strict=True):
            assert torch.allclose(one.double(), other.double(), rtol=0, atol=clients * step)
        with torch.no_grad():
            after = algorithm.server_update(task, server, total)[0]
            expected = algorithm.server_update(task, server, seen.total)[0]
        messages = [received(algorithm, record, torch.tensor(0)) for record in (after, expected)]
        for one, other in zip(*map(tree.leaves, messages), strict=True):
            if one.is_floating_point():
                assert torch.allclose(one, other, atol=clients * step)
        server = expected


def with_vector(upload: Any, values: Tensor) -> Any:
    if hasattr(upload, "shared"):
        return upload._replace(shared=upload.shared._replace(values=values))
    return upload._replace(**{"sums" if hasattr(upload, "sums") else "w": values})


def weight_of(upload: Any) -> Tensor | None:
    return next((getattr(upload, name) for name in WEIGHT_FIELDS if hasattr(upload, name)), None)


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "remedy"),
    [
        (COPFL(), "set algorithm.merge=common"),
        (COPFL(merge="union"), "set algorithm.merge=common"),
        (FedSelect(), "choose another algorithm"),
        (FedCE(combine="plus"), "set algorithm.combine=times"),
        (ALGORITHMS["fedex_lora"](), "choose another algorithm"),
        (ALGORITHMS["flex_lora"](), "set algorithm.send=products"),
        (ALGORITHMS["ifca"](), "choose another algorithm"),
        (ALGORITHMS["scaffold"](), "choose another algorithm"),
    ],
)
def test_totals_with_more_than_a_sum_are_refused(algorithm: AnyAlgorithm, remedy: str) -> None:
    task, _ = small_federation("none", (5, 9, 3), needs=getattr(algorithm, "needs", ()))
    with pytest.raises(UsageError, match=f"more than the weighted sum.*{remedy}"):
        secure_total.check(algorithm, task, (1, 8, 8), 3, augment=False)


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - NEVER))
def test_the_table_of_allowed_algorithms(name: str) -> None:
    algorithm = as_allowed(name)
    how = traits(algorithm)
    task, federation = small_federation("none", (5, 9, 3), needs=how.needs, trains=how.trains)
    upload = example_output(algorithm, task, tree.row(federation.train.rows([0]), 0), clients=3).upload
    server = algorithm.server_init(task, 3)
    assert total_is_one_sum(algorithm, task, server, upload) == (name in ALLOWED)


def test_the_documented_tables() -> None:
    """docs/secure-aggregation.md: which algorithms are allowed, and the two sums that each reveals."""
    page = (Path(__file__).parents[3] / "docs" / "secure-aggregation.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| allowed |")]
    words = set(re.findall(r"[a-z_]+", re.sub(r"`[^`]*`", "", row)))
    assert words & ALGORITHMS.keys() == set(ALLOWED)
    for name in ALLOWED:
        _, rounds = allowed_rounds(name, 3)
        fields = {
            "copfl": ("w", "weight", "personal", "score", "clients", "reports"),
            "fedce": ("w", "weight"),
        }
        total, uploads = rounds[-1].total, rounds[-1].uploads.values()
        fields["feddbe"] = ("w", "size", "mean")
        fields["player_fl"] = ("w", "size", "sensitivity")
        fields["levels"] = ("sums",)
        fields["wide_levels"] = ("sums",)
        fields["trees"] = ("sums",)
        assert total._fields == fields.get(name, ("w", "size"))
        if name == "copfl":  # the sum of the scores twice, and two numbers that do not depend on data
            assert (float(total.personal), float(total.clients)) == (0, 3)
            assert float(total.weight) == float(total.score)
            assert total.reports is None  # they are for max_weight, which is refused
        if name in ("levels", "trees", "wide_levels"):  # one vector, and no weight
            expected = torch.stack([vector_of(upload) for upload in uploads]).sum(0)
            assert torch.allclose(total.sums, expected, atol=1e-6)
            continue
        weights = [weight for upload in uploads if (weight := weight_of(upload)) is not None]
        assert float(total[1]) == pytest.approx(float(torch.stack(weights).sum()), abs=1e-6)
        weighted = [w * vector_of(upload) for w, upload in zip(weights, uploads, strict=True)]
        assert torch.allclose(total.w.double().reshape(-1), torch.stack(weighted).sum(0).double(), atol=1e-6)


# -- several rounds ------------------------------------------------------------------------------------------


def solved(rounds: list[Round], sums: Tensor, clients: int) -> Tensor:
    """[clients, ...], the values of each client whose sums [rounds, ...] these are, if they never change."""
    took_part = torch.zeros(len(rounds), clients, dtype=torch.float64)
    for place, seen in enumerate(rounds):
        took_part[place, list(seen.ids)] = 1
    return torch.as_tensor(np.linalg.lstsq(took_part.numpy(), sums.numpy(), rcond=None)[0])


def one_lost_in_turn(clients: int) -> list[tuple[int, ...]]:
    everybody = tuple(range(clients))
    return [everybody, *(tuple(n for n in everybody if n != lost) for lost in everybody)]


@pytest.mark.parametrize("clients", [3, 5, pytest.param(10, marks=slow)])
def test_sums_over_different_clients_reveal_numbers_of_samples(clients: int) -> None:
    """With weights="samples", in rounds in which different clients take part; not with "equal"."""
    task, federation = random_federation(clients)
    sizes = torch.as_tensor(federation.train.sizes).double()

    def numbers(algorithm: FedAvg, sets: list[tuple[int, ...]]) -> Tensor:
        rounds = rounds_of(algorithm, task, federation, sets)
        return solved(rounds, torch.stack([seen.total.size.double() for seen in rounds]), clients)

    by_samples, different = FedAvg(Sgd(lr=0.01)), one_lost_in_turn(clients)
    assert torch.allclose(numbers(by_samples, different), sizes, atol=1e-3)
    assert torch.allclose(numbers(by_samples, [different[0]] * 4), sizes.mean())
    equal = FedAvg(Sgd(lr=0.01), weights="equal")
    assert torch.allclose(numbers(equal, different), torch.ones_like(sizes), atol=1e-3)


def changes_of(total: Any, down: Tensor) -> Tensor:
    """[s], the sum of `weight * change`; zero at the entries of a common mask."""
    weighted, weight = tree.leaves(total)[:2]
    return torch.where(weighted == 0, 0, weighted - weight * down).double()


@pytest.mark.parametrize(("clients", "closeness"), [(3, 0.95), (5, 0.9), pytest.param(10, 0.75, marks=slow)])
def test_sums_over_different_clients_reveal_updates_that_hardly_change(
    clients: int, closeness: float
) -> None:
    """CO-PFL: the cosine of a client's update with the solution, and with the sum of its round alone."""
    task, federation = random_federation(clients)
    algorithm = COPFL(Mamo(lr=1e-3), merge="common")

    def cosines(sets: list[tuple[int, ...]]) -> list[float]:
        rounds = rounds_of(algorithm, task, federation, sets)
        sums = torch.stack([changes_of(seen.total, seen.down.w) for seen in rounds])
        last, estimates = rounds[-1], solved(rounds, sums, clients)
        one = torch.ones((), dtype=torch.float64)
        true = {n: changes_of((vector_of(u), one), last.down.w) for n, u in last.uploads.items()}
        return [float(torch.cosine_similarity(estimates[n], true[n], dim=0)) for n in last.ids]

    sets = one_lost_in_turn(clients)
    assert np.mean(cosines([sets[0]] * 2 + sets)) > closeness
    assert np.mean(cosines([sets[0]] * (clients + 3))) < 0.6  # all in every round: the same estimate for all


@pytest.mark.parametrize(
    ("clients", "rounds", "closeness"), [(6, 22, 0.8), pytest.param(10, 30, 0.8, marks=slow)]
)
def test_sums_of_halves_reveal_what_stays_alike_over_the_rounds(
    clients: int, rounds: int, closeness: float
) -> None:
    """Why `run.benefit` is refused: numbers of samples, and the cosine of a mean update with the solution.

    In one round they are two sums, and in each of them another upload of one client gives the same sum.
    """
    task, federation = random_federation(clients)
    algorithm, everybody = FedAvg(Sgd(lr=0.01)), tuple(range(clients))
    whole = rounds_of(algorithm, task, federation, [everybody] * rounds)
    halves, sums, sizes = [], [], []
    for number, seen in enumerate(whole):
        first = set(first_half(0, number, np.arange(clients)).tolist())
        for half in (first, set(everybody) - first):
            ids = tuple(sorted(half))
            total = sum_of(algorithm, task, [seen.uploads[n] for n in ids], clients)
            halves.append(seen._replace(ids=ids, total=total))
            sums.append(changes_of(total, seen.down.w))
            sizes.append(total.size.double())
    numbers = torch.as_tensor(federation.train.sizes).double()
    assert torch.allclose(solved(halves, torch.stack(sizes), clients), numbers, atol=1e-3)
    one, estimates = torch.ones((), dtype=torch.float64), solved(halves, torch.stack(sums), clients)
    together = torch.stack(sums).sum(0)
    found = []
    for n in everybody:
        updates = [changes_of((vector_of(seen.uploads[n]), one), seen.down.w) for seen in whole]
        mean = torch.stack(updates).mean(0)
        found.append(
            [float(torch.cosine_similarity(other, mean, dim=0)) for other in (estimates[n], together)]
        )
    from_halves, from_all = np.mean(found, axis=0)
    assert from_halves > closeness
    assert from_all < 0.4


def test_a_mean_of_accuracies_reveals_each_to_a_server_that_knows_the_test_sets() -> None:
    """Fractions with denominators that have no common divisor: only one combination has this sum."""
    rules, sizes, correct = Rules(3), (17, 23, 29), (11, 20, 8)
    accuracies = [torch.tensor(c / n, dtype=torch.float64) for c, n in zip(correct, sizes, strict=True)]
    words = [
        secure_total.words_of(secure_total.sums_of((), {"accuracy": a}, rules), rules) for a in accuracies
    ]
    mean = dequantised(np.sum(words, axis=0, dtype=np.uint64), rules)[0]
    fractions = [np.arange(n + 1) / n for n in sizes]
    sums = fractions[0][:, None, None] + fractions[1][:, None] + fractions[2]
    assert np.argwhere(np.abs(sums - mean) < 3 * rules.step).tolist() == [list(correct)]


def test_sums_of_the_same_clients_with_and_without_a_row_reveal_the_row() -> None:
    """One step of plain descent on all samples: the difference of n * w is the gradient of the row left out."""
    rate, sizes, width, features = 0.1, [6, 7, 8], 33, 30
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(sizes), features)), rng.integers(0, 3, sum(sizes))
    torch.manual_seed(0)
    task = task_of(MLP((features,), 3, width=width), 3, dtype=torch.float64)
    algorithm = FedAvg(Sgd(lr=rate), epochs=1)
    totals = [
        rounds_of(algorithm, task, divided(x[:rows], y[:rows], [6, 7, rows - 13]), [(0, 1, 2)])[0].total
        for rows in (21, 20)
    ]
    gradient = (task.initial - (totals[0].w - totals[1].w)) / rate
    weights, biases = gradient[: width * features].view(width, features), gradient[width * features :][:width]
    unit = int(biases.abs().argmax())
    row = (
        weights[unit] / biases[unit]
    ).numpy()  # of a linear layer, the gradient is that of the bias times the input
    assert np.corrcoef(row, x[20])[0, 1] > 0.999


@pytest.mark.parametrize("group", [1, 5])
def test_sums_of_trees_have_bins_with_one_row(group: int) -> None:
    """By the last level of a tree many bins of a column have a single row: the sum has its residual, so its target.

    With algorithm.group no bin of a site has fewer rows, in its own upload as in a sum.
    """
    problem, algorithm = test_trees.problem_of("values"), Trees(intercept=False, group=group)
    task = test_trees.task_for(problem)
    levels = BEFORE + test_trees.DEPTH
    last = rounds_of(algorithm, task, test_trees.federation_of(problem), [(0, 1, 2, 3)] * levels)[-1]
    grown = last.down.grown
    columns, nodes = problem.x.shape[1], 2 ** (test_trees.DEPTH - 1)
    sums = ROWS * last.total.sums[: columns * algorithm._room(grown.forest)].view(columns, -1)
    channels = sums[:, : 3 * nodes * algorithm.bins].view(columns, 3, nodes, algorithm.bins)
    residuals, counts = channels[:, 0], channels[:, 2].round()
    x, y = torch.from_numpy(problem.x), torch.from_numpy(problem.y)
    eta = grown.forest.eta(grown.forest.leaves(x.to(task.initial)), y)[:, 0]
    of_rows = y - eta
    if group > 1:
        assert ((counts == 0) | (counts >= group)).all()
        assert (counts > 0).sum() > 20
        return
    alone = residuals[counts == 1]
    assert len(alone) > 80  # of 4 columns and 120 rows
    assert float((alone[:, None] - of_rows).abs().min(1).values.max()) < 1e-6  # the step of the sum
