"""Code of a machine's owner that a policy allows: one file, by its hash, from the owner's folder.

`load` is called when the check has passed and before the settings are made, which then find the module as imported.
"""

import hashlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from copfl.errors import UsageError, raised_as
from copfl.federation.policy.record import AllowedCode
from copfl.settings import named_code
from copfl.settings.user_code import calling

INSTALLED = {"site-packages", "dist-packages"}  # folders of packages
_loaded: dict[str, str] = {}  # module -> the SHA-256 of the file that it was made of
_packages: set[str] = set()  # packages that have no content but their modules


def file_of(module: str, folder: Path) -> Path:
    """The file of a module in a folder.

    Args:
        module: Its dotted name.
        folder: Where Python would look for it.
    """
    path = folder.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def entered(reference: str, folder: Path) -> AllowedCode:
    """The policy's entry for a function or class in this folder, with the hash that its file has now.

    Args:
        reference: module:attribute.
        folder: The owner's, in which the module is.
    """
    path = file_of(reference.partition(":")[0], folder)
    with raised_as(UsageError, f'there is no file of "{reference}" in {folder}: {{}}', OSError):
        return AllowedCode(reference, folder.resolve(), hashlib.sha256(path.read_bytes()).hexdigest())


def load(codes: Iterable[AllowedCode]) -> None:
    """Makes the modules available under their names, each of a file that has the hash of the policy.

    They are the only ones of that name that this process knows: `importlib` finds them as imported, and never
    searches its path. Parents are packages without content, so their __init__.py is not executed.
    """
    for code in codes:
        if _loaded.get(code.module) != code.sha256:
            _load(code)
        attribute = getattr(sys.modules[code.module], code.reference.partition(":")[2], None)
        is_imported = callable(attribute) and getattr(attribute, "__module__", code.module) != code.module
        if attribute is None or is_imported or isinstance(attribute, ModuleType):
            raise UsageError(f'code "{code.reference}" in the policy is not defined in its module')
        named_code.name(code.module)  # by the machine's owner


def _load(code: AllowedCode) -> None:
    path, top = file_of(code.module, code.folder), code.module.partition(".")[0]
    if _is_installed(top) or INSTALLED & {*code.folder.resolve().parts}:
        raise UsageError(
            f'code "{code.reference}" in the policy: {top} is an installed package; rename yours'
        )
    with raised_as(UsageError, f'the module of code "{code.reference}" cannot be read: {{}}', OSError):
        content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != code.sha256:
        raise UsageError(
            f'the module of code "{code.reference}" has another SHA-256 than in the policy of this machine; '
            "its owner compares the file, and enters its hash"
        )
    *parents, _ = code.module.split(".")
    names = [".".join(parents[: n + 1]) for n in range(len(parents))]
    for n, name in enumerate(names):
        folder = code.folder.joinpath(*parents[: n + 1])
        if name not in _packages and not _is_imported_from(name, folder):
            package = ModuleType(name)
            package.__path__ = [str(folder)]
            package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = package
            _packages.add(name)
    if code.module not in _loaded:
        _is_imported_from(code.module, path)
    if str(code.folder) not in sys.path:
        sys.path.append(str(code.folder))  # last: modules that it imports shadow no installed one
    is_package = path.name == "__init__.py"
    spec = importlib.util.spec_from_file_location(
        code.module, path, submodule_search_locations=[str(path.parent)] if is_package else None
    )
    if spec is None:
        raise UsageError(f'the module of code "{code.reference}" is no Python file')
    module = importlib.util.module_from_spec(spec)
    sys.modules[code.module] = module
    _loaded[code.module] = code.sha256
    try:
        with calling("code", code.reference, "importing it"):
            exec(compile(content, str(path), "exec"), vars(module))  # the bytes that were compared
    except BaseException:
        del sys.modules[code.module], _loaded[code.module]
        raise


def _is_imported_from(module: str, path: Path) -> bool:
    """Whether a module is imported already, as the node's data may do; UsageError if from elsewhere."""
    imported = sys.modules.get(module)
    if imported is None:
        return False
    paths = [getattr(imported, "__file__", None), *getattr(imported, "__path__", ())]
    if any(Path(path_of_module).resolve() == path.resolve() for path_of_module in paths if path_of_module):
        return True
    raise UsageError(f'code in the policy: another module "{module}" is imported; rename yours')


def _is_installed(top: str) -> bool:
    spec = None if top in _packages or top in _loaded else importlib.util.find_spec(top)
    paths = [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else []
    return any(INSTALLED & {*Path(path).parts} for path in paths if path)
