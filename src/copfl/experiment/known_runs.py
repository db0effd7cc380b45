"""What is said of a run folder that does not exist. Without torch, so that it is said at once."""

from pathlib import Path

from copfl.errors import RunError


def check_folder(path: Path) -> None:
    """RunError if there is no such run folder."""
    if not path.is_dir():
        raise RunError(
            f"there is no folder {path}; a run folder was expected, as `copfl run --out FOLDER` writes it. "
            f"Known runs: {known_runs(path.parent)}"
        )


def known_runs(parent: Path) -> str:
    """The latest runs in a folder, and in its folder runs, where a run without --out is written."""
    files = [*parent.glob("runs/*/run.toml"), *parent.glob("*/run.toml")] if parent.is_dir() else []
    names = sorted(file.parent.relative_to(parent).as_posix() for file in files)
    return ", ".join(names[-5:]) or "none"
