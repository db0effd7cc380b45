"""What a node's policy decides beside names: what leaves, with whom it is summed, and how long a request may take."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from copfl import wire
from copfl.core.algorithm import message_to_new_client
from copfl.errors import UsageError, WireError
from copfl.federation.machines.app import init, planned
from copfl.federation.node import respond, update
from copfl.federation.node.explanation import explained
from copfl.federation.node.join import personalise
from copfl.federation.policy.file import FILE, read_policy, strict, write_policy, write_strict
from copfl.federation.policy.model_size import forward_bytes
from copfl.federation.policy.record import Policy, PrivacyRules, RequestBounds, SumRules
from copfl.federation.policy.request import refusals, require_cohort
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.messages import TRAIN, Content, Field, Message, refusal
from copfl.federation.protocol.settings import TrainingSettings, settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import TrainingServer, check_metrics, check_values, new_server
from copfl.measures.metrics import METRICS
from copfl.models import build
from copfl.parts.averaging import Upload
from copfl.settings.flat import nested
from copfl.settings.toml import Tables
from copfl.wire import Packet
from tests.commands import called
from tests.federation.network import (
    CONFIG,
    UNSIGNED,
    DirectTransport,
    answered,
    digits,
    node_of,
    play,
    unsigned,
    write_nodes,
)
from tests.federation.node.test_worker import folder_of, processes

SECURE = CONFIG | {"secure.aggregation": True, "run.rounds": 1}


def allow(nodes: list[dict[str, Any]], policy: Policy) -> None:
    """Gives the nodes a policy."""
    for config in nodes:
        agreed = dataclasses.replace(policy, proposals=UNSIGNED)
        write_policy(Path(config["state-dir"]) / FILE, agreed)


def server_of(tmp_path: Path, config: dict[str, Any] = CONFIG) -> TrainingServer:
    settings = settings_of(config)
    folder = ServerFolder(str(tmp_path / "runs"), "test", resume=True)
    return new_server(settings, DirectTransport(settings, {}), folder)


# -- a run config --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "config", "line"),
    [
        (Policy(secure_aggregation=SumRules(required=True)), {}, "secure_aggregation.required"),
        (
            Policy(secure_aggregation=SumRules(required=True)),
            {"secure.aggregation": False},
            "secure_aggregation.required",
        ),
        (
            Policy(secure_aggregation=SumRules(cohort=5)),
            {"secure.aggregation": True, "run.clients": 10, "run.participation": 0.4},
            "secure_aggregation.cohort",
        ),
        (Policy(privacy=PrivacyRules(noise=2.0)), {}, "privacy.noise"),
        (Policy(privacy=PrivacyRules(noise=2.0)), {"privacy.noise": 1.9}, "privacy.noise"),
        (Policy(privacy=PrivacyRules(clip=2.0)), {"privacy.noise": 1, "privacy.clip": 2.1}, "privacy.clip"),
        (Policy(), {"session.rollback": True}, "rollback"),
        (Policy(), {"session.join": 10**9}, "bounds.updates"),
    ],
)
def test_a_run_config_below_the_owners_terms_is_refused(
    policy: Policy, config: dict[str, Any], line: str
) -> None:
    assert [refusal.line for refusal in refusals(policy, config)] == [line]


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        (Policy(secure_aggregation=SumRules(required=True, cohort=3)), {"secure.aggregation": True}),
        (
            Policy(secure_aggregation=SumRules(cohort=4)),
            {"secure.aggregation": True, "run.clients": 10, "run.participation": 0.4},
        ),
        (Policy(privacy=PrivacyRules(noise=2.0)), {"privacy.noise": 2, "secure.aggregation": True}),
        (Policy(rollback=True), {"session.rollback": True}),
    ],
)
def test_a_run_config_on_the_owners_terms_is_allowed(policy: Policy, config: dict[str, Any]) -> None:
    assert refusals(policy, config) == ()


# -- what leaves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reports", "is_secure", "leaves"), [
    ("all", False, True),
    ("all", True, True),
    ("sums", False, False),
    ("sums", True, True),
    ("none", False, False),
    ("none", True, False),
])  # fmt: skip
def test_metrics_leave_as_the_policy_has_it(
    reports: str, is_secure: bool, leaves: bool, tmp_path: Path
) -> None:
    """The node's own configuration cannot extend it: its owner may have copied it from others."""
    nodes = [config | {"metrics": True} for config in write_nodes(digits(), tmp_path / "n")]
    allow(nodes, Policy(reports=reports))
    config = SECURE if is_secure else CONFIG | {"run.rounds": 1}
    (record,) = play(config, nodes, tmp_path / "runs").records
    assert ("accuracy" in record["mean"] and record["mean"]["accuracy"] is not None) == leaves
    assert ("accuracy" in record["per_client"]) == (leaves and not is_secure)


