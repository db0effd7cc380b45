"""A finding is one line of `RunRecord`: its file, its tables and its sections are everywhere because it is there."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import copfl
from copfl.charts import Dots, Line
from copfl.data.arrays import from_arrays
from copfl.engine.rounds import Round
from copfl.errors import RunError
from copfl.experiment import reading, run_record, training
from copfl.experiment.choice import CHOICE, Choice, Validated
from copfl.experiment.finding import Finding
from copfl.experiment.folder import claimed
from copfl.experiment.preparation import prepare
from copfl.experiment.recording import FINAL_EVALUATION
from copfl.experiment.run_record import FINDINGS, RunRecord, sections_at_site
from copfl.federation.node import site_page
from copfl.report import page, summary
from copfl.sections import Section
from copfl.settings.complete import complete
from copfl.tables import Table
from tests.report.sites import SITE

TINY: dict[str, Any] = {"clients": 2, "rounds": 1, "engine": "sequential"}


class Counted(NamedTuple):
    """How many rounds there were, and who trained in them."""

    rounds: int
    sites: list[int]


def section(found: Counted) -> Section:
    rows = [f"site {n}" for n in found.sites]
    chart = Dots(
        "counted", "Counted", "", rows, "rounds", [Line("rounds", [float(found.rounds)] * len(rows))]
    )
    return Section(
        "counted", "Counted", "How many?", [chart], [Table("Sites", ["site"], [[r] for r in rows])]
    )


COUNTED = Finding(
    file="counted.json",
    as_json=Counted._asdict,
    parse=lambda content: Counted(int(content["rounds"]), list(map(int, content["sites"]))),
    fits=lambda found, rounds, clients: found.rounds == rounds,
    measured=lambda trained: Counted(len(trained.recording.records), list(range(trained.recording.clients))),
    sentences=lambda found, run: [f"Counted {found.rounds} rounds of {run.algorithm}."],
    tables=lambda found, run: [Table("Who was counted", ["site"], [[name] for name in run.short_names])],
    section=lambda found, run: section(found),
    at_site=section,
)


@pytest.fixture
def one_more() -> Iterator[None]:
    """What a line `counted = COUNTED` in the class does, and with it the list that is made of the class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecord, "counted", COUNTED, raising=False)
        COUNTED.__set_name__(RunRecord, "counted")
        for module in (run_record, training, page):
            patch.setattr(module, "FINDINGS", (*FINDINGS, COUNTED))
        yield


@pytest.mark.usefixtures("one_more")
def test_a_new_finding_is_everywhere(tmp_path: Path) -> None:
    result = copfl.run("fedavg", model="mlp", model_options={"width": 4}, **TINY, out=tmp_path / "run")
    written = json.loads((tmp_path / "run" / "counted.json").read_text())
    assert written == {"rounds": 1, "sites": [0, 1]} == summary.as_json(result)["counted"]
    out = io.StringIO()
    summary.show(result, out, verbose=True)
    assert "Counted 1 rounds of fedavg." in " ".join(out.getvalue().split())
    assert "Who was counted" in out.getvalue()
    (run,) = reading.read_all([tmp_path / "run"])
    assert run.findings["counted"] == Counted(1, [0, 1]) == result.findings["counted"]
    (shown,) = [one for one in page.sections([run]) if one.name == "counted"]
    assert shown.title == "How many?"
    before = page.fingerprint_of([tmp_path / "run"])
    result.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "counted.json").read_bytes() == (
        tmp_path / "run" / "counted.json"
    ).read_bytes()
    further = copfl.resume(tmp_path / "run", rounds=2)
    assert further.findings["counted"].rounds == 2
    assert page.fingerprint_of([tmp_path / "run"]) != before
    site = dataclasses.replace(SITE, found=sections_at_site(tmp_path / "run"))
    assert "How many?" in [one.title for one in site_page.document_of(site).sections]
    assert "site 1" in site_page.text_of(site)


@pytest.mark.usefixtures("one_more")
def test_a_finding_of_another_run_is_none_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    COUNTED.write(Counted(3, []), tmp_path)
    assert COUNTED.read(tmp_path) == Counted(3, []) == COUNTED.read(tmp_path, rounds=3, clients=1)
    assert COUNTED.read(tmp_path, rounds=4, clients=1) is None
    assert COUNTED.read(tmp_path / "other") is None
    (tmp_path / "counted.json").write_text('{"rounds": "many"}')
    with pytest.raises(RunError, match=r"cannot read .*counted\.json .*; delete it, and .* makes it again"):
        COUNTED.read(tmp_path)


def test_a_stopped_run_keeps_what_was_found_before_its_rounds(tmp_path: Path) -> None:
    run = complete({"algorithm": {"name": "fedavg"}, "model": {"name": "mlp", "width": 4}}, {"run": TINY})
    choice = Choice("fedavg", ("fedavg",) * 2, Validated({"fedavg": np.array([0.5, 0.7])}, {}, False, 5))

    def stop(round: Round, seconds: float) -> None:
        raise KeyboardInterrupt

    with claimed(tmp_path / "run", new=True) as folder, pytest.raises(KeyboardInterrupt):
        training.train(prepare(run), folder, stop, given={CHOICE: choice})
    found = copfl.resume(tmp_path / "run").choice
    assert found is not None
    assert CHOICE.as_json(found) == CHOICE.as_json(choice)


def test_a_result_in_memory_saves_all_that_was_found(tmp_path: Path) -> None:
    """Also what trees say, which `Result.save` once left out."""
    x = np.random.default_rng(0).uniform(size=(60, 1)).astype(np.float32)
    options: dict[str, Any] = {"model": "trees", "model_options": {"trees": 1, "depth": 2}, "rivals": False}
    samples = from_arrays(x, (x[:, 0] > 0.5).astype(np.int64))
    result = copfl.run("trees", samples, clients=2, **options)
    assert "trees" in result.findings
    saved = result.save(tmp_path / "saved")
    assert {one.file for one, found in result.found()} <= {path.name for path in saved.iterdir()}


def test_every_finding_has_a_file_of_its_own() -> None:
    names = [finding.name for finding in FINDINGS]
    assert len({finding.file for finding in FINDINGS}) == len(set(names)) == len(names)
    assert FINAL_EVALUATION in names


def test_several_runs_name_themselves_and_sections_of_one_name_are_one() -> None:
    first = Section("a", "A", "A?", [], [Table("one", [], [])], ["note"])
    assert page.joined([first, first._replace(title="B?"), first._replace(name="b")]) == [
        first._replace(tables=[*first.tables, *first.tables], notes=["note", "note"]),
        first._replace(name="b"),
    ]


def test_an_attribute_of_a_record_is_its_finding(runs: dict[str, Path]) -> None:
    (run,) = reading.read_all([runs["fedavg"]])
    assert run.probabilities is run.findings["probabilities"]
    assert run.survival is None
    run.probabilities = None
    assert "probabilities" not in run.findings
    assert np.isfinite(run.final("accuracy")).all()
