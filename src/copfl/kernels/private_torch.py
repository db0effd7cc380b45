"""Every private name of torch that copfl uses, each with a public way beside it that is slower and not wrong.

copfl puts no upper bound on torch. Where a release lacks one of these names, `USABLE` is False and everything takes
the public way: the numbers are the same up to rounding, and steps take longer. A test exercises both ways.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NAMES = {
    "torch._C._functorch": (
        "CVmapInterpreterPtr",
        "TransformType",
        "_add_batch_dim",
        "_unwrap_batched",
        "peek_interpreter_stack",
        "pop_dynamic_layer_stack",
        "push_dynamic_layer_stack",
        "unwrap_if_dead",
    ),
    "torch._functorch.eager_transforms": (
        "_create_differentiable",
        "_undo_create_differentiable",
        "_wrap_all_tensors",
        "grad_increment_nesting",
    ),
    "torch.autograd.graph": ("_engine_run_backward",),
    "torch": ("_fused_adam_",),
}

try:
    from torch._C import _functorch as functorch
    from torch._functorch import eager_transforms
    from torch.autograd import graph

    _modules = (functorch, eager_transforms, graph, torch)
    USABLE = all(
        hasattr(module, name)
        for module, names in zip(_modules, NAMES.values(), strict=True)
        for name in names
    )
except ImportError:
    USABLE = False


def mapped() -> bool:
    """Whether the caller runs inside vmap or another of torch.func's transforms.

    There is no public way to ask. Without one the answer is yes: what is done inside a transform is right outside
    of it, too, and slower.
    """
    return not USABLE or functorch.peek_interpreter_stack() is not None


def gradient(function: Callable[..., tuple[Tensor, Any]], *at: Tensor) -> Any:
    """torch.func.grad_and_value with has_aux, which would first import torch's compiler: six seconds."""
    if not USABLE:
        return torch.func.grad_and_value(function, tuple(range(len(at))), has_aux=True)(*at)
    with eager_transforms.grad_increment_nesting() as level, torch.enable_grad():
        given = eager_transforms._wrap_all_tensors(at, level)
        eager_transforms._create_differentiable(given, level)
        value, other = function(*given)
        how: Any = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
        zeros = map(torch.zeros_like, given)
        grads = torch.autograd.grad(value, given, **how) if value.requires_grad else zeros
        results: Any = (tuple(grads), (value, other))
        return eager_transforms._undo_create_differentiable(results, level)


def backward(
    ends: Sequence[Tensor], towards: Sequence[Tensor], parameters: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """torch.autograd.grad, which would first import sympy to compare shapes: a second.

    Args:
        ends: The outputs.
        towards: The gradient of each output.
        parameters: What the gradient is taken of; its result is None where no output depends on one.
    """
    if not USABLE:
        return torch.autograd.grad(ends, parameters, towards, allow_unused=True)
    found: Sequence[Tensor | None] = graph._engine_run_backward(
        tuple(ends), tuple(towards), False, False, tuple(parameters), True, accumulate_grad=False
    )
    return found


def in_vmap(arguments: Sequence[Any], rows_of: Callable[[int, list[int | None], list[Any]], Any]) -> Any:
    """A function of rows, called inside one level of vmap as torch calls the vmap rule of an autograd function.

    It takes an eighth of the time: torch's way there takes longer than a small step. NotImplemented where there is
    no such level, or no name of torch for it: the caller takes torch's way.

    Args:
        arguments: What the function was called with, inside vmap.
        rows_of: Computes the rows from the number of clients, the axis of the clients in each argument (None: it
            has none), and the arguments outside of vmap; NotImplemented if no argument has such an axis.
    """
    interpreter = functorch.peek_interpreter_stack() if USABLE else None
    if interpreter is None or interpreter.key() != functorch.TransformType.Vmap:
        return NotImplemented
    level, clients = interpreter.level(), functorch.CVmapInterpreterPtr(interpreter).batchSize()
    given = [functorch.unwrap_if_dead(a) if isinstance(a, Tensor) else a for a in arguments]
    parts = [functorch._unwrap_batched(a, level) if isinstance(a, Tensor) else (a, None) for a in given]
    layer = functorch.pop_dynamic_layer_stack()
    try:
        dims = [dim for _, dim in parts]
        if all(dim is None for dim in dims):
            return rows_of(0, dims, given)
        rows = rows_of(clients, dims, [a for a, _ in parts])
    finally:
        functorch.push_dynamic_layer_stack(layer)
    if isinstance(rows, tuple):
        return tuple(functorch._add_batch_dim(row, 0, level) for row in rows)
    return functorch._add_batch_dim(rows, 0, level)


def fused_adam(moving: tuple[Tensor, Tensor, Tensor], grad: Tensor, step: Tensor, **numbers: Any) -> bool:
    """One step of Adam in place by torch's own kernel, in a quarter of the time; False where there is none.

    Args:
        moving: The parameters and both moments, which are overwritten.
        grad: The gradient.
        step: The number of the step, from 1.
        numbers: lr, beta1, beta2 and eps.
    """
    if not USABLE:
        return False
    w, u, v = moving
    torch._fused_adam_(
        [w], [grad], [u], [v], [], [step], weight_decay=0.0, amsgrad=False, maximize=False, **numbers
    )
    return True