def new_client(tmp_path: Path, updates: int, policy: Policy) -> Packet:
    """The answer of a new client to a message with so many local updates, in a run that has one of them."""
    server = server_of(tmp_path)
    record = message_to_new_client(server.algorithm, server.state, torch.arange(3))
    head = server.exchange.head("down", 3, 3)
    packet = wire.encode(record, head, about={Field.UPDATES: updates})
    config = write_nodes(digits(), tmp_path / "n", named=False)[0]
    allow([config], policy)
    return personalise(joined_by(server.settings, 1), node_of(config), packet)


def joined_by(settings: TrainingSettings, updates: int) -> TrainingSettings:
    """The settings of a run in which new clients make so many local updates."""
    session = dataclasses.replace(settings.federation.session, join=updates)
    federation = dataclasses.replace(settings.federation, session=session)
    return dataclasses.replace(settings, federation=federation)


def test_a_new_client_keeps_its_metrics(tmp_path: Path) -> None:
    assert "accuracy_after" in new_client(tmp_path / "a", 1, Policy()).head
    assert "accuracy" not in new_client(tmp_path / "b", 1, Policy(reports="sums")).head
    assert (tmp_path / "b" / "n" / "state-0" / "test" / "model" / "weights.safetensors").exists()


def test_the_updates_of_a_new_client_are_those_of_the_run(tmp_path: Path) -> None:
    """A server that sends other messages than its run config says gets no more than the owner allowed there."""
    with pytest.raises(WireError, match="the run has 1 local updates of new clients, and the message others"):
        new_client(tmp_path, 10**9, Policy())


def test_a_message_of_another_run_than_its_run_config_is_refused(tmp_path: Path) -> None:
    """It would change the records of that run."""
    server = server_of(tmp_path)
    config = write_nodes(digits(), tmp_path / "n")[0]
    with pytest.raises(WireError, match="it is of run test, and the run config of other"):
        update.local_update(settings_of(CONFIG | {"session.run": "other"}), node_of(config), server.down(0))


@pytest.mark.parametrize("round", [3, 4, 2**62, -1])
def test_a_round_that_the_run_does_not_have_is_refused(round: int, tmp_path: Path) -> None:
    server = server_of(tmp_path)
    server.round = round
    packet = server.down(0)
    config = write_nodes(digits(), tmp_path / "n")[0]
    with pytest.raises(WireError, match=f"it is of round {round}, and the run has 3 rounds"):
        update.local_update(server.settings, node_of(config), packet)
    assert not list(Path(config["state-dir"]).rglob("*.copfl"))


def test_a_sum_of_too_few_clients_gets_no_share(tmp_path: Path) -> None:
    """The run config selects four clients; one leaves before it sends its vector, and no node goes on."""
    nodes, asked, refused = write_nodes(digits(4), tmp_path / "n"), list[int](), set[int]()
    allow(nodes, Policy(secure_aggregation=SumRules(cohort=4)))

    def fault(client: int, round: int, packet: Packet) -> Packet | str:
        asked.append(client)
        if asked.count(3) > 3:  # the server begins again
            raise KeyboardInterrupt
        refused.update(
            [client] if "3 clients, and 4 are the least [secure_aggregation.cohort]" in packet.head else []
        )
        return "gone" if asked.count(3) == 3 else packet

    config = SECURE | {"run.clients": 4, "network.min_replies": 3}
    with pytest.raises(KeyboardInterrupt):
        play(config, nodes, tmp_path / "runs", fault)
    assert refused == {0, 1, 2}


def test_a_cohort_is_the_least_number_of_clients() -> None:
    policy = Policy(secure_aggregation=SumRules(cohort=4))
    require_cohort(policy, 4)
    with pytest.raises(UsageError, match=r"\[secure_aggregation.cohort\]"):
        require_cohort(policy, 3)


# -- the time and the memory of a request --------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Iterator[dict[str, Any]]:
    config = unsigned(write_nodes(digits(), tmp_path / "a")[0])
    yield config
    for pid in processes(folder_of(config)):
        os.kill(pid, signal.SIGKILL)


