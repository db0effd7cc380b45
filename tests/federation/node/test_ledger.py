"""The epsilon of all runs on the same data: what is written down, what it adds up to, and when a node refuses."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from copfl import wire
from copfl.core.algorithm import message_to_new_client, received
from copfl.errors import RunError, UsageError, WireError
from copfl.federation.node import update
from copfl.federation.node.explanation import explained
from copfl.federation.node.join import personalise
from copfl.federation.node.known_data import KnownData
from copfl.federation.node.ledger import FILE as LEDGER
from copfl.federation.node.ledger import SUM, UPLOAD, Ledger, Release, epsilon, spent
from copfl.federation.operations.status import as_text, status
from copfl.federation.policy.file import FILE, write_policy
from copfl.federation.policy.record import Policy, PrivacyRules, SumRules
from copfl.federation.policy.refusal import PolicyError
from copfl.federation.policy.request import refusals
from copfl.federation.protocol.messages import Field
from copfl.federation.protocol.node_config import MEMORY
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server
from copfl.wire import Head, Packet
from tests.federation.attacks.test_secure_attacks import Malicious
from tests.federation.network import CONFIG, DirectTransport, digits, node_of, play, write_nodes

pytest.importorskip("dp_accounting", reason='dp-accounting is not installed: pip install "copfl[privacy]"')

PLAIN = CONFIG | {"algorithm.name": "fedavg"}
PRIVATE = {"privacy.noise": 8.0, "privacy.clip": 0.2}
NOISED = CONFIG | {"algorithm.name": "fedavg", "privacy.noise": 8.0, "privacy.clip": 0.2, "run.rounds": 1}
UNLIMITED = PrivacyRules()
ONE = 1.8474  # the epsilon of one of these uploads at delta 1e-5


def release(samples: str, noise: float, value: str, **fields: Any) -> Release:
    return Release(samples, "test", 0, noise, 1.0, value=value)._replace(**fields)


def ledger_of(config: dict[str, Any]) -> Ledger:
    return Ledger(Path(config["state-dir"]) / MEMORY)


def limit(configs: list[dict[str, Any]], lifetime_epsilon: float, **fields: Any) -> None:
    privacy = PrivacyRules(lifetime_epsilon=lifetime_epsilon, **fields)
    for config in configs:
        write_policy(Path(config["state-dir"]) / FILE, Policy(privacy=privacy))


def ask(
    config: dict[str, Any], run: str = "test", round: int = 0, *, plain: bool = False, **keys: Any
) -> Packet:
    """A node's answer to a server that calls its run as it likes."""
    settings = settings_of((PLAIN if plain else NOISED) | {"run.rounds": 3} | keys | {"session.run": run})
    down = received(settings.algorithm, settings.algorithm.server_init(settings.task, 3), torch.tensor(0))
    head = Head("down", run, settings.layout, round, 0)
    return update.local_update(settings, node_of(config), wire.encode(down, head, about={"counted": -1}))


# -- arithmetic ----------------------------------------------------------------------------------------------


def test_runs_are_composed_and_not_added_up(tmp_path: Path) -> None:
    """100 rounds of sigma 10 are rho 0.5, 50 of sigma 5 are rho 1: epsilon 4.73 and 7.08 alone, 9.01 together.

    Noise is twice sigma: replacing a client changes a sum by two clips.
    """
    first = [release("a", 20.0, str(n)) for n in range(100)]
    second = [release("a", 10.0, str(n)) for n in range(100, 150)]
    alone, other, both = (epsilon(releases, 1e-5) for releases in (first, second, first + second))
    assert (alone, other, both) == pytest.approx((4.73, 7.08, 9.01), rel=0.01)
    assert epsilon([release("a", 8 / 3**0.5, "")], 1e-5) == pytest.approx(ONE, rel=1e-4)
    ledger, samples = Ledger(tmp_path), KnownData(tmp_path).name_of(np.arange(3, dtype=np.uint64))
    for entered in first + second:
        ledger.enter(entered._replace(samples=samples), UNLIMITED)
    assert epsilon(ledger.of(samples), 1e-5) == both


def test_a_line_says_what_was_done(tmp_path: Path) -> None:
    (config, *_) = write_nodes(digits(), tmp_path)
    ask(config)
    (line,) = [json.loads(text) for text in ledger_of(config).path.read_text().splitlines()]
    del line["at"], line["value"], line["samples"], line["hash"]
    assert line == {
        "event": "released",
        "run": "test",
        "round": 0,
        "noise": 8.0 / 3**0.5,
        "clip": 0.2,
        "place": UPLOAD,
        "is_settled": False,
        "mechanism": "gaussian",
        "relation": "replace-one-client",
        "sampling": 1.0,
        "steps": 1,
        "n": 1,
        "previous": "0" * 64,
    }


# -- attacks -------------------------------------------------------------------------------------------------


