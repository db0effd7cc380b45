"""A rehearsal as the settings of a federation: what `copfl run` trained, `copfl federate init --like RUN` deploys."""

from pathlib import Path
from typing import Any, NamedTuple

from copfl import foreign
from copfl.data.contract.contract import Contract
from copfl.errors import RunError, UsageError, raised_as
from copfl.experiment import records
from copfl.experiment.folder import RunFolder
from copfl.settings.federation import RUN_KEYS, RUN_TABLES
from copfl.settings.toml import Tables

DATA = ("data", "partition")  # of a contract's federation, the contract says what the data are
OWN_MODELS = "trees"  # the model of clients that keep one of their own, beside that of the federation


class Rehearsal(NamedTuple):
    """What a finished run says of a federation."""

    layer: Tables  # the settings
    note: str  # what of the run a federation does otherwise; empty: nothing


def rehearsed(run: Path, contract: Contract | None) -> Rehearsal:
    """The method of a finished run, its model, rounds, temperature and data settings.

    Args:
        run: The folder of the run, which may be somebody else's.
        contract: What the members' data are; None: they are like the run's.
    """
    folder = RunFolder(run)
    tables = folder.tables()
    with raised_as(
        RunError, f"{run} cannot be used ({{}}); restore it from a copy", *foreign.DAMAGE, OSError
    ):
        planned, done = int(tables["run"]["rounds"]), len(records.read(run / "rounds.jsonl"))
        algorithm, own = dict(tables["algorithm"]), str(tables["run"].get("own_models", ""))
    if done < planned:
        raise UsageError(
            f"{run} has {done} of {planned} rounds; end it with `copfl resume {run}`, then begin again"
        )
    if algorithm.get("alone") or algorithm.get("name") == "local":
        raise UsageError(
            f"{run} trained each site alone, as nothing that sites train together was better: there is nothing to "
            "send; name a method with --algorithm to train together all the same"
        )
    target = tables.get("data", {}).get("target")
    if contract is not None and target and tuple(_names(target)) != contract.target_names:
        raise UsageError(
            f"{run} predicts {', '.join(_names(target))}, and the contract {', '.join(contract.target_names)}; "
            "choose a run and a contract with the same target"
        )
    titles = [*RUN_TABLES, *(DATA if contract is None else ())]
    layer: Tables = {title: dict(tables[title]) for title in titles if tables.get(title)}
    # Batches are even where only sums leave, whatever a simulation did, in which nobody reads them.
    kept = {key: tables["run"][key] for key in RUN_KEYS if key in tables["run"] and key != "even_batches"}
    layer["run"] = kept
    note = ""
    if own:
        note = (
            f"in {run} some sites kept a model of their own ({own}); in a federation each site's report says whether "
            "a model of its own is better"
        )
        if algorithm.get("name") != OWN_MODELS:
            layer.pop("model", None)  # the trees that hold them
    return Rehearsal(layer, note)


def _names(target: Any) -> list[str]:
    return [name.strip() for name in (target.split(",") if isinstance(target, str) else target)]
