"""Options that several commands share, the settings that they describe, and help in titled groups."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import click
import typer
from typer.core import TyperCommand

Tables = dict[str, dict[str, Any]]  # by title, as in a run.toml

DATA, MODEL, TRAINING, FEDERATION = "Data", "Model", "Training", "Federation"
ROBUSTNESS, OUTPUT = "Robustness", "Output"
PANELS = (DATA, MODEL, TRAINING, FEDERATION, ROBUSTNESS, OUTPUT)


def option(panel: str, help: str, *names: str) -> Any:
    """A typer option in this group of the help; without names, it is called after its parameter."""
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False)


def out(help: str) -> Any:
    """The option for what a command writes."""
    return option(OUTPUT, help, "--out", "-o")


Quiet = Annotated[bool, option(OUTPUT, "Print nothing but errors.", "--quiet", "-q")]
AsJson = Annotated[bool, option(OUTPUT, "Print the result as one JSON object.", "--json")]
DataDir = Annotated[
    Path | None,
    option(DATA, "Folder of the data sets; default: the environment variable COPFL_DATA.", "--data-dir"),
]
Algorithm = Annotated[
    str | None,
    option(TRAINING, "An algorithm (`copfl list algorithms`); default: copfl.", "--algorithm", "-a"),
]

On = Annotated[
    str | None,
    option(TRAINING, "A cluster: slurm, slurm:PARTITION or dask:ADDRESS; default: this machine.", "--on"),
]


class Row(NamedTuple):
    """An option of every command that trains, and the setting that it is."""

    names: str
    setting: str  # TABLE.KEY
    help: str
    type: type = str


def _parameter(row: Row) -> str:
    return row.names.split()[0].removeprefix("--").replace("-", "_")


RUN_OPTIONS = {
    DATA: (
        Row(
            "--dataset -d", "data.name", "A name, file, folder, hf:NAME or module:function; default: digits."
        ),
        Row("--target", "data.target", "The column of a table to predict; several with commas."),
        Row("--client", "data.client", "The column that names the client; default: none."),
        Row("--text", "data.text", "The column of texts to learn from; default: none."),
        Row(
            "--task",
            "data.kind",
            "classification, multilabel, regression or next_token; default: by the targets.",
        ),
        Row("--skip-corrupt", "data.skip_corrupt", "Leave out damaged images of a folder.", bool),
        Row(
            "--partition",
            "partition.name",
            "Of `copfl list partitions`, or a file; default: classes, by_group with --client.",
        ),
    ),
    MODEL: (
        Row(
            "--model -m",
            "model.name",
            "A name, module:Class, hf:FOLDER, torchvision:NAME or timm:NAME; default: chosen by the samples.",
        ),
        Row(
            "--weights", "model.weights", "Of a pretrained model: default, none or a file; default: default."
        ),
        Row("--adapter", "adapter.name", "lora, or lora:r=8,alpha=16,targets=query+value; default: none."),
        Row(
            "--train", "model.train", "Parameters to train: parts or patterns, as head,*.bias; default: all."
        ),
        Row(
            "--freeze", "model.freeze", "Parameters to keep as they are, as body or *.lora_A*; default: none."
        ),
    ),
    TRAINING: (
        Row(
            "--objective",
            "task.loss",
            "squared, absolute, huber or module:function; default: by the targets, see docs/tasks.md.",
        ),
        Row(
            "--metrics",
            "task.metrics",
            "Metrics, the first is primary, as auc,accuracy; default: by the targets.",
        ),
        Row("--optimizer", "optimizer.name", "sgd, adam or mamo; default: the algorithm's; in compare adam."),
        Row("--lr", "optimizer.lr", "Learning rate; default: the optimizer's.", float),
        Row("--epochs", "algorithm.epochs", "Local epochs per round; default: 1.", int),
        Row(
            "--batch-size --batch",
            "run.batch",
            "Samples per training step; default: 8 on digits, 32 elsewhere.",
            int,
        ),
        Row("--device", "run.device", "cpu, cuda, cuda:N or auto; default: cpu."),
        Row("--engine", "run.engine", "auto, sequential, vmap or cuda_graph; default: auto, the fastest."),
        Row("--precision", "run.precision", "auto, fp32, tf32, bf16, fp64; default: auto."),
        Row(
            "--workers",
            "run.workers",
            "Processes on a CPU; 0: the fastest number. Default: 0 in run, 1 in compare and sweep.",
            int,
        ),
    ),
    FEDERATION: (
        Row("--clients -n", "run.clients", "Number of clients; default: 10.", int),
        Row("--rounds -r", "run.rounds", "Number of rounds; default: 40 on digits, 100 elsewhere.", int),
        Row("--participation", "run.participation", "Fraction of clients per round; default: 1.", float),
        Row(
            "--new-clients",
            "run.new_clients",
            "Fraction of the clients that never train and are fitted as new ones afterwards; default: 0.",
            float,
        ),
        Row("--store", "run.store", "Client states in memory or on disk; default: memory."),
    ),
    ROBUSTNESS: (
        Row(
            "--robust",
            "robust.name",
            "Robust aggregation against malicious clients: clip, trimmed_mean or median; default: none.",
        ),
        Row(
            "--attack",
            "attack.name",
            "Simulated attack: label_flip, sign_flip, scaled, noise or free_rider; default: none.",
        ),
        Row("--attackers", "attack.fraction", "Fraction of malicious clients; default: 0.2.", float),
        Row(
            "--privacy",
            "privacy.noise",
            "Clip the uploads and add noise to their sum, in multiples of privacy.clip; default: none.",
            float,
        ),
    ),
}
SETTINGS = {  # by the name of the option's parameter
    _parameter(row): row.setting for rows in RUN_OPTIONS.values() for row in rows
} | {"algorithm": "algorithm.name", "seed": "run.seed"}


SYNONYMS = {  # of other tools, with what they are here
    "--alpha": "--partition dirichlet --set dirichlet.alpha=0.3",
    "--bs": "--batch-size",
    "--classes-per-client": "--set classes.per_client=3",
    "--data": "--dataset",
    "--data-path": "--data-dir",
    "--gpu": "--device cuda",
    "--learning-rate": "--lr",
    "--local-ep": "--epochs",
    "--local-epochs": "--epochs",
    "--method": "--algorithm",
    "--momentum": "--optimizer sgd --set sgd.momentum=0.9",
    "--new-clients": "copfl federate join, after the training",
    "--num-clients": "--clients",
    "--num-rounds": "--rounds",
    "--output": "--out",
    "--strategy": "--algorithm",
    "--weight-decay": "--set optimizer.weight_decay=0.001",
}


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `RUN_OPTIONS`, --data-dir and --set, which it receives as one argument, `tables`."""
    types: dict[str, Any] = {"data_dir": DataDir}
    for panel, rows in RUN_OPTIONS.items():
        for row in rows:
            name, *short = row.names.split()
            types[_parameter(row)] = Annotated[row.type | None, option(panel, row.help, name, *short)]
    any_setting = "Any setting as TABLE.KEY=VALUE, such as copfl.rate=0.15; repeatable."
    types["settings"] = Annotated[list[str] | None, option(TRAINING, any_setting, "--set", "-s")]

    @functools.wraps(command)
    def with_tables(**options: Any) -> None:
        given = {name: options.pop(name) for name in types}
        command(tables=tables_of(**given), **options)

    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [inspect.Parameter(name, keyword, default=None, annotation=t) for name, t in types.items()]
    others = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "tables"]
    with_tables.__signature__ = inspect.Signature([*others, *shared])  # type: ignore[attr-defined]
    with_tables.__annotations__ = {p.name: p.annotation for p in (*others, *shared)}
    return with_tables


