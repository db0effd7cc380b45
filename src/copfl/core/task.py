"""A model and its loss as pure functions of the flat vector `w`, and the records of one client's data.

Everything here works for one client, and under vmap for all clients at once: no branch depends on a tensor's
value.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from copfl.core import tree
from copfl.core.augment import crop_and_flip
from copfl.core.criteria import Criterion, classification, mean_of_valid
from copfl.core.layout import Layout, layout_of
from copfl.core.memory import Memory, recalled, vote
from copfl.errors import UsageError, how_to_set
from copfl.kernels.draws import Draws, Keyed, NotBatched
from copfl.kernels.fused import without_kernels
from copfl.kernels.modules import (
    BatchNorm,
    Inputs,
    arguments_of,
    for_tasks,
    in_mode,
    logits_of,
    mappable_attention,
    structure_of,
)
from copfl.kernels.private_torch import gradient, mapped
from copfl.measures.metrics import Metric, usual_metrics

STATISTICS_BATCH = 500  # samples in one forward pass without training; the batch of batch-norm statistics
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)  # of a model that does not fit
EVAL_BATCH = 250  # samples in one forward pass of an evaluation: with fifty clients batched, gigabytes


class Data(NamedTuple):
    """One client's samples; rows from `size` on are padding, up to the size of the largest client."""

    x: Inputs  # [n, ...]: uint8 images, or any input of the model; a dict of arrays if it has several
    y: Tensor  # [n] int64, or targets of another kind, [n, ...]
    size: Tensor  # [] int64, the number of valid samples
    # What the algorithm has computed of these samples for this round, see core.algorithm.rows_for; None: nothing.
    known: Any = None

    def in_parts(self, size: int) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
        """The samples and targets in parts of this size, and which of them are valid."""
        for start in range(0, self.y.shape[0], size):
            x, y = tree.each(lambda t, at=start: t[at : at + size], (self.x, self.y))
            yield x, y, torch.arange(start, start + y.shape[0], device=y.device) < self.size


class Batch(NamedTuple):
    """The samples of one step, drawn beforehand so that every engine trains on the same ones."""

    index: Tensor  # type: ignore[assignment]  # [b] int64 into Data
    valid: Tensor | None  # [b] bool; None: all are valid
    shift: Tensor | None  # [b, 2] int64 in 0..8, where the crop starts; None: no augmentation
    flip: Tensor | None  # [b] bool
    key: Tensor | None = None  # [] int64, of the random numbers inside the model; None: it draws none


Epoch = tuple[Batch, ...]  # once over the client's data
Plan = tuple[Epoch, ...]
Tensors = dict[str, Tensor]  # by name


class Experts(NamedTuple):
    """A mixture of models: the weighted mean of their probabilities."""

    w: Tensor  # [k, D]
    share: Tensor  # [k], the weights; their sum is 1
    # [f]: the weights are those of samples with such features in the first model. The inner product with a
    # sample's features, at length 1, scales the weights of all models but the last, which takes the rest.
    near: Tensor | None = None
    # [2, f]: the head of each model sees relu(valve[0] * feature + valve[1]) in place of a feature.
    valve: Tensor | None = None
    # Samples whose nearest vote, by the features of the first model; the vote is mixed with the models'.
    memory: Memory | None = None


Personal = Tensor | Experts  # a client's model: one vector, or a mixture of several
# logits, features, targets, valid -> mean
Objective = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
KeyedInputs = Any  # Inputs, or Keyed ones: the samples of a step, as `Task.batch` returns them


