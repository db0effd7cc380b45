"""The coordinator's page: of rounds with and without secure sums and noise, and of folders of every state."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from copfl.cli.federate.trial import _show
from copfl.experiment import records
from copfl.experiment.analysis.benefit import group_benefit, halves_of
from copfl.federation.operations.page import FederationPage, document_of
from copfl.federation.operations.status import as_text, status
from copfl.federation.operations.watched import read
from copfl.federation.protocol.keys import fingerprint, read_public
from copfl.report.document import Document
from copfl.report.serving import PageServer
from copfl.sections import Section
from tests.commands import called
from tests.federation.folders import RUN, ServerState
from tests.report.hostile import NAME, assert_harmless
from tests.report.test_page import data_of

ROUNDS = 2
MEMBERS = ["node-0", "node-1", "node-2"]
DAMAGED = "it was damaged on its way"
SCORES = ("gradient_score", "prediction_score")  # of CO-PFL
# What a run differs in, as the server writes it: with secure sums means alone, with noise an epsilon.
FEDERATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "secure": {"secure_aggregation": {"step": 0.001}, "per_client": {}},
    "private": {"federation": {"epsilon": 1.25, "epsilon_server": 2.5}},
}


class Written(NamedTuple):
    """The folder of a federation's server after two rounds, written without training."""

    app: Path
    records: list[dict[str, Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """Federations of three clients; the second one's upload of the second round was damaged."""
    home, federations = tmp_path_factory.mktemp("federations"), {}
    for name, more in FEDERATIONS.items():
        state = ServerState(home / name, MEMBERS, needed=2, rounds=ROUNDS)
        state.sign()
        state.start()
        for number in range(1, ROUNDS + 1):
            missing = {1: DAMAGED} if name == "plain" and number == 2 else {}
            state.begin_round(number)
            for client, reason in missing.items():
                state.log("rejected", round=number, client=client, reason=reason)
            state.end_round(number, missing, scores=SCORES, **more)
        state.log("ended")
        federations[name] = Written(state.app, records.read(state.path / "rounds.jsonl"))
    return federations


def page_of(folder: Path) -> Document:
    return document_of(read(folder))


def section(document: Document, name: str) -> Section:
    return next(section for section in document.sections if section.name == name)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.5, "After the last round accuracy is 50.0 % in the mean of 2 of 3 members"),
        (None, "The last evaluation has 2 of 3 members"),
    ],
)
def test_the_page_says_whom_the_last_evaluation_has(value: float | None, said: str, tmp_path: Path) -> None:
    state = ServerState(tmp_path / "clinic", rounds=1)
    state.start()
    state.begin_round(1)
    state.end_round(1)
    assert not section(page_of(state.app), "curves").notes
    state.log("evaluated", metric="accuracy", clients=2, of=3, **({} if value is None else {"value": value}))
    (note,) = section(page_of(state.app), "curves").notes
    assert note.startswith(said)


def test_the_numbers_are_those_of_the_rounds(written: dict[str, Written]) -> None:
    app, lines = written["plain"]
    found = page_of(app)
    mean, members = section(found, "curves").charts
    accuracies = [100 * record["mean"]["accuracy"] for record in lines]
    assert list(mean.lines[0].y) == pytest.approx(accuracies)  # type: ignore[union-attr]
    assert [line.name for line in members.lines] == ["node-0", "node-1", "node-2"]  # type: ignore[union-attr]
    assert members.lines[1].y[1] is None  # type: ignore[union-attr]
    assert f"{100 * lines[-1]['mean']['accuracy']:.1f} %" in found.conclusion[1]
    (rounds,) = section(found, "rounds").tables
    assert rounds.rows[0][-1].startswith("node-1: it was damaged on its way")
    assert rounds.rows[1][-1] == "nobody"
    (totals,) = section(found, "bytes").tables
    assert [row[1] for row in totals.rows] == ["2", "1", "2"]
    up = section(found, "bytes").charts[0].lines[0].y  # type: ignore[union-attr]
    assert list(up) == [record["bytes"]["up"] / 1000 for record in lines]


