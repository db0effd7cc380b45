"""What the owner of a table hears before training: spellings, copies, giveaways, constant columns, sites."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.data.samples import Dataset
from copfl.data.sets.datasets import check, load
from copfl.data.sets.overview import overview
from copfl.data.tables import doubts
from copfl.data.tables.columns import DataTable
from copfl.data.tables.doubts import Giveaway, RepeatedRows, SiteColumn, identifiers, site_column
from copfl.data.tables.encoders import Encoder
from copfl.data.tables.tables import from_tables
from copfl.errors import DataError, on_command_line

N = 200
GENERATOR = np.random.default_rng(0)
AGE = GENERATOR.normal(50, 10, N).round(3)
ILL = (GENERATOR.random(N) < 0.4).astype(int)
SITE = np.repeat(["rome", "oslo", "bonn", "lyon"], N // 4)


def data_of(target: str = "ill", client: str = "hospital", **columns: Any) -> Dataset:
    """A table of four hospitals with these columns beside the age."""
    table = DataTable.of({"age": AGE, "hospital": SITE, "ill": ILL, **columns})
    with on_command_line():
        return from_tables([table], "t", target=target, client=client, categories=options_of(columns))


def options_of(columns: dict[str, Any]) -> str:
    return ",".join(name for name in columns if name.startswith("kind"))


# 1. Spellings


def test_one_whole_number_in_two_spellings_is_one_category_and_the_note_says_who_writes_which() -> None:
    kind = np.where(SITE == "rome", np.where(ILL, "1.0", "2.0"), np.where(AGE > 50, "1", "2"))
    found = data_of(kind=kind)
    assert found.table.columns[-1] == Encoder("kind", categories=("1", "2"))
    ones = [int((kind == text).sum()) for text in ("1.0", "1")]
    said = f'"1.0" ({ones[0]} rows, at rome)'
    assert said in found.note
    assert f'"1" ({ones[1]} rows, at bonn, lyon, oslo)' in found.note
    assert 'in the column "kind" these are one category: ' in found.note
    assert not found.warnings
    both = np.concatenate([found.train.x, found.test.x])[:, 1:]
    assert (both.sum(1) == 1).all()  # every spelling has its category


def test_spellings_that_may_be_different_stay_different_and_are_a_warning() -> None:
    answer = np.where(SITE == "rome", "Yes ", np.where(AGE > 50, "yes", "no"))
    code = np.where(SITE == "oslo", "01", np.where(ILL, "1", "2"))
    found = data_of(kind_of_answer=answer, kind_code=code)
    assert [encoder.categories for encoder in found.table.columns[1:]] == [
        ("Yes ", "no", "yes"),
        ("01", "1", "2"),
    ]
    first, second = found.warnings
    assert 'the column "kind_of_answer" has as different categories ' in first
    assert '"Yes " (50 rows, at rome)' in first
    assert "write them alike in the file" in first
    assert '"01" (50 rows, at oslo)' in second
    assert '"1" (' in second


def test_versions_are_no_whole_numbers() -> None:
    version = np.where(SITE == "rome", "1.0", np.where(AGE > 50, "1", "1.5"))
    found = data_of(kind=version)
    assert found.table.columns[-1].categories == ("1", "1.0", "1.5")
    assert '"1.0" (50 rows, at rome)' in found.warnings[0]
    assert Encoder("version", categories=("1", "1.5")).places(["1.0", "1.5"]).tolist() == [-1, 1]


@pytest.mark.parametrize("categories", [("1", "2"), ("1.0", "2.0")])
def test_a_further_row_may_have_the_other_spelling(categories: tuple[str, ...]) -> None:
    places = Encoder("kind", categories=categories).places(["2.0", "2", "2.", 2, 2.0, "02", "x"])
    assert places.tolist() == [1, 1, 1, 1, 1, -1, -1]


def test_classes_and_clients_in_two_spellings_are_named_too() -> None:
    site = np.where(np.arange(N) % 2, "1", "01")
    found = from_tables(
        [
            DataTable.of(
                {"age": AGE, "site": site, "ill": np.where(ILL, "yes", np.where(AGE > 50, "No", "no"))}
            )
        ],
        "t",
        target="ill",
        client="site",
    )
    assert (
        'groups that differ only in capital letters, spaces or zeros, to make alike if they are the same: "01", "1"'
        in found.note
    )
    assert '"No", "no"' in found.note


# 2. Copies


def repeated(columns: dict[str, Any], test: int = 50, numbers: Sequence[int] | None = None) -> Any:
    """The answer for rows of one site, the last of which are test."""
    count = len(next(iter(columns.values())))
    rows = doubts.AllRows(
        DataTable.of(columns),
        np.arange(count) if numbers is None else np.array(numbers),
        np.zeros(count),
        np.zeros(count, np.int64),
        (),
        np.arange(count) >= count - test,
        "regression",
    )
    return doubts.repeated_rows(rows)


def test_copies_are_counted_named_and_those_of_train_rows_in_the_test_too() -> None:
    values = GENERATOR.normal(size=(2, N))
    values[:, 10], values[:, 11], values[:, 199] = values[:, 3], values[:, 3], values[:, 7]
    answer = repeated({"a": values[0], "b": values[1]})
    assert answer == RepeatedRows(3, N, 1, 50, ((4, 11, 12), (8, 200)), True, False)
    assert answer.text == (
        "3 of 200 rows are copies of another row (such as rows 4 and 11 and 12, 8 and 200), and 1 of 50 test rows are "
        "copies of a train row, so that the test also rewards memory; leave copies out of the file, unless they "
        "are different cases"
    )
    assert repeated({"a": np.arange(N)}) is None


def test_equal_rows_of_a_table_with_few_values_are_a_note_and_no_warning() -> None:
    columns = {"a": GENERATOR.integers(0, 5, N), "b": GENERATOR.integers(0, 5, N)}
    answer = repeated(columns)
    pairs = [(int(a), int(b)) for a, b in zip(*columns.values(), strict=True)]
    assert answer.repeats == N - len(set(pairs))
    assert not answer.are_copies
    assert answer.in_test == sum(pair in pairs[:150] for pair in pairs[150:])
    found = from_tables([DataTable.of({**columns, "ill": ILL})], "t", target="ill")
    assert not found.warnings
    assert "this may be chance" in found.note


def test_columns_that_follow_from_each_other_do_not_make_chance_improbable() -> None:
    town = GENERATOR.integers(0, 40, 2000)
    columns = {f"of the town {n}": GENERATOR.permutation(40)[town] for n in range(5)} | {"town": town}
    assert not repeated({**columns, "age": GENERATOR.integers(0, 80, 2000)}).are_copies


def test_a_copy_at_another_site_is_another_case() -> None:
    age, ill = AGE.copy(), ILL.copy()
    age[60], ill[60] = age[3], ill[3]  # oslo, rome
    assert not data_of(age=age, ill=ill).warnings
    age[5], ill[5] = age[3], ill[3]
    (warning,) = data_of(age=age, ill=ill, weight=age * 2 + GENERATOR.normal(size=N) * 0).warnings
    assert warning.startswith("1 of 200 rows are copies of another row of their site (such as rows 4 and 6)")


def test_the_same_text_twice_is_a_copy() -> None:
    texts = [f"text number {n}" for n in range(N - 1)] + ["text number 0"]
    topics = ["a", "b"] * (N // 2 - 1) + ["a", "a"]
    table = DataTable.of({"text": texts, "topic": topics})
    (warning,) = from_tables([table], "t", target="topic", text="text").warnings
    assert warning.startswith("1 of 200 rows are copies of another row (such as rows 1 and 200)")


def test_rows_are_not_named_where_others_were_left_out_before() -> None:
    columns = {"age": [1.0, *AGE, AGE[0]], "gap": [None, *range(N), 0], "ill": [0, *ILL, ILL[0]]}
    (warning,) = from_tables([DataTable.of(columns)], "t", target="ill", missing="drop").warnings
    assert warning.startswith("1 of 201 rows are copies of another row")
    assert "such as" not in warning


# 5. Patients


def test_a_column_that_looks_like_a_patient_names_the_option() -> None:
    patient = np.empty(N, np.int64)
    for number, site in enumerate(np.unique(SITE)):
        rows = np.flatnonzero(site == SITE)
        patient[rows] = 1000 * number + np.arange(len(rows)) // 2
    (warning,) = data_of(patient=patient).warnings
    assert warning.startswith('the column "patient" looks like a patient\'s number: ')
    assert " in 200 rows, each at one client alone; if so, add --group patient" in warning
    assert not data_of(value=patient % 1000).warnings  # the same numbers at two sites say nothing
    assert not data_of(patient=patient // 10).warnings  # a ward


# 6. Numbers of patients and cases


@pytest.mark.parametrize(
    "name",
    [
        "patient_id",
        "PatientID",
        "PID",
        "Fallnummer",
        "fall_nr",
        "mrn",
        "id",
        "Pat.-Nr.",
        "case no",
        "Patient",
    ],
)
@pytest.mark.parametrize("rows_each", [1, 2])
def test_a_number_of_a_patient_is_doubted_at_one_site_too(name: str, rows_each: int) -> None:
    count = 60
    number = 4_000_000 + np.arange(count) // rows_each
    for values in (number, [f"P{one}" for one in number]):
        rows = {
            name: values,
            "age": [20 + n % 41 for n in range(count)],
            "ill": [n % 2 for n in range(count)],
        }
        with on_command_line():
            data = from_tables([DataTable.of(rows)], "one site", target="ill")
        (warning,) = [warning for warning in data.warnings if "number of patients" in warning]
        assert warning.startswith(
            f'the column "{name}" looks like a number of patients or cases: {count // rows_each} values in 60 rows'
        )
        assert f"data.drop={name}" in warning.replace("'", "")
        assert ("--group" in warning) == (rows_each > 1)
        assert "few rows share" not in data.note


@pytest.mark.parametrize(
    "name", ["age", "pid_count", "idle", "covid", "patients", "fallen", "number", "glucose"]
)
def test_other_names_are_no_numbers_of_patients(name: str) -> None:
    table = DataTable.of({name: np.arange(60), "ward": [n % 3 for n in range(60)]})
    assert identifiers(table) == []


def test_a_patient_id_with_many_rows_each_is_a_ward() -> None:
    assert identifiers(DataTable.of({"patient_id": np.arange(60) // 6})) == []


# 3. Giveaways


def test_a_column_that_gives_the_target_away_is_a_warning_with_what_to_do() -> None:
    flipped = np.where(np.arange(N) == 7, 1 - ILL, ILL)
    for leak in (np.where(ILL, "sick", "well"), ILL * 2.5 + 1, ILL * 10 + GENERATOR.random(N), flipped):
        (warning,) = data_of(diagnosis=leak).warnings
        assert warning.startswith('the column "diagnosis" alone predicts the target "ill" (')
        assert warning.endswith("leave it out with --set data.drop=diagnosis")
    assert not data_of(good=np.where(GENERATOR.random(N) < 0.9, ILL, 1 - ILL)).warnings


def test_a_giveaway_must_be_one_at_every_site() -> None:
    at_three = np.where(SITE == "rome", GENERATOR.permutation(ILL), ILL)
    assert not data_of(diagnosis=at_three).warnings


def test_a_giveaway_of_values() -> None:
    rows: dict[str, Any] = {
        "pounds": AGE * 2.2046,
        "log": np.log(AGE),
        "noisy": AGE + GENERATOR.normal(size=N) * 5,
    }
    found = data_of(target="age", **rows)
    assert [warning.split('"')[1] for warning in found.warnings] == ["pounds", "log"]
    assert "of its variance" in found.warnings[0]


def test_identifiers_and_the_rarest_class_give_nothing_away() -> None:
    assert not data_of(value=GENERATOR.permutation(N)).warnings
    rare = np.where(np.arange(N) % 60 == 0, 1, 0)  # four rows are too few to judge
    assert not data_of(target="rare", rare=rare, same=np.where(rare, "a", "b")).warnings


def test_the_text_of_a_giveaway_rounds_down() -> None:
    assert "(99.9 % of the errors" in Giveaway("a", "b", 0.99999, "classification").text


def test_a_correlation_of_95_percent_is_doubted_and_so_is_a_name() -> None:
    noise = GENERATOR.normal(size=N)
    nearly = AGE + 3 * noise  # r = .96
    assert data_of(target="age", total=nearly).warnings
    called = AGE + 8 * noise  # r = .78
    assert not data_of(target="age", total=called).warnings
    (warning,) = data_of(target="age", total_age=called).warnings
    assert '"total_age" alone predicts the target "age"' in warning
    assert not data_of(target="age", mother_age=noise).warnings


def test_a_function_of_the_survival_time_is_doubted_and_so_is_one_of_the_event() -> None:
    days = GENERATOR.exponential(100, N).round(1) + 1
    seen = (GENERATOR.random(N) < 0.6).astype(int)
    rows = {"age": AGE, "days": days, "seen": seen, "hospital": SITE}

    def warnings(**columns: Any) -> list[str]:
        table = DataTable.of(rows | columns)
        how: dict[str, Any] = {"target": "days", "event": "seen", "client": "hospital", "kind": "survival"}
        return list(from_tables([table], "t", **how).warnings)

    assert not warnings(marker=-np.log(days) + GENERATOR.normal(size=N))
    for leak in (1000 / days, np.log(days) + 0.1 * GENERATOR.normal(size=N), days**2):
        (warning,) = warnings(visits=leak)
        assert '"visits" alone tells the time of survival' in warning
    (warning,) = warnings(cause=np.where(seen, "heart", "none"))
    assert '"cause" alone predicts the target "seen"' in warning


# 7. and 8. Numbers far away, and other units


def test_a_few_numbers_far_from_all_others_are_doubted() -> None:
    far = np.where(np.arange(N) % 100 == 3, 999_999.0, AGE)
    (warning,) = data_of(weight=far).warnings
    assert '"weight" has 2 of 200 numbers far from all others (999999)' in warning
    assert "leave these cells empty" in warning
    for usual in (np.exp(2 * GENERATOR.normal(size=N)), GENERATOR.integers(0, 3, N), 1e6 + AGE):
        assert not data_of(weight=usual).warnings


def test_a_site_in_another_unit_is_doubted() -> None:
    glucose = np.where(SITE == "oslo", 18 * AGE, AGE + GENERATOR.normal(size=N))
    (warning,) = data_of(glucose=glucose).warnings
    assert '"glucose" may have another unit at oslo: its numbers there are 17' in warning or "18" in warning
    higher = np.where(SITE == "oslo", AGE + 60, AGE + GENERATOR.normal(size=N))
    assert not data_of(glucose=higher).warnings


# 4. Constant columns


def test_a_constant_column_is_left_out_and_named() -> None:
    at_one_site = np.where(SITE == "rome", 1.0, AGE)
    found = data_of(unit=["mg"] * N, version=np.full(N, 3), partly=at_one_site)
    assert [encoder.name for encoder in found.table.columns] == ["age", "partly"]
    assert "left out, as all rows have one value: unit, version" in found.note


def test_a_value_beside_missing_ones_is_not_constant() -> None:
    smokes = np.where(AGE > 50, "yes", "")
    table = DataTable.of({"age": AGE, "smokes": smokes, "empty": [None] * N, "ill": ILL})
    found = from_tables([table], "t", target="ill", missing="fill")
    assert [encoder.name for encoder in found.table.columns] == ["age", "smokes"]
    assert "left out, as all rows have one value: empty" in found.note


def test_a_table_of_constant_columns_is_an_error() -> None:
    with pytest.raises(DataError, match=r"every column has one value in all rows \(unit\): nothing can be"):
        from_tables([DataTable.of({"unit": ["mg"] * N, "ill": ILL})], "t", target="ill")


# 6. Sites


def test_a_column_that_looks_like_a_site_is_named_where_no_client_is() -> None:
    (warning,) = data_of(client="").warnings
    assert warning.startswith(
        'the column "hospital" looks like a site: 4 values, each in 50 rows in the median'
    )
    assert "add --client hospital" in warning
    assert "--set data.drop=hospital" in warning
    assert not data_of(client="hospital").warnings


@pytest.mark.parametrize(
    "name", ["site", "Site_ID", "schoolName", "CENTRE", "patient id", "store.no", "clients"]
)
def test_names_of_sites(name: str) -> None:
    assert site_column(DataTable.of({"age": AGE, name: SITE})) == SiteColumn(name, 4, 50, ())


@pytest.mark.parametrize(
    "name", ["hospital_beds", "device_type", "stored", "user_age", "sited", "opposite", ""]
)
def test_names_of_others(name: str) -> None:
    assert site_column(DataTable.of({"age": AGE, name: SITE})) is None


def test_a_site_has_several_rows_and_there_are_several() -> None:
    assert site_column(DataTable.of({"patient": np.arange(N)})) is None
    assert site_column(DataTable.of({"patient": np.arange(N) // 2})) is None
    assert site_column(DataTable.of({"hospital": ["one"] * N})) is None
    both = site_column(DataTable.of({"patient": np.arange(N) // 4, "hospital": SITE}))
    assert both is not None
    assert both.column == "hospital"


def test_blocks_of_rows_that_share_values_are_sites_whatever_their_name() -> None:
    block = np.arange(N) // 10
    columns = {"k": 100 + block, "size": GENERATOR.integers(0, 9, 20)[block], "town": (block % 3).astype(str)}
    table = {"age": AGE, **columns, "sex": GENERATOR.integers(0, 2, N)}
    assert site_column(DataTable.of(table)) == SiteColumn("k", 20, 10, ("size", "town"))
    mixed = GENERATOR.permutation(N)
    assert (
        site_column(DataTable.of({name: np.asarray(values)[mixed] for name, values in table.items()})) is None
    )


def test_beside_a_text_the_site_is_a_column_that_is_not_used() -> None:
    table = {
        "text": [f"text {n}" for n in range(N)],
        "desk": SITE,
        "topic": np.where(ILL, "a", "b"),
        "tags": [[1]] * N,
    }
    with on_command_line():
        (warning,) = from_tables([DataTable.of(table)], "t", target="topic", text="text").warnings
    assert 'the column "desk" looks like a site' in warning


# All


@pytest.mark.parametrize("name", ["digits", "wine", "breast_cancer", "diabetes"])
def test_the_data_sets_that_come_with_copfl_raise_no_doubts(name: str) -> None:
    assert load(name).warnings == ()


def test_describe_and_check_say_what_a_run_says(tmp_path: Path) -> None:
    lines = ["age,hospital,ill", *(f"{a},{s},{i}" for a, s, i in zip(AGE, SITE, ILL, strict=True))]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    found = load(tmp_path / "t.csv", target="ill")
    assert f"\nwarnings  {found.warnings[0]}\n" in f"{overview(found)}\n"
    assert check(tmp_path / "t.csv", target="ill").endswith(found.warnings[0])
