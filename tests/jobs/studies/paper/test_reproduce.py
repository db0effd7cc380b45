"""An experiment that takes seconds, from nothing to its pages: in one batch of runs, in several, on other machines."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from copfl import stats
from copfl.charts import available
from copfl.comparison.jobs import runner
from copfl.comparison.jobs.job import Job, placed
from copfl.comparison.jobs.runner import Runner
from copfl.comparison.jobs.starts import started_with
from copfl.comparison.jobs.submission import TimeIsUp
from copfl.comparison.results.results import Record
from copfl.engine import seed_batching
from copfl.errors import RunError, UsageError
from copfl.experiment import folder as run_folder
from copfl.experiment.training import execute
from copfl.settings.identity import identity
from studies.paper import batch, experiments, findings, pages, records
from tests.commands import Answer, called
from tests.slow import slow

SMALL = Path(__file__).parent / "small.toml"
COLUMN = ("--column", "digits-3")
Capture = pytest.CaptureFixture[str]


def is_copfl(record: Record) -> bool:
    return bool(record.tables["algorithm"]["name"] == "copfl")


def reproduce(capsys: Capture, here: Path, *words: object) -> Answer:
    where = ("--results", here / "results", "--runs", here / "runs", "--pages", here / "pages")
    return called(capsys, "reproduce", SMALL, "--device", "cpu", *where, *words)


def contents(folder: Path) -> dict[str, Record]:
    """The records by identity, without what the clock said."""
    found = records.opened(folder).known
    return {id: r._replace(cost={**r.cost, "seconds": 0.0}) for id, r in found.items()}


def without(folder: Path, *wanted: Callable[[Record], bool]) -> None:
    """Removes the records that all conditions are true of."""
    store = records.opened(folder)
    left = {id: r for id, r in store.known.items() if not all(condition(r) for condition in wanted)}
    records.write(folder / "small.jsonl.gz", left)


def cells(column: str = "digits-3") -> list[experiments.Plan]:
    small = experiments.read(str(SMALL))
    return [p for p in experiments.plans(small, small.budget("full"), ["paper"]) if p.column.name == column]


def new_batch(here: Path, **options: Any) -> batch.Batch:
    machine = {"run": {"device": "cpu", "engine": "vmap", "chunk": 64}}
    silent = Runner(**options)
    return batch.Batch("small", records.opened(here / "results"), here / "runs", machine, silent)


def ready(jobs: Sequence[Job], made: batch.Batch) -> list[Job]:
    return [placed(job._replace(run=job.run.replaced(made.machine)), made.folder) for job in jobs]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of one column, made in one batch of runs; nobody writes here."""
    here = tmp_path_factory.mktemp("whole")
    made = new_batch(here)
    assert batch.count_left(cells(), made.store) == 8  # 2 tuning runs, 3 of FedAvg, 3 of CO-PFL
    assert made.run(cells()) == (0, [])
    return here


def test_one_run_gives_two_rows_and_only_the_tuned_rows_are_tuned(whole: Path) -> None:
    found = sorted((r.title, r.validation) for r in contents(whole / "results").values())
    fedavg = [(f"digits, 3 clients, fedavg, sgd, seed {seed}", 0.0) for seed in range(3)]
    tuning = [("digits, 3 clients, fedavg, sgd, seed 0", 0.2)] * 2
    ours = [(f"digits, 3 clients, copfl, mamo, seed {seed}", 0.0) for seed in range(3)]
    assert found == sorted([*ours, *fedavg, *tuning])


def test_a_record_is_small_and_has_the_metrics_of_the_run_folder(whole: Path) -> None:
    made = new_batch(whole)
    for job in ready([job for plan in cells() for job in plan.jobs({"optimizer": {"lr": 0.1}})], made):
        record = made.store.get(job)
        if record is None:
            continue  # the other learning rate
        assert len(records.as_json(record)) < 4000
        assert records.from_json(records.as_json(record)) == record
        lines = [json.loads(line) for line in (job.path / "rounds.jsonl").read_text().splitlines()]
        assert record.rounds == [line["round"] for line in lines]
        assert record.curves["loss"] == pytest.approx([line["mean"]["loss"] for line in lines], abs=1e-6)
        last = [line["per_client"]["accuracy"] for line in lines[-record.last :]]
        means = [sum(column) / len(last) for column in zip(*last, strict=True)]
        assert record.clients["accuracy"] == pytest.approx(means, abs=1e-6)
        assert record.mean() == pytest.approx(sum(means) / len(means), abs=1e-6)


