"""The data contract: as text and back, what it refuses, a draft that gives nothing away, and a site's check."""

from __future__ import annotations

import dataclasses
import json
import time
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.data.contract.agreed_encoders import Encoders
from copfl.data.contract.check import check, check_table
from copfl.data.contract.contract import Column, Contract
from copfl.data.contract.draft import draft
from copfl.data.contract.file import read_contract, write_contract, written
from copfl.data.sets.datasets import load
from copfl.data.tables.columns import DataTable
from copfl.errors import CopflError, CopflWarning, DataError, UsageError

AGREED = Contract(
    missing="fill",
    columns=(
        Column(name="age", type="number", unit="years", minimum=0, maximum=120, mean=50, deviation=20),
        Column(name="sodium", type="number", unit="mmol/l", mean=140, deviation=4, missing=True),
        Column(name="ward", type="category", categories=("heart", "lung")),
        Column(name="smoker", type="boolean", categories=("0", "1")),
        Column(name="admitted", type="date"),
    ),
    targets=(Column(name="outcome", type="category", categories=("ill", "well")),),
)
GOOD: dict[str, Any] = {
    "age": lambda n: 20 + n,
    "sodium": lambda n: 134 + n % 13,
    "ward": lambda n: ("heart", "lung")[n % 2],
    "smoker": lambda n: n % 2,
    "admitted": lambda n: f"2021-03-{1 + n % 28:02d}",
    "outcome": lambda n: ("ill", "well")[n % 2],
}


