"""FLamby's Fed-TCGA-BRCA: survival with breast cancer in six regions (Ogier du Terrail et al., NeurIPS 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from copfl.data.arrays import from_splits
from copfl.data.clients.partition import Partition
from copfl.data.samples import SURVIVAL
from copfl.errors import UsageError
from studies.published.flamby_heart import POOLED, adaptive, method
from studies.published.table import Federation, Row, Settings, Table

FILES = (
    "brca.csv",
    "split.csv",
)  # the columns of FLamby's fed_tcga_brca; of each patient the part and region
REGIONS = 6


def federations(data_dir: Path | None) -> Mapping[str, Federation]:
    """The regions, with the division of the source, and six that all have the training patients of all.

    Columns are as in its file; none is standardised. Patients who were censored at once are left out.
    """
    if data_dir is None or not all((data_dir / name).is_file() for name in FILES):
        raise UsageError(
            f"name the folder that has {' and '.join(FILES)} of FLamby's fed_tcga_brca with --data-dir FOLDER"
        )
    patients, division = (pd.read_csv(data_dir / name) for name in FILES)
    table = division.merge(patients, on="pid", validate="one_to_one")
    features = [name for name in table if name not in ("pid", "fold", "fold2", "E", "T")]

    def side(name: str) -> tuple[NDArray[np.float32], NDArray[np.float32], list[str]]:
        rows = table[table["fold2"].str.startswith(name)]
        regions = rows["fold2"].str.removeprefix(name).tolist()
        return rows[features].to_numpy(np.float32), rows[["T", "E"]].to_numpy(np.float32), regions

    dataset = from_splits(
        (side("train_"), side("test_")),
        kind=SURVIVAL,
        name="flamby tcga",
        groups=list(map(str, range(REGIONS))),
        leave_out=False,
    )
    train, test = (
        tuple(np.flatnonzero(samples.group == region) for region in range(REGIONS))
        for samples in (dataset.train, dataset.test)
    )
    pooled = Partition((np.sort(np.concatenate(train)),) * REGIONS, test, "flamby, pooled")
    return {
        "": Federation(dataset, Partition(train, test, "flamby")),
        POOLED: Federation(dataset, pooled),
    }


# 5 rounds; a 6th shows the common model that they gave.
GLOBAL, OWN = "c_index_global", "c_index"
ALONE: Settings = {
    "algorithm": {"name": "local", "epochs": 30},
    "optimizer": {"name": "adam", "lr": 0.1},
    "run": {"rounds": 1, "steps": 0},
}
TABLE = Table(
    title="FLamby, Fed-TCGA-BRCA: mean C-index of six regions",
    source="Ogier du Terrail et al., FLamby, NeurIPS 2022 (Datasets and Benchmarks); settings of its repository, "
    "flamby/config_tcga_brca.json and flamby/datasets/fed_tcga_brca/common.py",
    federations=federations,
    settings={
        "model": {"name": "linear"},
        # The source sorts by time and has no rule for ties; of hundreds of days few are the same in a batch.
        "task": {"ties": "breslow", "metrics": ["c_index"]},
        "run": {"rounds": 6, "steps": 100, "batch": 8},
    },
    rows=(
        Row("local", 0.689, ALONE, OWN),
        Row("pooled", 0.676, ALONE, OWN, POOLED),
        Row("FedAvg", 0.732, method("fedavg", 0.1), GLOBAL),
        Row("FedProx", 0.729, method("fedprox", 0.1, mu=0.1, weights="samples"), GLOBAL),
        Row("SCAFFOLD", 0.687, method("scaffold", 0.01, weights="samples"), GLOBAL),
        Row("FedAdam", 0.815, adaptive("adam", 0.01, 0.1), GLOBAL),
        Row("FedYogi", 0.815, adaptive("yogi", 0.01, 0.1), GLOBAL),
        Row("FedAdagrad", 0.813, adaptive("adagrad", 0.01, 1.0), GLOBAL),
    ),
    seeds=5,
    tolerance="initial weights and the order of the batches; the data and their division are the same",
    unsaid="the rule for ties within a batch (here Breslow's)",
)