def test_weights_are_shares_and_labelled_as_without_an_interval(written: dict[str, Written]) -> None:
    app, lines = written["plain"]
    found = section(page_of(app), "contributions")
    weight, gradient, prediction = found.charts
    assert [chart.name for chart in found.charts] == ["weight", "gradient_score", "prediction_score"]
    weights = lines[0]["per_client"]["weight"]
    shares = [row[0] for row in weight.values]  # type: ignore[union-attr]
    assert shares == pytest.approx([value / sum(weights) for value in weights])
    assert all(chart.title.endswith("without an interval") for chart in (weight, gradient, prediction))
    assert "without an interval" in found.notes[0]


def test_secure_aggregation_leaves_means_and_says_what_it_hides(written: dict[str, Written]) -> None:
    found = page_of(written["secure"].app)
    assert [chart.name for chart in section(found, "curves").charts] == ["mean"]
    for name in ("curves", "contributions"):
        assert section(found, name).notes[0].startswith("Hidden by secure aggregation")
    assert section(found, "contributions").charts == []


def ended(state: ServerState, rounds: int, **more: Any) -> Section:
    """The section on the benefit after so many rounds."""
    state.start()
    for number in range(1, rounds + 1):
        state.begin_round(number)
        state.end_round(number, **more)
    return section(page_of(state.app), "benefit")


NAMES = ["north", "south", "west", "east", "sea", "hill"]


def test_the_benefit_of_each_member_is_beside_its_other_numbers(tmp_path: Path) -> None:
    state = ServerState(tmp_path / "clinic", NAMES, rounds=24, benefit=True)
    found = ended(state, 24)
    (table,), (chart,) = found.tables, found.charts
    numbers = ["benefit", "95 % interval", "verdict", "rank", "to itself", "weight", "sent", "rounds"]
    assert table.head == ["client", *numbers]
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == NAMES
    halves = halves_of(records.read(state.path / "rounds.jsonl"), len(NAMES))
    assert halves is not None
    expected = group_benefit(*halves)
    low, high = expected.interval(0)
    assert rows["north"][:4] == [
        f"{1000 * expected.value[0]:+.2f}",
        f"[{1000 * low:+.2f}, {1000 * high:+.2f}]",
        "higher",
        "1",
    ]
    assert rows["south"][2:4] == ["lower", "2 to 6"]  # than the mean member; among the others no rank
    assert rows["hill"][5:] == ["1.71", "72 kB", "24 of 24"]  # of the weights 1 to 6
    assert [line.name for line in chart.series] == ["benefit"]  # type: ignore[union-attr]
    assert "own gain over training alone does not leave its node" in found.notes[0]
    assert "no measure of effort" in " ".join(table.notes)


def test_a_trial_prints_the_same_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ServerState(tmp_path / "clinic", NAMES, rounds=24, benefit=True)
    (table,) = ended(state, 24).tables
    _show(state.app, iter([]))
    printed = capsys.readouterr().out
    assert "What each site contributes" in printed
    for name, benefit, interval, *_ in table.rows:
        assert f"{benefit}  {interval}" in next(
            line for line in printed.splitlines() if line.startswith(name)
        )


def test_without_intervals_there_is_no_benefit(tmp_path: Path) -> None:
    """Of fewer rounds than members nothing is known, and no rank is shown."""
    found = ended(ServerState(tmp_path / "clinic", NAMES, benefit=True), 3)
    (table,) = found.tables
    assert {tuple(row[1:5]) for row in table.rows} == {("-", "-", "not known", "-")}
    assert "3 rounds are few for 6 sites: 22 or more" in " ".join(table.notes)


def test_a_run_that_does_not_measure_it_has_no_benefit(written: dict[str, Written]) -> None:
    assert "benefit" not in {part.name for part in page_of(written["plain"].app).sections}


def test_epsilon_is_that_of_the_last_round(written: dict[str, Written]) -> None:
    app, lines = written["private"]
    (table,) = section(page_of(app), "privacy").tables
    last = lines[-1]["federation"]
    assert table.rows[0] == ["node-0", "2", f"{last['epsilon']:.2f}", f"{last['epsilon_server']:.2f}"]
    assert "does not leave its node" in section(page_of(app), "privacy").notes[0]
    assert "no noise" in section(page_of(written["plain"].app), "privacy").notes[0]


