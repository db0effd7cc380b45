"""What is known of a federation before training: the data are read once, and only if a step asks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from copfl.data.samples import Dataset
from copfl.settings import data, facts
from copfl.settings.complete import complete
from copfl.settings.facts import Facts
from copfl.settings.merging import merge
from copfl.settings.schema import Data


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the data sets that are read."""
    names: list[str] = []
    data_of = data.data_of

    def counted(record: Data, keep: bool = False) -> Dataset:
        names.append(Path(record.name).name)
        return data_of(record, keep)

    monkeypatch.setattr(facts, "data_of", counted)
    facts._known.clear()
    return names


@pytest.fixture
def table(tmp_path: Path) -> str:
    rows = [f"{n % 7},site{n % 3},{n % 2}" for n in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["age,site,ill", *rows]))
    return str(tmp_path / "rows.csv")


def test_the_data_are_read_once_for_all_that_follows_from_them(table: str, reads: list[str]) -> None:
    run = complete({"data": {"name": table, "target": "ill", "client": "site"}})
    assert reads == ["rows.csv"]
    assert (run.partition.name, run.run.clients, run.model.name) == ("by_group", 3, "mlp")


def test_where_everything_is_chosen_the_data_are_not_read(table: str, reads: list[str]) -> None:
    complete(
        {
            "algorithm": {"name": "fedavg"},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "data": {"name": table, "target": "ill", "client": "site"},
            "run": {"batch": 8, "clients": 3},
        }
    )
    assert reads == []


def test_facts_by_hand(tmp_path: Path) -> None:
    """90 samples at 3 clients; client 0 has both classes, the others one: 4 pairs of client and class."""
    y = np.where(np.arange(90) % 3 == 0, np.arange(90) // 3 % 2, 1)
    np.savez(tmp_path / "grouped.npz", x=np.zeros((90, 4), np.float32), y=y, group=np.arange(90) % 3)
    known = Facts(merge([{"data": {"name": str(tmp_path / "grouped.npz")}}], {}), {})
    of_data = known.of_data
    assert of_data is not None
    assert (of_data.partition, of_data.groups, of_data.classes, of_data.sharers) == ("by_group", 3, 2, 2.0)
    assert known.known.samples == of_data.samples / 3
    assert known.usual_name("model") == "mlp"
