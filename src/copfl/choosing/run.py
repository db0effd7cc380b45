"""One experiment, from settings or values to a result: `copfl.run(...)`.

The command line has its own beginning in `cli.run`, and the same steps.
"""

import contextlib
from pathlib import Path
from typing import Unpack

from copfl.choosing.first_run import completed_run, found_and_judged
from copfl.core.algorithm import AnyAlgorithm
from copfl.experiment import folder as run_folder
from copfl.experiment.preparation import prepare
from copfl.experiment.process import left_as_found
from copfl.experiment.result import Result
from copfl.experiment.run import warned
from copfl.experiment.training import NOTHING, OnRound, train
from copfl.settings import arguments, named_code
from copfl.settings.checking import SettingError
from copfl.settings.schema import Run
from copfl.settings.toml import Tables
from copfl.telling import Log, heard_by_log, to_somebody


@arguments.shared
@left_as_found()
@heard_by_log()
def run(
    algorithm: Run | str | AnyAlgorithm | type[AnyAlgorithm] | None = None,
    dataset: arguments.Data = arguments.DIGITS,
    *,
    out: str | Path | None = None,
    code: named_code.Modules = (),
    on_round: OnRound | None = None,
    log: Log | None = to_somebody,
    **settings: Unpack[arguments.OfRun],
) -> Result:
    """Trains a federation and returns the result.

    >>> import copfl
    >>> result = copfl.run("copfl", "digits", rounds=2)
    >>> result.accuracy.shape
    (2, 10)

    Args:
        algorithm: A name of `copfl list algorithms`, "module:Class" of your code, or an algorithm as a value
            or its class, with the learning rate of the data set where it chooses none. Or a `copfl.Run`: a
            complete one has all settings but `out`, `code` and `on_round`, another one is completed. By default
            what suits the data, see docs/results.md.
        settings: See `copfl.settings.arguments`.
        out: A new run folder to write.
        code: Modules of yours that a `copfl.Run` may name. What the other arguments name needs no mention.
        on_round: Called with each round as it ends, and its seconds.
        log: Gets a line about each step; by default it is on stderr in a terminal or a notebook.
    """
    named_code.name(code)
    record, preset = algorithm if isinstance(algorithm, Run) else None, settings.get("preset") or ""
    layer = arguments.tables(dataset, settings, None if isinstance(algorithm, Run) else algorithm)
    if record is not None and record.is_complete:
        _check_nothing_beside(layer, preset)
        is_open = record.run.find_rounds == "first"
        description, given = found_and_judged(record) if is_open else (record, NOTHING)
    else:
        below = () if record is None else (record,)
        layer["run"] = {"find_rounds": "auto"} | layer.get("run", {})
        description, given = completed_run(*below, layer, preset=preset)
    experiment = prepare(description)
    opened = contextlib.nullcontext() if out is None else run_folder.claimed(Path(out), new=True)
    with opened as folder:
        return warned(train(experiment, folder, on_round, given=given))


def _check_nothing_beside(layer: Tables, preset: str) -> None:
    """SettingError for what is set beside a complete record."""
    beside = {f"{kind}.{key}": value for kind, table in layer.items() for key, value in table.items()}
    for path, value in (beside | ({"preset": preset} if preset else {})).items():
        kind, _, key = path.partition(".")
        raise SettingError(
            kind if key == "value" else path,
            None if key == "value" else value,
            "cannot be set beside a complete copfl.Run, which has every setting; change the record with "
            'its method `replaced`, as in run.replaced({"run": {"rounds": 5}})',
        )
