"""The documentation: the site builds without a warning, every link leads somewhere, every code block runs."""

from __future__ import annotations

import html.parser
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests import paper

ROOT = Path(__file__).resolve().parent.parent
PAPERS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]  # CONTRIBUTING's are run by tests/test_papers.py
RUNNING = [
    p
    for p in PAPERS
    if any(b.language in paper.RUN and not b.skipped for b in paper.blocks(p.read_text("utf-8")))
]
# The blocks that are not run, by page; the reason stands before each of them. A new one is counted here or run.
NOT_RUN = {
    "README.md": 2,
    "docs/audit.md": 1,
    "docs/cifar10-systems.md": 1,
    "docs/compare.md": 1,
    "docs/deploy.md": 6,
    "docs/howto.md": 2,
    "docs/performance.md": 1,
    "docs/report.md": 2,
    "docs/reproduction.md": 1,
    "docs/tutorials/deploy.md": 1,
}
COMMAND = re.compile(r"\s*(\$ |pip |python |copfl (?!on )[a-z-]+( |$))")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# -- code blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_every_code_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "path", list(sys.path)
    )  # a reader's own modules are found in the reader's own folder
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    reader = paper.Reader(tmp_path)
    for block in paper.blocks(page.read_text("utf-8")):
        if block.language in paper.RUN and not block.skipped:
            try:
                reader.follow(block)
            except Exception as error:
                raise AssertionError(f"{name_of(page)}, the block at line {block.line}: {error}") from error


def test_what_is_not_run_is_counted_and_says_why() -> None:
    found: Counter[str] = Counter()
    for page in PAPERS:
        for block in paper.blocks(page.read_text("utf-8")):
            if block.skipped:
                found[name_of(page)] += 1
                assert len(block.mark) > len("not run: ") + 10, (
                    f"{name_of(page)}:{block.line} does not say why"
                )
    assert dict(found) == NOT_RUN


@pytest.mark.parametrize("page", PAPERS, ids=name_of)
def test_code_says_its_language(page: Path) -> None:
    text = page.read_text("utf-8")
    for block in paper.blocks(text):
        where = f"{name_of(page)}:{block.line}"
        assert block.language in paper.LANGUAGES, (
            f"{where} is in {block.language!r}, which is neither run nor left alone"
        )
        known = not block.mark or block.skipped or block.mark == "fails" or block.mark.startswith("file: ")
        assert known or block.language not in paper.RUN, f"{where}: {block.mark!r} means nothing"
        if block.language not in paper.RUN:
            assert not COMMAND.match(block.code), f"{where} is a command: say ```bash"
    for code in paper.indented(text):
        assert not COMMAND.match(code), (
            f"{name_of(page)}: {code!r} is a command: put it into a fence that says ```bash"
        )


# -- the reader itself -------------------------------------------------------------------------------------------------


def test_the_reader_knows_what_it_does_not_know(tmp_path: Path) -> None:
    reader = paper.Reader(tmp_path)
    for line, says in (
        ("rm -rf x", "nobody here knows rm"),
        ("copfl run --nonsense", "ended with 2"),
        ("copfl list algorithms | head", "ended with 2"),
        ("pip install numpy", "is not of copfl"),
        ('pip install "copfl[nonsense]"', "no extra nonsense"),
        ("cat nowhere", "not there"),
    ):
        with pytest.raises(AssertionError, match=says):
            reader.follow(paper.Block(1, "bash", f"{line}\n", ""))
    with pytest.raises(AssertionError, match="ended with 0"):
        reader.follow(paper.Block(1, "bash", "copfl --version\n", "fails"))


def test_blocks_are_found_with_their_marks() -> None:
    text = "a\n\n<!-- not run: an hour -->\n```bash\ncopfl \\\n  run  # x\n```\n\n"
    text += "````python\nx = '```'\n````\n\n    copfl run\n"
    one, two = paper.blocks(text)
    assert (one.language, one.skipped, one.line) == ("bash", True, 3)
    assert list(paper.commands(next(paper.logical_lines(one.code)))) == [["copfl", "run"]]
    assert two.code == "x = '```'\n"
    assert list(paper.indented(text)) == ["    copfl run\n"]


# -- the site ----------------------------------------------------------------------------------------------------------


class Links(html.parser.HTMLParser):
    """The addresses that a page leads to, and the places in it."""

    def __init__(self) -> None:
        super().__init__()
        self.to: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value and tag in ("a", "img", "link", "script"):
                self.to.append(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


def test_the_site_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    """Built once, looked at in three ways: its links, what it asks of the network, the reference of the commands."""
    pytest.importorskip("mkdocs", reason='the site needs `pip install "copfl[docs]"`')
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {}
    for path in tmp_path.rglob("*.html"):
        pages[path] = Links()
        pages[path].feed(path.read_text("utf-8"))
    assert len(pages) > 40
    for path, found in pages.items():
        for link in (
            found.to if path.name != "404.html" else ()
        ):  # whose links are made for wherever it is shown
            follow(tmp_path, pages, path, link)
        text = path.read_text("utf-8")
        for foreign in ("fonts.googleapis", 'src="http', '<link rel="stylesheet" href="http'):
            assert foreign not in text, f"{path.relative_to(tmp_path)} asks the network for something"
    check_reference((tmp_path / "commands" / "index.html").read_text("utf-8"))


def follow(site: Path, pages: dict[Path, Links], path: Path, link: str) -> None:
    parts = urlsplit(link)
    if parts.scheme in ("http", "https", "mailto", "data"):
        return
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    assert target.exists(), f"{path.relative_to(site)} links to {link}"
    if parts.fragment and target in pages:
        assert unquote(parts.fragment) in pages[target].places, f"{path.relative_to(site)} links to {link}"


def check_reference(text: str) -> None:
    """Every command, with every argument and option, is in the reference."""
    import typer

    from copfl.cli.main import app

    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", {})
        for word in [f"copfl {name}", *(f"copfl {name} {one}" for one in inner)]:
            assert f">{word}<" in text, f"{word} is not in the reference"
        for parameter in [p for one in (inner.values() if inner else [command]) for p in one.params]:
            assert parameter.help, f"copfl {name}: nothing is said about {parameter.name}"
            for option in parameter.opts:
                assert option.lstrip("-").lower() in text.lower(), (
                    f"copfl {name} {option} is not in the reference"
                )


def test_the_first_words_are_those_of_the_readme() -> None:
    readme, index = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/index.md"))
    assert readme.split("\n\n")[1] == index.split("\n\n")[1]
