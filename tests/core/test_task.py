from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from copfl import models
from copfl.core import task
from copfl.core.augment import crop_and_flip
from copfl.core.criteria import CRITERIA, next_token
from copfl.core.evaluation import on_host_arrays, primary_metrics
from copfl.core.task import Batch, Data, Experts, task_of
from copfl.errors import UsageError
from copfl.kernels.draws import Keyed
from copfl.measures.metrics import METRICS


def network(seed: int = 0) -> nn.Sequential:
    """A user's own module: convolution, batch norm in one and two dimensions, an unnamed head."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
        nn.Linear(12, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4),
    )  # fmt: skip


def samples(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (n,), generator=generator)


def toy(**how: str) -> task.Task:
    return task_of(network(), 4, dtype=torch.float64, **how)  # type: ignore[arg-type]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# -- a model as functions of w -------------------------------------------------------------------------------


def flat(model: nn.Module) -> Tensor:
    """A module's parameters and then its statistics, as they stand."""
    statistics = [b for name, b in model.named_buffers() if not name.endswith("tracked")]
    return torch.cat([t.detach().reshape(-1) for t in (*model.parameters(), *statistics)])


def test_the_first_weights_are_the_modules_own() -> None:
    assert torch.equal(toy().initial, flat(network().double()))


def test_the_users_module_is_left_as_it_was() -> None:
    model = network()
    model[0].requires_grad_(False)
    state, types = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    made = task_of(model, 4, dtype=torch.float64)
    x, y = samples(6)
    made.gradient(made.initial[: made.d], made.initial[made.d :], x, y)
    made.initial.zero_()
    assert [type(m) for m in model.modules()] == types
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()][:3] == [False, False, True]
    assert model.training


def test_gradient_value_and_statistics_equal_plain_torch_over_several_steps() -> None:
    made, model = toy(), network().double()
    w, optimizer = made.initial, torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(4):
        x, y = samples(6, seed)
        grad, value, after = made.gradient(w[: made.d], w[made.d :], x, y)
        w = torch.cat([w[: made.d] - 0.1 * grad, after])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        close(value, loss.detach())
        close(w, flat(model))


def test_the_gradient_of_the_head_alone_is_that_part_of_the_whole() -> None:
    """With another head than the one in w, for one client, under vmap, and side by side."""
    made = toy()
    d, head = made.d, made.where("head")[: made.d]
    w = torch.stack([made.initial, 1.5 * made.initial])
    other = 0.5 * w[:, :d][:, head]
    whole = w.clone()
    whole[:, :d][:, head] = other
    (x, y), (x2, y2) = samples(6), samples(6, seed=1)
    both, labels = torch.stack([x, x2]), torch.stack([y, y2])
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    expected = [made.gradient(whole[n, :d], w[n, d:], both[n], labels[n], valid[n]) for n in range(2)]

    def found(task: task.Task, n: int | None) -> tuple[Tensor, ...]:
        rows = (w[:, :d], w[:, d:], both, labels, valid, other)

        def one(p: Tensor, b: Tensor, x: Tensor, y: Tensor, r: Tensor, h: Tensor) -> tuple[Tensor, ...]:
            return task.gradient(p, b, x, y, r, head=h)

        return one(*(t[n] for t in rows)) if n is not None else torch.func.vmap(one)(*rows)

    for n, (grad, value, after) in enumerate(expected):
        ways = [found(made, n), *([t[n] for t in found(way, None)] for way in (made, made.with_batching()))]
        for mine in (*ways, found(made.with_batching(), n)):
            close(mine[0], grad[head])
            close(mine[1], value)
            close(mine[2], after)


def test_gradient_edits_nothing_it_was_lent() -> None:
    made = toy()
    w, (x, y) = made.initial.clone(), samples(6)
    made.gradient(w[: made.d], w[made.d :], x, y, torch.tensor([True] * 5 + [False]))
    made.forward(w, x, training=True)
    assert torch.equal(w, made.initial)


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_samples_that_do_not_count_do_not_count(kept: int) -> None:
    made = toy()
    x, y = samples(6)
    valid = torch.arange(6) < kept
    filled = torch.where(valid.view(-1, 1, 1, 1), x, 50.0)
    parts = made.initial[: made.d], made.initial[made.d :]
    for found, expected in zip(
        made.gradient(*parts, filled, y, valid), made.gradient(*parts, x[:kept], y[:kept]), strict=True
    ):
        close(found, expected)


