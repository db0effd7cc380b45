"""The code blocks of a page, executed in order in this process and in a temporary folder.

A minimal shell executes the commands that the pages use: `copfl`, `python FILE`, `cd`, `ls`, `cat`, `cmp`,
and `pip install` of copfl, for which it checks that the extras exist. Any other command fails, unless a
comment before the block gives the reason for not running it:

    <!-- not run: it takes an hour -->
    <!-- fails -->             the command must end with an error
    <!-- file: mine.py -->     the block is saved under that name instead of run

Runs have one round, large batches, no local baseline, and of the digits five clients; comparisons have five
clients, one seed, a small model, one process and no charts, and tune only what the command names, with two
values; new clients have one local update; `check_algorithm` has one round. Every third of the digits is read,
`copfl federate up` has its nodes in this process, and the pictures of a report and models as programs are
empty files: with COPFL_SLOW=1 they are real ones. The test checks that the commands work, not their results.
"""

from __future__ import annotations

import contextlib
import filecmp
import io
import os
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.slow import SLOW

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 1
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?^(?P<fence>```+)(?P<language>[\w-]*)[^\n]*\n(?P<code>.*?)^(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
RUN = ("python", "bash", "console", "sh")
LANGUAGES = (*RUN, "text", "toml", "json", "")
SHORT = ("--rounds", str(ROUNDS), "--batch-size", "64")
ONE = (*SHORT, "--clients", "5", "--seeds", "0", "--jobs", "1", "--no-plots", "--model", "mlp")
OVERRIDES = {
    "run": (*SHORT, "--no-local-baseline"),
    "compare": ONE,
    "sweep": ONE,
    "personalize": ("--epochs", "2"),
}  # the last of two equal options counts


class Block(NamedTuple):
    """One code block of a page."""

    line: int
    language: str
    code: str
    mark: str  # the comment before it

    @property
    def skipped(self) -> bool:
        return self.mark.startswith("not run:")

    @property
    def is_executed(self) -> bool:
        """Whether a session runs it, or saves it as a file."""
        return not self.skipped and (self.language in RUN or self.mark.startswith("file: "))


def blocks(text: str) -> Iterator[Block]:
    """The fenced code blocks, in order."""
    for match in FENCE.finditer(text):
        yield Block(
            text[: match.start()].count("\n") + 1, match["language"], match["code"], match["mark"] or ""
        )


def indented(text: str) -> Iterator[str]:
    """Lines that are code by indentation, outside of fences and lists."""
    outside = FENCE.sub("", text)
    yield from re.findall(r"(?:^\n|\A)((?:^    \S.*\n)+)", outside, re.MULTILINE)


class Session:
    """Executes blocks one after the other, with the variables and the folder of the previous ones."""

    def __init__(self, folder: Path) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.folder = folder

    def execute(self, block: Block) -> None:
        """Runs the block; raises AssertionError with the reason if it fails."""
        with contextlib.chdir(self.folder):
            if block.mark.startswith("file: "):
                Path(block.mark.removeprefix("file: ")).write_text(block.code, "utf-8")
                return
            if block.language == "python":
                code = re.sub(r"\b(rounds=|rounds\": )\d+", rf"\g<1>{ROUNDS}", block.code)
                with one_round_of_each_law(), contextlib.nullcontext() if SLOW else quick_parts():
                    exec(compile(code, f"<line {block.line}>", "exec", dont_inherit=True), self.names)
                return
            for line in logical_lines(block.code):
                for words in commands(line):
                    self.command(words, fails=block.mark == "fails")
            self.folder = Path.cwd()

    def command(self, words: list[str], fails: bool = False) -> None:
        """Runs one command."""
        name, *rest = words
        if name == "copfl":
            code, output = call(rest)
            assert (code != 0) == fails, f"{shlex.join(words)} ended with {code}: {output}"
        elif name == "cd":
            os.chdir(rest[0])
        elif name in ("cat", "ls"):
            assert all(Path(path).exists() for path in rest), f"{shlex.join(words)}: no such file"
        elif name == "cmp":
            assert filecmp.cmp(rest[0], rest[1], shallow=False), f"{shlex.join(words)}: they differ"
        elif name == "python" and rest[0].endswith(".py"):
            with mock.patch.object(sys, "argv", rest):
                runpy.run_path(rest[0], run_name="__main__")
        elif name == "pip" and rest[0] == "install":
            install(rest[1:])
        elif words[:3] == ["python3", "-m", "venv"] or words == [".", ".venv/bin/activate"]:
            pass  # this process already has one
        else:
            raise AssertionError(f"unknown command {shlex.join(words)}; mark the block <!-- not run: WHY -->")


def install(arguments: list[str]) -> None:
    """Checks that these are copfl, extras that exist, and a file of constraints that exists."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    waiting = iter(arguments)
    for word in waiting:
        if word == "-c":
            assert (ROOT / next(waiting)).is_file(), "no such file of constraints"
            continue
        if word.startswith("-"):
            continue
        match = re.fullmatch(r"(?:copfl|\.)(?:\[([\w,-]+)\])?", word)
        assert match, f"pip install {word} is not copfl"
        for extra in (match[1] or "").split(","):
            assert not extra or extra in extras, f"copfl has no extra {extra}"


def call(words: list[str]) -> tuple[int, str]:
    """Exit code and output of `copfl WORDS`, run in this process."""
    from copfl.cli import main as cli
    from copfl.experiment.models import new_clients

    words = [*words, *OVERRIDES.get(words[0], ())] if words else words
    if words[0] == "run" and is_of_digits(words):
        words = [*words, "--clients", "5"]
    if words[:1] == ["compare"] and "--tune" not in words:
        words = [*words, "--no-tune"]
    words = [two_of(word) if before == "--tune" else word for before, word in pairwise(("", *words))]
    if "--tune-seeds" in words:
        words = [*words, "--tune-seeds", "0"]
    if words[0] == "resume" and "--rounds" in words:
        words = [*words, "--rounds", str(ROUNDS + 1)]
    output = io.StringIO()
    with (
        contextlib.nullcontext() if SLOW else quick_parts(),
        mock.patch.object(sys, "argv", ["copfl", *words]),
        mock.patch.object(new_clients, "UPDATES", ROUNDS),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            cli.main()
        except SystemExit as exit:
            return int(exit.code or 0), output.getvalue()[-2000:]


def is_of_digits(words: list[str]) -> bool:
    """Whether `copfl run WORDS` names neither other data, nor a number of clients, nor a file that does."""
    data = [word for before, word in pairwise(words) if before in ("-d", "--dataset")]
    named = {"--clients", "-n", "-c", "--config", "--preset"}.intersection(words)
    return not named and all(name == "digits" for name in data)


@contextlib.contextmanager
def one_round_of_each_law() -> Iterator[None]:
    from copfl import testing

    with mock.patch.dict(testing.check_algorithm.__kwdefaults__, rounds=ROUNDS):
        yield


@contextlib.contextmanager
def quick_parts() -> Iterator[None]:
    """A third of the digits; `copfl federate up` starts no processes; pictures and models as programs are empty files.

    tests/federation/machines/test_end_to_end.py starts them, tests/report/test_page.py draws the pictures, and
    tests/experiment/export/test_formats.py writes the models.
    """
    from copfl import charts
    from copfl.data.sets import datasets
    from copfl.experiment.export import formats, onnx_file
    from copfl.federation.machines import local
    from tests.federation import in_process

    images, classes = datasets._digits()

    def empty_onnx(bundle: object, path: Path) -> list[Path]:
        path.touch()
        return [path]

    with (
        mock.patch.object(datasets, "_digits", return_value=(images[::3], classes[::3])),
        mock.patch.object(local, "up", in_process.up),
        mock.patch.object(charts, "pictures", return_value={"png": b"", "svg": b""}),
        mock.patch.object(formats, "_torch", return_value=b""),
        mock.patch.object(onnx_file, "write", empty_onnx),
    ):
        yield


def two_of(tuned: str) -> str:
    """The first two of the values that `--tune NAME=VALUE,...` tries."""
    name, _, values = tuned.partition("=")
    return f"{name}={','.join(values.split(',')[:2])}"


def logical_lines(code: str) -> Iterator[str]:
    """The lines, with continuation lines joined and without prompts."""
    for line in code.replace("\\\n", " ").splitlines():
        if line := line.strip().removeprefix("$ "):
            yield line


def commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line; of a shell's syntax only `&&` and `#` are supported."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>()")
    lexer.whitespace_split = True
    words: list[str] = []
    for token in lexer:
        if token == "&&":
            yield words
            words = []
        else:
            words.append(token)
    if words:
        yield words
