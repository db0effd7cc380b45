"""A file imports only from a lower level or from its own room."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import copfl

SOURCE = Path(copfl.__file__).parent

# A room is a package, or the files of one level that stand directly under copfl/. A file of a package may have a level
# of its own, below its room's.
LEVELS: dict[float, set[str]] = {
    -1: {"gpu_kernels"},
    0: {
        "errors",
        "tree",
        "layout",
        "convolution",
        "models",
        "selection",
        "elementwise",
        "folded",
        "side_by_side",
        "noise",
    },
    1: {"task"},
    2: {"data", "optim"},
    3: {"parts"},
    4: {"algorithms"},
    4.2: {"around", "exchange"},  # an algorithm inside another, and what its messages say
    4.5: {"configure", "wire"},  # names to values, records to bytes: for engine and flower alike
    4.7: {"attacks", "levers", "presets", "robust", "privacy"},  # what stands around an algorithm
    5: {"engine", "flower"},
    5.5: {"report.records", "report.progress", "comparison.intervals"},  # what is written and shown while a run goes on
    6: {"contract", "own", "run_folder", "settings", "prepare", "experiment"},
    6.2: {"trained"},
    6.3: {"export"},
    6.5: {"report", "comparison", "audit", "paper"},
    6.7: {"reproduction"},  # stands on the comparison
    7: {"cli"},
    8: {"__init__", "__main__"},  # the front door: it may show everything, and nobody inside looks through it
}
LEVEL_OF = {room: level for level, rooms in LEVELS.items() for room in rooms}
EXTRAS = {f"gpu_kernels.{name}": {"triton"} for name in ("windows", "vectors", "norms")}  # they load only where it is


def level(module: str) -> float:
    return LEVEL_OF.get(module, LEVEL_OF[module.split(".")[0]])


def modules() -> dict[str, Path]:
    """Every module below copfl by its dotted name without "copfl."; the front door is "__init__"."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[str]:
    """The modules of copfl that a file imports, at the top, in a function, or for the type checker alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; name the module in full"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name.removeprefix("copfl.") in MODULES else str(node.module) for name in whole}
    inside = {name.removeprefix("copfl.") for name in found if name.startswith("copfl.")}
    return inside | ({"__init__"} if "copfl" in found else set())


def room(module: str) -> str:
    """The package, or for a file that stands alone the room it shares with the others of its level."""
    top = module.split(".")[0]
    return top if (SOURCE / top).is_dir() else f"the files of level {level(top)}"


def test_every_file_has_a_level() -> None:
    homeless = sorted({name.split(".")[0] for name in MODULES} - LEVEL_OF.keys())
    assert not homeless, f"give {', '.join(homeless)} a level in {Path(__file__).name}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_file_imports_only_from_below_or_its_own_room(module: str) -> None:
    here = level(module)
    for other in sorted(imports(MODULES[module])):
        if other == "__init__" and set(names_from_the_front_door(MODULES[module])) <= {"__version__"}:
            continue
        at_home = room(other) == room(module) and level(other) == here
        assert level(other) < here or at_home, f"{module} (level {here}) imports {other} (level {level(other)})"


def names_from_the_front_door(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "copfl"]
    return [alias.name for node in nodes for alias in node.names if alias.name not in MODULES]


def importers(package: str) -> list[str]:
    return [name for name in MODULES if name == package or name.startswith(f"{package}.")]


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ("engine", "flower"),
        ("flower", "engine"),
        ("algorithms", "engine"),
        ("algorithms", "flower"),
        ("engine", "wire"),
    ],
)
def test_rooms_that_never_meet(inside: str, outside: str) -> None:
    for name in importers(inside):
        met = [other for other in imports(MODULES[name]) if other.split(".")[0] == outside]
        assert not met, f"{name} imports {', '.join(met)}"


def test_no_part_imports_another() -> None:
    for name in importers("parts"):
        others = [other for other in imports(MODULES[name]) if other.startswith("parts.")]
        assert name == "parts" or not others, f"{name} imports {', '.join(others)}; each part is usable alone"


def test_the_core_needs_torch_and_numpy_alone() -> None:
    allowed = {"torch", "numpy", "copfl"}
    for name, path in MODULES.items():
        if level(name) > 5 or name.split(".")[0] == "flower":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:  # only what loads with the file
            if isinstance(node, ast.Import):
                tops = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                tops = {str(node.module).split(".")[0]}
            else:
                continue
            foreign = tops - allowed - sys.stdlib_module_names - EXTRAS.get(name, set())
            assert not foreign, f"{name} loads {', '.join(sorted(foreign))} at the top; import it where it is used"
