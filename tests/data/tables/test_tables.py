"""A user's tables and texts (.csv, .jsonl, .parquet), LEAF's files and the hub's: read, encoded, refused."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from copfl.data.arrays import from_arrays
from copfl.data.sets import datasets, hub
from copfl.data.sets.datasets import load
from copfl.data.sets.overview import overview
from copfl.data.tables import encoders, files, tables
from copfl.data.tables.columns import DataTable, as_numbers, check_plain, column_of, not_numbers
from copfl.errors import DataError, UsageError, on_command_line
from tests.data.files import assert_well_formed

ROWS = [
    {"age": 20 + n, "town": ("Rome", "Oslo")[n % 2], "site": f"h{n % 4}", "ill": ("no", "yes")[n % 3 == 0]}
    for n in range(40)
]


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_csv, "t.csv"), (write_jsonl, "t.jsonl"), (write_parquet, "t.parquet")],
)
def test_the_same_table_in_every_form(tmp_path: Path, write: Any, name: str) -> None:
    found = load(write(tmp_path / name, ROWS), target="ill", client="site")
    assert_well_formed(found)
    assert found.classes == ("no", "yes")
    assert found.groups == ("h0", "h1", "h2", "h3")
    assert found.natural
    assert found.train.x.shape == (32, 3)  # age, and a column for each of two towns
    assert found.train.x[:, 0].mean() == pytest.approx(0, abs=1e-6)
    assert found.train.x[:, 0].std() == pytest.approx(1, abs=1e-6)
    everything = np.concatenate([found.train.x, found.test.x])
    assert (everything[:, 1:].sum(axis=1) == 1).all()
    assert found.test.group is not None
    assert np.bincount(found.test.group).tolist() == [2, 2, 2, 2]
    assert "numbers, standardised: age; categories: town (2)" in found.note


def test_statistics_and_categories_are_those_of_the_train_part(tmp_path: Path) -> None:
    train = write_csv(
        tmp_path / "a.csv", [{"x": n % 2, "c": "ab"[n % 2], "y": "pq"[n % 2]} for n in range(10)]
    )
    test = write_csv(tmp_path / "b.csv", [{"x": 100, "c": "new", "y": "p"}, {"x": 0, "c": "a", "y": "q"}])
    found = load(train, target="y", test=str(test))
    assert (len(found.train), len(found.test)) == (10, 2)
    assert found.test.x.tolist() == [[199.0, 0.0, 0.0], [-1.0, 1.0, 0.0]]


def test_a_data_set_knows_how_further_rows_are_encoded(tmp_path: Path) -> None:
    found = load(write_csv(tmp_path / "t.csv", ROWS), target="ill", client="site", missing="fill")
    assert (found.table.targets, found.table.missing) == (("ill",), "fill")
    columns = files.read_table(tmp_path / "t.csv").columns
    numbers = DataTable({**columns, "age": as_numbers(columns["age"])})
    again = encoders.encoded(found.table.columns, numbers)
    assert sorted(map(tuple, again)) == sorted(map(tuple, np.concatenate([found.train.x, found.test.x])))
    rows = DataTable.of({"age": [None, 30], "town": ["Rome", "Oslo"]})
    assert encoders.encoded(found.table.columns, rows)[0].tolist() == [0, 0, 1]


def test_the_scale_of_values() -> None:
    found = from_arrays(np.zeros((4, 1)), [[1.5, 5], [2.5, 5]] * 2, np.zeros((1, 1)), [[0.5, 5.0]])
    assert found.target_scale == ((2.0, 5.0), (0.5, 1.0))
    assert load("wine").target_scale == ((), ())


def test_the_kind_of_the_target(tmp_path: Path) -> None:
    rows = [{"a": n, "b": n / 3, "c": n % 2, "d": int(n % 5 == 0), "e": n % 3} for n in range(30)]
    path = write_csv(tmp_path / "t.csv", rows, ";")
    assert load(path, target="b").kind == "regression"
    assert load(path, target="b").classes == ("b",)
    assert load(path, target="a").kind == "regression"
    assert load(path, target="e").classes == ("0", "1", "2")
    assert load(path, target="e", kind="regression").kind == "regression"
    several = load(path, target="c,d")
    assert (several.kind, several.classes, several.train.y.shape) == ("multilabel", ("c", "d"), (24, 2))
    assert load(path, target="a,b").kind == "regression"


def test_whole_numbers_that_repeat_are_values_and_the_run_says_so(tmp_path: Path) -> None:
    rows = [{"a": n * 0.1, "kind": n % 31, "score": n % 31 + 0.5, "cost": n} for n in range(240)]
    path = write_csv(tmp_path / "many.csv", rows)
    note = load(str(path), target="kind", drop="score,cost").note
    assert "the 31 whole numbers of kind are values to predict; if they are classes: " in note
    others: list[dict[str, Any]] = [{"target": "score"}, {"target": "cost"}]
    for options in [*others, {"target": "kind", "kind": "regression"}]:
        assert "if they are classes" not in load(str(path), **options).note


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_decimal_commas_are_points_where_a_comma_does_not_separate(tmp_path: Path, separator: str) -> None:
    rows = [{"dose": f"{n},5" if n % 4 else n, "ill": n % 2, "note": "a, b"} for n in range(20)]
    found = load(write_csv(tmp_path / "comma.csv", rows, separator), target="ill")
    assert "decimal commas are read as points: dose" in found.note
    for row in rows:
        row["dose"] = str(row["dose"]).replace(",", ".")
    assert found.train.x.tolist() == load(write_csv(tmp_path / "p.csv", rows), target="ill").train.x.tolist()


def test_points_beside_decimal_commas_may_separate_thousands(tmp_path: Path) -> None:
    rows = [{"dose": ("0,5", "1.500", "7")[n % 3], "ill": n % 2} for n in range(20)]
    with pytest.raises(DataError, match="has numbers, but '0,5' in row 1"):
        load(write_csv(tmp_path / "t.csv", rows, ";"), target="ill")


def test_numbers_with_a_comma_are_no_categories(tmp_path: Path) -> None:
    rows = [{"dose": f"{n},5" if n % 4 else n, "ill": n % 2} for n in range(20)]
    path = write_csv(tmp_path / "t.csv", rows)
    with pytest.raises(
        DataError,
        match=r"has numbers, but '1,5' in row 2, and 14 more; write 1\.5, not 1,5, or .*\{'categories': 'dose'\}",
    ):
        load(path, target="ill")
    assert load(path, target="ill", categories="dose").train.x.shape == (16, 16)


def test_cells_keep_their_text_until_they_are_numbers(tmp_path: Path) -> None:
    rows = [
        {"dose": f" {n}.50", "site": f"{n % 2:03d}", "smokes": ("TRUE", "FALSE")[n % 2]} for n in range(20)
    ]
    path = write_csv(tmp_path / "t.csv", [{**row, "ill": f"0{n % 2}"} for n, row in enumerate(rows)])
    found = load(path, target="ill", client="site", kind="classification")
    assert (found.groups, found.classes) == (("000", "001"), ("00", "01"))
    assert [encoder.categories for encoder in found.table.columns] == [(), ("FALSE", "TRUE")]
    assert load(path, target="ill", categories="site").table.columns[1].categories == ("000", "001")


def test_a_byte_order_mark_quotes_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes('\ufeff"a; b";c\r\n"x\ny; ""z""";" NA "\r\n\r\nü;?\r\n'.encode())
    columns = files.read_table(path).columns
    assert {name: column.to_pylist() for name, column in columns.items()} == {
        "a; b": ['x\ny; "z"', "ü"],
        "c": [None, None],
    }


