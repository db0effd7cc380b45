from __future__ import annotations

import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import copfl
from copfl.comparison.compare import compare, sweep
from copfl.comparison.results import tables
from copfl.comparison.results.writing import FILES
from copfl.data.clients.partition import Partition
from copfl.errors import CopflError, UsageError
from copfl.experiment.folder import RunFolder
from copfl.experiment.models import new_clients
from copfl.experiment.preparation import prepare
from copfl.report import comparison_page
from copfl.settings.complete import complete
from tests.commands import command, environment
from tests.comparison.small import base, clouds, line, numbers
from tests.slow import slow


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return clouds(tmp_path / "clouds.npz")


untuned = functools.partial(compare, tune={})


def folders(out: Path, part: str) -> dict[str, int]:
    """The run folders, and when each was last written to."""
    return {p.parent.name: p.stat().st_mtime_ns for p in sorted((out / part).glob("*/rounds.jsonl"))}


def test_twice_gives_the_same_numbers_and_the_second_time_nothing_is_run(tmp_path: Path, data: Path) -> None:
    rows, said = ["copfl:score=none", "local"], list[str]()
    first = untuned(
        rows, seeds=[0, 1], base_tables=base(data), out=tmp_path / "a", reference="local", log=said.append
    )
    assert len(said) == 4
    before = folders(tmp_path / "a", "runs")
    assert len(before) == 4
    assert {path.name for path in (tmp_path / "a").glob("table.*")} == {*FILES}
    again = untuned(
        rows, seeds=[0, 1], base_tables=base(data), out=tmp_path / "a", reference="local", log=said.append
    )
    assert said[4:] == ["4 of 4 runs are there already"]
    assert folders(tmp_path / "a", "runs") == before
    elsewhere = untuned(rows, seeds=[0, 1], base_tables=base(data), out=tmp_path / "b", reference="local")
    assert numbers(first) == numbers(again) == numbers(elsewhere)
    more = untuned(
        [*rows, "fedavg"],
        seeds=[0, 1, 2],
        base_tables=base(data),
        out=tmp_path / "a",
        reference="local",
        log=said.append,
    )
    assert "4 of 9 runs are there already" in said
    assert more.rows[0].per_seed()["accuracy"][:2] == first.rows[0].per_seed()["accuracy"]


