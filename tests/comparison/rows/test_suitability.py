"""Rows that cannot train on the task are refused before any run, or left out of "all"."""

from __future__ import annotations

from pathlib import Path

import pytest

from copfl.algorithms import ALGORITHMS
from copfl.comparison.compare import compare
from copfl.comparison.rows import suitability
from copfl.comparison.rows.entries import entries_of
from copfl.comparison.rows.entry_settings import row_settings
from copfl.comparison.rows.suitability import reasons
from copfl.errors import UsageError
from copfl.experiment.preparation import prepare
from copfl.settings.complete import complete
from copfl.settings.toml import Tables
from tests.comparison.small import base, clouds
from tests.data.test_survival import cohort, written

DIABETES: Tables = {"data": {"name": "diabetes"}, "run": {"rounds": 1, "clients": 2, "engine": "vmap"}}
ADAPTERS = {"flex_lora", "fedex_lora", "fedsa_lora", "ffa_lora"}


def test_named_rows_that_cannot_train_are_an_error_before_any_run(tmp_path: Path) -> None:
    rows = ["fedavg", "fedpac", "ktpfl:epochs=2"]
    with pytest.raises(UsageError) as error:
        compare(rows, seeds=[0], base_tables=DIABETES, out=tmp_path / "a", tune={})
    assert str(error.value) == (
        "these rows cannot train on this task; leave them out: "
        "fedpac (aligns the features of classes; this task is regression. Choose another algorithm); "
        "ktpfl epochs=2 (exchanges probabilities of classes; this task is regression. Choose another "
        "algorithm)"
    )
    assert not (tmp_path / "a").exists()


@pytest.mark.job
@pytest.mark.parametrize("tables", [DIABETES, {}], ids=["regression", "digits"])
def test_all_are_those_that_can_train(tables: Tables) -> None:
    rows = entries_of(["all"])
    assert {row.name for row in rows} == ALGORITHMS.keys()
    layers = {entry.label: row_settings(entry, tables, keeps_state=True).layers for entry in rows}
    experiment = prepare(complete(*layers[rows[0].label], suitability.CHECK))
    found = suitability.refusals(layers, experiment)
    classes = {"fedpac", "fedrod", "gpfl", "ktpfl"} if tables else set()
    assert found.keys() == ADAPTERS | classes


@pytest.mark.job
def test_survival_is_for_all_that_train_by_a_loss(tmp_path: Path) -> None:
    table = written(tmp_path / "cohort.csv", cohort(60))
    data = {"name": str(table), "target": "years", "event": "died", "client": "site"}
    model = {"name": "mlp", "width": 8}
    tables: Tables = {"data": data, "model": model, "run": {"rounds": 1, "engine": "vmap"}}
    rows = entries_of(["all"])
    layers = {entry.label: row_settings(entry, tables, keeps_state=True).layers for entry in rows}
    experiment = prepare(complete(*layers[rows[0].label], suitability.CHECK))
    found = suitability.refusals(layers, experiment)
    by_equations = {"levels", "wide_levels", "trees"}
    assert found.keys() == ADAPTERS | {"fedpac", "fedrod", "gpfl", "knn_per", "ktpfl"} | by_equations
    compared = compare(["fedavg_ft", "local"], seeds=[0], base_tables=tables, out=tmp_path / "a", tune={})
    assert [row.label for row in compared.rows] == ["fedavg_ft", "local"]
    assert "C-index" in str(compared)


@pytest.mark.job
def test_what_is_left_out_of_all_is_one_line_and_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: ALGORITHMS[name] for name in ("fedavg", "fedpac", "ffa_lora")}
    monkeypatch.setattr("copfl.comparison.rows.entries.ALGORITHMS", few)
    said = list[str]()
    found = compare(["all"], seeds=[0], base_tables=DIABETES, out=tmp_path / "a", tune={}, log=said.append)
    assert [row.label for row in found.rows] == ["fedavg"]
    assert said[0].startswith("Left out, as they cannot train on this task: fedpac (aligns")
    assert "ffa_lora (" in said[0]
    assert found.notes[0] == said[0]
    with pytest.raises(UsageError, match='no row to be the reference: "fedpac"'):
        compare(["all"], seeds=[0], base_tables=DIABETES, out=tmp_path / "a", tune={}, reference="fedpac")


def test_a_row_with_a_model_of_its_own_is_checked_with_it(tmp_path: Path) -> None:
    data = clouds(tmp_path / "clouds.npz")
    with pytest.raises(UsageError, match=r"leave them out: copfl model.width=0 \(.*width"):
        compare(
            ["local", "copfl:model.width=0"], seeds=[0], base_tables=base(data), out=tmp_path / "a", tune={}
        )
    assert not (tmp_path / "a").exists()


def test_a_reason_that_several_rows_have_is_said_once() -> None:
    refused = {
        "ffa_lora": "ffa_lora needs LoRA",
        "fedsa_lora lr=1": "fedsa_lora needs LoRA",
        "x": "no classes",
    }
    assert reasons(refused) == "ffa_lora, fedsa_lora lr=1 (needs LoRA); x (no classes)"
