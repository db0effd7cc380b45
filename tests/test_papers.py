"""What the README and its companions say is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from copfl.algorithms import ALGORITHMS
from tests.test_layers import MODULES

ROOT = Path(__file__).resolve().parent.parent
PAPERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md")]


def blocks(paper: str, language: str) -> list[str]:
    """The code blocks of a paper in one language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / paper).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize("paper", PAPERS, ids=lambda p: p.name)
def test_links_lead_somewhere(paper: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", paper.read_text("utf-8")):
        if not target.startswith("http"):
            assert (paper.parent / target).exists(), f"{paper.name} links to {target}"


def test_the_first_screen_has_the_two_commands() -> None:
    screen = "\n".join((ROOT / "README.md").read_text("utf-8").splitlines()[:24])
    assert "pip install . && copfl run\n" in screen
    assert 'pip install -e ".[test]" && pytest\n' in screen
    assert "docs/picture.svg" in screen


def test_the_table_of_algorithms_is_the_registry() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    lines = {
        name: (sys.modules[f.__module__].__doc__ or "").split("\n")[0]
        for name, f in sorted(ALGORITHMS.items())
    }
    assert dict(rows) == lines


def test_every_room_is_in_the_architecture() -> None:
    rooms = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("## Rooms")[1].split("```")[1]
    for name in {module.split(".")[0] for module in MODULES} - {"__main__"}:
        assert re.search(rf"\b{name}\b", rooms), f"docs/architecture.md does not say where {name} is"


def test_the_python_in_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for code in blocks("README.md", "python"):
        exec(code.replace("rounds=40", "rounds=1"), {})
    assert float(capsys.readouterr().out.split()[0]) >= 0


def test_the_algorithm_in_the_contributing_guide_passes_the_contract() -> None:
    names: dict[str, object] = {"__name__": "tests.fedtanh"}
    for code in blocks("CONTRIBUTING.md", "python"):
        exec(compile(code, "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    assert "fedtanh" in names


def test_commands_in_the_readme_are_understood() -> None:
    """Every option that the README shows is one that the command has."""
    shown: dict[str, set[str]] = {}
    for command, rest in re.findall(
        r"copfl ((?:data )?\w+)([^\n#`]*)", "\n".join(blocks("README.md", "bash"))
    ):
        shown.setdefault(command, set()).update(re.findall(r"(?<=\s)--?[a-z-]+", rest))
    assert {"run", "list", "data get"} <= shown.keys()
    for command, options in shown.items():
        words = [sys.executable, "-m", "copfl", *command.split(), "--help"]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        for option in options:
            assert re.search(rf"(?<![\w-]){option}\b", said), f"copfl {command} has no {option}"
