"""Words that must not come back, in the package, in the pages and in the help of every command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    *sorted(path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".toml", ".html", ".js")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "zensical.toml",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "docs" / "build.py",
]
EXEMPT = (
    "src/copfl/experiment/migration.py",  # lists the old names
    "docs/notes/",  # history
)
# Old words, and what to write instead. Whole words, in any case; a space may also be a line break.
WORDS = {
    "lever|levers": "training add-on",
    "rival|rivals": "baseline",
    "sitting|sittings": "batch of runs",
    "newcomer|newcomers": "new client",
    "liar|liars": "malicious client",
    "hostile": "malicious",
    "mend|mends|mended|mending": "fix",
    "reckon|reckons|reckoned|reckoning": "compute",
    "one_by_one|one by one": "sequential",
    "all_at_once": "vmap",
    "look_every|look_at": "eval_every, eval_models",
    "look at|looks at|looked at|looking at": "evaluate, read, inspect",
    "last looks|5 looks|five looks": "evaluations",
    "side by side|side_by_side": "batched, next to each other",
    "abreast": "batched",
    "in step(?! \\d)|in_step": "batched",
    "the letter|by the letter": "as published",
    "by heart|by_heart": "memorised",
    "front door": "public API",
    "crew|crews": "executor",
    "stranger|strangers": "rejected node",
    "tray|trays": "buffer",
    "first weights": "initial weights",
    "real samples|real sample": "valid samples",
    "twin|twins": "duplicate",
    "planted": "synthetic",
    "odd client|odd clients": "anomalous client",
    "told": "received, reported",
    "heard": "received",
    "the broadcast|a broadcast|broadcast alone": "the global model",
    "even share|equal share": "equal weight",
    "at home|stays home|stay home": "local",
    "other worlds|five worlds": "settings",
    "this house|the house|rooms": "package, module",
}
PATTERNS = {
    words: re.compile(
        r"(?<![\w-])(?:" + "|".join(words.split("|")).replace(" ", r"\s+") + r")(?![\w-])", re.IGNORECASE
    )
    for words in WORDS
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def found_in(text: str) -> Iterator[str]:
    """Each old word with its line and its replacement."""
    for words, pattern in PATTERNS.items():
        for match in pattern.finditer(text):
            line = text[: match.start()].count("\n") + 1
            yield f"line {line}: {' '.join(match[0].split())!r} (use: {WORDS[words]})"


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if not name_of(path).startswith(EXEMPT)], ids=name_of
)
def test_no_old_word_in_a_file(path: Path) -> None:
    found = list(found_in(path.read_text("utf-8")))
    assert not found, "\n".join([f"{name_of(path)} has words that the field does not use:", *found])


def commands() -> dict[str, Any]:
    """Every command by its name, the nested ones too."""
    import typer

    from copfl.cli.main import app

    waiting = [("copfl", typer.main.get_command(app))]
    result: dict[str, Any] = {}
    while waiting:
        name, command = waiting.pop()
        result[name] = command
        waiting += [(f"{name} {word}", inner) for word, inner in getattr(command, "commands", {}).items()]
    return result


@pytest.mark.parametrize("name", commands())
def test_no_old_word_in_the_help_of_a_command(name: str) -> None:
    command = commands()[name]
    helps = [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
    options = [option for parameter in command.params for option in parameter.opts]
    found = list(found_in("\n".join([*helps, *options, *(option.lstrip("-") for option in options)])))
    assert not found, "\n".join([f"{name} --help:", *found])
