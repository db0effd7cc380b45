"""The claims of README.md, CONTRIBUTING.md and the architecture are true."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from copfl.algorithms import ALGORITHMS
from tests.commands import called
from tests.test_layers import LEVELS, MODULES

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md")]


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_have_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_first_screen_has_the_command_the_paper_and_the_verdict() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    screen = "\n".join(readme.splitlines()[:24])
    assert "pip install -c constraints.txt . && copfl run\n" in screen
    assert 'pip install -c constraints.txt -e ".[test]" && pytest\n' in readme
    assert "docs/verdict.png" in screen
    assert "`copfl run --preset paper`" in screen
    assert "docs/results.md#reproduction-of-the-paper" in screen


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 700


def test_the_table_of_algorithms_is_the_registry() -> None:
    page = (ROOT / "docs" / "algorithms" / "index.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page.partition("## Systems")[0], re.MULTILINE)
    lines = {
        name: (sys.modules[f.__module__].__doc__ or "").split("\n")[0]
        for name, f in sorted(ALGORITHMS.items())
    }
    assert dict(rows) == lines
    listed = page.partition("## By kind")[2].partition("\n## ")[0]
    assert {name for name in re.findall(r"`(\w+)`", listed) if name in ALGORITHMS} == set(ALGORITHMS)


def test_the_counts_beside_other_tools_are_those_of_the_registry() -> None:
    """Those with a model per client are all but the kinds that end with a common one, and three over adapters."""
    listed = (ROOT / "docs" / "algorithms" / "index.md").read_text("utf-8").partition("## By kind")[2]
    common = re.findall(r"`(\w+)`", listed.partition("One global model:")[2].partition("fine-tuned:")[0])
    assert set(common) == {"fedavg", "fedprox", "scaffold", "fedce", "fedcalm", "ifca"}
    common += ["ffa_lora", "fedex_lora", "flex_lora"]
    row = f"| methods; those with a model per client | {len(ALGORITHMS)}; {len(ALGORITHMS) - len(common)} |"
    assert row in (ROOT / "docs" / "other-tools.md").read_text("utf-8")


QUOTED = re.compile(r"^\|[^|\n]* our line \|\n\| --- \| --- \|\n((?:\|.*\n)+)", re.MULTILINE)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "algorithms").glob("*.md")), ids=lambda p: p.stem)
def test_the_lines_that_a_page_quotes_are_in_the_code(page: Path) -> None:
    folders = [ROOT / "src" / "copfl" / name for name in ("algorithms", "parts", "core")]
    files = [path.read_text("utf-8") for folder in folders for path in sorted(folder.glob("*.py"))]
    code = "".join("".join(files).split())
    for row in "".join(QUOTED.findall(page.read_text("utf-8"))).splitlines():
        for quoted in re.findall(r"`([^`]+)`", row.split("|", 2)[2]):
            line = re.sub(r"^[A-Z]\w+\.(?=\w+$)", "", quoted)  # Class.method
            pieces = ["".join(piece.split()).strip(",()") for piece in line.split("...")]
            assert all(piece in code for piece in pieces), f"{page.name} quotes {quoted}"


def test_the_architecture_lists_every_package() -> None:
    listing = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("## Layout")[1].split("```")[1]
    packages = {module.split(".")[0] for module in MODULES}
    assert set(re.findall(r"^(\w+)/?  *\S", listing, re.MULTILINE)) == packages


def test_the_architecture_has_the_levels_of_the_layer_test() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("**Layer rule.**")[1]
    for level, names in enumerate(LEVELS[:-1]):
        listed = re.search(rf"([\w, \n]+) \({level}\)", text)
        assert listed, f"level {level} is missing"
        assert set(re.findall(r"\w+", listed[1])) == names, f"level {level}"


def test_the_reproduction_lists_the_verdicts_of_its_pages() -> None:
    study = ROOT / "studies" / "paper"
    text = (study / "README.md").read_text("utf-8").split("## Which other claims hold")[1]
    rows = re.findall(r"^\| \[[^]]+\]\((\S+)\) \| (.+?) \| (.+) \|$", text, re.MULTILINE)
    assert len(rows) == 21
    for page, claim, verdicts in rows:
        generated = (study / page).read_text("utf-8")
        (line,) = [
            line for line in generated.splitlines() if line.startswith(f"| {claim} | ") and "**" in line
        ]
        assert line.endswith(f" | {verdicts.removesuffix(' | –')} |"), f"{page}: {claim}"


def test_the_python_in_the_readme_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it draws a picture
    for code in blocks("README.md", "python"):
        exec(code.replace("rounds=40", "rounds=1"), {})
    assert float(capsys.readouterr().out.split()[0]) >= 0


def test_the_algorithm_in_the_contributing_guide_passes_the_contract() -> None:
    names: dict[str, object] = {"__name__": "tests.fedtanh"}
    for code in blocks("CONTRIBUTING.md", "python"):
        exec(compile(code, "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    assert "FedTanh" in names


def test_the_commands_of_the_readme_have_these_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Every option in the README exists."""
    shown: dict[str, set[str]] = {}
    for command, rest in re.findall(
        r"copfl ((?:(?:data|federate|site) )?\w+)([^\n#`]*)", "\n".join(blocks("README.md", "bash"))
    ):
        shown.setdefault(command, set()).update(re.findall(r"(?<=\s)--?[a-z-]+", rest))
    assert {"run", "choose", "data describe"} <= shown.keys()
    for command, options in shown.items():
        text = called(capsys, *command.split(), "--help").out
        for option in options:
            assert re.search(rf"(?<![\w-]){option}\b", text), f"copfl {command} has no {option}"
