"""A run config asks for nothing that a machine's owner did not allow, and is refused before anything happens."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from copfl.algorithms import ALGORITHMS
from copfl.core.criteria import LOSSES, REGRESSION_LOSSES
from copfl.data.samples import KINDS
from copfl.errors import CopflError, UsageError
from copfl.federation.machines.app import init
from copfl.federation.machines.superlink import COMPONENTS, check_app
from copfl.federation.node import respond
from copfl.federation.node.resident import Resident
from copfl.federation.policy import names, own_code, request
from copfl.federation.policy.fields import refusals_of
from copfl.federation.policy.file import FILE, VARIABLE, policy_of, read_policy, write_policy
from copfl.federation.policy.own_app import allowing
from copfl.federation.policy.record import (
    AllowedBase,
    AllowedCode,
    AllowedFile,
    Policy,
    PrivacyRules,
    RequestBounds,
)
from copfl.federation.policy.refusal import Refusal
from copfl.federation.policy.request import DEFAULT_CLIP, admitted, refusals
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.chained_log import AUDIT
from copfl.federation.protocol.messages import HELLO, TRAIN, Content, Message
from copfl.federation.protocol.settings import settings_of
from copfl.models import MODELS, adapters
from copfl.models.pretrained import SOURCES
from copfl.parts.server_steps import SERVER_STEPS
from copfl.settings import components, schema
from copfl.settings.checking import parameters_of
from copfl.settings.complete import complete
from copfl.settings.federation import OWN, RECORDS, RUN_KEYS, Federation, is_plain_name
from copfl.settings.flat import flattened, nested
from copfl.settings.policy_lines import KEYS, AtMost, Simulated
from copfl.settings.record import declared, setting
from copfl.wrappers.addons import with_addons
from copfl.wrappers.robust import ROBUST_RULES
from tests.federation.network import CONFIG, UNSIGNED, answered, digits, node_of, write_nodes
from tests.slow import SLOW
from tests.toys import only_model

LINES = {KEYS, *(field.name for field in dataclasses.fields(Policy))}
LINES |= {f"bounds.{field.name}" for field in dataclasses.fields(RequestBounds)}
LINES |= {"privacy.noise", "privacy.clip", "secure_aggregation.required", "secure_aggregation.cohort"}
LINES |= {"secure_aggregation.neighbours", "secure_aggregation.even_batches", "statistics.allowed"}

WATCHED: tuple[str, ...] = (
    "import",
    "open",
    "exec",
    "compile",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
)
WATCHED += (
    "os.listdir",
    "os.scandir",
    "socket.connect",
    "ctypes.dlopen",
    "pickle.find_class",
    "urllib.Request",
)
seen: list[tuple[str, str]] = []
is_watching: list[bool] = [False]


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not is_watching[0] or event not in WATCHED:
        return
    subject = str(arguments[0]) if arguments else ""
    # A node's own log is no effect of a run config: every refusal is in it.
    if not subject.endswith(AUDIT):
        seen.append((event, subject))


@functools.cache
def add_hook() -> None:
    """For the rest of this process, where it slows every event: Python removes none."""
    sys.addaudithook(_hook)


def effects(call: Callable[[], object]) -> list[tuple[str, str]]:
    """What a call imports, opens, executes or starts."""
    add_hook()
    seen.clear()
    is_watching[0] = True
    try:
        call()
    except CopflError:
        pass
    finally:
        is_watching[0] = False
    return list(seen)


@pytest.fixture(scope="module")
def node_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_nodes(digits(), tmp_path_factory.mktemp("node"))[0] | {"worker": False}


DEFAULTS = flattened(settings_of({}).federation.tables())
HOSTILE: dict[str, dict[str, Any]] = {
    # Code by its name.
    "a command": {"model.name": "subprocess:run", "model.args": "touch /tmp/owned"},
    "a shell": {"model.name": "os:system", "model.command": "id"},
    "a table": {"model.name": "subprocess:run", "model": {"args": "id", "shell": True}},
    "an import with effects": {"model.name": "antigravity:fly"},
    "a function of the library": {"model.name": "torch:load"},
    "a function of numpy": {"model.name": "numpy:load", "model.file": "/etc/passwd"},
    "a function of an installed package": {"model.name": "pip:main"},
    "a function of copfl": {"model.name": "copfl.files:write_bytes"},
    "a class of copfl": {"model.name": "copfl.models.networks:Mlp"},
    "builtins": {"model.name": "builtins:exec"},
    "dotted": {"model.name": "importlib.util:spec_from_file_location"},
    "an attribute of an attribute": {"model.name": "os:path.os.system"},
    "the template's code": {"model.name": "federated.custom:model"},
    "unicode identifiers": {"model.name": "ſubprocess:run"},
    "letters that look alike": {"model.name": "οs:system"},
    "full-width": {"model.name": "ｏｓ：system"},
    "a space": {"model.name": " subprocess:run"},
    "a line break": {"model.name": "subprocess:run\n"},
    "a zero": {"model.name": "subprocess:run\0"},
    "another model in its options": {
        "model.name": "cnn",
        "model.model": "subprocess:run",
        "model.value": "os:system",
    },
    "another model in a table": {"model.name": "cnn", "model": {"name": "os:system"}},
    "another rule in its options": {"robust.name": "clip", "robust": {"name": "os:system"}},
    "another algorithm in its options": {"algorithm.name": "os:system"},
    "its folder": {"model.name": "mlp", "model.code": "/tmp"},
    "the folder of a loss": {"task.code": "/tmp", "task.loss": "cross_entropy"},
    "a loss": {"task.loss": "os:getcwd"},
    "a loss in a table": {"task": {"loss": "shutil:rmtree"}},
    "a metric": {"task.metrics": "os:system"},
    "a metric in a list": {"task.metrics": '["accuracy", "os:system"]'},
    "a metric after a comma": {"task.metrics": "accuracy, os:system"},
    "metrics as a list": {"task.metrics": ["os:system"]},
    "an algorithm": {"algorithm.name": "os:system"},
    "an optimizer": {"optimizer.name": "os:system"},
    "a robust rule": {"robust.name": "os:system"},
    "an adapter": {"adapter.name": "os:system"},
    "an adapter's option": {"adapter.name": "lora:r=8,targets=os:system"},
    "a wrapper of version 0.1": {"guard": "os:system"},
    "add-ons": {"addons.bn_stats": "local"},
    "add-ons of version 0.1": {"levers.momentum": 0.9},
    # Files.
    "a public file": {"algorithm.name": "ktpfl", "samples.public": "/etc/passwd"},
    "the node's own data": {"algorithm.name": "ktpfl", "samples.public": "data.npz"},
    "a file of the home": {"samples.public": "~/.ssh/id_rsa"},
    "a variable": {"samples.public": "$HOME/x.npz"},
    "a path upwards": {"samples.public": "../../x.npz"},
    "an address": {"samples.public": "https://evil.example/x.npz"},
    "a device": {"samples.public": "/dev/zero"},
    "a base": {"model.name": "hf:evil/model"},
    "a base in a folder": {"model.name": "hf:/tmp/model"},
    "a base upwards": {"model.name": "hf:../../model"},
    "a base of torchvision": {"model.name": "torchvision:resnet18"},
    "a base of timm": {"model.name": "timm:hf-hub:evil/model"},
    "a base in capital letters": {"model.name": "HF:evil/model"},
    "a hash that makes a name a base": {"model.name": "mlp", "model.sha256": "0" * 64},
    "weights": {"model.name": "mlp", "model.weights": "/etc/passwd"},
    "a tokenizer": {"model.name": "embedding", "model.tokenizer": "/etc"},
    "the server's folder": {"runs": "/etc/cron.d"},
    "a run upwards": {"session.run": "../../etc"},
    "an absolute run": {"session.run": "/etc"},
    "a hidden run": {"session.run": ".worker"},
    "a run like the policy": {"session.run": "policy.toml"},
    "a run like the key": {"session.run": "noise.key"},
    "a run in unicode": {"session.run": "ａ"},
    "a path as an option": {"algorithm.weights": "/etc/passwd"},
    "a path in a list": {"algorithm.personal": '["head", "/etc/passwd"]'},
    "a variable as an option": {"algorithm.weights": "${HOME}"},
    # Numbers.
    "many rounds": {"run.rounds": 2**62},
    "more rounds than a number": {"run.rounds": 10**400},
    "no rounds": {"run.rounds": -1},
    "many epochs": {"algorithm.epochs": 100_000},
    "epochs in a table": {"algorithm": {"epochs": 100_000}},
    "epochs of a head": {"algorithm.name": "fedrep", "algorithm.head_epochs": 10**6},
    "many steps": {"algorithm.name": "pfedme", "algorithm.inner_steps": 10**9},
    "many clients": {"run.clients": 10**9},
    "a wide model": {"model.width": 10**9},
    "a large sample": {"samples.shape": "[3, 100000, 100000]"},
    "a shape that overflows": {"samples.shape": json.dumps([999999999] * 5)},
    "a long shape": {"samples.shape": json.dumps([1] * 50_000)},
    "many classes": {"samples.classes": 999999999},
    "a large batch": {"run.batch": 10**12},
    "many updates": {"session.join": 10**9},
    "an endless deadline": {"network.deadline": float("inf")},
    "no number": {"optimizer.lr": float("nan")},
    "an infinite list": {"task.class_weights": "[1e999]"},
    "a deep list": {"algorithm.personal": "[" * 5000},
    "a list of lists": {"algorithm.personal": "[[[]]]"},
    "a list of tables": {"algorithm.personal": '[{"a": 1}]'},
    "a long list": {"algorithm.personal": json.dumps(["a"] * 100_000)},
    "a long text": {"samples.classes": "a," * 10**6},
    "one client in a sum": {"secure.aggregation": True, "run.clients": 1},
    "few of many in a sum": {"secure.aggregation": True, "run.clients": 1000, "run.participation": 0.001},
    "rollback": {"session.rollback": True},
    # Types, keys and spellings.
    "a text as a number": {"run.rounds": "5"},
    "true as a number": {"run.rounds": True},
    "a number as a flag": {"secure.aggregation": 1},
    "a number as a name": {"model.name": 5},
    "a list as a name": {"model.name": ["cnn"]},
    "none": {"model.name": None},
    "bytes": {"model.name": b"cnn"},
    "a table as a name": {"model.name": {"name": "cnn"}},
    "an unknown key": {"exec": "id"},
    "an unknown table": {"env.PATH": "/tmp"},
    "an unknown option of a task": {"task.shell": "id; ls"},
    "two spellings": {"network.min_replies": 1, "network": {"min_replies": 2}},
    "a key of the class": {"__class__": "x"},
    "an option of the class": {"algorithm.__class__": "x"},
    "an option with a dot": {"algorithm.a.b": 1},
    "a key in capital letters": {"MODEL": "cnn"},
    "a key in unicode": {"ｍodel": "subprocess:run"},
    "an empty key": {"": 1},
    "a key that is a number": {5: 1},  # type: ignore[dict-item]
    "many keys": {f"algorithm.a{n}": n for n in range(1000)},
    "new clients": {"run.new_clients": 0.1},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_run_config_is_refused_before_anything_happens(
    name: str, node_config: dict[str, Any]
) -> None:
    """At the check, and at the node's door: nothing is imported or opened."""
    config = HOSTILE[name]
    refused = refusals(Policy(), config)
    assert refused
    assert {refusal.line for refusal in refused} <= LINES
    with pytest.raises(
        UsageError, match=r"the policy of this machine's owner refuses the run config: .* \[\w+"
    ):
        admitted(Policy(), config)
    message, answers = Message(TRAIN, None), list[Content]()
    modules = set(sys.modules)
    assert effects(lambda: answers.append(respond.respond(message, config, node_config, os.getpid()))) == []
    assert set(sys.modules) == modules
    for head, body in answers:
        text = json.loads(head)["refused"]
        assert body == b""
        assert any(f"[{line}]" in text for line in LINES)
        assert str(node_config["state-dir"]) not in text


