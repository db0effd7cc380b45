"""Run folders that there are. Without torch, so that a wrong name is said at once."""

from pathlib import Path

from copfl.errors import RunError, option


def check_folder(path: Path) -> None:
    """RunError if there is no folder at this path, with those that there are."""
    if not path.is_dir():
        raise RunError(
            f"there is no folder {path}; a run folder was expected, as a run with {option('out')} writes it. "
            f"Known runs: {known(path.parent)}"
        )


def known(parent: Path) -> str:
    """The latest runs in a folder, and in its folder runs, where a run without --out is written."""
    files = [*parent.glob("runs/*/run.toml"), *parent.glob("*/run.toml")] if parent.is_dir() else []
    names = sorted(file.parent.relative_to(parent).as_posix() for file in files)
    return ", ".join(names[-5:]) or "none"