def asked(config: dict[str, Any], content: Content, **run_config: Any) -> Content:
    return respond.respond(Message(TRAIN, content), CONFIG | run_config, config, os.getpid())


@pytest.mark.job
def test_a_worker_is_ended_above_the_time_or_the_memory_of_a_request(
    config: dict[str, Any], tmp_path: Path
) -> None:
    server = server_of(tmp_path)
    first = asked(config, server.down(0))
    pids = processes(folder_of(config))
    slow = server_of(tmp_path, CONFIG | {"algorithm.epochs": 100, "run.batch": 1}).down(0)
    allow([config], Policy(bounds=RequestBounds(seconds=1.0)))
    started = time.monotonic()
    head, _ = asked(config, slow, **{"algorithm.epochs": 100, "run.batch": 1})
    assert "refuses the request: it took too long [bounds.seconds]" in head
    assert time.monotonic() - started < 20
    assert pids
    assert not set(pids) & set(processes(folder_of(config)))
    allow([config], Policy())
    assert asked(config, server.down(0)) == first  # by another worker
    allow([config], Policy(bounds=RequestBounds(memory=0.05)))
    head, _ = asked(config, server.down(0))
    assert "refuses the request: it took too much memory [bounds.memory]" in head
    assert list(folder_of(config).iterdir()) == []


# -- what a refusal says -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "the base hf:/home/ward 7/bert has the SHA-256 1, but",
        "importing it raised ValueError: x (/home/ward 7/nets.py, line 3)",
        "cannot create /home/ward 7: it is there",
        'the policy "/home/ward 7/policy.toml" cannot be read',
        "see /home/ward 7/y; or file:///home/ward 7/z",
    ],
)
def test_a_refusal_has_no_path_of_the_machine(text: str) -> None:
    for sentence, places in ((text, ["/home/ward 7"]), (text.replace("ward 7", "ward-7-oncology"), [])):
        head, _ = refusal(UsageError(sentence), places)
        assert "/home" not in head
        assert "ward" not in head
    assert json.loads(refusal(UsageError("and/or 3/4 of 1,8,8"))[0])["refused"] == "and/or 3/4 of 1,8,8"


def test_a_policy_that_cannot_be_read_refuses_everything(tmp_path: Path) -> None:
    config = write_nodes(digits(), tmp_path)[0]
    path = Path(config["state-dir"]) / FILE
    path.parent.mkdir()
    path.write_text("rounds = [")
    head, _ = answered(config, CONFIG, server_of(tmp_path).down(0))
    assert "is not valid TOML" in head
    assert str(tmp_path) not in head


# -- the server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "is_plausible"),
    [
        ("accuracy", 1.0, True),
        ("accuracy", 99, False),
        ("accuracy_before", -0.1, False),
        ("accuracy_global", float("inf"), False),
        ("accuracy", float("nan"), True),
        ("accuracy", 10**400, False),
        ("r2", -5.0, True),
        ("r2", 1.1, False),
        ("rmse", -1.0, False),
        ("rmse", 1e6, True),
        ("auc_after", 2.0, False),
        ("loss", 1e30, False),
        ("loss", -3.0, True),
        ("weight", 3.3, True),
    ],
)
def test_a_metric_that_cannot_be_is_refused(name: str, value: float, is_plausible: bool) -> None:
    metrics = [METRICS[title] for title in ("accuracy", "r2", "rmse", "auc")]
    if is_plausible:
        check_metrics({name: value}, metrics)
    else:
        with pytest.raises(WireError, match=f"it reports {name}="):
            check_metrics({name: value}, metrics)


def upload(value: float = 0.1, size: float = 10.0) -> Upload:
    return Upload(torch.full((3,), value), torch.tensor(size))


@pytest.mark.parametrize("values", [{"value": 1e30}, {"value": -1e13}, {"size": -1.0}, {"size": 1e12}])
def test_an_upload_with_an_absurd_value_is_refused(values: dict[str, float]) -> None:
    check_values(upload())
    with pytest.raises(WireError, match=r"has a value of|samples; 0 to"):
        check_values(upload(**values))


