"""Clients folded into the batch give the same numbers as each one alone."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from copfl.core.task import Data, Task, task_of
from copfl.core.tree import vectorised
from copfl.errors import UsageError
from copfl.kernels import batched_layers
from copfl.kernels.batched_model import batched_module
from copfl.kernels.layers import Geometry, patches, product, unpatch
from copfl.kernels.modules import for_tasks
from copfl.models import MLP, ResNet18, SmallCNN

CLIENTS, BATCH = 3, 5


class Words(nn.Module):
    """Tokens and their positions to classes: embeddings, a layer norm and a mean."""

    def __init__(self, axes: int = 2) -> None:
        super().__init__()
        self.axes = axes
        self.embedding, self.position = nn.Embedding(11, 6), nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.answer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        seen = self.embedding(x) + self.position(positions[None] if self.axes == 2 else positions)
        result: Tensor = self.answer(torch.tanh(self.norm(seen)).mean(1))
        return result


class Free(nn.Module):
    """A model with a parameter outside any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.answer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.answer(x * self.scale)
        return result


class Tied(nn.Module):
    """Two layers with one weight, one layer under two names, and a convolution that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv2d(1, 1, 3, padding=1)
        self.again = nn.Conv2d(1, 1, 3, padding=1)
        self.again.weight = self.filter.weight
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.alias = self.second
        self.answer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.filter(x))).flatten(1)
        result: Tensor = self.answer(self.alias(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return result


class NormAct(nn.BatchNorm2d):
    """A batch norm with an activation, as timm has them."""

    __module__ = "timm.layers"

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(self.drop(super().forward(x)))
        return result


class Padded(nn.Conv2d):
    """A convolution that pads its input itself, as timm has them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (0, 1, 0, 1)))


class Subclasses(nn.Sequential):
    """Subclasses of torch's layers with a forward of their own."""

    def __init__(self) -> None:
        norm = NormAct(3)
        nn.init.uniform_(norm.get_buffer("running_var"), 0.01, 0.1)  # so that the activation cuts values off
        super().__init__(Padded(2, 3, 3, stride=2), norm, nn.Flatten(), nn.Linear(27, 4))


class Grouped(nn.Sequential):
    """Convolutions with groups, one of them with dilation, and a depthwise one."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
            nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
            nn.Tanh(),
            nn.Conv2d(6, 3, (3, 2), padding=(2, 1), dilation=(2, 1), groups=3),
            nn.Flatten(),
            nn.Linear(60, 4),
        )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLP((7,), 4, width=5), (7,)),
    "cnn": (lambda: SmallCNN((2, 8, 8), 4, width=3, hidden=5), (2, 8, 8)),
    "cnn with batch norm": (lambda: SmallCNN((2, 8, 8), 4, width=3, hidden=5, norm="batch"), (2, 8, 8)),
    "cnn with frozen batch norm": (
        lambda: SmallCNN((2, 8, 8), 4, width=3, hidden=5, norm="frozen"),
        (2, 8, 8),
    ),
    "cnn with group norm": (lambda: SmallCNN((2, 8, 8), 4, width=4, hidden=5, norm="group"), (2, 8, 8)),
    "tied weights": (Tied, (1, 4, 4)),
    "subclasses of layers": (Subclasses, (2, 6, 6)),
    "groups": (Grouped, (4, 8, 8)),
    "resnet": (lambda: ResNet18((3, 32, 32), 4, width=4), (3, 32, 32)),
    "resnet, cifar stem": (lambda: ResNet18((3, 8, 8), 4, width=4, stem="cifar", norm="group"), (3, 8, 8)),
}


def samples(x: Tensor) -> Data:
    return Data(x, torch.arange(len(x)) % 2, torch.tensor(len(x)))


def step(task: Task, rows: tuple[Tensor, Tensor, Tensor], valid: Tensor | None) -> tuple[Tensor, ...]:
    """Gradient, loss, buffers after, and answers of every client."""

    def one(given: tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]) -> tuple[Tensor, ...]:
        (w, x, y), valid = given
        return (*task.gradient(w[: task.d], w[task.d :], x, y, valid), task.predict(w, x))

    with torch.no_grad():
        return vectorised(one, (rows, valid))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_folded_clients_equal_mapped_ones(name: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_layers, "compiles", lambda x: padded)  # a linear layer as it is on a GPU
    make, shape = MODELS[name]
    torch.manual_seed(0)
    task = task_of(make(), 4, dtype=torch.float64)
    folded = task.with_batching()
    assert folded.batched is not None
    w = task.initial + 0.05 * torch.randn(CLIENTS, len(task.initial), dtype=torch.float64)
    w[:, task.d :] = task.initial[task.d :]  # statistics stay variances
    x = torch.randn(CLIENTS, BATCH, *shape, dtype=torch.float64)
    y = torch.randint(0, 4, (CLIENTS, BATCH))
    valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] * 4 + [False]]) if padded else None
    mapped, side = step(task, (w, x, y), valid), step(folded, (w, x, y), valid)
    for a, b in zip(mapped, side, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


def test_a_convolution_with_groups_is_not_left_to_vmap_unless_it_is_depthwise() -> None:
    folded = batched_module(for_tasks(Grouped()), task_of(Grouped(), 4).layout)
    assert folded is not None
    left = [name for name, layer in folded.layers.items() if isinstance(layer, batched_layers.BatchedAny)]
    assert left == ["1"]


def test_tokens_fold_too() -> None:
    torch.manual_seed(0)
    task = task_of(Words(), 4, dtype=torch.float64)
    w = task.initial + 0.1 * torch.randn(CLIENTS, len(task.initial), dtype=torch.float64)
    x, y = torch.randint(0, 11, (CLIENTS, BATCH, 7)), torch.randint(0, 4, (CLIENTS, BATCH))
    folded = task.with_batching()
    assert folded.batched is not None
    for a, b in zip(step(task, (w, x, y), None), step(folded, (w, x, y), None), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_positions_without_an_axis_for_samples_are_left_to_vmap() -> None:
    task = task_of(Words(axes=1), 4, dtype=torch.float64)

    def sentences(length: int) -> Data:
        return Data(torch.randint(0, 11, (8, length)), torch.arange(8) % 4, torch.tensor(8))

    assert task.with_batching(data=sentences(6)) is task  # a multiple of the number of clients: other numbers
    with pytest.warns(UserWarning, match="plain vmap is used, as the batched form fails"):
        assert task.with_batching(data=sentences(7)) is task


def test_a_parameter_outside_the_known_layers_is_left_to_vmap() -> None:
    task = task_of(Free(), 2)
    assert batched_module(Free(), task.layout) is None
    assert task.with_batching() is task


class Mixing(nn.Module):
    """A model whose answer to a sample depends on the others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        result: Tensor = self.head(h - h.mean(0))
        return result


