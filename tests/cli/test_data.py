"""The user's own data on the command line: described, run, and refused in one paragraph."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from tests.commands import called
from tests.data.files import write_image
from tests.data.tables.test_tables import ROWS, write_csv, write_jsonl

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COPFL_DATA", raising=False)
    return tmp_path


@pytest.mark.job
def test_a_table_is_described_and_run_with_its_clients(here: Path, capsys: Capture) -> None:
    write_csv(here / "t.csv", [*ROWS, {**ROWS[0], "age": ""}])
    words = ("t.csv", "--target", "ill", "--client", "site")
    answer = called(capsys, "data", "describe", *words)
    assert (answer.code, answer.err) == (0, "")
    assert "missing values filled: age 1" in answer.out
    missing = r"values are missing \(rows of each column\): .* use --set data\.missing=fill .* \(40 of 41 rows stay\)"
    needs = rf"A run needs one more option: \S*t\.csv: {missing}"
    assert re.search(needs, answer.out)
    assert "A run needs" not in called(capsys, "data", "describe", *words, "-s", "data.missing=fill").out
    assert "who has what" in answer.out
    refused = called(capsys, "data", "describe", *words, "--group", "town", "-s", "data.drop=town")
    assert "named as group and as drop; it can be one of them; no model learns from it anyway" in refused.err
    refused = called(capsys, "data", "describe", *words, "--set", "data.drop=age", "of", "Rome")
    assert "put a value with spaces into quotes, such as 'data.drop=" in refused.err
    write_csv(here / "t.csv", ROWS)
    run = ("--model", "mlp", "-s", "model.width=4", "-r", 1, "-o", "a")
    answer = called(capsys, "run", "--dataset", *words, *run)
    assert answer.code == 0
    assert answer.err.startswith(
        "No algorithm is named, so this is fedpac (server step fedexp, adam 0.003, batches of 8, 5 epochs)"
    )
    text = (here / "a" / "run.toml").read_text()
    assert "clients = 4\n" in text
    assert 'name = "by_group"\n' in text
    assert called(capsys, "resume", "a", "--rounds", 2).code == 0  # reads the table again
    rows = [{key: value for key, value in row.items() if key in ("age", "town")} for row in ROWS[:3]]
    write_csv(here / "new.csv", rows)
    answer = called(capsys, "predict", "a", "--client", 0, "--data", "new.csv")
    assert answer.code == 0
    assert "3 of 3 samples are among those that this model was trained on, or equal one" in answer.err
    assert len(re.findall(r"\b(?:yes|no)\b", answer.out)) >= 3


def test_everything_that_a_run_would_refuse_is_said_at_once(here: Path, capsys: Capture) -> None:
    """No target, no site, texts that hardly repeat, and missing values: one answer."""
    rows = [
        {
            "hospital": "abc"[n % 3],
            "age": "" if n == 3 else str(n % 50),
            "letter": f"patient {n} came in",
            "ill": str(n % 2),
        }
        for n in range(1200)
    ]
    write_csv(here / "t.csv", rows)
    answer = called(capsys, "data", "describe", "t.csv")
    said = " ".join(answer.err.split())
    assert answer.code == 2
    assert "1. " in said
    assert "name the column to predict with --target COLUMN" in said
    assert "values are missing (rows of each column): age 1" in said
    assert 'the column "letter" has' in said
    assert 'the column "hospital" looks like a site' in said
    answer = called(
        capsys, "data", "describe", "t.csv", "--target", "ill", "--client", "hospital", "--task", "regression"
    )
    assert answer.code == 0
    assert "kind      regression" in answer.out
    assert "A run needs 2 more options:" in answer.out


def test_a_column_of_times_is_kept_where_its_owner_says_so(here: Path, capsys: Capture) -> None:
    rows = [{**row, "year": str(2000 + n)} for n, row in enumerate(ROWS)]
    write_csv(here / "t.csv", rows)
    words = ("data", "describe", "t.csv", "--target", "ill", "--client", "site", "--time", "year")
    said = called(capsys, *words).out
    assert 'the column "year" says when a row was, and is not learned from' in said
    assert "to learn from it too: --set data.keep_time=true" in said
    kept = called(capsys, *words, "--set", "data.keep_time=true").out
    assert "is not learned from" not in kept
    assert re.search(r"numbers, standardised: .*year", kept)


def test_a_model_is_not_praised_for_rows_that_it_was_trained_on(here: Path, capsys: Capture) -> None:
    """Rows of the file that trained are recognised, those that were tested are not, and the folder says which."""
    write_csv(here / "t.csv", [{**row, "age": str(20 + n / 7)} for n, row in enumerate(ROWS)])
    run = (
        "-a",
        "fedavg",
        "--model",
        "mlp",
        "-s",
        "model.width=4",
        "-r",
        1,
        "-s",
        "run.rivals=false",
        "-o",
        "a",
    )
    assert called(capsys, "run", "-d", "t.csv", "--target", "ill", "--client", "site", *run).code == 0
    uses = [line.split(",") for line in (here / "a" / "rows.csv").read_text().splitlines()]
    assert uses[0] == ["row", "client", "use"]
    assert [int(number) for number, _, _ in uses[1:]] == list(range(1, len(ROWS) + 1))
    trained = sum(use == "train" for _, _, use in uses[1:])
    words = ("a", "--client", 0, "--data", "t.csv")
    for command in ("evaluate", "predict"):
        said = " ".join(called(capsys, command, *words).err.split())
        assert f"{trained} of {len(ROWS)} samples are among those that this model was trained on" in said
        assert "says which rows are test rows" in said
    lines = (here / "t.csv").read_text().splitlines()
    tested = [lines[int(number)] for number, _, use in uses[1:] if use == "test"]
    (here / "test.csv").write_text("\n".join([lines[0], *tested]) + "\n")
    assert "among those" not in called(capsys, "evaluate", "a", "--client", 0, "--data", "test.csv").err
    assert called(capsys, "export", "a", "--client", 0, "--out", "sent").code == 0
    assert not list((here / "sent").rglob("fingerprints*"))
    assert "among those" not in called(capsys, "evaluate", "sent", "--data", "t.csv").err


def test_the_upper_folders_of_images_are_the_clients(here: Path, capsys: Capture) -> None:
    for site, label, n in itertools.product(("north", "south", "west"), ("a", "b"), range(5)):
        write_image(here / "photos" / site / label / f"{n}.png", (4, 4), (n, 0, 0))
    answer = called(
        capsys,
        "run",
        "-d",
        "photos",
        "--model",
        "mlp",
        "-r",
        1,
        "-s",
        "model.width=4",
        "--verbose",
        "-o",
        "out",
    )
    assert answer.code == 0
    assert re.search(r"^2 \(west\) ", answer.out, re.MULTILINE)
    assert "3 clients, partition by_group (natural clients)" in answer.out
    (here / "photos" / "west" / "a" / "._0.png").write_bytes(b"of a Mac")  # no image
    answer = called(capsys, "predict", "out", "--client", "west", "--data", "photos/west")
    assert answer.code == 0
    assert [line.split("\t")[1] for line in answer.out.splitlines()] == [
        f"{label}/{n}.png" for label in "ab" for n in range(5)
    ]
    assert answer.err.endswith("% of 10 samples\n")


def test_corrupt_images_are_left_out_on_request(here: Path, capsys: Capture) -> None:
    for label in ("a", "b"):
        for n in range(10):
            write_image(here / "photos" / label / f"{n}.png", (4, 4), (n, 0, 0))
    (here / "photos" / "a" / "3.png").write_bytes(b"\x89PNG")
    words = ("--dataset", "photos", "--model", "mlp", "-n", 2, "-r", 1, "-s", "model.width=4", "-o", "out")
    answer = called(capsys, "run", *words)
    assert answer.code == 2
    assert re.search(r"3\.png is not a readable .* --skip-corrupt", answer.err)
    assert not (here / "out").exists()
    answer = called(capsys, "run", *words, "--skip-corrupt", "--verbose")
    assert answer.code == 0
    assert "1 of 20 images are corrupt and were skipped" in answer.out.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--dataset t.csv",
            "name the column to predict with --target COLUMN; the columns are age, town, site, ill",
        ),
        ("--dataset t.csv --target il", 'no column "il"; did you mean "ill"'),
        ("--dataset t.csv --target town -s data.kind=regression", "'Rome'; regression needs numbers"),
        (
            "--dataset t.csv --target age",
            'the partition "classes" assigns classes, .* --partition iid or --partition quantity',
        ),
        ("--dataset inf.csv --target ill", '"age" has inf in row 1; numbers must be finite, up to 1e'),
        ("--dataset missing.csv --target ill", r"age 1\. .*data.missing=fill .* data.missing=drop"),
        ("--dataset extra.npz", 'the class "3" of "extra" has test samples and no train sample'),
        (
            "--dataset one.csv --target ill",
            'samples of "one" are of one class, 1, so there is nothing to learn',
        ),
        ("--dataset own.csv --target name", "each of the 40 samples has a class of its own, so none can be"),
        ("--dataset t.csv --target ill --client ill", '"ill" is named as target and as client; it can be'),
        ("--dataset t.csv --target ill -s data.drop=ill", '"ill" is named as target and as drop'),
        ("--dataset index.csv --target ill", "index.csv has no name for column 1 .* pandas writes its index"),
        ("--dataset twice.csv --target ill", "has the column 'age' twice; rename or remove one"),
        ("--dataset t.csv.gz --target ill", "t.csv.gz is not a file of a known kind; unpack it, or give"),
        ("--dataset t.xlsx --target ill", "not a file of a known kind; save the sheet as CSV UTF-8, or give"),
        (
            "--dataset list.json --target ill",
            "list.json is a list in JSON, and not LEAF's; a table is .jsonl",
        ),
        ("--dataset leaf.json --target ill", "data.target='ill' is no setting; allowed are kind, users\n"),
        ("--dataset t.csv --target age --task regresion", 'no kind "regresion"; did you mean "regression"'),
        ("--dataset one.csv --target ill --task regression --partition iid", "have the same value, so there"),
        ("--dataset nowhere/", "nowhere does not exist; give a table"),
        ("--dataset nan.npz", "x has NaN or infinity, first in sample 0"),
        ("--dataset many.npz", "70,000 different labels, at most 65,536"),
        ("--dataset huge.csv --target a", "5,368,709,120 bytes; at most .* Take a part of its rows"),
        (
            "--dataset t.jsonl --target ill --text site",
            "the data set has sentences, and the model has no tokenizer",
        ),
    ],
)
def test_bad_data_is_one_paragraph_and_leaves_nothing(
    here: Path, capsys: Capture, words: str, message: str
) -> None:
    write_csv(here / "t.csv", ROWS)
    write_jsonl(here / "t.jsonl", ROWS)
    write_csv(here / "bad.csv", [*ROWS, {**ROWS[0], "site": "h9"}])
    write_csv(here / "inf.csv", [{**ROWS[0], "age": "inf"}, *ROWS])
    write_csv(here / "missing.csv", [{**ROWS[0], "age": ""}, *ROWS])
    write_csv(here / "one.csv", [{**row, "ill": "1"} for row in ROWS])
    write_csv(here / "own.csv", [{"age": n, "name": f"name {n}"} for n in range(40)])
    (here / "index.csv").write_text(",age,ill\n0,1,2\n")
    (here / "twice.csv").write_text("age,age,ill\n0,1,2\n")
    (here / "list.json").write_text('\n [{"age": 1}]')
    (here / "leaf.json").write_text('{"user_data": {}}')
    for name in ("t.csv.gz", "t.xlsx"):
        (here / name).write_bytes(b"")
    x, y = np.zeros((9, 2)), np.arange(9) % 3
    np.savez(here / "extra.npz", x=x, y=y, x_test=x, y_test=y + 1)
    np.savez(here / "nan.npz", x=x + np.nan, y=y)
    np.savez(here / "many.npz", x=np.zeros((70_000, 1), np.uint8), y=np.arange(70_000))
    with (here / "huge.csv").open("wb") as file:
        file.truncate(5 * 2**30)
    before = set(here.iterdir())
    answer = called(capsys, "run", *words.split(), "--model", "mlp", "-r", 1, "-o", "out")
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert re.search(message, answer.err), answer.err
    assert set(here.iterdir()) == before
