"""What the commands of `copfl federate` share: options, and the settings on the line."""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from copfl.cli.options import argument, option
from copfl.errors import UsageError
from copfl.settings.toml import assignment

if TYPE_CHECKING:
    from copfl.federation.protocol.proposal import SignedProposal

# Options of several commands.
NewAppFolder = Annotated[Path, argument("A new folder for the app, such as clinic.")]
AppFolder = Annotated[
    Path, argument("The folder that `copfl federate init` made, such as clinic.", "read_app")
]
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
Metrics = Annotated[
    str | None, option("Output", "Address of metrics for Prometheus, such as 127.0.0.1:9464; default: none.")
]
LogFormat = Annotated[str | None, option("Output", "Lines of logs: text or json; default: text.")]
LogLevel = Annotated[str | None, option("Output", "debug, info, warning or error; default: info.")]
RunName = Annotated[str | None, option("Output", "The run's name; default: the last one.")]
AppOrStateFolder = Annotated[
    Path,
    argument(
        "The folder of `copfl site join` or `copfl federate init`, or a node's state-dir.",
        "check_app_or_site",
    ),
]


def require_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise UsageError('Flower is not installed: pip install "copfl[flower]"')


def set_environment(metrics: str | None, log_format: str | None, log_level: str | None) -> None:
    """Passes the options to every process of the federation, before Flower reads them.

    Args:
        metrics: The option --metrics.
        log_format: The option --log-format.
        log_level: The option --log-level.
    """
    from copfl.federation.operations.run_log import environment

    os.environ.update(environment(metrics, log_format, log_level))


def given(**values: Any) -> dict[str, Any]:
    """The options that are on the line."""
    return {name: value for name, value in values.items() if value is not None}


def app_config(settings: list[str] | None, **values: Any) -> dict[str, Any]:
    """The keys of a run config or a node's that the command line sets: these options, and --set.

    Args:
        settings: What --set has, as KEY=VALUE.
        values: Options with a name of their own, by key; None: not on the line.
    """
    config = given(**values)
    for text in settings or []:
        if "=" not in text:
            raise UsageError(f'--set "{text}" must have the form KEY=VALUE, such as --set run.rounds=5')
        _, key, value = assignment(f"config.{text}")
        config[key] = value
    return config


def read_proposal(file: Path | None, config: dict[str, Any]) -> "SignedProposal | None":
    """The proposal in the file, which has all settings of a run: none of them may be on the line.

    Args:
        file: The option --proposal.
        config: Keys of a run config that are on the line.
    """
    from copfl.federation.protocol.proposal_text import chosen

    signed = None if file is None else chosen((), str(file))
    if signed is not None and config:
        raise UsageError(f"{file} has all settings of the run; leave out {next(iter(config))}")
    return signed
