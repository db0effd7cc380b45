"""No test row, copy of one, row that belongs to one, or later row is trained on, however the data are loaded."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from copfl.data.arrays import from_arrays, from_torch, joined
from copfl.data.clients.partition import hold_out, validation_part, with_validation
from copfl.data.clients.schemes import SCHEMES
from copfl.data.contract.agreed_encoders import Encoders
from copfl.data.contract.contract import Contract
from copfl.data.contract.statistics import ContractQuestion, site_of
from copfl.data.copies import copies, row_hashes
from copfl.data.held_out import drawn, latest
from copfl.data.samples import Dataset, Samples
from copfl.data.sets.datasets import load
from copfl.data.sets.stored import read_stored, stored
from copfl.data.tables.columns import DataTable, cell_hashes, column_of, times_of
from copfl.data.tables.tables import from_tables
from copfl.errors import DataError
from copfl.rivals.estimators import folds_of
from copfl.settings.user_code import as_dataset

law = settings(max_examples=10, deadline=None)
Rows = dict[str, NDArray[Any]]


def rows_of(seed: int, sites: int = 3, rows: int = 40, repeated: float = 0.3) -> Rows:
    """A table of sites' patients with visits on days, in which some rows are there several times."""
    rng = np.random.default_rng(seed)
    count = sites * rows
    table = {
        "site": np.repeat([f"s{n}" for n in range(sites)], rows),
        "patient": rng.integers(0, rows // 3, count),
        "day": np.array([f"2024-{m:02d}-{d:02d}" for m, d in rng.integers(1, 13, (count, 2))]),
        "dose": rng.normal(size=count).round(6),
        "ward": rng.choice(["a", "b", "c"], count),
        "ill": rng.choice(["no", "yes"], count, p=[0.7, 0.3]),
    }
    order = np.arange(count)
    for row in np.flatnonzero(rng.random(count) < repeated):
        order[row] = row // rows * rows + rng.integers(rows)  # of the same site
    return {name: cells[order] for name, cells in table.items()}


def of_site(rows: Rows, name: str) -> Rows:
    return {column: cells[rows["site"] == name] for column, cells in rows.items() if column != "site"}


def dataset_of(rows: Rows, **options: Any) -> Dataset:
    client = "site" if "site" in rows else ""
    return from_tables([DataTable.of(rows)], "t", target="ill", client=client, **options)


def site_of_each(samples: Samples) -> NDArray[np.int64]:
    return np.zeros(len(samples), np.int64) if samples.group is None else samples.group


def contents(samples: Samples, dataset: Dataset) -> list[tuple[Any, ...]]:
    """Each sample as its site and its values: two are equal if they are copies."""
    names = ["all"] * len(samples) if samples.group is None else [dataset.groups[g] for g in samples.group]
    labels = [dataset.classes[y] for y in samples.y]
    return [
        (n, tuple(x.ravel().round(4).tolist()), y) for n, x, y in zip(names, samples.x, labels, strict=True)
    ]


def assert_apart(dataset: Dataset) -> None:
    """No copy of a test sample, or sample that belongs to one, is for training, and no site trains on its future."""
    train, test = dataset.train, dataset.test
    assert len(train)
    assert len(test)
    if train.unit is not None and test.unit is not None:
        assert not set(train.unit) & set(test.unit)
    if train.time is not None and test.time is not None:
        for site in np.unique(test.group if test.group is not None else [0]):
            chosen = [np.full(len(s), True) if s.group is None else s.group == site for s in (train, test)]
            assert train.time[chosen[0]].max(initial=-np.inf) < test.time[chosen[1]].min()
    if (train.time is None and dataset.table is None) or (
        dataset.table is not None and not dataset.table.group
    ):
        assert not set(contents(train, dataset)) & set(contents(test, dataset))


# The law


WAYS: dict[str, dict[str, str]] = {
    "plain": {"drop": "patient,day"},
    "group": {"group": "patient", "drop": "day"},
    "time": {"time": "day", "drop": "patient"},
    "group and time": {"group": "patient", "time": "day"},
}


@law
@given(st.integers(0, 10_000), st.sampled_from(list(WAYS)), st.integers(0, 3))
def test_a_table_is_divided_between_what_does_not_belong_together(seed: int, way: str, split: int) -> None:
    rows = rows_of(seed)
    data = dataset_of(rows, **WAYS[way], split=split)
    assert_apart(data)
    assert_apart(dataset_of(of_site(rows, "s0"), **WAYS[way], split=split))
    left_out = len(rows["site"]) - len(data.train) - len(data.test)
    assert left_out == 0 or way == "group and time"
    tested = np.bincount(site_of_each(data.test), minlength=3) / 40
    assert (tested >= (0.02 if "group" in way else 0.1)).all()
    assert (tested <= 0.45).all()


@law
@given(st.integers(0, 10_000), st.sampled_from(list(WAYS)), st.sampled_from([0.1, 0.3]))
def test_what_is_held_out_of_training_does_not_divide_what_belongs_together(
    seed: int, way: str, fraction: float
) -> None:
    data = dataset_of(rows_of(seed), **WAYS[way])
    whole = SCHEMES["by_group"](data, 3, seed)
    for held_out in (hold_out(whole, fraction, data, seed), with_validation(whole, fraction, data, seed)):
        others = held_out.validation or held_out.test
        assert any(map(len, others))
        for train, other in zip(held_out.train, others, strict=True):
            sides = [data.train.take(part) for part in (train, other)]
            if sides[0].unit is not None and sides[1].unit is not None:
                assert not set(sides[0].unit) & set(sides[1].unit)
            if sides[0].time is not None and sides[1].time is not None and len(other):
                assert sides[0].time.max() < sides[1].time.min()
    split = with_validation(
        SCHEMES["iid"](data, 4, seed), fraction, data, seed
    )  # patients at several clients
    trained, tried = np.concatenate(split.train), np.concatenate(split.validation)
    if data.train.unit is not None:
        assert not set(data.train.unit[trained]) & set(data.train.unit[tried])


def of_npz(folder: Path, x: Any, y: Any) -> Dataset:
    np.savez(folder / "a.npz", x=x, y=y)
    return load(folder / "a.npz")


def of_csv(folder: Path, x: Any, y: Any) -> Dataset:
    lines = ["a,b,y", *(f"{a!r},{b!r},{c}" for (a, b), c in zip(x.tolist(), y.tolist(), strict=True))]
    (folder / "a.csv").write_text("\n".join(lines))
    return load(folder / "a.csv", target="y")


def of_jsonl(folder: Path, x: Any, y: Any) -> Dataset:
    lines = [json.dumps({"a": a, "b": b, "y": c}) for (a, b), c in zip(x.tolist(), y.tolist(), strict=True)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return load(folder / "a.jsonl", target="y")


def of_parquet(folder: Path, x: Any, y: Any) -> Dataset:
    frame(x, y).to_parquet(folder / "a.parquet")
    return load(folder / "a.parquet", target="y")


def of_leaf(folder: Path, x: Any, y: Any) -> Dataset:
    """A file of two users, without a test part of their own."""
    halves = {"ann": slice(None, 60), "bob": slice(60, None)}
    of_users = {name: {"x": x[rows].tolist(), "y": y[rows].tolist()} for name, rows in halves.items()}
    content = {"users": [*halves], "num_samples": [60, 60], "user_data": of_users}
    (folder / "a.json").write_text(json.dumps(content))
    return load(folder / "a.json")


def of_hub(folder: Path, x: Any, y: Any) -> Dataset:
    """A folder, which the package of the hub reads as it reads the hub; it has no test part."""
    pytest.importorskip("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        (folder / "hub").mkdir()
        frame(x, y).to_json(folder / "hub" / "train.jsonl", orient="records", lines=True)
        return load(f"hf:{folder / 'hub'}", target="y")


def frame(x: Any, y: Any) -> pd.DataFrame:
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y})


def of_test_file(folder: Path, x: Any, y: Any) -> Dataset:
    """The last third is a file of test rows; some of them are train rows, too."""
    files = [folder / "train.csv", folder / "test.csv"]
    for file, some in zip(files, (slice(None, -40), slice(-40, None)), strict=True):
        lines = [f"{a!r},{b!r},{c}" for (a, b), c in zip(x[some].tolist(), y[some].tolist(), strict=True)]
        file.write_text("\n".join(["a,b,y", *lines]))
    found = load(files[0], target="y", test=str(files[1]))
    assert len(found.test) == 40
    assert "are left out of training" in found.warnings[0]
    return found


LOADED: dict[str, Callable[[Path, Any, Any], Dataset]] = {
    "arrays": lambda _, x, y: from_arrays(x, y),
    "arrays of clients": lambda _, x, y: from_arrays(x, y, group=np.arange(len(y)) // 30),
    "arrays with a test part": lambda _, x, y: from_arrays(x[:-40], y[:-40], x[-40:], y[-40:]),
    "several arrays": lambda _, x, y: from_arrays({"p": x[:, :1], "q": x[:, 1:]}, y),
    "torch": lambda _, x, y: from_torch(list(zip(x, y, strict=True))),
    "a data set per client": lambda _, x, y: joined(
        [from_arrays(x[:60], y[:60]), from_arrays(x[60:], y[60:])]
    ),
    ".npz": of_npz,
    ".csv": of_csv,
    ".parquet": of_parquet,
    "a data frame": lambda _, x, y: as_dataset(frame(x, y), target="y"),
    "data frames of sites": lambda _, x, y: as_dataset(
        {"north": frame(x[:60], y[:60]), "south": frame(x[60:], y[60:])}, target="y"
    ),
    "a data frame and its targets": lambda _, x, y: as_dataset((frame(x, y)[["a", "b"]], frame(x, y)["y"])),
    "LEAF": of_leaf,
    "the hub": of_hub,
    ".jsonl": of_jsonl,
    "a file of test rows": of_test_file,
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", LOADED)
def test_copies_are_on_one_side_however_the_data_are_loaded(way: str, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(120, 2)).round(5), rng.integers(0, 3, 120)
    for row in range(0, 120, 4):
        x[row], y[row] = x[row // 60 * 60 + (row + 13) % 60], y[row // 60 * 60 + (row + 13) % 60]
    data = LOADED[way](tmp_path, x, y)
    if isinstance(data.train.x, dict):
        data = replace(data, train=together(data.train), test=together(data.test))
    assert not set(contents(data.train, data)) & set(contents(data.test, data))
    assert data.train.unit is not None
    if way != "a file of test rows" and "test part" not in way:
        assert 15 <= len(data.test) <= 33


def together(samples: Samples) -> Samples:
    return replace(samples, x=np.concatenate(list(samples.x.values()), axis=1))


def test_arrays_without_copies_keep_their_test_samples() -> None:
    data = from_arrays(np.arange(50.0).reshape(25, 2), np.zeros(25, np.int64) + np.arange(25) % 2)
    assert data.test.x[:, 0].tolist() == [16.0, 18.0, 36.0, 38.0]
    assert data.train.unit is None


def test_where_all_samples_are_copies_of_test_samples_they_stay_and_a_warning_says_so() -> None:
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10) % 2
    data = from_arrays(x, y, x, y)
    assert len(data.train) == 10
    assert "so they stay, and the test also rewards memory" in data.warnings[0]


# One file of all sites, and a file per site


@pytest.mark.job
@law
@given(st.integers(0, 10_000), st.sampled_from(list(WAYS)))
def test_one_file_of_all_sites_has_the_test_rows_of_a_file_per_site(seed: int, way: str) -> None:
    rows = rows_of(seed)
    whole = dataset_of(rows, **WAYS[way])
    encoders = Encoders.of(whole.table)
    for number, name in enumerate(whole.groups):
        own = of_site(rows, name)
        shuffled = np.random.default_rng(seed).permutation(len(own["dose"]))
        mixed = {column: own[column][shuffled] for column in reversed(list(own))}
        for table in (own, mixed):
            alone = dataset_of(table, **WAYS[way])
            agreed = encoders.dataset_of([DataTable.of(table)], name)
            for side in ("train", "test"):
                part = getattr(whole, side)
                wanted = sorted(c[1:] for c in contents(part.take(part.group == number), whole))
                assert sorted(c[1:] for c in contents(getattr(agreed, side), agreed)) == wanted
                assert len(getattr(alone, side)) == len(wanted)


def test_a_node_gives_sums_of_the_rows_that_it_trains_on(tmp_path: Path) -> None:
    rows = rows_of(3)
    whole = dataset_of(rows, group="patient", time="day")
    contract = Contract.of(whole)
    assert contract is not None
    assert (contract.group, contract.time) == ("patient", "day")
    assert Contract.read(contract.as_json()) == contract
    opened = contract.replaced({"dose": {"mean": None, "deviation": None}})
    own = of_site(rows, "s1")
    file = tmp_path / "s1.csv"
    file.write_text(
        "\n".join([",".join(own), *map(",".join, zip(*(map(str, c) for c in own.values()), strict=True))])
    )
    site = site_of(opened, [file])
    assert [column.name for column in ContractQuestion.of(opened).numbers] == ["dose"]
    trained = whole.train.take(site_of_each(whole.train) == whole.groups.index("s1"))
    mean, std = whole.table.columns[0].mean, whole.table.columns[0].std
    np.testing.assert_allclose(np.sort(site.values["dose"]), np.sort(trained.x[:, 0] * std + mean), atol=1e-5)


def test_a_validation_part_is_that_of_a_node() -> None:
    data = dataset_of(rows_of(5), group="patient", drop="day")
    split = with_validation(SCHEMES["by_group"](data, 3, 0), 0.25, data, 7)
    for client, name in enumerate(data.groups):
        own = Encoders.of(data.table).dataset_of([DataTable.of(of_site(rows_of(5), name))], name).train
        kept, held_out = validation_part(own, own.y, 0.25, 7, client)
        np.testing.assert_array_equal(own.x[held_out], data.train.x[split.validation[client]])
        np.testing.assert_array_equal(own.x[kept], data.train.x[split.train[client]])


# By hand


def test_drawn_takes_whole_units_and_its_share_of_each_class() -> None:
    strata = np.repeat([0, 1], [40, 10])
    alone = drawn(strata, np.arange(50), np.arange(50), 10)
    assert np.flatnonzero(alone).tolist() == [*range(8), 40, 41]
    pairs = drawn(strata, np.arange(50) // 2, np.arange(50), 10)
    assert np.flatnonzero(pairs).tolist() == [*range(8), 40, 41]
    assert drawn(np.zeros(3, int), np.zeros(3, int), np.arange(3), 1).tolist() == [False] * 3
    assert drawn(np.arange(4), np.arange(4), np.array([3, 1, 0, 2]), 1).tolist() == [
        False,
        False,
        True,
        False,
    ]


def test_latest_takes_the_last_times_and_leaves_out_what_belongs_to_them() -> None:
    time, unit = np.array([5.0, 1, 2, 3, 4, 4]), np.array([0, 0, 2, 3, 4, 5])
    assert latest(time, unit, 1).test.tolist() == [True, False, False, False, False, False]
    assert latest(time, unit, 1).train.tolist() == [False, False, True, True, True, True]
    assert latest(time, unit, 3).test.sum() == 3  # those of one time together
    assert not latest(np.ones(4), np.arange(4), 1).test.any()


def test_cells_are_known_whatever_type_their_file_gives_them() -> None:
    numbers = [
        cell_hashes(column_of(cells)) for cells in ([1, 2, None], [1.0, 2.0, None], ["1", "2.0", None])
    ]
    mixed = cell_hashes(column_of(["1", "2", None, "x"]))
    for one, other in itertools.pairwise([*numbers, mixed[:3]]):
        np.testing.assert_array_equal(one, other)
    assert cell_hashes(column_of([True, False])).tolist() == cell_hashes(column_of([1, 0])).tolist()
    assert len(set(mixed)) == 4


def test_times_are_numbers_or_dates() -> None:
    assert times_of("t", column_of([3, 1])).tolist() == [3, 1]
    days = times_of("t", column_of(["2024-03-31", "2024-03-31T12:00", "2023-01-01"]))
    assert days[2] < days[0] < days[1]
    days = times_of("t", column_of(["31.03.2024", "1.4.24", None, "31.03.2024"]))
    assert days[0] == days[3] < days[1]


def test_folds_keep_units_together() -> None:
    unit = np.repeat(np.arange(12), 5)
    folds = folds_of(60, 0, unit)
    assert all(len(set(folds[unit == u])) == 1 for u in range(12))
    assert len(set(folds)) > 1


def test_rows_that_are_alike_by_chance_are_no_copies() -> None:
    few = np.random.default_rng(0).integers(0, 4, (200, 2))
    site = np.zeros(200, np.int64)
    columns = [column.astype(np.uint64) for column in few.T]
    assert (copies(row_hashes(few), columns, site) == np.arange(200)).all()
    assert (copies(row_hashes(few), columns, site, is_text=True) != np.arange(200)).any()


@pytest.mark.job
@law
@given(st.integers(0, 10_000))
def test_rows_that_are_alike_by_chance_are_drawn_one_by_one(seed: int) -> None:
    """Else the test rows of inputs were of the class of which no such row is left to train on, at every site."""
    rng = np.random.default_rng(seed)
    few = {name: rng.integers(0, 3, 2_000) for name in ("age", "dose")} | {
        "ill": rng.choice(["no", "yes"], 2_000)
    }
    few["site"] = np.repeat([f"s{n}" for n in range(20)], 100)

    def cells(samples: Samples) -> Counter[tuple[float, ...]]:
        return Counter(map(tuple, np.column_stack([samples.x, samples.y]).tolist()))

    data = dataset_of(few)
    train, test = cells(data.train), cells(data.test)
    for cell in train | test:  # about 111 rows
        drawn_by_chance = (train[cell] + test[cell]) / 5
        assert abs(test[cell] - drawn_by_chance) < 4.5 * np.sqrt(0.8 * drawn_by_chance)
    shuffled = rng.permutation(2_000)
    assert cells(dataset_of({name: column[shuffled] for name, column in few.items()}).test) == test
    own = dataset_of(of_site(few, "s3"))
    of_s3 = data.test.take(site_of_each(data.test) == list(data.groups).index("s3"))
    assert len(own.test) == len(of_s3)


def test_units_and_times_are_stored(tmp_path: Path) -> None:
    data = replace(dataset_of(rows_of(0), group="patient", time="day"), table=None)
    content = stored(data)
    assert content is not None
    (tmp_path / "data.npz").write_bytes(content)
    back = read_stored(tmp_path / "data.npz")
    for side, other in ((data.train, back.train), (data.test, back.test)):
        np.testing.assert_array_equal(side.unit, other.unit)
        np.testing.assert_array_equal(side.time, other.time)


def test_a_column_has_one_use() -> None:
    with pytest.raises(DataError, match='"patient" is named as group and as time'):
        dataset_of(rows_of(0), group="patient", time="patient")
    with pytest.raises(DataError, match='no column "patiant"; did you mean "patient"'):
        dataset_of(rows_of(0), group="patiant")