def test_parts_of_a_jsonl_file_have_one_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROWS_AT_ONCE", 2)
    rows: list[dict[str, Any]] = [
        {"whole": 1, "some": 1, "mixed": 1, "late": None, "yes": True, "tags": []},
        {"whole": None, "some": 2, "mixed": 2.5, "late": "", "yes": False, "tags": [1]},
        {"some": 0.5, "mixed": "x", "late": "2024-05-01", "yes": True, "tags": ["a"]},
    ]
    columns = files.read_table(write_jsonl(tmp_path / "t.jsonl", rows)).columns
    values = {name: column.to_pylist() for name, column in columns.items()}
    assert values.pop("tags") == [["[]"], ["[1]"], ["['a']"]]
    assert values == {
        "whole": [1, None, None],
        "some": [1.0, 2.0, 0.5],
        "mixed": ["1.0", "2.5", "x"],
        "late": [None, None, "2024-05-01"],
        "yes": [True, False, True],
    }
    assert str(columns["whole"].type) == "int64"


def test_parquet_has_types_of_its_own(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    moment = datetime(2024, 5, 1, 12)
    content = pa.table(
        {
            "kind": pa.array(["a", "b", ""]).dictionary_encode(),
            "day": [moment.date(), None, moment.date()],
            "price": pa.array([Decimal("1.5"), None, Decimal("2.5")]),
            "size": pa.array([1, 2, 2**40], pa.uint64()),
            "x": pa.array([1.5, float("nan"), 2.5], pa.float32()),
        }
    )
    parquet.write_table(content, tmp_path / "t.parquet")
    columns = files.read_table(tmp_path / "t.parquet").columns
    assert {name: column.to_pylist() for name, column in columns.items()} == {
        "kind": ["a", "b", None],
        "day": ["2024-05-01", None, "2024-05-01"],
        "price": [1.5, None, 2.5],
        "size": [1.0, 2.0, 2.0**40],
        "x": [1.5, None, 2.5],
    }


@pytest.mark.parametrize(
    "text", ["1", "+1.5", "-.5", "2.", "1e-3", "1E400", "inf", "-Infinity", "nan", " 7\t"]
)
def test_what_is_a_number_can_be_read_as_one(text: str) -> None:
    numbers = as_numbers(column_of([text, "0"]))
    assert numbers is not None
    assert numbers.to_pylist()[0] == pytest.approx(float(text), nan_ok=True)
    assert not len(not_numbers(column_of([text])))


@pytest.mark.parametrize("text", ["1,5", "1 000", "0x1F", "1_000", "e5", ".", "-", "1e", "Rome"])
def test_what_is_no_number(text: str) -> None:
    assert as_numbers(column_of([text, "0"])) is None
    assert not_numbers(column_of(["0", None, text])).tolist() == [2]


@pytest.mark.job
def test_arrow_is_loaded_with_the_first_table() -> None:
    code = "import sys, copfl.data.sets.datasets, copfl.experiment.bundle.inputs; print('pyarrow' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_texts(tmp_path: Path) -> None:
    rows = [{"id": n, "words": f"text {n} " + "x" * 5000 * (n == 7), "mood": "ab"[n % 2]} for n in range(20)]
    found = load(write_jsonl(tmp_path / "t.jsonl", rows), target="mood", text="words")
    assert found.train.x.dtype.kind == "U"
    assert set(found.train.x) | set(found.test.x) >= {f"text {n} " for n in range(20) if n != 7}
    assert "1 texts are cut to 4,096 characters" in found.note
    assert "columns not used beside the text: id" in found.note


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (ROWS, {"target": "il"}, 'no column "il"; did you mean "ill"'),
    (
        ROWS,
        {},
        "name the column to predict with target='COLUMN'; the columns are age, town, site, ill",
    ),
    (ROWS, {"target": "ill", "client": "hospital"}, 'no column "hospital"'),
    (
        [*ROWS, {**ROWS[0], "age": "old"}],
        {"target": "ill"},
        "has numbers, but 'old' in row 41; leave a cell empty .*'categories': 'age'",
    ),
    (
        [*ROWS, {**ROWS[0], "age": "inf"}],
        {"target": "ill"},
        '"age" has inf in row 41; numbers must be finite, up to 1e',
    ),
    (
        [*ROWS, {**ROWS[0], "age": "nan"}],
        {"target": "ill"},
        r"rows of each column\): age 1\. .*'fill'.* .*'drop'",
    ),
    (
        [*ROWS, {**ROWS[0], "ill": ""}],
        {"target": "ill", "missing": "fill"},
        "ill in 1 row, the first in row 41; ",
    ),
    ([*ROWS, {**ROWS[0], "site": "h9"}], {"target": "ill", "client": "site"}, "by_group"),
    (ROWS, {"target": "town", "kind": "regression"}, "'Rome'; regression needs numbers"),
    ([*ROWS, {**ROWS[0], "age": 10**400}], {"target": "ill"}, "numbers must be finite, up to 1e"),
    (ROWS, {"target": "age,town"}, '"town" has texts; several targets must be numbers'),
    (ROWS, {"target": "ill", "drop": "age,town,site"}, "no column left to predict from"),
    (ROWS, {"target": "ill", "missing": "guess"}, 'no missing "guess"'),
]


