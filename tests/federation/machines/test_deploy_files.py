"""Dockerfile, compose.yaml and systemd units: what can be tested without a Docker engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from copfl.federation.operations.joining import UNIT
from tests.commands import called
from tests.slow import slow

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNITS = sorted((ROOT / "deploy").glob("*.service"))


def services() -> dict[str, Any]:
    yaml: Any = pytest.importorskip(
        "yaml", reason="PyYAML, which the site's generator brings, is not installed"
    )
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"])


def test_every_service_runs_without_privileges() -> None:
    found = services()
    assert sorted(found) == ["node-0", "node-1", "node-2", "server"]
    for service in found.values():
        assert service["user"] == "${COPFL_USER:-1000:1000}"
        assert (service["read_only"], service["tmpfs"], service["cap_drop"]) == (True, "/tmp", ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        role = service["command"][0]
        assert service["healthcheck"]["test"][:4] == ["CMD", "copfl", role, "status"]
        assert service["healthcheck"]["test"][-1] == "--check"
    assert re.findall(r"^USER (.*)", DOCKERFILE, re.MULTILINE) == ["1000:1000"]


def test_the_commands_of_services_and_units_are_commands_of_copfl(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With --help, unknown words and options are errors, and nothing is started."""
    lines = [" ".join(service["command"]) for service in services().values()]
    lines += [" ".join(service["healthcheck"]["test"][2:]) for service in services().values()]
    for unit in UNITS:
        text = unit.read_text().replace("\\\n", " ")
        (command,) = re.findall(r"^ExecStart=/opt/copfl/bin/copfl (.*)", text, re.MULTILINE)
        lines.append(command)
    assert len(lines) == 2 * 4 + len(UNITS) == 11
    for line in lines:
        done = called(capsys, *shlex.split(line.replace("${CLIENT}", "0")), "--help")
        assert done.code == 0, (line, done.err)
        assert f"Usage: copfl {' '.join(line.split()[:2])}" in done.out