def test_a_batch_of_nobody_has_no_gradient_and_no_loss() -> None:
    made = toy()
    x, y = samples(3)
    grad, value, after = made.gradient(
        made.initial[: made.d], made.initial[made.d :], x, y, torch.zeros(3, dtype=torch.bool)
    )
    assert not grad.any()
    assert value == 0
    assert torch.equal(after, made.initial[made.d :])


def test_clients_side_by_side_get_what_each_gets_alone() -> None:
    made = toy()
    d = made.d
    generator = torch.Generator().manual_seed(3)
    ws = made.initial + 0.1 * torch.rand(3, made.layout.size, generator=generator, dtype=torch.float64)
    xs, ys = (torch.stack(t) for t in zip(*(samples(6, seed) for seed in range(3)), strict=True))
    sizes = torch.tensor([6, 1, 4])
    valid = torch.arange(6) < sizes[:, None]
    together = torch.func.vmap(made.gradient)(ws[:, :d], ws[:, d:], xs, ys, valid)
    unfilled = torch.func.vmap(made.gradient)(ws[:, :d], ws[:, d:], xs, ys)  # torch's own kernel under vmap
    for n, size in enumerate(sizes.tolist()):
        alone = made.gradient(ws[n, :d], ws[n, d:], xs[n, :size], ys[n, :size])
        whole = made.gradient(ws[n, :d], ws[n, d:], xs[n], ys[n])
        for found, expected in zip(together, alone, strict=True):
            close(found[n], expected)
        for found, expected in zip(unfilled, whole, strict=True):
            close(found[n], expected)


def test_one_sample_on_1x1_maps_stays_finite() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 4), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4))
    made = task_of(model, 4, dtype=torch.float64)
    x, y = samples(1)
    for found in made.gradient(made.initial[: made.d], made.initial[made.d :], x, y):
        assert torch.isfinite(found).all()


def test_tied_weights_are_one_part_of_w() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            answer: Tensor = self.b(self.a(x))
            return answer

    model = Tied().double()
    made = task_of(model, 3, dtype=torch.float64)
    assert made.layout.names == ("a.weight", "a.bias", "b.bias")
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    torch.autograd.backward(F.cross_entropy(model(x), y))
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    close(made.gradient(made.initial, made.initial[:0], x, y)[0], expected)


# -- heads, features, parts ----------------------------------------------------------------------------------


def test_features_are_what_the_head_sees() -> None:
    made, model = toy(), network().double().eval()
    x, _ = samples(3)
    logits, features = made.forward(made.initial, x)
    close(logits, model(x))
    close(features, model[:7](x))
    assert made.layout.head == "7"


def test_a_named_head_is_where_the_features_end() -> None:
    made = task_of(network(), 4, head="4", dtype=torch.float64)
    x, _ = samples(3)
    close(made.forward(made.initial, x)[1], network().double().eval()[:4](x))
    assert int(made.where("head").sum()) == 12 * 5 + 5


def test_features_of_a_convolutional_head_are_flattened() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 4, 2), nn.Flatten())
    made = task_of(model, 4, head="1", dtype=torch.float64)
    logits, features = made.forward(made.initial, samples(3)[0])
    assert (logits.shape, features.shape) == ((3, 4), (3, 2 * 2 * 2))


def test_a_head_that_the_model_does_not_use_is_named() -> None:
    class WithSpare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            answer: Tensor = self.used(x)
            return answer

    made = task_of(WithSpare(), 2)
    with pytest.raises(UsageError, match='does not use its module "spare"'):
        made.forward(made.initial, torch.zeros(1, 2))
    named = task_of(WithSpare(), 2, head="used")
    assert named.forward(named.initial, torch.zeros(1, 2))[0].shape == (1, 2)


def test_norms_are_found_whatever_their_kind() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)
    )
    assert int(task_of(model, 2).where("norms").sum()) == 3 * 4


