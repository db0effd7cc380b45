"""`copfl federate`: create, try and operate a federation of real machines."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from copfl.cli import options
from copfl.cli.options import Tables, argument, option
from copfl.errors import UsageError, stoppable
from copfl.settings import toml
from copfl.settings.federation import OWN
from copfl.settings.schema import KINDS
from copfl.settings.toml import assignment

app = typer.Typer(
    help="Federations of real machines, with Flower.", rich_markup_mode=None, no_args_is_help=True
)
command = app.command(cls=options.Command)


# What only a simulation has, or what each node decides.
SIMULATED = (
    "attack.name",
    "attack.fraction",
    *(f"run.{key}" for key in ("new_clients", "device", "engine", "precision", "workers", "store")),
    "run.local_baseline",
)

# Options of several commands.
AppFolder = Annotated[Path, argument("The app's folder.")]
Secure = Annotated[
    bool | None,
    option(
        "Federation",
        "With or without TLS and node keys; default: without on 127.0.0.1.",
        "--secure/--insecure",
    ),
]
Wire = Annotated[str | None, option("Federation", "Numbers in messages: fp32, fp16 or bf16; default: fp32.")]
Rounds = Annotated[int | None, option("Federation", "Number of rounds; default: the app's.")]
Settings = Annotated[
    list[str] | None,
    option(
        "Training",
        "A setting of the app as TABLE.KEY=VALUE, such as algorithm.rate=0.1; repeatable.",
        "--set -s",
    ),
]
Nodes = Annotated[int | None, option("Federation", "Number of nodes; default: the app's number of clients.")]
Data = Annotated[
    str | None,
    option("Data", "A data set to partition among the nodes; default: that of init.", "--dataset -d"),
]
Scheme = Annotated[
    str | None, option("Data", "Of `copfl list partitions`; default: that of init.", "--partition")
]
Sites = Annotated[
    list[Path] | None,
    option("Data", "The data of a node, in order; repeatable. Default: a data set is partitioned.", "--site"),
]
Metrics = Annotated[
    str | None, option("Output", "Address of metrics for Prometheus, such as 127.0.0.1:9464; default: none.")
]
LogFormat = Annotated[str | None, option("Output", "Lines of logs: text or json; default: text.")]
LogLevel = Annotated[str | None, option("Output", "debug, info, warning or error; default: info.")]
RunName = Annotated[str | None, option("Output", "The run's name; default: the last one.")]
AppOrStateFolder = Annotated[Path, argument("The app's folder, or the state-dir of a node.")]


@command
@options.training(*SIMULATED, kinds={**KINDS, **OWN})
def init(
    line: Tables,
    *,
    folder: AppFolder,
    config: Annotated[
        Path | None, option("Training", "A run.toml; options on the line override it.", "--config -c")
    ] = None,
    preset: Annotated[
        str | None, option("Training", "A preset: paper, plus, adapters or demo; default: none.")
    ] = None,
    contract: Annotated[
        Path | None,
        option("Data", "The members' data contract, instead of a data set like theirs; default: none."),
    ] = None,
    host: Annotated[str, option("Federation", "Address of the server; default: 127.0.0.1.")] = "127.0.0.1",
    port: Annotated[int, option("Federation", "Port of the server; default: 8800.")] = 8800,
    secure: Secure = None,
    trial: Annotated[
        bool | None,
        option(
            "Federation",
            "Make the members' keys too: all machines have one owner; default: with 127.0.0.1.",
            "--trial/--no-trial",
        ),
    ] = None,
) -> None:
    """Write a Flower app that trains what `copfl run` with the same options would."""
    from copfl.data.contract_file import read_contract
    from copfl.flower import app as flower_app

    layers = [line] if config is None else [toml.read_file(config), line]
    agreed = None if contract is None else read_contract(contract)
    flower_app.init(
        folder,
        *layers,
        preset=preset or "",
        host=host,
        port=port,
        secure=secure,
        trial=trial,
        contract=agreed,
    )
    sites = "" if agreed is None else " --site FILE --site FILE ..."
    print(f"{folder} is ready. Run it on this machine: copfl federate up {folder}{sites}")
    if agreed is not None and not agreed.is_frozen:
        print(f"Its contract is open: the members agree on the rest with copfl federate agree {folder}")
    print(f"For several machines see {folder / 'README.md'}")
    if (authority := flower_app.authority_of(folder)).exists():
        print(f"The keys of the coordinator and of the authority are in {authority}: move it off the server")


@command
def up(
    *,
    folder: AppFolder,
    sites: Sites = None,
    nodes: Nodes = None,
    data: Data = None,
    scheme: Scheme = None,
    secure: Secure = None,
    wire: Wire = None,
    rounds: Rounds = None,
    settings: Settings = None,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run the app on this machine, with real processes that end with this command."""
    _set_environment(metrics, log_format, log_level)
    config, local = app_config(settings, **{"network.wire": wire, "run.rounds": rounds}), _local()
    for problem in local.site_problems(folder, sites or []):
        print(f"copfl: warning: {problem}", file=sys.stderr)
    _show(
        folder,
        local.up(
            folder, config=config, **_given(sites=sites, nodes=nodes, data=data, scheme=scheme, secure=secure)
        ),
    )