class Twice(nn.Module):
    """A model that calls its batch norm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.norm(x) + x))
        return result


@pytest.mark.parametrize("make", [Mixing, Twice])
def test_what_folding_would_change_is_noticed_and_left_to_vmap(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    task = task_of(make(), 2)
    assert task.with_batching().batched is not None  # by its layers it could be folded
    assert task.with_batching(data=samples(torch.randn(4, 3))) is task


def test_what_folding_does_not_change_is_folded() -> None:
    torch.manual_seed(0)
    task = task_of(SmallCNN((1, 8, 8), 4, norm="batch"), 4)
    assert task.with_batching(data=samples(torch.randn(4, 1, 8, 8))).batched is not None
    assert task.with_batching(torch.bfloat16, samples(torch.randn(1, 1, 8, 8))).batched is not None


def test_a_model_that_is_all_head_folds() -> None:
    torch.manual_seed(0)
    task = task_of(nn.Sequential(nn.Linear(3, 2)), 2, dtype=torch.float64)
    folded = task.with_batching(data=samples(torch.randn(4, 3, dtype=torch.float64)))
    assert folded.batched is not None
    w = task.initial + torch.randn(CLIENTS, len(task.initial), dtype=torch.float64)
    x, y = torch.randn(CLIENTS, BATCH, 3, dtype=torch.float64), torch.randint(0, 2, (CLIENTS, BATCH))
    for a, b in zip(step(task, (w, x, y), None), step(folded, (w, x, y), None), strict=True):
        torch.testing.assert_close(b, a)


def test_the_users_module_is_left_as_it_was() -> None:
    model = SmallCNN((1, 8, 8), 4, norm="batch")
    before = [type(m) for m in model.modules()]
    task_of(model, 4).with_batching()
    assert [type(m) for m in model.modules()] == before


def test_bf16_products_keep_weights_and_statistics_whole() -> None:
    torch.manual_seed(0)
    task = task_of(SmallCNN((1, 8, 8), 4), 4)
    x, y = torch.randn(CLIENTS, BATCH, 1, 8, 8), torch.randint(0, 4, (CLIENTS, BATCH))
    w = task.initial.expand(CLIENTS, -1)
    whole, short = (
        step(task.with_batching(), (w, x, y), None),
        step(task.with_batching(torch.bfloat16), (w, x, y), None),
    )
    assert short[0].dtype == torch.float32
    error = float((whole[0] - short[0]).norm() / whole[0].norm())
    assert 1e-5 < error < 0.05  # short, and no shorter than bf16 is


def test_a_short_product_rounds_its_numbers_and_its_answer_wherever_that_is_written() -> None:
    a, b = (
        torch.tensor([[[1 + 2**-9, 256.0]]]),
        torch.ones(1, 2, 1),
    )  # bf16 has 8 binary digits: 1 + 2^-9 is 1
    place = torch.empty(1, 1, 1, 1)
    assert product(a, b, None).item() == 257 + 2**-9
    assert (
        product(a, b, torch.bfloat16).item()
        == product(a, b, torch.bfloat16, place).item()
        == place.item()
        == 256
    )


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"),
    [
        ((3, 3), (1, 1), (1, 1), 5),
        ((3, 3), (2, 2), (1, 1), 6),
        ((7, 7), (2, 2), (3, 3), 9),
        ((3, 3), (2, 2), (1, 1), 1),
    ],
)
def test_unpatch_is_the_adjoint_of_patches(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], size: int
) -> None:
    """<patches(x), r> = <x, unpatch(r)> for any x and r."""
    torch.manual_seed(0)
    x = torch.randn(2, size, size, 3, dtype=torch.float64)
    geometry = Geometry(kernel, stride, padding)
    rows = patches(x, geometry)
    r = torch.randn(rows.shape, dtype=torch.float64)
    back = unpatch(r, (size, size), x.shape[3], geometry)
    torch.testing.assert_close((rows * r).sum(), (x * back).sum())


def test_it_is_tried_in_float64_whatever_the_run_computes_in() -> None:
    """In a GPU's short products a right model would seem wrong, and lose its speed without a word."""
    seen = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return self.head(torch.relu(self.body(x)))  # type: ignore[no-any-return]

    task = task_of(Spy(), 2)
    assert task.with_batching(data=samples(torch.randn(4, 3))).batched is not None
    assert set(seen) == {torch.float64}
    assert task.initial.dtype == torch.float32


