"""Whether the kernel that chooses a mask's entries chooses as many as it should, also on a GPU that others keep busy.

    python benchmarks/check_masks.py [--seconds 12] [--old FILE]

No test can see a race between warps on a quiet GPU: start this along with other runs (with NVIDIA's MPS on). `--old` is
another version of gpu_kernels/vectors.py, such as one from `git show`, to try before the present one.
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

ROWS, ENTRIES, TENSORS = 30, 4_233_034, 60  # clients, and about what lives of ResNet-18


def version(path: Path, name: str) -> ModuleType:
    """The file as a module: Triton wants to read its source."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def wrong(kernels: ModuleType, keys: torch.Tensor, sizes: tuple[int, ...]) -> int:
    """In how many rows and stretches a quarter was asked for and something else was chosen."""
    asked = torch.tensor([size // 4 for size in sizes], device="cuda").expand(ROWS, len(sizes)).contiguous()
    chosen = kernels.largest(keys, asked, 31, sizes)
    counts = torch.stack([part.sum(1) for part in chosen.split(list(sizes), 1)], 1)
    return int((counts != asked).sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--old", type=Path)
    args = parser.parse_args()
    present = Path(copfl.__file__).parent / "gpu_kernels" / "vectors.py"
    versions = {"old": version(args.old, "old_vectors")} if args.old else {}
    versions["present"] = version(present, "present_vectors")
    keys = torch.randint(0, 2**31 - 1, (ROWS, ENTRIES), device="cuda", dtype=torch.int32)
    cut = ENTRIES // TENSORS
    ways = {"rows": (ENTRIES,), "tensors": (*[cut] * (TENSORS - 1), ENTRIES - cut * (TENSORS - 1))}
    failed = 0
    for name, kernels in versions.items():
        found, tried, clock = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0), time.perf_counter()
        while time.perf_counter() - clock < args.seconds:
            for way, sizes in ways.items():
                found[way] += wrong(kernels, keys, sizes)
                tried[way] += ROWS * len(sizes)
        print(
            name, "wrong in", ", ".join(f"{found[way]:,} of {tried[way]:,} {way}" for way in ways), flush=True
        )
        failed = sum(found.values())
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
