"""A Flower app in a folder: run it with `flwr run`, or first on one machine with `copfl federate up`.

`copfl federate init` calls `init`. What the app trains is what `copfl run` would with the same settings.
"""

import dataclasses
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from copfl.algorithms import ALGORITHMS
from copfl.algorithms.levels import LARGEST as MOST_COEFFICIENTS
from copfl.choosing.candidates import LEVELS, MOST_SLOPES
from copfl.choosing.first_run import is_open, table_features
from copfl.data.contract.contract import Contract
from copfl.data.contract.file import write_contract
from copfl.data.samples import CLASSIFICATION, NEXT_TOKEN, Dataset
from copfl.errors import RunError, UsageError
from copfl.experiment.models.network import tokenized
from copfl.experiment.preparation import data_set_of
from copfl.experiment.tasks import with_intervals
from copfl.federation.machines.deployed import write_connection
from copfl.federation.machines.rehearsal import rehearsed
from copfl.federation.policy.file import FILE, write_policy
from copfl.federation.policy.own_app import allowing
from copfl.federation.policy.record import Policy, ProposalRules
from copfl.federation.policy.refusal import PolicyError
from copfl.federation.policy.request import refusals
from copfl.federation.protocol import secure_total
from copfl.federation.protocol.agreed_samples import samples_of
from copfl.federation.protocol.choice import TRIED
from copfl.federation.protocol.proposal import KEY
from copfl.federation.protocol.settings import prepared
from copfl.federation.protocol.statistics import terms_of
from copfl.federation.server.agreement import FILE as CONTRACT
from copfl.federation.server.certificates import LOOPBACK, make_certificates
from copfl.federation.server.membership import AUTHORITY, make_coordinator, make_member_keys
from copfl.settings import named_code
from copfl.settings.checking import SettingError
from copfl.settings.complete import complete
from copfl.settings.federation import OWN, Federation, check_not_simulated, own_record
from copfl.settings.flat import flat
from copfl.settings.merging import Layer
from copfl.settings.schema import Model, Run
from copfl.settings.toml import Tables, written

logger = logging.getLogger(__name__)
TEMPLATE = Path(__file__).parent / "template"
RUN_FILE = "run.toml"  # in the app's folder: the run, with the data of this machine; nodes do not receive it


@named_code.scope()
def init(
    folder: Path | str,
    *layers: Layer,
    preset: str = "",
    host: str = "127.0.0.1",
    port: int = 8800,
    secure: bool | None = None,
    trial: bool | None = None,
    contract: Contract | None = None,
    like: Path | None = None,
    code: named_code.Modules = (),
) -> Path:
    """The folder, with a Flower app that trains what `copfl run` with the same settings would.

    Args:
        folder: A new folder, or one without an app.
        layers: Settings by title and key, as in run.toml, with the tables of a federation; later ones win.
        preset: The name of a preset, which is below the layers.
        host: The address of the server.
        port: Its port.
        secure: Whether certificates are made; the default for every host but this machine.
        trial: Whether a key is made for every member, and all private keys stay in the folder: for a
            federation whose machines have one owner, as on this machine, where it is the default. Else
            members make their own keys, and the keys of the coordinator and of the authority are in
            `authority_of(folder)`, outside of the server's.
        contract: What the members' data are; None: they are like the data set of the settings.
        like: The folder of a finished run, whose settings are below the layers; None: there is none.
        code: Modules of yours that the layers may name: a layer may be a file's, and names none itself.
    """
    named_code.name(code)
    folder = Path(folder)
    if like is not None:
        of_run, note = rehearsed(like, contract)
        layers = (of_run, *layers)
        if note:
            logger.info(note)
    if (folder / "pyproject.toml").exists():
        raise RunError(
            f"{folder} holds a federation already: invite further sites with `copfl federate invite {folder} NAME`, "
            f"train it with `copfl federate run {folder}`, or change its settings in {folder / 'pyproject.toml'}; to "
            "begin anew, move the folder away or choose another one"
        )
    is_open = host not in LOOPBACK  # other machines can reach it
    secure = is_open if secure is None else secure
    if is_open and not secure:
        raise UsageError(f"{host} can be reached from outside: it needs certificates and node keys")
    federation = planned(*layers, preset=preset, contract=contract)
    prepared(federation)  # what cannot run is an error before anything is written
    run_config = _run_config(federation)
    if contract is not None and not contract.is_frozen:
        terms_of(run_config)  # so is a contract on whose rest the members cannot agree
    # Whoever makes the app owns the server: what it names here is allowed there.
    policy = allowing(Policy(rollback=True), run_config, federation)
    if refused := refusals(policy, run_config):
        raise PolicyError(refused)
    (folder / "federated").mkdir(parents=True, exist_ok=True)
    for path in (TEMPLATE / "federated").glob("*.py"):
        shutil.copy(path, folder / "federated")
    shutil.copy(TEMPLATE / "gitignore.txt", folder / ".gitignore")
    readme = TEMPLATE / f"README-{'secure' if secure else 'insecure'}.md"
    (folder / "README.md").write_text(readme.read_text().format(host=host, port=port))
    tables = federation.run.tables()
    if contract is not None:  # no data set of this machine
        tables = {title: table for title, table in tables.items() if title not in ("data", "partition")}
    (folder / RUN_FILE).write_text(written(tables))
    if federation.samples.contract:
        write_contract(folder / CONTRACT, Contract.read(federation.samples.contract))
    trial = not is_open if trial is None else trial
    authority = folder / "keys" if trial else authority_of(folder)
    connection = {"host": host, "port": port, "secure": secure}
    connection |= {} if trial else {AUTHORITY: str(authority.resolve())}
    name = re.sub(r"[\W_]", "-", folder.resolve().name.lower()).strip("-") or "federation"
    tool = {"copfl": connection, "flwr": {"app": {"config": {KEY: "", **run_config}}}}
    pyproject = (TEMPLATE / "pyproject.txt").read_text().format(name=name) + written({"tool": tool})
    (folder / "pyproject.toml").write_text(pyproject)
    (folder / "keys").mkdir(mode=0o700, exist_ok=True)
    rules = ProposalRules(coordinators=(make_coordinator(folder, authority),))
    write_policy(folder / FILE, dataclasses.replace(policy, proposals=rules))
    if secure:
        make_certificates(folder / "keys", host, authority)
    if trial:
        make_member_keys(folder, federation.clients)
    write_connection(folder, host, port, secure)
    return folder