@pytest.mark.parametrize(("rows", "options", "message"), BAD)
def test_what_is_wrong_is_named(
    tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    path = write_csv(tmp_path / "t.csv", rows)
    if message == "by_group":  # a client with one sample has none to be tested on
        from copfl.data.clients.groups import number_of_groups
        from copfl.data.clients.schemes import by_group

        found = load(path, **options)
        assert "without a test sample: h9" in overview(found)
        divided = by_group(found, number_of_groups(found), 0)
        assert (
            divided.notes[-1]
            == 'groups with train samples and no test sample train, and are not tested: "h9"'
        )
        return
    with pytest.raises((DataError, UsageError), match=message):
        load(path, **options)


def test_a_cell_is_one_number_or_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{**row, "tags": [], "site": "²"} for row in ROWS])
    with pytest.raises(DataError, match=r'"tags" has \[\]; a cell is one number or text'):
        load(path, target="ill")
    assert load(path, target="ill", drop="tags", client="site").groups == ("²",)


def test_missing_values_are_filled_or_their_rows_left_out(tmp_path: Path) -> None:
    rows = [*ROWS, {**ROWS[0], "age": ""}, {**ROWS[1], "town": "NA"}]
    path = write_csv(tmp_path / "t.csv", rows)
    filled = load(path, target="ill", drop="site", missing="fill")
    assert len(filled.train) + len(filled.test) == 42
    assert "missing values filled: age 1, town 1" in filled.note
    dropped = load(path, target="ill", drop="site", missing="drop")
    assert len(dropped.train) + len(dropped.test) == 40
    assert "2 of 42 rows with missing values are left out: age 1, town 1" in dropped.note


