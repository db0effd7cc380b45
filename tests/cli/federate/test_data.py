"""`copfl federate contract`, `check`, `init --contract` and `agree`: files, words and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from copfl.data.contract.file import read_contract
from copfl.errors import UsageError
from copfl.federation.machines import local
from copfl.federation.protocol.proposal import read
from copfl.federation.protocol.proposal_text import described
from copfl.federation.server.agreement import contract_at
from tests.code_blocks import call
from tests.data.sites import rows_of, write_rows, write_sites

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The sites' tables; the commands run in their folder, which has a contract."""
    files = {name: str(paths[0]) for name, paths in write_sites(tmp_path).items()}
    monkeypatch.chdir(tmp_path)
    line = f"federate contract {files['north']} --target outcome --drop note --open"
    code, output = call(line.split())
    assert code == 0, output
    assert "To be agreed by sums over all members, or given in the file: age, sodium, income, ward" in output
    return files


def test_from_a_table_to_an_app(sites: dict[str, str]) -> None:
    code, output = call(
        ["federate", "init", "clinic", "--contract", "contract.toml", "--clients", "3", "--rounds", "2"]
    )
    assert code == 0, output
    assert "Its contract is open" in output
    assert contract_at(Path("clinic")) == read_contract(Path("contract.toml"))
    for where in ("clinic", "contract.toml", "clinic/contract.toml"):
        code, output = call(["site", "check", where, "--data", sites["south"]])
        assert code == 0, output
        assert "fits the contract" in output
        assert "the contract leaves open are not compared: age, sodium, income, ward, outcome" in output
    code, output = call(
        ["federate", "propose", "clinic", "first.json", "--run", "first", "--set", "session.agree=true"]
    )
    assert code == 0, output
    lines = described(read(Path("first.json").read_bytes()).proposal)
    assert any("open, to be agreed: age, sodium, income, ward, outcome" in line for line in lines)
    assert "copfl federate agree clinic --proposal first.json" in output
    assert contract_at(Path("first.json")) == contract_at(Path("clinic"))
    with pytest.raises(UsageError, match="name the file of each node with --site FILE"):
        next(local.up("clinic"))
    with pytest.raises(UsageError, match="there are 1 files for 3 nodes"):
        next(local.up("clinic", sites=[Path(sites["north"])], nodes=3))


def test_up_says_first_which_sites_data_differ(sites: dict[str, str], tmp_path: Path) -> None:
    """What a node could not train on is an error before a process is started."""
    call(["federate", "init", "clinic", "--contract", "contract.toml", "--clients", "3", "--rounds", "2"])
    renamed, scaled = tmp_path / "renamed.csv", tmp_path / "scaled.csv"
    header, *rows = Path(sites["north"]).read_text().splitlines()
    place = header.split(",").index("age")
    renamed.write_text("\n".join([header.replace("age", "Alter"), *rows]))
    cells = [row.split(",") for row in rows]
    thousandfold = [[*row[:place], f"{row[place]}000", *row[place + 1 :]] for row in cells]
    scaled.write_text("\n".join([header, *map(",".join, thousandfold)]))
    north, south = Path(sites["north"]), Path(sites["south"])
    assert local.site_problems(Path("clinic"), [north, south]) == []
    (problem,) = local.site_problems(Path("clinic"), [north, scaled])[:1]
    assert problem.startswith(
        f'{scaled}: "age" is at least 100 times what it is in the contract, by its range'
    )
    code, output = call(["federate", "up", "clinic", *("--site", str(north), "--site", str(renamed)) * 2])
    assert code == 2
    assert f'{renamed} cannot be trained on: the column "age" is missing; is it your "Alter"?' in output


def test_a_check_for_programs(sites: dict[str, str], tmp_path: Path) -> None:
    wrong = write_rows(tmp_path / "wrong.csv", [{**row, "age": "old"} for row in rows_of("west")])
    code, output = call(["site", "check", "contract.toml", "--data", str(wrong), "--json"])
    assert code == 1
    found = json.loads(output)
    assert not found["fits"]
    assert [(d["column"], d["what"]) for d in found["differences"]] == [("age", "type")]
    code, output = call(["site", "check", "contract.toml", "--data", str(wrong)])
    assert code == 1
    assert output.startswith('differs   "age" has numbers in the contract')


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("federate contract {north} --target outcome", "contract.toml exists already"),
        ("federate contract {north} --target outcom --out b.toml", 'no column "outcom"'),
        ("federate contract {north} --target outcome --out b.toml --smallest-count 0", "must be at least 1"),
        ("site check nothing.toml --data {north}", "nothing.toml is no data contract"),
        ("site check contract.toml --data nothing.csv", "nothing.csv"),
        ("federate init a --contract contract.toml --dataset digits", "leave one out"),
        (
            "federate init a --contract contract.toml --secure-aggregation",
            'the categories of "ward" are open',
        ),
        ("federate init a --contract contract.toml --privacy 8", "would void its epsilon"),
        ("federate agree nothing", "holds no app of copfl"),
    ],
)
def test_what_cannot_work_is_one_error(line: str, error: str, sites: dict[str, str]) -> None:
    code, output = call([word.format(**sites) for word in line.split()])
    assert code == 2, output
    assert error in output
    assert not Path("a").exists()


def test_a_draft_says_that_it_leaves_out_numbers_of_patients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_rows(
        tmp_path / "north.csv", [{**row, "PID": 70_000 + n} for n, row in enumerate(rows_of("west"))]
    )
    out = tmp_path / "drafted.toml"
    line = ["federate", "contract", str(table), "--target", "outcome", "--drop", "note", "--out", str(out)]
    code, output = call(line)
    assert code == 0, output
    assert 'copfl: warning: the column "PID" is left out of the contract' in output + capsys.readouterr().err
    assert "PID" not in [column.name for column in read_contract(out).columns]
