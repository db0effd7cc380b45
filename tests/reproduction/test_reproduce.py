"""An item that takes seconds, from nothing to its pages: in one sitting, in several, and on other machines."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from copfl.charts import available
from copfl.comparison.jobs import started_with
from copfl.engine import mapping, seed_batching
from copfl.errors import RunError, UsageError
from copfl.experiment import folder as run_folder
from copfl.reproduction import batch, experiments, findings, pages, store
from tests.commands import Answer, called

SMALL = Path(__file__).parent / "small.toml"
COLUMN = ("--column", "digits-3")
Capture = pytest.CaptureFixture[str]


def reproduce(capsys: Capture, here: Path, *words: object) -> Answer:
    where = ("--results", here / "results", "--runs", here / "runs", "--docs", here / "docs")
    return called(capsys, "reproduce", SMALL, "--device", "cpu", *where, *words)


def contents(folder: Path) -> dict[str, Any]:
    """The records by name, without what the clock said."""
    found = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    for record in found.values():
        del record["cost"]["seconds"]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of one column, made in one sitting; nobody writes here."""
    here = tmp_path_factory.mktemp("whole")
    session = batch.Sitting(
        store.opened(here / "results"), here / "runs", {"run": {"device": "cpu"}}, say=lambda text: None
    )
    item = experiments.read(str(SMALL))
    plans = [
        p for p in experiments.plans(item, item.budget("full"), ["paper"]) if p.column.name == "digits-3"
    ]
    assert batch.count_left(plans, [0, 1, 2], session.store) == 8  # 2 tuning runs, 3 of FedAvg, 3 of CO-PFL
    assert batch.carry_on(plans, [0, 1, 2], session) == (0, [])
    return here


def test_one_run_gives_two_rows_and_only_the_tuned_rows_are_tuned(whole: Path) -> None:
    names = sorted(
        re.sub(r"-[0-9a-f]{12}\.json", "", path.name) for path in (whole / "results").glob("*.json")
    )
    fedavg = ["digits-3-fedavg-sgd-seed0", "digits-3-fedavg-sgd-seed1", "digits-3-fedavg-sgd-seed2"]
    tuning = ["digits-3-fedavg-sgd-validation-seed0"] * 2
    assert names == sorted([f"digits-3-copfl-mamo-seed{seed}" for seed in range(3)] + fedavg + tuning)


def test_a_record_is_small_and_says_what_the_run_folder_says(whole: Path) -> None:
    for path in (whole / "results").glob("*.json"):
        record = store.from_json(path.read_text())
        assert path.stat().st_size < 4000
        assert store.as_json(record) == path.read_text()
        path = whole / "runs" / f"{record.id}-all" / "rounds.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert record.rounds == [line["round"] for line in lines]
        assert record.curves["loss"] == pytest.approx([line["mean"]["loss"] for line in lines], abs=1e-6)
        last = [line["per_client"]["accuracy"] for line in lines[-record.last :]]
        means = [sum(column) / len(last) for column in zip(*last, strict=True)]
        assert record.clients["accuracy"] == pytest.approx(means, abs=1e-6)
        assert record.mean() == pytest.approx(sum(means) / len(means), abs=1e-6)


def test_a_sitting_without_time_starts_nothing_and_the_next_goes_on_from_the_records_alone(
    whole: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = reproduce(capsys, tmp_path, *COLUMN, "--minutes", "0")
    assert answer.code == 0
    assert "8 runs are left; the same command goes on: copfl reproduce" in answer.err
    assert "not yet run" in answer.out
    assert not list(tmp_path.glob("results/*"))
    # Another sitting: the time is up after the third run, in the middle of a cell.
    done: list[str] = []
    valid = batch.carried_out

    def counted(runs: Sequence[experiments.Run], session: batch.Sitting) -> Any:
        if len(done) == 3:
            raise batch.TimeIsUp
        done.append(runs[0].label)
        return valid(runs, session)

    monkeypatch.setattr(batch, "carried_out", counted)
    answer = reproduce(capsys, tmp_path, *COLUMN)
    assert "the time is up" in answer.err
    assert "5 runs are left" in answer.err
    assert "1 of 3 seeds" in answer.out  # a table that is not whole says so
    monkeypatch.undo()
    # A third, elsewhere: only the records were carried.
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "results", elsewhere / "results")
    answer = reproduce(capsys, elsewhere, *COLUMN)
    assert (answer.code, "left" in answer.err) == (0, False)
    assert len(list((elsewhere / "runs").iterdir())) == 5
    assert contents(elsewhere / "results") == contents(whole / "results")


