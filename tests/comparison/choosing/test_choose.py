"""`choose`: the table of losses of named methods, its files and its verdict."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.algorithms import ALGORITHMS
from copfl.comparison.choosing import choose as choosing
from copfl.comparison.choosing import trying
from copfl.comparison.choosing.budget import Budget, limit_of
from copfl.comparison.rows.entries import entry_of
from copfl.comparison.rows.entry_settings import with_one_optimizer
from copfl.errors import RunError, UsageError
from copfl.experiment.choice import CHOICE
from copfl.experiment.verdict import VERDICT
from copfl.report import choice_page
from copfl.settings.complete import complete
from tests.commands import called
from tests.comparison.small import base, clouds
from tests.data.test_survival import cohort, written

BASE: dict[str, Any] = {
    "model": {"name": "mlp", "width": 4},
    "optimizer": {"name": "adam", "lr": 0.01},
    "run": {"rounds": 2, "clients": 3, "batch": 16, "engine": "sequential", "rivals": False},
}


def table(path: Path, shifted: bool) -> Path:
    """Four sites, of which each has few rows; all follow one rule, or two of them its opposite."""
    rng = np.random.default_rng(0)
    x, group = rng.normal(size=(240, 4)).astype(np.float32), np.arange(240) % 4
    y = (x.sum(1) + 0.5 * rng.normal(size=240) > 0) ^ (shifted & (group < 2))
    np.savez(path, x=x, y=y.astype(np.int64), group=group)
    return path


@pytest.mark.parametrize(
    ("text", "limit"),
    [("", None), ("300", Budget(300)), (300, Budget(300)), ("10m", Budget(seconds=600))],
)
def test_budgets(text: str | int, limit: Budget | None) -> None:
    assert limit_of(text) == limit


@pytest.mark.parametrize("text", ["ten", "0", "-3", "5d", "m"])
def test_budgets_that_are_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before anything is prepared."""
    monkeypatch.setattr(choosing, "prepare", None)
    with pytest.raises(UsageError, match="neither a number of rounds"):
        copfl.choose(budget=text)


