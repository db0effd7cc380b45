"""An elementwise function of rows as one kernel, written from the operations that the function calls.

torch.compile does the same in seconds per function, after ten seconds of imports; this takes milliseconds, and
Triton keeps the kernel on disk. A function with an operation that is not in the tables has no kernel.
"""

# mypy: ignore-errors
from __future__ import annotations

import hashlib
import linecache
import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.overrides import TorchFunctionMode

BLOCK = 1024
TYPES = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}
# By the name of torch's function, without the underscores of an operator.
ARITHMETIC = {
    "add": "{0} + {1}", "radd": "{0} + {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}", "mul": "{0} * {1}",
    "rmul": "{0} * {1}", "div": "{0} / {1}", "truediv": "{0} / {1}", "rtruediv": "{1} / {0}", "neg": "-{0}",
    "abs": "tl.abs({0})", "sqrt": "tl.sqrt({0})", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}",
}  # fmt: skip
# In float32: Triton's own are off by up to two units.
EXACT = {"div": "tl.div_rn({0}, {1})", "truediv": "tl.div_rn({0}, {1})", "rtruediv": "tl.div_rn({1}, {0})",
         "sqrt": "tl.sqrt_rn({0})"}  # fmt: skip
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
# How an argument is read: rows [N, d], a number per row [N, 1], a vector [d] in common, or one number.
PLACES = {
    "rows": "row * s{0} + place * t{0}",
    "column": "row * s{0}",
    "vector": "place * t{0}",
    "number": "0",
}
SHAPES = {"rows": (1, 2), "column": (1, 1), "vector": (2,), "number": ()}


class Unknown(Exception):
    """An operation or an argument that has no form here."""


class _Writer(TorchFunctionMode):
    """Writes a line for every operation of the function, which runs on tensors of an entry or two.

    Not a TorchDispatchMode, which imports the compiler.
    """

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
            raise Unknown("a tensor from outside")
        name = self.names[id(x)]
        if x.dtype == dtype:
            return name
        return f"({name} != 0)" if dtype == torch.bool else f"{name}.to({TYPES[dtype]})"

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            if result.dtype not in TYPES:
                raise Unknown(str(result.dtype))
            text = self.text(function.__name__.strip("_"), args, kwargs or {}, result.dtype)
            name = self.name(result, f"v{len(self.lines)}")
            self.lines.append(f"{name} = ({text}).to({TYPES[result.dtype]})")
        return result

    def text(self, name: str, args, options, out: torch.dtype) -> str:
        """The operation in Triton's language."""
        if name == "to" and len(args) == 2 and args[1] == out and not options:
            return self.value(args[0], out)
        if name == "where" and len(args) == 3:
            return f"tl.where({self.value(args[0], torch.bool)}, {', '.join(self.value(a, out) for a in args[1:])})"
        if name in COMPARISONS and len(args) == 2:
            left, right = (self.value(a, torch.result_type(*args)) for a in args)
            return f"{left} {COMPARISONS[name]} {right}"
        if name == "invert" and out == torch.bool:
            return f"{self.value(args[0], out)} == 0"
        if name == "rpow" and isinstance(args[1], float) and args[1] > 0:  # in float64: 1 - beta^t cancels
            return f"tl.exp2({self.value(args[0], torch.float64)} * {math.log2(args[1])!r})"
        if name not in ARITHMETIC or len(args) > 2 or options.keys() - {"alpha"}:
            raise Unknown(name)
        operands = [self.value(a, out) for a in args]
        if "alpha" in options:
            operands[1] = f"({self.value(options['alpha'], out)} * {operands[1]})"
        table = EXACT if out == torch.float32 and name in EXACT else ARITHMETIC
        return table[name].format(*operands)


def _kind(t: Tensor) -> str:
    long = t.dim() > 0 and t.shape[-1] > 1
    return ("rows" if long else "column") if t.dim() == 2 else "vector" if long else "number"