def test_seeds_that_go_in_step_give_the_same_records(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []

    def noted(settings: Any, simulations: Any) -> Any:
        together.append(len(settings))
        return valid(settings, simulations)

    valid = seed_batching.run_batched
    monkeypatch.setattr(seed_batching, "in_step", noted)
    item = experiments.read(str(SMALL))
    plans = [
        p for p in experiments.plans(item, item.budget("full"), ["paper"]) if p.column.name == "digits-3"
    ]
    runs = plans[2].runs({}, [0, 1, 2])
    place = {"run": {"device": "cpu", "engine": "vmap", "chunk": 64}}
    session = batch.Sitting(
        store.opened(tmp_path / "results"), tmp_path / "runs", place, say=lambda text: None
    )
    assert not session.cuda
    known = store.opened(whole / "results")
    for run, record in batch.carried_out(runs, session):
        expected = known.get(run)
        assert expected is not None
        assert record.curves["loss"] == pytest.approx(expected.curves["loss"], rel=1e-4)
        assert record.rounds == expected.rounds
    assert together == [3]


def test_seeds_for_which_a_gpu_has_no_room_at_once_go_one_after_another(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []

    def full(algorithm: Any, tasks: Any, mapping: Any, chunks: Any, look: Any) -> Any:
        rounds.append(len(chunks))
        if len(rounds) == 2:
            raise torch.cuda.OutOfMemoryError("no room")
        return valid(algorithm, tasks, mapping, chunks, look)

    valid = mapping.run_chunks
    monkeypatch.setattr(seed_batching, "run_chunks", full)
    item = experiments.read(str(SMALL))
    plans = [
        p for p in experiments.plans(item, item.budget("full"), ["paper"]) if p.column.name == "digits-3"
    ]
    place = {"run": {"device": "cpu", "engine": "vmap", "chunk": 64}}
    session = batch.Sitting(
        store.opened(tmp_path / "results"), tmp_path / "runs", place, say=lambda text: None
    )
    known = store.opened(whole / "results")
    made = list(batch.carried_out(plans[2].runs({}, [0, 1, 2]), session))
    assert rounds == [3, 3]  # the second of them failed, and what it left in the folders is not gone on from
    assert [run.seed for run, _ in made] == [0, 1, 2]
    for run, record in made:
        expected = known.get(run)
        assert expected is not None
        assert record.curves["loss"] == pytest.approx(expected.curves["loss"], rel=1e-4)


def test_one_that_went_wrong_does_not_spoil_those_it_went_in_step_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    valid = store.record_of

    def record_of(folder: Path, run: experiments.Run) -> store.Record:
        if run.seed == 0:
            raise RunError("no share")
        return valid(folder, run)

    monkeypatch.setattr(batch, "record_of", record_of)
    item = experiments.read(str(SMALL))
    plan = next(p for p in experiments.plans(item, item.budget("full"), ["paper"]) if p.row.label == "CO-PFL")
    place = {"run": {"device": "cpu", "engine": "vmap", "chunk": 64}}
    session = batch.Sitting(
        store.opened(tmp_path / "results"), tmp_path / "runs", place, say=lambda text: None
    )
    seen = batch.carried_out(plan.runs({}, [0, 1, 2]), session)
    assert [next(seen)[0].seed, next(seen)[0].seed] == [1, 2]
    with pytest.raises(RunError, match="no share"):
        next(seen)


def test_on_a_gpu_the_seeds_of_a_cell_are_asked_for_together_and_what_is_done_is_kept(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = experiments.read(str(SMALL))
    plans = [
        p for p in experiments.plans(item, item.budget("full"), ["paper"]) if p.column.name == "digits-3"
    ]
    known, asked = store.opened(whole / "results"), list[list[int]]()

    def pretended(
        runs: Sequence[experiments.Run], session: batch.Sitting
    ) -> Iterator[tuple[experiments.Run, store.Record]]:
        asked.append([run.seed for run in runs])
        for run in runs:
            if run.seed == 2:
                raise RunError("no memory left")
            record = known.get(run)
            assert record is not None
            yield run, record

    monkeypatch.setattr(batch, "carried_out", pretended)
    place = {"run": {"device": "cuda"}}
    session = batch.Sitting(store.opened(tmp_path), tmp_path / "runs", place, say=lambda text: None)
    left, problems = batch.carry_on(plans, [0, 1, 2], session)
    assert asked == [[0], [0], [0, 1, 2], [0, 1, 2]]  # two tuning runs, then FedAvg's seeds and CO-PFL's
    assert (left, len(problems)) == (2, 2)  # the third seed of each; the others have their records
    assert len(list(tmp_path.glob("*.json"))) == 6


def test_several_processes_share_an_item_and_none_does_what_another_is_at(
    whole: Path, tmp_path: Path
) -> None:
    """Two real processes at the same cells, with the same folders, make the records of one, each run once."""
    where = ["--results", tmp_path / "results", "--runs", tmp_path / "runs"]
    command = [sys.executable, "-m", "copfl", "reproduce", SMALL, "--device", "cpu", *COLUMN, *where]
    both = [subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert contents(tmp_path / "results") == contents(whole / "results")
    done = [line.rpartition(":")[0] for text in told for line in text.splitlines() if " % in " in line]
    assert sorted(set(done)) == sorted(done), done
    assert len(done) == 8
    assert not list((tmp_path / "runs").rglob(".lock"))


def test_what_another_process_is_at_is_left_to_it(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    item = experiments.read(str(SMALL))
    plan = next(p for p in experiments.plans(item, item.budget("full"), ["paper"]) if p.row.label == "FedAvg")
    with run_folder.claimed(tmp_path / "runs" / batch.folder_name(plan.trials()[1].run), new=True):
        answer = reproduce(capsys, tmp_path, *COLUMN)
    assert answer.code == 0
    assert "2 cells are left to other processes" in answer.err  # FedAvg and FedAvg+FT: the same runs
    assert "4 runs are left" in answer.err
    assert len(contents(tmp_path / "results")) == 4  # CO-PFL's, and the first trial


def test_a_folder_for_runs_that_cannot_be_is_told(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "runs").write_text("a file")
    answer = reproduce(capsys, tmp_path, *COLUMN)
    assert answer.code == 2
    assert str(tmp_path / "runs") in answer.err
    assert "Traceback" not in answer.err


def test_the_order_does_not_matter(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    for words in (("--row", "CO-PFL", "--seeds", "2-2"), ("--row", "FedAvg+FT"), ("--seeds", "3")):
        assert reproduce(capsys, tmp_path, *COLUMN, *words, "--quiet").code == 0
    assert contents(tmp_path / "results") == contents(whole / "results")


def test_a_run_is_stopped_at_the_end_of_the_time_and_not_a_round_before_its_last() -> None:
    class Now:
        number = 2

    watch = batch._watch(end=0.0, rounds=4)
    with pytest.raises(batch.TimeIsUp):
        watch(Now(), 0.1)  # type: ignore[arg-type]
    Now.number = 3
    watch(Now(), 0.1)  # type: ignore[arg-type]


def test_a_run_that_was_stopped_in_the_middle_is_finished_in_its_folder(
    whole: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def soon(end: float, rounds: int) -> Any:
        def watch(round: Any, seconds: float) -> None:
            if round.number == 1:
                raise batch.TimeIsUp

        return watch

    words = (*COLUMN, "--row", "CO-PFL", "--seeds", "1")
    monkeypatch.setattr(batch, "_watch", soon)
    assert "1 runs are left" in reproduce(capsys, tmp_path, *words).err
    (folder,) = (tmp_path / "runs").iterdir()
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 2
    monkeypatch.undo()
    assert reproduce(capsys, tmp_path, *words).code == 0
    assert contents(tmp_path / "results").items() <= contents(whole / "results").items()
    assert list((tmp_path / "runs").iterdir()) == [folder]


def test_a_run_does_not_start_if_the_last_of_its_kind_took_longer_than_there_is(
    whole: Path, tmp_path: Path
) -> None:
    item = experiments.read(str(SMALL))
    plans = [
        p for p in experiments.plans(item, item.budget("full"), ["paper"]) if p.column.name == "digits-3"
    ]
    run = plans[2].runs({}, [0])[0]
    session = batch.Sitting(store.opened(tmp_path), tmp_path, {}, say=lambda text: None)
    assert batch.expected([run], session) == 0  # nothing is known
    session.lr_factor = {"digits 3 fedavg 1": 2.0}
    assert batch.expected([run], session) == 8.0  # as the slowest kind so far
    session.lr_factor["digits 3 copfl 1"] = 0.5
    assert batch.expected([run], session) == 2.0


def test_pages_and_pictures_are_made_of_records_alone(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(whole / "results", tmp_path / "results")
    (tmp_path / "docs").mkdir()
    front = tmp_path / "docs" / "reproduction.md"
    front.write_text("Mine.\n\n<!-- small -->\nWhat was here\n<!-- end of small -->\n\nMine too.\n")
    assert reproduce(capsys, tmp_path, "--from-records", "--data-dir", tmp_path / "nowhere").code == 0
    page = (tmp_path / "docs/reproduction/small.md").read_text()
    text = front.read_text()
    assert text.startswith("Mine.\n\n<!-- small -->\n")
    assert text.endswith("<!-- end of small -->\n\nMine too.\n")
    assert "What was here" not in text
    for shown in (page, text):
        assert "3 of 6 cells have all 3 seeds" in shown
        assert re.search(
            r"\| CO-PFL \| \d+\.\d ± \d+\.\d \| not yet run \|", shown
        )  # what is missing is not hidden
        assert re.search(r"CO-PFL − best rival\* \| [+-]\d+\.\d \[[+-].*\], FedAvg\S* \| not yet run", shown)
        assert "| CO-PFL is best | yes | **not measured** (1 not distinguishable, 1 not measured) |" in shown
        assert "Digits stand in for something else." in shown
    assert (tmp_path / "docs/reproduction/small-paper.svg").exists() == available()
    assert not (tmp_path / "runs").exists()


def test_other_data_under_the_same_name_is_refused(whole: Path, tmp_path: Path) -> None:
    kept = store.opened(whole / "results")
    record = next(r for r in kept.found.values() if r.seed == 1)
    other = record._replace(start={**record.start, "samples": "0" * 16})
    with pytest.raises(RunError, match="began with different samples"):
        kept.add(other)
    path = shutil.copytree(whole / "results", tmp_path / "results") / "later.json"
    path.write_text(store.as_json(other))
    assert ["later.json" in odd for odd in store.opened(tmp_path / "results").odd] == [True]


def test_a_device_that_is_not_there_is_said_once_and_only_where_something_is_left_to_run(
    whole: Path, tmp_path: Path, capsys: Capture
) -> None:
    answer = reproduce(capsys, tmp_path, *COLUMN, "--device", "cuda:99")
    assert answer.code == 2
    assert 'device "cuda:99" needs a CUDA GPU' in answer.err
    assert "runs failed" not in answer.err
    assert reproduce(capsys, tmp_path, *COLUMN, "--device", "cuda:99", "--plan").code == 0
    shutil.copytree(whole / "results", tmp_path / "results")
    assert reproduce(capsys, tmp_path, *COLUMN, "--device", "cuda:99").code == 0


def test_a_machine_that_draws_other_first_weights_is_told_before_it_trains(
    whole: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds of processors differ in the last digits of what is drawn: records of both cannot be in one table."""
    shutil.copytree(whole / "results", tmp_path / "results")
    for path in (tmp_path / "results").glob("*copfl*seed1*"):
        path.unlink()  # FedAvg's records of this seed are still there
    monkeypatch.setattr(
        batch, "started_with", lambda experiment: {**started_with(experiment), "first": "0" * 16}
    )
    monkeypatch.setattr(batch, "execute", None)  # nobody may begin
    answer = reproduce(capsys, tmp_path, *COLUMN)
    assert answer.code == 2
    assert "began with different first weights" in answer.err
    assert "use what those records were made with, or another folder with --results DIR" in answer.err
    assert not list((tmp_path / "runs").glob("*/rounds.jsonl"))


def test_what_a_run_is_does_not_depend_on_the_machine_or_on_younger_options(whole: Path) -> None:
    record = next(
        r for r in store.opened(whole / "results").found.values() if r.tables["algorithm"]["name"] == "copfl"
    )
    tables = experiments.joined(
        record.tables, {"run": {"device": "cuda", "engine": "cuda_graph", "precision": "tf32"}}
    )
    tables["data"]["dir"] = "/somewhere"
    assert store.identity(tables, 0.0, record.last) == record.id
    older = {
        **record.tables,
        "algorithm": {k: v for k, v in record.tables["algorithm"].items() if k != "max_weight"},
    }
    assert store.identity(older, 0.0, record.last) == record.id
    for change in ({"run": {"rounds": 5}}, {"run": {"precision": "bf16"}}, {"copfl": {"rate": 0.2}}):
        assert store.identity(experiments.joined(record.tables, change), 0.0, record.last) != record.id
    assert store.identity(record.tables, 0.2, record.last) != record.id


def test_a_record_that_lacks_what_a_row_shows_is_made_again(whole: Path) -> None:
    """Another item may have looked at less of the same run."""
    item, kept = experiments.read(str(SMALL)), store.opened(whole / "results")
    plan = next(p for p in experiments.plans(item, item.budget("full"), ["paper"]) if p.row.label == "FedAvg")
    run = next(run for run in plan.runs(batch.chosen(plan, kept) or {}, [0]))
    less = {**run.tables, "run": {**run.tables["run"], "eval_models": "final"}}
    assert store.id_of(run._replace(tables=less)) == store.id_of(run)
    record = kept.get(run)
    assert record is not None
    nothing = [float("nan")] * 3
    kept.found[record.id] = record._replace(
        clients={**record.clients, "accuracy_before": nothing, "accuracy_global": nothing}
    )
    assert kept.get(run) is None
    assert kept.get(run._replace(tables=less)) is not None
    kept.read.clear()
    kept.refresh()  # as if another process had made it again
    assert kept.get(run) == record


def test_a_row_cannot_show_what_its_runs_do_not_eval_models(tmp_path: Path, capsys: Capture) -> None:
    item = tmp_path / "own.toml"
    item.write_text(SMALL.read_text().replace("batch = 8\n", 'batch = 8\neval_models = "final"\n'))
    message = 'row "FedAvg" shows accuracy_before, but its runs look at accuracy alone'
    assert message in called(capsys, "reproduce", item, "--device", "cpu", "--plan").err


def test_a_damaged_record_is_named_and_not_used(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(whole / "results", tmp_path / "results")
    (folder / "broken.json").write_text("{")
    answer = reproduce(capsys, tmp_path, "--plan", *COLUMN)
    assert answer.out == "small: 0 runs are missing\n"
    assert "not used" in answer.err
    assert "broken.json" in answer.err


def test_finished_runs_of_a_comparison_are_taken_over_if_they_are_what_is_asked_for(
    whole: Path, tmp_path: Path, capsys: Capture
) -> None:
    ours = [path for path in (whole / "runs").iterdir() if path.is_dir()]
    given = [word for path in ours for word in ("--import", path)]
    answer = reproduce(capsys, tmp_path, *given, "--column", "digits-4")
    assert answer.err.count("not what small asks for") == len(ours)
    assert reproduce(capsys, tmp_path, *given).code == 0
    assert contents(tmp_path / "results") == contents(whole / "results")


def test_a_folder_that_looked_at_less_is_not_taken_over(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    record = next(r for r in store.opened(whole / "results").found.values() if not r.validation)
    folder = shutil.copytree(whole / "runs" / f"{record.id}-all", tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line["per_client"] = {
            k: v for k, v in line["per_client"].items() if not k.endswith(("_before", "_global"))
        }
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = reproduce(capsys, tmp_path, "--import", folder)
    assert "not taken over: it looked at less than small shows" in answer.err
    assert not list((tmp_path / "results").glob("*.json"))


def test_a_failing_run_does_not_stop_the_others(
    whole: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole / "results", tmp_path / "results")
    for seed in (0, 1):
        next((tmp_path / "results").glob(f"*copfl*seed{seed}*")).unlink()
    valid = batch.carried_out

    def failing(runs: Sequence[experiments.Run], session: batch.Sitting) -> Any:
        if runs[0].seed == 0:
            raise RunError("it went wrong")
        return valid(runs, session)

    monkeypatch.setattr(batch, "carried_out", failing)
    answer = reproduce(capsys, tmp_path, *COLUMN)
    assert answer.code == 2
    assert "1 runs failed, the others are there" in answer.err
    assert "it went wrong" in answer.err
    assert len(list((tmp_path / "results").glob("*copfl*"))) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--protocol", "fair"), 'protocol "fair"'),
        (("--protocol", "equal"), "not run under the equal protocol"),
        (("--budget", "huge"), 'budget "huge"'),
        (("--column", "cifar10-10"), 'column "cifar10-10"'),
        (("--row", "FedPAC"), 'row "FedPAC"'),
        (("--seeds", "0"), "seeds=0"),
    ],
)
def test_mistakes_are_told(words: tuple[str, ...], message: str, tmp_path: Path, capsys: Capture) -> None:
    answer = reproduce(capsys, tmp_path, *words)
    assert answer.code == 2
    assert message in answer.err


def test_unknown_and_broken_items_are_told(tmp_path: Path, capsys: Capture) -> None:
    answer = called(capsys, "reproduce", "table2")
    assert answer.code == 2
    assert "table1" in answer.err
    for text in ("title = ", 'title = "x"\n', 'title = "x"\nshow = ["nowhere"]\n'):
        (tmp_path / "own.toml").write_text(text)
        assert called(capsys, "reproduce", tmp_path / "own.toml", "--plan").code == 2


# Verdicts


def cell_of(
    label: str, values: dict[int, list[float]], ours: bool = False, losses: tuple[float, ...] = ()
) -> Any:
    """A cell with these accuracies per seed and client."""
    row = experiments.Row(label, "copfl", {}, "accuracy", {"paper": experiments.Recipe({}, {})}, ours, label)
    budget = experiments.Budget("full", 3, 4, 1, 2, 2, 1, 1, 0.2)
    plan = experiments.Plan(experiments.Column("c", "C", "", {}), "paper", row, {}, budget)
    curves = {"accuracy": [0.0, 0.5], "loss": list(losses or (1.0, 1.0))}
    records = {
        seed: store.Record({}, 0.0, 5, [50, 100], curves, {"accuracy": own}, {}, {}, "", {})
        for seed, own in values.items()
    }
    return findings.Cell(plan, {}, [], records)


def judged(says: str, *cells: findings.Cell, **how: Any) -> list[str]:
    rows = [cell.row for cell in cells]
    column = cells[0].plan.column
    item = experiments.Item(
        "x", "X", "", [column], rows, [], {}, {}, {}, "none", True, protocols={"paper": ""}
    )
    seen = findings.Findings(item, [0, 1, 2], ["paper"], {("paper", "c", c.row.label): c for c in cells})
    claim = experiments.Claim("", says, "", how)
    return [verdict.word for verdict in findings.verdicts(claim, seen, "paper")]


HIGH = {0: [0.9, 0.8], 1: [0.85, 0.8], 2: [0.9, 0.82]}
LOW = {0: [0.5, 0.4], 1: [0.46, 0.4], 2: [0.5, 0.43]}
NOISY = {0: [0.9, 0.2], 1: [0.1, 0.8], 2: [0.99, 0.99]}


def test_a_claim_holds_fails_or_cannot_be_told() -> None:
    mine, low, noisy = cell_of("a", HIGH, True), cell_of("b", LOW), cell_of("c", NOISY)
    assert judged("above", mine, low, row="a", other="b") == [findings.HOLDS]
    assert judged("above", mine, low, row="b", other="a") == [findings.FAILS]
    assert judged("above", mine, noisy, row="a", other="c") == [findings.OPEN]
    assert judged("best", mine, low, noisy, row="a") == [findings.OPEN]  # the best of them decides
    assert judged("best", mine, low, row="a") == [findings.HOLDS]
    assert judged("not_below", mine, noisy, row="a") == [findings.HOLDS]


def test_a_rival_that_is_surely_above_refutes_not_below_though_another_has_the_higher_mean() -> None:
    mine = cell_of("a", HIGH, True)
    above = cell_of("b", {s: [v + 0.02 for v in own] for s, own in HIGH.items()})
    higher = cell_of(
        "c", {0: [0.99, 0.99], 1: [0.7, 0.8], 2: [1.0, 1.0]}
    )  # on average, but not in every seed
    assert judged("not_below", mine, above, row="a") == [findings.FAILS]
    assert judged("not_below", mine, higher, row="a") == [findings.HOLDS]
    assert judged("not_below", mine, above, higher, row="a") == [findings.FAILS]


def test_the_best_of_some_and_by_how_much() -> None:
    mine, low, noisy = cell_of("a", HIGH, True), cell_of("b", LOW), cell_of("c", NOISY)
    assert judged("best", mine, low, noisy, row="a", among=["b"]) == [findings.HOLDS]
    assert judged("best", mine, low, row="a", by=30) == [findings.HOLDS]  # the gain is about 40 points
    assert judged("best", mine, low, row="a", by=60) == [findings.FAILS]
    assert judged("best", mine, noisy, row="a", by=30) == [findings.OPEN]
    with pytest.raises(UsageError, match='row "d"'):
        judged("best", mine, low, row="a", among=["d"])


def test_nothing_is_said_of_what_is_not_measured() -> None:
    mine, two = cell_of("a", HIGH, True), cell_of("b", {0: LOW[0], 1: LOW[1]})
    nothing = cell_of("c", {})
    assert judged("above", mine, two, row="a", other="b") == [findings.UNKNOWN]
    assert judged("above", mine, nothing, row="a", other="c") == [findings.UNKNOWN]
    low, high = cell_of("d", LOW), cell_of("e", {s: [v + 0.1 for v in own] for s, own in HIGH.items()})
    assert judged("best", mine, low, nothing, row="a") == [findings.UNKNOWN]  # who is missing might be better
    assert judged("best", mine, high, nothing, row="a") == [
        findings.FAILS
    ]  # but one that is better is enough


def test_claims_about_curves() -> None:
    low_loss, high_loss = cell_of("a", HIGH, True, (0.5, 0.01)), cell_of("b", LOW, losses=(2.0, 1.0))
    assert judged("lower_loss", low_loss, high_loss, row="a", other="b") == [findings.HOLDS]
    assert judged("lowest_loss", low_loss, high_loss, row="a") == [findings.HOLDS]
    assert judged("loss_near_zero", low_loss, high_loss, row="a", round=75, below=0.1) == [findings.HOLDS]
    assert judged("settled", low_loss, high_loss, row="a", round=50, within=1.0) == [
        findings.FAILS
    ]  # 0 % at round 50
    assert judged("settled", low_loss, high_loss, row="b", round=100, within=1.0) == [
        findings.HOLDS
    ]  # above its end


def test_columns_of_different_lengths_are_compared_at_the_rounds_that_both_have() -> None:
    """The longer is at 60 % when the shorter ends at 70 %, and at 90 % at its own end."""
    row = cell_of("a", {}).row

    def cell(name: str, rounds: int, curve: list[float]) -> findings.Cell:
        plan = cell_of("a", {}).plan._replace(column=experiments.Column(name, name, "", {}))
        tables = {"run": {"rounds": rounds, "seed": 0}}
        looks = [rounds * (k + 1) // len(curve) for k in range(len(curve))]
        ends = {"accuracy": [curve[-1]]}
        run = store.Record(tables, 0.0, 1, looks, {"accuracy": curve}, ends, {}, {}, "", {})
        return findings.Cell(plan, {}, [], dict.fromkeys(range(3), run))

    def word(*cells: findings.Cell) -> findings.Verdict:
        columns = [c.plan.column for c in cells]
        item = experiments.Item(
            "x", "X", "", columns, [row], [], {}, {}, {}, "none", True, protocols={"paper": ""}
        )
        seen = findings.Findings(
            item, [0, 1, 2], ["paper"], {("paper", c.plan.column.name, "a"): c for c in cells}
        )
        (verdict,) = findings.verdicts(
            experiments.Claim("", "all_rise", "", {"steps": [["p", "q"]]}), seen, "paper"
        )
        return verdict

    long, short = cell("p", 100, [0.2, 0.4, 0.6, 0.8, 0.9]), cell("q", 60, [0.1, 0.2, 0.3, 0.5, 0.7])
    assert short.runs[0].counted == (60, 60)
    assert long.per_seed_within((60, 60)) == pytest.approx({0: 60.0, 1: 60.0, 2: 60.0})
    assert long.per_seed_within((40, 60)) == pytest.approx({0: 50.0, 1: 50.0, 2: 50.0})
    assert long.per_seed_within((1, 10)) == {}
    assert word(long, short) == ("p → q, both after 60 rounds", findings.HOLDS, "a +10.0")
    assert word(long, cell("q", 100, [0.7, 0.7])) == ("p → q", findings.FAILS, "a -20.0")


def test_a_claim_over_many_places_is_as_strong_as_its_weakest() -> None:
    def parts(*words: str) -> list[findings.Verdict]:
        return [findings.Verdict("", word, "") for word in words]

    assert findings.overall(parts(findings.HOLDS, findings.HOLDS)) == findings.HOLDS
    assert findings.overall(parts(findings.HOLDS, findings.OPEN)) == findings.OPEN
    assert findings.overall(parts(findings.UNKNOWN, findings.OPEN)) == findings.UNKNOWN
    assert findings.overall(parts(findings.UNKNOWN, findings.FAILS)) == findings.FAILS


def test_marks_must_be_there_once() -> None:
    assert (
        pages.put("a <!-- x --> b <!-- end of x --> c", "x", "new")
        == "a <!-- x -->\nnew\n<!-- end of x --> c"
    )
    with pytest.raises(Exception, match="marks"):
        pages.put("nothing", "x", "new")


def test_a_mask_that_grew_by_more_than_its_rate_is_told() -> None:
    def rounds(*shares: list[float]) -> list[dict[str, Any]]:
        return [
            {"round": k, "clients": [4, 7], "per_client": {"personal_fraction": s}}
            for k, s in enumerate(shares, 1)
        ]

    assert (
        store.overgrown({"rate": 0.25}, rounds([0.25, 0.0], [0.4375, 0.25], [0.2, 0.4])) is None
    )  # some may return
    assert (
        store.overgrown({"name": "fedavg"}, [{"round": 1, "clients": [4], "per_client": {"loss": [1.0]}}])
        is None
    )
    told = store.overgrown({"rate": 0.25}, rounds([0.25, 0.25], [0.4375, 0.6]))
    assert told is not None
    assert "in round 2 the mask of client 7 grew from 25.0% to 60.0%" in told
    assert "client 4" in (store.overgrown({"rate": 0.01}, rounds([0.02, 0.0])) or "")


def test_a_run_with_such_a_mask_gets_no_record_and_is_told_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words = (*COLUMN, "--row", "CO-PFL")
    monkeypatch.setattr(store, "overgrown", lambda algorithm, rounds: "in round 1 a mask grew")
    refused = reproduce(capsys, tmp_path, *words)
    assert refused.code != 0
    assert "remove its folder, and it is run again" in refused.out + refused.err
    assert not list((tmp_path / "results").glob("*.json"))
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "runs")
    assert reproduce(capsys, tmp_path, *words).code == 0
    assert list((tmp_path / "results").glob("*.json"))
