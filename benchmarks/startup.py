"""Seconds from the command to the end of its first round on a GPU: `python benchmarks/startup.py`

CO-PFL, ResNet-18, 10 clients of 100 random images. The first start has empty caches of compiled kernels, the others
have those of the first. All but the last are ended after their first round. `--profile FOLDER` repeats them and
writes the functions that took longest. `--phases` instead prints what the seconds of a start go to; on a CPU those of
the processor, of the digits and a small CNN.
"""

from __future__ import annotations

import argparse
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import random_images

RUN = [
    "run",
    "--algorithm=copfl",
    "--model=resnet18",
    "--rounds=4",
    "--no-local-baseline",
    "--set=partition.per_client=2",
]


def start(
    folder: Path, name: str, device: str, profile: Path | None = None, *, to_the_end: bool = True
) -> dict[str, float]:
    """Seconds from the command until each round, as the run folder appears; else the first round alone."""
    rounds, out = folder / name / "timing.jsonl", folder / name
    data = f"--dataset={folder / 'images.npz'}"
    # XDG_CACHE_HOME is where copfl keeps compiled kernels; the others are what torch and Triton would take.
    environment = os.environ | {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TMPDIR": str(folder / "tmp"),
        "TRITON_HOME": str(folder / "tmp"),
    }
    for cache in ("cache", "tmp"):
        (folder / cache).mkdir(exist_ok=True)
    measure = ["-m", "cProfile", "-o", str(folder / "profile")] if profile else []
    began = time.perf_counter()
    command = [sys.executable, *measure, "-m", "copfl", *RUN, data, f"--device={device}", f"--out={out}"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    found: dict[str, float] = {}
    while process.poll() is None:
        done = len(rounds.read_text().splitlines()) if rounds.exists() else 0
        for number in range(done):
            found.setdefault(f"round {number + 1}", time.perf_counter() - began)
        if out.exists():
            found.setdefault("folder", time.perf_counter() - began)
        if done and not to_the_end:
            process.terminate()
            process.wait()
            return found
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"copfl run ended with {process.returncode}")
    if profile:
        with profile.open("w") as file:
            pstats.Stats(str(folder / "profile"), stream=file).sort_stats("cumulative").print_stats(150)
    return found | {"end": time.perf_counter() - began}


PHASES = """
import builtins, json, sys, time
now, marks = CLOCK, []
def mark(name):
    marks.append((name, now()))
mark("python")
def then(module, name, mark_name):
    function = getattr(module, name)
    def called(*given, **more):
        result = function(*given, **more)
        mark(mark_name)
        return result
    setattr(module, name, called)
imported, begun = builtins.__import__, set()
AFTER = {"copfl.cli.main": "command line", "torch": "torch", "copfl.experiment.run": "copfl"}
def watched(name, *more, **named):
    is_first = name not in begun
    begun.add(name)
    result = imported(name, *more, **named)
    if is_first and name in AFTER:
        mark(AFTER[name])
    if is_first and name == "copfl.experiment.preparation":
        then(sys.modules[name], "prepare", "data, model, engine")
    if is_first and name == "copfl.experiment.run":
        then(sys.modules["copfl.engine.simulate"], "train_part", "first round")
    return result
builtins.__import__ = watched  # as the command imports, so that it is measured as it is
import copfl.cli.main
try:
    copfl.cli.main.main()
except SystemExit:
    pass
print(json.dumps(marks), file=sys.stderr)
"""


def phases(device: str) -> dict[str, float]:
    """The seconds that each phase of a start takes, up to the first round; on a CPU those of the processor."""
    clock = "time.process_time" if device == "cpu" else f"(lambda began={time.time()!r}: time.time() - began)"
    with tempfile.TemporaryDirectory() as folder:
        run = [
            "run",
            "--rounds=1",
            "--no-local-baseline",
            "--quiet",
            f"--out={folder}/run",
            f"--device={device}",
        ]
        if device != "cpu":
            x, y = random_images(10, 150)
            np.savez(f"{folder}/images.npz", x=x, y=y)
            run += [*RUN[1:3], RUN[-1], f"--dataset={folder}/images.npz"]
        code = PHASES.replace("CLOCK", clock)
        done = subprocess.run([sys.executable, "-c", code, *run], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"copfl run ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, float] = {}
    last = 0.0
    for name, seconds in json.loads(done.stderr.splitlines()[-1]):
        if name not in found:
            found[name], last = seconds - last, seconds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path, default=Path("startup.json"))
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--warm", type=int, default=3, help="starts after the first")
    options = parser.parse_args()
    if options.phases:
        rows = [phases(options.device) for _ in range(3)]
        best = {name: min(row[name] for row in rows) for name in rows[0]}
        print({name: round(seconds, 2) for name, seconds in best.items()})
        options.out.write_text(json.dumps(best, indent=1) + "\n")
        return
    x, y = random_images(10, 150)
    table = {}
    for profile in (None, options.profile) if options.profile else (None,):
        folder = Path(tempfile.mkdtemp())
        np.savez(folder / "images.npz", x=x, y=y)
        for number in range(1 + options.warm):
            name = f"warm {number}" if number else "first"
            is_whole = bool(profile) or number == options.warm
            found = start(
                folder, name, options.device, profile and profile / f"{name}.txt", to_the_end=is_whole
            )
            print(name, {key: round(value, 2) for key, value in found.items()}, flush=True)
            table[f"{name}, profiled" if profile else name] = found
            options.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