def test_rows_without_a_target_are_told_from_those_that_can_be_filled(tmp_path: Path) -> None:
    rows = [*ROWS, {**ROWS[0], "age": ""}, {**ROWS[1], "ill": ""}]
    path = write_csv(tmp_path / "t.csv", rows)
    with pytest.raises(DataError, match=r"leave the rows without ill out .*'fill'.*'drop'.*40 of 42 rows"):
        load(path, target="ill")
    with pytest.raises(DataError, match=r"nothing can fill are missing: ill in 1 row, the first in row 42; "):
        load(path, target="ill", missing="fill")
    with pytest.raises(DataError, match=r"ill 1\. Complete them, or use .*'drop'.* \(41 of 42 rows stay\)$"):
        load(path, target="ill", drop="age")


def test_one_class_is_named_before_a_run(tmp_path: Path) -> None:
    found = load(write_csv(tmp_path / "t.csv", [{**row, "ill": "yes"} for row in ROWS]), target="ill")
    assert "all samples are yes: there is nothing to predict" in overview(found)


def test_a_filled_number_has_a_feature_that_says_so(tmp_path: Path) -> None:
    rows = [
        {"age": "" if n == 1 else n, "size": n, "town": "" if n == 2 else "a", "ill": n % 2}
        for n in range(10)
    ]
    train, test = (
        write_csv(tmp_path / "train.csv", rows),
        write_csv(tmp_path / "test.csv", [*rows, {**rows[0], "size": ""}]),
    )
    found = load(train, test=str(test), target="ill", missing="fill")
    # age, whether it is missing, size (which no train row lacks), town
    assert found.train.x[:, 1].tolist() == [float(n == 1) for n in range(10)]
    assert found.train.x[1].tolist()[:2] == [0.0, 1.0]
    assert found.train.x[:, 3].tolist() == [float(n != 2) for n in range(10)]
    assert found.test.x.shape == (11, 4)
    assert found.test.x[10, 2] == 0.0
    assert [column.indicator for column in found.table.columns] == [True, False, False]
    assert "a column that says where it is missing for age" in found.note
    with pytest.raises(DataError, match="values are missing"):
        load(train, target="ill")