def write(path: Path, rows: int = 60, separator: str = ",", **changed: Any) -> Path:
    """A site's table; `changed` replaces or renames columns, None leaves one out."""
    columns = {name: changed.get(name, make) for name, make in GOOD.items()}
    columns |= {name: make for name, make in changed.items() if name not in GOOD}
    kept = {name: make for name, make in columns.items() if make is not None}
    lines = [separator.join(kept)] + [
        separator.join(str(make(n)) for make in kept.values()) for n in range(rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_contract_has_the_features_of_the_data_set(tmp_path: Path) -> None:
    path = write(tmp_path / "north.csv", sodium=lambda n: "" if n % 7 == 0 else 134 + n % 13, admitted=None)
    simulated = load(str(path), target="outcome", missing="fill")
    contract = Contract.of(simulated)
    assert contract is not None
    assert [column.name for column in contract.columns if column.indicator] == ["sodium"]
    assert contract.width == simulated.train.x.shape[1]
    again = Contract.read(contract.as_json()).encoders.dataset(path, kind="classification")
    np.testing.assert_array_equal(again.train.x, simulated.train.x)


def test_a_draft_has_an_indicator_where_numbers_are_filled(tmp_path: Path) -> None:
    path = write(tmp_path / "north.csv", sodium=lambda n: "" if n % 7 == 0 else 134 + n % 13)
    indicators = {
        how: {c.name: c.indicator for c in draft(path, target="outcome", missing=how).columns}
        for how in ("fill", "drop")
    }
    assert [name for name, has in indicators["fill"].items() if has] == ["sodium"]
    assert not any(indicators["drop"].values())
    with pytest.raises(DataError, match="an indicator is of numbers that may be missing"):
        AGREED.replaced({"age": {"indicator": True}})


def test_a_contract_is_plain_data(tmp_path: Path) -> None:
    assert Contract.read(AGREED.as_json()) == AGREED
    write_contract(tmp_path / "contract.toml", AGREED)
    assert read_contract(tmp_path / "contract.toml") == AGREED
    odd = AGREED.replaced({"ward": {"categories": ('a "b"', "c'd", "tab\t", "ü", "\x7f")}})
    write_contract(tmp_path / "odd.toml", odd)
    assert read_contract(tmp_path / "odd.toml") == odd == Contract.read(odd.as_json())


def test_encoders_follow_from_it() -> None:
    encoders = AGREED.encoders
    assert [(e.name, e.width) for e in encoders.columns] == [
        ("age", 1),
        ("sodium", 1),
        ("ward", 2),
        ("smoker", 2),
    ]
    assert (encoders.columns[0].mean, encoders.columns[0].std, encoders.missing) == (50, 20, "fill")
    opened = AGREED.replaced({"age": {"mean": None, "deviation": None}})
    assert not opened.is_frozen
    with pytest.raises(DataError, match="not frozen: age have no mean"):
        opened.encoders  # noqa: B018


@pytest.mark.parametrize("target", ["outcome", "age"])
def test_the_contract_of_a_data_set_has_its_encoders(target: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", age=lambda n: 20.5 + n)
    dataset = load(path, target=target, drop="admitted")
    contract = Contract.of(dataset)
    assert contract is not None
    assert contract.is_frozen
    assert contract.scale == dataset.target_scale
    assert contract.encoders == Encoders.of(dataset.table)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"data": "films"}, "data is 'films'"),
        ({"task": "sorting"}, "task is 'sorting'"),
        ({"targets": []}, "it has no target"),
        ({"more": 1}, "it has 'more'"),
        ({"format": 7}, "its format is 7"),
        ({"columns": [{"name": "a", "type": "colour"}]}, "its type is 'colour'"),
        ({"columns": [{"name": "a", "type": "number", "mean": 1.0}]}, "give both or none"),
        ({"columns": [{"name": "a", "type": "number", "mean": 1.0, "deviation": 0.0}]}, "must be above 0"),
        ({"columns": [{"name": "a", "type": "number", "minimum": 2, "maximum": 1}]}, "below its maximum"),
        ({"columns": [{"name": "a", "type": "number", "categories": ["x"]}]}, "a number has no categories"),
        ({"columns": [{"name": "a", "type": "category", "categories": ["x", "x"]}]}, "is there twice"),
        ({"columns": [{"name": "a", "type": "category", "categories": "x"}]}, "must be a list of texts"),
        ({"columns": [{"name": "a", "type": "number", "mean": "1"}]}, "mean must be a number"),
        ({"columns": [{"name": "a", "type": "number", "missing": 1}]}, "must be true or false"),
        ({"columns": [{"name": "a", "type": "number"}, {"name": "a", "type": "number"}]}, "the same name"),
        ({"columns": [{"name": "a", "type": "date"}]}, "no column is left to learn from"),
        ({"columns": [{"name": "a", "type": "number", "colour": 1}]}, "a column has 'colour'"),
        ({"columns": [{"name": "a", "type": "number", "minimum": 1e999}]}, "must be finite"),
        ({"columns": [{"name": "a", "type": "number", "minimum": 10**400}]}, "is no data contract"),
        ({"columns": [["name"]]}, "is no data contract"),
        ({"columns": [{"type": "number"}]}, "is no data contract"),
        ({"columns": 5}, "is no data contract"),
        ({"shape": "ab"}, "arrays have the shape"),
        ({"missing": "refuse", "columns": [{"name": "a", "type": "number", "missing": True}]}, "missing = "),
    ],
)
def test_what_is_no_contract_is_one_error(change: dict[str, Any], error: str, tmp_path: Path) -> None:
    content = json.loads(AGREED.as_json()) | change
    with pytest.raises(DataError, match=error):
        Contract.of_table(content)
    for text in ("", "[]", "7", "{}"):
        with pytest.raises(DataError, match="this is no data contract"):
            Contract.read(text)
    (tmp_path / "c.toml").write_text("a = [")
    with pytest.raises(UsageError, match="is no data contract"):
        read_contract(tmp_path / "c.toml")


def test_a_hundred_thousand_categories_are_refused() -> None:
    """Whoever proposes them would ask a node about every text that there is."""
    many = [str(n) for n in range(10**5)]
    for key in ("categories", "candidates"):
        with pytest.raises(DataError, match="more than 1,000 categories"):
            Contract.of_table(
                {
                    "format": 1,
                    "columns": [{"name": "a", "type": "category", key: many}],
                    "targets": [{"name": "y", "type": "category"}],
                }
            )
    columns = [
        {"name": f"a{n}", "type": "category", "candidates": many[:1000]} for n in range(21)
    ]  # 1,000 each
    with pytest.raises(DataError, match="more than 20,000 categories"):
        Contract.of_table({"format": 1, "columns": columns, "targets": [{"name": "y", "type": "category"}]})