def test_a_choice_its_folder_and_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels are trained for the rounds that they need; what was tried is not tried again."""
    data, out = table(tmp_path / "sites.npz", shifted=False), tmp_path / "out"
    how: dict[str, Any] = {"seeds": [0], "out": out, "rounds": 8, "engine": "sequential", "budget": 400}
    found = copfl.choose(["levels", "fedavg"], str(data), **how)
    assert {row.label for row in found.ranking} >= {"levels", "fedavg", "local", "linear alone", "constant"}
    assert found.chosen == "levels"
    assert found.verdict is not None
    assert found.verdict.these.sign == 1
    assert found.answer[0].startswith("levels is chosen.")
    assert "Training together gains." in found.answer[1]
    assert found.tested.startswith("levels on sites")
    assert found.spent <= 400
    verdict, choice = VERDICT.read(out / "chosen"), CHOICE.read(out / "chosen")
    assert verdict is not None
    assert verdict.these == found.verdict.these
    assert choice is not None
    assert choice.federation == "levels"
    assert tomllib.loads((out / "run.toml").read_text())["algorithm"]["name"] == "levels"
    shown = choice_page.document_of(out)
    assert shown.title == str(found).splitlines()[0]
    assert shown.conclusion[-1].endswith(f"copfl report {out / 'chosen'}")  # type: ignore[union-attr]
    assert "on no test row" in (out / "ranking.txt").read_text().replace("\n", " ")
    monkeypatch.setattr(trying, "tried_on", None)  # nothing is trained again
    again = copfl.choose(["levels", "fedavg"], str(data), **how)
    assert str(again) == str(found)
    damaged = next((out / "losses").glob("levels-*.npz"))
    damaged.write_bytes(b"PK")
    with pytest.raises(RunError, match=r"is damaged .* delete it, and the candidate is tried again"):
        copfl.choose(["levels", "fedavg"], str(data), **how)


def test_test_rows_have_no_say(tmp_path: Path) -> None:
    """Other answers of the test rows change nothing of the ranking."""
    found = []
    for seed in (1, 2):
        data = clouds(tmp_path / "clouds.npz", test_seed=seed)
        how: dict[str, Any] = {"base_tables": base(data), "seeds": [0], "retrain": False, "budget": 30}
        found.append(copfl.choose(["fedavg"], **how, out=tmp_path / f"{seed}").ranking)
    assert [row[:5] for row in found[0]] == [row[:5] for row in found[1]]


def test_the_answer_may_be_to_stay_alone(tmp_path: Path) -> None:
    """Sites that contradict each other: a model of trees can hold what a site has alone."""
    data = table(tmp_path / "sites.npz", shifted=True)
    found = copfl.choose(
        ["fedavg"], str(data), seeds=[0], out=tmp_path / "out", rounds=3, engine="sequential", budget=100
    )
    assert found.verdict is not None
    assert found.verdict.these.gain == 0  # what is chosen together is what each has alone
    assert found.rival == "linear"
    assert found.answer[0].startswith("a linear model at each site alone is chosen")
    assert "a linear model at each site alone" in found.answer[1] or "a linear model" in found.answer[1]
    assert json.loads((tmp_path / "out" / "ranking.json").read_text())["rival"] == "linear"
    assert (
        tomllib.loads((tmp_path / "out" / "chosen" / "run.toml").read_text())["run"]["own_models"] == "linear"
    )


def test_rounds_are_found_where_nobody_names_them(tmp_path: Path) -> None:
    data = table(tmp_path / "sites.npz", shifted=False)
    found = copfl.choose(
        ["fedavg"],
        str(data),
        seeds=[0],
        out=tmp_path / "out",
        budget=60,
        rivals=False,
        engine="sequential",
        retrain=False,
    )
    run = tomllib.loads((tmp_path / "out" / "run.toml").read_text())["run"]
    assert run["find_rounds"] == "done"
    assert run["rounds"] == next(row.rounds for row in found.ranking if row.status == "chosen") <= 30
    assert found.spent <= 60


def test_a_time_that_ends_early_is_said_and_the_same_again_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"seeds": (0,), "base_tables": BASE, "out": tmp_path, "retrain": False}
    with pytest.raises(RunError, match="ended before any candidate was tried; the same with a larger budget"):
        copfl.choose(["fedavg"], budget="0.001s", **how)
    with pytest.raises(RunError, match="budget of 1 ended before any candidate was tried"):
        copfl.choose(["fedavg"], budget=1, **how)
    (tmp_path / "losses").mkdir(exist_ok=True)
    with pytest.raises(RunError, match="without a ranking: it was stopped, or its time was up"):
        choice_page.is_choice(tmp_path)
    found = copfl.choose(["fedavg"], budget="10m", **how)
    assert {row.label for row in found.ranking} == {"fedavg", "local"}


def test_what_cannot_run_is_left_out(tmp_path: Path) -> None:
    tables = {
        **BASE,
        "data": {"name": "diabetes"},
        "run": {"rounds": 1, "clients": 3, "engine": "sequential", "rivals": False},
    }
    found = copfl.choose(["fedavg", "fedpac"], seeds=(0,), base_tables=tables, out=tmp_path, retrain=False)
    assert found.left_out["fedpac"].startswith("fedpac aligns")
    assert "Not tried: fedpac (" in str(found).replace("\n", " ")
    assert found.loss == "RMSE"


def test_the_command_in_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "-a fedavg --model mlp --set model.width=4 --clients 3 --rounds 2 --tune lr=0.01,0.001 --no-retrain"
    )
    line: list[Any] = [
        *words.split(),
        "--no-rivals",
        "--seeds",
        "0,1",
        "--budget",
        100,
        "--jobs",
        2,
        "--out",
        tmp_path,
    ]
    answer = called(capsys, "choose", *line)
    assert answer.code == 0, answer.err
    assert "Which method for digits, 3 clients?" in answer.out
    assert "Clients: 3 clients, partition classes (per_client=3, train_per_class=5" in answer.out
    assert "fedavg lr=0.01" in answer.out
    assert "is chosen" in answer.out
    assert (tmp_path / "run.toml").exists()
    one = called(capsys, "choose", *line[:-3], 1, "--out", tmp_path / "one")
    assert one.out.splitlines()[:12] == answer.out.splitlines()[:12]  # in one process
    wrong = called(capsys, "choose", "--budget", "soon")
    assert (wrong.code, "neither a number of rounds" in wrong.err) == (2, True)


def test_the_best_steps_of_the_server_are_tried_beside_all_algorithms() -> None:
    labels = [row.label for row in choosing._entries(["all"])]
    assert "fedpac server.name=fedexp head_speed=3.0" in labels
    assert len(labels) == len({*labels}) == len(ALGORITHMS) + len(choosing.SERVER_STEPS)
    assert [row.label for row in choosing._entries(["fedavg"])] == ["fedavg", "local"]
    first = [entry_of(text).label for text in choosing.FIRST]
    assert labels[: len(first)] == first  # all of them are among the candidates
    more = [row.label for row in choosing._entries(["all"], [0.01])]
    assert {"fedpac server.name=momentum lr=0.01", "local lr=0.01"} <= {*more}
    assert len(more) == len({*more}) == len(labels) + len(choosing.SERVER_STEPS) + 1


def test_candidates_have_the_batches_and_the_rate_of_a_first_run_unless_they_are_set() -> None:
    few: dict[str, Any] = {"data": {"name": "digits"}, "run": {"clients": 20}}
    tables = choosing._as_a_first_run(with_one_optimizer(few))
    usual = complete(few)
    assert (tables["run"]["batch"], tables["optimizer"]["lr"]) == (usual.run.batch, usual.optimizer.lr)
    named: dict[str, Any] = {**few, "run": {"clients": 20, "batch": 4}, "optimizer": {"lr": 0.5}}
    tables = choosing._as_a_first_run(with_one_optimizer(named))
    assert (tables["run"]["batch"], tables["optimizer"]["lr"]) == (4, 0.5)
    words = {**few, "model": {"name": "embedding"}}
    assert choosing._as_a_first_run(with_one_optimizer(words))["addons"] == {"lr_schedule": "cosine"}


def test_times_until_an_event(tmp_path: Path) -> None:
    """What a site has alone is Cox's model, which is compared and not chosen."""
    data = written(tmp_path / "cohort.csv", cohort(240))
    settings: dict[str, Any] = {"target": "years", "event": "died", "client": "site", "engine": "sequential"}
    found = copfl.choose(
        ["fedavg"], data, **settings, rounds=3, seeds=[0], out=tmp_path / "out", retrain=False
    )
    assert found.chosen in {"fedavg", "local"}
    assert "partial log-likelihood" in found.loss
    ranking = (tmp_path / "out" / "ranking.txt").read_text()
    assert "nan" not in ranking
    assert "a linear model at each site alone" in ranking
