"""What copfl is made of and lets in: no code out of data, few and bounded dependencies, private files private."""

from __future__ import annotations

import ast
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
from copfl.data import datasets, reading
from copfl.data.download import fetch
from copfl.engine import checkpoint
from copfl.errors import CopflError, DataError
from copfl.files import write_bytes

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "copfl").rglob("*.py"))

# -- nothing of the outside is run -------------------------------------------------------------------------------------

NEVER = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "marshal.loads", "marshal.load",
    "shelve.open", "dill.load", "dill.loads", "joblib.load", "cloudpickle.load", "cloudpickle.loads", "tempfile.mktemp",
    "pickle.load", "pickle.Unpickler",
}  # fmt: skip
# Between a process and the workers it started itself, over a pipe that nobody else has.
OWN_PROCESSES = {"engine/workers.py": {"pickle.loads"}}
METHODS = {"extractall", "extract"}  # of archives: nothing is unpacked to disk


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for found in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(found, ast.Call):
            yield ast.unparse(found.func), found


def keyword(call: ast.Call, name: str) -> str:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_no_code_out_of_data(path: Path) -> None:
    allowed = OWN_PROCESSES.get(str(path.relative_to(ROOT / "src" / "copfl")), set())
    for name, call in calls(path):
        where = f"{path.name}:{call.lineno}: {name}"
        assert name not in (NEVER | {"pickle.loads"}) - allowed, where
        assert name.rpartition(".")[2] not in METHODS, where
        if name == "torch.load":
            assert keyword(call, "weights_only") == "True", where
        if name in ("np.load", "numpy.load", "npy.read_array"):
            assert keyword(call, "allow_pickle") in ("", "False"), where
        assert keyword(call, "shell") != "True", where


def test_the_one_reader_of_pickles_knows_no_names_but_three() -> None:
    """CIFAR-10 is published as pickles. The reader is a class of its own, and its names stand for an inert record."""
    readers = [path for path in SOURCES if "pickle.Unpickler" in path.read_text(encoding="utf-8")]
    assert [path.name for path in readers] == ["reading.py"]
    assert {
        ("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")
    } == reading._PICKLED_NUMPY  # fmt: skip


