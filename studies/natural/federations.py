"""The federations, as they occur: of each split, the rows of every site that train and that test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv, parquet

from copfl.data.arrays import from_splits

MOST_TEST, MOST_TRAIN = 200, 60  # rows of a site: people have few
SHARE = 3  # a third of a site's rows is test at most
SITES = 60  # of more, these are drawn
Array = NDArray[Any]


class Federation(NamedTuple):
    """A federation in one split, as `copfl.run` takes it."""

    data: Any
    options: dict[str, Any]
    pooled: Callable[
        [], tuple[Any, Any]
    ]  # train and test rows as (x, y, site), for a model of all rows in one place


def _rows(group: Array, split: int) -> tuple[Array, Array]:
    """The rows that train and that test, drawn at each site."""
    rng = np.random.default_rng(split)
    sites = np.unique(group)
    if len(sites) > SITES:
        sites = np.sort(rng.choice(sites, SITES, replace=False))
    train, test = [], []
    for site in sites:
        rows = rng.permutation(np.flatnonzero(group == site))
        tested = min(len(rows) // SHARE, MOST_TEST)
        test.append(rows[:tested])
        train.append(rows[tested : tested + MOST_TRAIN])
    return np.concatenate(train), np.concatenate(test)


def arrays_of(name: str) -> Callable[[Path, int, Path], Federation]:
    """Digits by writers, or spoken by speakers: a file with x, y and group.

    Args:
        name: Of the file.
    """

    def federation(folder: Path, split: int, scratch: Path) -> Federation:
        with np.load(folder / "natural2" / name) as file:
            x, y, group = file["x"], file["y"], file["group"].astype(str)
        parts = [(x[rows], y[rows], group[rows]) for rows in _rows(group, split)]
        as_numbers = [(a.reshape(len(a), -1) / 255.0, b, c) for a, b, c in parts]
        return Federation(
            from_splits(parts, name=Path(name).stem), {}, lambda: (as_numbers[0], as_numbers[1])
        )

    return federation


def mail(folder: Path, split: int, scratch: Path) -> Federation:
    """Mails of six mailboxes, wanted or not."""
    table = parquet.read_table(folder / "natural2" / "mail.parquet")
    group = np.array(table["mailbox"].to_pylist(), dtype=str)
    chosen = [table.take(pa.array(rows)) for rows in _rows(group, split)]
    paths = [scratch / f"{part}.csv" for part in ("train", "test")]
    for path, rows in zip(paths, chosen, strict=True):
        csv.write_csv(rows.select(["text", "kind", "mailbox"]), path)
    options = {"text": "text", "target": "kind", "client": "mailbox", "data_options": {"test": str(paths[1])}}

    def pooled() -> tuple[Any, Any]:
        from sklearn.feature_extraction.text import TfidfVectorizer

        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
        texts = [rows["text"].to_pylist() for rows in chosen]
        x = [words.fit_transform(texts[0]), words.transform(texts[1])]
        y, site = ([np.array(rows[name].to_pylist()) for rows in chosen] for name in ("kind", "mailbox"))
        return (x[0], y[0], site[0]), (x[1], y[1], site[1])

    return Federation(str(paths[0]), options, pooled)


FEDERATIONS: dict[str, Callable[[Path, int, Path], Federation]] = {
    "writers": arrays_of("writers.npz"),
    "spoken": arrays_of("spoken.npz"),
    "mail": mail,
}
