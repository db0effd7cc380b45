"""What a project has beside its code: one version, links that lead somewhere, workflows that can be read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import copfl

ROOT = Path(__file__).resolve().parents[3]
PAGES = ["AGENTS.md", "GOVERNANCE.md", "ROADMAP.md", "SECURITY.md", "docs/llms.txt"]


def test_every_file_has_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert citation is not None
    assert newest is not None
    assert {project["version"], citation[1], newest[1]} == {copfl.__version__}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text("utf-8"))
    missing = [t for t in targets if "://" not in t and not (ROOT / page).parent.joinpath(t).exists()]
    assert not missing


def test_the_guide_for_assistants_names_every_folder_of_the_library() -> None:
    guide = (ROOT / "AGENTS.md").read_text("utf-8")
    unnamed = {"audit", "bench", "cli", "testing", "wrappers"}  # beside what most changes concern
    folders = {path.parent.name for path in (ROOT / "src" / "copfl").glob("*/__init__.py")}
    assert folders - unnamed <= set(re.findall(r"`?(\w+)/", guide))


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda p: p.stem)
def test_a_workflow_has_no_more_rights_than_it_says_and_ends(path: Path) -> None:
    text = path.read_text("utf-8")
    assert "\npermissions:\n  contents: read\n\n" in text
    for job in re.split(r"^  (?=\w+:)", text.partition("\njobs:\n")[2], flags=re.MULTILINE)[1:]:
        assert "timeout-minutes: " in job


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda p: p.stem)
def test_an_action_is_named_by_its_hash(path: Path) -> None:
    """A tag can be moved to other code by whoever has, or steals, the rights of the action's project."""
    used = re.findall(r"uses: (.+)", path.read_text("utf-8"))
    assert used
    assert not [use for use in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)+", use)]


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda p: p.stem)
def test_a_pull_request_cannot_write(path: Path) -> None:
    text = path.read_text("utf-8")
    if "pull_request" not in text:
        return
    for job in re.split(r"^  (?=\w+:)", text.partition("\njobs:\n")[2], flags=re.MULTILINE)[1:]:
        rights = set(re.findall(r"^      ([\w-]+): write", job, re.MULTILINE))
        assert rights <= {"security-events"} or "\n    if: github.event_name == 'push'\n" in job


def test_the_dry_run_of_a_release_trains_with_the_wheel() -> None:
    script = (ROOT / ".ci" / "package").read_text("utf-8")
    assert '"$wheel"' in script
    assert 'copfl" run' in script
    assert ".ci/package dist" in (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