def test_who_signed_the_run_and_its_settings_are_on_the_page(written: dict[str, Written]) -> None:
    app = written["plain"].app
    signer = read_public(app / "keys" / "coordinator.pub")
    facts = {row[0]: row[1] for row in page_of(app).facts.rows}  # type: ignore[union-attr]
    assert fingerprint(signer) in facts["signed by"]
    assert facts["algorithm"].startswith("copfl")
    assert facts["model"].startswith("mlp (width 16")
    assert facts["members"].startswith("3, fingerprint of the list ")


def test_the_log_is_there_with_its_last_hash(written: dict[str, Written]) -> None:
    app = written["plain"].app
    (log,) = section(page_of(app), "log").tables
    lines = (app / "runs" / RUN / "audit.jsonl").read_text().splitlines()
    assert len(log.rows) == len(lines)
    assert [row[1] for row in log.rows][:2] == ["ended", "round ended"]
    rejected = next(row for row in log.rows if row[1] == "rejected")
    assert rejected[2].startswith("round 2, node-1, it was damaged on its way")
    assert f"{len(lines)} lines; no line was changed or removed" in log.notes[0]


def test_the_command_writes_one_file_that_needs_nothing(
    written: dict[str, Written], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = called(capsys, "federate", "watch", written["plain"].app, "--once", tmp_path / "page.html")
    assert answer == (0, f"{tmp_path / 'page.html'}\n", "")
    html = (tmp_path / "page.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!#|data:,)""", html)
    assert "connect-src 'none'" in html
    assert 'id="pause"' not in html
    assert data_of(html)["ended"]
    assert list(data_of(html)["figures"])[:3] == ["mean", "members", "seconds"]


def test_what_is_wrong_is_said_before_it_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = called(capsys, "federate", "watch", tmp_path)
    assert answer.code == 2
    assert "holds no app of copfl" in answer.err


def test_a_run_that_waits(tmp_path: Path) -> None:
    state = ServerState(tmp_path / "clinic", needed=3)
    state.sign()
    assert page_of(state.app).conclusion == ["No run has begun; 3 members admitted."]
    state.start()
    state.begin_round(1)
    state.log("accepted", round=1, client=0, bytes=10)
    state.log("left", client=2, node="102")
    with state.running():
        found = page_of(state.app)
        assert found.problems == ["No SuperLink answers at 127.0.0.1:9."]
        assert found.conclusion[0] == "Round 1 of 4 is running."
        waiting = re.sub(r"0:\d\d", "TIME", str(found.conclusion[1]))
        names = "south (training for TIME), west (not connected for TIME)"
        assert waiting == f"It waits for {names}. north has answered and waits."
        assert list(found.tables[0].rows[0][:2]) == ["0 north", "has answered"]
        assert [row[3] for row in found.tables[0].rows] == ["no", "yes", "yes"]
        assert not data_of(FederationPage(state.app).html("f"))["ended"]  # it asks on
    assert page_of(state.app).conclusion[0] == "The run was interrupted after 0 of 4 rounds."
    state.log("failed", reason="no space left on the device")
    assert page_of(state.app).conclusion[0] == (
        "The run failed after 0 of 4 rounds: no space left on the device."
    )


def test_a_site_that_is_away_is_named_where_the_round_ends_without_it(tmp_path: Path) -> None:
    state = ServerState(tmp_path / "clinic", needed=2)
    state.start()
    state.begin_round(1)
    for client in (0, 1):
        state.log("accepted", round=1, client=client, bytes=10)
    state.log("left", client=2, node="102")
    with state.running():
        said = str(page_of(state.app).conclusion[1])
    assert said.startswith("Every upload that is needed has arrived")
    assert said.endswith("west is not connected.")


def test_a_phase_that_waits_names_the_member_alone(tmp_path: Path) -> None:
    """In secure sums no upload is accepted before all have arrived."""
    state = ServerState(tmp_path / "clinic", needed=3)
    state.start()
    state.begin_round(1)
    with state.running():
        assert page_of(state.app).conclusion[1].count("training for") == 3
        state.log("waiting", round=1, clients=[1], reason="phase 'masked' waits for client 1")
        found = page_of(state.app)
        assert str(found.conclusion[1]).startswith("It waits for south (training for")
        assert str(found.conclusion[1]).endswith("). north, west have answered and wait.")
        assert list(status(state.app)["waiting_for"]) == ["1"]
        assert "\nwaiting     for clients 1 (south), " in as_text(status(state.app))
        state.log("waiting", round=1, clients=[], reason="phase 'masked' has ended")
        assert page_of(state.app).conclusion[1].count("training for") == 3


def test_nodes_that_take_no_part_are_listed_by_their_reason(tmp_path: Path) -> None:
    state = ServerState(tmp_path / "clinic", needed=3)
    state.start()
    state.begin_round(1)
    for node in ("7", "8", "9"):
        state.log("refused", node=node, reason="its owner has not approved" if node != "9" else "another")
    with state.running():
        found = page_of(state.app)
        assert found.conclusion[1] == "It waits: 3 nodes take no part, for the reason below."
        assert found.tables[-1].rows == [["its owner has not approved", "2", "7, 8"], ["another", "1", "9"]]
        for client, node in enumerate(("7", "8", "9")):
            state.log("joined", client=client, node=node)
        assert "Nodes that take no part" not in [table.title for table in page_of(state.app).tables]


def test_all_that_members_send_is_escaped(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>"
    state = ServerState(tmp_path / "clinic", [script, "south", "west"])
    state.start()
    state.begin_round(1)
    state.log("rejected", round=1, client=0, reason=f"{script} diverged")
    state.end_round(1, {0: f"{script} diverged"}, metric=f"</script>{script}")
    state.log("refused", node=script, reason=script)
    state.log("failed", reason=script)
    html = FederationPage(state.app).html()
    assert "alert(1)" in html
    assert "<script>alert" not in html
    assert html.count("</script>") == 3  # the data and the two scripts of the page
    assert script in json.dumps(data_of(html))  # the name is in a chart


def test_names_and_reasons_do_not_become_markup(tmp_path: Path) -> None:
    """Of members, nodes, metrics, categories and refusals, and in the name of the folder."""
    state = ServerState(tmp_path / NAME.replace("/", ""), [NAME, "south", "west"])
    state.start()
    state.begin_round(1)
    state.log("rejected", round=1, client=0, reason=NAME)
    state.end_round(1, {0: NAME}, metric=NAME)
    state.log("refused", node=NAME, reason=NAME)
    state.log("failed", reason=NAME)
    page = assert_harmless(FederationPage(state.app).html())
    assert NAME[:5] in page.text


@pytest.mark.parametrize("weights", [[5e-324, 0.0, 0.0], [1e12, -1e12, 5e-324]])
def test_weights_that_add_up_to_nearly_nothing_have_a_page(weights: list[float], tmp_path: Path) -> None:
    """A share of 1e-323 is infinite, which JSON does not have: no page was served while the run had this round."""
    state = ServerState(tmp_path / "clinic")
    state.start()
    state.begin_round(1)
    per_client = {"accuracy": dict.fromkeys(range(3), 0.5), "weight": dict(enumerate(weights))}
    state.end_round(1, per_client=per_client)
    assert "weight" in FederationPage(state.app).html()


def test_the_page_is_for_who_has_its_address(tmp_path: Path) -> None:
    with PageServer(FederationPage(ServerState(tmp_path / "clinic").app), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"

        def status(address: str, name: str = f"127.0.0.1:{port}") -> int:
            try:
                request = urllib.request.Request(address, headers={"Host": name})
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                error.close()
                return error.code

        assert status(server.address) == 200
        assert status(f"http://127.0.0.1:{port}/") == 403
        assert status(server.address, f"rebound.example:{port}") == 403
        assert status(f"{server.address}members.json") == 404
        server.shutdown()


def test_many_members_and_many_events_have_a_page_of_bounded_length(tmp_path: Path) -> None:
    state = ServerState(tmp_path / "clinic", [f"site-{n}" for n in range(20)])
    state.start()
    for number in range(1, 21):
        state.begin_round(number)
        state.end_round(number)
    found = page_of(state.app)
    assert [type(chart).__name__ for chart in section(found, "curves").charts] == ["Lines", "Heat"]
    (log,) = section(found, "log").tables
    assert len(log.rows) == 300
    assert "The last 300 lines; runs/trial/audit.jsonl has all" in log.notes
    assert len(FederationPage(state.app).html()) < 400_000