def test_an_edited_method_is_trained_again_and_the_file_is_named(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = "from dataclasses import dataclass\nfrom copfl.parts.averaging import Averaging\n"
    method = """from edited_helper import sign
@dataclass(frozen=True)
class Mine(Averaging):
    def client_update(self, task, client, down, data, plan):
        w = self.global_model(task, client, down)
        trained = self.fit(task, w, client.moments, data, plan, adjust=lambda p, grad: sign * grad)
        return self.output(task, trained, data)
"""
    (tmp_path / "edited_method.py").write_text(head + method)
    helper, said = tmp_path / "edited_helper.py", list[str]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def compared(sign: int) -> list[float]:
        """As of a new process."""
        helper.write_text(f"sign = {sign}  # of the gradient\n")
        for module in ("edited_method", "edited_helper"):
            sys.modules.pop(module, None)
        said.clear()
        rows = ["edited_method:Mine", "fedavg"]
        tables: dict[str, Any] = {**base(data), "optimizer": {"lr": 0.1}}
        found = untuned(rows, seeds=[0], base_tables=tables, out=Path("out"), log=said.append)
        return [row.per_seed()["accuracy"][0] for row in found.rows]

    try:
        first = compared(1)
        assert compared(1) == first
        assert said == ["2 of 2 runs are there already"]
        second = compared(-1)
        assert said[0] == "1 of 2 runs are there already"
        assert said[1] == f"1 of 2 runs are trained again, as {helper} changed since"
        assert second[0] < first[0]
        assert second[1] == first[1]
        assert compared(1) == first  # the first results are still there
        assert said == ["2 of 2 runs are there already"]
    finally:
        for module in ("edited_method", "edited_helper"):
            sys.modules.pop(module, None)


@pytest.mark.job
def test_the_table_says_which_evaluations_count_and_warns_of_few_seeds(tmp_path: Path, data: Path) -> None:
    found = untuned(["fedavg", "local"], seeds=[0, 1], base_tables=base(data, rounds=6), out=tmp_path / "a")
    alone = [[run.curves["accuracy"] for run in row.outcomes] for row in found.rows]
    expected = [np.mean([curve[-2:] for curve in curves]) for curves in alone]
    assert [row.metrics()["accuracy"].mean for row in found.rows] == pytest.approx(expected)
    text = str(found).replace("\n", " ")
    assert "of the last third of each site's evaluations, at most 5 (rounds 5 to 6)." in text
    assert any(note.startswith("Two seeds give intervals") for note in found.notes)
    page = comparison_page.document_of(tmp_path / "a")
    assert "the last third of each site's evaluations" in page.tables[0].notes[0]
    three = untuned(
        ["fedavg", "local"], seeds=[0, 1, 2], base_tables=base(data, rounds=1), out=tmp_path / "a"
    )
    assert not any("seed" in note for note in three.notes)
    asked = untuned(
        ["fedavg", "local"], seeds=[0], base_tables=base(data, rounds=6), out=tmp_path / "a", last=6
    )
    assert "of the last 6 evaluations of each site (rounds 1 to 6)" in str(asked).replace("\n", " ")
    assert any(note.startswith("One seed says nothing about the next") for note in asked.notes)


@pytest.mark.job
def test_curves_that_still_rise_are_named_and_rows_are_compared_at_a_common_accuracy(
    tmp_path: Path, data: Path
) -> None:
    found = untuned(
        ["fedavg", "local"], seeds=[0, 1, 2], base_tables=base(data, rounds=6), out=tmp_path / "a"
    )
    curves = {
        row.label: np.mean([run.curves["accuracy"] for run in row.outcomes], axis=0) for row in found.rows
    }
    common, rows = tables.convergence(found)
    assert common == pytest.approx(min(curve.max() for curve in curves.values()))
    for label, curve in curves.items():
        assert rows[label].rounds == 1 + int(np.argmax(curve >= common))
        assert rows[label].gained == pytest.approx(curve[4:].mean() - curve[2:4].mean())
        assert rows[label].rises == (rows[label].gained >= 0.01)
    traffic = sum(found.rows[0].metrics()[way].mean for way in ("bytes_up", "bytes_down"))
    assert rows["fedavg"].bytes == pytest.approx(traffic * (rows["fedavg"].rounds or 0))
    assert "Convergence, after local training" in str(found)
    rising = [label for label, own in rows.items() if own.rises]
    warned = [note for note in found.notes if "may be others" in note]
    assert bool(warned) == bool(rising)
    assert all(label in warned[0] for label in rising)
    content = json.loads((tmp_path / "a" / "table.json").read_text())
    assert content["rows"][0]["rounds"] == rows["fedavg"].rounds
    page = comparison_page.document_of(tmp_path / "a")
    assert page.tables[1].rows[0][3] == str(rows["fedavg"].rounds)


@pytest.mark.job
def test_the_table_holds_what_the_runs_found(tmp_path: Path, data: Path) -> None:
    found = untuned(["copfl", "local"], seeds=[0, 1], base_tables=base(data), out=tmp_path / "a", last=2)
    assert found.reference == "copfl"  # the first, where none is named
    copfl_row, local_row = found.rows
    size: dict[str, Any] = {"clients": 2, "rounds": 3, "batch": 20}
    alone = [
        copfl.run(
            "local",
            str(data),
            model="mlp",
            partition="iid",
            model_options={"width": 4},
            optimizer={"name": "adam"},
            seed=seed,
            **size,
        )
        for seed in (0, 1)
    ]
    expected = [result.accuracy[-2:].mean() for result in alone]
    assert local_row.per_seed()["accuracy"] == pytest.approx(expected)
    gains = (
        [run.mean("accuracy") for run in local_row.outcomes],
        [run.mean("accuracy") for run in copfl_row.outcomes],
    )
    assert local_row.differences["accuracy"].mean == pytest.approx(np.subtract(*gains).mean())
    assert copfl_row.differences == {}


def test_models_that_were_not_evaluated_are_left_out(tmp_path: Path, data: Path) -> None:
    found = untuned(
        ["fedavg", "local"],
        seeds=[0, 1],
        base_tables=base(data, eval_models="final"),
        out=tmp_path / "a",
        reference="local",
    )
    row = numbers(found)["rows"][0]
    assert row["mean"]["accuracy"] is not None
    assert row["mean"]["accuracy_before"] is None
    assert row["per_seed"]["accuracy_global"] == [None, None]
    assert row["differences"].keys() == {"accuracy"}
    line = next(
        line for line in (tmp_path / "a/table.txt").read_text().splitlines() if line.startswith("fedavg (")
    )
    assert "  -  " in line


@pytest.mark.job
def test_tuning_never_sees_test_samples(tmp_path: Path, data: Path) -> None:
    how: dict[str, Any] = {"tune": {"lr": [0.5, 0.05]}, "tune_seeds": [1, 2], "validation": 0.25}
    out = tmp_path / "a"
    found = compare(["copfl", "local"], seeds=[0], base_tables=base(data, rounds=2), out=out, **how)
    parts = [Partition.load(path) for path in sorted((out / "tuning").glob("*/partition.json"))]
    assert len(parts) == (2 + 2) * 2  # trials times tuning seeds
    whole = {
        s: prepare(complete({**base(data), "run": {**base(data)["run"], "seed": s}})).federation.partition
        for s in (1, 2)
    }
    for part in parts:
        assert part.test_from == "train"
        for train, test, both in zip(part.train, part.test, whole[part.keywords["seed"]].train, strict=True):
            assert not set(train) & set(test)
            assert sorted([*train, *test]) == sorted(both)
            assert len(test) == 10  # a quarter of 40
    finals = [Partition.load(path) for path in (out / "runs").glob("*/partition.json")]
    assert {part.test_from for part in finals} == {"test"}
    # Other test samples: everything about the tuning is the same, byte for byte, and what is reported is not.
    tables = base(clouds(tmp_path / "other.npz", test_seed=2), rounds=2)
    other = compare(["copfl", "local"], seeds=[0], base_tables=tables, out=tmp_path / "b", **how)
    assert [row["trials"] for row in numbers(found)["rows"]] == [
        row["trials"] for row in numbers(other)["rows"]
    ]
    assert numbers(found)["rows"][0]["per_client"] != numbers(other)["rows"][0]["per_client"]


@pytest.mark.job
def test_the_winner_of_the_tuning_is_what_is_run(tmp_path: Path, data: Path) -> None:
    found = compare(
        ["fedavg", "local"],
        seeds=[0],
        base_tables=base(data, rounds=12),
        out=tmp_path / "a",
        tune={"lr": [1e-9, 0.3]},
        last=1,
    )
    for row in found.rows:
        assert row.tuned.chosen == {"optimizer": {"lr": 0.3}}  # the other one does not move
        best = max(trial.accuracy for trial in row.tuned.trials)
        assert [t.accuracy for t in row.tuned.trials] == [pytest.approx(t.accuracy) for t in row.tuned.trials]
        assert row.tuned.trials[1].accuracy == best
    plain = untuned(
        ["fedavg:lr=0.3", "local:lr=0.3"],
        seeds=[0],
        base_tables=base(data, rounds=12),
        out=tmp_path / "a",
        last=1,
    )
    assert [r.per_seed() for r in plain.rows] == [r.per_seed() for r in found.rows]  # the very same runs
    at_an_end = "At an end of the values tried, so a wider grid may do better: fedavg lr=0.3, local lr=0.3."
    assert found.notes[1] == at_an_end
    assert [note.partition(":")[0] for note in found.notes[2:]] == ["Past their best"]


def test_inputs_that_are_not_scaled_are_named_below_the_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    samples = rng.normal(0, 1000, (60, 3)).astype(np.float32), np.arange(60) % 2
    how: dict[str, Any] = {"rounds": 1, "clients": 2, "partition": "iid", "rivals": False}
    found = copfl.compare(["local"], samples, seeds=[0], tune={}, out=tmp_path, **how)
    assert any(note.startswith("The inputs are not scaled") for note in found.notes)


def test_equals_are_decided_by_the_order_and_unequal_budgets_are_noted(tmp_path: Path, data: Path) -> None:
    tune = {"copfl.rate": [0.1, 0.11, 0.12], "copfl.budget": [0.0]}  # nothing personal: the rate is idle
    found = compare(["local", "copfl"], seeds=[0], base_tables=base(data), out=tmp_path / "a", tune=tune)
    assert found.rows[0].tuned.trials == []
    assert found.rows[1].tuned.chosen == {"copfl": {"rate": 0.1, "budget": 0.0}}
    assert found.notes[-1].startswith("The rows did not try equally many settings (local 0, copfl 3)")


@pytest.mark.job
def test_by_default_every_row_has_the_same_optimizer_and_tries_the_same_rates(
    tmp_path: Path, data: Path
) -> None:
    found = compare(
        ["copfl", "fedrep", "local"],
        seeds=[0],
        base_tables=base(data, rounds=1),
        out=tmp_path / "a",
        reference="local",
    )
    for row in found.rows:
        tried = [trial.settings["optimizer"]["lr"] for trial in row.tuned.trials]
        assert tried == [3e-3, 1e-3, 1e-2]
        assert row.optimizer["name"] == "adam"
        assert row.optimizer["lr"] == row.tuned.chosen["optimizer"]["lr"]
        assert f"{row.label} (adam {row.optimizer['lr']:g})" in str(found)
    assert "unequal" not in found.title
    assert len(folders(tmp_path / "a", "tuning")) == 9
    tables = RunFolder(next((tmp_path / "a" / "runs").glob("copfl-*"))).tables()
    assert tables["algorithm"]["state_per_phase"] is True
    csv = (tmp_path / "a" / "table.csv").read_text().splitlines()
    assert csv[1].startswith(f"copfl,copfl,adam,{found.rows[0].optimizer['lr']},")


@pytest.mark.parametrize(
    ("rows", "optimizer", "ending"),
    [
        (["copfl", "local"], {}, "seed 0"),
        (["copfl", "local"], {"lr": 0.01}, "seed 0"),
        (["copfl", "local"], {"name": "own"}, "seed 0; unequal optimizers"),
        (["copfl:optimizer=mamo", "local"], {}, "seed 0; unequal optimizers"),
        (["copfl", "local:optimizer.beta1=0.5"], {}, "seed 0; unequal optimizers"),
        (["copfl:lr=0.01", "local"], {}, "seed 0; unequal learning rates"),
    ],
)
def test_a_comparison_of_unequal_optimizers_says_so_in_its_title(
    tmp_path: Path, data: Path, rows: list[str], optimizer: dict[str, object], ending: str
) -> None:
    found = untuned(
        rows, seeds=[0], base_tables={**base(data, rounds=1), "optimizer": optimizer}, out=tmp_path / "a"
    )
    assert found.title.endswith(ending)
    assert str(found).startswith(found.title)


def test_a_rate_that_a_row_names_is_not_tuned(tmp_path: Path, data: Path) -> None:
    tables = base(data, rounds=1)
    found = compare(
        ["copfl:lr=0.02", "local"],
        seeds=[0],
        base_tables=tables,
        out=tmp_path / "a",
        tune={"lr": [0.1, 0.01]},
    )
    assert (found.rows[0].optimizer["lr"], found.rows[0].tuned.trials) == (0.02, [])
    assert len(found.rows[1].tuned.trials) == 2
    assert found.title.endswith("unequal learning rates")


def test_the_share_of_clients_that_gain_over_local_training(tmp_path: Path, data: Path) -> None:
    found = untuned(["fedavg", "local"], seeds=[0, 1], base_tables=base(data, clients=4), out=tmp_path / "a")
    fedavg, local = ([np.array(run.clients["accuracy"]) for run in row.outcomes] for row in found.rows)
    expected = [float((own > alone).mean()) for own, alone in zip(fedavg, local, strict=True)]
    assert tables.gaining(found) == {"fedavg": pytest.approx(expected)}
    assert "gain: the share of sites" in str(found).replace("\n", " ")
    assert (
        tables.gaining(
            untuned(["fedavg"], seeds=[0, 1], base_tables=base(data, clients=4), out=tmp_path / "a")
        )
        == {}
    )


@pytest.mark.job
def test_new_clients_have_a_table_of_their_own(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_clients, "UPDATES", 3)
    found = untuned(
        ["fedper", "local"],
        seeds=[0, 1],
        base_tables=base(data, clients=4, new_clients=0.5, rounds=1),
        out=tmp_path / "a",
    )
    assert "4 clients (50% of them new)" in found.title
    text = str(found)
    assert "New sites: accuracy in %" in text
    fedper, local = (tables.new_client_differences(row) for row in found.rows)
    assert list(fedper) == ["1", "5", "all"]
    assert all(gain.mean == 0 for _, gain in local.values())  # it is training alone
    new = [run.new for run in found.rows[0].outcomes]
    expected = np.mean([(one.accuracy["5"] - one.alone["5"]).mean() for one in new if one is not None])
    assert fedper["5"][1].mean == pytest.approx(expected)
    csv = (tmp_path / "a" / "table.csv").read_text().splitlines()
    assert csv[0].endswith("new_all_difference")
    next((tmp_path / "a").rglob("new_clients.json")).unlink()  # killed before it was written: trained again
    assert numbers(
        untuned(
            ["fedper", "local"],
            seeds=[0, 1],
            base_tables=base(data, clients=4, new_clients=0.5, rounds=1),
            out=tmp_path / "a",
        )
    ) == numbers(found)


def test_the_data_set_and_the_rounds_are_arguments_as_of_a_run(tmp_path: Path, data: Path) -> None:
    tables = base(data)
    rest = {**tables, "run": {key: value for key, value in tables["run"].items() if key != "rounds"}}
    del rest["data"]
    how: dict[str, Any] = {"seeds": [0], "out": tmp_path / "a", "rounds": 1, "base_tables": rest}
    found = untuned(["local", "fedavg"], data, **how)
    named = untuned(["local", "fedavg"], seeds=[0], base_tables=base(data, rounds=1), out=tmp_path / "a")
    assert numbers(found) == numbers(named)
    assert len(list((tmp_path / "a" / "runs").iterdir())) == 2  # the very same runs
    assert len(sweep({"lr": [0.1]}, data, **how).rows) == 1


@pytest.mark.job
def test_a_sweep_is_a_grid(tmp_path: Path, data: Path) -> None:
    over: dict[str, list[object]] = {"copfl.rate": [0.1, 0.3], "run.batch": [10, 20]}
    found = sweep(over, seeds=[0, 1], base_tables=base(data), out=tmp_path / "a")
    assert [row.label for row in found.rows] == [
        "rate=0.1 run.batch=10", "rate=0.1 run.batch=20", "rate=0.3 run.batch=10", "rate=0.3 run.batch=20",
    ]  # fmt: skip
    same = untuned(
        ["copfl:rate=0.3:optimizer=mamo"], seeds=[0, 1], base_tables=base(data), out=tmp_path / "b"
    )
    assert same.rows[0].per_seed()["accuracy"] == found.rows[3].per_seed()["accuracy"]
    assert "copfl.rate down, run.batch across" in str(found)
    assert found.title.startswith("copfl on clouds.npz, 2 clients, 3 rounds")


def test_the_epochs_of_a_comparison_are_those_of_every_row(tmp_path: Path, data: Path) -> None:
    tables = {**base(data), "algorithm": {"epochs": 2}}
    untuned(["fedavg", "local"], seeds=[0], base_tables=tables, out=tmp_path)
    texts = [path.read_text() for path in tmp_path.glob("**/run.toml")]
    assert [text.count("\nepochs = 2\n") for text in texts] == [1, 1]


def test_a_sweep_may_change_what_a_comparison_must_not(tmp_path: Path, data: Path) -> None:
    tables = {**base(data), "algorithm": {"name": "local", "epochs": 2}}
    found = sweep({"run.clients": [2, 4], "lr": [0.1]}, seeds=[0], base_tables=tables, out=tmp_path / "a")
    assert [len(row.outcomes[0].clients["accuracy"]) for row in found.rows] == [2, 4]
    assert found.title == "local on clouds.npz, 3 rounds, seed 0"


@pytest.mark.parametrize(
    ("entries", "options", "message"),
    [
        ([], {}, "nothing to compare; name some algorithms"),
        (["copfl"], {"seeds": []}, "names no seed"),
        (["copfl", "copfl"], {}, 'two rows are called "copfl"'),
        (["copfl:raet=0.1"], {}, r'algorithm.raet=0.1 is no setting; did you mean "rate"?'),
        (["copfl"], {"reference": "fedavg"}, 'no row to be the reference: "fedavg".* Known: copfl'),
        (["copfl"], {"tune": {"learning_rate": [1]}}, 'the key "learning_rate" must be a setting such as lr'),
        (["copfl"], {"tune": {"optimizer.lrr": [1]}}, r'optimizer.lrr=1 is no setting; did you mean "lr"?'),
        (
            ["copfl"],
            {"tune": {"fedavg.epochs": [1, 2]}},
            'settings of "fedavg" are for no entry; those use adam, copfl',
        ),
        (
            ["copfl"],
            {"tune": {"optimzer.lr": [1, 2]}},
            r'optimzer is no setting; did you mean "optimizer"?',
        ),
        (["copfl"], {"tune": {"run.seed": [1, 2]}}, "run.seed is the same for every row"),
        (["copfl"], {"tune": {"lr": [0.1]}, "tune_seeds": []}, "tune_seeds names no seed"),
        (
            ["copfl"],
            {"tune": {"lr": [0.1]}, "validation": 1.5},
            "the fraction to hold out is 1.5; it must be between 0 and 1",
        ),
        (["copfl"], {"last": 0}, "last=0 must be"),
        (["copfl"], {"jobs": -1}, "jobs=-1 must be"),
        (["copfl"], {"base_tables": {"algorithm": {"name": "local"}}}, "algorithm.name is for one run"),
        (["copfl"], {"base_tables": {"run": {"seed": 1}}}, "named apart"),
        (["copfl"], {"base_tables": {"data": {"name": "nothing.npz"}}}, "nothing.npz"),
        (
            ["copfl"],
            {"dataset": [0]},
            "client, not int",
        ),
    ],
)
def test_what_cannot_be_run_is_said_before_the_first_run(
    tmp_path: Path, data: Path, entries: list[str], options: dict[str, object], message: str
) -> None:
    given: dict[str, object] = {"seeds": [0], "base_tables": base(data), "out": tmp_path / "a", **options}
    with pytest.raises(CopflError, match=message) as error:
        compare(entries, **given)  # type: ignore[arg-type]
    assert "--" not in str(error.value)  # in Python there are no options of the command line
    assert not (tmp_path / "a" / "runs").exists()


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({}, "nothing to sweep over"),
        ({"run.seed": [1, 2]}, "named apart"),
        ({"fedavg.epochs": [1, 2]}, 'settings of "fedavg" are for no entry'),
        ({"copfl.raet": [1, 2]}, 'did you mean "rate"'),
    ],
)
def test_sweeps_that_are_not_allowed(
    tmp_path: Path, data: Path, over: dict[str, list[object]], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        sweep(over, seeds=[0], base_tables=base(data), out=tmp_path / "a")
    assert "--" not in str(error.value)


def wait_for_free(out: Path) -> None:
    """Returns when no process holds a run folder any more."""
    for path in out.rglob(".lock"):
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)


