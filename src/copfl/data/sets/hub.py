"""Data sets of the Hugging Face hub, as `hf:NAME`, through the package `datasets`.

`datasets.load` and the settings come here with such a name.
"""

from collections import Counter
from typing import Any

import numpy as np

from copfl.data.arrays import from_splits
from copfl.data.samples import Dataset
from copfl.data.tables.columns import DataTable, column_of
from copfl.data.tables.tables import from_tables
from copfl.errors import DataError, how_to_set, library, unknown

PREFIX = "hf:"
TEST_SPLITS = ("test", "validation", "valid", "dev")


def hub_dataset(
    name: str,
    *,
    target: str = "",
    client: str = "",
    text: str = "",
    subset: str = "",
    size: int = 0,
    missing: str = "refuse",
    kind: str | None = None,
    group: str = "",
    time: str = "",
    split: int = 0,
) -> Dataset:
    """A data set of the hub: images, a text, or the columns of a table.

    Without a labelled test split, a part of the train split is test.

    Args:
        name: On the hub, such as "ylecun/mnist".
        target: The column to predict; by default the only column of class labels.
        client: The column that says whose sample it is.
        text: The column of texts to learn from; by default the only one.
        subset: The configuration of the data set.
        size: Pixels of a side of images; 0: their most frequent size.
        missing, group, time, split: Of a table, as of `copfl.data.tables.tables.table_file`.
        kind: Of the targets, see `copfl.data.arrays.from_arrays`; None: inferred.
    """
    short, datasets = name.removeprefix(PREFIX), library("datasets", f"the data set {name}")
    # Before version 2.20 it ran the script of a data set unless told otherwise, and a file may name the data set.
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    try:
        splits = datasets.load_dataset(short, subset or None)
    except Exception as error:  # of many kinds: no network, no such name, a script that is refused
        reason = str(error).partition("\n")[0]
        raise DataError(f"the package datasets cannot load {short!r}: {reason}") from error
    if "train" not in splits:
        raise DataError(f"{short!r} has no split train; it has {', '.join(splits)}")
    features = splits["train"].features
    kinds = {column: type(feature).__name__ for column, feature in features.items()}
    labels = [column for column, kind in kinds.items() if kind == "ClassLabel"]
    target = target or (labels[0] if len(labels) == 1 else "label" if "label" in kinds else "")
    if target not in kinds:
        column = how_to_set("data.target", "COLUMN", "--target")
        raise DataError(f"name the column to predict with {column}; the columns are {', '.join(kinds)}")
    if client and client not in kinds:
        raise DataError(str(unknown("column", client, kinds)))
    classes = list(features[target].names) if kinds[target] == "ClassLabel" else None
    test = next((splits[split] for split in TEST_SPLITS if split in splits), None)
    if test is not None and classes and -1 in test[target]:
        test = None  # the labels of a benchmark's test split may be withheld
    splits_there = [part for part in (splits["train"], test) if part is not None]
    if image := next((column for column, kind in kinds.items() if kind == "Image"), ""):
        return _images(splits_there, short, image, target, client, classes, size)
    strings = [column for column in kinds if getattr(features[column], "dtype", "") == "string"]
    texts = [column for column in strings if column not in (target, client, group, time)]
    text = text or (texts[0] if len(texts) == 1 and len(kinds) <= 3 else "")
    contents = [part.with_format("arrow")[:] for part in splits_there]
    tables = [DataTable.of({column: content[column] for column in kinds}) for content in contents]
    if classes:
        for table in tables:
            numbers = table.columns[target].to_pylist()
            table.columns[target] = column_of([None if n is None else classes[n] for n in numbers])
    return from_tables(
        tables,
        short,
        target=target,
        client=client,
        text=text,
        missing=missing,
        kind=kind,
        group=group,
        time=time,
        split=split,
        classes=classes,
        leave_out=False,
    )


def _images(
    parts: list[Any], name: str, image: str, target: str, client: str, classes: Any, size: int
) -> Dataset:
    """The images at one size, by default the most frequent one."""
    pictures = [list(rows[image]) for rows in parts]
    sizes = Counter(picture.size for split in pictures for picture in split)
    shape = (size, size) if size else sizes.most_common(1)[0][0]
    splits = []
    for rows, split in zip(parts, pictures, strict=True):
        x = np.stack([np.asarray(picture.convert("RGB").resize(shape)) for picture in split])
        splits.append((x, np.array(rows[target]), *([np.array(rows[client])] if client else [])))
    resized = sizes.total() - sizes[shape]
    note = f"{resized:,} of {sizes.total():,} images resized to {shape[0]} x {shape[1]}" if resized else ""
    return from_splits(splits, name=name, classes=classes, note=note, leave_out=False)
