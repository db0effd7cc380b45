from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.audit import audit as auditing
from copfl.audit import replay
from copfl.audit import tables as audit_tables
from copfl.audit.audit import Cache, run_audit
from copfl.audit.shapley import Sampling
from copfl.errors import RunError, UsageError
from copfl.experiment import run as experiment
from copfl.experiment.analysis.benefit import group_benefit, halves_of
from copfl.experiment.folder import RunFolder
from copfl.experiment.training import execute
from copfl.report.contributions import relative_weights
from copfl.tables import as_markdown
from tests.audit.small import run_folder

EXACT = Sampling(truncate=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.mktemp("audit") / "run")


@pytest.fixture(scope="module")
def found(run: Path) -> auditing.Audit:
    return run_audit(run, seeds=[5], sampling=EXACT, cache=run / "notes")


def test_relative_weights_by_hand() -> None:
    nan = math.nan
    rows = np.array([[1.0, 3.0, nan], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(relative_weights(rows), [[0.5, 1.5, nan], [1, 1, 1]])


def test_a_run_that_evaluated_less_is_refused(tmp_path: Path) -> None:
    short = run_folder(tmp_path / "run", eval_models="personal")
    with pytest.raises(
        UsageError, match=r'evaluated less than an audit needs \(eval_models="personal"\); run it again'
    ):
        run_audit(short)


def test_a_damaged_result_is_computed_again(tmp_path: Path) -> None:
    stored = Cache(tmp_path / "new")
    assert stored.get("a") is None
    stored.put("a", {"x": [1, None]})
    assert Cache(tmp_path / "new").get("a") == {"x": [1, None]}
    (tmp_path / "new" / "a.json").write_text('{"x": [1, nu')
    assert stored.get("a") is None


def test_what_is_audited_is_the_run_of_the_folder(run: Path, found: auditing.Audit) -> None:
    first, second = found.seeds
    assert (first.seed, second.seed) == (0, 5)
    assert (first.exact, first.reproduced, second.exact, second.reproduced) == (True, True, True, None)
    lines = (run / "rounds.jsonl").read_text().splitlines()
    weights = [json.loads(line)["per_client"]["weight"] for line in lines]
    np.testing.assert_allclose(first.scores["weight"], 3 * np.mean(weights, 0))


def test_left_out_is_the_others_loss_of_accuracy(run: Path, found: auditing.Audit) -> None:
    e = experiment.reopen(RunFolder(run))
    whole, left = execute(e, None), replay.without(e, [1])
    gain = (whole.accuracy - left.accuracy)[-1, [0, 2]]  # three rounds: the last third is one evaluation
    assert found.seeds[0].values["leave_one_out_others"][1] == pytest.approx(gain.mean())
    assert found.seeds[0].errors["leave_one_out_others"][1] == pytest.approx(abs(gain[0] - gain[1]) / 2)
    gain = (whole.accuracy_global - left.accuracy_global)[-1]
    assert found.seeds[0].values["leave_one_out_global"][1] == pytest.approx(gain.mean())


def test_the_shares_of_the_rounds_add_up_to_what_the_broadcast_gained(
    run: Path, found: auditing.Audit
) -> None:
    e = experiment.reopen(RunFolder(run))
    values = []
    replay.observed(e, lambda _, snapshot: values.append(snapshot.value([frozenset(), frozenset(range(3))])))
    gained = sum(after - before for before, after in values)
    for place, way in enumerate(("global", "personal")):
        assert found.seeds[0].values[f"shapley_{way}"].sum() == pytest.approx(gained[place])
    np.testing.assert_array_equal(found.seeds[0].errors["shapley_global"], 0)


def test_an_audit_goes_on_where_it_was_stopped(
    run: Path, found: auditing.Audit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Stopped(Exception):
        pass

    done: list[object] = []
    original = replay.without

    def stopping(*given: object) -> object:
        if len(done) == 2:  # of three clients
            raise Stopped
        done.append(given)
        return original(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(replay, "without", stopping)
    with pytest.raises(Stopped):
        run_audit(run, sampling=EXACT, cache=tmp_path)
    monkeypatch.setattr(replay, "observed", None)  # never again
    done.clear()
    ticks: list[int] = []

    def start(total: int) -> auditing.Tick:
        ticks.append(-total)
        return ticks.append

    last = run_audit(run, sampling=EXACT, cache=tmp_path, start=start)
    assert len(done) == 1
    assert sum(ticks) == 0
    for name in last.contributions:
        np.testing.assert_array_equal(last.seeds[0].values[name], found.seeds[0].values[name])


def test_json_and_markdown(found: auditing.Audit) -> None:
    content = json.loads(json.dumps(audit_tables.as_json(found), allow_nan=False))
    assert content["format"] == "copfl audit 2"
    assert [len(seed["values"]["shapley_personal"]) for seed in content["seeds"]] == [3, 3]
    assert {c["score"] for c in content["correlations"]} == {
        "weight", "gradient_score", "prediction_score", "fedce weight", "fedce gradient_score", "fedce prediction_score"
    }  # fmt: skip
    for entry in content["correlations"]:
        assert len(entry["spearman"]) == len(entry["kendall"]) == 3
    parts = [*map(as_markdown, audit_tables.tables_of(found)), *audit_tables.remarks(found)]
    text = "\n\n".join(parts)
    assert "| fedce: gradient part |" in text
    assert "Means over the seeds 0, 5." in text
    assert "Kendall" in text
    assert "another machine" not in text


def test_no_retraining_no_baselines(run: Path, found: auditing.Audit) -> None:
    less = run_audit(run, sampling=EXACT, cache=run / "notes", retrain=False, baselines=[])
    assert less.contributions == ["shapley_global", "shapley_personal"]
    assert less.scores == ["weight", "prediction_score", "gradient_score"]


def test_a_run_that_is_not_reproduced_is_named(run: Path, found: auditing.Audit, tmp_path: Path) -> None:
    import shutil

    other = Path(shutil.copytree(run, tmp_path / "other"))
    lines = (other / "rounds.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    record["per_client"]["weight"][0] += 1e-9
    (other / "rounds.jsonl").write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    again = run_audit(other, sampling=EXACT, cache=run / "notes", retrain=False, baselines=[])
    assert again.seeds[0].reproduced is False
    assert any("was not reproduced here" in remark for remark in audit_tables.remarks(again))


def test_a_run_that_goes_on_is_not_audited(run: Path, tmp_path: Path) -> None:
    import shutil

    other = Path(shutil.copytree(run, tmp_path / "other"))
    lines = (other / "rounds.jsonl").read_text().splitlines()
    (other / "rounds.jsonl").write_text("\n".join(lines[:2]) + "\n")
    with pytest.raises(RunError, match=r"has 2 of 3 rounds; `copfl resume .*` completes it"):
        run_audit(other)


@pytest.mark.job
def test_a_regression_is_audited_by_its_error(tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "rounds": 1,
        "clients": 3,
        "model": "mlp",
        "model_options": {"width": 4},
        "lr": 0.05,
    }
    copfl.run("fedavg", "diabetes", **how, out=tmp_path / "run")
    found = run_audit(tmp_path / "run", baselines=[])
    assert found.metric.name == "rmse"
    assert found.seeds[0].exact
    assert found.seeds[0].accuracy.min() > 20  # in units of the target
    rows = audit_tables.tables_of(found)[0]
    assert "RMSE, positive where it is lower" in rows.title
    # All clients together gain what the global model gains in the round: the error becomes smaller.
    assert found.seeds[0].values["shapley_global"].sum() > 0
    content = audit_tables.as_json(found)
    assert content["metric"] == {"name": "rmse", "higher_is_better": False, "fraction": False}


@pytest.mark.job
def test_new_clients_have_no_weight(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", new_clients=0.4)
    found = run_audit(run, baselines=(), retrain=False)
    assert np.isnan(found.mean("scores", "weight")).sum() == 1


@pytest.mark.job
def test_the_benefit_of_a_run_is_compared_with_the_measured_contributions(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run", clients=4, rounds=20, benefit=True)
    audited = run_audit(path, baselines=[], sampling=EXACT)
    result = audit_tables.as_json(audited)
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    halves = halves_of(lines, 4)
    assert halves is not None
    expected = group_benefit(*halves)
    np.testing.assert_allclose(result["mean"]["scores"]["benefit"], expected.value)
    pairs = {(pair["score"], pair["contribution"]) for pair in result["correlations"]}
    assert ("benefit", "leave_one_out_others") in pairs
    clients, contributed, *_ = audit_tables.tables_of(audited)
    assert "benefit" in clients.head
    assert "±" in clients.rows[0][clients.head.index("benefit")]
    assert contributed.head == [
        "client",
        "benefit",
        "95 % interval",
        "verdict",
        "rank",
        "to itself",
        "weight",
        "samples",
        "sent",
        "rounds",
    ]
    low, high = expected.interval(0)
    assert contributed.rows[0][2] == f"[{1000 * low:+.2f}, {1000 * high:+.2f}]"
    assert result["seeds"][0]["contributions"]["verdict"] == expected.verdicts
