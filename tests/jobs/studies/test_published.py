"""Published tables: their data are those of their source, and the check finds a number that is outside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from copfl.data.samples import Dataset, Samples
from copfl.errors import UsageError
from studies.published import __main__ as command
from studies.published import cifar, fedrep_cifar, flamby_heart, flamby_tcga, heart_beside
from studies.published.table import Row, Table, outcome, run_row, run_table
from tests.slow import slow


def test_the_hospitals_are_those_of_flamby() -> None:
    hospitals = flamby_heart.federations(None)[""]
    sizes = [
        (len(train), len(test))
        for train, test in zip(hospitals.partition.train, hospitals.partition.test, strict=True)
    ]
    assert sizes == [(199, 104), (172, 89), (30, 16), (85, 45)]
    assert hospitals.dataset.train.x.shape == (740, 13)
    for rows in hospitals.partition.train:
        x = hospitals.dataset.train.x[rows]
        varies = np.ptp(x, axis=0) > 0
        np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(x[:, varies].std(0, ddof=1), 1, rtol=1e-4)


def test_beside_the_table_are_the_same_patients() -> None:
    """As many of each hospital as in the published table, but for a training row that occurs among the test rows."""
    published, table = flamby_heart.TABLE.federations(None)[""], heart_beside.hospitals()
    copies = {"train": [0, 0, 0, 1], "test": [0, 0, 0, 0]}
    for split, parts in (("train", published.partition.train), ("test", published.partition.test)):
        samples = getattr(table, split)
        counts = np.bincount(samples.group) + copies[split]
        assert counts.tolist() == [len(rows) for rows in parts]
    for hospital, rows in enumerate(published.partition.test):
        answers = np.asarray(table.test.y)[table.test.group == hospital]
        assert answers.sum() == published.dataset.train.y[rows].sum()


@pytest.mark.parametrize("row", [flamby_heart.TABLE.rows[n] for n in (2, 7)], ids=lambda row: row.name)
def test_a_row_of_heart_disease_is_inside(row: Row) -> None:
    """FedAvg and FedAdam with five seeds, as published; all rows with twenty: COPFL_SLOW=1."""
    table = flamby_heart.TABLE
    values = run_row(table, row, table.federations(None)[row.federation], range(5))
    assert outcome(row, values, table.seeds).agrees


@slow
def test_heart_disease_is_inside() -> None:
    assert all(one.agrees for one in run_table(flamby_heart.TABLE, seeds=20))


def test_the_regions_are_those_of_the_files(tmp_path: Path) -> None:
    """Two made files: columns in the order of the source, parts by their names, who was censored at once left out."""
    with pytest.raises(UsageError, match=r"name the folder that has brca\.csv and split\.csv"):
        flamby_tcga.federations(tmp_path)
    people = range(24)
    lines = [f"p{n},{n or 6},{n % 2},{int(n % 3 > 0)},{float(n or 6)}" for n in people] + ["lost,1,1,0,0.0"]
    (tmp_path / "brca.csv").write_text("\n".join(["pid,age,stage,E,T", *lines]))
    parts = [f"p{n},{side},{side}_{n % 6}" for n in people for side in ["test" if n < 6 else "train"]]
    parts.append("lost,train,train_0")
    (tmp_path / "split.csv").write_text("\n".join(["pid,fold,fold2", *reversed(parts)]))
    found = flamby_tcga.federations(tmp_path)
    assert [len(rows) for rows in found["pooled"].partition.train] == [18] * 6
    regions = found[""]
    assert [len(rows) for rows in regions.partition.train] == [3] * 6
    assert [len(rows) for rows in regions.partition.test] == [1] * 6
    (first,) = regions.partition.test[0]
    np.testing.assert_array_equal(regions.dataset.test.x[first], [6, 0])
    np.testing.assert_array_equal(regions.dataset.test.y[first], [6, 0])
    np.testing.assert_array_equal(regions.dataset.train.x[:, 0], regions.dataset.train.y[:, 0])


@slow
@pytest.mark.skipif(
    "COPFL_TCGA" not in os.environ, reason="COPFL_TCGA names the folder of FLamby's two files"
)
def test_survival_with_breast_cancer_is_inside() -> None:
    folder = Path(os.environ["COPFL_TCGA"])
    regions = flamby_tcga.federations(folder)[""]
    assert [len(rows) for rows in regions.partition.train] == [
        248,
        156,
        164,
        129,
        122,
        39,
    ]  # 8 were censored at once
    assert all(one.agrees for one in run_table(flamby_tcga.TABLE, seeds=20, data_dir=folder))


def test_the_page_has_the_recorded_means_of_cifar() -> None:
    """Each row of the page, and published numbers as the tables have them."""
    folder = Path(command.__file__).parent
    page = (folder.parents[1] / "docs" / "published.md").read_text("utf-8")
    records = [json.loads(line) for line in (folder / "cifar.jsonl").read_text("utf-8").splitlines()]
    assert len(records) == sum(
        len(command.table_of(name).rows) for name in ("fedrep_cifar_2", "fedrep_cifar_5")
    )
    for record in records:
        (row,) = (row for row in command.table_of(record["table"]).rows if row.name == record["row"])
        values = np.array(record["values"])
        means = f"{row.published:.3f} | {values.mean():.3f} | {values.min():.3f} to {values.max():.3f}"
        assert f"| {row.name} | {means} |" in page


def test_the_range_by_hand() -> None:
    row = Row("any", 0.5, {}, "accuracy")
    one = outcome(row, np.array([0.4, 0.6]), published_seeds=2)
    spread = np.sqrt(0.02) * np.sqrt(1 / 2 + 1 / 2)
    assert one.low == pytest.approx(0.5 - 1.96 * spread)
    assert one.high == pytest.approx(0.5 + 1.96 * spread)


def test_a_number_that_is_outside_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = flamby_heart.TABLE.rows[2]._replace(published=0.99)
    quick: dict[str, dict[str, Any]] = {
        "run": {"rounds": 1, "steps": 2, "batch": 4},
        "model": {"name": "linear"},
    }
    quick["task"] = {"metrics": ["accuracy"]}
    table: Table = flamby_heart.TABLE._replace(rows=(wrong,), settings=quick)
    monkeypatch.setattr(flamby_heart, "TABLE", table)
    assert command.main(["flamby_heart", "--seeds", "2"]) == 1
    assert "**no**" in capsys.readouterr().out


def test_without_a_name_the_tables_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert "flamby_heart: FLamby" in capsys.readouterr().out
    assert {name for name in command.TABLES if "cifar" in name} == ON_IMAGES.keys()


# -- CIFAR-10 ------------------------------------------------------------------------------------------------

ON_IMAGES = {
    "fedrep_cifar_2": "FedRep",
    "fedrep_cifar_5": "FedAvg",
    "knnper_cifar": "kNN-Per",
    "fedem_cifar": "FedAvg+",
}


def images(train: int, test: int = 200) -> Dataset:
    """As many made-up images as these, of ten classes."""
    rng = np.random.default_rng(0)
    parts = [
        Samples(rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8), np.arange(n) % 10)
        for n in (train, test)
    ]
    classes = tuple("0123456789")
    return Dataset("cifar10", parts[0], parts[1], classes, mean=(0.5,) * 3, std=(0.2,) * 3, augment=True)


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "load", lambda name, folder: images(1000))


def test_the_clients_of_fedrep_have_as_many_images_of_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "load", lambda name, folder: images(2000))
    monkeypatch.setattr(cifar, "TRAIN", 2000)
    for classes in (2, 5):
        federation = cifar.by_classes(None, clients=10, classes=classes, train=200, test=20)
        assert federation.changed == ""
        for train, test in zip(federation.partition.train, federation.partition.test, strict=True):
            counts = np.bincount(federation.dataset.train.y[train], minlength=10)
            assert sorted(counts) == [0] * (10 - classes) + [200 // classes] * classes
            of_test = np.bincount(federation.dataset.test.y[test], minlength=10)
            assert (of_test > 0).tolist() == (counts > 0).tolist()


@pytest.mark.usefixtures("few_images")
@pytest.mark.parametrize("test_share", [0.0, 0.25])
def test_all_images_are_divided_once(test_share: float) -> None:
    federation = cifar.by_labels(None, clients=5, alpha=10.0, seed=0, test_share=test_share)
    partition = federation.partition
    assert sorted(np.concatenate([*partition.train, *partition.test])) == list(range(1200))
    if test_share:
        for train, test in zip(partition.train, partition.test, strict=True):
            assert len(test) == pytest.approx(test_share * (len(train) + len(test)), abs=0.5)
    else:
        assert all((part < 1000).all() for part in partition.train)
        assert all((part >= 1000).all() for part in partition.test)
    assert federation.changed.startswith(
        "1,000 of 50,000 training images are there, so 1,200 of 60,000 images are divided"
    )


def test_a_small_alpha_gives_clients_of_few_classes() -> None:
    y = np.arange(10_000) % 10
    spread, narrow = (
        np.mean([len(np.unique(y[part])) for part in cifar.divided(y, 20, alpha, np.random.default_rng(0))])
        for alpha in (100.0, 0.01)
    )
    assert spread == 10
    assert narrow < 4


class Tiny(nn.Module):
    """Colours, averaged over the image: there is no time for a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x.mean((2, 3))))
        return logits


