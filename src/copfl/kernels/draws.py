"""Random numbers inside a model, as dropout draws them, as functions of a key instead of a generator's state.

Every engine draws the same numbers: one client at a time, under vmap, or with the clients in one batch. Its initial
weights come from torch's generators, with a seed.
"""

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from copfl.errors import UsageError
from copfl.kernels.fused import as_rows, compiles, over_rows
from copfl.kernels.private_torch import mapped

CONSTANTS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


def hashed(*counters: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 well-mixed bits for every combination of the counters, which broadcast against each other."""
    step, first, second = map(np.uint64, CONSTANTS)
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # the hash relies on wrapping around
        for counter in counters:
            state = (state ^ np.asarray(counter, np.uint64)) + step
            state = (state ^ (state >> np.uint64(30))) * first
            state = (state ^ (state >> np.uint64(27))) * second
            state = state ^ (state >> np.uint64(31))
    return state


def mixed(*counters: int | Tensor) -> Tensor:
    """`hashed` of int64 tensors or numbers."""
    step, first, second = (constant - 2**64 for constant in CONSTANTS)
    device = next(counter.device for counter in counters if isinstance(counter, Tensor))
    state = torch.zeros((), dtype=torch.int64, device=device)
    for counter in counters:
        state = (state ^ counter).add_(step)  # new, so that the rest may be written in place
        state.bitwise_xor_(shift_right(state, 30)).mul_(first)
        state.bitwise_xor_(shift_right(state, 27)).mul_(second)
        state.bitwise_xor_(shift_right(state, 31))
    return state


def shift_right(bits: Tensor, places: int) -> Tensor:
    """A shift that fills with zeros; torch's own repeats the sign bit."""
    return (bits >> places).bitwise_and_(2 ** (64 - places) - 1)


class Keyed(NamedTuple):
    """A batch with the key of its random numbers."""

    x: Any  # a tensor, or tensors by name
    key: Tensor  # [] int64


class Draws(TorchFunctionMode):
    """Within it, torch's random functions depend on the key, the call and the place alone.

    The key is one client's [], or one per client [N] where the samples of N clients are one batch.
    """

    def __init__(self, key: Tensor, calls: int = 0) -> None:
        super().__init__()
        self.key, self.calls = key, calls

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in RANDOM:
            return RANDOM[name](self, *args, **(kwargs or {}))
        if name == "multi_head_attention_forward":
            with self:
                return _unchecked(function)(*args, **(kwargs or {}))
        if name in UNKNOWN:
            raise UsageError(
                f"the model calls {name} in training, whose random numbers copfl cannot draw per client; "
                f"known are {', '.join(sorted(RANDOM))}"
            )
        return function(*args, **(kwargs or {}))

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Numbers in [0, 1), which the client, the call and the place within the client's part determine."""
        self.calls += 1
        clients = len(self.key) if self.key.dim() else 1
        size = math.prod(shape)
        if self.key.dim() and (not shape or shape[0] % clients):
            raise NotBatched(f"random numbers of shape {list(shape)} are not a row per sample")
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        with torch.no_grad():
            if compiles(self.key):
                rows = _uniform(self.key, self.calls, size // clients, wide)
                return rows.view(tuple(shape))
            if not self.key.dim() and self.key.device.type == "cpu" and not mapped():
                # numpy's operations on a few thousand numbers take a quarter of the time of torch's.
                bits = hashed(int(self.key) % 2**64, self.calls, np.arange(size, dtype=np.uint64))
                drawn = torch.from_numpy((bits >> np.uint64(40)).astype(np.int64))
                return (drawn.to(wide) * 2**-24).view(tuple(shape))
            place = torch.arange(size // clients, device=self.key.device)
            mix = mixed(self.key[..., None], self.calls, place)  # [N, size / N], or [size]
            # 24 bits, as many as a float32 has: the same draws in every precision.
            return (shift_right(mix, 40).to(wide) * 2**-24).view(tuple(shape))

    def chosen(self, shape: Sequence[int], probability: float | Tensor, like: Tensor) -> Tensor:
        """1 with this probability and else 0."""
        return (self.uniform(shape, like) < probability).to(like.dtype)

    def dropout(self, x: Tensor, probability: float) -> Tensor:
        """x where a draw is below the probability, over the probability, and else 0."""
        if not compiles(self.key):
            return x * self.chosen(x.shape, probability, x) / max(probability, 1e-12)
        self.calls += 1
        if self.key.dim() and (not x.dim() or x.shape[0] % len(self.key)):
            raise NotBatched(f"random numbers of shape {list(x.shape)} are not a row per sample")
        return _dropped(x, self.key, self.calls, probability)


class _Dropout(torch.autograd.Function):
    """Dropout in one kernel. The backward pass draws the same numbers again, so that none are kept."""

    @staticmethod
    def forward(x: Tensor, keys: Tensor, call: int, probability: float) -> Tensor:
        from copfl.kernels.triton import random

        return random.dropout(x, keys, call, probability)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, keys, ctx.call, ctx.probability = inputs
        ctx.save_for_backward(keys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (keys,) = ctx.saved_tensors
        return _dropped(grads[0], keys, ctx.call, ctx.probability), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        return _dropped(*as_rows(info.batch_size, in_dims, arguments)), 0


_dropped: Callable[..., Tensor] = _Dropout.apply


@over_rows
def _uniform(keys: Tensor, call: int, size: int, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1) of one key or of several, in one kernel."""
    from copfl.kernels.triton import random

    return random.uniform(keys, call, size, dtype)


Draw = Callable[[Draws, Sequence[int], Tensor], Tensor]  # of the shape and the dtype of a tensor


class NotBatched(RuntimeError):
    """The model draws numbers for a whole batch, which then has to be one client's."""


def _dropout(draws: Draws, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return x
    return draws.dropout(x, 1 - p)


def _feature_dropout(
    draws: Draws, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0:
        return x
    shape = (*x.shape[:2], *[1] * (x.dim() - 2))
    return x * draws.chosen(shape, 1 - p, x) / max(1 - p, 1e-12)


def _sized(draw: Draw) -> Callable[..., Tensor]:
    """A function of the size, as torch.rand."""

    def random(draws: Draws, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        like = torch.empty(0, dtype=dtype or torch.get_default_dtype(), device=draws.key.device)
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        return draw(draws, shape, like).to(like.dtype)

    return random


def _like(draw: Draw) -> Callable[..., Tensor]:
    """A function of a tensor, as torch.rand_like."""
    return lambda draws, x, **_: draw(draws, x.shape, x).to(x.dtype)


def _gauss(draws: Draws, shape: Sequence[int], like: Tensor) -> Tensor:
    """Standard normal numbers, by the Box-Muller transform."""
    first, second = (draws.uniform(shape, like) for _ in range(2))
    normal: Tensor = (-2 * (1 - first).log()).sqrt() * (2 * math.pi * second).cos()
    return normal


def _attention(
    draws: Draws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """scaled_dot_product_attention, with its dropout on the weights."""
    if dropout_p == 0:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **options)
    if options.get("enable_gqa"):
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (options.get("scale") or query.shape[-1] ** -0.5)
    if is_causal:
        places = [torch.arange(n, device=query.device) for n in scores.shape[-2:]]
        scores = scores.masked_fill(places[1] > places[0][:, None], -math.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
    return _dropout(draws, scores.softmax(-1), dropout_p) @ value


def _written(x: Tensor, values: Tensor, start: float = 0.0, scale: float = 1.0) -> Tensor:
    """The values, also in the tensor that the model passed; under vmap they have an axis that it lacks."""
    values = (start + scale * values).to(x.dtype)
    return values if mapped() else x.copy_(values)


@lru_cache(maxsize=8)
def _unchecked(function: types.FunctionType) -> Callable[..., Any]:
    """A copy of torch's function that does not ask for a mode again, so that the mode sees what it calls."""
    silent = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *_: False)
    names = function.__globals__ | silent
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


RANDOM: dict[str, Callable[..., Tensor]] = {
    "dropout": _dropout,
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d", "feature_dropout"), _feature_dropout),
    "bernoulli": lambda draws, x, p=None, **_: draws.chosen(x.shape, x if p is None else p, x),
    "bernoulli_": lambda draws, x, p=0.5, **_: _written(x, draws.chosen(x.shape, p, x)),
    "uniform_": lambda draws, x, a=0.0, b=1.0, **_: _written(x, draws.uniform(x.shape, x), a, b - a),
    "normal_": lambda draws, x, mean=0.0, std=1.0, **_: _written(x, _gauss(draws, x.shape, x), mean, std),
    "rand": _sized(Draws.uniform),
    "randn": _sized(_gauss),
    "rand_like": _like(Draws.uniform),
    "randn_like": _like(_gauss),
    "scaled_dot_product_attention": _attention,
}
UNKNOWN = {"alpha_dropout", "feature_alpha_dropout", "multinomial", "poisson"}
UNKNOWN |= {"randint", "randint_like", "randperm"}


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's own generators begin with this seed; afterwards the CPU's goes on as if nothing was drawn."""
    with torch.random.fork_rng(devices=[]):
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # manual_seed would note down the stack for each kind of GPU, which takes longer than a small model
            torch.default_generator.manual_seed(seed)
        yield