def tables_of(*, data_dir: Path | None = None, settings: list[str] | None = None, **options: Any) -> Tables:
    """The tables of run.toml that the options of `SETTINGS` describe; --set overrides them."""
    from copfl.experiment.config import setting

    values = [(*SETTINGS[name].split("."), value) for name, value in options.items()]
    values += [("data", "dir", None if data_dir is None else str(data_dir)), *map(setting, settings or [])]
    tables: Tables = {}
    for title, key, value in values:
        if value is not None:
            tables.setdefault(title, {})[key] = value
    return tables


class Command(TyperCommand):
    """A command whose help lists its options in titled groups, as plain text in a terminal and in a pipe."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *PANELS, "Options")}
        for parameter in self.get_params(ctx):
            line = parameter.get_help_record(ctx)
            usual = "Arguments" if isinstance(parameter, click.Argument) else "Options"
            if line is not None:
                groups[getattr(parameter, "rich_help_panel", None) or usual].append(line)
        for title, lines in groups.items():
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


def help_without_command(context: typer.Context) -> None:
    """Prints the help of a group of commands that was called without one."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def logger(quiet: bool) -> Callable[[str], None]:
    """A function that prints a line about the work that is done, to stderr; nothing, if `quiet`."""
    return lambda text: None if quiet else print(text, file=sys.stderr, flush=True)


def data_name(tables: Tables) -> str:
    """The name of the data set, for the name of a folder."""
    return Path(str(tables.get("data", {}).get("name", "digits"))).stem.replace(":", "-")


def progress(title: str, count: str, hidden: bool = False, *, transient: bool = False) -> Any:
    """A progress bar of rich with one of its columns that count; without a terminal it shows nothing."""
    from rich import progress as rich
    from rich.console import Console

    columns = rich.TextColumn(title), rich.BarColumn(20), getattr(rich, count)()
    left = rich.TimeRemainingColumn(compact=True)
    disable = hidden or not sys.stderr.isatty()
    console = Console(stderr=True)
    return rich.Progress(*columns, left, console=console, transient=transient, disable=disable)
