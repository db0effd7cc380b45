"""Federations that exist by nature: tables whose rows belong to a hospital, a school, a firm, an animal.

`natural` is a data set by name, so that every command can train on it:

    copfl run -d studies.tables.federations:natural --set data.federation=dietox --set data.seed=3
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.data.samples import Dataset
from copfl.data.sets import published
from copfl.data.tables.columns import DataTable, coded
from copfl.data.tables.files import read_table
from copfl.data.tables.tables import from_tables
from copfl.errors import UsageError, unknown

TESTED = 0.3  # of each site's rows
Columns = dict[str, NDArray[Any]]


class Federation(NamedTuple):
    title: str
    source: str
    table: Callable[[Path], DataTable]  # of the folder that the user names
    client: str
    target: str
    kind: str = "regression"
    drop: str = ""
    categories: str = ""
    needs_folder: bool = True


def natural(data_dir: Path | None, *, federation: str, seed: int = 0) -> Dataset:
    """One of FEDERATIONS, of each site 30 % of the rows for testing

    Args:
        data_dir: The folder of the files; some federations need none.
        federation: A name of FEDERATIONS.
        seed: Of the choice of the test rows.
    """
    if federation not in FEDERATIONS:
        raise unknown("federation", federation, FEDERATIONS)
    chosen = FEDERATIONS[federation]
    folder = data_dir or Path(os.environ.get("COPFL_DATA", ""))
    if chosen.needs_folder and not (folder / "natural").is_dir():
        raise UsageError(
            f'"{federation}" reads files of {folder}/natural; name the folder above it with --data-dir'
        )
    table = chosen.table(folder / "natural")
    is_test = rows_for_testing(coded(table.columns[chosen.client]).codes, seed)
    return from_tables(
        [table.take(~is_test), table.take(is_test)],
        federation,
        target=chosen.target,
        client=chosen.client,
        drop=chosen.drop,
        categories=chosen.categories,
        missing="fill",
        kind=chosen.kind,
    )


def rows_for_testing(sites: NDArray[np.int64], seed: int) -> NDArray[np.bool_]:
    """Which rows are for testing: TESTED of each site, drawn by the seed; one row at least is left to train on."""
    rng, is_test = np.random.default_rng(seed), np.zeros(len(sites), bool)
    for site in np.unique(sites):
        rows = np.flatnonzero(sites == site)
        is_test[rng.permutation(rows)[: min(round(TESTED * len(rows)), len(rows) - 1)]] = True
    return is_test


def _file(name: str) -> Callable[[Path], DataTable]:
    return lambda folder: read_table(folder / name)


def _heart(folder: Path) -> DataTable:
    return read_table(Path(published.__file__).parent / "embedded" / "heart.csv")


def _columns(table: DataTable) -> Columns:
    return {name: np.array(column.to_pylist()) for name, column in table.columns.items()}


def _intervals(folder: Path) -> DataTable:
    """The first interval of each patient: whether it ends with an infection."""
    columns = _columns(read_table(folder / "cgd.csv"))
    first = columns["enum"].astype(int) == 1
    return DataTable.of({name: values[first] for name, values in columns.items()})


def _brca(folder: Path) -> DataTable:
    """The patients with their region, and whether the event was seen."""
    split = _columns(read_table(folder / "tcga-brca" / "split.csv"))
    columns = _columns(read_table(folder / "tcga-brca" / "brca.csv"))
    region = {
        pid: str(fold).partition("_")[2] for pid, fold in zip(split["pid"], split["fold2"], strict=True)
    }
    known = np.array([pid in region for pid in columns["pid"]])
    columns = {name: values[known] for name, values in columns.items()}
    return DataTable.of({**columns, "region": np.array([region[pid] for pid in columns["pid"]])})


def _of_statsmodels(columns: Callable[[Any], Mapping[str, Any]], name: str) -> Callable[[Path], DataTable]:
    """A data set of statsmodels, as its columns."""

    def table(folder: Path) -> DataTable:
        module = importlib.import_module(f"statsmodels.datasets.{name}")
        return DataTable.of(columns(module.load_pandas().data))

    return table


def _with_statsmodels(path: str) -> Callable[[Path], DataTable]:
    """A file that comes with the tests of statsmodels."""

    def table(folder: Path) -> DataTable:
        import pandas

        with importlib.resources.as_file(importlib.resources.files("statsmodels") / path) as file:
            return DataTable.of(
                dict(pandas.read_csv(file, index_col=0))
            )  # R writes no name for the rows' numbers

    return table


def _births(data: Any) -> Mapping[str, Any]:
    """A row for every year and country; countries with all years, every second one."""
    years = [name for name in data.columns if name.isdigit()]
    full = data[data[years].notna().sum(axis=1) >= len(years) - 2].iloc[::2]
    long = full.melt("Country Name", years, "year", "births").dropna()
    return {"country": long["Country Name"], "year": long["year"].astype(int), "births": long["births"]}


def _smokers(data: Any) -> Mapping[str, Any]:
    """A row for every person of the eight tables."""
    counts = data.stack()
    cells = np.repeat(np.arange(len(counts)), counts.to_numpy())
    names = counts.index.get_level_values(1).str.split("_")
    smoking, cancer = (np.array([name[position] for name in names])[cells] for position in (1, 3))
    return {"city": counts.index.get_level_values(0).to_numpy()[cells], "smoking": smoking, "cancer": cancer}


MASS, MLM = "R package MASS", "R package mlmRev"
CLASSES = "classification"
FEDERATIONS: dict[str, Federation] = {
    "heart": Federation(
        "heart disease, hospitals",
        "UCI",
        _heart,
        "hospital",
        "disease",
        CLASSES,
        categories=",".join(published.HEART_CATEGORIES),
        needs_folder=False,
    ),
    "contraception": Federation(
        "contraception, districts",
        MLM,
        _file("contraception.csv"),
        "district",
        "use",
        CLASSES,
        "rownames,woman",
        "livch",
    ),
    "prenatal": Federation(
        "prenatal care, communities",
        MLM,
        _file("guprenat.csv"),
        "cluster",
        "prenat",
        CLASSES,
        "rownames,kid,mom",
    ),
    "infections": Federation(
        "first infection, hospitals",
        "R package survival",
        _intervals,
        "center",
        "status",
        CLASSES,
        "rownames,id,random,tstart,tstop,enum",
    ),
    "tumours": Federation(
        "breast cancer, regions", "TCGA, by FLamby", _brca, "region", "E", CLASSES, "pid,T"
    ),
    "smokers": Federation(
        "lung cancer, cities",
        "statsmodels",
        _of_statsmodels(_smokers, "china_smoking"),
        "city",
        "cancer",
        CLASSES,
        needs_folder=False,
    ),
    "pupils": Federation(
        "language, school classes",
        MASS,
        _file("nlschools.csv"),
        "class",
        "lang",
        drop="rownames",
        categories="COMB",
    ),
    "attainment": Federation(
        "attainment, secondary schools",
        MLM,
        _file("scotssec.csv"),
        "second",
        "attain",
        drop="rownames,primary",
    ),
    "attainment-primary": Federation(
        "attainment, primary schools", MLM, _file("scotssec.csv"), "primary", "attain", drop="rownames,second"
    ),
    "firms": Federation(
        "investment, firms",
        "statsmodels",
        _of_statsmodels(lambda data: data, "grunfeld"),
        "firm",
        "invest",
        needs_folder=False,
    ),
    "births": Federation(
        "births per woman, countries",
        "statsmodels",
        _of_statsmodels(_births, "fertility"),
        "country",
        "births",
        needs_folder=False,
    ),
    "pigs": Federation(
        "weight, pigs",
        "statsmodels",
        _with_statsmodels("regression/tests/results/dietox.csv"),
        "Pig",
        "Weight",
        drop="Litter",
        categories="Evit,Cu",
        needs_folder=False,
    ),
    "seizures": Federation(
        "seizures, patients",
        "statsmodels",
        _with_statsmodels("genmod/tests/results/epil.csv"),
        "subject",
        "y",
        drop="lbase,lage",
        needs_folder=False,
    ),
}