def random_values(draw: random.Random) -> Any:
    names = ["subprocess:run", "os:system", "hf:x", "hf:/etc", "torchvision:x", "timm:x", "canary_module:run"]
    names += [
        "cnn",
        "mlp",
        "fedavg",
        "copfl",
        "accuracy",
        "adam",
        "lora:r=8",
        "clip",
        "local",
        "text",
        "1,8,8",
    ]
    paths = [
        "/etc/passwd",
        "~/x",
        "$HOME",
        "%TEMP%",
        "../x",
        "a/b",
        "C:\\x",
        "file:///x",
        "\\\\host\\x",
        "//x",
    ]
    signs = "abcXYZ019.:/~$%@#*?[]{}()<>|&;'\"\\ \n\t\0éßжｏ．\u202e\ud800"
    kind = draw.randrange(10)
    if kind == 0:
        return draw.choice([True, False, None, b"x", {}, [], float("nan"), float("inf"), -float("inf")])
    if kind == 1:
        return draw.choice([-1, 0, 1, 3, 2**31, 2**62, 2**63, 10**30, -(2**63), 0.5, 1e30, -1e308, 1e-300])
    if kind in (2, 3):
        return "".join(draw.choice(signs) for _ in range(draw.randrange(30)))
    if kind == 4:
        return json.dumps([draw.choice(names + paths) for _ in range(draw.randrange(4))])
    if kind == 5:
        return ",".join(draw.choice(names) for _ in range(draw.randrange(4)))
    if kind == 6:
        return draw.choice(names) + draw.choice(signs)
    return draw.choice(paths if kind == 7 else names)


