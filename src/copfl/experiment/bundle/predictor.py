"""A model as one torch module: raw samples in, predictions out.

`Bundle.module` returns it, and exports contain it.
"""

import torch
from torch import Tensor, nn

from copfl.core import tree
from copfl.core.memory import Memory, vote
from copfl.core.task import Experts, Personal, Task
from copfl.data.samples import Inputs
from copfl.experiment.models.client_models import with_entries, with_valve
from copfl.kernels.modules import arguments_of, logits_of
from copfl.models import adapters

REMEMBERED = "memory_"  # before the names of a memory's tensors


class Predictor(nn.Module):
    """Normalisation, the model or the mixture of models, and probabilities or values.

    `networks` has the models themselves, which return logits, with their adapters merged. The temperature is
    of the probabilities of classes, see `copfl.measures.calibration.tempered`.
    """

    def __init__(self, task: Task, model: Personal, temperature: float = 1.0) -> None:
        super().__init__()
        self.task, self.head, self.temperature = task, task.layout.head, temperature
        experts = model if isinstance(model, Experts) else Experts(model[None], model.new_ones(1))
        self.register_buffer("shares", experts.share.clone())
        self.register_buffer("near", None if experts.near is None else experts.near.clone())
        for name, values in tree.named(experts.memory):
            self.register_buffer(f"{REMEMBERED}{name}", values.clone())
        self.networks = nn.ModuleList([adapters.merged(with_entries(task, w)) for w in experts.w])
        if experts.valve is not None:
            for network in self.networks:
                with_valve(network, self.head, experts.valve)
        self.eval()

    def forward(self, x: Inputs) -> Tensor:
        """Probabilities [n, classes] or [n, labels], or values [n, targets]."""
        x, criterion, shares = self.task.numbers(x), self.task.criterion, self.get_buffer("shares")
        arguments, keywords = arguments_of(self.task.module, x)
        outputs, features = [], list[Tensor]()
        for network in self.networks:
            head = network.get_submodule(self.head)
            hook = head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
            try:
                logits = logits_of(network(*arguments, **keywords))
            finally:
                hook.remove()
            outputs.append(logits.softmax(-1) if criterion.logarithmic else criterion.predictions(logits))
        stacked = torch.stack(outputs)  # [k, n, ...]
        own = dict(self.named_buffers(recurse=False))
        if (near := own.get("near")) is not None:  # as in Task.predict
            similarity = (nn.functional.normalize(features[0].flatten(1)) @ near).clamp(0, 1)
            first = shares[:-1, None] * similarity
            shares = torch.cat([first, 1 - first.sum(0, keepdim=True)])
        mixed = (stacked * shares.view(*shares.shape, *[1] * (stacked.dim() - shares.dim()))).sum(0)
        if f"{REMEMBERED}share" in own:
            memory = Memory(*(own[f"{REMEMBERED}{name}"] for name in Memory._fields))
            voted = vote(memory, features[0].flatten(1)).view_as(mixed)
            mixed = (1 - memory.share) * mixed + memory.share * voted
        if self.temperature == 1:
            return mixed
        powers = mixed.pow(1 / self.temperature)
        return powers / powers.sum(-1, keepdim=True)