class BatchedModel(Protocol):
    """The model for batched clients: kernels.batched_model.BatchedModule."""

    def forward(
        self, parameters: Tensor, buffers: Tensor, x: KeyedInputs, valid: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The logits, the features and the buffers after."""

    def gradient(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        parameters: Tensor,
        buffers: Tensor,
        x: KeyedInputs,
        valid: Tensor | None,
        head: Tensor | None,
        training: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the loss of logits and features, its value, and the buffers after."""


@dataclass(frozen=True, eq=False)
class Task:
    """The learning task: the model, its initial weights, and the preprocessing of samples."""

    module: nn.Module  # has the frozen parameters, one copy for all clients
    layout: Layout
    initial: Tensor  # [D], the initial weights of every client
    classes: int  # or labels, or targets: the outputs for a sample
    criterion: Criterion = field(default_factory=classification)
    mean: Tensor | None = None  # [channels, 1, 1], of pixels in 0..1
    std: Tensor | None = None
    buffers: str = "local"  # batch-norm statistics: "local" stay with the client, "average" are shared
    batched: BatchedModel | None = None  # the same model for batched clients, where the model allows it
    public: Inputs = None  # [p, ...], unlabelled raw samples that every party has; most need none
    # Whether the model draws random numbers in training, as dropout does: `probed` finds out that it does
    # not.
    random: bool = True
    metrics: tuple[Metric, ...] = usual_metrics("classification")  # of an evaluation; the first is primary

    @property
    def d(self) -> int:
        """The number of trained entries of w; the rest are batch-norm statistics."""
        return self.layout.parameters

    @property
    def device(self) -> torch.device:
        return self.initial.device

    def where(self, *parts: str) -> Tensor:
        """A bool vector over w that is True on these parts of the model; see Layout.where."""
        return _where(self.layout, parts, self.device)

    def local(self, *parts: str) -> Tensor:
        """The entries that stay at the client when these parts are personal: they, and local statistics."""
        return self.where(*parts, "buffers") if self.buffers == "local" else self.where(*parts)

    def with_batching(self, products: torch.dtype | None = None, data: Data | None = None) -> Task:
        """The same task with a faster model for batched clients; unchanged if the model does not allow it.

        `products` is the dtype of matrix products; weights, statistics and sums keep their own. With a few
        samples of one client, `data`, the result is compared first: a model that mixes the samples of a
        batch, or calls a batch norm twice, would silently compute something else.
        """
        from copfl.kernels.batched_model import batched_module

        fast = batched_module(self.module, self.layout, products)
        if fast is None:
            return self
        if data is not None:
            # In float64: in a GPU's short formats, rounding may exceed the difference of a wrong model.
            module = copy.deepcopy(self.module).double()
            wide = replace(self, module=module, initial=self.initial.double(), batched=None)
            if not wide._agrees(replace(wide, batched=batched_module(module, self.layout)), data):
                return self
        return replace(self, batched=fast)

    def _agrees(self, other: Task, data: Data) -> bool:
        """Whether both give two clients with different weights the same gradients and statistics."""
        w = torch.stack([self.initial, 1.5 * self.initial])
        # After a batch norm of two samples little but rounding is left.
        half = max(1, min(8, int(data.size) // 2))
        first, last = (slice(0, half), slice(int(data.size) - half, int(data.size)))
        x, y = tree.each(lambda t: torch.stack([t[first], t[last]]), (self.numbers(data.x), data.y))
        key = torch.arange(2, device=self.device)

        def both(given: Any) -> tuple[Tensor, ...]:
            w, x, y, key = given
            tasks = self, other
            pairs = zip(*(t.gradient(w[: self.d], w[self.d :], Keyed(x, key), y) for t in tasks), strict=True)
            # Correct ones differ by 1e-12, wrong ones by percents.
            return tuple((a - b).norm() <= 1e-5 * (1e-6 + b.norm()) for a, b in pairs)

        with torch.no_grad(), without_kernels():
            try:
                close = tree.vectorised(both, (w, x, y, key))
            except FAILURES as error:
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                if not isinstance(error, NotBatched):
                    warnings.warn(f"plain vmap is used, as the batched form fails: {error}", stacklevel=2)
                return False
        return all(bool(c.all()) for c in close)

    def without_constants(self, data: Data) -> Task:
        """The same task, of whose buffers the vector has those alone that a training step changes.

        Others, such as a causal mask, are like frozen parameters: all clients share them, and nothing is sent. The
        statistics of a batch norm are known; of other modules a forward pass in training mode on two samples shows
        what it writes, whatever the samples are. Unchanged where the model does not fit them.
        """
        norms = {name for name, m in self.module.named_modules() if isinstance(m, BatchNorm)}
        buffers = self.layout.names[self.layout.trained :]
        unknown = {name for name in buffers if name.rpartition(".")[0] not in norms}
        if not unknown:
            return self
        try:
            constant = unknown - self._written(self.numbers(tree.each(lambda t: t[:2], data.x)))
        except FAILURES:
            return self
        layout = self.layout.without(constant)
        whole = self.layout.split(self.initial[: self.d])
        whole |= self.layout.split(self.initial[self.d :], buffers=True)
        return replace(self, layout=layout, initial=layout.join(whole))

    def _written(self, x: Inputs) -> set[str]:
        """The buffers that the module writes in one forward pass in training mode."""
        statistics = self.layout.split(self.initial[self.d :], buffers=True)
        statistics = {name: t.clone() for name, t in statistics.items()}
        before = {name: t._version for name, t in statistics.items()}
        self._called(x, self.layout.split(self.initial[: self.d]) | statistics, training=True)
        return {name for name, t in statistics.items() if t._version != before[name]}

    def probed(self, data: Data) -> Task:
        """The same task, with `random` found out by one forward pass in training mode on two samples.

        Unchanged where the model does not fit the samples, which the choice of an engine reports. A
        UsageError if it also draws random numbers in evaluation mode, where no two predictions would be the
        same.
        """
        x = self.numbers(tree.each(lambda t: t[:2], data.x))
        try:
            in_training, in_evaluation = (self._number_of_draws(x, training) for training in (True, False))
        except FAILURES:
            return self
        if in_evaluation:
            raise UsageError(
                "the model draws random numbers in evaluation mode too, so no two predictions would be the "
                "same; draw them in training alone, such as F.dropout(x, p, training=self.training)"
            )
        return replace(self, random=in_training > 0)

    def _number_of_draws(self, x: Inputs, training: bool) -> int:
        """How often the module, in this mode, draws random numbers in one forward pass."""
        tensors = self.layout.split(self.initial[: self.d])
        statistics = self.layout.split(self.initial[self.d :].clone(), buffers=True)
        return self._called(x, tensors | statistics, training).calls

    def _called(self, x: Inputs, tensors: Tensors, training: bool) -> Draws:
        """The random numbers that the module, in this mode and with these tensors, draws in one forward pass."""
        tied = structure_of(self.module.train(training)).tied
        draws = Draws(torch.zeros((), dtype=torch.int64, device=self.device))
        with torch.no_grad(), draws:
            torch.func.functional_call(self.module, tensors, *arguments_of(self.module, x), tie_weights=tied)
        return draws

    # -- samples ---------------------------------------------------------------------------------------------

    def numbers(self, x: Inputs) -> Inputs:
        """Samples as input of the model: images scaled and normalised, others unchanged."""
        return tree.each(self._numbers, x)

    def _numbers(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.to(self.initial.dtype) / 255
            return x if self.mean is None or self.std is None else (x - self.mean) / self.std
        return x.to(self.initial.dtype) if x.is_floating_point() else x

    def batch(self, data: Data, batch: Batch) -> tuple[KeyedInputs, Tensor]:
        """The samples and labels of one step, augmented according to the plan."""
        x, y = tree.each(lambda t: t[batch.index], (data.x, data.y))
        if batch.shift is not None and batch.flip is not None:
            x = crop_and_flip(x, batch.shift, batch.flip)
        x = self.numbers(x)
        return x if batch.key is None else Keyed(x, batch.key), y

    def objective(self, logits: Tensor, features: Tensor, targets: Tensor, valid: Tensor | None) -> Tensor:
        """The mean loss over the valid samples."""
        losses = self.criterion.losses(logits, self.criterion.at_risk(targets, valid))
        return mean_of_valid(losses, self.criterion.counted(targets, valid))

    # -- training --------------------------------------------------------------------------------------------

    def gradient(
        self,
        parameters: Tensor,
        buffers: Tensor,
        x: KeyedInputs,
        y: Tensor,
        valid: Tensor | None = None,
        objective: Objective | None = None,
        *,
        head: Tensor | None = None,
        training: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the objective [d], its value, and the buffers after this batch.

        The default objective is the task's. A `head` [h] replaces the model's own, and the gradient is then
        that of the head alone. Of samples without a key the model draws no random numbers, see `forward`.
        Without `training` it is the gradient of the model as it predicts: batch norm has the statistics in
        the buffers, so that the gradient of a sample does not depend on the others.
        """
        objective = objective or self.objective
        if self.batched is not None:
            given = parameters, buffers, x, valid, head, training
            return self.batched.gradient(lambda logits, seen: objective(logits, seen, y, valid), *given)
        fixed = {} if head is None else self.layout.split(parameters)
        trained, split = (parameters, self.layout.split) if head is None else (head, self.layout.split_head)

        def value_and_buffers(tensors: Tensors) -> tuple[Tensor, Tensor]:
            logits, features, after = self._run({**fixed, **tensors}, buffers, x, valid, training)
            return objective(logits, features, y, valid), after

        if mapped():
            (grad,), (value, after) = gradient(lambda moving: value_and_buffers(split(moving)), trained)
            return grad, value.detach(), after
        leaves = {name: t.detach().requires_grad_() for name, t in split(trained).items()}
        grad = torch.zeros_like(trained)
        for leaf, part in zip(leaves.values(), split(grad).values(), strict=True):
            leaf.grad = part  # each layer's gradient is added in place, while it is in the processor's cache
        with torch.enable_grad():
            value, after = value_and_buffers(leaves)
            value.backward(inputs=list(leaves.values()))  # type: ignore[no-untyped-call]
        return grad, value.detach(), after.detach()

    def forward(
        self, w: Tensor, x: KeyedInputs, training: bool = False, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The logits [b, classes] and the features [b, f], the input of the head; x as `numbers` returns it.

        In training mode batch norm uses the statistics of the batch's valid samples; those of w stay
        unchanged. What draws random numbers, as dropout does, draws them by the key of the samples (`batch`);
        without a key it draws none, and all but batch norm is as in evaluation mode. This cannot be
        differentiated: use `gradient`.
        """
        return self._forward(w[: self.d], w[self.d :], x, valid, training)[:2]

    def _forward(
        self, parameters: Tensor, buffers: Tensor, x: KeyedInputs, valid: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The logits, the features, and the buffers after this batch."""
        if self.batched is not None:
            return self.batched.forward(parameters, buffers, x, valid, training)
        return self._run(self.layout.split(parameters), buffers, x, valid, training)

    def _run(
        self, tensors: Tensors, buffers: Tensor, x: KeyedInputs, valid: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`_forward` of the module with these parameters."""
        statistics = self.layout.split(buffers, buffers=True)
        if training:  # in new tensors: under vmap, writes into views of a vector are lost
            statistics = {name: b.clone() for name, b in statistics.items()}
        if not (mapped() or torch.is_grad_enabled()):  # torch folds axes of products that require a gradient
            tensors = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        nothing, key = contextlib.nullcontext(), x.key if isinstance(x, Keyed) and training else None
        arguments = arguments_of(self.module, x.x if isinstance(x, Keyed) else x)
        features: list[Tensor] = []
        head = self.module.get_submodule(self.layout.head)
        hook = head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
        norms, _, tied = in_mode(self.module, training=key is not None)
        for norm in norms:
            norm.valid, norm.training = valid, training and not norm.frozen
        try:
            with Draws(key) if key is not None else nothing, mappable_attention() if mapped() else nothing:
                output = torch.func.functional_call(
                    self.module, tensors | statistics, *arguments, tie_weights=tied
                )
            logits = logits_of(output)
        finally:
            hook.remove()
            for norm in norms:
                norm.valid = None
        if not features:
            raise UsageError(
                f'the model does not use its module "{self.layout.head}"; name the module that computes '
                f"the logits, such as {how_to_set('model.head', 'classifier')}"
            )
        if training and statistics:
            buffers = torch.cat([b.reshape(-1) for b in statistics.values()])
        return logits, features[-1].flatten(1), buffers

    def with_local_statistics(self, w: Tensor, data: Data) -> Tensor:
        """w with the batch-norm statistics of these samples, which also normalise the layers before."""
        if w.shape[0] == self.d:
            return w
        momenta = _bn_momenta(self.module, self.layout, self.device, self.initial.dtype)
        sums, weight = torch.zeros_like(w[self.d :]), w.new_zeros(())
        for x, _, valid in data.in_parts(STATISTICS_BATCH):
            x = self.numbers(x)
            after = self._forward(w[: self.d], torch.zeros_like(sums), x, valid, training=True)[2]
            counted = valid.sum().to(w.dtype)
            sums, weight = sums + counted * after, weight + counted
        # Running statistics that start at zero end at momentum times the batch's own.
        statistics = sums / weight.clamp(min=1) / torch.where(momenta > 0, momenta, 1)
        return torch.cat([w[: self.d], torch.where((momenta > 0) & (weight > 0), statistics, w[self.d :])])

    # -- evaluation ------------------------------------------------------------------------------------------

    def predict(self, personal: Personal, x: Inputs) -> Tensor:
        """Predictions of raw samples, such as log-probabilities [b, classes]; of a mixture, their mean."""
        x, criterion = self.numbers(x), self.criterion
        if isinstance(personal, Tensor):
            return criterion.predictions(self.forward(personal, x)[0])
        outputs, share = [self.forward(w, x) for w in personal.w], personal.share
        if personal.valve is not None:
            seen = [opened(features, personal.valve) for _, features in outputs]
            heads = [self.layout.entries(w, "head") for w in personal.w]
            outputs = [(self.head_outputs(head, v), v) for head, v in zip(heads, seen, strict=True)]
        if personal.near is not None:
            similarity = (nn.functional.normalize(outputs[0][1]) @ personal.near).clamp(0, 1)  # [b]
            first = share[:-1, None] * similarity
            share = torch.cat([first, 1 - first.sum(0, keepdim=True)])  # [k, b]
        mixed = criterion.mixed(torch.stack([criterion.predictions(logits) for logits, _ in outputs]), share)
        if (memory := personal.memory) is None:
            return mixed
        return recalled(criterion, vote(memory, outputs[0][1]), mixed, memory.share)

    def head_outputs(self, head: Tensor, features: Tensor) -> Tensor:
        """The outputs [b, C] of a Linear head [h] for features [b, f] that are not those of the body."""
        name, tensors = self.layout.head, self.layout.split_head(head)
        return nn.functional.linear(features, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def evaluate(self, personal: Personal, data: Data) -> tuple[Tensor, Tensor]:
        """The loss and the score over all valid samples."""
        return self.scores(personal, data)[:2]

    def scores(self, personal: Personal, data: Data) -> Scores:
        """The evaluation of a model on all valid samples, without augmentation."""
        loss = right = self.initial.new_zeros(())
        count = torch.zeros_like(data.size)
        predictions = []
        for x, y, valid in data.in_parts(EVAL_BATCH):
            predicted = self.predict(personal, x)
            losses = self.criterion.test_losses(predicted, self.criterion.at_risk(y, valid))
            counted = self.criterion.counted(y, valid)
            assert counted is not None
            count = count + counted.sum()
            loss = loss + torch.where(counted, losses, 0).sum()
            if self.criterion.correct is not None:
                right = right + torch.where(counted, self.criterion.correct(predicted, y), 0).sum()
            predictions.append(predicted)
        size = count.clamp(min=1)
        loss = loss / size
        score = -loss if self.criterion.correct is None else right / size
        return Scores(loss, score, predictions, count)


def opened(features: Tensor, valve: Tensor) -> Tensor:
    """Features [b, f] after a valve [2, f], see `Experts`."""
    return nn.functional.relu(features * valve[0] + valve[1])


class Scores(NamedTuple):
    """The evaluation of one model on one client's samples."""

    loss: Tensor  # [], the mean
    score: Tensor  # [], higher is better: the fraction that is correct, or -loss where nothing is correct
    predictions: list[Tensor]  # of the samples, in parts
    counted: Tensor  # [], the number of samples in the means


def task_of(
    model: nn.Module,
    classes: int,
    *,
    criterion: Criterion | None = None,
    metrics: Sequence[Metric] = (),
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    head: str | None = None,
    statistics: Collection[str] | None = None,
    buffers: str = "local",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    public: Tensor | None = None,
) -> Task:
    """The task of any nn.Module that maps a batch of samples to logits; the module itself stays unchanged.

    Parameters that do not require a gradient are frozen: they are no part of `w`, and all clients share them. Nor are
    buffers that are not among the `statistics`; None: all float buffers are, see `Task.without_constants`.
    """
    if buffers not in ("local", "average"):
        raise UsageError(f'buffers="{buffers}": batch-norm statistics are "local" or shared by "average"')
    # A frozen parameter is not copied: it is never written.
    frozen = [p for p in model.parameters() if not p.requires_grad]
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in frozen}
    module = for_tasks(copy.deepcopy(model, shared), partly_frozen=bool(frozen)).to(
        device=device, dtype=dtype
    )
    normalising = (BatchNorm, nn.GroupNorm, nn.LayerNorm)
    norms = [name for name, m in module.named_modules() if isinstance(m, normalising)]
    layout = layout_of(module, head, norms, statistics)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    initial = layout.join({name: tensors[name].detach() for name in layout.names}).clone()
    channel = [torch.tensor(v, device=device, dtype=dtype).view(-1, 1, 1) if v else None for v in (mean, std)]
    criterion = criterion or classification()
    return Task(
        module.requires_grad_(False),
        layout,
        initial,
        classes,
        criterion,
        mean=channel[0],
        std=channel[1],
        buffers=buffers,
        public=None if public is None else public.to(device),
        metrics=tuple(metrics) or usual_metrics(criterion.kind),
    )


@lru_cache(maxsize=8)  # a recorded program must not copy from the host
def _bn_momenta(module: nn.Module, layout: Layout, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The momentum of each buffer; 0 where it is not a batch-norm statistic."""
    norms = {name: m for name, m in module.named_modules() if isinstance(m, BatchNorm)}
    pieces = []
    for name, size in list(zip(layout.names, layout.sizes, strict=True))[layout.trained :]:
        norm = norms.get(name.rpartition(".")[0])
        pieces.append(torch.full((size,), float(norm.momentum or 0) if norm is not None else 0.0))
    return torch.cat([*pieces, torch.zeros(0)]).to(device, dtype)


@lru_cache(maxsize=256)
def _where(layout: Layout, parts: tuple[str, ...], device: torch.device) -> Tensor:
    """Layout.where, once per device: a recorded program must not copy from the host."""
    return layout.where(*parts).to(device)
