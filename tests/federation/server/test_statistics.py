"""The encoders of a federation by sums of its nodes: plain and secure, once, and only as the owners allow."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import copfl
from copfl.data.contract.agreed_encoders import Encoders
from copfl.data.contract.contract import Column, Contract
from copfl.data.sets.datasets import load
from copfl.errors import RunError, UsageError, WireError
from copfl.experiment.preparation import prepare
from copfl.federation.machines import deployed
from copfl.federation.machines.app import init
from copfl.federation.machines.local import up
from copfl.federation.policy.file import FILE, write_policy
from copfl.federation.policy.record import Policy, PrivacyRules, StatisticsRules
from copfl.federation.policy.request import refusals
from copfl.federation.protocol.app_folder import read_app
from copfl.federation.protocol.chained_log import verified
from copfl.federation.protocol.proposal import KEY
from copfl.federation.protocol.settings import settings_of
from copfl.federation.protocol.statistics import like_centres, terms_of, vector_of
from copfl.federation.server.agreement import FILE as CONTRACT_FILE
from copfl.federation.server.agreement import contract_at, freeze
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.secure_exchange import exchange_of
from copfl.federation.server.statistics import StatisticsServer, _names
from copfl.settings.complete import complete
from copfl.settings.flat import flattened, nested
from copfl.settings.toml import Tables
from tests.code_blocks import call
from tests.data.sites import CANDIDATES, CONTRACT, WARDS, rows_of, write_pooled, write_rows, write_sites
from tests.federation.network import node_of
from tests.federation.signing import MessageTransport, answer, knowing, proposed, state_of
from tests.slow import slow

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

RUN = {"session.agree": True, "run.clients": 3, "run.rounds": 2, "network.deadline": 60}


def config_of(contract: Contract, **settings: Any) -> dict[str, Any]:
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    return {**RUN, "session.run": "first", "samples.contract": contract.as_json(), **changed}


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    return nodes_of(tmp_path)


def nodes_of(folder: Path) -> list[dict[str, Any]]:
    """A node for each site, which knows the coordinator."""
    return [
        knowing({"data": str(train), "test": str(test), "state-dir": str(folder / f"state-{n}")})
        for n, (train, test) in enumerate(write_sites(folder / "sites").values())
    ]


class Agreed(NamedTuple):
    contract: Contract
    transport: MessageTransport


def agree(config: dict[str, Any], nodes: list[dict[str, Any]], runs: Path) -> Agreed:
    """The statistics phase of this run config, with the nodes as members."""
    signed = proposed(config, nodes)
    terms, transport = terms_of(config), MessageTransport({**config, KEY: signed.text}, nodes)
    folder = ServerFolder(str(runs), config["session.run"], resume=False)
    folder.path.mkdir(parents=True, exist_ok=True)
    exchange = exchange_of(terms, transport, folder, pause=0, retry=0, proposal=signed.proposal)
    return Agreed(StatisticsServer(terms, exchange).agreed(), transport)


def pooled(folder: Path) -> Encoders:
    train, test = write_pooled(folder)
    table = load(train, target="outcome", drop="note", missing="fill", test=str(test)).table
    return Encoders.of(table)


def test_plain_sums_give_the_encoders_of_the_pooled_table(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    made = agree(config_of(CONTRACT), nodes, tmp_path / "runs").contract
    for ours, theirs in zip(made.encoders.columns, pooled(tmp_path).columns, strict=True):
        assert (ours.name, ours.categories) == (theirs.name, theirs.categories)
        assert ours.mean == pytest.approx(theirs.mean, rel=1e-9)
        assert ours.std == pytest.approx(theirs.std, rel=1e-9)
    assert made.outputs == ("ill", "well")
    for node in nodes:
        log = verified(state_of(node) / "audit.jsonl")
        assert not log.problem
        left = [line["left"] for line in log.lines]
        assert left == [["number"], ["statistics", "categories"], ["statistics"]]
        assert {line["run"] for line in log.lines} == {"first"}


@pytest.mark.parametrize("number", [1e101, -1e308])
def test_sums_that_no_table_gives_are_refused(number: float) -> None:
    """Of finite sums the mean may be infinite, and all members would refuse the second pass."""
    with pytest.raises(WireError, match="larger than any table's"):
        vector_of(torch.tensor([5.0, number], dtype=torch.float64))
    assert vector_of(torch.tensor([5.0, 1e60], dtype=torch.float64))[1] == 1e60


def test_secure_sums_give_them_to_the_step(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    """No node's own sums are in any message, and each log says that statistics left masked."""
    config = config_of(CANDIDATES, secure__aggregation=True)
    made, transport = agree(config, nodes, tmp_path / "runs")
    step, rows = terms_of(config).rules.step, sum(len(rows_of(name)) for name in WARDS)
    for column, ours, theirs in zip(
        CANDIDATES.columns, made.encoders.columns, pooled(tmp_path).columns, strict=True
    ):
        assert ours.categories == theirs.categories
        if column.minimum is not None and column.maximum is not None:
            half, least = (column.maximum - column.minimum) / 2, rows - rows // 9 - 3
            assert abs(ours.mean - theirs.mean) <= half * 3 * step / least + 1e-15 * theirs.mean
            # The error of a variance, for the deviation.
            error = half**2 * 3 * step / least / theirs.std + 1e-9 * theirs.std
            assert abs(ours.std - theirs.std) <= error
    assert made.outputs == ("ill", "well")
    kinds = [json.loads(packet.head).get("kind") for packet in transport.received]
    assert kinds.count("masked") == 6
    assert "statistics" not in kinds
    left = [line["left"] for line in verified(state_of(nodes[0]) / "audit.jsonl").lines]
    assert left.count(["masked statistics"]) == 2


