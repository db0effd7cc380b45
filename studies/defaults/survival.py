"""What suits survival where nobody chose: python -m studies.defaults.survival --data-dir FOLDER [--splits N].

Two tables by site: TCGA-BRCA (`brca.csv` and `split.csv` of FLamby) and the trial of chronic granulomatous disease
(`cgd.csv` of R's package survival; the time until the first infection). A split draws other test patients.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from copfl.data.clients.schemes import SCHEMES
from copfl.settings.user_code import as_dataset
from copfl.tables import Table as Printed
from copfl.tables import as_markdown
from studies.published.table import Federation, Row, Table, run_row

ROUNDS = 30


class Way(NamedTuple):
    """How to train."""

    algorithm: str
    model: str
    batch: int
    lr: float

    @property
    def row(self) -> Row:
        settings: Mapping[str, Mapping[str, Any]] = {
            "algorithm": {"name": self.algorithm},
            "model": {"name": self.model},
            "optimizer": {"name": "adam", "lr": self.lr},
            "run": {"rounds": ROUNDS, "batch": self.batch},
        }
        return Row("", 0.0, settings, "c_index")


ALONE = Way("local", "linear", 128, 0.01)
WAYS = (
    ALONE,
    Way("fedavg_ft", "linear", 128, 0.01),
    Way("fedavg_ft", "linear", 8, 0.003),
    Way("ditto", "linear", 128, 0.01),
    Way("fedavg_ft", "mlp", 128, 0.003),
)


def brca(folder: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """The patients of six regions; those who were not followed at all are left out."""
    table = pd.read_csv(folder / "tcga-brca" / "split.csv").merge(
        pd.read_csv(folder / "tcga-brca" / "brca.csv"), on="pid"
    )
    table["region"] = table["fold2"].str.split("_").str[1]
    columns = {"target": "T", "event": "E", "client": "region"}
    return table[table["T"] > 0].drop(columns=["pid", "fold", "fold2"]), columns


def cgd(folder: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """The first row of each patient of thirteen hospitals."""
    table = pd.read_csv(folder / "cgd.csv").query("enum == 1")
    columns = {"target": "tstop", "event": "status", "client": "center"}
    return table.drop(columns=["rownames", "id", "random", "tstart", "enum", "hos.cat"]), columns


TABLES = {"cgd": cgd, "brca": brca}


def federation(table: pd.DataFrame, columns: Mapping[str, str], split: int) -> Federation:
    dataset = as_dataset(table, split=split, **columns)
    return Federation(dataset, SCHEMES["by_group"](dataset, len(dataset.groups), seed=0))


def measured(federations: Sequence[Federation], way: Way) -> np.ndarray[Any, Any]:
    """The mean over sites of the C-index, for each split."""
    empty = Table("", "", lambda folder: {}, {}, (), 1, "", "")
    return np.array([run_row(empty, way.row, one, [0])[0] for one in federations])


def main() -> None:
    parser = argparse.ArgumentParser("python -m studies.defaults.survival", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=10)
    chosen = parser.parse_args()
    rows = []
    for name, read in TABLES.items():
        table, columns = read(chosen.data_dir)
        federations = [federation(table, columns, split) for split in range(chosen.splits)]
        alone = np.zeros(0)
        for way in WAYS:
            values = measured(federations, way)
            alone = values if way == ALONE else alone
            gain = values - alone
            spread = gain.std(ddof=1) / np.sqrt(len(gain))
            rows.append([name, *map(str, way), f"{values.mean():.3f}", f"{gain.mean():+.3f} ({spread:.3f})"])
            print(rows[-1], flush=True)
    head = ("table", "algorithm", "model", "batch", "rate", "C-index", "to alone (deviation of the mean)")
    print(as_markdown(Printed("", head, rows)))


if __name__ == "__main__":
    main()
