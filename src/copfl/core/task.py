"""A model and its loss as pure functions of the flat vector `w`, and the records that hold one client's data.

Everything here works for one client, and under vmap for all clients at once: no branch looks at a tensor's value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from copfl.core.layout import Layout, layout_of
from copfl.errors import UsageError
from copfl.kernels.batched_model import Model, Tape, backward, batched_module, forward
from copfl.kernels.fused import mapped
from copfl.kernels.modules import BatchNorm, for_tasks

STATISTICS_BATCH = (
    500  # samples in one forward pass when nothing is trained; batch norm may look at them together
)
EVAL_BATCH = 250  # samples in one forward pass of a look: with fifty clients side by side, gigabytes


class Data(NamedTuple):
    """One client's samples; rows from `size` on only fill up the space that larger clients need."""

    x: Tensor  # [n, ...]: uint8 images, or whatever the model takes
    y: Tensor  # [n] int64
    size: Tensor  # [] int64, how many are real


class Batch(NamedTuple):
    """One step's choice of samples, drawn outside so that every engine trains on the same ones."""

    index: Tensor  # type: ignore[assignment]  # [b] int64 into Data; a tuple's own .index is not missed
    valid: Tensor | None  # [b] bool; None: all are real
    shift: Tensor | None  # [b, 2] int64 in 0..8, where the crop begins; None: no augmentation
    flip: Tensor | None  # [b] bool


Epoch = tuple[Batch, ...]  # one time over the client's data
Plan = tuple[Epoch, ...]


class Experts(NamedTuple):
    """Several models that answer together: the probabilities are averaged with these shares."""

    w: Tensor  # [k, D]
    share: Tensor  # [k], adds up to 1


Personal = Tensor | Experts  # what a client predicts with: one vector, or a mixture of several
Objective = Callable[
    [Tensor, Tensor, Tensor, Tensor | None], Tensor
]  # logits, features, labels, real -> mean loss


