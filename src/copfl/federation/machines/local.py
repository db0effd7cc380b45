"""A whole federation on one machine, with real processes: a SuperLink, a SuperNode per client, a run.

`copfl federate up`, `resume` and `personalize` call it. `local_federation` has the processes.
"""

import contextlib
import dataclasses
import json
import logging
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from copfl.data.contract.check import check
from copfl.data.contract.contract import ARRAYS, Contract
from copfl.data.contract.statistics import site_of
from copfl.data.samples import CLASSIFICATION, SURVIVAL, Dataset
from copfl.data.tables.files import read_table
from copfl.errors import DataError, RunError, UsageError
from copfl.experiment.bundle.description import read
from copfl.experiment.bundle.places import OF_NODE
from copfl.experiment.preparation import data_set_of, partition
from copfl.federation.machines.app import RUN_FILE
from copfl.federation.machines.deployed import new_name
from copfl.federation.machines.local_federation import LocalFederation
from copfl.federation.node.secure_memory import CHANGES
from copfl.federation.policy.own_app import allowing
from copfl.federation.policy.record import Policy, ProposalRules, StatisticsRules
from copfl.federation.protocol.app_folder import last_run, read_app
from copfl.federation.protocol.settings import federation_of, prepared
from copfl.federation.protocol.statistics import terms_of
from copfl.federation.server.agreement import AGREE, frozen_by
from copfl.federation.server.choosing import (
    CHOOSE,
    TAKEN,
    candidates_in,
    chosen_by,
    is_choice,
    kept,
    taken_in,
)
from copfl.federation.server.folder import NEW_CLIENTS, ServerFolder
from copfl.settings import named_code, toml
from copfl.settings.complete import complete
from copfl.settings.flat import flattened, nested
from copfl.settings.schema import Run
from copfl.settings.toml import Tables

logger = logging.getLogger(__name__)
TRIALS = 10**6  # changes of the cohort in secure sums: in a trial all nodes have one owner
TRIAL = Policy(
    rollback=True, statistics=StatisticsRules(questions=TRIALS), proposals=ProposalRules(members="any")
)  # of all nodes
CLOSING = 60.0  # seconds after the last round until the SuperLink closes the run, at most
MAX_RECONNECTS = 10  # how often the log of a run is opened again


def partition_nodes(folder: Path, run: Run, dataset: Dataset | None = None) -> list[dict[str, Any]]:
    """The nodes' configurations; each node's part of the run's data set is in a file of its own.

    A node chooses its validation samples itself.

    Args:
        folder: The folder of the app.
        run: The settings, with the data set and its partition.
        dataset: With the encoders that the app has; None: those of a training of the run.
    """
    dataset, configs = data_set_of(run) if dataset is None else dataset, list[dict[str, Any]]()
    whole = dataclasses.replace(run.run, select="last", validation=0.0, patience=0)
    split = partition(dataclasses.replace(run, run=whole), dataset)
    tested = split.tested(dataset)
    for client, (train, test) in enumerate(zip(split.train, split.test, strict=True)):
        path = (folder / "nodes" / str(client)).resolve()
        path.mkdir(parents=True, exist_ok=True)
        x, y, x_test, y_test = dataset.train.x[train], dataset.train.y[train], tested.x[test], tested.y[test]
        if split.labels is not None:
            y, y_test = split.labels[client][y], split.labels[client][y_test]
        if dataset.kind == CLASSIFICATION:  # a node's file has the names of its classes
            y, y_test = (np.array(dataset.classes)[labels] for labels in (y, y_test))
        np.savez(path / "data.npz", x=x, y=y, x_test=x_test, y_test=y_test)
        config = {"client": client, "data": str(path / "data.npz"), "state-dir": str(path / "state")}
        configs.append({**config, CHANGES: TRIALS})
    return configs


def site_nodes(folder: Path, sites: Sequence[Path | str]) -> list[dict[str, Any]]:
    """The nodes' configurations: each has the data of one site.

    Args:
        folder: The folder of the app.
        sites: The file of each node's data, in order.
    """
    configs = []
    for client, site in enumerate(sites):
        path = Path(site).expanduser().resolve()
        if not path.exists():
            raise UsageError(f"there is no file {site} for node {client}")
        state = (folder / "nodes" / str(client) / "state").resolve()
        configs.append({"client": client, "data": str(path), "state-dir": str(state), CHANGES: TRIALS})
    return configs


