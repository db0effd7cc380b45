from __future__ import annotations

import pytest

import copfl
from copfl.algorithms import COPFL
from copfl.comparison.rows.entry_settings import common_of
from copfl.core import Adam
from copfl.errors import UsageError
from copfl.experiment.preparation import prepare
from copfl.parts import Cowa, Mamo, Phases, Pwpm
from copfl.settings import presets
from copfl.settings.complete import complete


def test_the_paper_as_published() -> None:
    made = prepare(complete({"run": {"rounds": 2}}, preset="paper")).algorithm
    growth, contribution = Pwpm(candidates="all", count="all"), Cowa(leave_one_out="paper")
    assert made == COPFL(Mamo(lr=1e-4, change="zero"), growth, contribution, Phases(), merge="union")


def test_the_command_line_wins() -> None:
    made = prepare(complete({"algorithm": {"rate": 0.1}, "optimizer": {"lr": 0.5}}, preset="paper")).algorithm
    assert (made.growth.rate, made.optimizer.lr, made.merge) == (0.1, 0.5, "union")  # type: ignore[attr-defined]


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="paper"):
        presets.preset("papr")


@pytest.mark.parametrize("settings", [{}, {"rounds": 10}])
def test_percentages_are_of_the_rounds_of_the_run_in_a_comparison_too(settings: dict[str, int]) -> None:
    for name in presets.names():
        run = complete({"data": {"name": "digits"}, "run": dict(settings)}, preset=name).tables()
        common = common_of("digits", {"preset": name, **settings})
        for kind in ("run", "algorithm"):
            table = common.get(kind, {})
            assert {key: run[kind][key] for key in table} == table, name


def test_every_preset_can_be_prepared() -> None:
    for name in presets.names():
        prepare(complete(preset=name))


def test_plus_shares_for_three_quarters_of_the_rounds_however_many_there_are() -> None:
    for rounds in (60, 200):
        tables = prepare(complete({"run": {"rounds": rounds}}, preset="plus")).run.tables()
        assert tables["algorithm"]["warmup"] == rounds * 3 // 4
        assert (tables["server"]["momentum"], tables["addons"]["ema"]) == (0.9, 0.95)
        assert (tables["algorithm"]["criterion"], tables["algorithm"]["candidates"]) == (
            "benefit",
            "reselect",
        )


def test_adapters_has_groups_by_held_out_loss_for_a_third_of_the_rounds_and_equal_weights() -> None:
    made = prepare(complete({"run": {"rounds": 30}}, preset="adapters")).algorithm
    growth, contribution = Pwpm(budget=0.0, criterion="held_out", until=10), Cowa(score="none")
    assert made == COPFL(Adam(lr=1e-2, keep=True), growth, contribution, phases=Phases(training="together"))


def test_the_demo_is_a_federation_in_which_a_client_has_too_few_samples() -> None:
    tables = prepare(complete(preset="demo")).run.tables()
    assert (tables["data"]["name"], tables["run"]["clients"], tables["algorithm"]["warmup"]) == (
        "digits",
        20,
        20,
    )
    assert (tables["partition"]["per_client"], tables["partition"]["train_per_class"]) == (5, 3)
    assert copfl.run(preset="demo", rounds=1, clients=4, seed=3).accuracy.shape == (1, 4)