def test_a_rare_category_and_a_small_site_stay_at_home(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    """One row's ward is in no message, nor anything of a site with four rows; three have another number of rows."""
    secret = [{**row, "ward": "secret" if n == 7 else row["ward"]} for n, row in enumerate(rows_of("north"))]
    write_rows(Path(nodes[0]["data"]), secret)
    write_rows(Path(nodes[1]["data"]), [{**row, "ward": "hidden"} for row in rows_of("south")[:4]])
    made, transport = agree(config_of(CONTRACT), nodes, tmp_path / "runs")
    texts = " ".join(packet.head for packet in transport.received)
    assert "secret" not in texts
    assert "hidden" not in texts
    assert "secret" not in made.as_json()
    numbers = [np.frombuffer(packet.body[-48:]) for packet in transport.received if packet.body]
    assert not numbers[1].any()  # of the small site, in the first pass


def test_three_sites_train_on_the_same_columns(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    """From the frozen contract in the app: the same width at each, whatever categories and order a site has."""
    from copfl.federation.node.data import node_data

    app = init(tmp_path / "app", {"run": {"clients": 3}, "model": {"name": "mlp"}}, contract=CONTRACT)
    with pytest.raises(
        UsageError, match="the data contract is not frozen: age, sodium, income, ward, outcome"
    ):
        settings_of(read_app(app)["config"])
    config = flattened(nested(read_app(app)["config"])) | {"session.agree": True, "session.run": "first"}
    made = agree(config, nodes, tmp_path / "runs").contract
    freeze(app, made)
    assert contract_at(app) == contract_at(app / CONTRACT_FILE) == made
    settings = settings_of(read_app(app)["config"])
    assert settings.shape == (7,)
    assert settings.federation.samples.names == ("ill", "well")
    data = [node_data(settings, node_of(node)) for node in nodes]
    assert {tuple(d.train.x.shape[1:]) for d in data} == {(7,)}
    north = data[0].train.x[:, 3:].sum(0).tolist()  # bone, heart, lung, skin
    assert north == [0, 30, 30, 0]
    assert data[0].bundled is not None
    assert data[0].bundled.input.columns == made.encoders.columns
    values = np.concatenate([d.train.x[:, :3].numpy() for d in data])
    assert np.abs(values.mean(0)).max() < 1e-5
    assert np.abs(values.std(0) - 1).max() < 0.1


def test_the_coordinator_freezes_what_the_run_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that ends without agreement nothing is written, and a training is started with `run` alone."""
    app = init(tmp_path / "app", {"run": {"clients": 3}, "model": {"name": "mlp"}}, contract=CANDIDATES)
    asked: list[dict[str, Any]] = []

    def followed(folder: Path, config: dict[str, Any], **_: Any) -> deployed.Followed:
        asked.append(config)
        return deployed.Followed("first", 1)

    monkeypatch.setattr(deployed, "follow_run", followed)
    with pytest.raises(RunError, match="did not agree on the encoders in run first"):
        deployed.agree(app, {})
    assert contract_at(app) == CANDIDATES
    given = {n: {"mean": 1.5, "deviation": 2.0} for n in ("age", "sodium", "income")}
    chosen = {"categories": ("bone", "skin"), "candidates": ()}
    found = CANDIDATES.replaced({**given, "ward": chosen, "outcome": chosen})
    (app / "agreements" / "first").mkdir(parents=True)
    (app / "agreements" / "first" / "contract.json").write_text(found.as_json())
    assert deployed.agree(app, {}) == found == contract_at(app)
    assert asked == [{"session.agree": True}] * 2
    config = read_app(app)["config"]["samples"]
    assert (json.loads(config["shape"]), json.loads(config["classes"])) == ([5], ["bone", "skin"])
    with pytest.raises(UsageError, match="start it with `copfl federate agree"):
        deployed.start_run(app, {"session.agree": True})


@pytest.mark.job
@pytest.mark.parametrize("group", ["", "note"])
def test_validation_rows_teach_no_encoder(group: str, tmp_path: Path) -> None:
    """Means, deviations and categories are of the rows that the run of all tables trains on."""
    rows = {name: [{"site": name, **row} for row in rows_of(name)] for name in WARDS}
    for row in (row for of_site in rows.values() for row in of_site):
        row["note"] = f"{row['site']}{row['age'] // 10}"  # type: ignore[operator]
    whole = write_rows(tmp_path / "all.csv", [row for of_site in rows.values() for row in of_site])
    files = [write_rows(tmp_path / f"{name}.csv", of_site) for name, of_site in rows.items()]
    data = {"name": str(whole), "target": "outcome", "client": "site", "missing": "fill"}
    data |= {"group": group} if group else {"drop": "note"}
    run: Tables = {
        "data": data,
        "model": {"name": "mlp"},
        "run": {"validation": 0.25, "seed": 3, "rounds": 1},
    }
    expected = prepare(complete(run)).federation.dataset.table.columns
    everything = prepare(complete(run, {"run": {"validation": 0.0}})).federation.dataset.table.columns
    assert expected[0].mean != pytest.approx(everything[0].mean, rel=1e-6)
    nodes = [knowing({"data": str(f), "state-dir": str(tmp_path / f"s{n}")}) for n, f in enumerate(files)]
    config = config_of(dataclasses.replace(CONTRACT, group=group), run__validation=0.25, run__seed=3)
    made = agree(config, nodes, tmp_path / "runs").contract
    for ours, theirs in zip(made.encoders.columns, expected, strict=True):
        assert (ours.name, ours.categories) == (theirs.name, theirs.categories)
        assert (ours.mean, ours.std) == pytest.approx((theirs.mean, theirs.std), rel=1e-9)
    secure = {"secure__aggregation": True, "run__validation": 0.25, "session__run": "sums"}
    listed = dataclasses.replace(CANDIDATES, group=group)
    others = [node | {"state-dir": f"{node['state-dir']}-secure"} for node in nodes]
    in_sums = agree(config_of(listed, run__seed=3, **secure), others, tmp_path / "runs").contract
    assert in_sums.encoders.columns[0].mean == pytest.approx(expected[0].mean, abs=1e-4)


# -- what a malicious server would ask for -------------------------------------------------------------------


def refused(config: dict[str, Any], nodes: list[dict[str, Any]], runs: Path) -> str:
    """Why the nodes decline."""
    with pytest.raises(RunError, match="the members do not agree") as error:
        agree(config, nodes, runs)
    return str(error.value)


def test_sums_at_the_end_of_the_range_are_no_statistics(
    nodes: list[dict[str, Any]], tmp_path: Path, logged: list[str]
) -> None:
    """A contract chooses the units of a sum. The server knows the end, where large sites are, and read the small one's.

    So of such values there is no sum at all.
    """
    contract = CANDIDATES.replaced({"age": {"minimum": 0.0, "maximum": 1e-7}})
    with pytest.raises(RunError, match=r"no tables give the sums .* contract's minimum and maximum"):
        agree(config_of(contract, secure__aggregation=True), nodes, tmp_path / "runs")
    assert sum("so far out of the contract's minimum" in text for text in logged) == 3


@pytest.mark.parametrize("secure", [False, True])
def test_statistics_are_given_once(secure: bool, nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    """The same question again has the same answer; with another column, row, range or member it has none."""
    settings = {"secure__aggregation": secure}
    made = agree(config_of(CANDIDATES, **settings), nodes, tmp_path / "a").contract
    again = agree(config_of(CANDIDATES, **settings, session__run="again"), nodes, tmp_path / "b").contract
    assert again == made
    fewer = dataclasses.replace(CANDIDATES, columns=CANDIDATES.columns[:3])
    narrow = CANDIDATES.replaced({"age": {"maximum": 121.0}})
    others = CANDIDATES.replaced({"ward": {"candidates": ("heart", "lung")}})
    drop = dataclasses.replace(CANDIDATES, missing="drop")
    for n, contract in enumerate((fewer, narrow, others, drop)):
        why = refused(config_of(contract, **settings, session__run=f"other-{n}"), nodes, tmp_path / "c")
        assert "raise statistics.questions above 1" in why
    write_rows(Path(nodes[0]["data"]), rows_of("north")[:-1])  # one patient less
    why = refused(config_of(CANDIDATES, **settings, session__run="less"), nodes, tmp_path / "d")
    assert "client 0: it declined: statistics of this node's data were given" in why


def test_a_row_like_another_one_is_another_row(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    """The hashes of the rows are the same as before, and the sums are not."""
    columns = ["age", "sodium", "income", "ward", "outcome"]
    write_rows(Path(nodes[0]["data"]), rows_of("north"), columns)
    agree(config_of(CONTRACT), nodes, tmp_path / "a")
    write_rows(Path(nodes[0]["data"]), [*rows_of("north"), rows_of("north")[0]], columns)
    assert "statistics of this node's data were given" in refused(
        config_of(CONTRACT, session__run="again"), nodes, tmp_path / "b"
    )
    lines = verified(state_of(nodes[0]) / "audit.jsonl").lines
    assert [line["left"] for line in lines if line["run"] == "again"] == [["number"], []]


def test_a_member_more_or_less_is_refused(tmp_path: Path) -> None:
    """Four members, then the three others: the difference would be the sums of one."""
    nodes = nodes_of(tmp_path)
    rows = [{**row, "age": 30 + n % 50} for n, row in enumerate(rows_of("west", 5))]
    extra = write_rows(tmp_path / "extra.csv", rows)
    own = {"data": str(extra), "test": str(extra), "state-dir": str(tmp_path / "state-3")}
    settings: dict[str, Any] = {"secure__aggregation": True, "run__clients": 4}
    agree(config_of(CANDIDATES, **settings), [*nodes, knowing(own)], tmp_path / "a")
    settings |= {"run__clients": 3, "session__run": "second"}
    why = refused(config_of(CANDIDATES, **settings), nodes, tmp_path / "b")
    assert "were added up with other members" in why
    plain = refused(config_of(CANDIDATES, session__run="third"), nodes, tmp_path / "c")
    assert "were added up with other members" in plain


def test_other_centres_are_another_question(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    """Whether a sum is out of range would tell a server about one node, a centre after the other."""
    config = config_of(CONTRACT)
    _made, transport = agree(config, nodes, tmp_path / "a")
    terms = terms_of(config)
    folder = ServerFolder(str(tmp_path / "a"), "first", resume=True)
    server = StatisticsServer(terms, exchange_of(terms, transport, folder))
    server.round, server.centres = 1, like_centres(terms.question) + 17.0
    head, _ = answer(nodes[0], transport.run_config, "train", server.down(0))
    assert "statistics of this node's data were given" in json.loads(head)["refused"]


@pytest.mark.parametrize(
    ("policy", "secure", "line"),
    [
        (Policy(statistics=StatisticsRules(allowed="none")), True, "statistics.allowed"),
        (Policy(statistics=StatisticsRules(allowed="sums")), False, "statistics.allowed"),
        (Policy(privacy=PrivacyRules(noise=1.0)), True, "privacy.noise"),
        (Policy(privacy=PrivacyRules(lifetime_epsilon=3.0)), False, "privacy.lifetime_epsilon"),
    ],
)
def test_a_policy_keeps_statistics_at_home(
    policy: Policy, secure: bool, line: str, nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    config = config_of(CANDIDATES, secure__aggregation=secure)
    assert line in [refusal.line for refusal in refusals(policy, config)]
    assert line not in [refusal.line for refusal in refusals(Policy(), config)]
    write_policy(state_of(nodes[1]) / FILE, policy)
    run_config = {**config, KEY: proposed(config, nodes).text}
    terms = terms_of(config)
    folder = ServerFolder(str(tmp_path), "first", resume=False)
    server = StatisticsServer(terms, exchange_of(terms, MessageTransport(run_config, nodes), folder))
    server.centres = like_centres(terms.question)
    head, body = answer(nodes[1], run_config, "train", server.down(1))
    assert f"[{line}]" in json.loads(head)["refused"]
    assert not body


def test_the_smallest_count_is_the_nodes_own(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    write_policy(state_of(nodes[2]) / FILE, Policy(statistics=StatisticsRules(smallest_count=40)))
    made = agree(config_of(CONTRACT), nodes, tmp_path / "runs").contract
    assert made.columns[3].categories == ("heart", "lung", "skin")  # no bone: 36 rows in the west


def test_a_contract_of_a_million_categories_is_refused_by_its_size(nodes: list[dict[str, Any]]) -> None:
    """Before anything of it is read."""
    text = json.dumps({"candidates": [str(n) for n in range(10**6)]})
    (refusal,) = refusals(Policy(), {**RUN, "samples.contract": text})
    assert "samples.contract is too large" in refusal.why


@pytest.mark.parametrize(
    ("contract", "error"),
    [
        (CONTRACT, 'the categories of "ward" are open, and a secure sum is of numbers'),
        (CANDIDATES.replaced({"age": {"maximum": None}}), '"age" needs a minimum and a maximum'),
    ],
)
def test_what_a_secure_sum_cannot_ask(contract: Contract, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        terms_of(config_of(contract, secure__aggregation=True))


def test_sums_without_noise_void_no_epsilon() -> None:
    with pytest.raises(UsageError, match="would void its epsilon"):
        terms_of(config_of(CONTRACT, privacy__noise=1.0, privacy__clip=1.0))


def test_a_contract_that_is_none_is_no_fault_of_the_nodes_data(nodes: list[dict[str, Any]]) -> None:
    """The refusal says what is wrong with the run config."""
    config = config_of(CONTRACT) | {"samples.contract": '{"format": 1, "columns": 7}'}
    run_config = {**config, KEY: proposed(config, nodes).text}
    head, _ = answer(nodes[0], run_config, "train", ("{}", b""))
    assert "samples.contract cannot be used: this is no data contract" in json.loads(head)["refused"]


def test_the_classes_of_texts_are_agreed_on(tmp_path: Path) -> None:
    column, target = Column(name="line", type="text"), Column(name="mood", type="category")
    contract = Contract(data="text", columns=(column,), targets=(target,))
    nodes = []
    for n, moods in enumerate((("glad", "sad"), ("sad", "angry"), ("glad", "glad"))):
        rows: list[dict[str, object]]
        rows = [{"mood": moods[k % 2], "line": f"text {n} {k}"} for k in range(30)]
        path = str(write_rows(tmp_path / f"{n}.csv", rows))
        nodes.append(knowing({"data": path, "test": path, "state-dir": str(tmp_path / f"state-{n}")}))
    made = agree(config_of(contract, samples__text=True), nodes, tmp_path / "runs").contract
    assert made.outputs == ("angry", "glad", "sad")


def test_other_encoders_do_not_make_other_data(nodes: list[dict[str, Any]], tmp_path: Path) -> None:
    """A server that proposes another mean, or fewer columns, asks for the same data: memory and ledger know them."""
    from copfl.federation.node.data import node_data

    given: dict[str, dict[str, Any]]
    given = {n: {"mean": 100.0, "deviation": 10.0} for n in ("age", "sodium", "income")}
    given |= {"ward": {"categories": ("heart", "lung")}, "outcome": {"categories": ("ill", "well")}}
    frozen = CONTRACT.replaced(given)
    shifted = frozen.replaced({"age": {"mean": 100.001, "deviation": 10.0}})
    fewer = dataclasses.replace(frozen, columns=frozen.columns[1:])
    samples = []
    for contract, width in ((frozen, 5), (shifted, 5), (fewer, 4)):
        config = {
            "run.clients": 3,
            "model.name": "mlp",
            "samples.shape": [width],
            "samples.classes": ["ill", "well"],
            "samples.contract": contract.as_json(),
        }
        samples.append(node_data(settings_of(config), node_of(nodes[0])).samples.tolist())
    assert samples[0] == samples[1] == samples[2]


def test_a_node_tells_its_owner_alone_what_differs(
    nodes: list[dict[str, Any]], tmp_path: Path, logged: list[str]
) -> None:
    """It answers nevertheless: a refusal would tell a coordinator who proposes ranges which values it has."""
    narrow = CONTRACT.replaced({"age": {"minimum": 0, "maximum": 60}})
    agree(config_of(narrow), nodes, tmp_path / "runs")
    lines = [line for line in logged if "this node's data differ from the contract" in line]
    assert any('"age" has ' in line and "outside 0 to 60" in line for line in lines), logged


@slow
@pytest.mark.parametrize("secure", [False, True])
def test_real_processes_agree_train_and_predict(secure: bool, tmp_path: Path) -> None:
    """Three tables from nothing: agreed, trained, and each node has a model in use."""
    contract, files = CANDIDATES if secure else CONTRACT, write_sites(tmp_path / "sites")
    layer: Tables = {"run": {"rounds": 2}, "model": {"name": "mlp"}, "secure": {"aggregation": secure}}
    app = init(tmp_path / "app", layer, contract=contract)
    sites = [train for train, _ in files.values()]
    records = list(up(app, sites=sites))
    assert [record["clients"] for record in records] == [[0, 1, 2]] * 2
    frozen = contract_at(app)
    assert frozen.columns[3].categories == ("bone", "heart", "lung", "skin")
    for client, site in enumerate(sites):
        state, answers = app / "nodes" / str(client) / "state", tmp_path / f"{client}.csv"
        assert copfl.load(state).description.input.columns == frozen.encoders.columns
        code, output = call(["predict", str(state), "--data", str(site), "--out", str(answers)])
        assert code == 0, output
        assert len(answers.read_text().splitlines()) == len(site.read_text().splitlines())


@pytest.mark.parametrize("name", ["ill\n[tool]", "\ud800", "\u2028", "x" * 501, 7, None])
def test_a_member_names_no_category_that_the_others_refuse(name: object) -> None:
    """The frozen contract had it, and every node refused the run config; with half a character it was not written."""
    with pytest.raises(WireError, match="texts in one line"):
        _names({"outcome": ["well", name]})
    assert _names({"outcome": ["well", "krank ä"]}) == {"outcome": ["well", "krank ä"]}