def test_runs_under_other_names_do_not_average_the_noise_away(tmp_path: Path) -> None:
    (config, *_) = write_nodes(digits(), tmp_path)
    limit([config], 5.0)
    answered, refused = 0, ""
    for n in range(10):
        try:
            ask(config, f"run-{n}")
            answered += 1
        except PolicyError as error:
            refused = str(error)
    assert answered > 5 / ONE  # composition costs less than a sum
    found = spent(Path(config["state-dir"]), PrivacyRules(lifetime_epsilon=5.0))
    assert found is not None
    assert found.epsilon is not None
    assert found.epsilon <= 5
    assert (found.releases, found.runs) == (answered, answered)
    said = f"these data have spent epsilon {found.epsilon:.3g}, the request asks for"
    assert said in refused
    assert "and the limit is 5 at delta 1e-05 [privacy.lifetime_epsilon]" in refused
    assert ask(config, "run-0").body  # the same value again costs nothing


@pytest.mark.parametrize(
    "how", ["more samples", "fewer samples", "other labels", "no run folder", "rollback"]
)
def test_the_budget_belongs_to_the_data(how: str, tmp_path: Path) -> None:
    (config, *_) = write_nodes(digits(), tmp_path)
    limit([config], 1.1 * ONE)
    ask(config)
    arrays = dict(np.load(config["data"]))
    if how == "more samples":
        arrays |= {
            "x": np.concatenate([arrays["x"], arrays["x_test"]]),
            "y": np.r_[arrays["y"], arrays["y_test"]],
        }
    elif how == "fewer samples":
        arrays |= {"x": arrays["x"][5:], "y": arrays["y"][5:]}
    elif how == "other labels":
        arrays["y"] = arrays["y"][::-1]
    elif how == "no run folder":
        shutil.rmtree(Path(config["state-dir"]) / "test")
    np.savez(config["data"], **arrays)
    run = "test" if how in ("no run folder", "rollback") else "other"
    keys = {"session.rollback": True} if how == "rollback" else {}
    with pytest.raises(PolicyError, match="these data have spent"):
        ask(config, run, 1, **keys)


def test_other_data_have_their_own_budget(tmp_path: Path) -> None:
    (config, other, *_) = write_nodes(digits(), tmp_path)
    limit([config], 1.1 * ONE)
    ask(config)
    assert ask(config | {"data": other["data"]}, "other").body


def test_data_that_left_without_noise_have_no_budget_left(tmp_path: Path) -> None:
    (config, *_) = write_nodes(digits(), tmp_path)
    ask(config, "plain", plain=True)
    ask(config, "plain", 1, plain=True)
    assert [entry.noise for entry in ledger_of(config).releases()] == [0.0]
    limit([config], 1e6)
    with pytest.raises(
        PolicyError, match="have spent epsilon inf, the request asks for more without a limit"
    ):
        ask(config, "noised")


def test_a_run_without_noise_is_refused_where_epsilon_is_limited() -> None:
    policy = Policy(privacy=PrivacyRules(lifetime_epsilon=3.0))
    assert [found.line for found in refusals(policy, {})] == ["privacy.lifetime_epsilon"]
    assert refusals(policy, {"privacy.noise": 1.0}) == ()


def test_no_metric_leaves_where_epsilon_is_limited(tmp_path: Path) -> None:
    """It has no noise; the node's own configuration may ask for it."""
    nodes = [config | {"metrics": True} for config in write_nodes(digits(), tmp_path / "n")]
    limit(nodes, 1e4)
    (record,) = play(NOISED, nodes, tmp_path / "runs").records
    assert "accuracy" not in record["mean"]
    assert {entry.noise for config in nodes for entry in ledger_of(config).releases()} == {8 / 3**0.5}
    settings = settings_of(CONFIG)
    server = new_server(
        settings, DirectTransport(settings, {}), ServerFolder(str(tmp_path), "x", resume=True)
    )
    settings = settings_of(CONFIG | {"session.join": 1})
    down = message_to_new_client(server.algorithm, server.state, torch.arange(3))
    packet = wire.encode(down, Head("down", "test", settings.layout, 3, 3), about={Field.UPDATES: 1})
    new = {"data": nodes[0]["data"], "state-dir": str(tmp_path / "new")}
    limit([new], 1e4)
    assert "accuracy" not in personalise(settings, node_of(new), packet).head


def test_metrics_that_leave_beside_noised_uploads_are_counted(tmp_path: Path) -> None:
    nodes = [config | {"metrics": True} for config in write_nodes(digits(), tmp_path / "n")]
    play(NOISED, nodes, tmp_path / "runs")
    assert [entry.noise for entry in ledger_of(nodes[0]).releases()] == [0.0]


@pytest.mark.parametrize("change", ["noise", "removed"])
def test_a_ledger_that_was_changed_is_refused(change: str, tmp_path: Path) -> None:
    (config, *_) = write_nodes(digits(), tmp_path)
    ask(config)
    ask(config, "second")
    ledger = ledger_of(config)
    lines = ledger.path.read_text().splitlines(keepends=True)
    lines = lines[1:] if change == "removed" else [lines[0].replace('"noise": 4', '"noise": 9'), *lines[1:]]
    ledger.path.write_text("".join(lines))
    with pytest.raises(RunError, match="the ledger of spent epsilon is damaged: line"):
        ask(config, "third")


