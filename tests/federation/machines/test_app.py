"""The app that `init` writes, the certificates, the processes, and Flower's messages as packets."""

from __future__ import annotations

import inspect
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from copfl.data.sets.datasets import load
from copfl.errors import RunError, UsageError, WireError
from copfl.federation.machines.app import init
from copfl.federation.machines.deployed import as_text
from copfl.federation.machines.local_federation import LocalFederation
from copfl.federation.policy.names import ADDONS
from copfl.federation.policy.record import Policy
from copfl.federation.policy.request import refusals
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.proposal import KEY
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder, started_before
from copfl.federation.server.membership import read_roster
from copfl.settings.flat import flat
from copfl.wrappers.addons import with_addons
from tests.commands import called


def test_init_writes_an_app_whose_config_fits(tmp_path: Path) -> None:
    folder = init(
        tmp_path / "My Clinic",
        {"model": {"name": "mlp"}, "algorithm": {"name": "copfl", "rate": 0.1}, "run": {"rounds": 7}},
    )
    app = read_app(folder)
    settings = settings_of(app["config"])
    assert (settings.federation.rounds, settings.shape, settings.task.classes) == (7, (1, 8, 8), 10)
    assert app["config"]["algorithm"]["rate"] == 0.1
    # Whatever can be set is written, for Flower overrides nothing else.
    assert app["config"]["algorithm"]["budget"] == 0.0
    assert app["config"]["optimizer"]["name"] == "mamo"
    assert app["secure"] is False
    assert not (folder / "keys" / "server.key").exists()
    with pytest.raises(
        RunError, match="holds a federation already: invite further sites with `copfl federate invite"
    ):
        init(folder)


def test_init_writes_options_that_are_lists(tmp_path: Path) -> None:
    """Flower's run config has no lists; an option that is left out would be its default in every run."""
    given: dict[str, Any] = {
        "algorithm": {"name": "fedcalm", "personal": ["head", "buffers"]},
        "model": {"name": "mlp"},
        "task": {"metrics": "auc,accuracy", "class_weights": [1, 2, *[1] * 8]},
    }
    folder = init(tmp_path / "app", given)
    config = read_app(folder)["config"]
    assert all(
        isinstance(v, str | int | float) for table in ("algorithm", "task") for v in config[table].values()
    )
    tables = settings_of(config).run.tables()
    assert tables["algorithm"]["personal"] == ("head", "buffers")
    assert tables["task"] == {"metrics": ("auc", "accuracy"), "class_weights": (1, 2, *[1] * 8)}
    with pytest.raises(UsageError, match=r"personal='\[head' must be a list"):
        settings_of({"algorithm.name": "fedcalm", "algorithm.personal": "[head"})


def test_the_line_of_a_run_is_read_by_flower_as_it_was_written() -> None:
    """Flower's command line ends a value at the next quote, escaped or not."""
    config = pytest.importorskip(
        "flwr.common.config", reason='Flower is not installed: pip install "copfl[flower]"'
    )
    given = {"algorithm.personal": ["head", "b c"], "task.loss": '"x', "session.run": "a b", "run.rounds": 3}
    given |= {"session.resume": True, "network.deadline": 0.5, "samples.public": "it's", "model.name": "é"}
    read = config.parse_config_args([as_text(given)])
    assert read == {path: flat(value) for path, value in given.items()}
    with pytest.raises(UsageError, match="both kinds of quotes"):
        as_text({"task.loss": 'it\'s "x"'})


def test_init_describes_the_targets_of_a_regression(tmp_path: Path) -> None:
    settings = settings_of(read_app(init(tmp_path / "app", {"data": {"name": "diabetes"}}))["config"])
    mean, std = load("diabetes").target_scale
    assert (settings.task.criterion.kind, settings.task.classes) == ("regression", 1)
    assert settings.federation.samples.scale == (mean, std)