def cross_entropy(logits: Tensor, features: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor:
    """The mean cross-entropy over the real samples."""
    return mean_of_valid(F.cross_entropy(logits, labels, reduction="none"), valid)


def mean_of_valid(values: Tensor, valid: Tensor | None) -> Tensor:
    """The mean over the real samples; 0 where there are none."""
    if valid is None:
        return values.mean()
    weight = valid.to(values.dtype)
    return (values * weight).sum() / weight.sum().clamp(min=1)


@dataclass(frozen=True, eq=False)
class Task:
    """What is learned: the model's shape, its first weights, and how samples become numbers."""

    module: nn.Module
    layout: Layout
    initial: Tensor  # [D], the weights everybody starts from
    classes: int
    mean: Tensor | None = None  # [channels, 1, 1], of pixels in 0..1
    std: Tensor | None = None
    buffers: str = (
        "local"  # batch-norm statistics: "local" stay with the client, "average" are shared like weights
    )
    batched: Model | None = None  # the same model for many clients side by side, where it can be had
    public: Tensor | None = (
        None  # [p, ...], raw samples without labels that everybody may look at; most need none
    )

    @property
    def d(self) -> int:
        """How many entries of w are trained; the rest are batch-norm statistics."""
        return self.layout.parameters

    @property
    def device(self) -> torch.device:
        return self.initial.device

    def where(self, *parts: str) -> Tensor:
        """A bool vector over w that is True on these parts of the model; see Layout.where."""
        return _where(self.layout, parts, self.device)

    def local(self, *parts: str) -> Tensor:
        """The entries that never leave the client when these parts are personal: they, and local statistics."""
        return self.where(*parts, "buffers") if self.buffers == "local" else self.where(*parts)

    def with_batching(self, products: torch.dtype | None = None, samples: Tensor | None = None) -> Task:
        """The same task, quicker where many clients are mapped at once; unchanged if the model does not allow it.

        `products` is the dtype in which matrices are multiplied; weights, statistics and sums keep their own. With a
        few raw `samples` it is tried out first: a model that mixes the samples of a batch, or calls a batch norm twice,
        would silently compute something else.
        """
        run = batched_module(self.module, self.layout.head, products)
        if run is None:
            return self
        if samples is not None:
            # In float64: a GPU's short products differ by more from one way to another than a wrong model might.
            wide = self._double()
            exact = batched_module(wide.module, self.layout.head)
            if exact is None or not wide._agrees(replace(wide, batched=Model(exact, self.layout)), samples):
                return self
        return replace(self, batched=Model(run, self.layout))

    def _double(self) -> Task:
        mean, std = (None if t is None else t.double() for t in (self.mean, self.std))
        return replace(
            self,
            module=copy.deepcopy(self.module).double(),
            initial=self.initial.double(),
            mean=mean,
            std=std,
        )

    def _agrees(self, other: Task, samples: Tensor) -> bool:
        """Whether both give two different clients the same gradients and statistics on these samples."""
        w = torch.stack([self.initial, 1.5 * self.initial])
        half = max(1, min(8, len(samples) // 2))  # of two samples a batch norm leaves little but rounding
        x = self.numbers(torch.stack([samples[:half], samples[-half:]]))
        y = torch.arange(half, device=self.device) % self.classes

        def both(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            mine, theirs = (t.gradient(w[: self.d], w[self.d :], x, y) for t in (self, other))
            # Right ones differ by 1e-12, wrong ones by percents.
            return tuple(
                (a - b).norm() <= 1e-5 * (1e-6 + b.norm()) for a, b in zip(mine, theirs, strict=True)
            )

        with torch.no_grad(), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            return all(bool(close.all()) for close in torch.func.vmap(both, randomness="different")(w, x))

    # -- samples -------------------------------------------------------------------------------------------------

    def numbers(self, x: Tensor) -> Tensor:
        """Samples as the model takes them: images scaled and normalised, the rest as it is."""
        if x.dtype == torch.uint8:
            x = x.to(self.initial.dtype) / 255
            return x if self.mean is None or self.std is None else (x - self.mean) / self.std
        return x.to(self.initial.dtype) if x.is_floating_point() else x

    def batch(self, data: Data, batch: Batch) -> tuple[Tensor, Tensor]:
        """The samples and labels of one step, augmented as the plan says."""
        x, y = data.x[batch.index], data.y[batch.index]
        if batch.shift is not None and batch.flip is not None:
            x = crop_and_flip(x, batch.shift, batch.flip)
        return self.numbers(x), y

    # -- training ------------------------------------------------------------------------------------------------

    def gradient(
        self,
        parameters: Tensor,
        buffers: Tensor,
        x: Tensor,
        y: Tensor,
        valid: Tensor | None = None,
        objective: Objective = cross_entropy,
        head: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the objective [d], its value, and the buffers after this batch.

        With a `head` [h], that one stands in the head's place, and the gradient is its own: nothing goes back through
        the body.
        """
        if self.batched is not None:
            tape = Tape()
            logits, features, after = forward(parameters, buffers, x, valid, self.batched, tape, head)

            def value_of(logits: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
                value = objective(logits, features, y, valid)
                return value, value.detach()

            toward, value = torch.func.grad(value_of, argnums=(0, 1), has_aux=True)(logits, features)
            return backward(*toward, tape), value, after

        if not mapped():
            return self._gradient_alone(parameters, buffers, x, y, valid, objective, head)

        def loss(moving: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            # Each buffer gets a tensor of its own: under vmap, statistics written into views of a vector are lost.
            own = {name: b.clone() for name, b in self.layout.split(buffers, buffers=True).items()}
            still = {} if head is None else self.layout.split(parameters)
            pieces = self.layout.split(moving) if head is None else self.layout.split_head(moving)
            logits, features = self._call({**still, **pieces, **own}, x, valid, training=True)
            value = objective(logits, features, y, valid)
            after = torch.cat([b.reshape(-1) for b in own.values()]) if own else buffers
            return value, (value.detach(), after)

        grads, (value, after) = torch.func.grad(loss, has_aux=True)(parameters if head is None else head)
        return grads, value, after

    def _gradient_alone(
        self, parameters: Tensor, buffers: Tensor, x: Tensor, y: Tensor, valid: Tensor | None, objective: Objective,
        head: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`gradient` of one client outside of vmap, where every tensor can be a leaf."""
        own = {name: b.clone() for name, b in self.layout.split(buffers, buffers=True).items()}
        still = {} if head is None else self.layout.split(parameters)
        moving, cut = (parameters, self.layout.split) if head is None else (head, self.layout.split_head)
        leaves = {name: t.detach().requires_grad_() for name, t in cut(moving).items()}
        grads = torch.zeros_like(moving)
        for leaf, place in zip(leaves.values(), cut(grads).values(), strict=True):
            leaf.grad = (
                place  # each layer's gradient is added where it belongs, while it is in the processor's cache
            )
        with torch.enable_grad():
            logits, features = self._call({**still, **leaves, **own}, x, valid, training=True)
            value = objective(logits, features, y, valid)
            value.backward(inputs=list(leaves.values()))  # type: ignore[no-untyped-call]
        after = torch.cat([b.reshape(-1) for b in own.values()]).detach() if own else buffers
        return grads, value.detach(), after

    def forward(
        self, w: Tensor, x: Tensor, training: bool = False, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The logits [b, classes] and the features that the head saw [b, f]; x as `numbers` gives it.

        Training looks at the batch's own statistics, of its `real` samples alone; what it would add to w's is dropped.
        Nothing can be differentiated through this: that is what `gradient` is for.
        """
        if self.batched is not None:
            tape = Tape() if training else None
            return forward(w[: self.d], w[self.d :], x, valid if training else None, self.batched, tape)[:2]
        buffers = self.layout.split(w[self.d :], buffers=True)
        if training:
            buffers = {name: b.clone() for name, b in buffers.items()}  # w is only lent
        return self._call({**self.layout.split(w[: self.d]), **buffers}, x, valid, training)

    def with_local_statistics(self, w: Tensor, data: Data) -> Tensor:
        """w with the batch-norm statistics of these samples, each layer's behind layers that look at them alike."""
        if w.shape[0] == self.d:
            return w
        paces = _bn_momenta(self.module, self.layout, self.device, self.initial.dtype)
        sums, weight = torch.zeros_like(w[self.d :]), w.new_zeros(())
        for start in range(0, data.y.shape[0], STATISTICS_BATCH):
            x = self.numbers(data.x[start : start + STATISTICS_BATCH])
            valid = torch.arange(start, start + x.shape[0], device=w.device) < data.size
            after = self._statistics(w[: self.d], torch.zeros_like(sums), x, valid)
            count = valid.sum().to(w.dtype)
            sums, weight = sums + count * after, weight + count
        # Running statistics that start at nothing end at a known share of the batch's own.
        found = sums / weight.clamp(min=1) / torch.where(paces > 0, paces, 1)
        return torch.cat([w[: self.d], torch.where((paces > 0) & (weight > 0), found, w[self.d :])])

    def _statistics(self, parameters: Tensor, buffers: Tensor, x: Tensor, valid: Tensor) -> Tensor:
        """The buffers after the model has seen this batch in training."""
        if self.batched is not None:
            return forward(parameters, buffers, x, valid, self.batched, Tape())[2]
        own = {name: b.clone() for name, b in self.layout.split(buffers, buffers=True).items()}
        self._call({**self.layout.split(parameters), **own}, x, valid, training=True)
        return torch.cat([b.reshape(-1) for b in own.values()])

    def _call(
        self, tensors: dict[str, Tensor], x: Tensor, valid: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        head = self.module.get_submodule(self.layout.head)
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            with _mode(self.module, training, valid):
                logits = torch.func.functional_call(self.module, tensors, (x,))
        finally:
            hook.remove()
        if not seen:
            raise UsageError(
                f'the model answers without its module "{self.layout.head}"; name the module that makes the answer, '
                'such as head="classifier"'
            )
        return logits, seen[-1].flatten(1)

    # -- looking -------------------------------------------------------------------------------------------------

    def answers(self, personal: Personal, x: Tensor) -> Tensor:
        """Log-probabilities [b, classes] for raw samples; several experts are averaged in probability."""
        x = self.numbers(x)
        if isinstance(personal, Tensor):
            return F.log_softmax(self.forward(personal, x)[0], 1)
        logs = [F.log_softmax(self.forward(w, x)[0], 1) for w in personal.w]
        return torch.logsumexp(torch.stack(logs) + personal.share.clamp(min=1e-12).log()[:, None, None], 0)

    def evaluate(self, personal: Personal, data: Data) -> tuple[Tensor, Tensor]:
        """Mean loss and accuracy over all real samples, without augmentation."""
        loss = right = self.initial.new_zeros(())
        for start in range(0, data.y.shape[0], EVAL_BATCH):
            logs, y = (
                self.answers(personal, data.x[start : start + EVAL_BATCH]),
                data.y[start : start + EVAL_BATCH],
            )
            valid = torch.arange(start, start + y.shape[0], device=y.device) < data.size
            loss = loss + torch.where(valid, F.nll_loss(logs, y, reduction="none"), 0).sum()
            right = right + (valid & (logs.argmax(1) == y)).sum()
        size = data.size.clamp(min=1)
        return loss / size, right / size


def task_of(
    model: nn.Module,
    classes: int,
    *,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    head: str | None = None,
    buffers: str = "local",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    public: Tensor | None = None,
) -> Task:
    """The task of any nn.Module that maps a batch of samples to logits; the module itself is left as it was."""
    if buffers not in ("local", "average"):
        raise UsageError(
            f'buffers="{buffers}": batch-norm statistics are kept "local" or shared by "average"'
        )
    module = for_tasks(copy.deepcopy(model)).to(device=device, dtype=dtype)
    normalising = (BatchNorm, nn.GroupNorm, nn.LayerNorm)
    norms = [name for name, m in module.named_modules() if isinstance(m, normalising)]
    layout = layout_of(module, head, norms)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    first = layout.join({name: tensors[name].detach() for name in layout.names}).clone()
    channel = [torch.tensor(v, device=device, dtype=dtype).view(-1, 1, 1) if v else None for v in (mean, std)]
    public = None if public is None else public.to(device)
    return Task(
        module.requires_grad_(False), layout, first, classes, channel[0], channel[1], buffers, public=public
    )


def with_statistics(task: Task, personal: Personal, other: Personal) -> Personal:
    """The model with another's batch-norm statistics."""
    statistics = other.w[0, task.d :] if isinstance(other, Experts) else other[task.d :]
    if isinstance(personal, Experts):
        w = torch.cat([personal.w[:, : task.d], statistics.expand(personal.w.shape[0], -1)], 1)
        return Experts(w, personal.share)
    return torch.cat([personal[: task.d], statistics])


@lru_cache(maxsize=8)  # a copy from the host has no place inside a recorded program
def _bn_momenta(module: nn.Module, layout: Layout, device: torch.device, dtype: torch.dtype) -> Tensor:
    """How much of a batch's statistics goes into each buffer; 0 for what is no statistic."""
    norms = {name: m for name, m in module.named_modules() if isinstance(m, BatchNorm)}
    pieces = []
    for name, size in list(zip(layout.names, layout.sizes, strict=True))[layout.trained :]:
        norm = norms.get(name.rpartition(".")[0])
        pieces.append(torch.full((size,), float(norm.momentum or 0) if norm is not None else 0.0))
    return torch.cat([*pieces, torch.zeros(0)]).to(device, dtype)


@lru_cache(maxsize=256)
def _where(layout: Layout, parts: tuple[str, ...], device: torch.device) -> Tensor:
    """Layout.where, once per device: a copy from the host has no place inside a recorded program."""
    return layout.where(*parts).to(device)


def crop_and_flip(images: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    """Images [b, c, h, w] moved by shift - 4 pixels with zeros coming in, then mirrored where flip says so."""
    height, width = images.shape[-2:]
    down = torch.arange(height, device=images.device) + shift[:, :1] - 4  # [b, h]
    across = torch.arange(width, device=images.device)
    across = torch.where(flip[:, None], width - 1 - across, across) + shift[:, 1:] - 4  # [b, w]
    inside = ((down >= 0) & (down < height))[:, None, :, None] & ((across >= 0) & (across < width))[
        :, None, None, :
    ]
    rows = down.clamp(0, height - 1)[:, None, :, None].expand(-1, images.shape[1], -1, width)
    columns = across.clamp(0, width - 1)[:, None, None, :].expand(-1, images.shape[1], height, -1)
    return torch.where(inside, images.gather(2, rows).gather(3, columns), 0)


@contextmanager
def _mode(module: nn.Module, training: bool, valid: Tensor | None) -> Iterator[None]:
    module.train(training)
    norms = [m for m in module.modules() if isinstance(m, BatchNorm)]
    for norm in norms:
        norm.valid = valid
    try:
        yield
    finally:
        for norm in norms:
            norm.valid = None