@slow
def test_killed_half_way_it_goes_on_to_the_same_numbers(tmp_path: Path, data: Path) -> None:
    """In two processes, killed with runs finished, running and to come; then in this one."""
    rows, tables = ["copfl", "fedavg", "local"], base(data, rounds=12)
    expected = numbers(untuned(rows, seeds=[0, 1], base_tables=tables, out=tmp_path / "whole"))
    out = tmp_path / "killed"
    words = line(data, out, "--rounds", "12", "--algorithms", ",".join(rows), "--seeds", "0,1", "--jobs", "2")
    words.append("--no-tune")
    with subprocess.Popen(command(*words), env=environment(), stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while len(folders(out, "runs")) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    begun = folders(out, "runs")
    assert 3 <= len(begun) < 6, "it was to be killed half-way"
    said = list[str]()
    wait_for_free(out)  # the workers notice that they are alone, and go
    # One that had just written its last round may leave its lock's file, which nobody holds, in a folder that is done.
    done = {p.parent for p in out.rglob("rounds.jsonl") if len(p.read_text().splitlines()) == 12}
    assert numbers(untuned(rows, seeds=[0, 1], base_tables=tables, out=out, log=said.append)) == expected
    assert {path.parent for path in out.rglob(".lock")} <= done
    wait_for_free(out)
    assert said


@pytest.mark.job
def test_the_required_packages_are_enough(tmp_path: Path, data: Path) -> None:
    """On a machine with nothing else: plain text, no pictures, no rivals, and unfinished runs begin again."""
    script, settings = tmp_path / "script.py", base(data, rounds=1, rivals=False)
    script.write_text(f"""
import sys
for name in ("typer", "click", "rich", "sklearn", "PIL", "safetensors", "matplotlib"):
    sys.modules[name] = None
import copfl
found = copfl.compare(
    ["copfl", "local"], seeds=[0, 1], base_tables={settings!r}, out={str(tmp_path / "a")!r}, tune={{}}
)
print(found)
""")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert "Difference to copfl" in done.stdout
    assert (tmp_path / "a" / "table.txt").read_text() == done.stdout


def test_the_rivals_stand_beside_the_rows(tmp_path: Path, data: Path) -> None:
    """Each seed has its partition; the paired differences to the best rival are by hand those of the clients."""
    tables = base(data, rivals=True)
    found = untuned(["fedavg", "local"], seeds=[0, 1], base_tables=tables, out=tmp_path / "out")
    rivals = found.rivals
    assert rivals is not None
    assert len(rivals.of_seeds) == 2
    ours = [np.array(run.clients["accuracy"]) for run in found.rows[0].outcomes]
    theirs = [of_seed.values[rivals.chosen].tested["accuracy"] for of_seed in rivals.of_seeds]
    expected = np.mean([(a - b).mean() for a, b in zip(ours, theirs, strict=True)])
    assert rivals.to_best(found.rows[0].outcomes).mean == pytest.approx(expected)
    text = str(found)
    assert "What each site has alone" in text
    assert "at each site alone, accuracy, in points" in text
    for name in ("log loss", "AUC, %"):
        assert name in text
    content = json.loads((tmp_path / "out" / "table.json").read_text())["rivals"]
    assert content["differences"]["fedavg"]["mean"] == pytest.approx(expected)
    page = comparison_page.document_of(tmp_path / "out")
    assert any("that each site trains alone: fedavg" in text for text in page.conclusion)
    assert any(table.title == "What each site has alone" for table in page.tables)
    silent = base(data, rivals=False)
    assert untuned(["fedavg"], seeds=[0], base_tables=silent, out=tmp_path / "silent").rivals is None
