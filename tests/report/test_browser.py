"""The report in a real browser: Debian's `chromium`, and from PyPI playwright and axe-playwright-python."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copfl.experiment import reading
from copfl.experiment.analysis.gains import Analysis, Cross
from copfl.federation.node import site_page
from copfl.report import document, page, serving
from copfl.report.page import RunsPage
from copfl.report.serving import PageServer
from copfl.stats import Interval
from tests.report.sites import SITE

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
# Some sandboxes need --no-sandbox because the tests run as root; the others keep Chromium from asking the
# network.
ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
Open = Callable[..., Any]
# The names and reasons of members come from other machines.
HOSTILE = "<script>window.taken=1</script><img src=x onerror='window.taken=1'>"


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
        path.write_text(document.render(page.document_of(reading.read_all(shown))), encoding="utf-8")
    paths["verdict"] = home / "verdict.html"
    (run,) = reading.read_all([runs["copfl"]])
    alone = run.final("accuracy") - np.array([0.1, 0.05, 0.0, -0.02])
    bounds = [Interval(0.05, 0.15), Interval(-0.1, 0.2), Interval(-0.1, 0.1), Interval(-0.2, 0.1)]
    found = Analysis(alone, Cross([0], np.ones((1, 1))), np.full(4, np.nan), bounds)
    named = dataclasses.replace(
        run,
        findings={"analysis": found},
        environment={
            **run.environment,
            "client_names": ["a", HOSTILE, "c", "a very long name of a hospital " * 3],
        },
    )
    paths["verdict"].write_text(document.render(page.document_of([named])), encoding="utf-8")
    paths["site"] = home / "site.html"
    paths["site"].write_text(document.render(site_page.document_of(SITE)), encoding="utf-8")
    return paths | {"federation": _federation(home)}


def _federation(home: Path) -> Path:
    """The coordinator's page of a run that has ended, with a hostile member."""
    pytest.importorskip("cryptography", reason='the coordinator\'s page needs `pip install "copfl[flower]"`')
    from copfl.federation.operations.page import FederationPage
    from tests.federation.folders import ServerState

    state = ServerState(home / "clinic", ["north", HOSTILE, "west", "east"], rounds=16, benefit=True)
    state.start()
    for number in range(1, 17):
        state.begin_round(number)
        private = {"epsilon": number / 2, "epsilon_server": float(number)}
        state.end_round(number, {1: f"{HOSTILE} declined"} if number == 2 else {}, federation=private)
    state.log("failed", reason=f"no space left {HOSTILE}")
    path = home / "federation.html"
    path.write_text(FederationPage(state.app).html(), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any, reports: dict[str, Path]) -> Iterator[Open]:
    """Opens a report from disk; at the end, nothing was complained of and nothing requests of the network."""
    messages: list[str] = []
    requests: list[str] = []
    contexts = []

    def open_(
        which: str = "one",
        size: dict[str, int] = DESKTOP,
        scheme: str = "light",
        *,
        details: bool = True,
        **how: Any,
    ) -> Any:
        context = browser.new_context(viewport=size, color_scheme=scheme, **how)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(reports[which].as_uri())
        tab.wait_for_selector("html[data-drawn]", state="attached")
        if details:
            tab.evaluate("document.querySelectorAll('#details').forEach((one) => (one.open = true))")
            until(tab, "[...document.querySelectorAll('.plot')].every((plot) => plot.drawing)")
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


def pointed(tab: Any, plot: str, selector: str, place: int, dx: float = 0.5) -> str:
    """The words that appear where the pointer is on the given element of a chart."""
    element = tab.locator(f"#plot-{plot} {selector}").nth(place)
    element.scroll_into_view_if_needed()
    box = element.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * dx, box["y"] + box["height"] / 2)
    return str(tab.locator(f"#plot-{plot} .tip").text_content())