@command
def resume(
    *,
    folder: AppFolder,
    run: RunName = None,
    sites: Sites = None,
    nodes: Nodes = None,
    data: Data = None,
    scheme: Scheme = None,
    rounds: Rounds = None,
    rollback: Annotated[
        bool,
        option(
            "Federation", "Set the nodes back to the server's round, if it lost checkpoints.", "--rollback"
        ),
    ] = False,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Continue a local run that was interrupted; the data options must be those of `up`."""
    _set_environment(metrics, log_format, log_level)
    local = _local()
    run = run or local.last_run(folder)
    if done := local.finished(folder, run, rounds):
        print(f"the run {run} is finished: it has {done} rounds; --rounds N continues it to N rounds in all")
        return
    config = _given(**{"run.rounds": rounds}) | ({"session.rollback": True} if rollback else {})
    where = _given(sites=sites, nodes=nodes, data=data, scheme=scheme)
    _show(folder, local.resume(folder, run, config=config, **where))


@command
def join(
    *,
    folder: AppFolder,
    data: Annotated[str, option("Data", "The new client's data: a file or a folder.", "--data -d")],
    test: Annotated[
        str | None, option("Data", "The test rows of a table; default: some of its rows.", "--test")
    ] = None,
    run: RunName = None,
    updates: Annotated[int, option("Training", "Number of local updates, at least 1; default: 3.")] = 3,
    state: Annotated[str | None, option("Output", "Folder of its model; default: nodes/new-client.")] = None,
) -> None:
    """Personalise the trained model for a new client, and print its metric before and after."""
    from copfl.core.metrics import MetricInfo

    result = _local().join(folder, **_given(data=data, test=test, state=state, run=run, updates=updates))
    name = result["metric"]
    before, after = result[f"{name}_before"], result[f"{name}_after"]
    print(f"{MetricInfo(name).title} {before:.4f} before, {after:.4f} after {updates} local updates")
    if result["note"]:
        print(f"data: {result['note']}")
    print(f"model: {result['model']}")


@command
def server(
    *,
    folder: AppFolder,
    listen: Annotated[
        str | None,
        option("Federation", "HOST:PORT behind a reverse proxy; default: the app's port, for all machines."),
    ] = None,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run the server of the app, until the command is ended; it registers the keys in keys/*.pub."""
    require_flower()
    _set_environment(metrics, log_format, log_level)
    from copfl.flower.deployed import serve

    serve(folder, listen)


@command
def run(
    *,
    folder: AppFolder,
    run: Annotated[
        str | None, option("Output", "The run's name; default: a new one, or with --resume the last one.")
    ] = None,
    resume: Annotated[
        bool, option("Federation", "Continue a run from its last checkpoint.", "--resume")
    ] = False,
    rounds: Rounds = None,
    settings: Settings = None,
    proposal: Annotated[
        Path | None,
        option("Federation", "A proposal of `copfl federate propose`; default: one is signed here."),
    ] = None,
) -> None:
    """Start a run on the federation whose server runs in the folder, and follow it to its end."""
    require_flower()
    from copfl.flower.deployed import start_run
    from copfl.flower.proposal_text import chosen
    from copfl.flower.status import as_text

    config = app_config(settings, **{"session.run": run, "run.rounds": rounds})
    signed = None if proposal is None else chosen((), str(proposal))
    if signed is not None and config:
        raise UsageError(f"{proposal} has all settings of the run; leave out {next(iter(config))}")
    with stoppable(f"the run continues on the server; see `copfl federate status {folder}`"):
        print(as_text(start_run(folder, config, resume=resume, proposal=signed)))


@command
def status(
    *,
    folder: AppOrStateFolder,
    run: RunName = None,
    check: Annotated[bool, option("Output", "Exit code 1 if there is a problem.", "--check")] = False,
    as_json: Annotated[bool, option("Output", "Print JSON.", "--json")] = False,
) -> None:
    """Print nodes, rounds, who is late and the last error; the audit log is verified."""
    from copfl.flower import status as state

    found = state.status(folder, run)
    print(json.dumps(found, indent=1) if as_json else state.as_text(found))
    if check and found["problems"]:
        raise typer.Exit(1)


@command
def policy(
    *,
    file: Annotated[Path, argument("The policy; written if there is none, else checked.")],
    of_app: Annotated[
        Path | None,
        option("Federation", "Explain what this policy refuses of the app in this folder.", "--app"),
    ] = None,
) -> None:
    """Write, check or explain the policy of a machine: what a run may ask of it."""
    from copfl.flower.policy.explanation import explained
    from copfl.flower.policy.file import read_policy, write_strict
    from copfl.flower.status import read_app

    if not file.exists() and of_app is None:
        write_strict(file)
        print(f"{file} is a strict policy: read it, and change the lines that you need")
        return
    allowed = read_policy(file)
    if of_app is None:
        entries = {"code": allowed.code, "bases": allowed.bases, "files": allowed.files}
        print(f"{file} is valid; entered: {', '.join(f'{len(e)} of {name}' for name, e in entries.items())}")
        return
    lines = explained(allowed, read_app(of_app)["config"], file.parent)
    print("\n".join(lines))
    if lines[0].startswith("refused"):
        raise typer.Exit(1)


@command
def clean(
    *,
    folder: AppOrStateFolder,
    days: Annotated[
        float, option("Output", "Remove what was written last before so many days; default: 90.")
    ] = 90.0,
    keep: Annotated[
        int, option("Output", "So many of the last runs stay, whatever their age; default: 5.")
    ] = 5,
    rehearse: Annotated[
        bool, option("Output", "Print what would be removed, and remove nothing.", "--dry-run")
    ] = False,
) -> None:
    """Remove old runs, with their apps and logs, from a server or a node; a node's old personal models too."""
    from copfl.flower.retention import clean as remove

    removed = remove(folder, days=days, keep=keep, is_rehearsal=rehearse)
    for entry in removed:
        print(f"{'would remove' if rehearse else 'removed'} {entry.path}, {entry.bytes:,} bytes")
    if not removed:
        print("nothing is older, and not of the last runs")


@command
def backup(*, folder: AppOrStateFolder, file: Annotated[Path, argument("The archive to write.")]) -> None:
    """Write a server's or a node's files into one archive, which contains its private keys."""
    from copfl.flower.backup import write_backup

    print(write_backup(folder, file))


@command
def restore(
    *,
    file: Annotated[Path, argument("An archive of `copfl federate backup`.")],
    folder: Annotated[Path, argument("A new folder.")],
) -> None:
    """Restore a server's or a node's files into a new folder."""
    from copfl.flower.backup import restore_backup

    print(restore_backup(file, folder))


@command
def node(
    *,
    superlink: Annotated[str, option("Federation", "Address of the server, HOST:PORT.")],
    data: Annotated[
        str | None, option("Data", "The node's data: a file, a folder or module:function.", "--data -d")
    ] = None,
    state_dir: Annotated[
        Path | None, option("Output", "Folder of the node's state, its personal model.")
    ] = None,
    client: Annotated[
        int | None, option("Federation", "The client's number; default: the server's choice.")
    ] = None,
    root_certificates: Annotated[
        Path | None, option("Federation", "The authority's ca.pem; default: without TLS.")
    ] = None,
    key: Annotated[Path | None, option("Federation", "The node's private key.")] = None,
    coordinator: Annotated[
        str | None,
        option(
            "Federation",
            "Whose proposals this node accepts: coordinator.pub, or its fingerprint; default: the policy's.",
        ),
    ] = None,
    policy: Annotated[
        Path | None, option("Federation", "What this node allows; default: policy.toml in its state-dir.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        option("Training", "Another key of the node, such as threads=4; repeatable.", "--set -s"),
    ] = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Connect this machine to a federation as a node, until the command is ended."""
    require_flower()
    _set_environment(None, log_format, log_level)  # a node has no metrics
    from copfl.flower.supernode import Address, serve

    config = app_config(settings, data=data, client=client)
    if state_dir is not None:
        config["state-dir"] = str(state_dir.expanduser().absolute())
    if policy is not None:
        config["policy"] = str(policy.expanduser().absolute())
    if coordinator is not None:
        from copfl.flower.keys import fingerprint, read_public

        file = Path(coordinator).expanduser()
        config["coordinator"] = fingerprint(read_public(file)) if file.exists() else coordinator
    address = Address(superlink, root_certificates, key)
    serve(address, config)


def require_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise UsageError('Flower is not installed: pip install "copfl[flower]"')


def _set_environment(metrics: str | None, log_format: str | None, log_level: str | None) -> None:
    """Passes the options to every process of the federation, before Flower reads them."""
    from copfl.flower.events import environment

    os.environ.update(environment(metrics, log_format, log_level))


def _local() -> Any:
    """The module of local federations."""
    require_flower()
    return importlib.import_module("copfl.flower.local")


def _given(**values: Any) -> dict[str, Any]:
    """The options that are on the line."""
    return {name: value for name, value in values.items() if value is not None}


def app_config(settings: list[str] | None, **values: Any) -> dict[str, Any]:
    """The keys of a run config or a node's that the command line sets: these options, and --set."""
    config = _given(**values)
    for text in settings or []:
        if "=" not in text:
            raise UsageError(f'--set "{text}" must have the form KEY=VALUE, such as --set run.rounds=5')
        _, key, value = assignment(f"config.{text}")
        config[key] = value
    return config


def _show(folder: Path, rounds: Iterator[dict[str, Any]]) -> None:
    """Prints a line per round when it ends, and what each client contributes, where the run measured it."""
    from copfl import tables
    from copfl.flower.federation_sections import contributions_of
    from copfl.flower.state import as_text
    from copfl.flower.watched import read
    from copfl.report import contributions

    print("Starting a SuperLink and the nodes; the first round takes half a minute.", file=sys.stderr)
    with stoppable(f"`copfl federate resume {folder}` continues from the last round"):
        for record in rounds:
            print(as_text(record), flush=True)
    found = contributions_of(read(folder))
    if found is not None:
        width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
        print(f"\n{tables.as_text(contributions.table(found), width)}")
