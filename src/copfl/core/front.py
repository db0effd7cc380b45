"""Features of a frozen front: the input of the first trained layer, computed once per sample and kept.

The front is what a model computes before its first trained module. Without augmentation and random numbers it
gives a sample the same features in every epoch. The rounds then train the rest of the model, its tail, on the
features. What is found is compared with the whole model first: a front that cannot be cut off is not cached.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from posixpath import commonpath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from copfl.core import tree
from copfl.core.layout import inside
from copfl.core.task import EVAL_BATCH, Data, Task
from copfl.kernels.draws import Draws, Keyed
from copfl.kernels.modules import Inputs, arguments_of, logits_of

MEMORY = {"cpu": 2e9, "cuda": 16e9}  # bytes that the features may take
SAMPLES = 8  # on which the tail is compared with the model
EQUAL = 1e-9  # relative difference in float64 that rounding explains
MISFITS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


class Front(NamedTuple):
    """Where a model is cut. Its module `part` returns the logits, and has all trained tensors."""

    part: str  # "": the model itself
    cut: str  # the module whose input is kept
    skipped: tuple[str, ...] = ()  # modules of the part that come before the cut


@dataclass
class Call:
    """A call of a module in a forward pass."""

    path: str
    inputs: tuple[Any, ...]
    options: dict[str, Any]
    drawn_before: int  # random numbers of the model, in calls of random functions
    drawn_after: int = 0
    output: Any = None


def front_of(task: Task, data: Data) -> Front | None:
    """The largest front that can be cut off, tried on one client's samples; None where there is none."""
    if {name for name, _ in task.module.named_parameters()} <= set(task.layout.names):
        return None  # all weights are trained, and so are those of any front
    samples = tree.each(lambda t: t[: min(SAMPLES, int(data.size))], (data.x, data.y))
    try:
        for front in _candidates(task, task.numbers(samples[0])):
            if _agrees(task, front, *samples):
                return front
    except MISFITS:  # the model does not fit the samples, which the choice of an engine reports
        return None
    return None


def _candidates(task: Task, x: Inputs) -> list[Front]:
    """Places where the model may be cut, the latest first."""
    names, calls = task.layout.names, _calls(task, x)
    once = {c.path: c for c in calls if [d.path for d in calls].count(c.path) == 1}
    paths = [*(name.rpartition(".")[0] for name in names), task.layout.head]
    part = commonpath(path.replace(".", "/") for path in paths).replace("/", ".")
    while part and (part not in once or once[part].drawn_before):  # the tail draws random numbers, too
        part = part.rpartition(".")[0]
    if logits_of(once[part].output) is not logits_of(once[""].output):
        return []

    def stays(call: Call) -> bool:
        return call.drawn_after > call.drawn_before or any(inside(name, call.path) for name in names)

    front, found = Front(part, part), [Front(part, part)] if part else []
    while not any(name.rpartition(".")[0] == front.cut for name in names):
        children = [c for c in calls if c.path and c.path.rpartition(".")[0] == front.cut]
        first = next((n for n, child in enumerate(children) if stays(child)), None)
        if first is None:
            break
        front = Front(part, children[first].path, (*front.skipped, *(c.path for c in children[:first])))
        found.insert(0, front)
        if not isinstance(task.module.get_submodule(front.cut), nn.Sequential):
            break
    rows = len(next(iter(x.values()))) if isinstance(x, dict) else len(x)
    return [
        f for f in found if f.cut in once and _is_clean(once[f.cut], rows) and _has_weights(task.module, f)
    ]


def _is_clean(call: Call, rows: int) -> bool:
    """Whether the call comes before any random number, and has one tensor with a row per sample."""
    if call.drawn_before or call.options or len(call.inputs) != 1:
        return False
    x = call.inputs[0]
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and len(x) == rows


def _has_weights(model: nn.Module, front: Front) -> bool:
    """Whether the front has weights: without any there is nothing to save."""
    kept = {id(p) for p in tail_of(model, front).parameters()}
    return any(id(p) not in kept for p in model.parameters())