def test_a_client_that_reports_nonsense_is_left_out(tmp_path: Path) -> None:
    nodes = write_nodes(digits(), tmp_path / "n")

    def fault(client: int, round: int, packet: Packet) -> Packet:
        if client != 1:
            return packet
        opened = wire.decode(packet, example, wire_head(packet), masks={})
        about = opened.about | {Field.METRICS: {"accuracy": 99}}
        return wire.encode(opened.record, wire_head(packet), about=about)

    def wire_head(packet: Packet) -> wire.Head:
        fields = wire.opened_head(packet)
        return wire.Head("upload", "test", settings.layout, fields["round"], fields["client"])

    config = CONFIG | {"algorithm.name": "fedavg", "run.rounds": 1, "network.min_replies": 2}
    settings = settings_of(config)
    example = server_of(tmp_path / "other", config).upload
    (record,) = play(config, nodes, tmp_path / "runs", fault).records
    assert record["clients"] == [0, 2]
    assert record["why"] == {"1": "it reports accuracy=99, which must be 0 to 1"}


@pytest.mark.parametrize("asked", [{"run.steps": 1}, {"algorithm.name": "trees", "algorithm.rows": 0.99}])
def test_a_secure_sum_is_of_all_rows(asked: dict[str, Any]) -> None:
    """Of some, which differ by round, two sums differ by single rows: attacks/test_secure_attacks.py."""
    plain, secure = CONFIG | asked, CONFIG | asked | {"secure.aggregation": True}
    assert [refusal.line for refusal in refusals(Policy(), secure)] == ["secure_aggregation.parts"]
    allowed = Policy(secure_aggregation=SumRules(parts=True))
    assert not refusals(Policy(), plain) + refusals(allowed, secure)
    assert not refusals(Policy(), secure | {"run.steps": 0, "algorithm.rows": 1.0})


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            {"run.steps": 1, "run.batch": 1},
            "run.steps=1 of run.batch=1 is an update of at most 1 rows, and 5 are",
        ),
        ({"run.steps": 2, "run.batch": 2}, "of at most 4 rows"),
        ({"run.batch": 1}, "run.batch=1 has steps of so many rows"),
        ({"run.batch": 5, "optimizer.lr": 0.1, "optimizer.weight_decay": 10.0}, "that a step forgets"),
        ({"run.batch": 5, "optimizer.lr": 1000.0}, "that a step forgets"),  # with the usual decay
        (
            {"algorithm.name": "trees", "algorithm.group": 4},
            "algorithm.group=4 lets bins of that many rows leave",
        ),
        ({"algorithm.name": "trees"}, "set algorithm.group=5"),
        (
            {"algorithm.name": "trees", "algorithm.group": 5, "algorithm.rows": 0.01},
            "algorithm.rows=0.01 may be of",
        ),
    ],
)
def test_nothing_of_a_few_rows_leaves_by_its_settings(asked: dict[str, Any], why: str) -> None:
    """A step of one row is that row's gradient: with a linear layer the row itself."""
    plain = CONFIG | asked
    (refusal,) = refusals(Policy(least_rows=5), plain)
    assert refusal.line == "least_rows"
    assert why in str(refusal)
    assert not refusals(Policy(), plain)
    enough: dict[str, Any] = {"run.batch": 5, "optimizer.lr": 0.01, "optimizer.weight_decay": 1.0}
    enough = enough if "run.batch" in asked else {"algorithm.group": 5, "algorithm.rows": 1.0}
    assert not refusals(Policy(least_rows=5), plain | enough)


def test_a_node_with_the_strict_policy_refuses_a_step_of_one_row(tmp_path: Path) -> None:
    """Through its door: an owner who allows plain uploads is asked for an update of one row."""
    node = write_nodes(digits(), tmp_path)[0] | {"worker": False}
    text = (
        strict().replace("required = true", "required = false").replace("unsigned = false", "unsigned = true")
    )
    file = Path(node["state-dir"]) / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    packet = wire.encode((), wire.Head("down", "test", "", 0, 0), about={})
    config = CONFIG | {"run.steps": 1, "run.batch": 1}
    reply = respond.respond(Message(TRAIN, packet), config, node, 0)
    assert "run.steps=1 of run.batch=1" in json.loads(reply[0])[Field.REFUSED]
    assert "[least_rows]" in json.loads(reply[0])[Field.REFUSED]


def test_a_policy_demands_even_batches() -> None:
    policy = Policy(secure_aggregation=SumRules(even_batches=True))
    secure = CONFIG | {"secure.aggregation": True}
    assert [refusal.line for refusal in refusals(policy, secure)] == ["secure_aggregation.even_batches"]
    assert not refusals(policy, secure | {"run.even_batches": True}) + refusals(policy, CONFIG)
    assert planned({"secure": {"aggregation": True}}).run.run.even_batches
    chosen: Tables = {"secure": {"aggregation": True}, "run": {"even_batches": False}}
    assert not planned(chosen).run.run.even_batches
    assert not planned({}).run.run.even_batches


