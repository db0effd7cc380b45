"""Layers of settings to one table of each kind. A layer is a plain mapping; later ones win.

From below: the defaults of a data set, what is suggested, a preset, a run file, the command line, and values
of a program that have a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from copfl.settings.facts import Facts
from copfl.settings.first_look import Layer as Layer
from copfl.settings.schema import KINDS
from copfl.settings.toml import Tables


def merge(layers: Sequence[Layer], passed: Mapping[str, Any]) -> Tables:
    """One table of each kind: each layer on top of the ones before it.

    Where a layer chooses another algorithm, model, ..., the options of the former one are dropped; another
    algorithm has its own optimizer.

    Args:
        layers: Settings by title and key, from below; `check_layer` found nothing wrong.
        passed: By kind, values that a program passed.
    """
    tables: Tables = {kind: {} for kind in KINDS}
    for layer in layers:
        for kind in (kind for kind in KINDS if layer.get(kind)):
            table = layer[kind]
            former = ("algorithm", "optimizer") if kind == "algorithm" else (kind,)
            if "name" in table and any(tables[other] for other in former):
                named = tables[kind].get("name")
                current = Facts(tables, passed).usual_name(kind) if named is None else str(named)
                names = {current, table["name"]}
                if kind == "adapter":  # its name may contain options
                    names = {name.partition(":")[0] for name in names}
                if current and len(names) > 1:  # where nothing is usual, the options were set for any
                    tables |= {other: {} for other in former}
            plain = {key: value for key, value in table.items() if key != "value" or isinstance(value, str)}
            tables[kind] = {**tables[kind], **plain}
    return tables
