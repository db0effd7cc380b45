"""What a model of a run config needs: counted on torch's meta device, where nothing has memory.

`protocol.settings` asks before the model is made, `node.resident` again for a batch of the node's own samples.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from copfl import models
from copfl.core import tree
from copfl.data.samples import Shape
from copfl.federation.policy.record import RequestBounds
from copfl.federation.policy.refusal import PolicyError, Refusal
from copfl.models.adapters import target_modules
from copfl.settings.schema import Adapter, Model

GIB = 2**30


def require_size(
    bounds: RequestBounds, model: Model, adapter: Adapter, shape: Shape, classes: int, kind: str, batch: int
) -> None:
    """PolicyError if a model of copfl's is larger than the owner allows, before anything of it has memory.

    The owner has entered every other model, and knows its size.

    Args:
        bounds: What the policy allows.
        model: The settings of the model.
        adapter: The settings of its adapter; an empty record for none.
        shape: Of one sample.
        classes: Number of outputs.
        kind: Of the task.
        batch: Number of samples that the model is given at once.
    """
    if model.name not in models.MODELS:
        return
    with torch.device("meta"):
        plain_shape = () if isinstance(shape, dict) else shape
        module = models.build(model.name, plain_shape, classes, 0, kind, **model.arguments)
    count = sum(parameter.numel() for parameter in module.parameters())
    if count <= bounds.parameters and adapter:
        count += adapter_parameters(module, adapter)
    if count > bounds.parameters:
        why = f"the model has {count:,} parameters, and {bounds.parameters:,} are the most"
        raise PolicyError((Refusal("bounds.parameters", why),))
    needed = (forward_bytes(module, shape, batch) + 4 * count) / GIB
    if needed > bounds.memory:
        about = f"about {needed:.3g} GiB for {batch:,} samples"
        why = f"the model needs {about}, and {bounds.memory:g} are the most"
        raise PolicyError((Refusal("bounds.memory", why),))


def adapter_parameters(module: nn.Module, adapter: Adapter) -> int:
    """The number of entries of the low-rank matrices beside the target layers.

    Args:
        module: The model, on the meta device.
        adapter: The settings of the adapter.
    """
    names = target_modules(module, str(adapter.arguments.get("targets", "auto")))
    shapes = [module.get_parameter(f"{name}.weight").shape for name in names]
    rank = int(adapter.arguments.get("r", 8))
    return sum(rank * (shape[0] + math.prod(shape[1:])) for shape in shapes)


def forward_bytes(module: nn.Module, shape: Shape, batch: int) -> float:
    """The bytes of what the operations of a forward pass return: training keeps most of it for the gradients.

    Infinite if a tensor has more entries than torch can count.

    Args:
        module: The model, on the meta device.
        shape: Of one sample; of sentences the shapes of their arrays.
        batch: Number of samples.
    """
    outputs = _Outputs()
    try:
        with torch.no_grad(), torch.device("meta"), outputs:
            if isinstance(shape, dict):
                ids = {name: torch.zeros(batch, *size, dtype=torch.int64) for name, size in shape.items()}
                module(**ids)
            else:
                module(torch.zeros(batch, *shape))
    except (RuntimeError, OverflowError):
        return math.inf
    of_model = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    return sum(storage.nbytes() for key, storage in outputs.storages.items() if key not in of_model)


class _Outputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the memory that operations return; a view has its base's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree.leaves(result) if not isinstance(result, Tensor) else [result]:
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = storage
        return result
