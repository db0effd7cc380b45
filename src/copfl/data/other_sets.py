"""Published sets of texts, signals and tables in their own layouts."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.data import reading
from copfl.data.arrays import from_arrays
from copfl.data.samples import REGRESSION, Dataset
from copfl.data.tables import Table, from_tables
from copfl.errors import DataError

LIMIT = 512 * reading.MIB
NEWS = ("World", "Sports", "Business", "Sci/Tech")
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
Texts = tuple[list[str], list[str]]  # and their labels


# Embedded: they come with scikit-learn


def breast_cancer(data_dir: Path | None) -> Dataset:
    """569 tumours by 30 measurements, malignant or benign; comes with scikit-learn, needs no files"""
    return _embedded("breast_cancer")


def wine(data_dir: Path | None) -> Dataset:
    """178 wines by 13 measurements, 3 classes; comes with scikit-learn, needs no files"""
    return _embedded("wine")


def diabetes(data_dir: Path | None) -> Dataset:
    """442 patients by 10 measurements, the progress of their disease to predict; comes with scikit-learn"""
    return _embedded("diabetes", REGRESSION)


def _embedded(name: str, kind: str | None = None) -> Dataset:
    """A table of scikit-learn; a fifth of the rows is test."""
    from sklearn import datasets

    content = getattr(datasets, f"load_{name}")()
    table: Table = {
        str(column): content.data[:, k].tolist() for k, column in enumerate(content.feature_names)
    }
    names = [str(name) for name in getattr(content, "target_names", ())]
    table["target"] = [names[k] for k in content.target] if names else content.target.tolist()
    return from_tables(
        [table], name, target="target", kind=kind, classes=None if names is None else list(map(str, names))
    )


# By person


def uci_har(data_dir: Path | None) -> Dataset:
    """UCI-HAR: 10,299 movements of 9 signals x 128 steps, 6 activities; the clients are the 30 persons

    Published with other persons in train and test. Here a fifth of each person's movements is test.
    """
    place = reading.found(data_dir, "UCI HAR Dataset", "UCI HAR Dataset.zip", "human+activity*.zip")
    wanted = [f"{name}_{split}.txt" for split in ("train", "test") for name in (*SIGNALS, "y", "subject")]
    files: dict[str, NDArray[np.float32]] = {}
    activities: dict[int, str] = {}
    for member in reading.members(place):
        path = PurePosixPath(member.name)
        if "__MACOSX" in path.parts or path.name not in (*wanted, "activity_labels.txt"):
            continue
        raw = member.read(LIMIT)
        with reading.naming(f"{place} ({member.name})", "table of numbers"):
            if path.name == "activity_labels.txt":
                rows = (row.split() for row in raw.decode().splitlines())
                activities = {int(number): name.lower() for number, name in rows}
            else:
                files[path.name] = np.loadtxt(io.BytesIO(raw), dtype=np.float32, ndmin=2)
    if missing := [name for name in wanted if name not in files]:
        raise DataError(f"{place} lacks {missing[0]}")
    parts = [
        np.stack([files[f"{name}_{split}.txt"] for name in SIGNALS], axis=1) for split in ("train", "test")
    ]
    y, person = (
        np.concatenate([files[f"{name}_{split}.txt"][:, 0] for split in ("train", "test")]).astype(np.int64)
        for name in ("y", "subject")
    )
    labels = np.array([activities.get(number, str(number)) for number in y.tolist()])
    found = from_arrays(np.concatenate(parts), labels, group=person, name="uci_har")
    return replace(found, natural=True)


# Texts


def ag_news(data_dir: Path | None) -> Dataset:
    """AG News: 127,600 news, 4 classes"""
    place = reading.found(data_dir, "ag_news_csv", "ag_news")
    parts = []
    for split in ("train", "test"):
        rows = _rows(place / f"{split}.csv", ",")
        if any(len(row) != 3 or row[0] not in ("1", "2", "3", "4") for row in rows):
            raise DataError(f"{place}/{split}.csv has a row that is not: class 1 to 4, title, description")
        parts.append(([f"{row[1]} {row[2]}" for row in rows], [NEWS[int(row[0]) - 1] for row in rows]))
    return _of_texts("ag_news", *parts, classes=NEWS)


def sst2(data_dir: Path | None) -> Dataset:
    """SST-2: 68,221 sentences from reviews of films, negative or positive; its dev split is test"""
    place = reading.found(data_dir, "SST-2", "SST-2.zip")
    files = {
        PurePosixPath(m.name).name: m.read(LIMIT) for m in reading.members(place) if m.name.endswith(".tsv")
    }
    parts = []
    for name in ("train.tsv", "dev.tsv"):
        rows = [row.rpartition("\t") for row in files.get(name, b"").decode().splitlines()[1:]]
        if not rows or any(label not in ("0", "1") for *_, label in rows):
            raise DataError(f"{place} lacks {name} with the columns sentence and label")
        parts.append(
            ([row[0].strip() for row in rows], [("negative", "positive")[int(row[2])] for row in rows])
        )
    return _of_texts("sst2", *parts)


def banking77(data_dir: Path | None) -> Dataset:
    """Banking77: 13,083 questions of a bank's customers, 77 intents"""
    place = reading.found(data_dir, "banking77", "banking_data")
    parts = []
    for split in ("train", "test"):
        head, *rows = _rows(place / f"{split}.csv", ",") or [[]]
        if head != ["text", "category"] or any(len(row) != 2 for row in rows):
            raise DataError(f"{place}/{split}.csv does not have the columns text and category")
        parts.append(([row[0] for row in rows], [row[1] for row in rows]))
    return _of_texts("banking77", *parts)


def clinc150(data_dir: Path | None) -> Dataset:
    """CLINC150: 22,500 requests to an assistant, 150 intents; the clients are the 10 domains

    Its validation split is in train. The requests out of scope are left out.
    """
    place = reading.found(data_dir, "clinc150", "oos-eval/data")
    content, domains = (_json(place / name) for name in ("data_full.json", "domains.json"))
    with reading.naming(str(place), "copy of CLINC150"):
        domain = {intent: name for name, intents in domains.items() for intent in intents}
        train, test = content["train"] + content["val"], content["test"]
        parts = [([text for text, _ in rows], [intent for _, intent in rows]) for rows in (train, test)]
        groups = [[domain[intent] for intent in intents] for _, intents in parts]
    found = _of_texts("clinc150", *parts, group=groups[0], group_test=groups[1])
    return replace(found, natural=True)


def _of_texts(name: str, train: Texts, test: Texts, **options: Any) -> Dataset:
    found = from_arrays(*(np.array(part) for part in (*train, *test)), name=name, **options)
    return replace(found, note="")  # that the classes are texts is known


def _rows(path: Path, delimiter: str) -> list[list[str]]:
    text = reading.read_bytes(path, LIMIT)
    with reading.naming(str(path), "table"):
        return list(csv.reader(io.StringIO(text.decode("utf-8")), delimiter=delimiter))


def _json(path: Path) -> Any:
    raw = reading.read_bytes(path, LIMIT)
    with reading.naming(str(path), "JSON file"):
        return json.loads(raw)
