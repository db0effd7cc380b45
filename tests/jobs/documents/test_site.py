"""The documentation site: it builds strictly, every link has a target, and it opens in a real browser."""

from __future__ import annotations

import contextlib
import functools
import html
import http.server
import json
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

import copfl
from tests.report.test_browser import ARGUMENTS, CHROMIUM
from tests.slow import SLOW

ROOT = Path(__file__).resolve().parents[3]
pytest.importorskip("zensical", reason='the site needs `pip install "copfl[docs]"`')
pytestmark = pytest.mark.long


ATTRIBUTE = re.compile(r"""\s(href|src|id|name)=(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
LINKED = re.compile(r"<(?:a|img|link|script)\s[^>]*>")
ANCHORED = re.compile(r"<[a-z][^<>]*\s(?:id|name)=[^<>]*>")


class Links(NamedTuple):
    """The links of a page, and its anchors."""

    to: list[str]
    anchors: set[str]

    @classmethod
    def of(cls, text: str) -> Links:
        return cls(
            [value for tag in LINKED.findall(text) for value in attributes(tag, "href", "src")],
            {value for tag in ANCHORED.findall(text) for value in attributes(tag, "id", "name")},
        )


def attributes(tag: str, *names: str) -> list[str]:
    """The values of these attributes that are not empty."""
    values = [(name, html.unescape("".join(quoted))) for name, *quoted in ATTRIBUTE.findall(tag)]
    return [value for name, value in values if name in names and value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "docs/build.py", "--out", str(out), "--version", "dev"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((out / "versions.json").read_text()) == [
        {"version": "dev", "title": "dev", "aliases": []}
    ]
    assert "url=dev/" in (out / "index.html").read_text()
    return out / "dev"


def test_every_link_has_a_target_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {}
    for path in set(site.rglob("*.html")) - set((site / "gallery").glob("*.html")):
        text = path.read_text("utf-8")
        pages[path] = Links.of(text)
        for foreign in ("fonts.googleapis", 'src="http', '<link rel="stylesheet" href="http'):
            assert foreign not in text, f"{path.relative_to(site)} loads something from another server"
    assert len(pages) > 40
    for path, links in pages.items():
        for link in links.to if path.name != "404.html" else ():  # its links depend on where it is shown
            follow(site, pages, path, link)


def test_links_and_anchors_are_found() -> None:
    page = """<a class="x" href="a/?b=1&amp;c=2#d">a</a><img src=b.png><p id='e'>href="no"</p><h2
    id="f" class="g">f</h2><a name=h></a><script src="c.js"></script><a href="">g</a>"""
    assert Links.of(page) == (["a/?b=1&c=2#d", "b.png", "c.js"], {"e", "f", "h"})


def test_the_references_are_complete(site: Path) -> None:
    text = (site / "commands" / "index.html").read_text("utf-8")
    check_reference(text)
    assert "<td></td>" not in text  # every default is there
    python = (site / "api" / "index.html").read_text("utf-8")
    for name in set(copfl.__all__) - {"__version__"}:
        assert f">copfl.{name}<" in python, f"docs/api.md has no heading copfl.{name}"


def test_equations_are_typeset(site: Path) -> None:
    for path in (site / "algorithms").glob("*/index.html"):
        text = path.read_text("utf-8")
        assert "$$" not in text, path.parent.name
        assert "<math" in text or path.parent.name == "index", path.parent.name


def test_every_page_is_in_the_table_of_contents() -> None:
    named = re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text("utf-8"))
    generated = {"contributing.md", "changelog.md", "studies/index.md"}
    written = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    expected = {path.as_posix() for path in written if path.parts[0] != "algorithms"}  # which are inserted
    assert set(named) - generated == expected


def test_the_pages_fit_and_axe_finds_nothing_serious(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="the site is opened with playwright")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python")
    if CHROMIUM is None:
        pytest.skip("the site is opened in Chromium: apt-get install chromium")
    problems: list[str] = []

    def complain(message: Any) -> None:
        problems.append(message.text)

    with served(site.parent) as address, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        for width, scheme in ((1400, "light"), (390, "dark")):
            size = {"width": width, "height": 900}
            tab = browser.new_context(viewport=size, color_scheme=scheme).new_page()
            tab.on("console", complain)
            for page in ("", "algorithms/copfl/", "commands/", "api/"):
                tab.goto(f"{address}/dev/{page}")
                tab.wait_for_selector("h1")
                where = f"{page} {width} {scheme}"
                assert tab.evaluate("document.documentElement.scrollWidth") <= width, where
                cut = "[...document.querySelectorAll('pre > code')].filter((c) => c.scrollWidth > c.clientWidth + 1)"
                assert tab.evaluate(f"{cut}.map((c) => c.textContent)") == [], where
                if page in ("commands/", "api/") and not SLOW:
                    continue  # the same parts as on the others, in pages that axe reads for seconds
                found = axe.Axe().run(tab).response["violations"]
                bad = [v for v in found if v["impact"] in ("serious", "critical")]
                problems += [f"{where} {v['id']}: {v['nodes'][0]['html'][:200]}" for v in bad]
        browser.close()
    assert problems == []


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def follow(site: Path, pages: dict[Path, Links], path: Path, link: str) -> None:
    parts = urlsplit(link)
    if parts.scheme in ("http", "https", "mailto", "data"):
        return
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    assert target.exists(), f"{path.relative_to(site)} links to {link}"
    if parts.fragment and target in pages:
        assert unquote(parts.fragment) in pages[target].anchors, f"{path.relative_to(site)} links to {link}"


def test_the_references_in_docs_are_those_of_the_code() -> None:
    """For whoever reads a clone: `python docs/build.py references` writes them."""
    for page, text in runpy.run_path(str(ROOT / "docs" / "build.py"))["references"]().items():
        assert (ROOT / "docs" / page).read_text("utf-8") == text, f"docs/{page} is old: see the docstring"


def check_reference(text: str) -> None:
    """Every command, with every argument and option, is in the reference."""
    import typer

    from copfl.cli.main import app

    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", {})
        for word in [f"copfl {name}", *(f"copfl {name} {one}" for one in inner)]:
            assert f">{word}<" in text, f"{word} is not in the reference"
        for parameter in [p for one in (inner.values() if inner else [command]) for p in one.params]:
            assert parameter.help, f"copfl {name}: {parameter.name} has no help"
            for option in parameter.opts:
                assert option.lstrip("-").lower() in text.lower(), (
                    f"copfl {name} {option} is not in the reference"
                )