def test_a_draft_has_no_value_of_a_row(tmp_path: Path) -> None:
    """No mean, no rare category, no exact range; types and missing values are found."""
    path = write(
        tmp_path / "north.csv",
        ward=lambda n: "rare" if n < 4 else ("heart", "lung")[n % 2],
        sodium=lambda n: "" if n == 3 else 134.25 + n % 13,
    )
    made = draft(path, target="outcome")
    assert {column.name for column in made.columns if column.guess} == {"age", "sodium"}
    assert "# to be agreed: mean and deviation; its range is a guess from one site: correct it" in written(
        made
    )
    assert Contract.of_table(tomllib.loads(written(made))) == made
    types = {column.name: column.type for column in made.columns}
    assert types == {
        "age": "number",
        "sodium": "number",
        "ward": "category",
        "smoker": "boolean",
        "admitted": "date",
    }
    age, sodium, ward, _, _ = made.columns
    assert (age.minimum, age.maximum, age.mean) == (0, 1000, None)  # half as much again as 80, outward
    assert ward.categories == ("heart", "lung")
    assert (sodium.missing, age.missing, made.missing) == (True, False, "fill")
    assert made.targets[0].categories == ("ill", "well")
    text = written(made)
    assert "rare" not in text
    assert "134" not in text
    assert "146" not in text
    assert "rare" in written(draft(path, target="outcome", smallest=4))
    with_means = draft(path, target="outcome", statistics=True)
    assert with_means.columns[0].mean == pytest.approx(np.mean(np.arange(20, 80)))
    open_draft = draft(path, target="outcome", leave_open=True)
    assert [column.name for column in open_draft.open] == ["age", "sodium", "ward", "outcome"]


@pytest.mark.parametrize("name", ["patient_id", "PID", "Fallnummer", "mrn"])
def test_a_draft_has_no_number_of_a_patient(tmp_path: Path, name: str) -> None:
    """Neither as a number nor as categories nor as a text, and the owner hears it."""
    makes: list[Any] = [lambda n: 4_000_000 + n, lambda n: f"P-{n}", lambda n: f"P-{n // 2}"]
    for make in makes:
        path = write(tmp_path / "north.csv", **{name: make}, age=lambda n: 20 + n % 31)
        with pytest.warns(
            CopflWarning, match=f'"{name}" is left out of the contract, as it looks like a number'
        ):
            made = draft(path, target="outcome", smallest=1)
        assert name not in [column.name for column in made.columns]
        assert "P-" not in written(made)
        assert "4000000" not in written(made)
        kept = draft(path, target="outcome", categories=name)  # somebody said so
        assert name in [column.name for column in kept.columns]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            draft(path, target="outcome", drop=name)
            draft(path, target="outcome", group=name)


def test_a_draft_asks_about_numbers_that_all_differ(tmp_path: Path) -> None:
    path = write(tmp_path / "north.csv", chip=lambda n: 7000 + n, age=lambda n: 20 + n % 31)
    with pytest.warns(CopflWarning, match=r'"chip" has another whole number in each row; .* --drop chip'):
        made = draft(path, target="outcome")
    assert "chip" in [column.name for column in made.columns]
    only = tmp_path / "only.csv"
    only.write_text("mrn,ill\n" + "".join(f"{n},{n % 2}\n" for n in range(20)))
    with pytest.warns(CopflWarning), pytest.raises(DataError, match="no column is left to learn from"):
        draft(only, target="ill")


def test_a_draft_is_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(DataError, match="have the contract of `copfl federate init --dataset`"):
        draft(tmp_path / "images", target="label")
    (tmp_path / "rows.ods").write_text("a")
    with pytest.raises(DataError, match=r"rows\.ods is no table; expected \.csv"):
        draft(tmp_path / "rows.ods", target="label")


def test_a_draft_of_a_regression_and_of_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", stay=lambda n: n + 0.5, note=lambda n: f"patient {n} came with {n}")
    regression = draft(path, target="stay", drop="admitted,outcome")
    assert (regression.task, regression.targets[0].type) == ("regression", "number")
    assert {c.name: c.type for c in regression.columns}["note"] == "text"
    texts = draft(path, target="outcome", text="note")
    assert (texts.data, [c.type for c in texts.columns]) == ("text", ["text"])
    with pytest.raises(CopflError, match='no column "outcom"; did you mean "outcome"'):
        draft(path, target="outcom")


def test_data_that_fit(tmp_path: Path) -> None:
    """In another order, with a column more and with fewer categories."""
    columns = {name: GOOD[name] for name in reversed(GOOD)}
    path = tmp_path / "site.csv"
    lines = [",".join((*columns, "more"))]
    lines += [",".join(str(make(n)) for make in (*columns.values(), str)) for n in range(0, 60, 2)]
    path.write_text("\n".join(lines) + "\n")
    checked = check(AGREED, path)
    assert checked.fits, checked.differences
    notes = {difference.what: difference.text for difference in checked.differences}
    assert notes == {
        "absent_classes": 'no row of "outcome" is well',
        "spare_columns": "columns that the contract does not have are not read: more",
    }


