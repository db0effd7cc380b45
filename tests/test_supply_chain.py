"""No code is executed from data, private files stay private, and dependencies are few and bounded."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import io
import json
import os
import pickle
import re
import stat
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl import wire
from copfl.data import reading
from copfl.data.sets import datasets
from copfl.data.sets.download import fetch
from copfl.engine import checkpoint
from copfl.errors import CopflError, DataError
from copfl.experiment.loading import load
from copfl.files import write_bytes
from tests.sources import parsed

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "copfl").rglob("*.py"))

# No code is executed from data

FORBIDDEN = {
    "__import__",
    "cloudpickle.load",
    "cloudpickle.loads",
    "compile",
    "dill.load",
    "dill.loads",
    "eval",
    "exec",
    "joblib.load",
    "marshal.load",
    "marshal.loads",
    "os.popen",
    "os.system",
    "pickle.Unpickler",
    "pickle.load",
    "pickle.loads",
    "shelve.open",
    "tempfile.mktemp",
    "yaml.load",
}
# Between a process and the workers that it started, over a pipe that no other process has.
ALLOWED = {
    "engine/workers.py": {"pickle.loads"},
    "rivals/process.py": {"pickle.load", "pickle.loads"},
    # An error that this process pickled in the same line, to see whether another one could read it.
    "comparison/jobs/processes.py": {"pickle.loads"},
    # A module that the machine's owner entered with its hash; the bytes that were compared are executed.
    "federation/policy/own_code.py": {"compile", "exec"},
    # A kernel, written from the operations of a function of this package by fixed tables.
    "kernels/triton/pointwise.py": {"compile", "exec"},
}
ARCHIVE_METHODS = {"extractall", "extract"}  # nothing is unpacked to disk


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The calls and the imports of a file."""
    nodes = ast.walk(parsed(path))
    return [node for node in nodes if isinstance(node, ast.Call | ast.Import | ast.ImportFrom)]


def dotted(function: ast.expr) -> str:
    """The name of the function that is called; of what a call returns, its attribute."""
    if isinstance(function, ast.Attribute):
        return f"{dotted(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a file with the name of its function."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def keyword(call: ast.Call, name: str) -> str:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), "")


def is_harmless(name: str, call: ast.Call, allowed: set[str]) -> bool:
    if name in FORBIDDEN - allowed or name.rpartition(".")[2] in ARCHIVE_METHODS:
        return False
    if name == "torch.load" and keyword(call, "weights_only") != "True":
        return False
    if name in ("np.load", "numpy.load", "npy.read_array") and keyword(call, "allow_pickle") not in (
        "",
        "False",
    ):
        return False
    return keyword(call, "shell") != "True"


def test_no_code_is_executed_from_data() -> None:
    assert [
        f"{path.relative_to(ROOT)}:{call.lineno}: {name}"
        for path in SOURCES
        for name, call in calls(path)
        if not is_harmless(name, call, ALLOWED.get(str(path.relative_to(ROOT / "src" / "copfl")), set()))
    ] == []


@pytest.mark.parametrize(
    "line",
    [
        "eval(x)",
        "torch.load(f)",
        "np.load(f, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
        "z.extractall(f)",
    ],
)
def test_what_executes_code_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    ((name, call),) = calls(tmp_path / "module.py")
    assert not is_harmless(name, call, set())


def test_the_only_reader_of_pickles_resolves_the_names_of_an_array() -> None:
    """CIFAR-10 and PFLlib's clients are published as pickles. The reader maps these names to an inert record."""
    readers = [path for path in SOURCES if "Unpickler" in path.read_text(encoding="utf-8")]
    assert [path.name for path in readers] == ["reading.py"]
    names = {("numpy", "ndarray"), ("numpy", "dtype")}
    names |= {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}  # numpy 1 and 2
    assert names == reading._PICKLED_NUMPY