def test_a_hover_names_the_client_and_the_round(opened: Open) -> None:
    tab = opened()
    assert pointed(tab, "clients", ".point:not(.entry *)", 2).startswith("site 2after training: ")
    assert pointed(tab, "weight", ".cell", 19).startswith("site 3round 5: 0.")  # the last
    said = pointed(tab, "accuracy", ".curve", 0, dx=0.99)
    assert said.startswith("round 5after training: ")
    assert "global model: " in said
    tab.mouse.move(1, 1)
    assert tab.locator(".tip").count() == 0
    tab.locator("#plot-accuracy [data-series='0']").click()  # the legend hides a curve
    assert tab.locator("#plot-accuracy .curve").count() == 2


def test_the_marks_of_the_charts(opened: Open) -> None:
    tab = opened("one", DESKTOP, "dark")
    ticks = tab.locator("#plot-accuracy text").all_text_contents()
    assert [tick for tick in ticks if tick in "12345"][:5] == ["1", "2", "3", "4", "5"]  # whole rounds
    assert "1.5" not in ticks
    assert tab.locator("#plot-weight .centre").count() == 1
    assert "mark: the equal weight 1/4 = 0.250" in tab.locator("#plot-weight").text_content()
    assert tab.locator("#plot-data .none").count() > 0  # few and none differ by more than a colour
    assert tab.locator("#plot-accuracy .band").count() == 1
    several = opened("three")
    assert several.locator("#plot-accuracy .band").count() == 0  # they would mix
    assert several.locator("#plot-accuracy .bar").count() >= 3


def test_it_prints(opened: Open) -> None:
    tab = opened("three", PHONE, "dark")
    content = tab.pdf(format="A4", prefer_css_page_size=True)
    assert len(content) < 1_000_000
    assert 5 < content.count(b"/Type /Page\n") < 40
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate(
        "[...document.querySelectorAll('.plot svg')].every((svg) => svg.viewBox.baseVal.width === 720)"
    )
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.evaluate("document.querySelector('.plot svg').viewBox.baseVal.width") < 400


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
    assert tab.locator("#message").text_content().startswith("site 0, after training: ")
    tab.keyboard.press("ArrowDown")
    assert tab.locator("#message").text_content().startswith("site 1, after training: ")
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#message").text_content().startswith("site 1, before training: ")
    playwright.expect(tab.locator("#plot-clients .tip")).to_contain_text("site 1before training")
    tab.locator("#plot-weight").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        tab.keyboard.press(key)
    assert tab.locator("#message").text_content().startswith("site 1, round 2: 0.")
    tab.locator("#plot-accuracy").focus()
    tab.keyboard.press("ArrowRight")
    assert "lowest: site" in tab.locator("#message").text_content()
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
                    getComputedStyle(document.querySelector("#plot-accuracy text")).fill]
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
        "getComputedStyle(document.querySelector('#plot-accuracy text')).fill !== 'rgb(26, 29, 33)'",
    )
    assert shades(light) == shades(dark)
    assert light.locator("#theme").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize(
    ("which", "size", "scheme", "figures"),
    [
        ("one", DESKTOP, "light", 12),
        ("three", DESKTOP, "light", 12),
        ("three", PHONE, "dark", 12),
        ("federation", PHONE, "dark", 8),
        ("site", DESKTOP, "light", 1),
        ("site", PHONE, "dark", 1),
        ("verdict", DESKTOP, "dark", 12),
        ("verdict", PHONE, "light", 12),
    ],
    ids=[
        "one-desktop light",
        "three-desktop light",
        "three-phone dark",
        "federation-phone dark",
        "site-desktop light",
        "site-phone dark",
        "verdict-desktop dark",
        "verdict-phone light",
    ],
)
def test_every_figure_is_drawn_and_fits_and_axe_finds_nothing_serious(
    opened: Open, which: str, size: dict[str, int], scheme: str, figures: int
) -> None:
    """Two laws, as a page takes seconds to open."""
    tab = opened(which, size, scheme)
    drawn = tab.evaluate(
        """() => [...document.querySelectorAll(".plot")].map((plot) => [
            plot.id, plot.querySelectorAll(".curve, .point, .cell").length, plot.getBoundingClientRect().width])"""
    )
    assert len(drawn) >= figures
    for name, marks, width in drawn:
        assert marks, name
        assert 250 < width <= size["width"], name
    assert (
        tab.evaluate("document.documentElement.scrollWidth") <= size["width"]
    )  # nothing to scroll sideways for
    tab.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    found = axe.Axe().run(tab).response["violations"]
    assert [f"{v['impact']} {v['id']}: {v['nodes'][0]['html'][:200]}" for v in found] == []


