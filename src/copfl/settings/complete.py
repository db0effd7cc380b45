"""Where layers of settings become a complete record. Below `complete` no mapping of settings exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from copfl.settings import named_code, presets
from copfl.settings.components import build
from copfl.settings.facts import DATA_SET_DEFAULTS, Facts, check_model
from copfl.settings.first_look import check_layer
from copfl.settings.merging import Layer, merge
from copfl.settings.schema import Run
from copfl.settings.suggestions import suggest
from copfl.settings.validation import validate
from copfl.settings.values import passed_values
from copfl.wrappers.local_steps import with_local_steps


@named_code.scope()
def complete(
    *layers: Layer | Run,
    preset: str = "",
    values: Mapping[str, Any] | None = None,
    sums_only: bool = False,
    code: named_code.Modules = (),
) -> Run:
    """The record of a run: what somebody chose, and what suits the data where nobody chose.

    Args:
        layers: Settings by title and key, as in run.toml, or a record; later ones win. A model, a data set, ...
            that a program has is the key `value` of its table. Where a layer chooses another algorithm, model,
            ..., the options of the former one are dropped; another algorithm has its own optimizer.
        preset: The name of a preset, which is below the layers.
        values: By kind, an algorithm, a data set, a model, a partition or an optimizer that a program has.
        sums_only: Whether the server may see sums of uploads only, which counts where no algorithm is named.
        code: Modules of yours that the layers may name: a layer may be a file's, and names none itself.
    """
    named_code.name(code)
    passed, named = passed_values(layers, values or {})
    upper = [*(layer.chosen if isinstance(layer, Run) else layer for layer in layers), named]
    for layer in upper:
        check_layer(layer)
    data_sets = [str(layer["data"]["name"]) for layer in upper if "name" in layer.get("data", {})]
    suited = {} if "data" in passed else DATA_SET_DEFAULTS.get(data_sets[-1] if data_sets else "digits", {})
    defaults = {kind: table for kind, table in suited.items() if kind not in passed}
    of_preset = presets.preset(preset, upper, defaults) if preset else {}
    chosen = merge([defaults, of_preset, *upper], passed)
    facts = Facts(chosen, passed, sums_only)
    suggested = suggest(facts, defaults, upper, preset)  # only where nothing was chosen
    tables = merge([defaults, suggested, of_preset, *upper], passed)
    run = validate(tables, facts)
    # Made only to be checked: its parts check their numbers.
    algorithm = build("algorithm", run.algorithm, optimizer=run.optimizer)
    check_model(run, algorithm)
    if run.run.steps:
        with_local_steps(algorithm, run.run.steps)
    return run