def site_problems(folder: Path, sites: Sequence[Path]) -> list[str]:
    """In which the sites' data differ from the app's contract; UsageError if a node could not train on some.

    Args:
        folder: The folder of the app.
        sites: The data of each node.
    """
    text = read_app(folder)["config"].get("samples", {}).get("contract")
    all_problems: list[str] = []
    for site in sites if text else ():
        contract, file = Contract.read(text), site.expanduser()
        problems = check(contract, file).problems
        try:
            if contract.data != ARRAYS and not contract.is_frozen:
                site_of(contract, [file])
            elif contract.data != ARRAYS:
                kind = SURVIVAL if contract.task == SURVIVAL else None
                contract.encoders.dataset_of([read_table(file)], file.stem, kind)
        except DataError as error:
            raise UsageError(f"{site} cannot be trained on: {'; '.join(problems or [str(error)])}") from error
        all_problems += [f"{site}: {problem}" for problem in problems]
    return all_problems


def up(
    folder: Path | str,
    *,
    sites: Sequence[Path | str] = (),
    nodes: int | None = None,
    data: str | None = None,
    scheme: str | None = None,
    secure: bool | None = None,
    config: Mapping[str, Any] | None = None,
    run: str | None = None,
    resume: bool = False,
    code: named_code.Modules = (),
) -> Iterator[dict[str, Any]]:
    """The record of each round of the app in the folder, run on this machine; all processes end with it.

    Args:
        folder: The folder of the app.
        sites: The data of each node, in order; none: a data set is partitioned. If the data contract is open,
            the nodes agree on the encoders first.
        nodes: Number of nodes; None: the app's number of clients.
        data: A data set to partition among the nodes instead of the app's.
        scheme: A partition instead of the app's.
        secure: Whether there are certificates and keys; None: as the app has it.
        config: Settings of the federation by path, such as run.rounds.
        run: The run's name; None: a new one.
        resume: Whether to continue it.
        code: Modules of yours that the app may name.
    """
    named_code.name(code, named_code.modules_in([data, scheme]))
    folder = Path(folder)
    app, chosen = read_app(folder), dict(config or {})
    if (
        resume and run and is_choice(folder, run)
    ):  # the choice is measured again, in less time than it takes to resume
        run, resume = None, False
    if resume and run:
        chosen = taken_in(folder, run) | chosen
    name = run or new_name()
    settings = {**flattened(nested(app["config"])), **chosen}
    clients, runs = nodes or len(sites) or int(settings["run.clients"]), str(folder.resolve() / "runs")
    server_folder = ServerFolder(runs, name, resume=resume)
    overrides = {**chosen, "session.run": name, "run.clients": clients, "session.resume": resume}
    overrides.setdefault("network.min_replies", 0 if settings["run.participation"] < 1 else clients)
    planned = federation_of({**settings, **overrides})
    prepared(planned)  # what cannot run is an error before a process is started
    policy = allowing(TRIAL, {**settings, **overrides}, planned)
    contract = planned.samples.contract
    is_open = bool(contract) and not Contract.read(contract).is_frozen
    if is_open:
        terms_of({**settings, **overrides})  # the same of what the nodes must agree on
    if sites:
        node_configs = site_nodes(folder, sites)
    elif is_open or "data" not in toml.read_file(folder / RUN_FILE):
        raise UsageError(
            "the app was made of a data contract, without data: name the file of each node with --site FILE"
        )
    else:
        of_trial: Tables = {"run": {"clients": clients, "seed": planned.run.run.seed}}
        of_trial |= {"data": {"name": data}} if data else {}
        of_trial |= {"partition": {"name": scheme}} if scheme else {}
        of_app = toml.read_file(folder / RUN_FILE)
        dataset = None if data else data_set_of(complete(of_app))
        node_configs = partition_nodes(folder, complete(of_app, of_trial), dataset)
    if len(node_configs) != clients:
        raise UsageError(
            f"there are {len(node_configs)} files for {clients} nodes; name one for each with --site"
        )
    is_secure = app["secure"] if secure is None else secure
    with LocalFederation(folder, secure=is_secure, policy=policy) as federation:
        federation.start_superlink()
        for client, node_config in enumerate(node_configs):
            federation.add_node(f"node-{client}", node_config)
        if is_open:
            agreement = {**overrides, "session.run": f"{name}-agree", AGREE: True, "session.resume": False}
            federation.start_run(agreement).wait()
            frozen_by(folder, agreement["session.run"], federation.reason())
        if not resume and (methods := candidates_in(folder, overrides)):
            choice_found = kept(folder, methods)
            if choice_found is None:
                choice = {**overrides, "session.run": f"{name}-choice", CHOOSE: True}
                federation.start_run(choice).wait()
                choice_found = chosen_by(folder, choice["session.run"], choice, federation.reason())
            logger.info(str(choice_found))
            overrides[TAKEN] = choice_found.required()
        process = federation.start_run(overrides)
        yield from follow(federation, process, server_folder, planned.rounds)


