"""The race: its stages by hand, its dropping, its resuming, and that no test sample enters it."""

from __future__ import annotations

import json
import math
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl import charts
from copfl.algorithms import ALGORITHMS
from copfl.comparison.choosing import choose as racing
from copfl.comparison.choosing.budget import (
    FEWEST,
    Budget,
    Rung,
    Speed,
    affordable,
    cost,
    limit_of,
    plan,
    raceable,
)
from copfl.comparison.choosing.race import Contestant, Race, StageResult
from copfl.comparison.choosing.ranking import LOCAL
from copfl.comparison.choosing.verdict import FEDERATE, NO_GAIN, STAY_ALONE
from copfl.comparison.jobs.job import Job
from copfl.comparison.jobs.processes import Pool
from copfl.comparison.jobs.runner import all_done
from copfl.comparison.jobs.submission import TimeIsUp
from copfl.comparison.results.results import Record, read_record
from copfl.comparison.rows.entries import Entry, entry_of
from copfl.comparison.rows.entry_settings import with_one_optimizer
from copfl.errors import RunError, UsageError
from copfl.experiment.folder import RunFolder
from copfl.report import choice_page
from copfl.settings.complete import complete
from tests.commands import called
from tests.data.test_survival import cohort, written

BASE: dict[str, Any] = {
    "model": {"name": "mlp", "width": 4},
    "optimizer": {"name": "adam", "lr": 0.01},
    "run": {"rounds": 6, "clients": 4, "batch": 16, "engine": "sequential"},
}


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_the_command` draws one."""
    monkeypatch.setattr(charts, "pictures", lambda *_: {})


def test_the_stages_by_hand() -> None:
    assert plan(16, 1, 12, 64) == [Rung(2, 1, 12), Rung(6, 1, 4), Rung(16, 1, 2)]
    assert cost(plan(16, 1, 12, 64)) == 12 * 2 + 4 * 4 + 2 * 10
    assert plan(40, 3, 2, 1000) == [Rung(40, 3, 2)]  # two candidates: nothing is dropped
    assert plan(10, 1, 9, 10**6)[0] == Rung(10, 1, 9)  # enough for the full comparison
    assert plan(10, 1, 9, 1)[0] == Rung(1, 1, 9)  # the shortest race


def test_the_stages_with_several_seeds_by_hand() -> None:
    """Rounds first, then seeds: 10 candidates, 12 rounds and 3 seeds at a third of 10 * 12 * 3."""
    stages = plan(12, 3, 10, 120)
    assert stages == [Rung(8, 1, 10), Rung(12, 1, 4), Rung(12, 2, 2)]
    assert cost(stages) == 10 * 8 + 4 * (12 - 8) + 2 * 12 == 120
    assert plan(12, 3, 10, 200)[-1] == Rung(
        12, 3, 2
    )  # the first stage has half of the rounds or more: more seeds
    assert plan(40, 3, 53, 53 * 40) == [
        Rung(24, 1, 53),
        Rung(40, 1, 18),
        Rung(40, 3, 7),
    ]  # an eighth: finalists
    longer = plan(40, 3, 20, 800)
    assert all(rung.seeds == 1 or rung.rounds == 40 for rung in longer)  # whole runs of more seeds


def standing(rounds: int, **values: list[list[float]]) -> StageResult:
    """After a stage: the clients' accuracies of each candidate, a list per seed."""
    run = record_like()
    records = {
        label: [run._replace(clients={"accuracy": own}) for own in seeds] for label, seeds in values.items()
    }
    return StageResult([Contestant(Entry(label, label, {}), [], []) for label in values], records, rounds)


def record_like() -> Record:
    return Record({}, 0.2, 1, [1], {"accuracy": [0.9] * 9}, {}, {})


def test_who_goes_on_by_hand() -> None:
    best, close, far = [[0.9, 0.8, 0.9], [0.8] * 3], [[0.8, 0.9, 0.8], [0.8] * 3], [[0.2] * 3, [0.1] * 3]
    race = Race(Path(), {}, [0, 1], 0.2, Pool(1))
    race.rounds = 12
    early, late = (standing(rounds, fedper=best, fedavg=close, local=far) for rounds in (5, 6))
    assert early.value("fedper") == pytest.approx((2.6 / 3 + 0.8) / 2)
    assert early.seeds == 2
    assert not late.worse("fedavg")  # +0.1, -0.1 and +0.1 with one seed, equal with the other
    assert late.worse("local")
    assert [one.label for one in race.kept(early, 3)] == ["fedper", "fedavg", "local"]  # too early to tell
    assert [one.label for one in race.kept(early, 1)] == ["fedper"]
    assert race.left == {
        "fedavg": "dropped for the budget, at round 5",
        "local": "dropped for the budget, at round 5",
    }
    assert [one.label for one in race.kept(late, 3)] == ["fedper", "fedavg"]
    assert race.left["local"] == "worse, at round 6"


def test_what_has_not_left_the_constant_answer_is_not_dropped_early() -> None:
    """Of four candidates two may go on; two still answer as the most frequent class does."""
    values = {"a": [[0.7, 0.8]], "b": [[0.6, 0.8]], "c": [[0.5, 0.6]], "d": [[0.4, 0.65]]}
    race = Race(Path(), {}, [0], 0.2, Pool(1), constant=np.array([0.5, 0.6]))
    race.rounds = 12
    early, late = (standing(rounds, **values) for rounds in (2, 6))
    assert [race.at_constant(early, one) for one in early.order] == [False, False, True, True]
    asked = list[int]()

    def pays(count: int) -> bool:
        asked.append(count)
        return True

    assert [one.label for one in race.kept(early, 2, pays)] == ["a", "b", "c", "d"]
    assert asked == [4]
    assert [one.label for one in race.kept(early, 2, lambda count: count < 4)] == ["a", "b", "c"]
    assert race.notes.pop().endswith("so the budget can keep all but 1 of them.")
    assert race.left.pop("d") == "dropped for the budget, at round 2, not better than a constant answer yet"
    assert race.notes == [
        "At round 2 of 12, 2 of 4 candidates are not better than a constant answer, so none of them is dropped yet."
    ]
    assert [one.label for one in race.kept(early, 1, pays)] == [
        "a",
        "c",
        "d",
    ]  # b has left it, and is dropped
    assert race.left == {"b": "dropped for the budget, at round 2"}
    race.left.clear()
    assert [one.label for one in race.kept(early, 2)] == ["a", "b"]  # the budget cannot pay
    assert race.left["c"] == "dropped for the budget, at round 2, not better than a constant answer yet"
    race.left.clear()
    assert [one.label for one in race.kept(late, 2, pays)] == ["a", "b"]  # half of the rounds are enough


def test_the_loss_decides_who_goes_on_early() -> None:
    """All have the accuracy of the constant answer; what is dropped late has the lower accuracy."""
    found = standing(2, a=[[0.5, 0.5]], b=[[0.5, 0.5]], c=[[0.5, 0.4]])
    losses = {"a": 0.9, "b": 0.5, "c": 0.7}
    with_loss = {
        label: [run._replace(curves={**run.curves, "test_loss": [1.0, losses[label]]}) for run in runs]
        for label, runs in found.records.items()
    }
    race = Race(Path(), {}, [0], 0.2, Pool(1))
    race.rounds = 12
    early = found._replace(records=with_loss)
    assert [one.label for one in early.by_loss] == ["b", "c", "a"]
    assert [one.label for one in race.kept(early, 2)] == ["b", "c"]
    assert [one.label for one in race.kept(early._replace(rounds=6), 2)] == ["a", "b"]
    assert [one.label for one in found.by_loss] == ["a", "b", "c"]  # no loss is known


def test_few_candidates_race_where_the_budget_is_small_by_hand() -> None:
    """Of 62 candidates with 40 rounds, 300 rounds are enough for so many that each has ten rounds or more."""
    count = raceable(40, 1, 62, 300)
    assert FEWEST < count < 62
    stages = plan(40, 1, count, 300)
    assert stages[0].rounds >= 10
    assert cost(stages) <= 300
    assert plan(40, 1, count + 1, 300)[0].rounds < 10
    assert raceable(40, 1, 62, 10**6) == 62
    assert raceable(40, 3, 62, 1) == FEWEST
    assert raceable(40, 1, 3, 1) == 3


@pytest.mark.job
@pytest.mark.usefixtures("no_pictures")
def test_what_can_be_decided_is_of_those_that_race(tmp_path: Path) -> None:
    """Of seven candidates with 16 rounds, 44 rounds are enough for five: 5 * 4 and 2 * 12."""
    base = {**BASE, "run": {**BASE["run"], "rounds": 16}}
    entries = ["fedavg", "fedper", "ditto", "lg_fedavg", "apfl", "fedrep"]
    assert raceable(16, 1, 7, 44) == 5
    assert plan(16, 1, 5, 44) == [Rung(4, 1, 5), Rung(16, 1, 2)]
    found = copfl.choose(entries, budget=44, seeds=(0,), base_tables=base, out=tmp_path, retrain=False)
    assert "With a budget of 44 rounds, 5 of 7 candidates race: " in " ".join(found.notes)
    assert "What 4 clients can decide: with 5 candidates " in " ".join(found.notes)
    assert found.spent <= 44
    left_out = [row.label for row in found.ranking if row.status == "left out, with a budget of 44 rounds"]
    assert left_out == ["apfl", "fedrep"]


def test_the_first_candidates_race_and_the_others_are_named() -> None:
    race, every = (
        Race(Path(), {}, [0], 0.2, Pool(1)),
        standing(1, a=[[1.0]], b=[[1.0]], c=[[1.0]]).order,
    )
    assert race.first(every, 3, "4 clients", "so") == every
    assert not race.notes
    assert [one.label for one in race.first(every, 2, "4 clients", "more could not be told apart")] == [
        "a",
        "b",
    ]
    assert race.notes == ["With 4 clients, 2 of 3 candidates race: more could not be told apart."]
    assert race.left == {"c": "left out, with 4 clients"}


@pytest.mark.usefixtures("no_pictures")
def test_with_few_clients_few_of_all_methods_race_and_it_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racing, "FIRST", (LOCAL, "fedper", "fedavg"))
    base = {**BASE, "run": {**BASE["run"], "rounds": 1, "clients": 2}}
    said = list[str]()
    found = copfl.choose(seeds=(0,), base_tables=base, out=tmp_path, retrain=False, log=said.append)
    assert {row.label for row in found.ranking if row.rounds} == {"local", "fedper", "fedavg"}
    (few,) = (note for note in found.notes if note.startswith("With 2 clients, 3 of "))
    (what,) = (
        note for note in found.notes if note.startswith("What 2 clients can decide: with 3 candidates")
    )
    started = next(line for line in said if line.startswith("3 candidates to round 1"))
    assert said.index(few) < said.index(what) < said.index(started)
    assert (
        "learning rate 0.01, not tuned" in found.verdict.text
    )  # and not the rates of those that do not race
    assert "candidates: left out, with 2 clients (" in str(found).replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "limit"),
    [("", None), ("300", Budget(300)), (300, Budget(300)), ("10m", Budget(600, True))],
)
def test_budgets(text: str | int, limit: Budget | None) -> None:
    assert limit_of(text) == limit


@pytest.mark.parametrize("text", ["ten", "0", "-3", "5d", "m"])
def test_budgets_that_are_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before anything is prepared."""
    monkeypatch.setattr(racing, "prepare", None)
    with pytest.raises(UsageError, match="neither a number of rounds"):
        copfl.choose(budget=text)


def test_a_budget_of_rounds_is_a_limit_by_hand() -> None:
    """Two seeds of 40 rounds are too many for 100 rounds, and all rounds for 30."""
    assert affordable(40, 2, 2, 160) == [Rung(40, 2, 2)]
    assert affordable(40, 2, 2, 100) == [Rung(40, 1, 2)]
    assert affordable(40, 2, 2, 30) == [Rung(15, 1, 2)]  # 40 * 0.9^9 = 15.5, 40 * 0.9^10 = 13.9
    assert affordable(40, 2, 9, 8) == []


def test_what_a_stage_takes_by_hand() -> None:
    """Two processes, two seconds a round, five of a stage's own."""
    speed = Speed(2.0, 5.0, 2)
    assert speed.seconds([Rung(8, 1, 4)]) == 5 + 4 * 8 * 2 / 2
    assert speed.seconds([Rung(8, 1, 4), Rung(12, 1, 2)], done=8) == 5 + 2 * 4 * 2 / 2
    assert Speed(2.0, 5.0, 16).seconds([Rung(12, 2, 2)], done=12) == 5 + 12 * 2  # rounds are in a row


def slow_rounds(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    append = RunFolder.append

    def waited(folder: RunFolder, record: dict[str, Any], taken: float) -> None:
        time.sleep(seconds)
        append(folder, record, seconds)

    monkeypatch.setattr(RunFolder, "append", waited)


@pytest.mark.job
@pytest.mark.usefixtures("no_pictures")
def test_a_time_as_budget_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A race of all rounds would take two minutes; what is left out is said before it begins."""
    slow_rounds(monkeypatch, 0.4)
    said, begin = list[str](), time.monotonic()
    base = {**BASE, "run": {**BASE["run"], "rounds": 60}}
    found = copfl.choose(
        ["fedavg", "fedper"], budget="8s", base_tables=base, out=tmp_path, seeds=(0, 1), log=said.append
    )
    assert time.monotonic() - begin < 30  # imports and pictures included, on a busy machine
    assert found.ranking[0].rounds < 60
    assert {row.label for row in found.ranking} == {"local", "fedavg", "fedper"}
    assert any(note.startswith("The choice is not trained on all training samples") for note in found.notes)
    (shorter,) = (note for note in found.notes if "a race of all rounds takes about" in note)
    later = [line for line in said if " candidates to round " in line][1:]
    assert all(said.index(shorter) < said.index(line) for line in later)
    assert not (tmp_path / "chosen").exists()
    assert found.verdict.kind == "not enough evidence"
    assert "of 60 rounds" in found.verdict.text


def test_the_verdict_compares_the_best_method_with_constant_answers() -> None:
    """Two points above training alone with every client, and no better than the class that 94 % have."""
    own, alone = [[0.94, 0.95, 0.93]] * 2, [[0.92, 0.93, 0.91]] * 2
    for constant, kind in (([0.94, 0.95, 0.93], NO_GAIN), ([0.5, 0.5, 0.5], FEDERATE)):
        race = Race(Path(), {}, [0, 1], 0.2, Pool(1), constant=np.array(constant))
        race.rounds, final = 12, standing(12, fedper=own, local=alone)
        race.stages = [final]
        race.last = dict.fromkeys(("fedper", "local"), final)
        race.algorithms = {"fedper": "fedper", "local": "local"}
        race.rates = {"fedper": 0.01}
        found = race.verdict(final)
        assert found.kind == kind
        assert found.text.startswith("No useful gain") == (kind == NO_GAIN)


def test_a_method_that_was_left_out_after_the_first_rounds_was_not_tuned() -> None:
    """The time allows two of three candidates; the third one trained a round, and is in the ranking."""
    race = Race(Path(), {}, [0], 0.2, Pool(1))
    first = standing(1, local=[[0.5, 0.6]], fedper=[[0.9, 0.9]], fedpac=[[0.8, 0.7]])
    race.rounds, race.stages, race.last = 12, [first], dict.fromkeys(first.records, first)
    race.algorithms = {label: label for label in first.records}
    race.rates = dict.fromkeys(first.records, 0.01)
    race.first(first.order, 2, "the time that is left", "more could not be told apart")
    assert race.rates == {"local": 0.01, "fedper": 0.01}
    assert "fedpac" in {row.label for row in race.ranking(first)}
    assert "learning rate 0.01, not tuned" in race.verdict(first).text


def test_a_stage_that_the_time_ends_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race(tmp_path, {**BASE, "run": {**BASE["run"], "checkpoint_every": 1}}, [0], 0.2, Pool(1))
    race.rounds = 6
    candidates = race.candidates(racing._entries(["fedavg"]), {})
    first = race.stage(candidates, 1)
    race.end = time.monotonic()
    with pytest.raises(TimeIsUp):
        race.stage(candidates, 4)
    assert race.stages == [first]
    assert race.last["local"].rounds == 1


@pytest.mark.job
def test_a_method_that_ends_before_the_others_stays_in_the_race(tmp_path: Path) -> None:
    """Levels need 16 rounds, and the stage ends at round 18 of the others."""
    base = with_one_optimizer({"data": {"name": "heart"}, "run": {"checkpoint_every": 1, "rivals": False}})
    race = Race(tmp_path, base, [0], 0.2, Pool(1))
    race.rounds = 100
    candidates = race.candidates(racing._entries(["levels"]), {})
    standing = race.stage(candidates, 18)
    assert standing.records.keys() == {"levels", "local"}
    trained = {c.label: len((c.jobs[0].path / "rounds.jsonl").read_text().splitlines()) for c in candidates}
    assert trained == {"levels": 16, "local": 18}


def test_the_rounds_of_the_choice_are_those_with_the_lowest_loss() -> None:
    """Means over two seeds, evaluated every second round: .8, .5, .7; where it still falls at the end, all rounds."""
    run = record_like()
    seeds = [
        run._replace(rounds=[2, 4, 6], curves={"test_loss": own})
        for own in ([0.9, 0.5, 0.6], [0.7, 0.5, 0.8])
    ]
    assert racing._lowest(seeds, 20) == 4
    assert (
        racing._lowest([one._replace(rounds=[2, 4], curves={"test_loss": [0.9, 0.5]}) for one in seeds], 20)
        == 20
    )
    diverged = run._replace(rounds=[1, 2, 3], curves={"test_loss": [math.nan, 0.5, 0.6]})
    assert racing._lowest([diverged], 20) == 2
    for curves in ({}, {"test_loss": [math.nan] * 3}):  # not one round, for want of a loss
        assert racing._lowest([run._replace(rounds=[1, 2, 3], curves=curves)], 20) == 20


@pytest.mark.job
@pytest.mark.usefixtures("no_pictures")
def test_a_choice_on_a_table_trains_as_long_as_its_loss_fell(tmp_path: Path) -> None:
    """The learning rate is so high that the loss on validation samples soon rises."""
    base = {"run": {"rivals": False, "local_baseline": False}}
    found = copfl.choose(["fedavg"], "heart", lr=0.1, seeds=(0,), out=tmp_path, budget=40, base_tables=base)
    chosen = complete(tomllib.loads((tmp_path / "run.toml").read_text()))
    assert chosen.run.find_rounds == "done"
    assert chosen.run.rounds < 100
    assert f"is trained for {chosen.run.rounds} rounds" in " ".join(found.notes)
    assert len((tmp_path / "chosen" / "rounds.jsonl").read_text().splitlines()) == chosen.run.rounds


def test_a_time_that_ends_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the time was up before any candidate"):
        copfl.choose(["fedavg"], budget="0.001s", seeds=(0,), base_tables=BASE, out=tmp_path)


def test_a_budget_of_too_few_rounds(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too small for 3 candidates; the shortest race has 3"):
        copfl.choose(["fedavg", "fedper"], budget=2, seeds=(0,), base_tables=BASE, out=tmp_path)


def uninterrupted(job: Job, tmp_path: Path) -> bytes:
    all_done([job._replace(path=tmp_path / "alone" / job.path.name, until=0)], Pool(1))
    return (tmp_path / "alone" / job.path.name / "rounds.jsonl").read_bytes()


@pytest.mark.usefixtures("no_pictures")
def test_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer stages continue the runs of shorter ones, and the same command repeats nothing."""
    jobs, trained = list[Job](), list[str]()
    append = RunFolder.append

    def counted(folder: RunFolder, record: dict[str, Any], seconds: float) -> None:
        trained.append(folder.path.parent.name)
        append(folder, record, seconds)

    def seen(some: list[Job], *options: Any, **more: Any) -> None:
        jobs.extend(some)
        all_done(some, *options, **more)

    monkeypatch.setattr(RunFolder, "append", counted)
    monkeypatch.setattr("copfl.comparison.choosing.race.all_done", seen)
    how: dict[str, Any] = {"base_tables": BASE, "out": tmp_path / "out", "budget": 40, "seeds": (0, 1)}
    found = copfl.choose(["fedavg", "fedper", "ditto", "lg_fedavg"], **how)
    assert {row.label for row in found.ranking} == {"fedavg", "fedper", "ditto", "lg_fedavg", "local"}
    shown = choice_page.document_of(tmp_path / "out")
    assert shown.title == str(found).splitlines()[0]
    assert shown.conclusion[:2] == [line for line in found.answer if not line.startswith("Tested")]
    assert (
        shown.conclusion[-1]
        == f"The choice, trained on all training samples: copfl report {found.folder / 'chosen'}"
    )
    assert len(shown.tables[0].rows) == len([row for row in found.ranking if row.rounds])
    (tmp_path / "early" / "race").mkdir(parents=True)
    with pytest.raises(RunError, match="without a ranking: it was stopped, or its time was up"):
        choice_page.is_choice(tmp_path / "early")
    assert found.ranking[0].status == "chosen"
    assert found.ranking[0][1:3] == (6, 2)
    assert {row[1:3] for row in found.ranking} == {(6, 2), (5, 1)}
    assert found.spent == sum(row.rounds * row.seeds for row in found.ranking) <= 40
    assert trained.count("race") == found.spent  # no round is trained twice
    assert all(job.validation == 0.2 for job in jobs)
    best = next(job for job in jobs if job.label == found.chosen and job.rounds == 6)
    assert (best.path / "rounds.jsonl").read_bytes() == uninterrupted(best, tmp_path)
    chosen = copfl.run(found.chosen, **_flat(), local_baseline=False)
    path = tmp_path / "out" / "chosen" / "rounds.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == chosen.records
    assert found.tested is not None
    count = len(trained)
    again = copfl.choose(["fedavg", "fedper", "ditto", "lg_fedavg"], **how)
    assert len(trained) == count
    assert again.ranking[1:] == found.ranking[1:]
    content = json.loads((tmp_path / "out" / "ranking.json").read_text())
    assert content["chosen"] == found.chosen
    assert set(content["curves"]) == {row.label for row in found.ranking}
    assert "no test sample" in (tmp_path / "out" / "ranking.txt").read_text().replace("\n", " ")


def _flat() -> dict[str, Any]:
    run = {key: value for key, value in BASE["run"].items() if key != "clients"}
    return {
        "model": "mlp",
        "model_options": {"width": 4},
        "optimizer": BASE["optimizer"],
        "clients": 4,
        **run,
    }


@pytest.mark.usefixtures("no_pictures")
def test_the_race_tests_on_training_samples(tmp_path: Path) -> None:
    base = {**BASE, "run": {**BASE["run"], "rounds": 1}}
    copfl.choose(["fedavg"], seeds=(0,), base_tables=base, out=tmp_path, retrain=False)
    data = copfl.run("local", **{**_flat(), "rounds": 1}).experiment.federation.partition
    for folder in (tmp_path / "race").iterdir():
        partition = RunFolder(folder).partition()
        assert partition.test_from == "train"
        for own, whole in zip(partition.test, data.train, strict=True):
            assert set(own.tolist()) <= set(whole.tolist())


def test_a_record_after_some_of_the_rounds(tmp_path: Path) -> None:
    race = Race(tmp_path, {**BASE, "run": {**BASE["run"], "checkpoint_every": 1}}, [0], 0.2, Pool(1))
    (one,) = race.candidates(racing._entries(["local"]), {})
    race.rounds = 6
    race.stage([one], 2)
    assert (one.jobs[0].path / "checkpoint").is_dir()
    early = read_record(one.jobs[0]._replace(until=2))
    race.stage([one], 6)
    assert not (one.jobs[0].path / "checkpoint").exists()
    assert read_record(one.jobs[0]._replace(until=2)) == early
    assert len(read_record(one.jobs[0]).rounds) == 6


@pytest.mark.usefixtures("no_pictures")
def test_what_cannot_run_is_left_out(tmp_path: Path) -> None:
    base = {**BASE, "data": {"name": "diabetes"}, "run": {"rounds": 1, "clients": 3, "engine": "sequential"}}
    found = copfl.choose(["fedavg", "fedpac"], seeds=(0,), base_tables=base, out=tmp_path, retrain=False)
    row = next(row for row in found.ranking if row.label == "fedpac")
    assert row.status == "could not run"
    assert np.isnan(row.value)
    assert found.notes[1].startswith("These cannot train on the task: fedpac (aligns")
    assert not re.search(r"^fedpac ", str(found), re.MULTILINE)  # of those without a round there is one line
    assert "1 of 3 candidates: could not run (fedpac)." in str(found)
    with pytest.raises(RunError, match="no candidate could run"):
        Race(tmp_path, base, [0], 0.2, Pool(1)).run(
            Race(tmp_path, base, [0], 0.2, Pool(1)).candidates(racing._entries(["fedpac"])[:1], {}),
            1,
            Budget(9),
            False,
        )


@pytest.mark.usefixtures("no_pictures")
def test_hints_about_the_data_are_notes_of_the_choice(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    np.savez(tmp_path / "rare.npz", x=x, y=np.arange(60) % 12 == 0, group=np.arange(60) % 2)
    base = {**BASE, "data": {"name": str(tmp_path / "rare.npz")}, "partition": {"name": "by_group"}}
    base |= {"run": {"rounds": 1, "engine": "sequential"}}
    found = copfl.choose(["fedavg"], seeds=(0,), base_tables=base, out=tmp_path / "out", retrain=False)
    assert any(
        "of the samples are" in note and "judge by the balanced accuracy" in note for note in found.notes
    )


@pytest.mark.job
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line: list[Any] = [
        "-a",
        "fedavg",
        "--model",
        "mlp",
        "--set",
        "model.width=4",
        "--clients",
        3,
        "--rounds",
        2,
    ]
    line += ["--tune", "lr=0.01,0.001", "--no-retrain", "--seeds", "0,1", "--jobs", 1, "--out", tmp_path]
    answer = called(capsys, "choose", *line)
    assert answer.code == 0
    assert "Which method for digits, 3 clients?" in answer.out
    assert "Clients: 3 clients, partition classes (per_client=3, train_per_class=5" in answer.out
    assert "fedavg lr=0.01" in answer.out
    assert "is chosen" in answer.out
    assert (tmp_path / "run.toml").exists()
    drawn = [path.name for path in sorted(tmp_path.glob("curves.*")) if path.stat().st_size]
    assert drawn == ["curves.png", "curves.svg"] * charts.available()
    wrong = called(capsys, "choose", "--budget", "soon")
    assert (wrong.code, "neither a number of rounds" in wrong.err) == (2, True)


def test_the_best_steps_of_the_server_race_beside_all_algorithms() -> None:
    labels = [row.label for row in racing._entries(["all"])]
    assert "fedpac server.name=fedexp head_speed=3.0" in labels
    assert len(labels) == len({*labels}) == len(ALGORITHMS) + len(racing.SERVER_STEPS)
    assert [row.label for row in racing._entries(["fedavg"])] == ["fedavg", "local"]
    first = [entry_of(text).label for text in racing.FIRST]
    assert labels[: len(first)] == first  # all of them are among the candidates
    more = [row.label for row in racing._entries(["all"], [0.01])]
    assert {"fedpac server.name=momentum lr=0.01", "local lr=0.01"} <= {*more}
    assert len(more) == len({*more}) == len(labels) + len(racing.SERVER_STEPS) + 1


def test_a_race_has_the_batches_and_the_rate_of_a_first_run_unless_they_are_set() -> None:
    few: dict[str, Any] = {"data": {"name": "digits"}, "run": {"clients": 20}}
    base = racing._as_a_first_run(with_one_optimizer(few))
    usual = complete(few)
    assert (base["run"]["batch"], base["optimizer"]["lr"]) == (usual.run.batch, usual.optimizer.lr)
    named: dict[str, Any] = {**few, "run": {"clients": 20, "batch": 4}, "optimizer": {"lr": 0.5}}
    base = racing._as_a_first_run(with_one_optimizer(named))
    assert (base["run"]["batch"], base["optimizer"]["lr"]) == (4, 0.5)
    words = {**few, "model": {"name": "embedding"}}
    assert racing._as_a_first_run(with_one_optimizer(words))["addons"] == {"lr_schedule": "cosine"}


@pytest.mark.usefixtures("no_pictures")
def test_the_answer_may_be_a_rival(tmp_path: Path) -> None:
    """Two rounds of a tiny network learn nothing that a linear model at each client has at once."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int64)
    np.savez(tmp_path / "sites.npz", x=x, y=y, group=np.arange(400) % 4)
    table: dict[str, Any] = {
        "data": {"name": str(tmp_path / "sites.npz")},
        "model": {"name": "mlp", "width": 2},
        "optimizer": {"name": "sgd", "lr": 1e-5},
        "run": {"rounds": 2, "engine": "sequential"},
    }
    how: dict[str, Any] = {"seeds": [0], "retrain": False, "budget": 100}
    found = copfl.choose(["fedavg"], base_tables=table, out=tmp_path / "out", **how)
    assert found.verdict.kind == STAY_ALONE
    assert found.rival == "linear"
    assert "Stay alone, take a linear model: " in " ".join(str(found).split())
    content = json.loads((tmp_path / "out" / "ranking.json").read_text())
    assert (content["rival"], content["rivals"]["chosen"]) == ("linear", "linear")
    tables = table | {"run": {"rounds": 2, "engine": "sequential", "rivals": False}}
    without = copfl.choose(["fedavg"], base_tables=tables, out=tmp_path / "without", **how)
    assert (without.rivals, without.rival) == (None, "")
    assert without.verdict.kind != STAY_ALONE


@pytest.mark.job
@pytest.mark.usefixtures("no_pictures")
def test_times_until_an_event_are_raced(tmp_path: Path) -> None:
    """A site without an event has no C-index, and the others decide; what a site has alone is Cox's model."""
    columns = cohort(240)
    columns["died"] = np.where(columns["site"] == 2, 0.0, columns["died"])
    table = written(tmp_path / "cohort.csv", columns)
    settings: dict[str, Any] = {"target": "years", "event": "died", "client": "site", "engine": "sequential"}
    found = copfl.choose(
        ["fedavg", "fedavg_ft", "local"], table, **settings, rounds=3, seeds=[0, 1], out=tmp_path / "choose"
    )
    assert found.chosen
    assert found.metric.name == "c_index"
    ranking = (tmp_path / "choose" / "ranking.txt").read_text()
    assert "C-index" in ranking
    assert "nan" not in ranking
    assert "scikit-learn" not in ranking
    assert "Cox's model with a ridge" in ranking.replace("\n", " ")
