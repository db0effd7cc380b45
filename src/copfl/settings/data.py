"""[data]: the record of a table, and the data set of a record.

`validate` makes the record; `facts` and `prepare` read the data, which are read once.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.data.samples import Dataset
from copfl.data.sets import datasets
from copfl.data.sets.hub import PREFIX
from copfl.settings import named_code, schema, user_code
from copfl.settings.checking import checked
from copfl.settings.first_look import READS, check_data_name, is_path
from copfl.settings.schema import record_of, table_of


def data_record(table: Mapping[str, Any]) -> schema.Data:
    """The data with absolute paths, so that the run can be repeated from any folder."""
    record: schema.Data = record_of("data", table)
    if folder := record.dir or os.environ.get("COPFL_DATA"):
        record = dataclasses.replace(record, dir=str(Path(folder).absolute()))
    name = record.name
    user_code.check_no_file("data", name)
    if user_code.is_reference(name):
        user_code.attribute("data", name, record.code)
        return dataclasses.replace(record, code=named_code.digests(name))
    check_data_name(name)
    if name in datasets.DATASETS:
        checked("data", datasets.DATASETS[name], record.arguments, READS, schema.paths())
    if name not in datasets.DATASETS and not name.startswith(PREFIX) and is_path(name):
        record = dataclasses.replace(record, name=str(Path(name).absolute()))
    if test := record.options.get("test"):  # the test rows of a table
        record = dataclasses.replace(
            record, options={**record.options, "test": str(Path(str(test)).absolute())}
        )
    return record


def data_of(record: schema.Data, keep: bool = False) -> Dataset:
    """The data set that a record describes.

    Args:
        record: The data.
        keep: Whether the same record is asked for again, as by `prepare` after `facts`. A published data set is
            then kept for the next call: reading all images of one can take minutes.
    """
    name, folder = record.name, None if record.dir is None else Path(record.dir)
    if record.value is not None:
        return record.value  # type: ignore[no-any-return]
    if user_code.is_reference(name):
        reader = user_code.attribute("data", name, record.code)
        return user_code.dataset_of(reader, folder, record.arguments, name)
    is_published = name in datasets.DATASETS or name.startswith(PREFIX)
    if is_published and not keep and (kept := _kept.pop(state_of(record), None)) is not None:
        return kept
    options = checked("data", datasets.reader(name), record.arguments, READS, schema.paths())
    dataset = datasets.load(name, folder, **options)
    if is_published and keep:
        _kept.clear()
        _kept[state_of(record)] = dataset
    return dataset


_kept: dict[tuple[str, int], Dataset] = {}  # at most one, by its `state_of`


def state_of(record: schema.Data) -> tuple[str, int]:
    """The settings of the data, and when they changed: their file, or the folder of published sets.

    0: there is none.
    """
    if record.name in datasets.DATASETS:
        changed = os.stat(record.dir).st_mtime_ns if record.dir and os.path.isdir(record.dir) else 0
    else:
        changed = os.stat(record.name).st_mtime_ns if os.path.isfile(record.name) else 0
    return json.dumps(table_of(record), sort_keys=True), changed
