"""Checks the sizes of masks that the Triton kernel selects, also on a GPU that other processes use.

    python benchmarks/check_masks.py [--seconds 12] [--old FILE]

A race between warps does not appear on an idle GPU: start this while runs are active (with NVIDIA's MPS on).
`--old` is another version of kernels/triton/vectors.py, such as one from `git show`, which is checked first.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

import copfl

PRESENT = Path(copfl.__file__).parent / "kernels" / "triton" / "vectors.py"
ROWS, ENTRIES, TENSORS = 30, 4_233_034, 60  # clients, and about the size of a pruned ResNet-18


def loaded(path: Path, name: str) -> ModuleType:
    """The file as a module: Triton reads its source."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def errors(kernels: ModuleType, keys: torch.Tensor, sizes: tuple[int, ...]) -> int:
    """Number of rows and segments in which the kernel does not select a quarter of the entries."""
    quarters = torch.tensor([size // 4 for size in sizes], device=keys.device)
    expected = quarters.expand(len(keys), len(sizes)).contiguous()
    mask = kernels.largest(keys, expected, 31, sizes)
    counts = torch.stack([part.sum(1) for part in mask.split(list(sizes), 1)], 1)
    return int((counts != expected).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--old", type=Path, help="another version of vectors.py")
    args = parser.parse_args()
    versions = {"old": loaded(args.old, "old_vectors")} if args.old else {}
    versions["present"] = loaded(PRESENT, "present_vectors")
    keys = torch.randint(0, 2**31 - 1, (ROWS, ENTRIES), device="cuda", dtype=torch.int32)
    length = ENTRIES // TENSORS
    last = ENTRIES - length * (TENSORS - 1)
    segments = {"rows": (ENTRIES,), "tensors": (*[length] * (TENSORS - 1), last)}
    failed = 0
    for name, kernels in versions.items():
        wrong, tried = dict.fromkeys(segments, 0), dict.fromkeys(segments, 0)
        started = time.perf_counter()
        while time.perf_counter() - started < args.seconds:
            for kind, sizes in segments.items():
                wrong[kind] += errors(kernels, keys, sizes)
                tried[kind] += ROWS * len(sizes)
        counts = ", ".join(f"{wrong[kind]:,} of {tried[kind]:,} {kind}" for kind in segments)
        print(f"{name}: wrong in {counts}", flush=True)
        failed = sum(wrong.values())
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
