from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import copfl
from copfl import models
from copfl.core import task_of
from copfl.core.evaluation import vectors_of
from copfl.errors import UsageError
from copfl.kernels import modules
from copfl.kernels.modules import BatchNorm, Convolution
from copfl.settings.complete import complete
from tests.slow import slow

SHAPES = {"flat": (7, 3), "sequence": (7, 3, 5), "maps": (7, 3, 4, 4), "1x1 maps": (7, 3, 1, 1)}


def norm_pair(shape: tuple[int, ...], **how: object) -> tuple[nn.Module, BatchNorm]:
    """torch's batch norm with odd weights and statistics, and ours made from a copy of it."""
    kind: Callable[..., nn.Module] = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    torch.manual_seed(1)
    theirs = kind(shape[1], dtype=torch.float64, **how)
    for tensor in (*theirs.parameters(), theirs.running_mean):
        assert isinstance(tensor, Tensor)
        nn.init.normal_(tensor)
    return theirs, BatchNorm(copy.deepcopy(theirs))  # type: ignore[arg-type]


def batch(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 1


def step(norm: nn.Module, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, ...]:
    """The answers for the real samples, the gradients of a crooked function of them, and the statistics after it."""
    x = x.clone().requires_grad_()
    if isinstance(norm, BatchNorm):
        norm.valid = valid
    out = norm(x)
    counted = out if valid is None else out[valid]
    value = (counted.sin() * torch.arange(counted.numel(), dtype=x.dtype).view(counted.shape)).sum()
    grads = torch.autograd.grad(value, [x, *norm.parameters()])
    statistics = [norm.get_buffer("running_mean").clone(), norm.get_buffer("running_var").clone()]
    return counted.detach(), *grads, *statistics


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_batch_norm_is_torchs_own_when_all_samples_are_real(shape: tuple[int, ...]) -> None:
    theirs, ours = norm_pair(shape)
    for seed in range(4):  # several steps, so that the statistics run
        everybody = torch.ones(shape[0], dtype=torch.bool) if seed % 2 else None
        for expected, found in zip(
            step(theirs, batch(shape, seed)), step(ours, batch(shape, seed), everybody), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    theirs.eval()
    ours.eval()
    torch.testing.assert_close(ours(batch(shape)), theirs(batch(shape)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kept", [2, 5])
def test_a_filled_up_batch_equals_the_batch_without_filling(shape: tuple[int, ...], kept: int) -> None:
    theirs, ours = norm_pair(shape)
    x = batch(shape)
    valid = torch.zeros(shape[0], dtype=torch.bool)
    valid[-kept:] = True  # the real ones need not come first
    x[~valid] = 1e6
    values, grad, *rest = step(ours, x, valid)
    expected_values, expected_grad, *expected_rest = step(theirs, x[valid])
    torch.testing.assert_close(values, expected_values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad[valid], expected_grad, rtol=1e-12, atol=1e-12)
    assert not grad[~valid].any()
    for found, expected in zip(rest, expected_rest, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_one_value_alone_stays_finite_and_teaches_only_the_mean() -> None:
    _, ours = norm_pair((1, 3, 1, 1))
    mean, variance = ours.running_mean.clone(), ours.running_var.clone()
    x = batch((1, 3, 1, 1))
    found = step(ours, x)
    assert all(torch.isfinite(t).all() for t in found)
    assert torch.equal(
        found[0], ours.bias.detach().view(1, 3, 1, 1)
    )  # (x - mean of x) is 0: the bias is what is left
    torch.testing.assert_close(ours.running_mean, 0.9 * mean + 0.1 * x.view(3))
    torch.testing.assert_close(ours.running_var, 0.9 * variance)


def test_a_batch_of_nobody_teaches_nothing() -> None:
    _, ours = norm_pair((4, 3))
    before = ours.running_mean.clone(), ours.running_var.clone()
    ours.valid = torch.zeros(4, dtype=torch.bool)
    out = ours(batch((4, 3)))
    assert torch.isfinite(out).all()
    assert torch.equal(ours.running_mean, before[0])
    assert torch.equal(ours.running_var, before[1])


def test_batch_norm_without_weights() -> None:
    theirs, ours = norm_pair((6, 3), affine=False)
    valid = torch.tensor([True] * 4 + [False] * 2)
    ours.valid = valid
    torch.testing.assert_close(
        ours(batch((6, 3)))[valid], theirs(batch((6, 3))[valid]), rtol=1e-12, atol=1e-12
    )


def test_batch_norm_without_statistics_is_refused() -> None:
    with pytest.raises(UsageError, match="leave track_running_stats on"):
        BatchNorm(nn.BatchNorm1d(3, track_running_stats=False))


def test_replacing_keeps_names_values_and_depth() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()))
    before = {name: t.clone() for name, t in model.state_dict().items() if "tracked" not in name}
    after = modules.for_tasks(model).state_dict()
    assert before.keys() == after.keys()  # and num_batches_tracked is gone
    assert all(torch.equal(before[name], after[name]) for name in before)


# -- the models ----------------------------------------------------------------------------------------------


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_resnet18_has_the_published_number_of_parameters() -> None:
    assert parameters(models.ResNet18((3, 32, 32), 10)) == 11_181_642
    assert parameters(models.ResNet18((3, 32, 32), 1000)) == 11_689_512  # the ImageNet model
    # The CIFAR stem has a 3x3 instead of a 7x7 kernel: 64 * 3 * (49 - 9) fewer.
    assert parameters(models.ResNet18((3, 32, 32), 10, stem="cifar")) == 11_181_642 - 64 * 3 * 40


@slow
def test_only_38_percent_of_resnet18_live_on_small_images() -> None:
    model = models.build("resnet18", (3, 32, 32), 10, seed=0)
    alive = torch.zeros(parameters(model), dtype=torch.bool)
    for seed in range(4):  # one batch alone leaves some units of the head's side asleep
        torch.manual_seed(seed)
        model.zero_grad()
        loss = F.cross_entropy(model(torch.randn(32, 3, 32, 32)), torch.randint(0, 10, (32,)))
        torch.autograd.backward(loss)
        alive |= torch.cat([p.grad.flatten() != 0 for p in model.parameters() if p.grad is not None])
    assert int(alive.sum()) == 4_234_826
    # By hand: on 1x1 maps one tap of nine is alive in three of the last stage's 3x3 convolutions (512 -> 512
    # each); its first one (256 -> 512, stride 2) sees 2x2 maps, so four taps of nine.
    dead = 3 * 512 * 512 * 8 + 512 * 256 * 5
    assert 11_181_642 - dead == 4_234_826


def test_without_its_dead_taps_resnet18_answers_and_learns_the_same() -> None:
    whole, pruned = (
        models.build("resnet18", (3, 32, 32), 10, seed=0, width=8, kernels=kernels).double()
        for kernels in ("full", "pruned")
    )
    x, y = torch.randn(5, 3, 32, 32, dtype=torch.float64), torch.arange(5)
    for model in (whole, pruned):
        torch.autograd.backward(F.cross_entropy(model(x), y))
    torch.testing.assert_close(pruned(x), whole(x))
    cut = {1: slice(1, 2), 2: slice(1, 3)}  # of three taps, those that live
    for mine, theirs in zip(pruned.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        taps = cut[mine.shape[-1]] if mine.shape != theirs.shape else slice(None)
        for ours, full in ((mine, theirs), (mine.grad, theirs.grad)):
            torch.testing.assert_close(ours, full[:, :, taps, taps] if ours.dim() == 4 else full)
        assert mine.grad.count_nonzero() == theirs.grad.count_nonzero()
    assert parameters(models.ResNet18((3, 32, 32), 10, kernels="pruned")) == 4_234_826
    assert (
        parameters(models.ResNet18((3, 84, 84), 10, kernels="pruned")) == 11_181_642
    )  # there all of them live


def test_living_leaves_other_models_and_their_mode_as_they_were() -> None:
    odd = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, dilation=2), nn.Conv2d(2, 2, 3, padding="same"), nn.Conv2d(2, 2, 3, stride=2),
        nn.Conv2d(2, 3, 5, stride=3, padding=2), nn.Flatten(),
    )  # fmt: skip
    x = torch.randn(4, 1, 9, 9)
    before, shapes = odd(x), [tuple(p.shape) for p in odd.parameters()]
    assert models.pruned(odd, (1, 9, 9)) is odd
    assert odd.training
    torch.testing.assert_close(odd(x), before)
    assert [tuple(p.shape) for p in odd.parameters()][:6] == shapes[:6]
    assert not odd[0]._forward_pre_hooks


class Twice(nn.Module):
    """The same convolution over maps of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        large, small = self.conv(x), self.conv(x[..., :1, :1])
        answer: Tensor = large.sum((2, 3)) + small.sum((2, 3))
        return answer


def test_living_leaves_a_convolution_that_is_called_on_several_sizes() -> None:
    model, x = Twice(), torch.randn(2, 1, 4, 4)
    before = model(x)
    torch.testing.assert_close(models.pruned(model, (1, 4, 4))(x), before)
    assert model.conv.kernel_size == (3, 3)


@pytest.mark.parametrize("name", ["cnn", "mlp", "resnet18"])  # of images; test_sequences.py has the others
def test_every_model_answers_with_its_head_over_its_features(name: str) -> None:
    shape, x = (2, 16, 16), torch.randn(3, 2, 16, 16)
    model = models.build(name, shape, 5, seed=0).eval()
    features = model.features(x)  # type: ignore[operator]
    assert features.dim() == 2
    assert model(x).shape == (3, 5)
    assert torch.equal(model.head(features), model(x))  # type: ignore[operator]


def test_the_same_seed_gives_the_same_weights_and_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    a, b, c = (models.build("cnn", (1, 8, 8), 4, seed) for seed in (5, 5, 6))
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a.parameters(), c.parameters(), strict=True))


def test_norms_of_the_models() -> None:
    def kinds(name: str, norm: str) -> set[type[nn.Module]]:
        model = models.build(name, (3, 32, 32), 10, seed=0, norm=norm)
        return {type(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)}

    for name in ("cnn", "resnet18"):
        assert kinds(name, "batch") == {nn.BatchNorm2d}
        assert kinds(name, "group") == {nn.GroupNorm}
        assert kinds(name, "none") == set()


def test_models_say_what_they_cannot_take() -> None:
    with pytest.raises(UsageError, match='no model "resnet"; did you mean "resnet18"'):
        models.build("resnet", (3, 32, 32), 10, seed=0)
    with pytest.raises(UsageError, match=r"cnn needs images .* not samples of shape \[7\]; try mlp"):
        models.build("cnn", (7,), 2, seed=0)
    with pytest.raises(UsageError, match="at least 4x4 pixels, not 3x9"):
        models.build("cnn", (1, 3, 9), 2, seed=0)
    with pytest.raises(UsageError, match="resnet18 needs images"):
        models.build("resnet18", (7,), 2, seed=0)
    with pytest.raises(UsageError, match='no stem "cifer"; did you mean "cifar"'):
        models.build("resnet18", (3, 32, 32), 10, seed=0, stem="cifer")
    with pytest.raises(UsageError, match='no norm "layer"'):
        models.build("cnn", (1, 8, 8), 10, seed=0, norm="layer")


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [
        ((1, 1), 3, 1, 1), ((2, 2), 3, 2, 1), ((1, 1), 5, 1, 2), ((2, 2), 5, 3, 2), ((1, 2), 3, 2, 1),
        ((1, 5), 3, 1, 1), ((5, 1), 3, 1, 1), ((3, 3), 3, 1, 1), ((3, 3), 3, 1, 0), ((1, 1), 1, 1, 0),
    ],
)  # fmt: skip
def test_taps_that_meet_nothing_but_padding_are_left_out(
    size: tuple[int, int], kernel: int, stride: int, padding: int
) -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, kernel, stride, padding)).double()
    x = torch.randn(5, 4, *size, dtype=torch.float64, requires_grad=True)
    found = []
    for one in (model, modules.for_tasks(copy.deepcopy(model))):
        y = one(x)
        found.append((y, *torch.autograd.grad((y**3).sum(), [x, *one.parameters()])))
    assert type(next(one.children())) is Convolution
    torch.testing.assert_close(found[0], found[1])


def test_the_linear_model_is_a_head_alone() -> None:
    model = models.build("linear", (2, 3), 4, seed=0)
    x = torch.randn(5, 2, 3)
    head = dict(model.named_parameters())
    expected = F.linear(x.flatten(1), head["head.weight"], head["head.bias"])
    assert torch.equal(model(x), expected)
    task = task_of(model, 4)
    assert task.layout.names == ("head.weight", "head.bias")
    assert bool(task.where("head").all())
    assert not task.where("body").any()
    assert int(task.where("head.bias").sum()) == 4  # an intercept that can be personal


@pytest.mark.job
def test_an_intercept_can_be_the_personal_part_of_a_linear_model() -> None:
    settings: dict[str, Any] = {"model": "linear", "rounds": 2, "clients": 3}
    result = copfl.run("fedper", "wine", algorithm_options={"personal": ("head.bias",)}, **settings)
    first, second = (dict(result.model(n).named_parameters()) for n in (0, 1))
    before = [result.client_model(n, before_training=True) for n in (0, 1)]
    entries = [result.experiment.task.layout.entries(vectors_of(w), "head.weight") for w in before]
    assert torch.equal(*entries)
    assert not torch.equal(first["head.bias"], second["head.bias"])


def test_a_linear_model_that_nobody_chose_an_algorithm_for_is_fine_tuned() -> None:
    """It has no body to share beside a personal head."""
    run = complete({"data": {"name": "wine"}, "model": {"name": "linear"}})
    assert run.algorithm.name == "fedavg_ft"