def test_an_invalid_setting_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    wrongs: list[dict[str, Any]] = [{"algorithm": {"name": "fedpack"}}, {"model": {"name": "cnnn"}}]
    wrongs += [{"run": {"round": 3}}, {"network": {"deadlin": 3}}, {"algorithm": {"name": "copfl", "rat": 1}}]
    for wrong in wrongs:
        with pytest.raises(UsageError, match="did you mean"):
            init(tmp_path / "app", wrong)
    assert not (tmp_path / "app").exists()
    with pytest.raises(RunError, match="holds no app"):
        read_app(tmp_path)


def test_a_host_that_others_can_reach_is_secure(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs certificates and node keys"):
        init(tmp_path / "open", host="fl.example.org", secure=False)


def test_certificates_and_keys(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason='certificates come with Flower: pip install "copfl[flower]"')
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    folder = init(tmp_path / "app", {"run": {"clients": 2}}, host="fl.example.org", trial=True)
    keys = folder / "keys"
    root, server = (
        x509.load_pem_x509_certificate((keys / name).read_bytes()) for name in ("ca.pem", "server.pem")
    )
    server.verify_directly_issued_by(root)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    for n in range(2):
        private = load_ssh_private_key((keys / f"node-{n}").read_bytes(), None)
        assert private.public_key() == load_ssh_public_key((keys / f"node-{n}.pub").read_bytes())
    for name in ("ca.key", "server.key", "node-0", "node-1", "coordinator"):
        assert stat.S_IMODE((keys / name).stat().st_mode) == 0o600
    assert read_app(folder)["secure"]
    assert "copfl site join NAME.invite --data" in (folder / "README.md").read_text()


def test_no_private_key_but_the_servers_own_is_on_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`init` for several machines makes no key for others, and puts the authority's beside the folder."""
    pytest.importorskip("cryptography", reason='certificates come with Flower: pip install "copfl[flower]"')
    done = called(capsys, "federate", "init", tmp_path / "app", "--host", "fl.example.org", "-m", "mlp")
    assert done.code == 0, done.err
    authority = tmp_path / "app-authority"
    assert f"{authority}: move it off the server" in done.out
    private = [p for p in (tmp_path / "app").rglob("*") if p.is_file() and b"PRIVATE KEY" in p.read_bytes()]
    assert [path.name for path in private] == ["server.key"]
    assert sorted(path.name for path in authority.iterdir()) == ["ca.key", "coordinator", "coordinator.pub"]
    for name in ("ca.key", "coordinator"):
        assert stat.S_IMODE((authority / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(authority.stat().st_mode) == 0o700
    assert read_roster(tmp_path / "app").members == ()
    assert not list((tmp_path / "app" / "keys").glob("node-*"))


def test_nothing_but_code_is_bundled(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')
    folder = init(tmp_path / "app", {"run": {"clients": 2}}, host="fl.example.org")
    (folder / "nodes" / "0").mkdir(parents=True)
    (folder / "nodes" / "0" / "secret.json").write_text("{}")
    (folder / "keys" / "secret.toml").write_text("")
    with LocalFederation(folder) as one:
        one.call(["flwr", "build", "--app", str(folder)])
    bundles = [*Path.cwd().glob("copfl.app.*.fab"), *folder.glob("*.fab")]
    names = [name for bundle in bundles for name in zipfile.ZipFile(bundle).namelist()]
    for bundle in bundles:
        bundle.unlink()
    assert sorted(name for name in names if not name.startswith(".info")) == [
        "README.md",
        "federated/__init__.py",
        "federated/custom.py",
        "pyproject.toml",
    ]


def test_messages_carry_packets() -> None:
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')
    from flwr.app import ConfigRecord, RecordDict

    from copfl.federation.machines.flower_transport import as_record, content_of

    class Message:
        def __init__(self, content: object) -> None:
            self.content = content

    good: Any = Message(as_record(("head", b"\0\1")))
    assert content_of(good) == ("head", b"\0\1")
    bad: Any = Message(RecordDict({"head": ConfigRecord({"x": 1})}))
    with pytest.raises(WireError, match="does not carry"):
        content_of(bad)


@pytest.mark.job
def test_descendants_of_the_processes_end_with_them(tmp_path: Path) -> None:
    """A child that put itself into a session of its own is found by the tag."""
    script = (
        "import subprocess, sys, time;"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True);"
        "print('started', flush=True); time.sleep(60)"
    )
    with LocalFederation(tmp_path) as processes:
        processes.start("parent", [sys.executable, "-c", script])
        for _ in range(200):
            if len(processes.alive()) == 2:
                break
            subprocess.run(["sleep", "0.05"], check=True)
        assert len(processes.alive()) == 2
    assert processes.alive() == []


def test_a_run_that_flower_starts_again_is_known(tmp_path: Path) -> None:
    folder = ServerFolder(str(tmp_path), "a", resume=False)
    assert not started_before(str(tmp_path), "a", 5)
    folder.path.mkdir()
    (folder.path / "config.json").write_text('{"flower-run": 5}')
    (folder.path / "server.copfl").write_bytes(b"")
    assert started_before(str(tmp_path), "a", 5)
    assert not started_before(str(tmp_path), "a", 6)


def test_the_command_line_writes_an_app(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-a", "copfl", "-m", "mlp", "--wire", "fp16", "-s", "algorithm.rate=0.1")
    done = called(capsys, "federate", "init", tmp_path / "app", *words)
    assert done.code == 0, done.err
    assert "copfl federate up" in done.out
    config = read_app(tmp_path / "app")["config"]
    assert (config["network"]["wire"], config["algorithm"]["rate"], config["model"]["name"]) == (
        "fp16",
        0.1,
        "mlp",
    )
    wrong = called(capsys, "federate", "init", tmp_path / "b", "-s", "rounds")
    assert "must be TABLE.KEY=VALUE" in wrong.err


def test_a_greeting_and_the_command_line_need_no_torch() -> None:
    """Flower starts a process per message: a greeting should not take seconds to answer."""
    modules = "copfl.federation.server.registry, copfl.cli.federate.commands"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_node_without_a_policy_takes_the_default_for_texts(tmp_path: Path) -> None:
    """Its learning rate falls by a schedule, which can only lower it; an average of its weights stays at the node."""
    lines = [f"word{n % 5} of {n % 3},{('no', 'yes')[n % 2]},site{n % 3}" for n in range(60)]
    (tmp_path / "texts.csv").write_text("\n".join(["line,answer,site", *lines]) + "\n")
    data = {"name": str(tmp_path / "texts.csv"), "text": "line", "target": "answer", "client": "site"}
    config = read_app(init(tmp_path / "app", {"data": data}))["config"]
    assert config["addons"]["lr_schedule"] == "cosine"
    config = {title: table for title, table in config.items() if title != KEY}
    assert refusals(Policy(), config) == ()
    assert refusals(Policy(addons=()), config)
    assert config["addons"]["ema"] == 0.8
    assert refusals(Policy(), config | {"addons": {**config["addons"], "bn_stats": "local"}})


def test_an_add_on_that_is_off_is_known_to_the_policy() -> None:
    options = [p for p in inspect.signature(with_addons).parameters.values() if p.name != "algorithm"]
    assert {option.name: option.default for option in options} == ADDONS


def test_an_algorithm_whose_benefit_cannot_be_measured_names_one_that_can(tmp_path: Path) -> None:
    tables: dict[str, dict[str, Any]] = {
        "data": {"name": "digits"},
        "run": {"clients": 6, "benefit": True},
        "model": {"name": "mlp"},
    }
    with pytest.raises(UsageError, match="choose an algorithm that averages, such as fedavg"):
        init(tmp_path / "first", tables | {"algorithm": {"name": "fedpac"}})
    init(tmp_path / "second", tables | {"algorithm": {"name": "fedavg"}})