def authority_of(folder: Path) -> Path:
    """Where `init` puts the keys of the authority and of the coordinator: beside the server's folder."""
    return folder.resolve().with_name(f"{folder.resolve().name}-authority")


def planned(*layers: Layer, preset: str = "", contract: Contract | None = None) -> Federation:
    """The federation that trains what `complete` describes, for samples of a contract or of its data set.

    Args:
        layers: Settings by title and key; later ones win.
        preset: The name of a preset, which is below the layers.
        contract: What the members' data are; None: they are like the data set of the settings.
    """
    example = None if contract is None else contract.example()
    own_tables: Tables = {title: {} for title in OWN}
    for layer in layers:
        for title in OWN:
            own_tables[title] |= layer.get(title, {})
    in_run = [{title: table for title, table in layer.items() if title not in OWN} for layer in layers]
    sums_only = own_record("secure", own_tables["secure"]).aggregation
    if contract is not None and (data_tables := [layer["data"] for layer in in_run if layer.get("data")]):
        raise SettingError(
            f"data.{next(iter(data_tables[0]))}",
            None,
            "is not used: the contract says what the data are; leave one out",
        )
    values = {"data": example, "partition": None}
    # In a sum of secure rounds a last batch of one row would tell it.
    in_run = [{"run": {"even_batches": True}}, *in_run] if sums_only else in_run
    run = complete(*in_run, preset=preset, sums_only=sums_only, values=values)
    chosen = {option for layer in in_run for option in layer.get("algorithm", {})}
    hiding = secure_total.summable(ALGORITHMS.get(run.algorithm.name)) if sums_only else {}
    if hiding := {key: value for key, value in hiding.items() if key not in chosen}:
        named = {"algorithm": {"name": run.algorithm.name, **hiding}}
        run = complete(*in_run, named, preset=preset, sums_only=True, values=values)
    for title, table in run.tables().items():
        check_not_simulated(title, table)
    dataset = data_set_of(run) if example is None else example
    if not preset and _suits_levels(run, in_run, dataset):
        of_levels = {"algorithm": {"name": LEVELS}}
        run = complete(of_levels, *in_run, sums_only=sums_only, values=values)
        names = ",".join(TRIED if table_features(dataset) <= MOST_SLOPES else TRIED[:1])
        # By time, what is held out is later than the rest, which a node's folds are not.
        if dataset.train.time is None and not (contract is not None and contract.time):
            own_tables["choice"] = {"candidates": names} | own_tables["choice"]
    agreed = {} if contract is None else samples_of(contract)
    dataset = with_intervals(dataset, run.task)
    samples = {**samples_like(dataset, run.model), **agreed, **own_tables.pop("samples")}
    records = {title: own_record(title, table) for title, table in own_tables.items()}
    return Federation(run=run, samples=own_record("samples", samples), **records)


def _suits_levels(run: Run, layers: Sequence[Layer], dataset: Dataset) -> bool:
    """Whether nobody named how to train on a table of which a linear model with levels can be had.

    Its few rounds of sums are exact, and on tables it is the method that a rehearsal takes most often.

    Args:
        run: The settings, with what suits the data.
        layers: What a person or a program set.
        dataset: Data like the members'.
    """
    features = table_features(dataset)
    outputs = max(1, len(dataset.classes) - 1) if dataset.kind == CLASSIFICATION else 1
    has_rate = any(
        "lr" in layer.get("optimizer", {}) for layer in layers
    )  # it is for steps, which levels lack
    is_open_table = features > 0 and is_open(run, layers) and not has_rate
    return is_open_table and (features + 1) * outputs <= MOST_COEFFICIENTS


def samples_like(dataset: Dataset, model: Model) -> dict[str, Any]:
    """The table [samples] of data like this.

    Args:
        dataset: Data like the members'.
        model: The settings of the model, whose tokenizer texts need.
    """
    if dataset.kind == NEXT_TOKEN:
        dataset = dataclasses.replace(dataset, classes=tokenized(dataset, model).classes)
    is_text = dataset.train.x.dtype.kind in "UO"
    numbers = tuple(map(str, range(len(dataset.classes))))
    is_named = dataset.kind == CLASSIFICATION and dataset.classes != numbers
    target_mean, target_std = dataset.target_scale
    contract = Contract.of(dataset)
    return {
        "text": is_text,
        "kind": dataset.kind,
        "classes": dataset.classes if is_named else len(dataset.classes),
        "target_mean": target_mean,
        "target_std": target_std,
        "mean": dataset.mean,
        "std": dataset.std,
        "augment": dataset.augment,
        "contract": "" if contract is None else contract.as_json(),
        **({} if is_text else {"shape": dataset.train.x.shape[1:]}),
    }


def _run_config(federation: Federation) -> dict[str, Mapping[str, Any]]:
    """The run config of pyproject.toml, with every option: Flower overrides only keys that are there."""
    return {
        title: {key: flat(value) for key, value in table.items() if key != "code"}  # a path of this machine
        for title, table in federation.tables().items()
    }
