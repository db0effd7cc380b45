"""The code blocks of a paper, run one after the other as a reader would, in this process and a folder of their own.

A shell that knows what the papers use: `copfl`, `python FILE`, `cd`, `ls`, `cat`, `cmp`, and `pip install` of copfl, of
which it checks that the extras exist. Anything else fails, unless the line before the block says why it is not run:

    <!-- not run: it takes an hour -->
    <!-- fails -->             the command is to end with an error
    <!-- file: mine.py -->     what follows is not run but saved under that name

Runs are cut to two rounds of few batches, comparisons to one seed and a small model in one process, without pictures:
that the words are understood and work together is what is held here, not what they find.
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
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 2
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?^(?P<fence>```+)(?P<language>[\w-]*)[^\n]*\n(?P<code>.*?)^(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
RUN = ("python", "bash", "console", "sh")
LANGUAGES = (*RUN, "text", "toml", "json", "")
SHORT = ("--rounds", str(ROUNDS), "--batch", "64")
ONE = (*SHORT, "--seeds", "0", "--jobs", "1", "--no-plots", "--model", "mlp")
LESS = {"run": SHORT, "compare": ONE, "sweep": ONE}  # of an option given twice, the last one counts


class Block(NamedTuple):
    """One code block of a paper."""

    line: int
    language: str
    code: str
    mark: str  # what the comment before it says

    @property
    def skipped(self) -> bool:
        return self.mark.startswith("not run:")


def blocks(text: str) -> Iterator[Block]:
    """The fenced code blocks, in their order."""
    for found in FENCE.finditer(text):
        yield Block(
            text[: found.start()].count("\n") + 1, found["language"], found["code"], found["mark"] or ""
        )


def indented(text: str) -> Iterator[str]:
    """Lines that are code by being indented, outside of fences and lists."""
    outside = FENCE.sub("", text)
    yield from re.findall(r"(?:^\n|\A)((?:^    \S.*\n)+)", outside, re.MULTILINE)


class Reader:
    """Somebody who types what a paper says."""

    def __init__(self, home: Path) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.home = home
        self.folder = home

    def follow(self, block: Block) -> None:
        """Runs the block; AssertionError says what went wrong."""
        with contextlib.chdir(self.folder):
            if block.mark.startswith("file: "):
                Path(block.mark.removeprefix("file: ")).write_text(block.code, "utf-8")
                return
            if block.language == "python":
                code = re.sub(r"\b(rounds=|rounds\": )\d+", rf"\g<1>{ROUNDS}", block.code)
                exec(compile(code, f"<line {block.line}>", "exec", dont_inherit=True), self.names)
                return
            for line in logical_lines(block.code):
                for words in commands(line):
                    self.type(words, fails=block.mark == "fails")
            self.folder = Path.cwd()

    def type(self, words: list[str], fails: bool = False) -> None:
        """Runs one command."""
        name, *rest = words
        if name == "copfl":
            code, said = call(rest)
            assert (code != 0) == fails, f"{shlex.join(words)} ended with {code}: {said}"
        elif name == "cd":
            os.chdir(rest[0])
        elif name in ("cat", "ls"):
            assert all(Path(path).exists() for path in rest), f"{shlex.join(words)}: not there"
        elif name == "cmp":
            assert filecmp.cmp(rest[0], rest[1], shallow=False), f"{shlex.join(words)}: they differ"
        elif name == "python" and rest[0].endswith(".py"):
            with mock.patch.object(sys, "argv", rest):
                runpy.run_path(rest[0], run_name="__main__")
        elif name == "pip" and rest[0] == "install":
            install([word for word in rest[1:] if not word.startswith("-")])
        elif words[:3] == ["python3", "-m", "venv"] or words == [".", ".venv/bin/activate"]:
            pass  # this process has one
        else:
            raise AssertionError(
                f"nobody here knows {shlex.join(words)}; mark the block <!-- not run: WHY -->"
            )


def install(wanted: list[str]) -> None:
    """Checks that this is copfl with extras that there are."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for word in wanted:
        found = re.fullmatch(r"(?:copfl|\.)(?:\[([\w,-]+)\])?", word)
        assert found, f"pip install {word} is not of copfl"
        for extra in (found[1] or "").split(","):
            assert not extra or extra in extras, f"copfl has no extra {extra}"


def call(words: list[str]) -> tuple[int, str]:
    """`copfl WORDS` in this process: its exit code, and what it said."""
    from copfl.cli import main as cli

    words = [*words, *LESS.get(words[0], ())] if words else words
    if "--tune-seeds" in words:
        words = [*words, "--tune-seeds", "0"]
    if words[0] == "resume" and "--rounds" in words:
        words = [*words, "--rounds", str(ROUNDS + 1)]
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["copfl", *words]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            cli.main()
        except SystemExit as exit:
            return int(exit.code or 0), said.getvalue()[-2000:]


def logical_lines(code: str) -> Iterator[str]:
    """The lines, with those that end in a backslash joined, and without the prompts of a console."""
    for line in code.replace("\\\n", " ").splitlines():
        if line := line.strip().removeprefix("$ "):
            yield line


def commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line; what a shell does beyond `&&` and `#` is not known here."""
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