def test_a_column_may_show_the_best_round_of_a_run_or_of_each_client(whole: Path) -> None:
    small, store = experiments.read(str(SMALL)), records.opened(whole / "results")
    small = dataclasses.replace(small, columns=small.columns[:1])
    values = {}
    for statistic in records.STATISTICS:
        columns = [column._replace(statistic=statistic) for column in small.columns]
        seen = findings.from_records(
            dataclasses.replace(small, columns=columns), "full", ["paper"], [], store
        )
        values[statistic] = seen.cells["paper", "digits-3", "CO-PFL"].per_seed
    for seed, record in seen.cells["paper", "digits-3", "CO-PFL"].runs.items():
        assert values["best_round"][seed] == pytest.approx(100 * max(record.curves["accuracy"]))
        assert values["last"][seed] <= values["best_round"][seed] <= values["best_per_client"][seed] + 1e-4
        older = record._replace(best={})
        assert older.mean("accuracy", "best_per_client") != older.mean("accuracy", "best_per_client")  # nan


def test_a_row_is_tuned_by_the_number_that_it_shows(whole: Path) -> None:
    """FedAvg shows the accuracy before local training, FedAvg+FT that after it."""
    store = records.opened(whole / "results")
    for plan in cells()[:2]:
        trials, _ = findings.tuned(plan, store)
        found = [store.known[trial.job.id] for trial in plan.trials()]
        assert [t.accuracy for t in trials] == [record.mean(plan.row.value) for record in found]
    assert {plan.row.value for plan in cells()[:2]} == {"accuracy_before", "accuracy"}


def test_a_batch_without_time_starts_nothing_and_the_next_continues_from_the_records_alone(
    whole: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = reproduce(capsys, tmp_path, *COLUMN, "--minutes", "0")
    assert answer.code == 0
    assert "8 runs are left; the same command continues: copfl reproduce" in answer.err
    assert "not yet run" in answer.out
    assert not list(tmp_path.glob("results/*"))
    # Another batch: the time is up after the third run, in the middle of a cell.
    done: list[str] = []
    valid = execute

    def counted(*given: Any) -> Any:
        if len(done) == 3:
            raise TimeIsUp
        done.append("")
        return valid(*given)

    monkeypatch.setattr(runner, "execute", counted)
    answer = reproduce(capsys, tmp_path, *COLUMN)
    assert "the time is up" in answer.err
    assert "5 runs are left" in answer.err
    assert "1 of 3 seeds" in answer.out  # an incomplete table says so
    monkeypatch.undo()
    # A third, on another machine: only the records were carried.
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "results", elsewhere / "results")
    answer = reproduce(capsys, elsewhere, *COLUMN)
    assert (answer.code, "left" in answer.err) == (0, False)
    assert len(list((elsewhere / "runs").iterdir())) == 5
    assert contents(elsewhere / "results") == contents(whole / "results")


