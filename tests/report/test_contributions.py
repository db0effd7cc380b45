from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

import copfl
from copfl.core.halves import DIFFERENCE, HALF
from copfl.experiment.analysis.benefit import group_benefit, worth_to_itself
from copfl.experiment.reading import read_all
from copfl.experiment.result import Result
from copfl.measures.metrics import ACCURACY
from copfl.report import contributions, summary
from copfl.report.page import sections


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("benefit") / "run"
    return copfl.run(
        "fedavg",
        clients=4,
        rounds=17,
        model="mlp",
        model_options={"width": 8},
        benefit=True,
        local_baseline=True,
        out=out,
    )


def test_a_run_reports_the_benefit_of_its_records(result: Result) -> None:
    found = group_benefit(result.metric(HALF), result.metric(DIFFERENCE))
    content = summary.as_json(result)["contributions"]
    np.testing.assert_allclose(content["benefit"], found.value)
    np.testing.assert_allclose(content["interval"], [found.interval(n) for n in range(4)])
    assert content["verdict"] == found.verdicts
    assert content["weight"] == pytest.approx([1.0] * 4)  # of 4 clients of equal size
    assert content["rounds_taken_part"] == [17.0] * 4
    assert content["bytes"] == pytest.approx(
        (result.metric("bytes_up") + result.metric("bytes_down")).sum(0).tolist()
    )
    assert result.gains is not None
    assert content["gain"] == pytest.approx(result.gains.gain.tolist())
    own = worth_to_itself(result.metric(HALF), result.metric(DIFFERENCE))
    np.testing.assert_allclose(content["to_itself"]["value"], own.value)
    np.testing.assert_allclose(content["to_itself"]["error"], own.error)


def test_it_is_in_the_table_at_the_end_and_in_the_report(result: Result) -> None:
    out = io.StringIO()
    summary.show(result, out, verbose=True)
    text = out.getvalue()
    assert "What each site contributes" in text
    assert "17 rounds are few for 4 sites: 18 or more" in text.replace("\n", " ")
    assert result.folder is not None
    found = {section.name: section for section in sections(read_all([Path(result.folder)]))}
    (chart,) = found["benefit"].charts
    (table,) = found["benefit"].tables
    assert len(chart.series[0].y) == len(table.rows) == 4  # type: ignore[union-attr]
    assert "to itself" in table.head


def test_a_run_without_halves_has_none(runs: dict[str, Path]) -> None:
    assert "benefit" not in {section.name for section in sections(read_all([runs["fedavg"]]))}


def line(round: int, half: list[float], difference: list[float | None]) -> dict[str, object]:
    same = {"weight": [0.25] * 4, "bytes_up": [1.0] * 4, "bytes_down": [2.0] * 4}
    return {
        "round": round,
        "clients": [0, 1, 2, 3],
        "left_out": [],
        "per_client": {HALF: half, DIFFERENCE: difference, **same},
    }


def test_ranks_are_shown_only_where_intervals_allow() -> None:
    rng = np.random.default_rng(0)
    halves = [rng.permutation([1.0, 1, -1, -1]) for _ in range(30)]
    lines = [
        line(n + 1, half.tolist(), (half @ [5.0, 0, 0, -5] + 0.1 * rng.normal(size=4)).tolist())
        for n, half in enumerate(halves)
    ]
    found = contributions.contributions(lines, list("abcd"), [1] * 4, None, ACCURACY)
    assert found is not None
    table = contributions.table(found)
    ranks = [row[table.head.index("rank")] for row in table.rows]
    assert (ranks[0], ranks[3]) == ("1", "4")
    noise = [line(n + 1, half.tolist(), rng.normal(size=4).tolist()) for n, half in enumerate(halves)]
    found = contributions.contributions(noise, list("abcd"), [1] * 4, None, ACCURACY)
    assert found is not None
    assert {row[table.head.index("rank")] for row in contributions.table(found).rows} == {"-"}
    assert json.dumps(contributions.as_json(found))