def test_dates_fit_as_a_spreadsheet_writes_them(tmp_path: Path) -> None:
    """No model learns from them; the column that says when a row was must be readable, too."""
    path = write(tmp_path / "site.csv", admitted=lambda n: f"{1 + n % 28}.3.2021")
    assert check(AGREED, path).fits
    timed = dataclasses.replace(AGREED, columns=AGREED.columns[:4], time="admitted")
    assert check(timed, path).fits
    unclear = write(tmp_path / "site.csv", admitted=lambda n: f"{1 + n % 12:02d}/03/2021")
    assert check(AGREED, unclear).fits
    (problem,) = check(timed, unclear).problems
    assert "no number above 12 says whether the day or the month comes first" in problem


@pytest.mark.parametrize(
    ("change", "what", "text"),
    [
        ({"ward": None}, "missing_column", 'the column "ward" is missing'),
        ({"sodium": None, "Sodium ": GOOD["sodium"]}, "renamed_column", 'is it your "Sodium"?'),
        ({"admitted": None, "admited": GOOD["admitted"]}, "renamed_column", 'is it your "admited"?'),
        ({"age": lambda n: "old"}, "type", "60 of 60 values are texts such as 'old'"),
        ({"age": lambda n: f'"{20 + n},5"'}, "decimal_commas", "write 1.5, not 1,5"),
        ({"age": lambda n: f"{1 + n % 28}.03.1961"}, "dates", '"age" has dates as text'),
        ({"ward": lambda n: f"2021-03-{1 + n % 28:02d}"}, "dates", '"ward" has dates as text'),
        (
            {"admitted": lambda n: f"week {1 + n % 28}"},
            "dates",
            "the contract has dates there, such as 2021-03-31",
        ),
        ({"sodium": lambda n: (134 + n % 13) * 10}, "unit", '"sodium" is 10 times what it is'),
        ({"sodium": lambda n: (134 + n % 13) * 1000}, "unit", '"sodium" is 1,000 times what it is'),
        ({"sodium": lambda n: (134 + n % 13) / 1000}, "unit", '"sodium" is 1/1,000 of what it is'),
        ({"age": lambda n: 150 if n == 7 else 30 + n}, "range", "1 of 60 values outside 0 to 120"),
        ({"sodium": lambda n: "1" * 300 if n == 7 else 140}, "range", "1 of 60 values above 1e+30"),
        (
            {"age": lambda n: "-" + "9" * 5000 if n < 2 else 40},
            "range",
            "2 of 60 values above 1e+30, such as -inf",
        ),
        ({"ward": lambda n: "1" * 300 if n < 9 else "lung"}, "categories", '"1111111111'),
        ({"ward": lambda n: "Heart" if n < 9 else "lung"}, "categories", '"Heart" (9 rows, meant heart?)'),
        ({"smoker": lambda n: ("no", "yes")[n % 2]}, "categories", '"no" (30 rows)'),
        ({"outcome": lambda n: ("sick", "well")[n % 2]}, "classes", '"sick" (30 rows)'),
        ({"age": lambda n: "" if n < 3 else n + 20}, "missing_values", '"age" lacks 3 of 60 values'),
        ({"outcome": lambda n: "" if n < 2 else "ill"}, "missing_values", "a row needs its target"),
    ],
)
def test_what_differs_is_said_in_the_owners_words(
    change: dict[str, Any], what: str, text: str, tmp_path: Path
) -> None:
    checked = check(AGREED, write(tmp_path / "site.csv", **change))
    assert not checked.fits
    found = [d for d in checked.differences if not d.is_note]
    assert found[0].what == what, found
    assert text in found[0].text


