"""The documentation: the site builds without a warning, every link has a target, every code block runs."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from pathlib import Path

import click
import pytest
import typer.main

from copfl.cli.main import app
from tests import code_blocks

ROOT = Path(__file__).resolve().parents[3]
GENERATED = {"commands.md", "settings.md"}  # usage lines, which nobody types
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in GENERATED),
    *sorted((ROOT / "studies").rglob("*.md")),
]  # those of CONTRIBUTING.md are run by tests/jobs/documents/test_readme.py
EXECUTED = [p for p in PAGES if any(block.is_executed for block in code_blocks.blocks(p.read_text("utf-8")))]
COMMAND = re.compile(r"\s*(\$ |pip |python |copfl (?!on )[a-z-]+( |$))")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# -- code blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", EXECUTED, ids=name_of)
def test_every_code_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # modules of the page are imported from its own folder
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    session = code_blocks.Session(tmp_path)
    for block in code_blocks.blocks(page.read_text("utf-8")):
        if block.is_executed:
            try:
                session.execute(block)
            except Exception as error:
                raise AssertionError(f"{name_of(page)}, the block at line {block.line}: {error}") from error


def test_blocks_that_are_not_run_give_a_reason() -> None:
    for page in PAGES:
        for block in code_blocks.blocks(page.read_text("utf-8")):
            has_reason = len(block.mark) > len("not run: ") + 10
            assert has_reason or not block.skipped, f"{name_of(page)}:{block.line} gives no reason"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_blocks_that_are_not_run_could_be(page: Path) -> None:
    """Their Python compiles, their commands have these options, and the repository has their scripts."""
    for block in code_blocks.blocks(page.read_text("utf-8")):
        if not block.skipped:
            continue
        if block.language == "python":
            compile(block.code, f"{name_of(page)}:{block.line}", "exec", dont_inherit=True)
        for line in code_blocks.logical_lines(block.code) if block.language != "python" else ():
            for words in code_blocks.commands(line):
                check_words(list(itertools.takewhile(lambda word: word not in ("|", ">", "&"), words)))


def check_words(words: list[str]) -> None:
    """AssertionError for a command with an option that copfl does not have, or for a script that is not there."""
    while words and "=" in words[0]:  # a variable of the environment
        del words[0]
    if words[:1] == ["copfl"]:
        command: click.Command = typer.main.get_command(app)
        rest = words[1:]
        while isinstance(command, click.Group):
            name = rest.pop(0)
            assert name in command.commands, f"there is no command {shlex.join(words)}"
            command = command.commands[name]
        try:
            command.make_context(str(command.name), rest)
        except click.UsageError as error:
            raise AssertionError(f"{shlex.join(words)}: {error.format_message()}") from error
    elif words[:1] in (["torchrun"], ["docker"]) and "copfl" in words:
        check_words(words[words.index("copfl") :])
    elif words[:1] == ["python"] and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), f"there is no {words[1]}"


@pytest.mark.parametrize(
    "words", ["copfl run --nonsense", "copfl nonsense", "A=1 copfl compare --jobs many", "python nowhere.py"]
)
def test_a_command_that_could_not_be_run_is_found(words: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(words.split()[-1])):
        check_words(words.split())


def test_every_block_has_a_known_language() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        for block in code_blocks.blocks(text):
            where = f"{name_of(page)}:{block.line}"
            assert block.language in code_blocks.LANGUAGES, f"{where}: unknown language {block.language!r}"
            known = (
                not block.mark or block.skipped or block.mark == "fails" or block.mark.startswith("file: ")
            )
            assert known or block.language not in code_blocks.RUN, f"{where}: unknown mark {block.mark!r}"
            if block.language not in code_blocks.RUN:
                assert not COMMAND.match(block.code), f"{where} is a command: use ```bash"
        for code in code_blocks.indented(text):
            assert not COMMAND.match(code), (
                f"{name_of(page)}: {code!r} is a command: put it into a ```bash block"
            )


# -- the session itself ------------------------------------------------------------------------------------------------


def test_a_session_refuses_unknown_commands_and_wrong_exit_codes(tmp_path: Path) -> None:
    session = code_blocks.Session(tmp_path)
    for line, message in (
        ("rm -rf x", "unknown command rm"),
        ("copfl run --nonsense", "ended with 2"),
        ("copfl list algorithms | head", "ended with 2"),
        ("pip install numpy", "is not copfl"),
        ('pip install "copfl[nonsense]"', "no extra nonsense"),
        ("cat nowhere", "no such file"),
    ):
        with pytest.raises(AssertionError, match=message):
            session.execute(code_blocks.Block(1, "bash", f"{line}\n", ""))
    with pytest.raises(AssertionError, match="ended with 0"):
        session.execute(code_blocks.Block(1, "bash", "copfl --version\n", "fails"))


def test_blocks_are_found_with_their_marks() -> None:
    text = "a\n\n<!-- not run: an hour -->\n```bash\ncopfl \\\n  run  # x\n```\n\n"
    text += "````python\nx = '```'\n````\n\n    copfl run\n"
    one, two = code_blocks.blocks(text)
    assert (one.language, one.skipped, one.line) == ("bash", True, 3)
    assert list(code_blocks.commands(next(code_blocks.logical_lines(one.code)))) == [["copfl", "run"]]
    assert two.code == "x = '```'\n"
    assert list(code_blocks.indented(text)) == ["    copfl run\n"]


def test_the_first_paragraph_is_that_of_the_readme() -> None:
    readme, index = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/index.md"))
    assert readme.split("\n\n")[1] == index.split("\n\n")[1]
