"""Which modules a command may import for a component: those that it names. A file names none.

Opening a folder or a settings file of somebody else must execute nothing. So a name such as "mymodule:MyNet" is
imported only if `mymodule` was named here: on the command line (`--model mymodule:MyNet`, `--code mymodule`) or as
an argument in Python. `user_code.attribute` asks, and is the only place that imports such a name.
"""

import ast
import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from copfl.errors import NAMED, UsageError

Modules = str | Sequence[str]  # as an argument: one module, or several


def is_reference(name: str) -> bool:
    """Whether the name is of the form "module:attribute", and not a pretrained model such as "timm:NAME"."""
    module, colon, attribute = name.partition(":")
    if not colon or not all(map(str.isidentifier, (*module.split("."), *attribute.split(".")))):
        return False
    from copfl.models.pretrained import SOURCES  # torch, which the command line imports late

    return module not in SOURCES


@cache
def plugins() -> Mapping[str, str]:
    """The algorithms of installed packages, by the name of their entry point: "mypackage.algos:FedMine".

    Nothing is imported: such a name is short for the reference, and is named or refused as that is.
    """
    from importlib import metadata  # it takes a tenth of the time of `copfl --help`

    return {entry.name: entry.value for entry in metadata.entry_points(group="copfl.algorithms")}


def name(*modules: Modules) -> None:
    """Names modules, until the `scope` ends.

    Args:
        modules: Such as "mypackage.nets". UsageError for what is no module.
    """
    listed = [one for some in modules for one in ([some] if isinstance(some, str) else some)]
    for module in listed:
        if module.endswith(".py") or not all(map(str.isidentifier, module.split("."))):
            remedy = "name the module without .py, path and attribute, such as mypackage.nets"
            raise UsageError(f'code "{module}" is no module; {remedy}')
    NAMED.set(NAMED.get() | {*listed})


def named() -> tuple[str, ...]:
    """The modules that are named now, for a process that works for this one."""
    return tuple(sorted(NAMED.get()))


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """What is named inside is not named after it."""
    token = NAMED.set(NAMED.get())
    try:
        yield
    finally:
        NAMED.reset(token)


def modules_in(value: Any) -> list[str]:
    """The modules that a value of a command line or of a Python argument names.

    Args:
        value: A text such as "mymodule:MyNet" or "auc,mymodule:mine", or tables and lists of them.
    """
    if isinstance(value, str):
        names = (plugins().get(text.strip(), text.strip()) for text in value.split(","))
        return [one.partition(":")[0] for one in names if is_reference(one)]
    if isinstance(value, Mapping):
        return [module for item in value.values() for module in modules_in(item)]
    if isinstance(value, list | tuple):
        return [module for item in value for module in modules_in(item)]
    return []


class UnnamedCode(UsageError):
    """A name of a module that this command does not name."""


def check(kind: str, reference: str, recorded: str | None = None) -> None:
    """UnnamedCode if the module of a reference is not named; nothing is imported.

    Args:
        kind: Of the component, such as "model".
        reference: Such as "mymodule:MyNet".
        recorded: What `digests` gave when it was trained.
    """
    module = reference.partition(":")[0]
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise UnnamedCode(
            f'the {kind} "{reference}" is of Python\'s standard library, which has no {kind} for copfl'
        )
    if module in NAMED.get():
        return
    raise UnnamedCode(
        f"the {kind} is {reference}, which is code of its author and not of copfl; copfl runs such code only if you "
        f'name it: add --code {module} (in Python code="{module}"). {_compared(module, recorded)}'
    )


# The files of modules


def file_of(module: str) -> Path | None:
    """The file that a module has or would have; None where it is not found. Nothing is imported."""
    known = getattr(sys.modules.get(module), "__file__", None)
    if known:
        return Path(known)
    for folder in (os.getcwd(), *sys.path):
        path = Path(folder).joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def digest_of(module: str) -> str:
    """The SHA-256 of a module's file; empty where there is none."""
    file = file_of(module)
    return "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()


def with_imported(module: str) -> list[str]:
    """The module, and what it imports that lies beside it: files of its author. Nothing is imported.

    Of an installed package these are modules of the package.
    """
    file, found = file_of(module), [module]
    if file is None:
        return found
    depth = module.count(".") + (file.name == "__init__.py")
    root, top = file.parents[min(depth, len(file.parents) - 1)], module.partition(".")[0]
    is_installed = bool({"site-packages", "dist-packages"} & {*root.parts})
    for one in found:  # which grows
        path = _beside(root, one)
        for name in () if path is None else _imports(path.read_bytes(), one, path.name == "__init__.py"):
            is_own = name.partition(".")[0] == top if is_installed else not name.startswith("copfl.")
            if is_own and name not in found and _beside(root, name) is not None:
                found.append(name)
    return found


def _beside(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@lru_cache(maxsize=100)
def _imports(source: bytes, module: str, is_package: bool) -> list[str]:
    """The names that a module may import, with those of attributes: of `from a import b`, a and a.b."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # whoever imports it is told
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            above = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return [name for name in dict.fromkeys(names) if all(map(str.isidentifier, name.split(".")))]


def digests(*references: str) -> str | None:
    """For run.toml, the modules of these references with the SHA-256 of their files: "mymodule=ab12"."""
    modules = dict.fromkeys(one for reference in references for one in _own_modules(reference))
    return " ".join(f"{module}={digest_of(module)}" for module in modules) or None


def _own_modules(reference: str) -> list[str]:
    return with_imported(reference.partition(":")[0])


def changed(reference: str, recorded: str | None) -> str:
    """A warning where a module is not the one of the training; empty if all are, or nothing is recorded.

    Args:
        reference: "module:attribute".
        recorded: The hashes of when the model was trained, as of `digests`.
    """
    for module in _own_modules(reference):
        trained, here = _recorded(module, recorded), digest_of(module)
        if trained and trained != here:
            file = file_of(module)
            return (
                f"{module} is not as it was in training: {file} has sha256 {here[:12]}, then {trained[:12]}"
            )
    return ""


def changed_modules(recorded: str | None, now: str | None) -> list[str]:
    """The modules whose files are not those that were recorded.

    Args:
        recorded: As of `digests`.
        now: As of `digests`, later.
    """
    before, after = ({*(text or "").split()} for text in (recorded, now))
    return sorted({entry.partition("=")[0] for entry in before ^ after})


def _recorded(module: str, recorded: str | None) -> str:
    pairs = (entry.partition("=") for entry in (recorded or "").split())
    recorded_digest = next((digest for one, _, digest in pairs if one == module), "")
    return (
        recorded_digest if re.fullmatch("[0-9a-f]{64}", recorded_digest) else ""
    )  # a file's text, which an error shows


def _compared(module: str, recorded: str | None) -> str:
    """The file here, and the one that it was trained with, by their hashes."""
    trained, file = _recorded(module, recorded), file_of(module)
    before = (
        f"Trained with sha256 {trained}" if trained else "The sha256 that it was trained with is not known"
    )
    if file is None:
        return f"{before}; here there is no file of it"
    same = "" if not trained else " (the same)" if digest_of(module) == trained else " (another one)"
    return f"{before}; here: {file}, sha256 {digest_of(module)}{same}"