def test_local_statistics_stay_home_and_averaged_ones_do_not() -> None:
    local, average = toy(), toy(buffers="average")
    statistics = local.where("buffers")
    assert int(statistics.sum()) == 2 * (3 + 5)
    assert torch.equal(local.local(), statistics)
    assert torch.equal(local.local("head"), statistics | local.where("head"))
    assert not average.local().any()
    assert torch.equal(average.local("head"), average.where("head"))
    with pytest.raises(UsageError, match='are "local" or shared by "average"'):
        toy(buffers="frozen")


# -- samples -------------------------------------------------------------------------------------------------


def test_images_are_scaled_and_normalised_and_the_rest_is_not() -> None:
    made = task_of(nn.Linear(1, 2), 2, head="", mean=(0.5, 0.25), std=(0.5, 0.25), dtype=torch.float64)
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(1, 2, 1, 1)
    assert made.numbers(pixels).flatten().tolist() == [(0 - 0.5) / 0.5, (1 - 0.25) / 0.25]
    assert made.numbers(torch.tensor([3.0])).dtype == torch.float64
    assert made.numbers(torch.tensor([3.0])).tolist() == [3.0]
    assert made.numbers(torch.tensor([7])).dtype == torch.int64  # the index of a word stays an index
    plain = task_of(nn.Linear(1, 2), 2, head="")
    assert plain.numbers(torch.tensor([51], dtype=torch.uint8)).tolist() == pytest.approx([0.2])


def moved(image: np.ndarray, down: int, across: int, flip: bool) -> np.ndarray:
    """Four pixels of zeros all around, a window from (down, across) on, mirrored if flip: one pixel at a time."""
    channels, height, width = image.shape
    result = np.zeros_like(image)
    for c in range(channels):
        for i in range(height):
            for j in range(width):
                source_i, source_j = i + down - 4, (width - 1 - j if flip else j) + across - 4
                if 0 <= source_i < height and 0 <= source_j < width:
                    result[c, i, j] = image[c, source_i, source_j]
    return result


@pytest.mark.parametrize("shape", [(2, 6, 5), (1, 3, 3), (3, 8, 8)])
def test_crop_and_flip_pixel_by_pixel(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, *shape), dtype=np.uint8)
    shift, flip = rng.integers(0, 9, (40, 2)), rng.random(40) < 0.5
    shift[:4] = [[4, 4], [0, 0], [8, 8], [0, 8]]
    found = crop_and_flip(*(torch.from_numpy(a) for a in (images, shift, flip)))
    expected = np.stack(
        [moved(i, int(s[0]), int(s[1]), bool(f)) for i, s, f in zip(images, shift, flip, strict=True)]
    )
    assert found.dtype == torch.uint8
    assert np.array_equal(found.numpy(), expected)


def test_a_batch_is_augmented_before_it_is_normalised() -> None:
    made = task_of(nn.Linear(1, 2), 2, head="", mean=(0.5,), std=(0.5,))
    data = Data(torch.full((3, 1, 2, 2), 255, dtype=torch.uint8), torch.tensor([0, 1, 2]), torch.tensor(3))
    batch = Batch(torch.tensor([2, 0]), None, torch.tensor([[5, 4], [4, 4]]), torch.tensor([False, False]))
    x, y = made.batch(data, batch)
    assert y.tolist() == [2, 0]
    assert x[0, 0].tolist() == [[1, 1], [-1, -1]]  # the row that came in is black
    assert x[1, 0].tolist() == [[1, 1], [1, 1]]


# -- looking -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "STATISTICS_BATCH", 4)
    monkeypatch.setattr(task, "EVAL_BATCH", 4)


@pytest.mark.usefixtures("small_pass")
@pytest.mark.parametrize("size", [1, 4, 7, 11])
def test_evaluate_counts_the_real_samples_alone(size: int) -> None:
    made, model = toy(), network().double().eval()
    x, y = samples(11)
    loss, accuracy = made.evaluate(made.initial, Data(x, y, torch.tensor(size)))
    logits = model(x[:size])
    close(loss, F.cross_entropy(logits, y[:size]).detach())
    assert float(accuracy) == pytest.approx(float((logits.argmax(1) == y[:size]).double().mean()))