@pytest.mark.job
def test_too_many_categories_or_bytes(tmp_path: Path) -> None:
    rows = [{"id": f"u{n}", "x": n, "y": n % 2} for n in range(1300)]
    path = write_csv(tmp_path / "t.csv", rows)
    with pytest.raises(
        DataError, match=r"id. has 1,040 different texts, .*'drop': 'id'.* text='id' or client='id'"
    ):
        load(path, target="y")
    assert load(path, target="y", drop="id").train.x.shape == (1040, 1)
    with pytest.raises(DataError, match=r"1,000,000 different labels, at most 65,536"):
        from_arrays(np.zeros((10**6, 1), np.uint8), np.arange(10**6))
    with (tmp_path / "huge.csv").open("wb") as file:
        file.truncate(5 * 2**30)  # takes no room on the disk
    with pytest.raises(DataError, match=r"5,368,709,120 bytes; at most .* Take a part of its rows"):
        load(tmp_path / "huge.csv", target="y")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "", "has no rows"),
        ("t.csv", "a,b\n", "has no rows"),
        ("t.csv", "a,b\n1,2\n3\n", "line 3, has 1 values; the first line names 2 columns"),
        ("t.csv", "a,a\n1,2\n", "the column 'a' twice"),
        ("t.csv", "a,b\n1,2\n\xff,2\n".encode("latin-1"), "line 3, is not UTF-8. Save it as UTF-8"),
        ("t.csv", "a,b\n1,2\n".encode("utf-16"), "line 1, is not UTF-8. Save it as UTF-8"),
        ("t.csv", 'a,b\n1,"2\n3,4\n5,"6\n', "not a readable .csv file: ',' expected after"),
        ("t.csv", 'a,b\n1,"2\n3,4\n', "not a readable .csv file: unexpected end of data"),
        ("t.csv", 'a,b\n"1,2\n', "not a readable .csv file"),
        ("t.jsonl", '{"a": 1}\n{"a": \n', "line 2, is not valid JSON"),
        ("t.jsonl", '{"a": 1}\n' + "[" * 100_000 + "\n", "line 2, is not valid JSON"),
        ("t.jsonl", "[1]\n", "line 1, is no object"),
        ("t.parquet", "PAR1", "not a readable .parquet file"),
        ("t.json", '{"users": []}', 'has no "user_data"'),
        ("t.json", '{"user_data": {"u": {"x": [1], "y": []}}}', "not as many x as y"),
        ("t.json", "{", "not a readable LEAF file"),
        ("t.xlsx", "", r"not a file of a known kind; .*give a table \(.csv, .tsv, .jsonl, .parquet, .txt\)"),
    ],
)
def test_files_that_are_damaged(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    options: dict[str, Any] = {"target": "a"} if path.suffix in files.READERS else {}
    with pytest.raises(DataError, match=message):
        load(path, **options)


# LEAF


def leaf_json(path: Path, users: dict[str, tuple[list[Any], list[Any]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    counts = [len(y) for _, y in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": counts, "user_data": data}))


def test_leaf_files(tmp_path: Path) -> None:
    samples = {"ann": ([[0.0, 1.0]] * 3, [0, 1, 1]), "bob": ([[2.0, 3.0]] * 2, [1, 0])}
    leaf_json(tmp_path / "mine" / "train" / "a.json", samples)
    leaf_json(tmp_path / "mine" / "test" / "a.json", samples)
    found = load(tmp_path / "mine")
    assert_well_formed(found)
    assert (found.groups, found.natural, len(found.train)) == (("ann", "bob"), True, 5)
    assert load(tmp_path / "mine", users=1).groups == ("ann",)
    untested = {**samples, "cid": ([[2.0, 3.0]] * 4, [1, 0, 1, 0])}  # with the most train samples
    leaf_json(tmp_path / "mine" / "train" / "a.json", untested)
    assert load(tmp_path / "mine", users=1).groups == ("ann",)
    leaf_json(
        tmp_path / "one.json",
        {f"u{n}": ([f"text {i}" for i in range(5)], ["a", "b"] * 2 + ["a"]) for n in range(3)},
    )
    single = load(tmp_path / "one.json")
    assert single.train.x.dtype.kind == "U"
    assert (len(single.train), len(single.test)) == (12, 3)


# The hub


def test_a_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a folder, which the package reads as it reads the hub."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "reviews").mkdir()
    for split, count in (("train", 10), ("test", 4)):
        rows = [{"text": f"word {n}", "label": ("bad", "good")[n % 2]} for n in range(count)]
        write_jsonl(tmp_path / "reviews" / f"{split}.jsonl", rows)
    found = load(f"hf:{tmp_path / 'reviews'}", target="label", text="text")
    assert (len(found.train), len(found.test), found.classes) == (10, 4, ("bad", "good"))
    assert found.train.x[3] == "word 3"
    with pytest.raises(DataError, match="name the column to predict"):
        load(f"hf:{tmp_path / 'reviews'}", target="mood")
    with pytest.raises(DataError, match="cannot load 'nobody/nothing'"):
        load("hf:nobody/nothing")


def test_images_of_the_hub_have_their_clients_and_the_most_frequent_size() -> None:
    pictures = [Image.new("L", (6, 4))] + [Image.new("L", (4, 5))] * 9
    part = {"image": pictures, "label": [0, 1] * 5, "site": ["north"] * 5 + ["south"] * 5}
    found = hub._images([part], "scans", "image", "label", "site", ["ill", "well"], 0)
    assert found.train.x.shape[1:] == (3, 5, 4)
    assert (found.groups, found.natural) == (("north", "south"), True)
    assert "1 of 10 images resized to 4 x 5" in found.note


# What was understood


def test_the_overview(tmp_path: Path) -> None:
    text = overview(load(write_csv(tmp_path / "t.csv", ROWS), target="ill", client="site"))
    assert "samples   32 train, 8 test; each float32 [3]" in text
    assert "classes   2: no 22, yes 10" in text
    assert "clients   4 groups, 8 to 8 train samples (median 8), 2 to 2 test samples" in text
    assert "  h2  8  |*:|" in text  # 6 and 2 of 8
    values = overview(load(tmp_path / "t.csv", target="age", client="site"))
    assert "targets   age: mean" in values
    assert "columns: tenths of all values of age" in values
    assert "clients   none by nature" in overview(load("digits"))
    several = from_arrays(
        np.zeros((20, 2)), np.tile([[1, 0, 1], [1, 1, 0]], (10, 1)), group=np.arange(20) % 2
    )
    assert "labels    3: target 0 16" in overview(several)
    line = datasets.check(tmp_path / "t.csv", target="age")
    assert line.startswith("t: 32 train and 8 test samples, float32 [8], regression of 1 target")


def test_a_column_that_may_be_an_identifier_is_named() -> None:
    rows: dict[str, list[object]] = {
        "patient": list(range(60)),
        "age": [20 + n % 40 for n in range(60)],
        "dose": [n / 7 for n in range(60)],
        "day": [f"2024-05-{1 + n // 3:02d}" for n in range(60)],
        "ward": ["east", "west", "north"] * 20,
        "ill": [n % 2 for n in range(60)],
    }
    rows["chip"] = rows["patient"]
    data = tables.from_tables([DataTable.of(rows)], "visits", target="ill")
    assert "chip: few rows share a value; leave out" in data.note
    assert "data_options={'drop': 'chip'}" in data.note
    assert any('"patient" looks like a number of patients' in warning for warning in data.warnings)
    with on_command_line():
        note = tables.from_tables([DataTable.of(rows)], "visits", target="ill").note
    assert "--set data.drop=chip" in note
    assert not re.search(r"age[^;]*: few rows", note)
    without = tables.from_tables([DataTable.of(rows)], "visits", target="ill", drop="patient,chip,day")
    assert "few rows share" not in without.note


def test_a_column_may_be_named_twice_for_one_use() -> None:
    rows: dict[str, list[object]] = {name: [n % 3 for n in range(60)] for name in "ab"}
    rows["ill"] = [n % 2 for n in range(60)]
    data = tables.from_tables([DataTable.of(rows)], "visits", target="ill", drop="a,a")
    assert data.table is not None
    assert [column.name for column in data.table.columns] == ["b"]
    with pytest.raises(DataError, match='"a" is named as text and as drop'):
        tables.from_tables([DataTable.of(rows)], "visits", target="ill", text="a", drop="a")


def test_numbers_with_a_sign_are_named() -> None:
    rows: dict[str, list[object]] = {
        "rate": [f"{n % 30} %" for n in range(60)],
        "price": [f"${n % 7},200.50" for n in range(60)],
        "ward": [n % 4 for n in range(60)],
        "code": [f"{n % 4}a" for n in range(60)],
        "ill": [n % 2 for n in range(60)],
    }
    note = tables.from_tables([DataTable.of(rows)], "visits", target="ill", categories="ward").note
    assert "rate,price: numbers with a sign or separator, each a category, so write plain numbers" in note
    assert "few rows share" not in note


def test_no_model_learns_from_dates_and_the_owner_hears_it() -> None:
    """Also where many rows share them: a thousand rows have 700 days, and no new row has any of them."""
    rows: dict[str, list[object]] = {
        "admitted": [f"2024-05-{1 + n % 10:02d}" for n in range(20)],
        "left": [None, *(f"{1 + n % 10}.06.2024 8:30" for n in range(19))],
        "ward": ["east", "west"] * 10,
        "ill": [n % 2 for n in range(20)],
    }
    with on_command_line():
        data = tables.from_tables([DataTable.of(rows)], "visits", target="ill")
    assert data.table is not None
    assert [column.name for column in data.table.columns] == ["ward"]
    assert (
        'the column "admitted" has dates such as 2024-05-01, and is left out, as no model' in data.warnings[0]
    )
    assert 'the column "left" has dates such as 1.06.2024 8:30, and is left out' in data.warnings[1]
    assert "the days between two dates" in data.warnings[0]
    assert "add --time admitted" in data.warnings[0]
    one = tables.from_tables([DataTable.of(rows)], "visits", target="ill", categories="admitted", drop="left")
    assert one.table is not None
    assert [column.name for column in one.table.columns if column.categories] == ["admitted", "ward"]
    assert not any("dates" in warning for warning in one.warnings)
    later = tables.from_tables([DataTable.of(rows)], "visits", target="ill", time="admitted", drop="left")
    assert not any("dates" in warning for warning in later.warnings)
    test_rows = DataTable.of({**rows, "left": [None] * 20})
    both = tables.from_tables([DataTable.of(rows), test_rows], "visits", target="ill")
    assert both.table is not None
    assert [column.name for column in both.table.columns] == ["ward"]
    with pytest.raises(DataError, match=r"no model learns from dates \(admitted, left\)"):
        tables.from_tables([DataTable.of(rows)], "visits", target="ill", drop="ward")


def test_a_date_is_no_target() -> None:
    rows: dict[str, list[object]] = {
        "relapse": [f"{1 + n}.06.2024" for n in range(20)],
        "died": [n % 2 for n in range(20)],
        "age": [n % 7 for n in range(20)],
    }
    every: list[dict[str, Any]] = [{}, {"event": "died"}, {"kind": "regression"}]
    for options in every:
        with pytest.raises(
            DataError,
            match='the target column "relapse" has dates; make a column of numbers of it, such as the days',
        ):
            tables.from_tables([DataTable.of(rows)], "visits", target="relapse", **options)


def test_sentences_are_named_for_what_they_are() -> None:
    rows: dict[str, list[object]] = {
        "report": [f"patient {n % 32} was seen in ward {n % 4}" for n in range(80)],
        "ward": ["east", "west"] * 40,
        "ill": [n % 2 for n in range(80)],
    }
    with on_command_line():
        note = tables.from_tables([DataTable.of(rows)], "visits", target="ill").note
    assert "report: sentences, learn from them with --text report" in note
    assert "few rows share" not in note


def test_sentences_that_do_not_repeat_are_no_categories() -> None:
    rows: dict[str, list[object]] = {
        "report": [f"patient {n} was seen in ward {n % 7}" for n in range(80)],
        "age": list(range(80)),
        "ill": [n % 2 for n in range(80)],
    }
    with (
        on_command_line(),
        pytest.raises(DataError, match=r"64 different sentences in 80 rows.*--text report.*data.drop=report"),
    ):
        tables.from_tables([DataTable.of(rows)], "visits", target="ill")
    assert tables.from_tables([DataTable.of(rows)], "visits", target="ill", drop="report").train.x.shape == (
        64,
        1,
    )


def test_most_samples_in_one_class_are_said_with_the_metric_to_judge_by() -> None:
    rows = {"x": np.arange(100) % 7, "died": ["no"] * 94 + ["yes"] * 6}
    with on_command_line():
        text = overview(tables.from_tables([DataTable.of(rows)], "visits", target="died"))
    assert "94 % of the samples are no, and a model that always answers so has this accuracy" in text
    assert "--metrics balanced_accuracy,accuracy" in text
    even = {"x": np.arange(100) % 7, "died": ["no"] * 79 + ["yes"] * 21}
    assert "judge by" not in overview(tables.from_tables([DataTable.of(even)], "visits", target="died"))


def test_messages_about_a_table_name_its_column(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("\n".join(["size,price", *(f"{n},{1.7e9 + n / 7:.3f}" for n in range(30))]))
    with pytest.raises(DataError, match='the target column "price" has values up to'):
        load(path, target="price")
    path.write_text("\n".join(["size,old", *(f"{n},{n % 2}" for n in range(30))]))
    with pytest.raises(DataError, match=r'the target column "old" has shape .* a column for each label'):
        load(path, target="old", kind="multilabel")
    path.write_text("size,old\n1,a\n2,b\n")
    with pytest.raises(DataError, match="too few samples for a test part: five of one class") as raised:
        load(path, target="old")
    assert "x_test" not in str(raised.value)


def test_a_message_names_the_file_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    path.touch()
    with pytest.raises(DataError) as raised:
        load(path)
    assert str(raised.value).count(str(path)) == 1


def test_words_that_are_read_as_missing_values_are_named(tmp_path: Path) -> None:
    """Where "none" is a class, the owner sees why its rows are missing."""
    rows = ["age,pain", *(f"{n},{('none', 'mild', 'severe', 'NA')[n % 4]}" for n in range(40))]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    named = r"words that are read as missing values: pain \(NA, none\)"
    with pytest.raises(
        DataError, match=rf"values are missing \(rows of each column\): pain 20\..*; {named}$"
    ):
        load(tmp_path / "t.csv", target="pain")
    assert re.search(named, load(tmp_path / "t.csv", target="pain", missing="drop").note)


# -- files that are made to occupy a machine --


def test_more_columns_than_a_person_has_genes_are_refused_at_once(tmp_path: Path) -> None:
    """Each name was counted in all others: 150,000 columns took minutes before anything was said."""
    wide = tmp_path / "wide.csv"
    wide.write_text(",".join(f"c{n}" for n in range(150_000)) + "\n" + ",".join("1" * 150_000) + "\n")
    began = time.process_time()
    with pytest.raises(DataError, match=r"wide.csv has 150,000 columns; at most 30,000 are read"):
        files.read_table(wide)
    assert time.process_time() - began < 5  # a tenth of a second on a machine that does nothing else


def test_a_name_that_is_there_twice_is_found_in_linear_time(tmp_path: Path) -> None:
    names = [f"c{n}" for n in range(30_000)]
    began = time.process_time()
    with pytest.raises(DataError, match="'c29999' twice"):
        files._check_names(tmp_path, [*names[1:], "c29999"])
    assert time.process_time() - began < 2


def test_many_keys_in_lines_of_json_are_refused(tmp_path: Path) -> None:
    at_once, by_and_by = tmp_path / "at_once.jsonl", tmp_path / "by_and_by.jsonl"
    at_once.write_text(json.dumps({f"k{n}": 1 for n in range(200_000)}) + "\n")
    with by_and_by.open("w") as file:
        for line in range(10_000):
            file.write(json.dumps({f"k{20 * line + n}": 1 for n in range(20)}) + "\n")
    began = time.process_time()
    with pytest.raises(DataError, match=r"200,000 different keys up to line 1, .*at most 30,000 are read"):
        files.read_table(at_once)
    with pytest.raises(DataError, match=r"30,020 different keys up to line 1501"):
        files.read_table(by_and_by)
    assert time.process_time() - began < 10


def test_keys_that_hardly_any_line_has_are_no_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FEW_CELLS", 1000)
    sparse = tmp_path / "sparse.jsonl"
    sparse.write_text("".join(json.dumps({f"k{n}": 1}) + "\n" for n in range(100)))
    with pytest.raises(DataError, match=r"100 different keys .* a line has 1 of them: .* 1 in 100 cells"):
        files.read_table(sparse)
    half_empty = tmp_path / "half.jsonl"
    half_empty.write_text("".join(json.dumps({f"k{n % 2}": n}) + "\n" for n in range(1000)))
    assert files.read_table(half_empty).columns["k1"].null_count == 500


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_line_without_an_end_is_not_read(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK", 1000)
    path = tmp_path / f"endless.{ending}"
    path.write_text(f"a{' ' * 1000}")
    with pytest.raises(DataError, match=r"line 1, has 1,000 or more characters"):
        files.read_table(path)


def test_a_first_row_of_many_lines_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK", 1000)
    path = tmp_path / "lines.csv"
    path.write_text(",".join('"a\n"' for _ in range(1000)))
    with pytest.raises(DataError, match="a row of more than 1,000 characters"):
        files.read_table(path)


def bomb(path: Path, times: int, encoding: str) -> Path:
    """A file with one text of a million characters in every row."""
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.array(["x" * 10**6])
    if encoding == "dictionary":
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * times, pyarrow.int32()), text)
        parquet.write_table(pyarrow.table({"a": column}), path, compression="zstd", store_schema=False)
    else:
        table = pyarrow.table({"a": pyarrow.concat_arrays([text] * times)})
        options = {"use_dictionary": False, "column_encoding": {"a": encoding}}
        parquet.write_table(table, path, compression="zstd", write_statistics=False, **options)
    return path


def test_a_text_that_repeats_in_a_parquet_file_is_refused_before_it_is_made(tmp_path: Path) -> None:
    """Less than a kilobyte on disk, and 40 GB in memory."""
    path = bomb(tmp_path / "t.parquet", 40_000, "dictionary")
    assert path.stat().st_size < 1000
    with pytest.raises(
        DataError, match=r"would unpack to 40,\d+,\d+,\d+ bytes or more; at most 4,294,967,296"
    ):
        files.read_table(path)


@pytest.mark.parametrize("encoding", ["dictionary", "DELTA_BYTE_ARRAY", "PLAIN"])
def test_every_encoding_of_repeated_texts_is_counted(
    tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bomb(tmp_path / "t.parquet", 20, encoding)
    monkeypatch.setattr(files, "LARGEST_FILE", 25 * 10**6)
    assert len(files.read_table(path)) == 20  # what is stored and what becomes of it are not added up
    monkeypatch.setattr(files, "LARGEST_FILE", 10**7)
    with pytest.raises(DataError, match="would unpack to"):
        files.read_table(path)


def test_numbers_that_repeat_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"a": pyarrow.array([b"0" * 100] * 50_000, pyarrow.binary(100))}), path)
    assert path.stat().st_size < 2000
    monkeypatch.setattr(files, "LARGEST_FILE", 4_000_000)
    with pytest.raises(DataError, match="would unpack to 5,000,000 bytes"):
        files.read_table(path)


def test_lists_in_a_parquet_file_are_not_read(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"a": [1, 2], "many": [[1, 2], [3]], "b": ["x", "y"]})
    parquet.write_table(table, tmp_path / "t.parquet")
    columns = files.read_table(tmp_path / "t.parquet").columns
    assert list(columns) == ["a", "many", "b"]
    assert columns["many"].null_count == 2
    with pytest.raises(DataError, match='the column "many" has list<'):
        check_plain("many", columns["many"])