def test_a_column_of_another_name_is_known_by_its_values(tmp_path: Path) -> None:
    """If one alone has values as the contract describes them."""
    ranged = AGREED.replaced({"sodium": {"minimum": 100, "maximum": 200}})
    renamed = {"sodium": None, "Natrium": GOOD["sodium"], "identity": lambda n: 10_000 + n}
    difference = check(ranged, write(tmp_path / "site.csv", **renamed)).differences[0]
    assert difference.what == "renamed_column"
    assert difference.text == 'the column "sodium" is missing; is it your "Natrium"? Rename it in the file'
    both = renamed | {"Kalium": GOOD["sodium"]}
    assert check(ranged, write(tmp_path / "site.csv", **both)).differences[0].what == "missing_column"
    assert check(AGREED, write(tmp_path / "site.csv", **renamed)).differences[0].what == "missing_column"
    renamed = {"ward": None, "Station": GOOD["ward"], "doctor": lambda n: "Abel"}
    assert check(AGREED, write(tmp_path / "site.csv", **renamed)).differences[0].what == "renamed_column"


def test_the_wrong_file_is_told_at_once(tmp_path: Path) -> None:
    """Each missing column was compared with each of the file: 2,000 of both took minutes."""
    columns = tuple(Column(name=f"marker {n}", type="number", minimum=0, maximum=1) for n in range(2000))
    table = DataTable.of({f"Wert {n}": np.full(50, 0.5) for n in range(2000)} | {"y": np.arange(50.0)})
    contract = Contract(task="regression", columns=columns, targets=(Column(name="y", type="number"),))
    began = time.process_time()
    checked = check_table(contract, table)
    assert time.process_time() - began < 5  # hundredths of a second
    assert len(checked.problems) == 21
    assert checked.problems[0].startswith('the column "marker 0" is missing; the file has Wert 0, ')
    assert checked.problems[-1].startswith("1,980 more columns of the contract are missing: marker 20, ")


@pytest.mark.parametrize("name", ["age", "ward", "smoker", "admitted", "outcome", "more"])
def test_nested_cells_are_a_difference(name: str, tmp_path: Path) -> None:
    """Also in the column that may be the one that is missing."""
    rows: list[dict[str, Any]] = [
        {key: make(n) for key, make in GOOD.items() if key != "sodium"} | {name: [n, n]} for n in range(20)
    ]
    path = tmp_path / "site.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {d.column: d.text for d in check(AGREED, path).differences if not d.is_note}
    assert found.keys() == {"sodium", name} - {"more"}
    assert name == "more" or "a cell is one number or text" in found[name]


def test_a_decimal_comma_that_can_be_read_is_a_note(tmp_path: Path) -> None:
    checked = check(AGREED, write(tmp_path / "site.csv", separator=";", age=lambda n: f"{20 + n},5"))
    assert checked.fits
    assert checked.differences[0].text == "decimal commas are read as points: age"


@pytest.mark.parametrize("factor", [2, 3, 30, 300, 0.5])
def test_another_population_is_no_other_unit(factor: float, tmp_path: Path) -> None:
    checked = check(AGREED, write(tmp_path / "site.csv", sodium=lambda n: (134 + n % 13) * factor))
    assert not [d for d in checked.differences if d.what == "unit"]


def test_a_range_shows_another_unit_before_means_are_agreed(tmp_path: Path) -> None:
    opened = AGREED.replaced({"age": {"mean": None, "deviation": None}})
    path = write(tmp_path / "site.csv", age=lambda n: (20 + n) * 1000)
    found = {d.what: d.text for d in check(opened, path).differences}
    assert '"age" is at least 1,000 times what it is' in found["unit"]


def test_arrays_are_compared_by_shape_and_classes(tmp_path: Path) -> None:
    contract = Contract(
        data="arrays",
        shape=(1, 4, 4),
        targets=(Column(name="label", type="category", categories=("cat", "dog")),),
    )
    x = np.zeros((20, 4, 4), np.uint8)
    y = np.array(["cat", "dog"] * 10)
    np.savez(tmp_path / "fits.npz", x=x, y=y)
    np.savez(tmp_path / "numbers.npz", x=x, y=np.arange(20) % 2)
    np.savez(tmp_path / "large.npz", x=np.zeros((20, 8, 8), np.uint8), y=y)
    np.savez(tmp_path / "birds.npz", x=x, y=np.where(y == "cat", "bird", y))
    assert check(contract, tmp_path / "fits.npz").fits
    assert check(contract, tmp_path / "numbers.npz").fits
    assert [d.what for d in check(contract, tmp_path / "large.npz").differences] == ["shape"]
    assert [d.what for d in check(contract, tmp_path / "birds.npz").differences] == ["classes"]