def test_evaluate_of_nobody_is_zero_and_filling_may_be_anything() -> None:
    made = toy()
    x, y = samples(4)
    assert [float(t) for t in made.evaluate(made.initial, Data(x, y, torch.tensor(0)))] == [0, 0]
    x[2:] = torch.nan
    loss, _ = made.evaluate(made.initial, Data(x, y, torch.tensor(2)))
    assert torch.isfinite(loss)


def test_answers_are_log_probabilities() -> None:
    made = toy()
    logs = made.predict(made.initial, samples(5)[0])
    close(logs.exp().sum(1), torch.ones(5, dtype=torch.float64))


def test_experts_average_probabilities() -> None:
    made = toy()
    x, _ = samples(5)
    ws = torch.stack([made.initial, made.initial + 0.3])
    share = torch.tensor([0.25, 0.75], dtype=torch.float64)
    mixed = made.predict(Experts(ws, share), x).exp()
    apart = [made.predict(w, x).exp() for w in ws]
    close(mixed, 0.25 * apart[0] + 0.75 * apart[1])
    alone = made.predict(Experts(ws, torch.tensor([1.0, 0.0], dtype=torch.float64)), x)
    torch.testing.assert_close(alone.exp(), apart[0], rtol=1e-9, atol=1e-9)


def test_the_same_model_in_single_and_double_precision_agrees() -> None:
    single = task_of(network(), 4)
    x, _ = samples(5)
    expected = toy().predict(toy().initial, x).float()
    torch.testing.assert_close(single.predict(single.initial, x), expected, rtol=1e-4, atol=1e-4)


def test_the_cross_entropy_of_all_classes_alike_is_the_logarithm_of_their_number() -> None:
    logits, y = torch.zeros(4, 8, dtype=torch.float64), torch.tensor([0, 3, 5, 7])
    for valid in (None, torch.tensor([True, True, False, False])):
        close(toy().objective(logits, logits, y, valid), torch.tensor(8.0, dtype=torch.float64).log())


def test_build_then_task_for_every_model_that_ships() -> None:
    for name in ("cnn", "mlp", "resnet18"):  # those of images
        options: dict[str, Any] = {"width": 8} if name == "resnet18" else {}
        made = task_of(models.build(name, (3, 8, 8), 4, seed=0, **options), 4)
        grad, _, after = made.gradient(
            made.initial[: made.d], made.initial[made.d :], torch.rand(2, 3, 8, 8), torch.tensor([0, 1])
        )
        assert torch.isfinite(grad).all()
        assert torch.isfinite(after).all()


def test_a_sequence_without_a_target_token_is_in_no_mean() -> None:
    torch.manual_seed(0)
    of_tokens = task_of(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)), 5, criterion=next_token())
    x = torch.randint(5, (3, 6))
    y = torch.tensor([[1, 2, 3, 4, -100, -100], [0, 0, 1, 1, 2, 2], [-100] * 6])
    with_blank, without = (Data(x[:n], y[:n], torch.tensor(n)) for n in (3, 2))
    w = of_tokens.initial
    for one, other in zip(of_tokens.evaluate(w, with_blank), of_tokens.evaluate(w, without), strict=True):
        torch.testing.assert_close(one, other)
    outputs = of_tokens.forward(w, x)[0]
    mean = F.cross_entropy(outputs[:2].transpose(1, 2), y[:2], reduction="none").sum(1) / torch.tensor([4, 6])
    for valid in (None, torch.tensor([True, True, True])):
        torch.testing.assert_close(of_tokens.objective(outputs, outputs, y, valid), mean.mean())
    blank = Data(x[2:], y[2:], torch.tensor(1))
    assert int(of_tokens.scores(w, blank).counted) == 0
    accuracy = dataclasses.replace(of_tokens, metrics=(METRICS["accuracy"],))
    of_blank, of_all, of_two = primary_metrics(accuracy, w, [blank, with_blank, without])
    assert np.isnan(of_blank)
    assert of_all == of_two


