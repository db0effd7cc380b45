"""What a person sees: the bar while a run goes on, the table when it ends."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import copfl
from copfl.data import arrays
from copfl.data.clients.groups import names_of_clients
from copfl.data.clients.schemes import SCHEMES
from copfl.engine.rounds import Round
from copfl.experiment.analysis.gains import Gains
from copfl.experiment.answer import answer_of, cells_of
from copfl.experiment.progress import bar, span
from copfl.experiment.recording import Recording
from copfl.experiment.result import Result
from copfl.measures.metrics import ACCURACY
from copfl.report import summary

TINY: dict[str, Any] = {"model": "mlp", "rounds": 2, "model_options": {"width": 4}}


class Terminal(io.StringIO):
    """A terminal of a given width, as rich sees one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def result() -> Result:
    return copfl.run("copfl", clients=3, **TINY)


def shown(result: Result, *, verbose: bool = False) -> str:
    out = io.StringIO()
    summary.show(result, out, verbose=verbose)
    return out.getvalue()


def test_the_table_says_what_each_client_has_and_got(result: Result) -> None:
    text = shown(result)
    lines = text.splitlines()
    assert lines[0].startswith("copfl on digits: accuracy in % on each site's own test samples")
    header = next(line for line in lines if "classes" in line)
    assert header.split() == ["site", "classes", "train", "test", "global", "personal", "weight"]
    row = next(line for line in lines if line.split()[:1] == ["0"])
    held = result.experiment.federation.partition.label_counts(result.experiment.federation.dataset)[0]
    assert ", ".join(str(c) for c in np.flatnonzero(held)) in row
    figures = [result.accuracy_global, result.accuracy]
    numbers = [f"{100 * f[-1, 0]:.1f}" for f in figures]
    assert row.split()[-5:] == ["15", "45", *numbers, f"{result.weight[-1, 0]:.3f}"]
    mean = next(line for line in lines if line.split()[:1] == ["mean"])
    assert mean.split() == ["mean", *(f"{100 * f[-1].mean():.1f}" for f in figures)]
    assert "2 rounds in 0:0" in lines[-1]
    assert "\x1b" not in text


def test_the_latest_eval_models_a_client_counts() -> None:
    result = copfl.run("fedavg", clients=4, participation=0.5, **{**TINY, "rounds": 4})
    last = summary.as_json(result)["clients"]["accuracy"]
    for n in range(4):
        seen = result.accuracy[:, n][np.isfinite(result.accuracy[:, n])]
        assert last[n] == (seen[-1] if len(seen) else result.final("accuracy")[n])
    assert json.loads(json.dumps(summary.as_json(result), allow_nan=False))["rounds"] == 4
    never = copfl.run("local", clients=30, participation=0.05, **TINY)
    content = summary.as_json(never)
    assert [n for n, value in enumerate(content["clients"]["accuracy"]) if value is None] == content[
        "never_trained"
    ]
    assert " - " in shown(never)
    assert "never trained: " in shown(never)


def test_the_answer_is_first_and_then_a_row_per_site_and_what_decides() -> None:
    """Nothing else: the rest is said with `verbose`, above the last line."""
    data = arrays.from_arrays(np.random.default_rng(0).random((60, 3)), np.arange(60) % 2)
    result = copfl.run("fedavg", data, partition="iid", clients=2, local_baseline=True, rivals=True, **TINY)
    answer = answer_of(result)
    assert answer is not None
    text = shown(result)
    lines = text.splitlines()
    assert lines[0] == answer.headline
    assert lines[4].split() == [
        "site",
        "train",
        "test",
        "alone",
        "together",
        "gain",
        "95",
        "%",
        "interval",
        "verdict",
    ]
    for n, line in enumerate(lines[6:8]):
        assert line.startswith(f"{n} ")
        assert tuple(re.split(" {2,}", line)[-3:]) == cells_of(answer, n)
        assert f"{100 * result.accuracy[-1, n]:.1f}" in line
    assert len(lines) < 25
    assert "Model: " not in text
    whole = shown(result, verbose=True)
    assert "Model: mlp" in whole
    assert whole.startswith(text[: text.index("\n\n", text.index("mean"))])
    assert whole.splitlines()[-1] == lines[-1]


