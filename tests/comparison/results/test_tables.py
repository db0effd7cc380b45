from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.comparison.jobs.job import accuracies as metric_names
from copfl.comparison.results.results import Record, Tuned, TuningTrial
from copfl.comparison.results.tables import Comparison, ComparisonRow, as_markdown, as_text
from copfl.comparison.results.writing import as_csv, as_json, write
from copfl.comparison.rows.entries import Entry
from copfl.report import comparison_page
from copfl.stats import difference, how_decided

ACCURACIES = metric_names("all")


def record(*accuracies: float, broken: int = 0) -> Record:
    clients = {name: [a / part for a in accuracies] for name, part in zip(ACCURACIES, (1, 2, 4), strict=True)}
    curve = [0.1, sum(accuracies) / len(accuracies)]
    cost = {"bytes_up": 1500.0, "bytes_down": 2.5e6, "seconds": 0.5, "broken": broken}
    tables: dict[str, dict[str, Any]] = {"partition": {"name": "iid"}, "run": {"clients": 2}}
    return Record(tables, 0.0, 5, [1, 2], {"accuracy": curve}, clients, cost)


def comparison(seeds: int = 2) -> Comparison:
    first = [record(0.5, 0.7), record(0.6, 0.8)][:seeds]
    second = [record(0.4, 0.6), record(0.5, 0.8)][:seeds]
    gains = {
        name: difference(
            [np.array(run.clients[name]) for run in second], [np.array(run.clients[name]) for run in first]
        )
        for name in ACCURACIES
    }
    tuned = Tuned(
        [TuningTrial({"optimizer": {"lr": 0.1}}, 0.25), TuningTrial({"optimizer": {"lr": 0.01}}, 0.75)]
    )
    rows = [
        ComparisonRow(Entry("copfl", "copfl", {}), first, tuned),
        ComparisonRow(Entry("local", "local", {}), second, tuned, gains),
    ]
    return Comparison("toys", rows, list(range(seeds)), 5, "copfl", notes=["a note."])


def test_a_table_says_what_its_verdicts_rest_on() -> None:
    assert "Holm" not in how_decided(1)
    assert "all 2 together (Holm)" in how_decided(2)


def test_the_text_by_hand() -> None:
    lines = as_text(comparison()).splitlines()
    # seeds 60 and 70: 65 ± 7.07; the worst clients 50 and 60; two of two clients gain over local, then one
    accuracies = ["65.0 ± 7.1", "32.5 ± 3.5", "16.2 ± 1.8", "55.0 ± 7.1", "75", "65.0 ± 7.1"]
    assert re.split(" {2,}", lines[4]) == ["copfl", *accuracies, "1.5 kB", "2.5 MB", "0.50"]
    (line,) = (text for text in lines if text.startswith("local") and "distinguishable" in text)
    # gains -10, -10 and -10, 0: means -10 and -5, -7.5 ± 12.706 * 2.5
    assert (
        " ".join(line.split())
        == "local -7.5 [-39.3, +24.3] [-39.3, +24.3] [-39.3, +24.3] not distinguishable"
    )
    assert "Difference to copfl" in as_text(comparison())
    (line,) = (text for text in lines if text.startswith("local") and "lr" in text)
    assert re.split(" {2,}", line) == ["local", "lr=0.01", "lr=0.1: 25.0, lr=0.01: 75.0"]
    assert "Sites: 2 clients, partition iid." in lines
    assert lines[-1] == "Note: a note."
    assert max(map(len, lines)) <= 100


def test_a_difference_that_cannot_be_computed_says_so_in_every_form(tmp_path: Path) -> None:
    found = comparison()
    nothing = difference([np.array([math.nan]), np.array([0.5])], [np.array([0.5]), np.array([0.5])])
    row = dataclasses.replace(found.rows[1], differences=dict.fromkeys(ACCURACIES, nothing))
    found = dataclasses.replace(found, rows=[found.rows[0], row])
    why = "not computed: no client of 1 of 2 seeds has a value under both"
    for text in (as_text(found), as_markdown(found), as_csv(found)):
        assert why in " ".join(text.split())
        assert "not distinguishable" not in text
    content = as_json(found)
    assert content["rows"][1]["differences"]["accuracy"]["verdict"] == why
    write(found, tmp_path)
    assert why.capitalize() in " ".join(map(str, comparison_page.document_of(tmp_path).conclusion))


def test_of_one_seed_there_is_no_spread_and_no_verdict() -> None:
    text = " ".join(as_text(comparison(seeds=1)).split())
    assert "copfl 60.0 30.0 15.0 50.0" in text
    assert "± standard" not in text
    (gain,) = (row["differences"]["accuracy"] for row in as_json(comparison(seeds=1))["rows"][1:])
    assert gain["over_seeds"] == [None, None]
    assert gain["verdict"] == "not distinguishable"


def test_markdown_has_the_same_grids() -> None:
    text = as_markdown(comparison())
    assert "| copfl | 65.0 ± 7.1 | 32.5 ± 3.5 |" in text
    assert "| local | -7.5 | [-39.3, +24.3] | [-39.3, +24.3] | [-39.3, +24.3] | not distinguishable |" in text
    assert text.count("| --- |") == 4


def test_csv_has_every_number_as_it_is() -> None:
    copfl, local = csv.DictReader(io.StringIO(as_csv(comparison())))
    assert float(copfl["accuracy_mean"]) == pytest.approx(0.65)
    assert float(copfl["accuracy_spread"]) == pytest.approx(math.sqrt(0.005))
    assert (copfl["accuracy_difference_mean"], copfl["verdict"]) == ("", "")
    assert float(local["accuracy_difference_mean"]) == pytest.approx(-0.075)
    assert local["chosen"] == "optimizer.lr=0.01"
    assert (local["seeds"], local["trials"], local["bytes_up_mean"]) == ("2", "2", "1500.0")
    # Two of two clients gain over local in one seed, one of two in the other; no client is new.
    assert (copfl["share_that_gains"], local["share_that_gains"]) == ("0.75", "")
    assert [copfl[f"new_1_{what}"] for what in ("mean", "spread", "difference")] == ["", "", ""]
    (first, *_) = csv.DictReader(io.StringIO(as_csv(comparison(seeds=1))))
    assert first["accuracy_spread"] == ""


def test_json_goes_down_to_the_clients() -> None:
    content = json.loads(json.dumps(as_json(comparison()), allow_nan=False))
    assert content["rows"][0]["per_client"]["accuracy"] == [[0.5, 0.7], [0.6, 0.8]]
    assert content["rows"][1]["per_seed"]["accuracy"] == pytest.approx([0.5, 0.65])
    assert content["rows"][0]["curves"][0] == {"round": [1, 2], "accuracy": [0.1, 0.6]}


def test_a_sweep_over_two_keys_has_a_map() -> None:
    rows = [ComparisonRow(Entry("copfl", f"cell {i}", {}), [record(0.1 * i)]) for i in range(4)]
    grid = {("copfl", "rate"): [0.05, 0.5], ("copfl", "budget"): [0.1, 1]}
    lines = as_text(Comparison("toys", rows, [0], 5, over=grid)).splitlines()
    assert lines[-5:] == [
        "",
        "copfl.rate   0.1     1",
        "----------------------",
        "0.05         0.0  10.0",
        "0.5         20.0  30.0",
    ]
