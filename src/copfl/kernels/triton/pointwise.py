"""An elementwise function of rows as one kernel, written from the operations that the function calls.

torch.compile does it in seconds per function, after ten seconds of imports; this takes milliseconds, and
Triton keeps the kernel on disk. A function with an operation that is not in the tables has no kernel.
"""

# mypy: ignore-errors
import hashlib
import linecache
import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.overrides import TorchFunctionMode

from copfl.kernels.fused import aligned
from copfl.kernels.triton.compiling import launch

BLOCK = 512  # four numbers per thread: more would take registers that loads in flight need
NUMBERS = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)
TYPES = {dtype: f"tl.{dtype}".replace("torch.", "") for dtype in NUMBERS} | {torch.bool: "tl.int1"}
# By the name of torch's function, without the underscores of an operator.
OPERATIONS = {
    "add": "{0} + {1}", "radd": "{0} + {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}", "mul": "{0} * {1}",
    "rmul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}", "abs": "tl.abs({0})", "sqrt": "tl.sqrt({0})",
    "and": "{0} & {1}", "or": "{0} | {1}", "invert": "{0} == 0",
}  # fmt: skip
EXACT = {"div": "_quotient({0}, {1})", "sqrt": "_root({0})"}  # in float32; the others are off by two
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
# How an argument is read: rows [N, d], or a number per row [N, 1]; where all rows are one, its stride is 0.
PLACES = {"rows": "row * s{0} + place * t{0}", "column": "row * s{0}"}


@triton.jit
def _exp2(y):
    """2^y to the last bit of float32: tl.exp2 is off by four, and 1 - beta^t cancels."""
    whole = tl.floor(y + 0.5)
    z = (y - whole) * 0.6931471805599453
    tail = 0.5 + z * (1 / 6 + z * (1 / 24 + z * (1 / 120 + z * (1 / 720 + z * (1 / 5040)))))
    return (1.0 + z * (1.0 + z * tail)) * tl.exp2(whole)


# A GPU's exact division and root take a slow path for zeros, and dropout leaves zeros in gradients.


@triton.jit
def _quotient(x, y):
    """x / y, exactly rounded."""
    is_zero = x == 0
    numerator = tl.where(is_zero, 5.9604644775390625e-08, x)  # 2^-24: over the smallest y it is finite
    quotient = tl.div_rn(numerator, y)
    return tl.where(is_zero, x * quotient, quotient)


@triton.jit
def _root(x):
    """The root of x, exactly rounded."""
    is_zero = x == 0
    return tl.where(is_zero, x, tl.sqrt_rn(tl.where(is_zero, 1.0, x)))


class _Writer(TorchFunctionMode):
    """Writes a line for every operation. Not a TorchDispatchMode, which imports torch's compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.names, self.kept = [], {}, []

    def name(self, tensor: Tensor, name: str) -> str:
        self.kept.append(tensor)  # else its id might become another's
        self.names[id(tensor)] = name
        return name

    def value(self, x, dtype: torch.dtype) -> str:
        """The operand in this dtype."""
        if isinstance(x, bool | int | float) and math.isfinite(x):
            return f"tl.full([], {x!r}, {TYPES[dtype]})"
        if id(x) not in self.names:
            raise KeyError(x)
        name = self.names[id(x)]
        if x.dtype == dtype:
            return name
        return f"({name} != 0)" if dtype == torch.bool else f"{name}.to({TYPES[dtype]})"

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            text = self.text(function.__name__.strip("_"), args, kwargs or {}, result.dtype)
            name = self.name(result, f"v{len(self.lines)}")
            self.lines.append(f"{name} = ({text}).to({TYPES[result.dtype]})")
        return result

    def text(self, name: str, args, options, out: torch.dtype) -> str:
        """The operation in Triton's language."""
        if name == "to" and len(args) == 2 and args[1] == out:
            return self.value(args[0], out)
        if name == "where" and len(args) == 3:
            either = ", ".join(self.value(a, out) for a in args[1:])
            return f"tl.where({self.value(args[0], torch.bool)}, {either})"
        if name in COMPARISONS:
            return f" {COMPARISONS[name]} ".join(self.value(a, torch.result_type(*args)) for a in args)
        if name == "rpow" and isinstance(args[1], float) and args[1] > 0:
            power = "_exp2" if out == torch.float32 else "tl.exp2"
            return f"{power}({self.value(args[0], out)} * {math.log2(args[1])!r})"
        if name not in OPERATIONS or options.keys() - {"alpha"} or (name == "invert" and out != torch.bool):
            raise KeyError(name)
        operands = [self.value(a, out) for a in args]
        if "alpha" in options:
            operands[1] = f"({self.value(options['alpha'], out)} * {operands[1]})"
        return (OPERATIONS | EXACT if out == torch.float32 else OPERATIONS)[name].format(*operands)