def tiny_run(folder: Path, algorithm: str = "copfl", *, clients: int = 2, **options: Any) -> None:
    copfl.run(
        algorithm, model="mlp", clients=clients, rounds=1, model_options={"width": 2}, out=folder, **options
    )


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_the_payload_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "created")))
    assert (tmp_path / "created").exists()


@pytest.mark.parametrize("kind", ["cifar", "npz", "npy", "checkpoint", "model", "message", "torch"])
def test_the_payload_is_refused_in_every_file(kind: str, tmp_path: Path) -> None:
    created, malicious = tmp_path / "created", pickle.dumps(Payload(tmp_path / "created"))
    array = io.BytesIO()
    np.save(array, np.array([Payload(created)], dtype=object), allow_pickle=True)
    with pytest.raises(CopflError):  # noqa: PT012 - one kind of many
        if kind == "cifar":
            reading.unpickle(malicious, "batch")
        elif kind == "npz":
            with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
                archive.writestr("x.npy", array.getvalue())
                archive.writestr("y.npy", array.getvalue())
            datasets.load(tmp_path / "data.npz")
        elif kind == "npy":
            (tmp_path / "x.npy").write_bytes(array.getvalue())
            reading.map_npy(tmp_path / "x.npy")
        elif kind in ("checkpoint", "torch"):
            path = tmp_path / "state.safetensors"
            path.write_bytes(malicious)
            if kind == "torch":
                torch.save({"w": Payload(created)}, path)
            checkpoint.load(path, {"server": torch.zeros(2)})
        elif kind == "model":
            tiny_run(tmp_path / "run", "local", clients=1)
            (tmp_path / "run" / "models" / "client-0000" / "weights.safetensors").write_bytes(malicious)
            load(tmp_path / "run", 0)
        else:
            good = wire.encode({"w": torch.zeros(2)}, head := wire.Head("upload", "run", "", 0, 0))
            fields = {k: v for k, v in json.loads(good.head).items() if k != "sha256"}
            signed = wire._canonical({**fields, "sha256": wire._checksum(fields, malicious)})
            wire.decode(wire.Packet(signed, malicious), {"w": torch.zeros(2)}, head)
    assert not created.exists()


# Files


def modes(folder: Path) -> dict[str, int]:
    """The permissions of every file."""
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in [folder, *folder.rglob("*")]}


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_no_other_user_may_write_files_of_a_run(tmp_path: Path) -> None:
    with umask(0o022):
        tiny_run(tmp_path / "run", store="disk")
    assert not {name: mode for name, mode in modes(tmp_path / "run").items() if mode & 0o022}
    assert modes(tmp_path / "run")["checkpoint/clients.bin"] == 0o600


def test_private_files_are_private_under_any_umask(tmp_path: Path) -> None:
    with umask(0):
        write_bytes(tmp_path / "node" / "round-000001.copfl", b"a client's personal weights", private=True)
    assert modes(tmp_path / "node") == {".": 0o700, "round-000001.copfl": 0o600}


def test_keys_are_private_under_any_umask(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason='keys need cryptography: pip install "copfl[flower]"')
    from copfl.federation.protocol.keys import make_key, own_key
    from copfl.federation.server.certificates import make_certificates

    with umask(0):
        make_certificates(tmp_path / "keys", "localhost")
        make_key(tmp_path / "keys" / "node-1")
        own_key(tmp_path / "keys" / "node-2")
    permissions = modes(tmp_path)
    assert permissions["keys"] == 0o700
    assert {permissions[f"keys/{name}"] for name in ("ca.key", "server.key", "node-1", "node-2")} == {0o600}


def test_no_file_contains_secrets_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, f"sesame-{name}")
    tiny_run(tmp_path / "run")
    assert not [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"sesame" in p.read_bytes()]


