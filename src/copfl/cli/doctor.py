"""`copfl doctor`: what is installed, and whether it trains."""

import importlib.util
import os
import platform
import runpy
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from copfl import __version__
from copfl.cli.options import option
from copfl.errors import EXTRAS

ROUNDS, CHANCE = 10, 0.1  # of the self-test; the digits have ten classes


def doctor(
    *,
    self_test: Annotated[
        bool,
        option(
            "Training", "Train a small federation on each device; default: on.", "--self-test/--no-self-test"
        ),
    ] = True,
) -> None:
    """Show versions, extras, GPUs and folders, and train for a few seconds. Exit code 1 if that fails."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.platform()}, {cores} CPU cores"
    sections = {
        "Versions": [version_line(), f"Python {platform.python_version()} ({sys.executable})", system],
        "GPUs": _gpus(),
        "Extras": [_extra(name, packages) for name, packages in EXTRAS.items()],
        "Folders": _folders(),
    }
    for title, lines in sections.items():
        print(f"{title}:", *(f"  {line}" for line in lines), sep="\n", flush=True)
    if self_test:
        print("Self-test:")
        passed = [_trains(device) for device in _devices()]
        if not all(passed):
            raise typer.Exit(1)


def version_line() -> str:
    """Such as "copfl 0.2.0, torch 2.13.0, CUDA 13.0"; torch is not imported."""
    found = importlib.util.find_spec("torch")
    folder = Path(found.origin).parent if found and found.origin else Path()
    torch = runpy.run_path(str(folder / "version.py"))
    return f"copfl {__version__}, torch {torch['__version__']}, CUDA {torch['cuda'] or 'none'}"


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        reason = "no driver or no GPU" if torch.version.cuda else "this torch is built without CUDA"
        return [f"none that torch can use: {reason}; runs use the CPU"]
    gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return [f"cuda:{n}  {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for n, gpu in enumerate(gpus)]


def _extra(name: str, packages: tuple[str, ...]) -> str:
    """The versions of an extra's packages, or how to install those that are missing."""
    versions = {package: _version(package) for package in packages}
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        state = f"without {', '.join(missing)}; pip install 'copfl[{name}]'"
    else:
        state = ", ".join(f"{package} {version}" for package, version in versions.items())
    return f"{name:{max(map(len, EXTRAS))}}  {state}"


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _folders() -> list[str]:
    from copfl.models.text import cache_folder

    named = {name: os.environ.get(name) for name in ("COPFL_DATA", "COPFL_MODELS")}
    lines = [f"{name}: {_state(Path(path)) if path else 'not set'}" for name, path in named.items()]
    return [*lines, f"cache of tokens (COPFL_CACHE): {_state(cache_folder())}"]


def _state(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}, which does not exist yet"
    return str(folder) if os.access(folder, os.W_OK) else f"{folder}, which is not writable"


def _devices() -> list[str]:
    import torch

    return ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count() * torch.cuda.is_available()))]


def _trains(device: str) -> bool:
    """Whether a small federation learns on the device; prints the result."""
    import copfl

    start = time.perf_counter()
    try:
        result = copfl.run("copfl", "digits", model="mlp", clients=3, rounds=ROUNDS, device=device)
        accuracy = float(result.accuracy[-1].mean())
        passed, text = accuracy > 2 * CHANCE, f"accuracy {100 * accuracy:.1f} % after {ROUNDS} rounds"
    except Exception as error:  # a broken installation may raise anything, and the other devices count too
        passed, text = False, f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    print(f"  {device}: {'passed' if passed else 'FAILED'}, {text}, {seconds:.1f} s", flush=True)
    return passed