def _kind(t: Tensor) -> str:
    return "rows" if t.shape[1] > 1 else "column"


@cache
def _kernel(function, signature):
    """The kernel for arguments of these kinds, and the dtypes of its results; None: the function has none."""
    writer, values, reads, names = _Writer(), [], [], []
    for n, (kind, what) in enumerate(signature):
        values.append(what if kind == "value" else torch.ones(1, 1 + (kind == "rows"), dtype=what))
        if kind != "value":
            guard = ", mask=inside" if kind == "rows" else ""
            whole = " != 0" if what == torch.bool else ""
            name = writer.name(values[-1], f"x{n}")
            reads.append(f"{name} = tl.load(p{n} + {PLACES[kind].format(n)}{guard}){whole}")
            names.append(f"p{n}, s{n}, t{n}")
    try:
        with writer:
            results = function(*values)
    except KeyError:  # an operation or a dtype that is not in the tables
        return None
    stores = []
    for n, result in enumerate(results):
        kept = "tl.uint8" if result.dtype == torch.bool else TYPES[result.dtype]
        text = f"tl.zeros([BLOCK], {kept}) + {writer.value(result, result.dtype)}.to({kept})"
        stores.append(f"tl.store(o{n} + row * stride + place, ({text}).to({kept}), mask=inside)")
        names.append(f"o{n}")
    lines = [
        f"@triton.jit\ndef pointwise({', '.join(names)}, stride, rows, length, BLOCK: tl.constexpr):",
        "row = (tl.program_id(0) % rows).to(tl.int64)",  # all rows of a place: a common vector is read once
        "place = tl.program_id(0) // rows * BLOCK + tl.arange(0, BLOCK)",
        # Four numbers are read and written, or none: at the end of a row, those in its padding too.
        "inside = tl.max_constancy(place < length, [4])",
        *reads, *writer.lines, *stores,
    ]  # fmt: skip
    source = "\n    ".join(lines) + "\n"
    file = f"<copfl pointwise {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # Triton reads it there
    functions = {"_exp2": _exp2, "_quotient": _quotient, "_root": _root}
    made = {"tl": tl, "triton": triton, **functions, "__name__": __name__}
    exec(compile(source, file, "exec"), made)
    return made["pointwise"], [result.dtype for result in results]


def results_of(function, given: list) -> tuple[Tensor, ...] | None:
    """function(*given) as rows [N, d], aligned for matrix products; None: it has no kernel."""
    tensors = [a for a in given if isinstance(a, Tensor)]
    like = next(t for t in tensors if _kind(t) == "rows")
    if any(t.device != like.device for t in tensors):
        return None
    signature = tuple((_kind(a), a.dtype) if isinstance(a, Tensor) else ("value", a) for a in given)
    if (found := _kernel(function, signature)) is None:
        return None
    kernel, dtypes = found
    results = tuple(aligned(like.shape, dtype, like.device) for dtype in dtypes)
    arguments = [part for t in tensors for part in (_bytes(t), *t.stride())]
    (rows, length), stride = like.shape, results[0].stride(0)
    grid = (triton.cdiv(length, BLOCK) * rows,)
    launch(kernel, grid, *arguments, *map(_bytes, results), stride, rows, length, BLOCK=BLOCK)
    return results


def _bytes(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype == torch.bool else t
