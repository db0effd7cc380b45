"""Options that several commands share, the settings that they describe, and help in titled groups."""

from __future__ import annotations

import functools
import inspect
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


class Row(NamedTuple):
    """An option of every command that trains, and the setting that it is."""

    names: str
    setting: str  # TABLE.KEY
    type: type
    help: str


RUN_OPTIONS = {
    DATA: (
        Row(
            "--dataset -d",
            "data.name",
            str,
            "A name, an .npz file, a folder or module:function; default: digits.",
        ),
        Row(
            "--partition",
            "partition.name",
            str,
            "classes, dirichlet, iid, by_group or a file; default: classes.",
        ),
    ),
    MODEL: (
        Row(
            "--model -m", "model.name", str, "A name or module:Class; default: cnn on digits, else resnet18."
        ),
    ),
    TRAINING: (
        Row("--optimizer", "optimizer.name", str, "sgd, adam or mamo; default: the algorithm's."),
        Row("--lr", "optimizer.lr", float, "Learning rate, above 0; default: the optimizer's."),
        Row("--batch", "run.batch", int, "Samples per training step; default: 8 on digits, 32 elsewhere."),
        Row("--device", "run.device", str, "cpu, cuda, cuda:N or auto; default: cpu."),
        Row(
            "--engine", "run.engine", str, "auto, sequential, vmap or cuda_graph; default: auto, the fastest."
        ),
        Row("--precision", "run.precision", str, "auto, fp32, tf32, bf16 or fp64; default: auto."),
        Row("--workers", "run.workers", int, "Processes on a CPU; default: 0, the fastest number of them."),
    ),
    FEDERATION: (
        Row("--clients -n", "run.clients", int, "Number of clients; default: 10."),
        Row("--rounds -r", "run.rounds", int, "Number of rounds; default: 40 on digits, 100 elsewhere."),
        Row("--participation", "run.participation", float, "Fraction of clients per round; default: 1."),
        Row("--store", "run.store", str, "Where client states are kept, memory or disk; default: memory."),
    ),
    ROBUSTNESS: (
        Row(
            "--robust",
            "robust.name",
            str,
            "Robust aggregation against malicious clients: clip, trimmed_mean or median; default: none.",
        ),
        Row(
            "--attack",
            "attack.name",
            str,
            "Simulated attack: label_flip, sign_flip, scaled, noise or free_rider; default: none.",
        ),
        Row("--attackers", "attack.fraction", float, "Fraction of malicious clients; default: 0.2."),
        Row(
            "--privacy",
            "privacy.noise",
            float,
            "Clip the uploads and add noise to their sum, in multiples of privacy.clip; default: none.",
        ),
    ),
}
ROWS = {
    row.names.split()[0].removeprefix("--"): (panel, row)
    for panel, rows in RUN_OPTIONS.items()
    for row in rows
}


SETTINGS = {name: row.setting for name, (_, row) in ROWS.items()}
SETTINGS |= {"algorithm": "algorithm.name", "seed": "run.seed"}


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `RUN_OPTIONS`, --data-dir and --set, which it receives as one argument, `tables`."""
    types: dict[str, Any] = {"data_dir": DataDir}
    for name, (panel, row) in ROWS.items():
        types[name] = Annotated[row.type | None, option(panel, row.help, *row.names.split())]
    types["settings"] = Annotated[
        list[str] | None,
        option(
            TRAINING, "Any setting as TABLE.KEY=VALUE, such as copfl.rate=0.15; repeatable.", "--set", "-s"
        ),
    ]

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