class Payload:
    """Makes a file wherever it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_payload_does_what_it_says(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "sign")))
    assert (tmp_path / "sign").exists()


@pytest.mark.parametrize("place", ["cifar", "npz", "npy", "checkpoint", "model", "message", "torch"])
def test_a_payload_is_refused_wherever_files_are_read(place: str, tmp_path: Path) -> None:
    from copfl import wire

    sign, evil = tmp_path / "sign", pickle.dumps(Payload(tmp_path / "sign"))
    array = io.BytesIO()
    np.save(array, np.array([Payload(sign)], dtype=object), allow_pickle=True)
    with pytest.raises(CopflError):  # noqa: PT012 - one place of many
        if place == "cifar":
            reading.unpickle(evil, "batch")
        elif place == "npz":
            with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
                archive.writestr("x.npy", array.getvalue())
                archive.writestr("y.npy", array.getvalue())
            datasets.load(tmp_path / "data.npz")
        elif place == "npy":
            (tmp_path / "x.npy").write_bytes(array.getvalue())
            reading.map_npy(tmp_path / "x.npy")
        elif place in ("checkpoint", "torch"):
            path = tmp_path / "state.safetensors"
            path.write_bytes(evil)
            if place == "torch":
                torch.save({"w": Payload(sign)}, path)
            checkpoint.load(path, {"server": torch.zeros(2)})
        elif place == "model":
            copfl.run("local", model="mlp", clients=1, rounds=1, mlp={"width": 2}, out=tmp_path / "run")
            from copfl.experiment.inference import load

            (tmp_path / "run" / "models" / "client-0000.safetensors").write_bytes(evil)
            load(tmp_path / "run").client(0)
        else:
            good = wire.encode({"w": torch.zeros(2)}, head := wire.Head("upload", "run", "", 0, 0))
            fields = {k: v for k, v in json.loads(good.head).items() if k != "sha256"}
            signed = wire._canonical({**fields, "sha256": wire._checksum(fields, evil)})
            wire.decode(wire.Packet(signed, evil), {"w": torch.zeros(2)}, head)
    assert not sign.exists()


# -- files -------------------------------------------------------------------------------------------------------------


def modes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in [folder, *folder.rglob("*")]}


def test_nobody_else_may_write_what_a_run_leaves(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        copfl.run(
            "copfl", model="mlp", clients=2, rounds=1, mlp={"width": 2}, store="disk", out=tmp_path / "run"
        )
    finally:
        os.umask(before)
    assert not {name: mode for name, mode in modes(tmp_path / "run").items() if mode & 0o022}
    assert modes(tmp_path / "run")["checkpoint/clients.bin"] == 0o600


def test_what_is_private_is_private_whatever_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_bytes(tmp_path / "node" / "round-000001.copfl", b"a client's personal weights", private=True)
    finally:
        os.umask(before)
    assert modes(tmp_path / "node") == {".": 0o700, "round-000001.copfl": 0o600}


def test_keys_are_private_whatever_the_umask_says(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason='keys need cryptography: pip install "copfl[flower]"')
    from copfl.flower.certificates import make_certificates, make_node_key

    before = os.umask(0)
    try:
        make_certificates(tmp_path / "keys", "localhost")
        make_node_key(tmp_path / "keys" / "node-1")
    finally:
        os.umask(before)
    found = modes(tmp_path)
    assert found["keys"] == 0o700
    assert {found[f"keys/{name}"] for name in ("ca.key", "server.key", "node-1")} == {0o600}


def test_secrets_of_the_environment_are_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, f"sesame-{name}")
    copfl.run("copfl", model="mlp", clients=2, rounds=1, mlp={"width": 2}, out=tmp_path / "run")
    assert not [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"sesame" in p.read_bytes()]


def test_a_password_in_an_address_is_in_no_message(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9/data\.tar cannot be reached") as error:
        fetch("http://me:sesame@127.0.0.1:9/data.tar?token=sesame", tmp_path / "data.tar", "0" * 32)
    assert "sesame" not in str(error.value)


# -- dependencies ------------------------------------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|Zlib|CC0|Unlicense|HPND|BSL-1|Boost|MPL|Mozilla)\b"
)
COPYLEFT = re.compile(r"\b(A?GPL|GNU (Affero )?General Public)\b(?!.*exception)", re.IGNORECASE)


def test_dependencies_are_few_and_bounded() -> None:
    assert len(PROJECT["dependencies"]) <= 8
    extras = [one for group in PROJECT["optional-dependencies"].values() for one in group]
    for one in [*PROJECT["dependencies"], *extras]:
        if one.startswith("copfl["):  # the other extras
            continue
        assert re.search(r">=\d", one), f"{one} has no lower bound"
        assert re.search(r"<=?\d", one), f"{one} has no upper bound"


def closure(names: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """The installed distributions that these need, each once."""
    seen: set[str] = set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform, or an extra that is not installed
        yield found
        names += [
            re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in found.requires or [] if "extra ==" not in one
        ]


def licence(found: importlib.metadata.Distribution) -> str:
    about = found.metadata
    classified = [
        c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or [] if c.startswith("License ::")
    ]
    given = (
        about["License-Expression"]
        or "; ".join(classified)
        or (about["License"] or "").strip().partition("\n")[0]
    )
    return str(given)


def test_every_licence_lets_people_use_it() -> None:
    groups = ("flower", "plots", "report")
    wanted = [*PROJECT["dependencies"], *(one for g in groups for one in PROJECT["optional-dependencies"][g])]
    found = {
        d.name: licence(d) for d in closure([re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in wanted])
    }
    assert {"torch", "numpy", "safetensors"} <= found.keys()
    strange = {
        name: text for name, text in found.items() if not PERMISSIVE.search(text) or COPYLEFT.search(text)
    }
    assert not strange
    print(*(f"{name}: {text}" for name, text in sorted(found.items())), sep="\n", file=sys.stderr)