@pytest.mark.parametrize("kind", ["classification", "multilabel", "next_token"])
def test_an_accuracy_is_one_number_wherever_it_is_computed(kind: str) -> None:
    """With the model, from collected predictions, and for many clients; sequences may have no target token."""
    torch.manual_seed(0)
    n, words = 40, 5
    x, y = torch.randn(n, 3), torch.randint(words, (n,))
    model: nn.Module = nn.Linear(3, words)
    if kind == "multilabel":
        y = (torch.rand(n, words) > 0.5).float()
    if kind == "next_token":
        x, y = torch.randint(words, (n, 7)), torch.randint(words, (n, 7))
        y[torch.arange(7) >= torch.randint(8, (n, 1))] = -100
        assert ((y == -100).all(1)).any()
        model = nn.Sequential(nn.Embedding(words, 4), nn.Linear(4, words))
    accuracy = METRICS["accuracy"]
    task = task_of(model, words, criterion=CRITERIA[kind](), metrics=[accuracy], dtype=torch.float64)
    data = Data(x, y, torch.tensor(n - 3))  # the rest is padding
    scores = task.scores(task.initial, data)
    with_model = float(scores.score)
    predictions = torch.cat(scores.predictions)[: n - 3]
    assert float(accuracy.of(*on_host_arrays(task, predictions, y[: n - 3]))) == pytest.approx(with_model)
    assert primary_metrics(task, task.initial, [data]) == pytest.approx([with_model])


class Dropping(nn.Module):
    """Batch norm, then dropout of half of the features."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.norm, self.head, self.always = (
            nn.BatchNorm1d(2, affine=False),
            nn.Linear(2, 2, bias=False),
            always,
        )
        nn.init.eye_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(nn.functional.dropout(self.norm(x), 0.5, self.training or self.always))
        return answer


def test_without_a_key_training_mode_draws_no_random_numbers() -> None:
    made = task_of(Dropping(), 2, dtype=torch.float64)
    x = torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    # Batch norm uses the batch: (1 - 2) / 1 and (0 - 2) / 2, up to its epsilon; nothing is dropped or
    # doubled.
    expected = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    logits, _ = made.forward(made.initial, x, training=True)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    dropped, _ = made.forward(made.initial, Keyed(x, torch.tensor(3)), training=True)
    assert set(dropped.round().flatten().tolist()) <= {-2.0, -0.0, 0.0, 2.0}
    assert torch.equal(dropped, made.forward(made.initial, Keyed(x, torch.tensor(3)), training=True)[0])


def test_a_model_that_draws_random_numbers_in_evaluation_mode_is_refused() -> None:
    samples = Data(torch.ones(2, 2), torch.zeros(2, dtype=torch.int64), torch.tensor(2))
    assert task_of(Dropping(), 2).probed(samples).random
    assert not task_of(nn.Sequential(nn.Linear(2, 2)), 2).probed(samples).random
    with pytest.raises(UsageError, match="in evaluation mode too"):
        task_of(Dropping(always=True), 2).probed(samples)


# -- buffers -------------------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Steps of a sequence that see those before, by a mask of -inf; a batch norm, and counts of its own."""

    mask: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.instance = nn.InstanceNorm1d(3, track_running_stats=True)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(1.0)
        weights = (x @ x.transpose(1, 2) + self.mask).softmax(-1)
        answer: Tensor = self.head(self.norm(self.body(self.instance(weights @ x)).mean(1)))
        return answer


@pytest.mark.parametrize("fill", [torch.zeros, torch.rand])
def test_what_no_training_step_changes_is_no_statistic(fill: Any) -> None:
    """Whatever the samples are: the machines of a federation, which have none, find the same."""
    whole = task_of(Attending(), 2, dtype=torch.float64)
    data = Data(fill(2, 3, 4), torch.zeros(2, dtype=torch.int64), torch.tensor(2))
    found = whole.without_constants(data)
    statistics = [f"{layer}.running_{what}" for layer in ("norm", "instance") for what in ("mean", "var")]
    assert sorted(found.layout.names[found.layout.trained :]) == sorted([*statistics, "seen"])
    assert found.d == whole.d
    assert torch.equal(found.initial[: found.d], whole.initial[: whole.d])
    assert len(found.initial) == found.layout.size == whole.layout.size - 9
    assert torch.isfinite(found.initial).all()
    x = found.numbers(torch.rand(2, 3, 4))
    assert torch.isfinite(found.forward(found.initial, x)[0]).all()
    assert torch.equal(found.forward(found.initial, x)[0], whole.forward(whole.initial, x)[0])
