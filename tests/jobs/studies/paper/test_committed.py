"""The experiments of the study, and its pages, which are made of the committed records."""

from __future__ import annotations

import gzip
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import copfl
from copfl import charts
from copfl.comparison.results.results import Record
from copfl.models.networks import ResNet18
from copfl.settings.complete import complete
from copfl.settings.components import build
from copfl.settings.toml import Tables
from studies.paper import experiments, figures, findings, pages, records
from tests.commands import called

STUDY = Path(records.__file__).parent
RECORDS = STUDY / "results"
RUN = [*experiments.named("all"), *experiments.named("finetuning")]


@pytest.fixture(scope="module")
def store() -> records.Store:
    """The committed records; nobody adds to them."""
    return records.opened(RECORDS)


def findings_of(name: str, store: records.Store) -> findings.Findings:
    experiment = experiments.read(name)
    return findings.from_records(experiment, "full", list(experiment.protocols), [], store)


@cache
def parameters_of(classes: int, kernels: str) -> int:
    """The number of parameters of the ResNet."""
    return sum(p.numel() for p in ResNet18((3, 32, 32), classes, kernels=kernels).parameters())


@pytest.mark.long
def test_the_pages_are_what_the_records_say(
    store: records.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails: `copfl reproduce all --from-records`, and the same of finetuning, write them again."""
    monkeypatch.setattr(records, "opened", {RECORDS: store}.__getitem__)
    monkeypatch.setattr(charts, "available", lambda: False)  # pictures are tested below
    shutil.copy(STUDY / pages.FRONT, tmp_path)
    for group in ("all", "finetuning"):
        assert called(capsys, "reproduce", group, "--from-records", "--pages", tmp_path).code == 0
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.md")}
    tables = {Path(pages.TABLES, f"{name}.md") for name in RUN}
    assert written == {Path(pages.FRONT)} | tables
    for path in sorted(written):
        assert (tmp_path / path).read_text("utf-8") == (STUDY / path).read_text("utf-8"), path


def test_the_committed_pictures_are_those_of_the_experiments(store: records.Store, tmp_path: Path) -> None:
    pictures = {
        name
        for experiment in map(experiments.read, RUN)
        for name in figures.names(
            findings.Findings(experiment, list(experiment.protocols), {}), experiment.name
        )
    }
    assert pictures == {path.name for path in (STUDY / pages.TABLES).glob("*.svg")}
    drawn = figures.write(findings_of("fig-heatmap", store), "fig-heatmap", tmp_path)
    assert [path.name for path in drawn if path.exists()] == ["fig-heatmap-paper.svg"] * charts.available()


def test_the_papers_numbers_are_drawn_beside_ours(store: records.Store) -> None:
    """74.6 % is Local Only's in the paper's table 1 and the end of its curve; its heat maps have five known cells."""
    table1, convergence, heatmap = (
        findings_of(name, store) for name in ("table1", "fig-convergence", "fig-heatmap")
    )
    panels = [panel for row in figures.beside(table1, "paper") for panel in row]
    assert len(panels) == len(table1.experiment.columns)
    assert isinstance(panels[0], charts.Dots)
    paper, ours = panels[0].series
    assert (panels[0].rows[0], paper.y[0]) == ("Local Only", 74.6)
    metric = table1.cells["paper", "cifar10-10", "Local Only"].metric()
    assert metric is not None
    assert (ours.y[0], ours.low[0]) == (metric.mean, metric.mean - metric.spread)
    curves = figures.curves(convergence, "paper")[0][0]
    assert isinstance(curves, charts.Lines)
    ends = [line for line in curves.lines if line.name == figures.PAPERS_END]
    assert (ends[0].y, ends[0].x) == ([74.6], [200])
    maps = [
        panel for row in figures.maps(heatmap, "paper") for panel in row if isinstance(panel, charts.Heat)
    ]
    known = [value for panel in maps[::2] for row in panel.values for value in row if value is not None]
    assert len(known) == 5
    assert all(value is not None for panel in maps[1::2] for row in panel.values for value in row)


def test_the_summary_quotes_the_records(store: records.Store) -> None:
    """The numbers of docs/results.md about table 1, in all columns under both protocols."""
    table1 = findings_of("table1", store)
    text = " ".join((STUDY.parents[1] / "docs" / "results.md").read_text("utf-8").split())
    gains: dict[str, list[float]] = {}
    for protocol in table1.protocols:
        for column in table1.experiment.columns:
            cells = {cell.row.label: cell for cell in table1.column(protocol, column.name)}
            ours = cells["CO-PFL (as published)"]
            baselines = [cell for cell in cells.values() if not cell.row.ours]
            least = findings.best_of([findings.gain(ours, baseline) for baseline in baselines])
            assert least is not None
            gains.setdefault(protocol, []).append(least.mean)
            assert findings.judged(least.changes) == (
                findings.OPEN if protocol == "paper" else findings.FAILS
            )
    assert len(gains["paper"]) == 8
    assert f"{min(gains['paper']):+.1f} to {max(gains['paper']):+.1f} points" in text
    assert f"by {-max(gains['equal']):.1f} to {-min(gains['equal']):.1f} points" in text


def test_the_summary_quotes_the_records_of_fine_tuning(store: records.Store) -> None:
    """The differences in docs/results.md and finetuning.md with the step of the server tuned."""
    servers = findings_of("finetuning-servers", store)
    gains = findings.differences(servers, "equal")
    pages_with_numbers = (STUDY.parents[1] / "docs" / "results.md", STUDY / "finetuning.md")
    texts = [" ".join(page.read_text("utf-8").split()) for page in pages_with_numbers]
    dirichlet = ("banking-dirichlet", "clinc-dirichlet")
    for row, other, columns in (
        ("FedPer: head personal", "Local", ("banking-skew",)),
        ("FedPAC", "Local", dirichlet),
        ("What copfl run trains", "Local", dirichlet),
        ("FedAvg + local epoch", "FedAvg + local epoch, plain mean", dirichlet),
        ("CO-PFL, preset adapters", "CO-PFL, preset adapters, plain mean", dirichlet),
    ):
        for column in columns:
            quoted = str(gains[row, other, column][0])[1:]  # the text has a word for the sign
            assert all(quoted in text for text in texts), (row, other, quoted)
    best = {
        "banking-skew": "FedPer: head personal",
        "banking-dirichlet": "FedRoD",
        "clinc-skew": "FFA-LoRA, head personal",
        "clinc-dirichlet": "FedPAC",
    }
    for column, label in best.items():
        assert findings.leaders(servers.column("equal", column))[0].row.label == label


def test_every_committed_record_is_read_and_stored_once(store: records.Store) -> None:
    assert store.unusable == []
    assert len(store.defaults) < len(store.known) / 10  # options are resolved once for records of a kind
    lines = [line for path in RECORDS.iterdir() for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert len(store.known) == len(lines) > 1000
    for record in store.known.values():
        assert len(record.clients["accuracy"]) == record.tables["run"]["clients"]
        assert record.rounds[-1] == record.tables["run"]["rounds"]
        assert all(len(curve) == len(record.rounds) for curve in record.curves.values()), record.title
        assert record.mean() == pytest.approx(
            sum(record.curves["accuracy"][-record.last :]) / record.last, abs=1e-4
        ), record.title
        fractions = [v for name, curve in record.curves.items() if name != "loss" for v in curve]
        fractions += [v for values in record.clients.values() for v in values]
        assert all(math.isnan(v) or 0 <= v <= 1 for v in fractions), record.title
        assert record.start.keys() == {"partition", "samples", "weights"}
        assert all(record.start.values())
        assert all(value >= 0 for value in record.cost.values())
        assert "/" not in "".join(map(str, record.where.values())) + str(record.tables["data"])


def test_with_20_clients_the_scores_of_copfl_as_published_change_nothing(store: records.Store) -> None:
    """What comments.md says of the CINIC-style set and Mini-ImageNet."""
    seen, pairs = findings_of("table-ablation", store), list[tuple[Record, Record]]()
    for column in ("cinic10-20-counted", "mini-imagenet-20-counted"):
        for protocol in seen.protocols:
            first, *others = seen.column(protocol, column)
            pairs += [(first.runs[seed], run) for cell in others for seed, run in cell.runs.items()]
    assert len(pairs) == 36
    for record, other in pairs:
        for name in ("accuracy", "loss"):
            assert record.curves[name] == other.curves[name], other.title


def test_no_page_of_the_paper_has_a_gap() -> None:
    for name in experiments.named("all"):
        text = (STUDY / pages.TABLES / f"{name}.md").read_text("utf-8")
        assert findings.NOT_YET not in text, name
        assert findings.UNKNOWN not in text, name


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    by_id = dict(records.Store(RECORDS).lines(RECORDS / "fig-mamo.jsonl.gz"))
    for name, order in (("a", by_id), ("b", dict(reversed(by_id.items())))):
        records.write(tmp_path / name, order)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("name", experiments.names())
def test_every_run_of_an_experiment_can_be_run_and_every_claim_be_judged(name: str) -> None:
    experiment = experiments.read(name)
    assert experiment.budget("short").rounds < experiment.budget("full").rounds
    for plan in experiments.plans(experiment, experiment.budget("full"), list(experiment.protocols)):
        job = plan.jobs(plan.choices[0])[0]  # what it is made of is checked as it is put together
        assert job.run.tables()["run"]["clients"] == plan.column.settings["run"]["clients"]
        model = job.run.tables()["model"]
        assert model["name"] == "resnet18" if experiment.of_paper else "sha256" in model
        assert job.validation == 0
    seen = findings.from_records(
        experiment, "full", list(experiment.protocols), [0], records.Store(Path("nowhere"))
    )
    for claim in experiment.claims:
        assert {part.word for p in experiment.protocols for part in findings.verdicts(claim, seen, p)} == {
            findings.UNKNOWN
        }


def test_the_paper_and_equal_protocols_are_what_they_say() -> None:
    experiment = experiments.read("table1")
    assert [column.name for column in experiment.columns] == list(experiment.numbers)
    for column in experiment.columns:
        shown = {row.paper_row or row.label for row in experiment.rows}
        assert set(experiment.numbers[column.name]) == shown
    for plan in experiments.plans(experiment, experiment.budget("full"), ["paper", "equal"]):
        rates = [trial.job.run.tables()["optimizer"]["lr"] for trial in plan.trials()]
        used = plan.trials()[0].job.run.tables()["optimizer"]
        if plan.protocol == "equal":
            assert rates == [1e-3, 3e-4, 1e-4]
            mamo = plan.row.label in ("CO-PFL (as published)", "CO-PFL (our interpretation)")
            assert used["name"] == ("mamo" if mamo else "adam")
        elif plan.row.ours:
            assert (rates, used["name"]) == ([1e-4, 1e-5], "mamo")
        else:
            assert rates == [1e-2, 1e-3, 1e-4]
            assert (used["name"], used["momentum"], used["weight_decay"]) == ("sgd", 0.5, 5e-4)


def test_under_the_equal_protocol_every_phase_has_its_own_state_and_the_same_rate() -> None:
    experiment = experiments.read("table1")
    for plan in experiments.plans(experiment, experiment.budget("full"), ["paper", "equal"]):
        tables = plan.jobs(plan.choices[0])[0].run.tables()
        own, equal = tables["algorithm"], plan.protocol == "equal"
        assert own.get("head_speed", 1.0) == (10.0 if plan.row.label == "FedPAC" and not equal else 1.0)
        two_phases = plan.row.label == "FedSelect" or plan.row.label.endswith("Adam")
        assert own.get("state_per_phase", False) == (two_phases and equal)
        assert (tables["model"]["kernels"] == "full") == (plan.row.label == "CO-PFL (as published)")
        assert (own.get("merge") == "union") == (plan.row.label == "CO-PFL (as published)")
        assert len(plan.seeds) == 5


def test_in_the_control_every_method_makes_the_same_number_of_epochs() -> None:
    experiment = experiments.read("equal-steps")
    for plan in experiments.plans(experiment, experiment.budget("full"), ["equal"]):
        run = plan.jobs(plan.choices[0])[0].run
        algorithm = build("algorithm", run.algorithm, optimizer=run.optimizer)
        assert algorithm.total_epochs == 2, plan.row.label


@pytest.mark.parametrize("name", experiments.names())
def test_a_row_of_copfl_does_not_follow_the_defaults(name: str) -> None:
    """What a record is of does not change with them: every option is in the experiment's base."""
    experiment = experiments.read(name)
    options = set(complete({"algorithm": {"name": "copfl"}}).algorithm.options) - {"epochs"}
    assert set(experiment.base["copfl"]) == options


@pytest.mark.parametrize("name", ["table-ablation", "convergence-long"])
def test_with_pruned_kernels_as_many_entries_become_personal_as_the_paper_counts(name: str) -> None:
    """Rate p of all parameters is p d / d' of the d' whose kernels are pruned; a budget beyond d' is all of them."""
    experiment = experiments.read(name)
    plans = experiments.plans(experiment, experiment.budget("full"), list(experiment.protocols))
    runs = [plan.jobs(plan.choices[0])[0].run.tables() for plan in plans]
    for run in runs:
        if run["run"]["clients"] == 10:
            assert (run["model"]["kernels"], run["algorithm"]["budget"]) == ("full", 0.5)
            continue
        assert run["model"]["kernels"] == "pruned"
        classes = 100 if run["data"]["name"] == "mini_imagenet" else 10
        every, pruned = (parameters_of(classes, kernels) for kernels in ("full", "pruned"))
        assert round(run["algorithm"]["rate"] * pruned) == round(0.25 * every)
        assert 0.5 * every > pruned
        assert run["algorithm"]["budget"] == 1


def test_training_as_published_is_the_same_with_pruned_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries that are left out never change: ties between them decide nothing."""
    # oneDNN takes another convolution for other shapes, which on ARM rounds so differently that masks do, too.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    y = np.arange(48) % 4
    draws = np.random.default_rng(0)
    x = 128 + 40 * draws.normal(size=(4, 3, 32, 32))[y] + 40 * draws.normal(size=(48, 3, 32, 32))

    def run(kernels: str, rate: float, budget: float) -> copfl.Result:
        return copfl.run(
            "copfl",
            (x.clip(0, 255).astype(np.uint8), y),
            preset="paper",
            model="resnet18",
            model_options={"kernels": kernels, "width": 4},
            algorithm_options={"rate": rate, "budget": budget},
            partition="classes",
            partition_options={"per_client": 2, "train_per_class": 4, "test_per_class": 4},
            clients=3,
            rounds=2,
            batch_size=4,
            lr=1e-3,
            engine="sequential",
            save_models=False,
        )

    def values(result: copfl.Result, name: str) -> Any:
        return np.array([line["per_client"][name] for line in result.records])

    every = run("full", 0.25, 0.5)
    sizes = every.experiment.task.d, 17768
    pruned = run("pruned", round(0.25 * sizes[0]) / sizes[1], 1.0)
    assert pruned.experiment.task.d == sizes[1]
    np.testing.assert_allclose(values(pruned, "test_loss"), values(every, "test_loss"), rtol=1e-5)
    counts = sizes[0] * values(every, "personal_fraction"), sizes[1] * values(pruned, "personal_fraction")
    np.testing.assert_allclose(counts[1], counts[0], rtol=1e-6)


def test_each_column_of_the_differences_changes_one_thing() -> None:
    experiment = experiments.read("differences")
    usual, seen = dict[str, Tables](), dict[str, list[str]]()
    for plan in experiments.plans(experiment, experiment.budget("full"), ["paper"]):
        tables = plan.jobs(plan.choices[0])[0].run.tables()
        before = usual.setdefault(plan.row.label, tables)
        changed = [f"{t}.{k}={v}" for t, own in tables.items() for k, v in own.items() if before[t][k] != v]
        assert seen.setdefault(plan.column.title, changed) == changed
    assert seen == {
        "(a) our protocol": [],
        "(b) the best round of a run": [],
        "(c) the best round of each client": [],
        "(d) batch-norm statistics averaged": ["run.buffers=average"],
        "(e) batch norm in evaluation mode": ["model.norm=frozen"],
        "(f) no augmentation": ["run.augment=False"],
        "(g) 5 local epochs": ["algorithm.epochs=5"],
        "(c) and (e)": ["model.norm=frozen"],
    }


def test_the_map_has_the_papers_grid_and_its_numbers_find_their_cells() -> None:
    experiment = experiments.read("fig-heatmap")
    assert len(experiment.rows) == 24
    for numbers in experiment.numbers.values():
        assert numbers.keys() <= {row.label for row in experiment.rows}
    plan = next(
        p
        for p in experiments.plans(experiment, experiment.budget("full"), ["paper"])
        if p.row.label == "rate=0.05 budget=0.8"
    )
    algorithm = plan.jobs({})[0].run.tables()["algorithm"]
    assert (algorithm["rate"], algorithm["budget"]) == (0.05, 0.8)  # the row wins over its column
    jobs = [p.jobs({})[0] for p in experiments.plans(experiment, experiment.budget("full"), ["paper"])]
    assert len({job.id for job in jobs}) == 2 * 19  # where p is above gamma it is gamma that counts


def test_many_clients_take_over_what_was_tuned_with_few_and_the_longest_columns_are_shorter() -> None:
    experiment = experiments.read("table1")
    by_column: dict[str, experiments.Plan] = {}
    for plan in experiments.plans(experiment, experiment.budget("full"), ["equal"]):
        by_column.setdefault(plan.column.name, plan)
    for name, plan in by_column.items():
        few = {"cinic10-50": "cinic10-20", "mini-imagenet-50": "mini-imagenet-20"}.get(
            name, name.replace("-50", "-10")
        )
        assert [t.job.id for t in plan.trials()] == [t.job.id for t in by_column[few].trials()]
        job = plan.jobs(plan.choices[0])[1]
        tuning = plan.trials()[0].job.run.tables()["run"]
        assert job.run.tables()["run"]["clients"] == int(name.rpartition("-")[2])
        shown = [run[key] for run in (job.run.tables()["run"], tuning) for key in ("rounds", "eval_every")]
        usual, many = (50, 25) if name.startswith("mini") else (200, 100)
        rounds = many if name.endswith("-50") else usual
        expected = [rounds, min(8, rounds // 8), *((16, 4) if name.startswith("mini") else (40, 8))]
        assert shown == expected
        assert (f"{rounds} rounds" in plan.column.title) == (
            rounds != 200
        )  # a heading says what is not usual


def test_plus_is_reported_in_every_column_on_fresh_seeds_and_baselines_have_its_add_ons() -> None:
    fresh, others = (experiments.read(name) for name in ("plus", "plus-others"))
    assert [c.name for c in fresh.columns] == ["cifar10-10"]
    assert fresh.budget("full").first_seed == 3  # seeds 0 to 2 chose the preset
    assert {c.name for c in fresh.columns} | {c.name for c in others.columns} == {
        c.name for c in experiments.read("table1").columns
    }
    for experiment in (fresh, others):
        assert list(experiment.protocols) == ["equal"]
        for plan in experiments.plans(experiment, experiment.budget("full"), ["equal"]):
            tables = plan.jobs(plan.choices[0])[0].run.tables()
            assert [trial.job.run.tables()["optimizer"]["lr"] for trial in plan.trials()] == [
                1e-3,
                3e-4,
                1e-4,
            ]
            if plan.row.label == "plus":  # in every column the preset's own numbers
                assert (tables["algorithm"]["rate"], tables["algorithm"]["budget"]) == (0.05, 0.3)
                assert abs(tables["algorithm"]["warmup"] - 0.75 * tables["run"]["rounds"]) <= 0.5
            if plan.row.label == "plus" or plan.row.label.endswith("add-ons"):
                addons = {key: tables["addons"][key] for key in ("ema", "bn_stats")}
                assert addons == {"ema": 0.95, "bn_stats": "local"}
                momentum = {"name": "momentum", "lr": 1.0, "momentum": 0.9}
                assert tables.get("server") == (None if plan.row.algorithm == "local" else momentum)


def test_a_row_may_have_a_preset_and_any_table_and_its_recipe_wins() -> None:
    experiment = experiments.read("table1")
    row = next(row for row in experiment.rows if row.label == "CO-PFL (our interpretation)")
    row = row._replace(preset="paper", settings={"server": {"name": "momentum", "momentum": 0.8}})
    plain = experiments.Plan(
        experiment.columns[2], "equal", row, experiment.base, experiment.budget("full"), [3]
    )
    adam = plain._replace(row=row._replace(recipes={"equal": experiment.rows[0].recipes["equal"]}))
    for plan, optimizer in ((plain, "mamo"), (adam, "adam")):
        tables = plan.jobs(plan.choices[1])[0].run.tables()
        assert (tables["algorithm"]["merge"], tables["algorithm"]["rate"]) == ("union", 0.15)
        assert (tables["optimizer"]["name"], tables["optimizer"]["lr"]) == (optimizer, 3e-4)
        assert (tables["server"]["momentum"], tables["run"]["seed"]) == (0.8, 3)