def test_a_deployment_installs_files_of_known_hashes() -> None:
    """Of the versions that the tests run with; torch is of another index for each processor."""
    text = (ROOT / "deploy" / "requirements.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    known = {line.partition(";")[0].strip() for line in pinned}
    assert len(lines) > 50
    for line in lines:
        requirement, *hashes = line.split(" --hash=")
        assert requirement.partition(";")[0].strip() in known
        assert hashes
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", one) for one in hashes)
    names = {line.partition("==")[0] for line in lines}
    assert {"flwr", "cryptography", "numpy", "dp-accounting"} <= names
    assert not names & {"torch", "triton", "copfl"}
    assert "--require-hashes -r /src/requirements.txt" in DOCKERFILE
    assert all("MemoryMax=" in unit.read_text() for unit in UNITS)


def test_the_image_contains_what_the_dockerfile_copies() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        word for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]
    ]
    assert sorted(allowed) == sorted(copied)
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize(
    "command",
    [
        "hadolint Dockerfile",
        "docker-compose -f compose.yaml config --quiet",
        "check-jsonschema -q --builtin-schema vendor.compose-spec compose.yaml",
    ],
    ids=lambda command: command.split()[0],
)
def test_the_files_are_valid(command: str) -> None:
    program, *words = command.split()
    if (found := shutil.which(program)) is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run([found, *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_the_units_are_valid(unit: Path, tmp_path: Path) -> None:
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / unit.name  # systemd wants programs that exist
    copy.write_text(unit.read_text().replace("/opt/copfl/bin/copfl", sys.executable))
    done = subprocess.run([program, "verify", str(copy)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_the_units_expose_little(unit: Path) -> None:
    """By systemd's own measure, of 10 for a service without any restriction."""
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    words = [program, "security", "--offline=true", "--threshold=30", "--no-pager", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is older than 250")
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert (done.returncode, float(exposure) < 3) == (0, True)


def test_the_unit_of_a_site_restricts_as_much(tmp_path: Path) -> None:
    """What `copfl site join --systemd` writes has every restriction of the node's unit, and is valid."""
    of_node = (ROOT / "deploy" / "copfl-node.service").read_text().splitlines()
    restrictions = of_node[of_node.index("UMask=0077") : of_node.index("SystemCallErrorNumber=EPERM") + 1]
    names = {
        "site": "north",
        "federation": "clinic",
        "user": "copfl",
        "folder": tmp_path,
        "python": sys.executable,
    }
    unit = tmp_path / "copfl-clinic-north.service"
    unit.write_text(UNIT.format(**names))
    assert not set(restrictions) - set(unit.read_text().splitlines())
    test_the_units_are_valid(unit, tmp_path)
    test_the_units_expose_little(unit)


def test_every_node_knows_its_coordinator() -> None:
    """One that knows none refuses every run."""
    commands = [" ".join(service["command"]) for name, service in services().items() if "node" in name]
    commands += [unit.read_text() for unit in UNITS if "node" in unit.name]
    assert len(commands) == 5
    assert [command for command in commands if "--coordinator" not in command] == []


def test_only_the_unit_for_a_gpu_has_devices() -> None:
    with_gpu = [unit.name for unit in UNITS if "PrivateDevices=true" not in unit.read_text()]
    assert with_gpu == ["copfl-node-gpu.service"]
    text = (ROOT / "deploy" / with_gpu[0]).read_text()
    assert "DevicePolicy=closed" in text
    assert "--set device=cuda" in text


@pytest.fixture
def place() -> Iterator[Path]:
    """A temporary folder that another user can reach, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@slow  # installs torch
def test_the_dockerfiles_commands_work_for_an_ordinary_user(place: Path) -> None:
    """In a fresh virtual environment, as in the image but for `useradd`, which needs root."""
    commands = re.findall(r"^RUN (.*)", DOCKERFILE, re.MULTILINE)
    assert commands[0].startswith("useradd ")
    home, source = place / "home", place / "src"
    home.mkdir()
    for words in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE):
        *names, target = words.split()
        for name in names:
            path = place / target.strip("/")
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, path, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                path.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, path)
    user: dict[str, Any] = {}
    if os.getuid() == 0:
        user = {"user": 65534, "group": 65534, "extra_groups": []}
        for path in (place, home, source, *source.rglob("*")):
            os.chown(path, 65534, 65534)
    (variables,) = re.findall(r"^ENV (.*)", DOCKERFILE, re.MULTILINE)
    settings = dict(word.split("=") for word in variables.split())
    environment = {
        **{
            k: v
            for k, v in os.environ.items()
            if k.startswith(("PIP_", "SSL_", "http", "HTTP", "no_", "NO_"))
        },
        **{name: value.replace("/tmp", str(home)) for name, value in settings.items()},
        "PATH": f"{home}/venv/bin:/usr/bin:/bin",
        "TMPDIR": str(home),
    }

    def run(command: str) -> str:
        done = subprocess.run(
            ["/bin/sh", "-c", command], env=environment, cwd=home, capture_output=True, text=True, **user
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return str(done.stdout)

    def is_usable(python: str) -> bool:
        with contextlib.suppress(OSError):  # a home of root's
            words = [python, "-c", "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))"]
            return subprocess.run(words, cwd=home, env=environment, **user).returncode == 0
        return False

    python = next((p for p in (sys.executable, "/usr/bin/python3") if is_usable(p)), "")
    assert python, "no Python with venv that an ordinary user can execute"
    run(f"{shlex.quote(python)} -m venv venv")
    for command in commands[1:]:
        run(command.replace("/src", str(source)))
    (entry,) = re.findall(r"^ENTRYPOINT (.*)", DOCKERFILE, re.MULTILINE)
    copfl = " ".join(json.loads(entry))
    assert "backup" in run(f"{copfl} --help")
    run(f"{copfl} init {home}/federation --host server --secure --model mlp --rounds 5")
    assert "runs        none yet" in run(f"{copfl} status {home}/federation")
    for key in (
        "federation/keys/server.key",
        "federation-authority/ca.key",
        "federation-authority/coordinator",
    ):
        assert (home / key).stat().st_mode & 0o777 == 0o600