# -- the command ---------------------------------------------------------------------------------------------


def test_the_strict_policy_has_every_line_and_is_strict(tmp_path: Path) -> None:
    write_strict(tmp_path / FILE)
    policy, text = read_policy(tmp_path / FILE), strict()
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    for field in dataclasses.fields(Policy):
        assert f"{field.name} = " in text or f"[{field.name}]" in text
    for table in (policy.bounds, policy.secure_aggregation, policy.privacy):
        assert all(f"\n{name} = " in text for name in vars(table))
    for name, most in vars(policy.bounds).items():
        assert most < getattr(RequestBounds(), name)
    assert policy.secure_aggregation.required
    assert (policy.reports, policy.benefit, Policy().benefit) == ("sums", False, False)
    assert (policy.code, policy.bases, policy.files, policy.rollback) == ((), (), (), False)


def test_the_command_writes_checks_and_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, app = tmp_path / "state" / FILE, init(tmp_path / "app", nested(CONFIG))
    done = called(capsys, "site", "policy", file)
    assert (done.code, "is a strict policy" in done.out) == (0, True)
    written = file.read_text()
    done = called(capsys, "site", "policy", file)
    assert (done.code, "is valid" in done.out, file.read_text()) == (0, True, written)
    done = called(capsys, "site", "policy", file, "--app", app)
    assert done.code == 1
    assert done.out.split() == [
        "refused",
        "secure.aggregation",
        "must",
        "be",
        "true",
        "[secure_aggregation.required]",
    ]
    file.write_text(written.replace("required = true", "required = false"))
    done = called(capsys, "site", "policy", file, "--app", app)
    assert done.code == 0
    assert "allowed     copfl with mlp, 3 rounds" in done.out
    assert "metrics     stay here  [reports]" in done.out
    assert "rollback    is refused  [rollback]" in done.out
    file.write_text("x")
    assert called(capsys, "site", "policy", file).code == 2
    assert called(capsys, "site", "policy", tmp_path / "none.toml", "--app", app).code == 2
    assert explained(Policy(), read_app(app)["config"])[2] == "metrics     are sent"