@pytest.mark.parametrize("what", ["seeds", "learning rates"])
def test_batched_runs_give_the_same_records(
    what: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batched: list[int] = []
    valid = seed_batching.run_batched

    def noted(settings: Any, simulations: Any) -> Any:
        batched.append(len(settings))
        return valid(settings, simulations)

    monkeypatch.setattr(seed_batching, "run_batched", noted)
    made, known = new_batch(tmp_path, batch_seeds=True), records.opened(whole / "results")
    jobs = cells()[2].jobs({}) if what == "seeds" else [trial.job for trial in cells()[0].trials()]
    for job, error, _ in made.runner.run(ready(jobs, made)):
        expected = known.get(job)
        assert error is None
        assert expected is not None
        record = batch.record_of(job)
        assert record.curves["loss"] == pytest.approx(expected.curves["loss"], rel=1e-4)
        assert record.rounds == expected.rounds
    assert batched == [len(jobs)]


def test_seeds_that_do_not_fit_on_the_gpu_in_one_batch_train_one_after_another(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    valid = seed_batching.run_chunks

    def full(*given: Any, **named: Any) -> Any:
        rounds.append(1)
        if len(rounds) == 2:
            raise torch.cuda.OutOfMemoryError("no room")
        return valid(*given, **named)

    monkeypatch.setattr(seed_batching, "run_chunks", full)
    made, known = new_batch(tmp_path, batch_seeds=True), records.opened(whole / "results")
    done = list(made.runner.run(ready(cells()[2].jobs({}), made)))
    assert len(rounds) == 2  # the second failed; the rounds that it left in the folders are not continued
    assert [(one.job.seed, one.error) for one in done] == [(0, None), (1, None), (2, None)]
    for job, _, _ in done:
        expected = known.get(job)
        assert expected is not None
        assert batch.record_of(job).curves["loss"] == pytest.approx(expected.curves["loss"], rel=1e-4)


def test_a_run_without_a_record_does_not_affect_those_of_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    valid = batch.record_of

    def record_of(job: Job) -> Record:
        if job.seed == 0:
            raise RunError("no fraction")
        return valid(job)

    monkeypatch.setattr(batch, "record_of", record_of)
    made = new_batch(tmp_path, batch_seeds=True)
    left, problems = made.run(cells()[2:])
    assert left == 1
    assert ["seed 0: no fraction" in problem for problem in problems] == [True]


@slow  # each of them imports everything; the tests below have their parts: a run of another, records added at once
def test_several_processes_share_an_experiment_and_none_repeats_a_run_of_another(
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


def test_a_run_of_another_process_is_left_to_it(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    busy = placed(cells()[0].trials()[1].job, tmp_path / "runs")
    with run_folder.claimed(busy.path, new=True):
        answer = reproduce(capsys, tmp_path, *COLUMN)
    assert answer.code == 0
    assert "2 cells are left to other processes" in answer.err  # FedAvg and FedAvg+FT: the same runs
    assert "4 runs are left" in answer.err
    assert len(contents(tmp_path / "results")) == 4  # CO-PFL's, and the first trial


def test_a_folder_for_runs_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "runs").write_text("a file")
    answer = reproduce(capsys, tmp_path, *COLUMN)
    assert answer.code == 2
    assert str(tmp_path / "runs") in answer.err
    assert "Traceback" not in answer.err


def test_the_order_does_not_matter(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    for words in (("--row", "CO-PFL", "--seeds", "2-2"), ("--row", "FedAvg+FT"), ("--seeds", "3")):
        assert reproduce(capsys, tmp_path, *COLUMN, *words, "--quiet").code == 0
    assert contents(tmp_path / "results") == contents(whole / "results")


def test_a_run_is_stopped_at_the_time_limit_but_not_in_its_last_round() -> None:
    class Now:
        number = 2

    watch = runner._stop_at(end=0.0, rounds=4)
    with pytest.raises(TimeIsUp):
        watch(Now(), 0.1)  # type: ignore[arg-type]
    Now.number = 3
    watch(Now(), 0.1)  # type: ignore[arg-type]


def test_a_run_that_was_stopped_in_the_middle_is_finished_in_its_folder(
    whole: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def soon(end: float, rounds: int, until: int) -> Any:
        def watch(round: Any, seconds: float) -> None:
            if round.number == 1:
                raise TimeIsUp

        return watch

    words = (*COLUMN, "--row", "CO-PFL", "--seeds", "1")
    monkeypatch.setattr(runner, "_stop_at", soon)
    assert "1 runs are left" in reproduce(capsys, tmp_path, *words).err
    (folder,) = (tmp_path / "runs").iterdir()
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 2
    monkeypatch.undo()
    assert reproduce(capsys, tmp_path, *words).code == 0
    assert contents(tmp_path / "results").items() <= contents(whole / "results").items()
    assert list((tmp_path / "runs").iterdir()) == [folder]


def test_a_run_does_not_start_if_the_last_of_its_kind_took_longer_than_there_is() -> None:
    jobs, one = cells()[2].jobs({})[:1], Runner()
    assert one.expected(jobs) == 0  # nothing is known
    one.seconds = {"digits 3 fedavg 1": 2.0}
    assert one.expected(jobs) == 8.0  # as the slowest kind so far
    one.seconds["digits 3 copfl 1"] = 0.5
    assert one.expected(jobs) == 2.0


def test_pages_and_pictures_are_made_of_records_alone(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(whole / "results", tmp_path / "results")
    (tmp_path / "pages").mkdir()
    front = tmp_path / "pages" / "README.md"
    front.write_text("Mine.\n\n<!-- small -->\nWhat was here\n<!-- end of small -->\n\nMine too.\n")
    assert reproduce(capsys, tmp_path, "--from-records", "--data-dir", tmp_path / "nowhere").code == 0
    page = (tmp_path / "pages/tables/small.md").read_text()
    text = front.read_text()
    assert text.startswith("Mine.\n\n<!-- small -->\n")
    assert text.endswith("<!-- end of small -->\n\nMine too.\n")
    assert "What was here" not in text
    for shown in (page, text):
        assert "3 of 6 cells have all 3 seeds" in shown
        assert re.search(r"\| CO-PFL \| \d+\.\d ± \d+\.\d \| not yet run \|", shown)
        assert re.search(
            r"CO-PFL − best baseline\* \| [+-]\d+\.\d \[[+-].*\], FedAvg\S* \| not yet run", shown
        )
        assert "| CO-PFL is best | yes | **not measured** (1 not distinguishable, 1 not measured) |" in shown
    assert "Digits stand in for something else." in page
    assert (tmp_path / "pages/tables/small-paper.svg").exists() == available()
    assert not (tmp_path / "runs").exists()


def test_other_data_under_the_same_name_is_refused(whole: Path, tmp_path: Path) -> None:
    store = records.opened(whole / "results")
    record = next(r for r in store.known.values() if r.seed == 1)
    other = record._replace(start={**record.start, "samples": "0" * 16})
    with pytest.raises(RunError, match="began with different samples"):
        store.add(other, "small")
    shutil.copytree(whole / "results", tmp_path / "results")
    changed = other._replace(tables=experiments.joined(other.tables, {"run": {"rounds": 9}}))
    records.write(tmp_path / "results" / "zz.jsonl.gz", {"": changed})
    (problem,) = records.opened(tmp_path / "results").unusable
    assert "zz.jsonl.gz" in problem


def test_a_device_that_is_not_there_is_an_error_and_only_where_something_is_left_to_run(
    whole: Path, tmp_path: Path, capsys: Capture
) -> None:
    answer = reproduce(capsys, tmp_path, *COLUMN, "--device", "cuda:99")
    assert answer.code == 2
    assert "device='cuda:99' needs a CUDA GPU" in answer.err
    assert "runs failed" not in answer.err
    assert reproduce(capsys, tmp_path, *COLUMN, "--device", "cuda:99", "--plan").code == 0
    shutil.copytree(whole / "results", tmp_path / "results")
    assert reproduce(capsys, tmp_path, *COLUMN, "--device", "cuda:99").code == 0


def test_a_machine_that_draws_other_initial_weights_is_refused_before_it_trains(
    whole: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds of processors differ in the last digits of what is drawn: records of both cannot be in one table."""
    shutil.copytree(whole / "results", tmp_path / "results")
    without(tmp_path / "results", is_copfl, lambda record: record.seed == 1)  # FedAvg's are still there
    monkeypatch.setattr(
        runner, "started_with", lambda experiment: {**started_with(experiment), "weights": "0" * 16}
    )
    monkeypatch.setattr(runner, "execute", None)  # nothing may train
    answer = reproduce(capsys, tmp_path, *COLUMN)
    assert answer.code == 2
    assert "began with different initial weights" in answer.err
    assert "or another folder with --results DIR" in answer.err
    assert not list((tmp_path / "runs").glob("*/rounds.jsonl"))


def test_the_identity_does_not_depend_on_the_machine_or_on_younger_options(whole: Path) -> None:
    store = records.opened(whole / "results")
    id, record = next((id, r) for id, r in store.known.items() if is_copfl(r))
    machine = {
        "run": {"device": "cuda", "engine": "cuda_graph", "precision": "tf32"},
        "data": {"dir": "/there"},
    }
    assert identity(record.run.replaced(machine), 0.0) == id
    older = {k: v for k, v in record.tables["algorithm"].items() if k != "max_weight"}
    assert store.id_of(record._replace(tables={**record.tables, "algorithm": older})) == id
    for change in ({"run": {"rounds": 5}}, {"run": {"precision": "bf16"}}, {"algorithm": {"rate": 0.2}}):
        assert identity(record.run.replaced(change), 0.0) != id
    assert identity(record.run, 0.2) != id


def test_a_record_that_lacks_what_a_row_shows_is_made_again(whole: Path) -> None:
    """Another experiment may have evaluated fewer models of the same run."""
    store = records.opened(whole / "results")
    plan = cells()[0]
    job = plan.jobs(findings.tuned(plan, store)[1] or {})[0]
    less = job._replace(run=job.run.replaced({"run": {"eval_models": "final"}}))
    assert less.id == job.id
    record = store.get(job)
    assert record is not None
    nothing = [float("nan")] * 3
    partial = {**record.clients, "accuracy_before": nothing, "accuracy_global": nothing}
    store.known[job.id] = record._replace(clients=partial)
    assert store.get(job) is None
    assert store.get(less) is not None
    assert store.get(less._replace(last=1)) is None
    store.read.clear()
    store.refresh()  # as if another process had made it again
    assert store.get(job) == record


def test_a_row_cannot_show_what_its_runs_do_not_evaluate(tmp_path: Path, capsys: Capture) -> None:
    item = tmp_path / "own.toml"
    item.write_text(SMALL.read_text().replace("batch = 8\n", 'batch = 8\neval_models = "final"\n'))
    message = 'row "FedAvg" shows accuracy_before, but its runs evaluate accuracy only'
    words = ("--device", "cpu", "--plan", "--results", tmp_path)
    assert message in called(capsys, "reproduce", item, *words).err


def test_a_damaged_record_is_named_and_not_used(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(whole / "results", tmp_path / "results")
    (folder / "broken.jsonl.gz").write_bytes(b"{")
    (folder / "other.jsonl.gz").write_bytes(gzip.compress(b'{"format": "another"}\n'))
    answer = reproduce(capsys, tmp_path, "--plan", *COLUMN)
    assert answer.out == "small: 0 runs are missing\n"
    assert "not used: " in answer.err
    assert "broken.jsonl.gz" in answer.err
    assert "other.jsonl.gz, line 1: it is no record of this version" in answer.err


def test_finished_runs_of_any_folder_are_used_again(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ("--runs", whole / "runs", *COLUMN)
    assert reproduce(capsys, tmp_path, *words).code == 0
    assert contents(tmp_path / "results") == contents(whole / "results")


def test_several_processes_add_records_at_once(whole: Path, tmp_path: Path) -> None:
    found = list(records.opened(whole / "results").known.values())
    stores = [records.opened(tmp_path) for _ in found]
    threads = [threading.Thread(target=s.add, args=(r, "small")) for s, r in zip(stores, found, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(records.opened(tmp_path).known) == len(found)


def test_a_failing_run_does_not_stop_the_others(
    whole: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole / "results", tmp_path / "results")
    without(tmp_path / "results", is_copfl, lambda record: record.seed < 2)
    valid = execute

    def failing(experiment: Any, *given: Any) -> Any:
        if experiment.settings.seed == 0:
            raise RunError("it went wrong")
        return valid(experiment, *given)

    monkeypatch.setattr(runner, "execute", failing)
    answer = reproduce(capsys, tmp_path, *COLUMN)
    assert answer.code == 2
    assert "1 runs failed, the others are there" in answer.err
    assert "it went wrong" in answer.err
    assert sum(is_copfl(record) for record in contents(tmp_path / "results").values()) == 2


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
def test_mistakes_are_errors(words: tuple[str, ...], message: str, tmp_path: Path, capsys: Capture) -> None:
    answer = reproduce(capsys, tmp_path, *words)
    assert answer.code == 2
    assert message in answer.err


def test_unknown_and_broken_experiments_are_errors_before_a_record_is_read(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "opened", None)
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
    row = experiments.Row(label, "copfl", {"paper": experiments.Recipe()}, ours=ours)
    budget = experiments.Budget("full", 3, 4, 1, 2, 2, 1, 1, 0.2)
    plan = experiments.Plan(experiments.Column("c", "C"), "paper", row, {}, budget, [0, 1, 2])
    curves = {"accuracy": [0.0, 0.5], "loss": list(losses or (1.0, 1.0))}
    runs = {
        seed: Record({"run": {"rounds": 100}}, 0.0, 5, [50, 100], curves, {"accuracy": own}, {}, {}, "", {})
        for seed, own in values.items()
    }
    return findings.Cell(plan, {}, [], runs)


def judged(kind: str, *cells: findings.Cell, **how: Any) -> list[str]:
    rows = [cell.row for cell in cells]
    column = cells[0].plan.column
    experiment = experiments.Experiment("x", "X", "", [column], rows, {"paper": ""})
    seen = findings.Findings(experiment, ["paper"], {("paper", "c", c.row.label): c for c in cells})
    claim = experiments.Claim("", kind, how)
    return [verdict.word for verdict in findings.verdicts(claim, seen, "paper")]


HIGH = {0: [0.9, 0.8], 1: [0.85, 0.8], 2: [0.9, 0.82]}
LOW = {0: [0.5, 0.4], 1: [0.46, 0.4], 2: [0.5, 0.43]}
NOISY = {0: [0.9, 0.2], 1: [0.1, 0.8], 2: [0.99, 0.99]}
SURELY_HIGHER = {seed: [v + 0.02 for v in own] for seed, own in HIGH.items()}
HIGHER_ON_AVERAGE = {0: [0.99, 0.99], 1: [0.7, 0.8], 2: [1.0, 1.0]}  # but not in every seed
CELLS = {
    "mine": cell_of("mine", HIGH, True, (0.5, 0.01)),
    "low": cell_of("low", LOW, losses=(2.0, 1.0)),
    "noisy": cell_of("noisy", NOISY),
    "surely": cell_of("surely", SURELY_HIGHER),
    "average": cell_of("average", HIGHER_ON_AVERAGE),
    "two": cell_of("two", {0: LOW[0], 1: LOW[1]}),
    "nothing": cell_of("nothing", {}),
}


@pytest.mark.parametrize(
    ("kind", "others", "options", "word"),
    [
        ("above", "low", {"other": "low"}, findings.HOLDS),
        ("above", "low", {"row": "low", "other": "mine"}, findings.FAILS),
        ("above", "noisy", {"other": "noisy"}, findings.OPEN),
        ("above", "two", {"other": "two"}, findings.UNKNOWN),
        ("above", "nothing", {"other": "nothing"}, findings.UNKNOWN),
        ("best", "low", {}, findings.HOLDS),
        ("best", "low noisy", {}, findings.OPEN),
        ("best", "surely average", {}, findings.FAILS),  # the highest mean is not the surest
        ("best", "low noisy", {"other": ["low"]}, findings.HOLDS),
        ("best", "low", {"margin": 30}, findings.HOLDS),  # the gain is about 40 points
        ("best", "low", {"margin": 60}, findings.FAILS),
        ("best", "noisy", {"margin": 30}, findings.OPEN),
        ("best", "low nothing", {}, findings.UNKNOWN),  # the missing one might be better
        ("best", "surely nothing", {}, findings.FAILS),  # but one that is better is enough
        ("not_below", "noisy", {}, findings.HOLDS),
        ("not_below", "surely", {}, findings.FAILS),
        ("not_below", "average", {}, findings.HOLDS),
        ("not_below", "surely average", {}, findings.FAILS),  # the highest mean is not the surest
        ("lower_loss", "low", {"other": "low"}, findings.HOLDS),
        ("lowest_last_loss", "low noisy", {}, findings.HOLDS),
        ("lowest_last_loss", "low noisy", {"row": "low"}, findings.FAILS),  # 1.5 on average, and 0.26
        ("lowest_last_loss", "low two", {}, findings.UNKNOWN),
        ("loss_near_zero", "low", {"round": 75, "below": 0.1}, findings.HOLDS),
        (
            "settled",
            "low",
            {"round": 50, "within": 1.0},
            findings.FAILS,
        ),  # 25 % after round 50, 84 at the end
        ("settled", "low", {"row": "low", "round": 50, "within": 30.0}, findings.HOLDS),  # 25 %, and 45
        ("settled", "low", {"round": 75, "within": 1.0}, findings.UNKNOWN),  # runs of 100 rounds
    ],
)
def test_a_claim_holds_fails_or_cannot_be_judged(
    kind: str, others: str, options: dict[str, Any], word: str
) -> None:
    cells = [CELLS[name] for name in ("mine", *others.split())]
    assert judged(kind, *cells, **{"row": "mine", **options}) == [word]


def test_convergence_is_measured_in_rounds_and_in_changes_between_evaluations() -> None:
    """The end is 79 %, the mean of the last two evaluations: 78.5 % in round 20 is within a point of it."""
    curves = {"accuracy": [0.5, 0.785, 0.7, 0.78, 0.8], "loss": [1.0, 0.8, 0.6, 0.4, 0.2]}
    tables = {"run": {"rounds": 50}}
    record = Record(tables, 0.0, 2, [10, 20, 30, 40, 50], curves, {"accuracy": [0.79]}, {}, {}, "", {})
    assert findings.rounds_needed(record, "accuracy") == 20
    assert findings.unrest(record, "accuracy") == pytest.approx((8 + 2) / 2)  # 70, 78 and 80 %
    assert findings.last_loss(record, "accuracy") == pytest.approx(0.3)
    assert findings.mean_loss(record, "accuracy") == pytest.approx(0.6)

    def cell(label: str, record: Record) -> Any:
        return findings.Cell(cell_of(label, {}).plan, {}, [], dict.fromkeys(range(3), record))

    faster = record._replace(curves=curves | {"accuracy": [0.79, 0.79, 0.79, 0.79, 0.79]})
    cells = cell("mine", faster), cell("other", record)
    fewest: Any = findings.JUDGES["fewest_rounds"]
    rounds = fewest.keywords["measure"](*cells)
    assert (rounds.changes.tolist(), rounds.why) == ([10.0] * 3, "10 rounds against 20, 3 seeds")
    for kind in ("fewest_rounds", "steadiest"):
        assert judged(kind, *cells, row="mine") == [findings.HOLDS]
        assert judged(kind, *cells, row="other") == [findings.FAILS]


def test_holms_correction_counts_every_comparison_of_the_claims() -> None:
    """Differences of 2, 3 and 4 points have t = 3 / (1 / sqrt(3)) = 5.2 and p = 0.035: 0.07 as one of two."""
    mine = cell_of("mine", {seed: [0.9] for seed in range(3)}, True)
    lower = {seed: [0.88 - seed / 100] for seed in range(3)}
    claims = [experiments.Claim("", "best", {"row": "mine"})]
    rows = [mine, cell_of("a", lower), cell_of("b", NOISY)]
    column = mine.plan.column
    experiment = experiments.Experiment("x", "X", "", [column], [c.row for c in rows], {"paper": ""}, claims)
    seen = findings.Findings(experiment, ["paper"], {("paper", "c", c.row.label): c for c in rows})
    corrected = findings.Corrected(seen, "paper")
    change = findings.gain(rows[0], rows[1]).changes
    assert len(corrected.p) == 2
    assert corrected.p[change.tobytes(), 0.0] == pytest.approx(2 * stats.t_test(change))
    assert (findings.judged(change), corrected(change)) == (findings.HOLDS, findings.OPEN)


def test_the_leaders_are_the_highest_mean_and_what_it_is_not_distinguished_from() -> None:
    best = cell_of("best", {0: [0.9], 1: [0.92], 2: [0.94]})
    close = cell_of("close", {0: [0.91], 1: [0.90], 2: [0.94]})
    low = cell_of("low", {0: [0.5], 1: [0.52], 2: [0.541]})
    partly = cell_of("partly", {0: [0.99], 1: [0.99]})  # not all seeds: not compared
    assert [cell.row.label for cell in findings.leaders([low, partly, close, best])] == ["best", "close"]
    assert findings.leaders([partly, best]) == []


def test_differences_are_corrected_for_their_number_and_need_all_seeds() -> None:
    """2, 3 and 4 points have p = 0.035, 0.07 as the second of three; 9, 10 and 11 have 0.0033, 0.01 as the first."""
    mine = cell_of("mine", {seed: [0.9] for seed in range(3)})
    near = cell_of("near", {seed: [0.88 - seed / 100] for seed in range(3)})
    far = cell_of("far", {seed: [0.81 - seed / 100] for seed in range(3)})
    partly = cell_of("partly", {0: [0.5], 1: [0.5]})
    noisy = cell_of("noisy", {0: [0.95], 1: [0.9], 2: [0.86]})
    rows = [mine, near, far, noisy, partly]
    pairs = [["mine", other.row.label] for other in rows[1:]]
    experiment = experiments.Experiment(
        "x", "X", "", [mine.plan.column], [c.row for c in rows], {"paper": ""}, differences=pairs
    )
    seen = findings.Findings(experiment, ["paper"], {("paper", "c", c.row.label): c for c in rows})
    found = findings.differences(seen, "paper")
    assert {key[1]: (round(gain.mean, 9), significant) for key, (gain, significant) in found.items()} == {
        "near": (3.0, False),
        "far": (10.0, True),
        "noisy": (-0.333333333, False),
    }
    shown = pages.summary(seen)
    assert "the 3 differences of this table" in shown
    assert re.search(r"\| mine − far \| \*\*\+10\.0 \[\+7\.5, \+12\.5\]\*\* \|", shown)
    assert "| mine − partly | not yet run |" in shown


def test_a_column_that_half_of_the_methods_lack_is_named_and_not_shown() -> None:
    done, partly = cell_of("done", {seed: [0.9] for seed in range(3)}), cell_of("partly", {0: [0.5]})
    column = done.plan.column._replace(title="A column")
    experiment = experiments.Experiment(
        "x", "X", "About.", [column], [done.row, partly.row], {"paper": ""}, cost=True
    )
    seen = findings.Findings(experiment, ["paper"], {("paper", "c", c.row.label): c for c in (done, partly)})
    shown = pages.begun(seen)
    assert (shown.experiment.columns, shown.cells) == ([], {})
    assert shown.experiment.about == "About. Not yet run: A column."


def test_what_is_past_the_paper_is_not_among_all() -> None:
    whole = set(experiments.named("all"))
    assert whole.isdisjoint(experiments.named("finetuning"))
    assert whole.issuperset(experiments.named("figures"))
    for name in experiments.names():
        assert experiments.read(name).of_paper == (name in whole)


def test_a_claim_names_rows_that_there_are() -> None:
    with pytest.raises(UsageError, match='row "d"'):
        judged("best", CELLS["mine"], CELLS["low"], row="mine", other=["d"])


def test_columns_of_different_lengths_are_compared_at_the_rounds_that_both_have() -> None:
    """The longer is at 60 % when the shorter ends at 70 %, and at 90 % at its own end."""
    row = cell_of("a", {}).row

    def cell(name: str, rounds: int, curve: list[float]) -> findings.Cell:
        plan = cell_of("a", {}).plan._replace(column=experiments.Column(name, name))
        tables = {"run": {"rounds": rounds, "seed": 0}}
        looks = [rounds * (k + 1) // len(curve) for k in range(len(curve))]
        ends = {"accuracy": [curve[-1]]}
        run = Record(tables, 0.0, 1, looks, {"accuracy": curve}, ends, {}, {}, "", {})
        return findings.Cell(plan, {}, [], dict.fromkeys(range(3), run))

    def word(*cells: findings.Cell) -> findings.Verdict:
        columns = [c.plan.column for c in cells]
        experiment = experiments.Experiment("x", "X", "", columns, [row], {"paper": ""})
        seen = findings.Findings(
            experiment, ["paper"], {("paper", c.plan.column.name, "a"): c for c in cells}
        )
        claim = experiments.Claim("", "all_rise", {"steps": [["p", "q"]]})
        (verdict,) = findings.verdicts(claim, seen, "paper")
        return verdict

    long, short = cell("p", 100, [0.2, 0.4, 0.6, 0.8, 0.9]), cell("q", 60, [0.1, 0.2, 0.3, 0.5, 0.7])
    assert short.runs[0].counted == (60, 60)
    assert long.within((60, 60)) == pytest.approx({0: 60.0, 1: 60.0, 2: 60.0})
    assert long.within((40, 60)) == pytest.approx({0: 50.0, 1: 50.0, 2: 50.0})
    assert long.within((1, 10)) == {}
    assert word(long, short) == ("p → q, both after 60 rounds", findings.HOLDS, "a +10.0")
    assert word(long, cell("q", 100, [0.7, 0.7])) == ("p → q", findings.FAILS, "a -20.0")


def test_a_claim_over_many_places_is_as_strong_as_its_weakest() -> None:
    assert findings.overall([findings.HOLDS, findings.HOLDS]) == findings.HOLDS
    assert findings.overall([findings.HOLDS, findings.OPEN]) == findings.OPEN
    assert findings.overall([findings.UNKNOWN, findings.OPEN]) == findings.UNKNOWN
    assert findings.overall([findings.UNKNOWN, findings.FAILS]) == findings.FAILS


def test_comments_must_be_there_once() -> None:
    text = "a <!-- x --> b <!-- end of x --> c"
    assert pages.put(text, "x", "new") == "a <!-- x -->\nnew\n<!-- end of x --> c"
    with pytest.raises(UsageError, match="comments"):
        pages.put("nothing", "x", "new")


def test_a_mask_that_grew_by_more_than_its_rate_is_found() -> None:
    def grown(rate: float, *fractions: list[float], candidates: str = "shared") -> str | None:
        parts = enumerate(fractions, 1)
        lines = [{"round": k, "clients": [4, 7], "per_client": {"personal_fraction": f}} for k, f in parts]
        return batch.overgrown({"rate": rate, "candidates": candidates}, lines)

    assert grown(0.25, [0.25, 0.0], [0.4375, 0.25], [0.2, 0.4]) is None  # some may return
    without_masks = {"round": 1, "clients": [4], "per_client": {"loss": [1.0]}}
    assert batch.overgrown({"name": "fedavg"}, [without_masks]) is None
    message = grown(0.25, [0.25, 0.25], [0.4375, 0.6]) or ""
    assert "in round 2 the mask of client 7 grew from 25.0% to 60.0%" in message
    assert "client 4" in (grown(0.01, [0.02, 0.0]) or "")
    grew = [0.25, 0.25], [0.4375, 0.5]  # the top quarter of all parameters: none of it is personal yet
    assert "client 7" in (grown(0.25, *grew) or "")
    assert grown(0.25, *grew, candidates="all") is None
    assert "client 7" in (grown(0.25, [0.25, 0.25], [0.25, 0.51], candidates="all") or "")


def test_a_run_with_such_a_mask_gets_no_record_and_an_error_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words = (*COLUMN, "--row", "CO-PFL")
    monkeypatch.setattr(batch, "overgrown", lambda algorithm, rounds: "in round 1 a mask grew")
    refused = reproduce(capsys, tmp_path, *words)
    assert refused.code != 0
    assert "remove its folder, and it is run again" in refused.out + refused.err
    assert not list((tmp_path / "results").glob("*.gz"))
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "runs")
    assert reproduce(capsys, tmp_path, *words).code == 0
    assert list((tmp_path / "results").glob("*.gz"))


def test_runs_that_wait_for_tuning_are_missing_beside_those_with_the_default_rate() -> None:
    """Four rows, three seeds: 12 runs at the rate of the paper, 12 of tuning, and 12 at rates not known yet."""
    experiment = experiments.only(experiments.read("table-ablation"), ["mini-imagenet-20-counted"], [])
    plans = list(experiments.plans(experiment, experiment.budget("full"), ["paper", "equal"]))
    assert batch.count_left(plans, records.Store(Path("nowhere"))) == 36