def test_of_more_than_twenty_sites_the_best_and_the_worst_are_shown() -> None:
    result = copfl.run(
        "fedavg", clients=30, partition_options={"train_per_class": 2}, local_baseline=True, **TINY
    )
    answer = answer_of(result)
    assert answer is not None
    rows = [line for line in shown(result).splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    named = [int(line.split()[0]) for line in rows if "rounds" not in line]
    assert [f"site {n}" for n in named] == [row.label for row in answer.chart.rows]
    assert "... 10 more" in shown(result)


def test_colours_and_marks_are_on_a_terminal_and_marks_alone_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = "It gains.\n\na  ▲ better together\nb  = no clear difference"
    terminal, file = Terminal(), io.StringIO()
    summary._print(text, terminal, "It gains.")
    summary._print(text, file, "It gains.")
    assert "\x1b[32m▲ better together" in terminal.getvalue()
    assert "\x1b[1mIt gains." in terminal.getvalue()
    assert file.getvalue() == f"{text}\n"
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    summary._print(text, latin, "It gains.")
    latin.seek(0)
    assert "a  + better together\n" in latin.read()


def test_of_many_clients_the_worst_are_shown() -> None:
    result = copfl.run("fedavg", clients=40, partition_options={"train_per_class": 2}, **TINY)
    text = shown(result, verbose=True)
    rows = [line for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    shown_clients = {int(line.split()[0]) for line in rows if "rounds" not in line}
    assert len(shown_clients) == 30
    hidden = sorted(set(range(40)) - shown_clients)
    assert result.accuracy[-1][hidden].min() >= result.accuracy[-1][sorted(shown_clients)].max()
    assert "The 30 sites with the lowest accuracy of 40; all are in rounds.jsonl." in text
    assert "Data: test:" in text  # what the partition could not give


@pytest.mark.parametrize("width", [30, 40, 50, 60, 70, 100, 200])
def test_numbers_are_never_cut(result: Result, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = Terminal()
    summary.show(result, out)
    assert "…" not in out.getvalue()
    assert f"{100 * result.accuracy[-1, 1]:.1f}" in out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_many_classes_with_long_names_leave_the_numbers_whole(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Ten classes a client, called as ImageNet calls them: the first table of Mini-ImageNet was all dots."""
    y = np.arange(200) % 20
    names = [f"n{1532829 + 7919 * label:08d}" for label in range(20)]
    data = arrays.from_arrays(np.random.default_rng(0).random((200, 3)), y, classes=names)
    result = copfl.run("fedavg", data, partition_options={"per_client": 10}, clients=2, rivals=False, **TINY)
    monkeypatch.setenv("COLUMNS", str(width))
    out = Terminal()
    summary.show(result, out)
    said = out.getvalue()
    assert "…" not in said
    for value in result.accuracy[-1]:
        assert f"{100 * value:.1f}" in said
    assert max(map(len, said.splitlines())) <= width
    assert ("n01532829, " in said) == (width >= 80)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_columns_of_rivals_leave_the_numbers_whole(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    data = arrays.from_arrays(np.random.default_rng(0).random((60, 3)), np.arange(60) % 2)
    result = copfl.run("fedavg", data, partition="iid", clients=2, local_baseline=True, **TINY)
    monkeypatch.setenv("COLUMNS", str(width))
    out = Terminal()
    monkeypatch.setenv("TERM", "dumb")  # without colours
    summary.show(result, out, verbose=True)
    table = out.getvalue().partition("Details")[2].partition("mean")[0] or out.getvalue().partition("mean")[0]
    said = out.getvalue().splitlines()
    assert sum(line.startswith(("- 0: ", "- 1: ")) for line in said) == 2  # each client's verdict
    assert "its own test rows:" in " ".join(said)
    assert max(map(len, said[said.index(next(line for line in said if line.startswith("- 0: "))) :])) <= width
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= width
    assert result.rivals is not None
    for values in (result.accuracy[-1], result.rivals.best):
        assert all(f"{100 * value:.1f}" in table for value in values)


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_the_bar_says_round_accuracy_shared_and_time_left(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = Terminal()
    with bar(10, out, ACCURACY) as listener:
        for number in range(3):
            listener.on_round(
                Round(number, np.arange(2), {"shared": 0.5}, {"accuracy": np.array([0.5, 1.0])}), 2.0
            )
    last = out.getvalue()
    assert "round 3/10" in last
    assert "75.0 %" in last
    assert "0:14 left" in last
    assert ("shared 50 %" in last) == (width >= 60)
    assert "…" not in last


def test_a_bar_takes_rounds_that_nobody_looked_at() -> None:
    out = Terminal()
    with bar(2, out, ACCURACY) as listener:
        listener.on_round(Round(0, np.arange(2), {}, {"loss": np.ones(2)}), 2.0)
        listener.on_round(Round(1, np.arange(2), {}, {"accuracy": np.full(2, np.nan)}), 2.0)
    assert "round 2/2" in out.getvalue()


def test_the_bar_goes_on_with_the_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    with bar(2, out, ACCURACY, alone=2) as listener:
        for number in range(2):
            listener.on_round(Round(number, np.arange(2), {}, {"accuracy": np.ones(2)}), 2.0)
        logging.getLogger("copfl.experiment.training").debug("saving 2 models ...")
        listener.on_round_alone(Round(0, np.arange(2), {}, {"accuracy": np.ones(2)}), 1.0)
    assert "alone 1/2" in out.getvalue()
    assert "0:01 left" in out.getvalue()


def test_the_bar_shows_what_is_done_after_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    with bar(1, out, ACCURACY) as listener:
        listener.on_round(Round(0, np.arange(2), {}, {"accuracy": np.ones(2)}), 2.0)
        logging.getLogger("copfl.experiment.training").debug("saving 2 models ...")
    assert "saving 2 models ..." in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (42.4, "0:42"), (61, "1:01"), (3600, "1:00:00"), (100_000, "27:46:40")]
)
def test_a_span_of_time(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_the_conclusion_names_both_differences_and_who_gains() -> None:
    alone, personal = np.array([0.5, 0.6, 0.7, np.nan]), np.array([0.6, 0.7, 0.8, 0.9])
    found = summary.conclusion(Gains(alone, np.array([0.6, 0.8, 0.7, 0.9]), personal))
    assert found.startswith(
        "The personal models are 10.0 points [+10.0, +10.0] better than training alone and "
    )
    assert "not distinguishable from the global model (+0.0 points [" in found
    assert "; 3 of 3 sites gain over training alone. " in found
    assert "10.0 points [-10.0, -10.0] worse than training" in summary.conclusion(
        Gains(personal, alone, alone)
    )
    one = summary.conclusion(Gains(np.array([0.7]), np.array([0.6]), np.array([0.678])))
    assert "are 2.2 points worse than training alone" in one
    assert "That is one site, so there is no interval over sites." in one
    assert "[" not in one
    unknown = np.full(4, np.nan)
    assert summary.conclusion(Gains(unknown, alone, personal)) == ""
    assert "global" not in summary.conclusion(Gains(alone, unknown, personal))
    diverged = np.array([np.inf, 0.5, 0.5, 0.5])
    assert (
        "not comparable with the global model (1 of 4 values of clients are infinite)"
        in summary.conclusion(Gains(alone, diverged, personal))
    )


def test_a_gain_is_no_use_where_a_constant_answer_is_as_good() -> None:
    """Three clients with 94 % of one class: two points above training alone, and no better than that class."""
    alone, personal = np.array([0.92, 0.91, 0.93]), np.array([0.94, 0.93, 0.95])
    for constant, against in (
        (personal, "not distinguishable from it (+0.0 points [+0.0, +0.0])"),
        (personal + 0.01, "1.0 points [-1.0, -1.0] worse than it"),
    ):
        found = summary.conclusion(Gains(alone, personal, personal, constant=constant))
        assert found.startswith("No useful gain is shown: always answering a site's most frequent class")
        value = f"{100 * constant.mean():.1f}"
        assert (
            f"in training gives accuracy {value} %, and the personal models are {against}. They are" in found
        )
        assert "2.0 points [+2.0, +2.0] better than training alone" in found
    two = summary.conclusion(Gains(alone[:2], personal[:2], personal[:2], constant=np.array([0.6, 0.7])))
    assert two.startswith("No useful gain is shown: ")  # a gain is not excluded either
    assert "not distinguishable from it (+28.5 points [-41.4, +98.4])" in two
    better = summary.conclusion(Gains(alone, personal, personal, constant=personal - 0.01))
    assert better == summary.conclusion(Gains(alone, personal, personal))
    one = summary.conclusion(Gains(alone[:1], alone[:1], personal[:1], constant=personal[:1]))
    assert one.startswith("No useful gain")


def test_a_run_that_is_worse_than_training_alone_says_what_to_try(result: Result, tmp_path: Path) -> None:
    """By hand: three clients lose two, three and four points; the accuracy rose by ten in the last rounds."""
    alone, personal = np.array([0.52, 0.63, 0.74]), np.array([0.50, 0.60, 0.70])
    rising = [[0.1, 0.2, 0.3], [0.2, 0.3, 0.4], [0.5, 0.6, 0.7]]
    found = SimpleNamespace(
        gains=Gains(alone, personal, personal),
        experiment=result.experiment,
        folder=tmp_path,
        primary=ACCURACY,
        metric_or_nan=lambda name: 1 - np.array(rising) if name == "test_loss" else np.array(rising),
        malicious=np.zeros(3, bool),
    )
    said = summary.advice(cast(Result, found))
    assert said.startswith("Training alone is better here. To try: `copfl choose -d digits`")
    assert f"`copfl resume {tmp_path} --rounds 4`" in said
    assert said.endswith(
        f"`copfl run -c {tmp_path}/baseline/run.toml` trains alone as here and keeps the models."
    )
    found.metric_or_nan = lambda name: np.array([rising[-1]] * 3)  # it no longer rises
    assert "resume" not in summary.advice(cast(Result, found))
    for other in (alone, np.array([0.53, 0.62, 0.75])):  # better, and not distinguishable
        found.gains = Gains(personal if other is alone else alone, personal, other)
        assert summary.advice(cast(Result, found)) == ""
    found.gains = Gains(
        alone, personal, np.array([0.53, 0.60, 0.74])
    )  # worse on average, not distinguishable
    said = summary.advice(cast(Result, found))
    assert said.startswith("This run shows no gain over training alone. To try: `copfl choose -d digits`")
    found.gains = None
    assert summary.advice(cast(Result, found)) == ""


def test_the_conclusion_is_on_honest_clients() -> None:
    """The third client attacks, with labels that it does not have alone."""
    alone, personal = np.array([0.52, 0.63, 0.95]), np.array([0.55, 0.66, 0.0])
    attacked = SimpleNamespace(gains=Gains(alone, alone, personal), malicious=np.array([False, False, True]))
    honest = summary.honest_gains(cast(Result, attacked))
    assert honest is not None
    assert "3.0 points [+3.0, +3.0] better than training alone" in summary.conclusion(honest)
    assert "2 of 2 sites gain" in summary.conclusion(honest)


def test_the_last_line_has_the_time_of_the_whole_command(result: Result) -> None:
    out = io.StringIO()
    summary.show(result, out, seconds=92.0)
    assert out.getvalue().splitlines()[-1].endswith(", 1:32 in all.")


def test_clients_have_the_names_of_their_groups() -> None:
    group = np.repeat(["St. Anna", "1"], 10)
    data = arrays.from_arrays(np.zeros((20, 3), np.float32), np.arange(20) % 2, group=group)

    def named(scheme: str, clients: int) -> list[str]:
        partition = SCHEMES[scheme](data, clients, 0)
        environment = {"client_names": names_of_clients(data, partition)}
        return Recording(tables={}, environment=environment, partition=partition).short_names

    names = {clients: named("by_group", clients) for clients in (1, 2, 4)}  # in the order of their names
    assert names == {1: ["0"], 2: ["0 (1)", "1 (St. Anna)"], 4: ["0", "1", "2", "3"]}
    assert named("iid", 2) == ["0", "1"]