def _calls(task: Task, x: Inputs) -> list[Call]:
    """The calls of the model and of its modules in training mode, in their order."""
    calls: list[Call] = []
    running: list[Call] = []
    draws = Draws(torch.zeros((), dtype=torch.int64, device=task.device))

    def before(path: str, inputs: Any, options: Any) -> None:
        running.append(Call(path, inputs, options, draws.calls))
        calls.append(running[-1])

    def after(output: Any) -> None:
        call = running.pop()
        call.drawn_after, call.output = draws.calls, output

    hooks = []
    for path, module in task.module.named_modules():
        hooks += [
            module.register_forward_pre_hook(lambda _, i, o, path=path: before(path, i, o), with_kwargs=True),
            module.register_forward_hook(lambda _, __, output: after(output)),
        ]
    tensors = task.layout.split(task.initial[: task.d])
    statistics = task.layout.split(task.initial[task.d :].clone(), buffers=True)
    positional, keywords = arguments_of(task.module, x)
    try:
        task.module.train()
        with torch.no_grad(), draws:
            torch.func.functional_call(task.module, {**tensors, **statistics}, positional, keywords)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def tail_of(model: nn.Module, front: Front) -> nn.Module:
    """The model after its front, under the same names and with the same tensors."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    part = copy.deepcopy(model.get_submodule(front.part), shared)
    for path in front.skipped:
        above, _, name = path.removeprefix(f"{front.part}.").rpartition(".")
        setattr(part.get_submodule(above), name, nn.Identity())
    return Tail(front.part, part) if front.part else part


class Tail(nn.Module):
    """A part of a model, under its name there."""

    def __init__(self, path: str, part: nn.Module) -> None:
        super().__init__()
        self.path = path
        *above, name = path.split(".")
        place: nn.Module = self
        for step in above:
            place.add_module(step, nn.Module())
            place = place.get_submodule(step)
        place.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.get_submodule(self.path)(x)


class _Reached(Exception):
    """The cut, in a forward pass that ends there."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


@torch.no_grad()
def features_of(task: Task, front: Front, x: Inputs) -> Tensor:
    """The features of samples as `Task.numbers` returns them."""

    def stop(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _Reached(inputs[0])

    hook = task.module.get_submodule(front.cut).register_forward_pre_hook(stop)
    positional, keywords = arguments_of(task.module, x)
    try:
        task.module.eval()(*positional, **keywords)
    except _Reached as reached:
        return reached.x
    finally:
        hook.remove()
    raise RuntimeError(f"the model does not call its module {front.cut} in evaluation mode")


def _agrees(task: Task, front: Front, x: Inputs, y: Tensor) -> bool:
    """Whether the tail gives two parts of the samples, with two vectors of weights, what the model gives."""
    module = copy.deepcopy(task.module).double()
    whole = replace(task, module=module, initial=task.initial.double(), batched=None)
    tail = replace(whole, module=tail_of(module, front))
    x = whole.numbers(x)
    features = features_of(whole, front, x)
    half = max(1, len(y) // 2)
    for n, part in enumerate((slice(0, half), slice(half, len(y)) if len(y) > half else slice(0, half))):
        w, key = whole.initial * (1 + n / 2), torch.tensor(n, device=task.device)
        results = []
        for model, inputs in ((whole, x), (tail, features)):
            own = tree.each(lambda t, part=part: t[part], inputs)
            with torch.no_grad():
                found = model.gradient(w[: task.d], w[task.d :], Keyed(own, key), y[part])
                results.append((*found, *model.forward(w, own)))
        if not all((a - b).norm() <= EQUAL * (1e-6 + b.norm()) for a, b in zip(*results, strict=True)):
            return False
    return True


def cached_samples(task: Task, front: Front, x: Inputs) -> Tensor:
    """The features of raw samples."""
    rows = len(tree.leaves(x)[0])
    parts = (tree.each(lambda t, at=at: t[at : at + EVAL_BATCH], x) for at in range(0, rows, EVAL_BATCH))
    return torch.cat([features_of(task, front, task.numbers(part)) for part in parts])


def tail_task(task: Task, front: Front) -> Task:
    """The task of the tail, whose samples are features."""
    public = None if task.public is None else cached_samples(task, front, task.public)
    return replace(task, module=tail_of(task.module, front), batched=None, public=public)


def of_one_client(task: Task, splits: Sequence[Data]) -> tuple[Task, Sequence[Data]]:
    """The tail and the features of one client's samples, or both as they are, by the same rules."""
    front = front_of(task, splits[0]) if int(splits[0].size) else None
    if front is None or bytes_of(task, front, splits[0].x) * sum(len(s.y) for s in splits) > MEMORY["cpu"]:
        return task, splits
    kept = [data._replace(x=cached_samples(task, front, data.x)) for data in splits]
    return tail_task(task, front), kept


def bytes_of(task: Task, front: Front, x: Inputs) -> int:
    """The bytes of the features of a sample."""
    return cached_samples(task, front, tree.each(lambda t: t[:1], x)).nbytes
