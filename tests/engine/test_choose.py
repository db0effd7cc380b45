from __future__ import annotations

import pytest

from copfl.algorithms import fedavg
from copfl.contract import small_federation
from copfl.engine import choose
from copfl.engine.choose import Choice
from copfl.engine.mapping import all_at_once, one_by_one

WAYS = [Choice(all_at_once(2), True), Choice(one_by_one(), True), Choice(one_by_one(), False)]


@pytest.mark.parametrize(
    ("seconds", "turns", "chosen"),
    [
        ((1.0, 0.1, 0.05), 10, 0),  # over too soon to care
        ((1.0, 0.5, 0.2), 1000, 2),
        ((1.0, 0.5, 0.6), 1000, 1),
        ((1.0, 0.9, 0.85), 1000, 0),  # noise does not decide
    ],
)
def test_the_usual_way_unless_another_is_clearly_quicker(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], turns: int, chosen: int
) -> None:
    task, federation = small_federation("none", (4, 4))
    of = dict(zip(WAYS, seconds, strict=True))
    monkeypatch.setattr(choose, "seconds", lambda algorithm, task, federation, way, *_, **__: of[way])
    found = choose.choose(fedavg(), task, federation, WAYS, batch=4, turns=turns)
    assert found == WAYS[chosen]


def test_a_measurement_leaves_the_process_as_it_was() -> None:
    task, federation = small_federation("batch", (5, 9, 3))
    before = choose.mkldnn_enabled()
    for way in WAYS:
        assert 0 < choose.seconds(fedavg(), task, federation, way, 4) < 60
        assert choose.mkldnn_enabled() == before


@pytest.mark.parametrize(("enough", "measured"), [(0.0, 2), (60.0, 1)])
def test_it_is_not_measured_again_what_is_enough_already(
    monkeypatch: pytest.MonkeyPatch, enough: float, measured: int
) -> None:
    task, federation = small_federation("none", (4, 4))
    calls: list[object] = []
    monkeypatch.setattr(choose, "together", lambda *given, **named: calls.append(given))
    choose.seconds(fedavg(), task, federation, WAYS[0], 4, enough=enough)
    assert len(calls) == measured


def test_the_parts_of_a_round_are_equal() -> None:
    task, _ = small_federation("none", (4,))
    for participants in (1, 10, 64, 100, 1000):
        chunk = choose.chunk_of(task, participants)
        parts = -(-participants // chunk)
        assert 1 <= chunk <= choose.TOGETHER
        assert parts * chunk - participants < parts  # nobody's part is smaller by more than a few
