"""`copfl reproduce`: hands over to the study of the CO-PFL paper, which is beside the library."""

import importlib
import sys
from pathlib import Path

import typer

from copfl.errors import UsageError

STUDY = Path("studies/paper")
# The study has the options, `--help` among them.
PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def reproduce(context: typer.Context) -> None:
    """Run the study of the CO-PFL paper again (studies/paper).

    It is part of the repository and not of the installed library. `copfl reproduce --help`, where the
    repository is, describes its experiments and options.
    """
    repository = str(repository_of_the_study())
    if repository not in sys.path:
        sys.path.insert(0, repository)  # as `python -m studies.paper` does
    importlib.import_module("studies.paper.command").main(context.args)


def repository_of_the_study() -> Path:
    """The folder that has the study: the source tree which runs, or else the working folder."""
    for folder in (Path(__file__).parents[3], Path.cwd()):
        if (folder / STUDY / "command.py").is_file():
            return folder
    raise UsageError(
        "the reproduction is a study of the repository and not part of the installed library; clone the "
        "repository and run `copfl reproduce` in its folder"
    )