def test_a_partly_frozen_model_in_bf16_trains_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.LayerNorm(16), nn.Linear(16, 8), nn.Tanh())
    body[:3].requires_grad_(False)
    task = task_of(nn.Sequential(body, nn.Linear(8, 2)), 2)
    x, y = torch.randn(CLIENTS, BATCH, 3), torch.randint(0, 2, (CLIENTS, BATCH))
    w = task.initial.expand(CLIENTS, -1)
    whole = step(task.with_batching(), (w, x, y), None)
    monkeypatch.setattr("copfl.kernels.batched_model.SHORT_DEVICES", {"cpu"})
    short = step(task.with_batching(torch.bfloat16), (w, x, y), None)
    assert {t.dtype for t in (*task.module.parameters(), short[0])} == {torch.float32}
    error = float((whole[0] - short[0]).norm() / whole[0].norm())
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize("training", [True, False])
def test_a_task_computes_what_a_model_with_subclasses_of_layers_does(training: bool) -> None:
    model, x = Subclasses().train(training), 3 * torch.randn(4, 2, 6, 6)
    ours = for_tasks(copy.deepcopy(model)).train(training)
    assert list(ours.state_dict()) == [name for name in model.state_dict() if "num_batches" not in name]
    torch.testing.assert_close(ours(x), model(x))


def test_another_batch_norm_with_a_forward_of_its_own_is_refused() -> None:
    class Doubled(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(UsageError, match="a Doubled, a batch norm with a forward of its own"):
        for_tasks(nn.Sequential(Doubled(3)))


@pytest.mark.job
def test_training_imports_no_compiler() -> None:
    """torch's compiler and sympy take seconds of every start, and two of torch's functions would import them."""
    program = """
import sys
from copfl.algorithms import ALGORITHMS
from copfl.engine.mapping import vmap
from copfl.engine.simulate import Simulation, begin, simulate
from copfl.testing import small_federation

task, federation = small_federation("batch", (8, 8), "cpu")
task = task.with_batching()
for name in ("copfl", "apfl"):
    algorithm = ALGORITHMS[name]()
    simulation = Simulation(algorithm, task, federation, vmap(), batch=4)
    next(simulate(simulation, begin(algorithm, task, 2), rounds=1))
print({"sympy", "torch._dynamo"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr[-2000:]