# -- faults --------------------------------------------------------------------------------------------------


def test_what_was_written_before_a_kill_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the ledger and the answer; and a line that a kill cut off."""
    (config, *_) = write_nodes(digits(), tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(update.TrainedUpdate, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            ask(config)
    ledger = ledger_of(config)
    assert len(ledger.releases()) == 1
    ask(config)
    assert len(ledger.releases()) == 1
    with ledger.path.open("a") as file:
        file.write('{"at": "2026')
    assert len(ledger.releases()) == 1
    ask(config, "second")
    assert len(ledger.releases()) == 2


def test_nothing_leaves_that_could_not_be_written(tmp_path: Path) -> None:
    (config, *_) = write_nodes(digits(), tmp_path)
    (Path(config["state-dir"]) / MEMORY / LEDGER).mkdir(parents=True)
    with pytest.raises((RunError, OSError)):
        ask(config)
    assert not list(Path(config["state-dir"]).rglob("round-*.copfl"))


# -- secure sums ---------------------------------------------------------------------------------------------


def five(tmp_path: Path) -> dict[int, dict[str, Any]]:
    return dict(enumerate(write_nodes(digits(5), tmp_path / "nodes")))


def test_a_sum_counts_with_the_noise_of_its_members(tmp_path: Path) -> None:
    nodes = five(tmp_path)
    Malicious(nodes, config=PRIVATE).total(range(5))
    for config in nodes.values():
        (entry,) = ledger_of(config).releases()
        assert (entry.noise, entry.place, entry.is_settled) == (8.0, SUM, True)


def test_a_node_that_is_lost_counts_the_least_noise_of_a_sum(tmp_path: Path) -> None:
    """The others may reveal the sum without it: of the four that are the threshold of five."""
    nodes = five(tmp_path)
    server = Malicious(nodes, config=PRIVATE)
    server.shown_survivors = {0: [0, 1]}  # it refuses, and has sent its vector
    with pytest.raises(WireError):
        server.total(range(5))
    (entry,) = ledger_of(nodes[0]).releases()
    assert entry.noise == pytest.approx(8.0 * (4 / 5) ** 0.5)
    assert not entry.is_settled
    Malicious(nodes, config=PRIVATE).total(range(5))  # the round begins again with fresh keys
    (entry,) = ledger_of(nodes[0]).releases()
    assert (entry.noise, entry.is_settled) == (8.0, True)


def test_a_sum_of_few_survivors_must_have_the_least_noise(tmp_path: Path) -> None:
    """The noise of five clients is shared among five, and one of them did not answer."""
    nodes = five(tmp_path)
    for config in nodes.values():
        policy = Policy(privacy=PrivacyRules(noise=8.0), secure_aggregation=SumRules(cohort=3))
        write_policy(Path(config["state-dir"]) / FILE, policy)
    with pytest.raises(PolicyError, match=r"4 uploads has noise 7.155, and 8 is the least \[privacy.noise\]"):
        Malicious(nodes, config=PRIVATE).total(range(5), survivors=range(4))
    Malicious(nodes, config=PRIVATE).total(range(5))
    for config in nodes.values():
        write_policy(Path(config["state-dir"]) / FILE, Policy(privacy=PrivacyRules(noise=7.1)))
    other = five(tmp_path / "other")
    Malicious(other, config=PRIVATE).total(range(5), survivors=range(4))


# -- what the owner reads ------------------------------------------------------------------------------------


def test_status_and_the_explanation_show_what_is_spent(tmp_path: Path) -> None:
    (config, *_) = write_nodes(digits(), tmp_path)
    state = Path(config["state-dir"])
    limit([config], 20.0)
    ask(config)
    found = status(state)
    assert found["privacy"]["epsilon"] == epsilon(ledger_of(config).releases(), 1e-5)
    shown = f"epsilon {found['privacy']['epsilon']:.3g} of 20 at delta 1e-05, 1 releases in 1 runs"
    assert f"privacy     {shown}" in as_text(found)
    policy = Policy(privacy=PrivacyRules(lifetime_epsilon=20.0))
    lines = explained(policy, NOISED | {"run.rounds": 2}, state)
    assert f"privacy     {shown}" in lines
    after = epsilon([release("", 8 / 3**0.5, "")] * 3, 1e-5)
    assert lines[-1] == f"privacy     epsilon {after:.3g} after all rounds  [privacy]"
    assert (
        "20 is the limit: later rounds are refused"
        in explained(policy, NOISED | {"run.rounds": 60}, state)[-1]
    )
    assert not [line for line in explained(Policy(), CONFIG) if line.startswith("privacy")]


@pytest.mark.parametrize("fields", [{"delta": 0.0}, {"delta": 1.0}, {"lifetime_epsilon": math.inf}])
def test_a_policy_with_no_budget_of_this_kind_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="in a policy must be"):
        Policy(privacy=PrivacyRules(**fields))