def test_no_message_contains_the_password_of_a_url(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9/data\.tar cannot be reached") as error:
        fetch("http://me:sesame@127.0.0.1:9/data.tar?token=sesame", tmp_path / "data.tar", "0" * 32)
    assert "sesame" not in str(error.value)


# Dependencies

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|Zlib|CC0|Unlicense|HPND|BSL-1|Boost|MPL|"
    r"Mozilla)\b"
)
COPYLEFT = re.compile(r"\b(A?GPL|GNU (Affero )?General Public)\b(?!.*exception)", re.IGNORECASE)


def test_dependencies_are_few_and_bounded() -> None:
    """Only torch has no upper bound: users choose their version, and constraints.txt pins that of the tests."""
    assert len(PROJECT["dependencies"]) <= 11
    extras = [one for group in PROJECT["optional-dependencies"].values() for one in group]
    for requirement in [*PROJECT["dependencies"], *extras]:
        if requirement.startswith("copfl["):  # the other extras
            continue
        assert re.search(r">=\d", requirement), f"{requirement} has no lower bound"
        if name_of(requirement) != "torch":
            assert re.search(r"<=?\d", requirement), f"{requirement} has no upper bound"


def test_everything_that_the_tests_install_is_pinned() -> None:
    """So that no release of another package changes what the README's two commands do."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if re.match(r"[\w.-]+==\d", line)}
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    names = [name_of(requirement) for group in groups for requirement in group]
    needed = {normalised(distribution.name) for distribution in closure(names)} - {"copfl"}
    assert needed <= pinned, "run .ci/pin"


# Not declared: a dependency of a declared package, or a service that a user of it has installed.
UNDECLARED = {"markupsafe", "mlflow", "pandas", "starlette", "threadpoolctl", "triton", "wandb"}


def test_every_imported_package_is_declared() -> None:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    declared = {name_of(one) for group in groups for one in group} | UNDECLARED | {"copfl"}
    distributions = importlib.metadata.packages_distributions()
    for path in SOURCES:
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for package in {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
                known = {normalised(name) for name in distributions.get(package, [package])} & declared
                assert known, f"{path.name}: {package} is not declared in pyproject.toml"


def name_of(requirement: str) -> str:
    """The name of the distribution in a requirement."""
    return normalised(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """The installed distributions that these need, each once."""
    visited: set[str] = set()
    while names:
        name = names.pop()
        if name in visited:
            continue
        visited.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform, or of an extra that is not installed
        yield distribution
        names += [name_of(one) for one in distribution.requires or [] if "extra ==" not in one]


def license_of(distribution: importlib.metadata.Distribution) -> str:
    def all_of(field: str) -> list[str]:  # the backport of importlib.metadata raises where a field is missing
        return distribution.metadata.get_all(field) or []

    classifiers = [c for c in all_of("Classifier") if c.startswith("License ::")]
    classified = "; ".join(c.rpartition(" :: ")[2] for c in classifiers)
    first_line = "".join(all_of("License")).strip().partition("\n")[0]
    return "".join(all_of("License-Expression")) or classified or first_line


def test_every_license_is_permissive() -> None:
    extras = (PROJECT["optional-dependencies"][name] for name in ("flower", "plots", "report"))
    required = [name_of(one) for group in (PROJECT["dependencies"], *extras) for one in group]
    licenses = {distribution.name: license_of(distribution) for distribution in closure(required)}
    assert {"torch", "numpy", "safetensors"} <= licenses.keys()
    restrictive = {
        name: text for name, text in licenses.items() if not PERMISSIVE.search(text) or COPYLEFT.search(text)
    }
    assert not restrictive
    print(*(f"{name}: {text}" for name, text in sorted(licenses.items())), sep="\n", file=sys.stderr)


def test_uv_and_pip_install_the_same_versions() -> None:
    """`.ci/pin` writes both files."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        tuple(line.split(" ")[0].split("==")) for line in lines if "==" in line and not line.startswith("#")
    }
    packages = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    locked = {(package["name"], package["version"]) for package in packages if package["name"] != "copfl"}
    assert locked == pins