@cache
def _kernel(function, signature):
    """The kernel of a function for arguments of these kinds, and the dtypes of its results."""
    writer, values, reads, names = _Writer(), [], [], []
    for n, (kind, what) in enumerate(signature):
        if kind == "value":
            values.append(what)
            continue
        if what not in TYPES:
            raise Unknown(str(what))
        values.append(torch.ones(SHAPES[kind], dtype=what))
        guard = ", mask=inside" if kind in ("rows", "vector") else ""
        whole = " != 0" if what == torch.bool else ""
        name = writer.name(values[-1], f"x{n}")
        reads.append(f"{name} = tl.load(p{n} + {PLACES[kind].format(n)}{guard}){whole}")
        names.append(f"p{n}, s{n}, t{n}")
    with writer:
        results = function(*values)
    stores = []
    for n, result in enumerate(results):
        kept = "tl.uint8" if result.dtype == torch.bool else TYPES[result.dtype]
        text = f"tl.zeros([BLOCK], {kept}) + {writer.value(result, result.dtype)}.to({kept})"
        stores.append(f"tl.store(o{n} + row * stride + place, ({text}).to({kept}), mask=inside)")
        names.append(f"o{n}")
    lines = [
        f"def pointwise({', '.join(names)}, stride, length, BLOCK: tl.constexpr):",
        "row = tl.program_id(1).to(tl.int64)",
        "place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "inside = place < length",
        *reads,
        *writer.lines,
        *stores,
    ]
    source = "@triton.jit\n" + "\n    ".join(lines) + "\n"
    file = f"<copfl pointwise {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        file,
    )  # Triton reads it there
    made = {"tl": tl, "triton": triton, "__name__": __name__}
    exec(compile(source, file, "exec"), made)
    return made["pointwise"], [result.dtype for result in results]


@cache
def _kernel_or_none(function, signature):
    try:
        return _kernel(function, signature)
    except Unknown:
        return None


def results_of(function, given: list) -> tuple[Tensor, ...] | None:
    """function(*given) as rows [N, d], aligned for matrix products; None: it has no kernel."""
    from copfl.kernels.fused import aligned

    tensors = [a for a in given if isinstance(a, Tensor)]
    like = next(t for t in tensors if t.dim() == 2 and t.shape[1] > 1)
    if any(t.dim() > 2 or t.device != like.device for t in tensors):
        return None
    signature = tuple((_kind(a), a.dtype) if isinstance(a, Tensor) else ("value", a) for a in given)
    if (found := _kernel_or_none(function, signature)) is None:
        return None
    kernel, dtypes = found
    results = tuple(aligned(like, dtype) for dtype in dtypes)
    arguments = []
    for t in tensors:
        across = t.stride(-1) if t.dim() and t.shape[-1] > 1 else 0
        arguments += [_bytes(t), t.stride(0) if t.dim() == 2 else 0, across]
    (rows, length), stride = like.shape, results[0].stride(0)
    kernel[(triton.cdiv(length, BLOCK), rows)](*arguments, *map(_bytes, results), stride, length, BLOCK=BLOCK)
    return results


def _bytes(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype == torch.bool else t


@triton.jit
def _sum_rows(healthy, rows, total, stride, length, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < length
    found = tl.zeros([BLOCK], dtype=total.dtype.element_ty)
    for n in range(ROWS):
        if tl.load(healthy + n) != 0:
            found += tl.load(rows + place, mask=inside, other=0)
        rows += stride
    tl.store(total + place, found, mask=inside)


def sum_rows(healthy: Tensor, rows: Tensor) -> Tensor:
    """The sum of the healthy rows [N, d], in their order."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    total = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)
    _sum_rows[(triton.cdiv(rows.shape[1], BLOCK),)](
        healthy.contiguous().view(torch.uint8), rows, total, rows.stride(0), rows.shape[1], ROWS=len(rows), BLOCK=BLOCK
    )  # fmt: skip
    return total