def test_the_verdict_is_first_and_all_else_opens_where_it_is_asked_for(opened: Open) -> None:
    tab = opened("verdict", PHONE, details=False)
    top = tab.locator("#plot-verdict").bounding_box()["y"]
    assert top < PHONE["height"] / 2
    assert tab.locator("#plot-verdict .side").count() == 2
    assert tab.locator("#plot-verdict .point").count() == 5  # four sites and their mean
    assert "▲ better together" in tab.locator("#plot-verdict").text_content()
    assert HOSTILE in tab.locator("#text-verdict").text_content()
    assert tab.locator("main script, main img").count() == 0
    assert not tab.locator("#plot-accuracy").is_visible()
    tab.locator("#plot-verdict").focus()
    tab.keyboard.press("ArrowDown")
    assert (
        tab.locator("#message")
        .text_content()
        .startswith("a, gain: 10.0 points (5.0 to 15.0), better together")
    )
    tab.locator("nav a[href='#accuracy']").click()
    until(tab, "document.getElementById('plot-accuracy').drawing")
    assert tab.locator("#plot-accuracy .curve").count() > 0
    tab.locator("#details > summary").click()
    assert not tab.locator("#plot-accuracy").is_visible()
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("#plot-accuracy").is_visible()  # on paper is everything
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not tab.locator("#plot-accuracy").is_visible()


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
    server = PageServer(RunsPage([run]), 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    messages: list[str] = []
    try:
        tab = browser.new_page()
        tab.on("console", lambda message: messages.append(message.text))
        tab.goto(server.address)
        tab.wait_for_selector("html[data-drawn]", state="attached")
        tab.locator("#plot-accuracy [data-series='1']").click()
        tab.locator("#figure-weight summary").click()
        tab.evaluate("scrollTo({top: 700, behavior: 'instant'})")
        place = "document.querySelector('#figure-accuracy').getBoundingClientRect().top"
        before = tab.evaluate(place)
        for name, content in whole.items():
            (run / name).write_bytes(content)
        until(
            tab,
            "document.querySelector('#plot-accuracy').drawing.points.some((one) => one.head === 'round 5')",
        )
        playwright.expect(tab.locator("#part-subtitle")).to_contain_text("5 rounds, 4 sites")
        assert tab.locator("#plot-accuracy .curve").count() == 2  # one is still hidden
        assert tab.locator("#part-table-weight table").is_visible()
        assert "round 5" in tab.locator("#part-table-weight thead").text_content()
        assert tab.evaluate(place) == pytest.approx(before, abs=1)  # also where a text above it got shorter
        tab.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert messages == []


def test_names_and_reasons_of_members_stay_text(opened: Open) -> None:
    tab = opened("federation")
    assert HOSTILE in tab.locator("#part-tables").text_content()
    assert "no space left <script>" in tab.locator("#part-conclusion").text_content()
    assert tab.locator("main script, main img, [onerror]").count() == 0
    tab.locator("#plot-members").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    assert HOSTILE in tab.locator("#plot-members .tip").text_content()
    contributed = tab.locator("#part-tables-benefit").text_content()
    assert "95 % interval" in contributed
    assert HOSTILE in contributed
    assert "higher" in contributed
    assert tab.evaluate("window.taken") is None


@pytest.fixture
def coordinator(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any, PageServer]]:
    """A page with a clock that the test moves, the state of the server's folder, and the server of the page."""
    pytest.importorskip("cryptography", reason='the coordinator\'s page needs `pip install "copfl[flower]"`')
    from copfl.federation.operations.page import FederationPage
    from tests.federation.folders import ServerState

    monkeypatch.setattr(serving, "BUSY", 1.0)  # every request looks at the folder
    state = ServerState(tmp_path / "clinic")
    state.start()
    state.begin_round(1)
    server = PageServer(FederationPage(state.app), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    context = browser.new_context(viewport=DESKTOP)
    messages: list[str] = []
    try:
        tab = context.new_page()
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.clock.install()
        with state.running():
            tab.goto(server.address)
            tab.wait_for_selector("html[data-drawn]", state="attached")
            yield tab, state, server
    finally:
        context.close()
        server.shutdown()
        thread.join()
        server.server_close()
    assert [text for text in messages if "ERR_CONNECTION_REFUSED" not in text] == []


def later(tab: Any, seconds: float, part: str, text: str) -> None:
    """Moves the page's clock, and waits for the text."""
    tab.clock.fast_forward(int(1000 * seconds))
    playwright.expect(tab.locator(part)).to_contain_text(text)


def test_the_coordinators_page_follows_a_run_and_keeps_the_focus(coordinator: Any) -> None:
    tab, state, _ = coordinator
    playwright.expect(tab.locator("#part-conclusion")).to_contain_text("It waits for north (training")
    tab.evaluate("window.same_page = true")
    table = tab.locator("#part-tables .scroll")
    table.focus()
    state.end_round(1)
    state.begin_round(2)
    later(tab, 3, "#part-conclusion", "Round 2 of 4 is running.")
    assert table.evaluate("(element) => element === document.activeElement")  # though charts have come
    tab.locator("#plot-members").focus()
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#message").text_content() == "round 1, north: 10.0 %"
    tab.locator("#figure-mean summary").click()
    tab.locator("#plot-members").focus()
    state.end_round(2, {1: "no reply within 60 s"})
    later(tab, 3, "#part-tables-rounds", "south: no reply within 60 s")
    assert tab.evaluate("document.activeElement.id") == "plot-members"
    playwright.expect(tab.locator("#plot-members .tip")).to_contain_text("round 1")
    assert tab.locator("#part-table-mean table").is_visible()
    assert tab.evaluate("window.same_page")  # it was not loaded again
    assert tab.locator("nav a").all_text_contents()[:3] == ["State", "Accuracy", "Rounds"]


def test_a_screen_reader_hears_what_is_new_and_not_every_time(coordinator: Any) -> None:
    tab, state, server = coordinator
    news = tab.locator("#news")
    assert news.get_attribute("role") == "status"  # polite
    assert news.text_content() == ""  # what is on the page when it opens is read there
    state.end_round(1)
    state.begin_round(2)
    later(tab, 3, "#news", "Round 2 of 4 is running. It waits for")
    state.end_round(2)
    state.begin_round(3)
    later(tab, 3, "#part-conclusion", "Round 3 of 4 is running.")
    assert "Round 2 of 4" in news.text_content()  # half a minute of silence
    later(tab, 31, "#news", "Round 3 of 4 is running.")
    server.shutdown()
    server.server_close()
    tab.clock.fast_forward(40_000)
    playwright.expect(tab.locator("#connection")).to_contain_text("No connection to copfl")
    playwright.expect(news).to_contain_text("No connection to copfl")


def test_updates_can_be_paused_with_the_keyboard(coordinator: Any) -> None:
    tab, state, _ = coordinator
    pause = tab.get_by_role("button", name="Pause updates")
    pause.focus()
    tab.keyboard.press("Enter")
    assert pause.get_attribute("aria-pressed") == "true"
    playwright.expect(tab.locator("#connection")).to_have_text("paused")
    state.end_round(1)
    state.begin_round(2)
    tab.clock.fast_forward(60_000)
    tab.wait_for_timeout(300)
    assert "Round 1 of 4" in tab.locator("#part-conclusion").text_content()
    tab.keyboard.press("Enter")
    playwright.expect(tab.locator("#part-conclusion")).to_contain_text("Round 2 of 4 is running.")
    assert pause.evaluate("(element) => element === document.activeElement")
    found = axe.Axe().run(tab).response["violations"]  # while it is served
    assert [f"{v['impact']} {v['id']}: {v['nodes'][0]['html'][:200]}" for v in found] == []
