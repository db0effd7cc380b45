"""The report in a real browser: Debian's `chromium`, and from PyPI playwright and axe-playwright-python."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from copfl.report import page, run_data, watch

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the browser tests need `pip install playwright`"
)
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright",
    reason="the browser tests need `pip install axe-playwright-python`",
)
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="the browser tests need Chromium: apt-get install chromium"
)
# Some sandboxes need --no-sandbox because the tests run as root; the others keep Chromium from asking the network.
ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def reports(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("reports")
    paths = {"one": home / "one.html", "three": home / "three.html"}
    for path, shown in zip(paths.values(), ([runs["copfl"]], list(runs.values())), strict=True):
        path.write_text(page.render(run_data.read_all(shown)), encoding="utf-8")
    return paths


@pytest.fixture
def opened(browser: Any, reports: dict[str, Path]) -> Iterator[Open]:
    """Opens a report from disk; at the end, nothing was complained of and nothing requests of the network."""
    messages: list[str] = []
    requests: list[str] = []
    contexts = []

    def open_(which: str = "one", size: dict[str, int] = DESKTOP, scheme: str = "light", **how: Any) -> Any:
        context = browser.new_context(viewport=size, color_scheme=scheme, **how)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(reports[which].as_uri())
        tab.wait_for_selector("html[data-drawn]", state="attached")
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert messages == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def until(tab: Any, expression: str) -> None:
    """Waits until the expression is true; Playwright's own way to wait is what the page's policy forbids."""
    for _ in range(200):
        if tab.evaluate(expression):
            return
        tab.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


def test_a_hover_shows_the_client(opened: Open) -> None:
    tab = opened()
    plot = tab.locator("#plot-clients")
    plot.scroll_into_view_if_needed()
    point = tab.locator("#plot-clients .scatterlayer .trace").first.locator(".point").nth(2)
    box = point.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = tab.locator("#plot-clients .hoverlayer .hovertext")
    label.first.wait_for()
    assert "client 2" in label.first.text_content()
    cells = tab.locator("#plot-weight .heatmaplayer image")
    cells.scroll_into_view_if_needed()
    box = cells.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.9)  # last round, last client
    label = tab.locator("#plot-weight .hoverlayer .hovertext")
    label.first.wait_for()
    assert label.first.text_content().startswith("client 3, round 5: 0.")


def test_the_keyboard_reaches_everything_and_walks_over_the_points(opened: Open) -> None:
    tab = opened()
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "content"
    reached = set()
    for _ in range(150):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("document.activeElement.id || document.activeElement.dataset.of || ''"))
    assert {f"plot-{name}" for name in ("accuracy", "clients", "weight", "where", "seconds")} <= reached
    tab.locator("#plot-clients").focus()
    tab.keyboard.press("ArrowDown")
    assert tab.locator("#message").text_content().startswith("client 0, after training: ")
    tab.keyboard.press("ArrowDown")
    assert tab.locator("#message").text_content().startswith("client 1, after training: ")
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#message").text_content().startswith("client 1, before training: ")
    shown = tab.locator("#plot-clients .hoverlayer .hovertext").first
    playwright.expect(shown).to_contain_text("client 1, before training")
    tab.locator("#plot-weight").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        tab.keyboard.press(key)
    assert tab.locator("#message").text_content().startswith("client 1, round 2: 0.")
    tab.locator("#plot-accuracy").focus()
    tab.keyboard.press("ArrowRight")
    assert "lowest: client" in tab.locator("#message").text_content()
    summary = tab.locator("#figure-accuracy summary")
    summary.focus()
    tab.keyboard.press("Enter")
    assert tab.locator("#part-table-accuracy table").is_visible()


def test_light_and_dark_follow_the_system_and_the_button(opened: Open) -> None:
    def shades(tab: Any) -> tuple[Any, Any]:
        """How bright the paper and the charts' letters are, 0 to 255."""
        return tuple(
            tab.evaluate(
                """() => [getComputedStyle(document.body).backgroundColor,
                    getComputedStyle(document.querySelector("#plot-accuracy .xtick text")).fill]
                    .map((rgb) => Number(rgb.match(/\\d+/)[0]))"""
            )
        )

    light, dark = opened(scheme="light"), opened(scheme="dark")
    assert shades(light)[0] > 240
    assert shades(light)[1] < 60
    assert shades(dark)[0] < 40
    assert shades(dark)[1] > 200
    light.locator("#theme").click()
    until(
        light,
        "getComputedStyle(document.querySelector('#plot-accuracy .xtick text')).fill !== 'rgb(26, 29, 33)'",
    )
    assert shades(light) == shades(dark)
    assert light.locator("#theme").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize(
    ("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop light", "phone dark"]
)
@pytest.mark.parametrize("which", ["one", "three"])
def test_every_figure_is_drawn_and_fits_and_axe_finds_nothing_serious(
    opened: Open, which: str, size: dict[str, int], scheme: str
) -> None:
    """Two laws, as a page takes seconds to open."""
    tab = opened(which, size, scheme)
    drawn = tab.evaluate(
        """() => [...document.querySelectorAll(".plot")].map((plot) => [
            plot.id, plot.querySelectorAll(".scatterlayer .trace, .heatmaplayer .hm").length, plot.data.length,
            plot.getBoundingClientRect().width])"""
    )
    assert len(drawn) >= 12
    for name, traces, expected, width in drawn:
        assert traces == expected, name
        assert 250 < width <= size["width"], name
    assert (
        tab.evaluate("document.documentElement.scrollWidth") <= size["width"]
    )  # nothing to scroll sideways for
    tab.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    found = axe.Axe().run(tab).response["violations"]
    assert [f"{v['impact']} {v['id']}: {v['nodes'][0]['html'][:200]}" for v in found] == []


def test_a_figure_can_be_saved(opened: Open, tmp_path: Path) -> None:
    tab = opened(accept_downloads=True)
    with tab.expect_download() as download:
        tab.locator("#figure-accuracy [data-save=svg]").click()
    assert download.value.suggested_filename == "accuracy.svg"
    download.value.save_as(tmp_path / "accuracy.svg")
    assert "after training" in (tmp_path / "accuracy.svg").read_text()


def test_a_live_page_shows_new_rounds_and_keeps_the_view(
    browser: Any, runs: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["copfl"], run)
    whole = {name: (run / name).read_bytes() for name in ("rounds.jsonl", "timing.jsonl")}
    for name, content in whole.items():
        (run / name).write_bytes(b"".join(content.splitlines(keepends=True)[:3]))
    server = watch.server([run], 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    messages: list[str] = []
    try:
        tab = browser.new_page()
        tab.on("console", lambda message: messages.append(message.text))
        tab.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        tab.wait_for_selector("html[data-drawn]", state="attached")
        tab.evaluate("Plotly.relayout('plot-accuracy', {'yaxis.range': [10, 20]})")
        tab.locator("#figure-weight summary").click()
        tab.evaluate("scrollTo({top: 700, behavior: 'instant'})")
        for name, content in whole.items():
            (run / name).write_bytes(content)
        until(tab, "document.getElementById('plot-accuracy').data.at(-1).y.length === 5")
        playwright.expect(tab.locator("#part-subtitle")).to_contain_text("5 rounds, 4 clients")
        assert tab.evaluate("document.getElementById('plot-accuracy').layout.yaxis.range") == [10, 20]
        assert tab.locator("#part-table-weight table").is_visible()
        assert "round 5" in tab.locator("#part-table-weight thead").text_content()
        assert tab.evaluate("scrollY") == 700
        tab.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert messages == []