def random_config(draw: random.Random, link: Path) -> dict[str, Any]:
    keys = [*DEFAULTS, *(f"{kind}.name" for kind in ("algorithm", "model", "adapter", "server", "robust"))]
    keys += ["runs", "code", "guard", "levers", "min-replies", "secure_aggregation", "ｍodel", "data.name"]
    prefixes = [
        *("algorithm", "optimizer", "model", "adapter", "server", "robust", "addons", "privacy", "task"),
        "guard",
    ]
    options = [
        "name",
        "code",
        "sha256",
        "weights",
        "tokenizer",
        "loss",
        "metrics",
        "args",
        "command",
        "width",
    ]
    options += ["lr", "epochs", "__class__", "a.b", "path"]
    config: dict[str, Any] = {}
    for _ in range(draw.randrange(1, 6)):
        value = str(link) if draw.random() < 0.05 else random_values(draw)
        prefix, option = draw.choice(prefixes), draw.choice(options)
        form = draw.randrange(4)
        if form == 0:
            config[f"{prefix}.{option}"] = value
        elif form == 1:
            config[prefix] = {option: value, draw.choice(options): random_values(draw)}
        else:
            config[draw.choice(keys)] = value
    return config


def test_no_random_run_config_imports_or_opens_anything(
    tmp_path: Path, node_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are refused have no effect at all; of the others the settings are made."""
    (tmp_path / "canary_module.py").write_text(
        f"open({str(tmp_path / 'owned')!r}, 'w')\ndef run(**_): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    link = tmp_path / "link"
    link.symlink_to(node_config["data"])
    settings_of({"model.name": "cnn"})  # imports on first use are none of a run config
    draw, count = random.Random(20261117), 0
    cases = 3000 if SLOW else 400
    for _ in range(cases):
        config = random_config(draw, link)
        found: list[Any] = []
        caused = effects(lambda config=config, found=found: found.append(refusals(Policy(), config)))  # type: ignore[misc]
        assert caused == [], config
        (refused,) = found
        if refused:
            count += 1
            assert {refusal.line for refusal in refused} <= LINES, config
            assert effects(lambda config=config: answered(node_config, config)) == [], config  # type: ignore[misc]
            continue
        caused = effects(lambda config=config: settings_of(admitted(Policy(), config).run_config))  # type: ignore[misc]
        named = json.dumps(list(config.values()), default=str)
        harmful = [effect for effect in caused if effect[0] not in ("open", "import", "exec", "compile")]
        harmful += [effect for effect in caused if effect[1] and effect[1] in named]
        assert harmful == [], config
    assert count >= 2 * cases // 3
    assert "canary_module" not in sys.modules
    assert not (tmp_path / "owned").exists()


def test_the_names_are_those_of_the_registries() -> None:
    """The lists are written out, so that the check needs no torch."""
    registries: dict[str, Iterable[str]] = {
        "ALGORITHMS": ALGORITHMS,
        "MODELS": MODELS,
        "OPTIMIZERS": components.OPTIMIZERS,
        "ROBUST": ROBUST_RULES,
        "ADDONS": parameters_of(with_addons, ["algorithm"]),
        "SERVERS": SERVER_STEPS,
        "ADAPTERS": adapters.ADAPTERS,
        "TASKS": KINDS,
        "LOSSES": {loss for losses in LOSSES.values() for loss in losses},
    }
    for name, registry in registries.items():
        listed = sorted(getattr(names, name))
        assert sorted(registry) == listed, (
            f"write {name} of federation/policy/names.py as the registry has it"
        )
    assert set(REGRESSION_LOSSES) <= set(names.LOSSES)
    assert tuple(SOURCES) == names.SOURCES


def test_every_key_of_a_run_config_is_known_to_the_policy() -> None:
    assert refusals(Policy(), DEFAULTS) == ()
    values = [f"{title}.{f.name}" for title, record in OWN.items() for f in declared(record)]
    values += [*(f"run.{key}" for key in RUN_KEYS), "privacy.noise", "privacy.clip", "privacy.delta"]
    assert {*DEFAULTS} - {"algorithm.epochs"} >= {key for key in values if not key.startswith("privacy")}
    for path in values:
        wrong = [[None], [True, "x"]]  # of no setting
        refused = [refusals(Policy(), {path: json.dumps(value)}) for value in wrong]
        assert any(refused), path
        assert "is no key" not in str(refused), path


def test_every_setting_of_a_federation_has_a_policy_line() -> None:
    """Of [run] a federation is told exactly the settings that have one; `code` of [privacy] means nothing."""
    without = [
        f"{title}.{f.name}"
        for title, record in RECORDS.items()
        for f in declared(record)
        if f.metadata["policy"] is None and title != "run"
    ]
    assert without == ["privacy.code"]
    of_run = {f.name: f.metadata["policy"] for f in declared(schema.RunSettings)}
    told = [name for name, line in of_run.items() if not isinstance(line, Simulated | NoneType)]
    assert tuple(told) == RUN_KEYS
    assert not {"device", "engine", "workers", "store", "threads"} & {*RUN_KEYS}  # a node decides


def test_every_policy_line_of_the_schema_is_a_line_of_the_policy() -> None:
    for title, record in RECORDS.items():
        of_options = getattr(record, "of_options", {})
        lines = [*of_options.values()] if isinstance(of_options, dict) else [of_options]
        for line in [*lines, *(f.metadata["policy"] for f in declared(record))]:
            named = {getattr(line, "line", ""), getattr(line, "most", "")} - {"", KEYS}
            for key in named:
                assert not isinstance(key, str) or attrgetter(key)(Policy()) is not None, (title, line)


@pytest.mark.parametrize(("title", "why"), [
    ("run", "is no key of a run config"),
    ("network", "is no key of a run config"),
    ("privacy", "is no key of a run config"),
    ("optimizer", "is no option"),
    ("task", "is no option"),
    ("addons", "is no option"),
])  # fmt: skip
def test_a_new_setting_without_a_policy_line_is_refused(
    title: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_new(**about: Any) -> type[Any]:
        new = ("new_one", int, setting(0, "A setting that somebody adds.", **about))
        return dataclasses.make_dataclass("New", [new], bases=(RECORDS[title],), frozen=True, kw_only=True)

    silent, said = with_new(), with_new(minimum=0, policy=AtMost("bounds.rounds"))
    monkeypatch.setitem(RECORDS, title, silent)
    assert [*refusals_of(Policy(), title, {"new_one": 1})] == [Refusal(KEYS, f"{title}.new_one=1 {why}")]
    monkeypatch.setitem(RECORDS, title, said)
    assert [*refusals_of(Policy(), title, {"new_one": 1})] == []
    assert [refusal.line for refusal in refusals_of(Policy(), title, {"new_one": 10_001})] == [
        "bounds.rounds"
    ]


def test_what_a_node_decides_is_no_key_of_a_run_config() -> None:
    for field in declared(schema.RunSettings):
        if field.name not in RUN_KEYS:
            refused = refusals(Policy(), {f"run.{field.name}": field.default})
            assert "is no key of a run config" in refused[0].why, field.name
    for kind in ("data", "partition", "attack"):
        assert refusals(Policy(), {f"{kind}.name": "digits"})


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_with_its_defaults_is_allowed(name: str) -> None:
    tables = complete({"algorithm": {"name": name}}).tables()
    options = flattened({kind: tables[kind] for kind in ("algorithm", "optimizer") if kind in tables})
    if only := only_model(ALGORITHMS[name]):
        options |= {"model.name": only}
    assert refusals(Policy(), CONFIG | options) == ()


@pytest.mark.parametrize(
    ("lines", "config", "line"),
    [
        ({"algorithms": ("fedavg",)}, {"algorithm.name": "copfl"}, "algorithms"),
        ({"models": ("mlp",)}, {"model.name": "cnn"}, "models"),
        ({"optimizers": ("sgd",)}, {"optimizer.name": "adam"}, "optimizers"),
        ({"tasks": ("regression",)}, {"samples.kind": "classification"}, "tasks"),
        ({"metrics": ("accuracy",)}, {"task.metrics": "auc"}, "metrics"),
        ({"losses": ("huber",)}, {"task.loss": "squared"}, "losses"),
        ({"robust": ()}, {"robust.name": "clip"}, "robust"),
        ({"adapters": ()}, {"adapter.name": "lora"}, "adapters"),
        ({"bounds": RequestBounds(rounds=5)}, {"run.rounds": 6}, "bounds.rounds"),
        ({"bounds": RequestBounds(intervals=2)}, {"task.cuts": [1.0, 2.0, 3.0]}, "bounds.intervals"),
    ],
)
def test_the_owner_chooses_among_the_names(lines: dict[str, Any], config: dict[str, Any], line: str) -> None:
    assert refusals(Policy(), config) == ()
    assert [refusal.line for refusal in refusals(Policy(**lines), config)] == [line]


@pytest.mark.parametrize(
    ("lines", "config", "line"),
    [
        ({"algorithms": ("fedavg",)}, {}, "algorithms"),
        ({"tasks": ("regression",)}, {}, "tasks"),
        ({"metrics": ("auc",)}, {}, "metrics"),
        ({"metrics": ("auc",)}, {"task.metrics": "[]"}, "metrics"),
        ({"metrics": ("auc",)}, {"task.metrics": " , "}, "metrics"),
        ({"losses": ("huber",)}, {}, "losses"),
        ({"bounds": RequestBounds(rounds=5)}, {}, "bounds.rounds"),
        ({"bounds": RequestBounds(batch=8)}, {}, "bounds.batch"),
        ({"bounds": RequestBounds(clients=2)}, {}, "bounds.clients"),
        ({"bounds": RequestBounds(classes=2)}, {}, "bounds.classes"),
        ({"bounds": RequestBounds(numbers=10)}, {}, "bounds.numbers"),
        ({"bounds": RequestBounds(deadline=10)}, {}, "bounds.deadline"),
        ({"privacy": PrivacyRules(noise=0.1, clip=0.1)}, {"privacy.noise": 1.0}, "privacy.clip"),
    ],
)
def test_a_key_that_is_left_out_is_what_it_means(
    lines: dict[str, Any], config: dict[str, Any], line: str
) -> None:
    assert [refusal.line for refusal in refusals(Policy(**lines), config)] == [line]


@pytest.mark.parametrize(
    ("lines", "config", "line"),
    [
        ("[bounds]\nepochs = 5", {"algorithm.name": "fedrep"}, "bounds.epochs"),  # ten of its head
        ('optimizers = ["sgd"]', {"algorithm.name": "copfl"}, "optimizers"),
        (
            "[bounds]\noption = 10",
            {"algorithm.name": "fedavg", "model.name": "cnn"},
            "bounds.option",
        ),  # its hidden units
        (
            "[bounds]\nparameters = 1000",
            {"algorithm.name": "fedavg", "model.name": "words"},
            "bounds.parameters",
        ),
    ],
)
def test_the_default_of_an_algorithm_is_what_it_means(
    lines: str, config: dict[str, Any], line: str, tmp_path: Path
) -> None:
    (node_config, *_) = write_nodes(digits(), tmp_path)
    Path(node_config["state-dir"]).mkdir(parents=True)
    (Path(node_config["state-dir"]) / FILE).write_text(f"{lines}\n[proposals]\nunsigned = true\n")
    plain = {key: value for key, value in CONFIG.items() if not key.startswith(("model.width", "optimizer"))}
    head, _body = answered(node_config, plain | config)
    assert f"[{line}]" in json.loads(head)["refused"]


@pytest.mark.parametrize(
    ("config", "is_allowed"),
    [
        ({"privacy.noise": 1.0, "run.clients": 10_000}, False),  # a node alone adds a hundredth of it
        ({"privacy.noise": 1.0, "run.clients": 4}, False),
        ({"privacy.noise": 2.0, "run.clients": 4}, True),
        ({"privacy.noise": 1.5, "run.clients": 4}, False),
        ({"privacy.noise": 1.0, "run.clients": 4, "run.participation": 0.25}, True),
        ({"privacy.noise": 1.0, "run.clients": 4, "secure.aggregation": True}, True),
        ({"privacy.noise": 0.9, "run.clients": 4, "secure.aggregation": True}, False),
    ],
)
def test_the_least_noise_is_that_of_what_the_server_receives(
    config: dict[str, Any], is_allowed: bool
) -> None:
    found = refusals(Policy(privacy=PrivacyRules(noise=1.0)), config)
    assert [refusal.line for refusal in found] == ([] if is_allowed else ["privacy.noise"])


def test_the_defaults_are_those_of_the_settings() -> None:
    completed = settings_of({}).federation.tables()
    for title in ("network", "samples", "algorithm"):
        assert request.DEFAULTS[title].items() <= completed[title].items()
    assert {key: request.DEFAULTS["run"][key] for key in RUN_KEYS} == completed["run"]
    assert schema.Privacy().noise is None
    assert complete({"privacy": {"noise": 1.0}}).privacy.options["clip"] == DEFAULT_CLIP
    for kind in KINDS:
        assert names.USUAL_LOSS[kind] in LOSSES[kind]
    assert REGRESSION_LOSSES[0] == names.USUAL_LOSS["regression"]


# -- what an owner allows ------------------------------------------------------------------------------------

NET = """
import math
from torch import nn

def net(shape, classes, width=16):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU(), nn.Linear(width, classes))
"""


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Modules that a test loads are forgotten after it."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("ward", "elsewhere")):
            del sys.modules[name]
    own_code._loaded.clear()
    own_code._packages.clear()


def entry(folder: Path, name: str = "ward_net", content: str = NET) -> AllowedCode:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(content)
    return AllowedCode(f"{name}:net", folder, hashlib.sha256(content.encode()).hexdigest())


@pytest.mark.usefixtures("forgotten")
def test_own_code_is_imported_from_the_owners_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = entry(tmp_path / "other", content="raise SystemExit('executed')")
    monkeypatch.syspath_prepend(str(other.folder))  # it would be found first
    monkeypatch.chdir(other.folder)
    code = entry(tmp_path / "own")
    run_config, needed = admitted(Policy(code=(code,)), CONFIG | {"model.name": "ward_net:net"})
    own_code.load(needed)
    settings = settings_of(run_config)
    assert settings.task.d == 64 * 16 + 16 + 160 + 10
    assert sys.modules["ward_net"].__file__ == str(code.folder / "ward_net.py")


@pytest.mark.usefixtures("forgotten")
def test_code_that_changed_since_is_refused(tmp_path: Path) -> None:
    code = entry(tmp_path / "own")
    (tmp_path / "own" / "ward_net.py").write_text(NET + f"\nopen({str(tmp_path / 'owned')!r}, 'w')\n")
    with pytest.raises(UsageError, match="has another SHA-256 than in the policy") as error:
        own_code.load([code])
    assert str(tmp_path) not in str(error.value)
    assert not (tmp_path / "owned").exists()
    assert "ward_net" not in sys.modules


@pytest.mark.usefixtures("forgotten")
def test_new_code_replaces_the_old_one_in_a_worker(tmp_path: Path) -> None:
    own_code.load([entry(tmp_path / "own")])
    first = sys.modules["ward_net"]
    own_code.load([entry(tmp_path / "own")])
    assert sys.modules["ward_net"] is first
    own_code.load([entry(tmp_path / "own", content=NET + "\nVERSION = 2\n")])
    assert sys.modules["ward_net"].VERSION == 2


@pytest.mark.usefixtures("forgotten")
def test_a_worker_builds_its_model_again_when_the_owner_enters_new_code(tmp_path: Path) -> None:
    config, sizes, resident = CONFIG | {"model.name": "ward_net:net"}, [], Resident()
    del config["model.width"]
    for width in (16, 8):
        code = entry(tmp_path / "own", content=NET.replace("width=16", f"width={width}"))
        run_config, needed = admitted(Policy(code=(code,)), config)
        own_code.load(needed)
        sizes.append(resident.settings(run_config, needed, Policy().bounds).task.d)
    assert sizes == [64 * 16 + 16 + 160 + 10, 64 * 8 + 8 + 80 + 10]


@pytest.mark.usefixtures("forgotten")
def test_modules_of_a_package_find_their_neighbours(tmp_path: Path) -> None:
    (tmp_path / "ward").mkdir()
    (tmp_path / "ward" / "__init__.py").write_text("raise SystemExit('executed')")
    (tmp_path / "ward" / "layers.py").write_text("WIDTH = 7\n")
    content = "from .layers import WIDTH\ndef net(shape, classes): return WIDTH\n"
    (tmp_path / "ward" / "nets.py").write_text(content)
    code = own_code.entered("ward.nets:net", tmp_path)
    assert code.sha256 == hashlib.sha256(content.encode()).hexdigest()
    own_code.load([code])
    assert sys.modules["ward.nets"].net((1,), 2) == 7


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("line", ["from os import system as net", "import os as net"])
def test_what_a_module_imported_is_not_its_own(line: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not defined in its module"):
        own_code.load([entry(tmp_path / "own", content=line)])


@pytest.mark.parametrize(
    "reference", ["subprocess:run", "os.path:join", "copfl.files:write_bytes", "torch:load"]
)
def test_no_owner_can_allow_the_standard_library_or_an_installed_package(
    reference: str, tmp_path: Path
) -> None:
    top = sys.modules[reference.partition(":")[0].partition(".")[0]]
    for folder in (tmp_path, Path(str(top.__file__)).parent, Path(str(top.__file__)).parents[1]):
        with pytest.raises(UsageError, match=r"is a module of Python|is an installed package"):
            own_code.load(Policy(code=(AllowedCode(reference, folder, "0" * 64),)).code)


@pytest.mark.parametrize(
    "reference", ["ward_net:net.__globals__", "ward_net:", ":net", "ward_net", "ward net:net"]
)
def test_an_entry_of_code_is_one_name_in_one_module(reference: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be module:attribute"):
        Policy(code=(AllowedCode(reference, tmp_path, "0" * 64),))


def test_only_the_very_reference_is_allowed(tmp_path: Path) -> None:
    allowed = Policy(code=(AllowedCode("ward_net:net", tmp_path, "0" * 64),))
    assert refusals(allowed, {"model.name": "ward_net:net", "model.width": 8}) == ()
    assert refusals(allowed, {"task.loss": "ward_net:net", "task.metrics": "accuracy,ward_net:net"}) == ()
    for other in (
        "ward_net:nn",
        "ward_net:net.__globals__",
        "ward_net.net:net",
        "math:sqrt",
        "ward_net: net",
    ):
        assert [refusal.line for refusal in refusals(allowed, {"model.name": other})] == ["code"]
    for path in ("/etc/passwd", "~/x", "os:system"):
        assert refusals(allowed, {"model.name": "ward_net:net", "model.weights": path})
        assert refusals(allowed, {"model.name": "ward_net:net", "model.path": path})


def test_files_are_the_owners(tmp_path: Path) -> None:
    allowed = Policy(
        files=(
            AllowedFile("public", "chest", tmp_path / "a.npz"),
            AllowedFile("tokenizer", "words", tmp_path),
        )
    )
    run_config, _ = admitted(
        allowed, {"samples.public": "chest", "algorithm.name": "ktpfl", "model.tokenizer": "words"}
    )
    assert run_config["samples.public"] == str(tmp_path / "a.npz")
    assert run_config["model.tokenizer"] == str(tmp_path)
    for path in (str(tmp_path / "a.npz"), "words", "./chest", "chest ", ["chest"]):
        assert [refusal.line for refusal in refusals(allowed, {"samples.public": path})] == ["files"]


def test_a_base_is_the_owners_by_its_name_or_its_hash(tmp_path: Path) -> None:
    digest = "ab" * 32
    allowed = Policy(bases=(AllowedBase("hf:bert", digest, tmp_path / "bert"),))
    for config in (
        {"model.name": "hf:bert"},
        {"model.name": "hf:bert", "model.sha256": digest},
        {"model.name": "hf:/somewhere/else", "model.sha256": digest},
    ):
        run_config, _ = admitted(allowed, config)
        assert run_config["model.name"] == f"hf:{tmp_path / 'bert'}"
        assert run_config["model.sha256"] == digest
    for config in (
        {"model.name": "hf:other"},
        {"model.name": "hf:bert", "model.sha256": "cd" * 32},
        {"model.name": "timm:bert", "model.sha256": digest},
        {"model.name": "bert", "model.sha256": digest},
        {"model.name": "hf:bert", "model.weights": "/etc/passwd"},
    ):
        assert refusals(allowed, config), config


def test_a_policy_is_a_file(tmp_path: Path) -> None:
    written = Policy(
        algorithms=("fedavg",),
        rollback=True,
        bounds=RequestBounds(rounds=7),
        code=(AllowedCode("ward_net:net", tmp_path, "0" * 64),),
        bases=(AllowedBase("hf:bert", "1" * 64, tmp_path),),
        files=(AllowedFile("public", "chest", tmp_path / "x.npz"),),
    )
    path = write_policy(tmp_path / "p.toml", written)
    assert read_policy(path) == written
    assert path.stat().st_mode & 0o077 == 0
    assert policy_of(path, tmp_path) == written
    assert policy_of(None, tmp_path) == Policy()
    write_policy(tmp_path / FILE, written)
    assert policy_of(None, tmp_path) == written


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = [", "not valid TOML"),
        ("algorithm = ['copfl']", 'did you mean "algorithms"'),
        ("algorithms = 'copfl'", "algorithms must be a list"),
        ("algorithms = ['os:system']", "no algorithms in a policy"),
        ("[bounds]\nrounds = '5'", "bounds.rounds='5' must be int"),
        ("[bounds]\nrounds = -5", "must be at least 0"),
        ("[bounds]\nround = 5", 'did you mean "rounds"'),
        ("rollback = 1", "rollback=1 must be bool"),
        ("[[code]]\nreference='a:b'", "code needs folder"),
        ("[[code]]\nreference='a:b'\nfolder='/x'\nsha256='0'", "needs its SHA-256"),
        (f"[[code]]\nreference='a:b'\nfolder='x'\nsha256='{'0' * 64}'", "must be an absolute path"),
        ("[[files]]\nkey='code'\nname='a'\npath='/x'", "no key of files"),
        ("[[bases]]\nname='bert'", "must begin with hf:"),
        ("code = 5", "code must be a list"),
        ("bounds = 5", "bounds must be a table"),
    ],
)
def test_an_error_in_a_policy_is_named(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(UsageError, match=error):
        read_policy(tmp_path / "p.toml")


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_policy_that_others_can_write_is_an_error(mode: int, tmp_path: Path) -> None:
    path = write_policy(tmp_path / "my policy.toml", Policy())
    path.chmod(mode)
    with pytest.raises(
        UsageError, match=rf"can write the policy .* {mode:04o}: `chmod go-w '.*my policy.toml'`"
    ):
        read_policy(path)
    path.chmod(mode & ~0o022)
    read_policy(path)


def test_a_policy_that_is_named_and_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        policy_of(tmp_path / "none.toml", tmp_path)


# -- the server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_the_server_refuses_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')
    from copfl.federation.machines import server_app

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    if name == "rollback":  # each node decides about it
        return
    context: Any = SimpleNamespace(run_config=HOSTILE[name], run_id=1)
    grid: Any = None
    with pytest.raises(UsageError, match="the policy of this machine's owner refuses the run config"):
        server_app._main(grid, context)
    assert effects(lambda: server_app._main(grid, context)) == []
    assert list(tmp_path.iterdir()) == []


def test_what_init_names_is_allowed_on_the_server_of_the_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "public.npz", x=np.zeros((4, 1, 8, 8), np.float32))
    config = {"samples.public": "public.npz", "task.metrics": ["auc"]}
    config |= {"algorithm.name": "ktpfl", "model.name": "elsewhere_net:net"}
    app = init(tmp_path / "app", nested(config), code="elsewhere_net")
    allowed, run_config = read_policy(app / FILE), read_app(app)["config"]
    assert refusals(allowed, run_config) == ()
    assert refusals(Policy(), run_config)
    assert allowed.code == (own_code.entered("elsewhere_net:net", tmp_path),)
    assert allowed.files == (AllowedFile("public", "public.npz", tmp_path / "public.npz"),)
    assert admitted(allowed, run_config).run_config["samples.public"] == str(tmp_path / "public.npz")


def test_a_model_of_an_installed_package_is_none_of_a_federation() -> None:
    run = schema.Run(model=schema.Model(name="torchmodels:Net"))
    with pytest.raises(UsageError, match="is of an installed package"):
        allowing(Policy(), {"model.name": "torchmodels:Net"}, Federation(run=run))


def bundled(folder: Path, **changed: str) -> bytes:
    """The app of a folder as Flower bundles it, with other files."""
    import io
    import zipfile

    files = {"pyproject.toml": (folder / "pyproject.toml").read_text(), ".info/CONTENT": ""}
    files |= {
        f"federated/{name}.py": (folder / "federated" / f"{name}.py").read_text()
        for name in ("__init__", "custom")
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        for name, text in (files | changed).items():
            written.writestr(name, text)
    return archive.getvalue()


def test_an_app_with_other_code_is_refused_when_it_is_submitted(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')
    app = init(tmp_path / "app", {"model": {"name": "mlp"}})
    check_app(bundled(app), app)
    project = (app / "pyproject.toml").read_text()
    attacks: list[dict[str, str]] = [
        {"evil.py": "print()"},
        {"federated/custom.py": "print()"},
        {"copfl/__init__.py": "print()"},
        {"torch.so": "x"},
        {"../evil.py": "print()"},
        {"/etc/evil.py": "print()"},
        {"sitecustomize.py": ""},
        {"pyproject.toml": project.replace(COMPONENTS["serverapp"], "federated.custom:model")},
        {"pyproject.toml": project.replace(COMPONENTS["clientapp"], "federated.custom:model")},
        {"pyproject.toml": project.replace('publisher = "copfl"', 'publisher = "../../../x"')},
        {"pyproject.toml": project.replace('version = "1.0.0"', 'version = "../x"')},
        {"pyproject.toml": project.replace('name = "app"', 'name = "../x"')},
        {"pyproject.toml": "x"},
        {"pyproject.toml": project.replace('version = "', 'version = "1/../../../../elsewhere/')},
        {"pyproject.toml": project + "\n#" + 2**20 * " "},
        {".info/CONTENT": 2**20 * " " + "\n"},
        {".info/CONTENT": "/dev/zero,0,0"},  # Flower would read it to compare its hash
    ]
    assert all(changed.get("pyproject.toml") != project for changed in attacks)
    for changed in attacks:
        with pytest.raises(UsageError):
            check_app(bundled(app, **changed), app)
    with pytest.raises(UsageError, match="no app of Flower"):
        check_app(b"x", app)


# -- names of runs, which are folders ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run", ["", "../x", "/x", ".x", "x/y", "policy.toml", "noise.key", "ａ", "x" * 101, "x\n"]
)
def test_a_greeting_reads_nothing_outside_of_the_state_dir(run: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "client.json").write_text('{"client": 7}')
    node_config = {"state-dir": str(tmp_path / "state")}
    assert not is_plain_name(run)
    with pytest.raises(CopflError, match="names no run"):
        respond.greeting(node_of(node_config), (json.dumps({"run": run}), b""))
    message = Message(HELLO, (json.dumps({"run": run}), b""))
    assert effects(lambda: respond.respond(message, {}, node_config, 0)) == []


def test_model_tables_have_no_other_key_that_names_a_file() -> None:
    """A new key of the table [model] must be thought of here: three of these name files."""
    assert {f.name for f in declared(schema.Model) if f.metadata["ours"]} == {
        "head",
        "train",
        "freeze",
        "frozen_dropout",
        "tokenizer",
        "max_length",
        "sha256",
        "code",
    }


@pytest.mark.usefixtures("forgotten")
def test_a_refusal_does_not_name_what_else_is_in_an_owners_module(tmp_path: Path) -> None:
    """The policy has a name with a mistake: whoever asks learns no other."""
    content = NET.replace("def net", "def secret_study") + "\ndef small(shape, classes): ...\n"
    config = write_nodes(digits(), tmp_path / "nodes")[0]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "ward_net.py").write_text(content)
    code = own_code.entered("ward_net:net", tmp_path / "own")
    write_policy(Path(config["state-dir"]) / FILE, Policy(code=(code,), proposals=UNSIGNED))
    run_config = {key: value for key, value in CONFIG.items() if key != "model.width"}
    head, _ = answered(config, run_config | {"model.name": "ward_net:net"})
    assert "is not defined in its module" in head
    assert "secret_study" not in head
    assert "small" not in head


def test_the_log_of_a_run_has_no_path_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """Flower streams it, and the text of an error, to whoever follows the run."""
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')
    from copfl.federation.machines import server_app

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("copfl.federation.machines.server_app.end_with_parent", lambda _: None)
    monkeypatch.setattr("copfl.federation.server.rounds.TrainingServer.rounds", lambda _: iter(()))
    grid: Any = None
    for run_config in (CONFIG, CONFIG | {"session.resume": True}):  # the second has no checkpoint
        context: Any = SimpleNamespace(run_config=run_config, run_id=1)
        with contextlib.suppress(CopflError):
            server_app.main(grid, context)
    assert [line for line in logged if "run test in runs/test of the server's folder" in line]
    assert [line for line in logged if "there is no checkpoint in [path]" in line]
    assert str(tmp_path) not in "".join(logged)