@pytest.mark.usefixtures("few_images")
@pytest.mark.parametrize("name", ON_IMAGES)
def test_a_row_of_each_table_of_cifar_works(name: str) -> None:
    """A round of all clients on made-up images, with a tiny model: the division, the settings and the metric."""
    table = command.table_of(name)
    rest = {kind: values for kind, values in table.settings.items() if kind != "model"}
    table = table._replace(model=Tiny, settings=rest)
    row = next(row for row in table.rows if row.name == ON_IMAGES[name])
    (value,) = run_row(table, row, table.federations(None)[""], range(1), rounds=1)
    assert 0 <= value <= 1


def test_fedreps_network_has_its_shapes() -> None:
    net = fedrep_cifar.Network()
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in net.parameters()) == 4_864 + 102_464 + 192_120 + 7_744 + 650


def test_all_clients_are_evaluated_where_a_round_has_a_part_of_them() -> None:
    table, row = flamby_heart.TABLE, flamby_heart.TABLE.rows[2]
    federation = table.federations(None)[""]
    quick = {**table.settings, "run": {"rounds": 1, "steps": 2, "batch": 4, "participation": 0.25}}
    (one,) = run_row(table._replace(settings=quick), row, federation, range(1))
    (weighted,) = run_row(table._replace(settings=quick, by_rows=True), row, federation, range(1))
    sizes = [len(part) for part in federation.partition.test]
    # Means of four fractions of test rows: of the hospitals, and of all their rows.
    assert (weighted * sum(sizes)) == pytest.approx(round(weighted * sum(sizes)), abs=1e-3)
    assert one != weighted


@pytest.mark.usefixtures("few_images")
def test_other_data_than_the_published_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fedrep_cifar, "TWO", fedrep_cifar.TWO._replace(model=Tiny))
    assert command.main(["fedrep_cifar_2", "--row", "FedAvg", "--rounds", "1", "--seeds", "1"]) == 0
    out = capsys.readouterr().out
    assert "published 0.427" in out
    assert "no number is inside or outside: 1 rounds; 1,000 of 50,000 training images are there" in out
    with pytest.raises(SystemExit):
        command.main(["fedrep_cifar_2", "--row", "FedNothing"])
