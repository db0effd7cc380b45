"""[task]: the record of a table.

`validate` calls it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from copfl.core.criteria import LOSSES
from copfl.measures.metrics import METRICS
from copfl.settings import named_code, schema, user_code
from copfl.settings.checking import unknown_name
from copfl.settings.schema import record_of


def task_record(table: Mapping[str, Any]) -> schema.Task:
    """The objective and the metrics, with the user's code found."""
    record: schema.Task = record_of("task", table)
    metrics = tuple(name.strip() for text in record.metrics for name in text.split(",") if name.strip())
    losses = [] if record.loss is None else [record.loss]
    references: list[str] = []
    known = {loss for names in LOSSES.values() for loss in names}
    for path, names, defined in (("task.metrics", metrics, METRICS), ("task.loss", losses, known)):
        for name in names:
            if user_code.is_reference(name):
                user_code.attribute("task", name, record.code)
                references.append(name)
            elif name not in defined:
                raise unknown_name(path, name, [*defined, "mymodule:myfunction"])
    return dataclasses.replace(record, metrics=metrics, code=named_code.digests(*references))