# -- bounds of a model and of runs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"model.name": "mlp", "model.width": 1_000_000},  # 4 TB
        {"model.name": "cnn", "model.width": 100_000},
        {"model.name": "resnet18", "samples.shape": [3, 32, 32], "model.width": 50_000},
        {"model.name": "embedding", "samples.text": True, "model.words": 1_000_000},
        {"model.name": "mlp", "model.width": 2000, "adapter.name": "lora:r=900000,targets=*"},
    ],
    ids=lambda keys: keys.get("adapter.name", keys["model.name"]),
)  # fmt: skip
def test_a_model_is_counted_before_it_has_memory(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy allows each number alone; the model would have terabytes."""
    monkeypatch.setattr(
        "copfl.federation.protocol.settings.build_model", lambda *_: pytest.fail("it was built")
    )
    config = write_nodes(digits(), tmp_path)[0]
    allow([config], Policy())
    plain = {key: value for key, value in CONFIG.items() if key not in ("samples.mean", "samples.std")}
    run_config = plain | {"model.width": 10_000} | keys
    assert refusals(Policy(), run_config) == ()
    head, _ = answered(config, run_config)
    assert "parameters, and 200,000,000 are the most [bounds.parameters]" in head


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet18", "cnn1d", "embedding", "causal_cnn"])
def test_models_have_as_many_parameters_as_are_counted(name: str) -> None:
    """The bound is the number itself: one less is refused."""
    keys: dict[str, Any] = {"model.name": name, "algorithm.name": "fedavg"}
    keys |= {"samples.shape": [2, 64] if name == "cnn1d" else [3, 32, 32]}
    keys |= {"samples.text": True} if name in ("embedding", "causal_cnn") else {}
    keys |= {"samples.kind": "next_token", "samples.classes": 257} if name == "causal_cnn" else {}
    count = len(settings_of(keys).task.initial)
    settings_of(keys, RequestBounds(parameters=count + 5000))  # statistics of batch norm are no parameters
    with pytest.raises(UsageError, match=r"\[bounds.parameters\]"):
        settings_of(keys, RequestBounds(parameters=count // 2))


TOKENS = {"input_ids": (20,), "attention_mask": (20,)}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (3, 32, 32)),
        ("cnn", (3, 32, 32)),
        ("resnet18", (3, 32, 32)),
        ("cnn1d", (2, 640)),
        ("embedding", TOKENS),
        ("causal_cnn", TOKENS),
    ],
)
def test_the_memory_of_a_batch_is_estimated_without_taking_it(name: str, shape: Any) -> None:
    """At least what training really keeps for the gradients, and at most twice as much."""
    batch, kept = 64, dict[int, int]()
    plain = () if isinstance(shape, dict) else shape
    with torch.device("meta"):
        estimate = forward_bytes(build(name, plain, 10, 0), shape, batch)
    model = build(name, plain, 10, 0)
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.update({storage._cdata: storage.nbytes()} if storage._cdata not in own else {})
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if isinstance(shape, dict):
            outputs = model(
                **{key: torch.ones(batch, *part, dtype=torch.int64) for key, part in shape.items()}
            )
        else:
            outputs = model(torch.zeros(batch, *shape))
    assert outputs.requires_grad
    assert sum(kept.values()) <= estimate <= 2 * sum(kept.values()) + 2**20


@pytest.mark.parametrize(
    "keys",
    [
        # Each layer of dilated convolutions doubles what it is padded by.
        {"model.name": "causal_cnn", "model.layers": 30, "samples.kind": "next_token", "samples.text": True},
        {"model.name": "cnn1d", "model.width": 1000, "samples.shape": [1, 10**7]},
        {"model.name": "resnet18", "model.stem": "cifar", "samples.shape": [1, 3000, 3000]},
    ],
    ids=lambda keys: f"{keys['model.name']}-{len(keys)}",
)
def test_a_model_with_few_parameters_may_need_much_memory(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "copfl.federation.protocol.settings.build_model", lambda *_: pytest.fail("it was built")
    )
    config = write_nodes(digits(), tmp_path)[0]
    policy = Policy(bounds=RequestBounds(memory=16.0))
    allow([config], policy)
    run_config = {"session.run": "test", "run.clients": 3, "algorithm.name": "fedavg", **keys}
    assert refusals(policy, run_config) == ()
    head, _ = answered(config, run_config)
    assert "GiB for 2 samples, and 16 are the most [bounds.memory]" in head


def test_a_batch_of_the_nodes_samples_must_fit_into_its_memory(tmp_path: Path, logged: list[str]) -> None:
    """Of so many samples as it has: a run config may name more. Only the owner learns how many these are."""
    config = write_nodes(digits(), tmp_path)[0]
    run_config = CONFIG | {"algorithm.name": "fedavg", "run.batch": 100_000, "model.width": 64}
    settings = settings_of(run_config)
    folder = ServerFolder(str(tmp_path / "runs"), "test", resume=True)
    content = new_server(settings, DirectTransport(settings, {}), folder).down(0)

    def answer(memory: float) -> str:
        allow([config], Policy(bounds=RequestBounds(memory=memory)))
        return answered(config, run_config, content)[0]

    samples = len(np.load(config["data"])["y"])
    assert answer(0.0002) == '{"refused": "its data cannot be used; see the node\'s log"}'
    assert f"GiB for {samples} samples, and 0.0002 are the most [bounds.memory]" in "".join(logged)
    assert '"kind":"upload"' in answer(1.0)


def test_the_layers_of_a_model_are_bounded() -> None:
    run_config = {"model.name": "causal_cnn", "model.layers": 100_000}
    assert [found.line for found in refusals(Policy(), run_config)] == ["bounds.layers"]


def test_runs_under_other_names_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_nodes(digits(), tmp_path / "n")[0]
    allow([config], Policy(bounds=RequestBounds(runs_per_day=2)))

    def ask(run: str) -> Packet:
        settings = settings_of(CONFIG | {"session.run": run, "algorithm.name": "fedavg"})
        folder = ServerFolder(str(tmp_path / "runs"), run, resume=True)
        return update.local_update(
            settings, node_of(config), new_server(settings, DirectTransport(settings, {}), folder).down(0)
        )

    for run in ("first", "second", "first"):
        ask(run)
    refused = r"2 runs have begun on this node within a day \[bounds.runs_per_day\]"
    with pytest.raises(UsageError, match=refused):
        ask("third")
    assert not (Path(config["state-dir"]) / "third").exists()
    ask("second")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    ask("third")
    ask("first")  # it continues
