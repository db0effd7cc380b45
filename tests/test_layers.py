"""A module imports only from a lower level or from its own package."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.sources import SOURCE, parsed

LEVELS: list[set[str]] = [
    {"errors", "telling"},
    {"files", "foreign", "stats", "tables", "charts", "kernels"},
    {"measures", "sections"},
    {"core"},
    {"models", "data", "parts", "wire"},
    {"algorithms", "wrappers", "engine", "rivals"},
    {"settings", "verdict"},
    {"experiment", "testing"},
    {"choosing"},
    {"comparison", "report"},
    {"audit", "bench", "federation"},
    {"cli"},
    {"__init__", "__main__"},
]
# The rooms of a package, from the ground up: a room imports only rooms below it.
ROOMS: dict[str, list[str]] = {
    "comparison": ["jobs", "rows", "results", "choosing"],
    "data": ["clients", "tables", "sets", "contract"],
    "experiment": ["models", "analysis", "bundle", "export"],
    "federation": ["policy", "protocol", "node", "server", "operations", "machines"],
}
FLOWER = "flwr"  # the package; its private names are in one module
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
EXTRAS = {
    f"kernels.triton.{name}": {"triton"}
    for name in ("compiling", "patches", "pointwise", "random", "vectors", "norms", "grouped")
}  # loaded on a GPU only


def modules() -> dict[str, Path]:
    """Every module below copfl by its dotted name without "copfl."; the package itself is "__init__"."""
    paths = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        paths[name] = path
    return paths


MODULES = modules()


def package(module: str) -> str:
    return module.split(".")[0]


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules of copfl that these import statements name."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} imports relatively; name the module in full"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name.removeprefix("copfl.") in MODULES else str(node.module) for name in whole}
    return {name.removeprefix("copfl.") for name in names if name.startswith("copfl.")} & MODULES.keys()


@cache
def import_nodes(module: str) -> list[ast.Import | ast.ImportFrom]:
    """At the top, in a function, or for the type checker alone."""
    return [
        node for node in ast.walk(parsed(MODULES[module])) if isinstance(node, ast.Import | ast.ImportFrom)
    ]


@cache
def all_imports(module: str) -> set[str]:
    return imported(import_nodes(module)) - {module}


@cache
def imports_on_load(module: str) -> set[str]:
    """What loads with the module, and what the type checker reads; not what a function imports when it is called."""
    waiting: list[ast.AST] = list(parsed(MODULES[module]).body)
    nodes = []
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)
    return imported(nodes) - {module}


@cache
def chain(module: str) -> tuple[str, ...]:
    """The longest chain of imports that begins with this module."""
    return (module, *max((chain(other) for other in imports_on_load(module)), key=len, default=()))


def test_every_module_has_a_level() -> None:
    assert {package(name) for name in MODULES} <= LEVEL_OF.keys()


def test_a_module_imports_only_from_below_or_its_own_package() -> None:
    assert [
        f"{module} (level {LEVEL_OF[package(module)]}) imports {other}"
        for module in sorted(MODULES)
        for other in sorted(all_imports(module))
        if package(other) != package(module) and LEVEL_OF[package(other)] >= LEVEL_OF[package(module)]
    ] == []


def test_a_room_imports_only_rooms_below_it() -> None:
    for name, rooms in ROOMS.items():
        inside = [module for module in MODULES if module.startswith(f"{name}.")]
        folders = {module.split(".")[1] for module in inside if module.count(".") > 1}
        assert folders == set(rooms)
        room_of = {module: module.split(".")[1] for module in inside if module.split(".")[1] in folders}
        assert [
            f"{module} imports {other}"
            for module, room in sorted(room_of.items())
            for other in sorted(all_imports(module))
            if other in room_of and rooms.index(room_of[other]) > rooms.index(room)
        ] == []


def test_flower_is_imported_in_one_room_and_its_private_names_in_one_module() -> None:
    for module in MODULES:
        for node in import_nodes(module):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            of_flower = {name for name in names if name.split(".")[0] == FLOWER}
            assert not of_flower or module.startswith("federation.machines."), f"{module} imports {of_flower}"
            assert of_flower <= {"flwr.app", "flwr.serverapp", "flwr.clientapp"}, f"{module}: {of_flower}"


def test_no_module_imports_itself_by_a_detour() -> None:
    for module in MODULES:
        chain(module)  # a cycle would recurse for ever


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ("federation", "engine"),
        ("algorithms", "engine"),
        ("algorithms", "federation"),
        ("engine", "federation"),
    ],
)
def test_packages_that_never_import_each_other(inside: str, outside: str) -> None:
    for name in MODULES:
        if package(name) == inside:
            reached = [other for other in all_imports(name) if package(other) == outside]
            assert not reached, f"{name} imports {', '.join(reached)}"


def test_no_module_imports_a_study() -> None:
    """Studies are beside the library, which is installed without them; `cli.reproduce` looks for one by its path."""
    for name in MODULES:
        for node in import_nodes(name):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not [one for one in names if one.split(".")[0] == "studies"], f"{name} imports {names}"


def test_no_part_imports_another() -> None:
    for name in MODULES:
        others = [other for other in all_imports(name) if other.startswith("parts.")]
        assert package(name) != "parts" or name == "parts" or not others, f"{name} imports {others}"


def test_the_core_needs_torch_and_numpy_alone() -> None:
    allowed = {"torch", "numpy", "copfl", *sys.stdlib_module_names}
    for name in MODULES:
        if LEVEL_OF[package(name)] > LEVEL_OF["engine"] or package(name) in (
            "stats",
            "tables",
            "charts",
            "data",
        ):
            continue
        for node in parsed(MODULES[name]).body:  # only what loads with the file
            tops = set()
            if isinstance(node, ast.Import):
                tops = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                tops = {str(node.module).split(".")[0]}
            foreign = tops - allowed - EXTRAS.get(name, set())
            assert not foreign, (
                f"{name} loads {', '.join(sorted(foreign))} at the top; import it where it is used"
            )


def hidden_names(function: ast.AST, of_module: set[str]) -> set[str]:
    """Names of the module that a function uses, and that one of its comprehensions has for a variable."""
    used, hidden, own = set[str](), set[str](), set[str]()

    def visit(node: ast.AST, variables: frozenset[str]) -> None:
        if isinstance(node, ast.Name) and node.id not in variables:
            (used if isinstance(node.ctx, ast.Load) else own).add(node.id)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            targets = [name for loop in node.generators for name in ast.walk(loop.target)]
            names = {name.id for name in targets if isinstance(name, ast.Name)}
            hidden.update(names)
            variables |= names
        for child in ast.iter_child_nodes(node):
            visit(child, variables)

    visit(function, frozenset())
    return (used - own) & hidden & of_module


def test_no_comprehension_hides_a_name_that_its_function_uses() -> None:
    """Python 3.12.1 looks for such a name among the variables, and ends with an UnboundLocalError."""
    code = "def f(all):\n a = {g for g in all}\n b = (g for g in all)\n return [g(x) for x in all]"
    assert hidden_names(ast.parse(code), {"g"}) == {"g"}
    for name, path in MODULES.items():
        tree = parsed(path)
        of_module = {alias.asname or alias.name for node in import_nodes(name) for alias in node.names}
        of_module |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        nodes = list(ast.walk(tree))
        loops = [node.target for node in nodes if isinstance(node, ast.comprehension)]
        variables = {node.id for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Name)}
        if not variables & of_module:
            continue
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        hidden = {function.name: hidden_names(function, of_module) for function in functions}
        assert not any(hidden.values()), name