def follow(
    federation: LocalFederation,
    process: subprocess.Popen[bytes],
    folder: ServerFolder,
    rounds: int,
    pause: float = 1.0,
) -> Iterator[dict[str, Any]]:
    """The record of each round when it is written; RunError if the run ends before its last round.

    Args:
        federation: The processes.
        process: The one that prints the run's log.
        folder: The server's of the run.
        rounds: How many the run has.
        pause: Seconds between two looks at the folder.
    """
    done, reconnects = len(folder.rounds()), 0
    while done < rounds:
        has_ended = process.poll() is not None
        for record in folder.rounds()[done:]:
            done += 1
            yield record
        if has_ended and done < rounds:
            reconnects += 1
            is_lost = process.returncode != 0 and reconnects <= MAX_RECONNECTS  # the log, maybe not the run
            log = federation.reopen_log(pause) if is_lost else None
            if log is None:
                raise RunError(f"the run ended after round {done} of {rounds}: {federation.reason()}")
            process = log
        else:
            time.sleep(pause)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLOSING)


def resume(folder: Path | str, run: str | None = None, **options: Any) -> Iterator[dict[str, Any]]:
    """`up`, continuing a run (by default the last one) from its last checkpoint.

    Args:
        folder: The folder of the app.
        run: The name of the run; None: the last one.
        options: The other arguments of `up`.
    """
    return up(folder, run=run or last_run(Path(folder)), resume=True, **options)


def finished(folder: Path, run: str, rounds: int | None = None) -> int:
    """The number of rounds of a run that has all of them; 0 if some are left.

    Args:
        folder: The folder of the app.
        run: The name of the run.
        rounds: How many it should have; None: as many as the app says.
    """
    all_rounds = rounds or int(read_app(folder)["config"]["run"]["rounds"])
    done = len(ServerFolder(str(folder.resolve() / "runs"), run, resume=True).rounds())
    return done if done >= all_rounds else 0


@named_code.scope()
def join(
    folder: Path | str,
    data: str,
    *,
    test: str | None = None,
    state: str | None = None,
    run: str | None = None,
    updates: int = 3,
    code: named_code.Modules = (),
) -> dict[str, Any]:
    """A new client's primary metric before and after its local updates of a finished run's model.

    Args:
        folder: The folder of the app.
        data: The new client's: a file, a folder or module:function.
        test: A file of test rows of a table; None: some of its rows.
        state: Its state-dir; None: nodes/new-client in the app's folder.
        run: The name of the run; None: the last one.
        updates: Number of local updates.
        code: Modules of yours that the app may name.
    """
    named_code.name(code)
    if updates < 1:
        raise UsageError(f"updates={updates} must be at least 1")
    folder = Path(folder)
    app, runs, run = read_app(folder), folder.resolve() / "runs", run or last_run(folder)
    node_config = {
        "data": data if ":" in data else str(Path(data).resolve()),
        "state-dir": str(Path(state or folder / "nodes" / "new-client").resolve()),
        **({} if test is None else {"test": str(Path(test).resolve())}),
    }
    clients = json.loads((runs / run / "config.json").read_text())["run.clients"]
    results_file = runs / run / NEW_CLIENTS
    results_file.unlink(missing_ok=True)
    policy = allowing(Policy(rollback=True), app["config"], federation_of(app["config"]))
    with LocalFederation(folder, secure=app["secure"], policy=policy) as federation:
        federation.start_superlink()
        federation.add_node("new-client", node_config)
        overrides = {"session.run": run, "session.join": updates, "run.clients": clients}
        federation.start_run(overrides).wait(600)
        results = json.loads(results_file.read_text()) if results_file.exists() else []
        if len(results) != 1 or "why" in results[0]:
            reason = results[0]["why"] if results else federation.reason()
            raise RunError(f"the new client was not personalised: {reason}")
        model = Path(node_config["state-dir"]) / run / OF_NODE
        return {**results[0], "model": str(model), "note": read(model).origin.note}
