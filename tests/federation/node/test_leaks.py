"""Nothing personal leaves a node: every byte that others can read is searched for recognisable values.

Personal are the samples, the personal entries of the model, and their paths on disk. Others can read the
messages, what the server prints and writes, and the report. The checkpoint and the models of a simulation
contain every client, and are not searched.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from copfl.algorithms import ALGORITHMS
from copfl.choosing.run import run
from copfl.core import tree
from copfl.core.algorithm import blank_samples, example_output, traits
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.federation.protocol.settings import settings_of
from copfl.parts.valve import size_of
from copfl.testing import small_federation
from tests.commands import called
from tests.federation.network import CONFIG, DirectTransport, client_of, play, unsigned, write_nodes

ROOT = Path(__file__).parents[3]
WIDTH, EACH = 12, 20


def with_secrets() -> FederatedData:
    """Three clients with samples of twelve numbers, each number unlike any that a program would compute."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(3 * EACH, WIDTH)).astype(np.float32)
    samples = Samples(x, rng.integers(0, 4, 3 * EACH))
    parts = tuple(np.split(np.arange(3 * EACH), 3))
    return FederatedData(
        Dataset("secrets", samples, samples, ("a", "b", "c", "d")), Partition(parts, parts, "by hand")
    )


def found(secrets: Iterable[float], content: bytes) -> list[float]:
    """The secrets that are in the content: as a float of either size, or in figures."""
    secrets = list(secrets)
    text = content.decode("latin-1")
    # Longest first, so that 0.12345678 is also found where it was rounded to six digits.
    numbers = {round(float(n), 6) for n in re.findall(r"-?\d+\.\d{6,}(?:e-?\d+)?", text)}
    return [
        s
        for s in secrets
        if struct.pack("<f", s) in content or struct.pack("<d", s) in content or round(float(s), 6) in numbers
    ]


def test_the_search_finds_what_is_there() -> None:
    assert found([0.5772156], b"xx" + struct.pack("<f", 0.5772156)) == [0.5772156]
    assert found([0.5772156], b'{"w":[1.0,0.577215611934]}') == [0.5772156]
    assert found([0.5772156], b"0.5772 and 0.577299") == []


def config_of(name: str) -> dict[str, Any]:
    drop = ("optimizer", "samples.", "model.width")
    kept = {key: value for key, value in CONFIG.items() if not key.startswith(drop)}
    toy = {"run.rounds": 3, "run.batch": 5, "samples.shape": [WIDTH], "samples.classes": 4, "model.width": 8}
    return kept | toy | {"algorithm.name": name}


@pytest.mark.parametrize("name", ["copfl", "fedper", "ditto", "local"])
def test_no_message_line_or_file_of_the_server_holds_anything_personal(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    federation, config, secret = with_secrets(), config_of(name), "ward-7-oncology"
    nodes = write_nodes(federation, tmp_path / secret)
    records, _, log, transport = play(config, nodes, tmp_path / "runs")
    settings = settings_of(config)
    messages = b"".join(
        p.head.encode() + p.body for p in [*transport.received, *(sent for _, _, sent in transport.sent)]
    )
    files = b"".join(p.read_bytes() for p in sorted((tmp_path / "runs").rglob("*")) if p.is_file())
    printed = "\n".join([*log, *capfd.readouterr(), json.dumps(records)]).encode()
    seen = messages + files + printed
    assert len(messages) > 1000
    assert len(files) > 500
    assert not found(federation.dataset.train.x.ravel().tolist(), seen)
    for client, node_config in enumerate(nodes):
        kept = personal_values(name, client_of(settings, node_config, client, 2))
        assert len(kept) > 20
        assert not found(kept, seen)
    assert secret.encode() not in seen


def personal_values(name: str, record: Any) -> list[float]:
    """The personal weights in a client's record.

    Without those that training has not changed since they were shared, as at a unit that never fires.
    """
    if name == "copfl":
        values = record.w[record.mask & (record.w != record.seen)].double()
    else:
        values = (record.v if name == "ditto" else record.personal).double()
    initial = settings_of(config_of(name)).task.initial.double()
    personal: list[float] = values[(values != 0) & ~torch.isin(values, initial)].tolist()
    return personal  # the initial weights are public


@pytest.mark.parametrize("broken", ["data", "state-dir"])
def test_a_node_does_not_report_what_is_wrong_with_its_files(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken file is refused with a sentence that contains neither its path nor its content."""
    pytest.importorskip("flwr", reason="Flower is an extra")
    from copfl.federation.machines import client_app, flower_transport
    from copfl.federation.server.folder import ServerFolder
    from copfl.federation.server.rounds import new_server

    config = config_of("copfl")
    settings = settings_of(config)
    folder = ServerFolder(str(tmp_path / "runs"), "test", resume=False)
    packet = new_server(settings, DirectTransport(settings, {}), folder).down(0)
    message: Any = SimpleNamespace(metadata=SimpleNamespace(message_type="train"), packet=packet)
    path = tmp_path / "ward-7-oncology.npz"
    path.write_bytes(b"patient 4711")
    monkeypatch.setattr(flower_transport, "content_of", lambda message: message.packet)
    monkeypatch.setattr(client_app, "as_record", lambda content: content)
    monkeypatch.setattr(client_app, "Message", lambda content, reply_to: content)
    node_config = unsigned(write_nodes(with_secrets(), tmp_path / "nodes")[0])
    node_config |= {broken: str(path), "worker": False}
    context: Any = SimpleNamespace(node_config=node_config, run_config=config)
    answer: Any = client_app.reply(message, context)
    head, body = answer
    assert f"its {broken} cannot be used" in head
    assert not body
    assert "ward" not in head
    assert "4711" not in head


def test_a_runs_records_prints_and_report_hold_no_sample_and_no_weight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = with_secrets()
    result = run(
        "copfl",
        federation.dataset,
        partition=federation.partition,
        model="mlp",
        model_options={"width": 8},
        rounds=3,
        engine="vmap",
        out=tmp_path / "run",
    )
    done = called(capsys, "report", tmp_path / "run", "--out", tmp_path / "report.html")
    assert done.code == 0, done.err
    open_files = [p for p in (tmp_path / "run").iterdir() if p.is_file()] + [tmp_path / "report.html"]
    names = {p.name for p in open_files}
    assert {"run.toml", "rounds.jsonl", "environment.json", "partition.json", "report.html"} <= names
    seen = (done.out + done.err).encode() + b"".join(p.read_bytes() for p in open_files)
    clients = result.state.clients.rows(torch.arange(3))
    assert not found(federation.dataset.train.x.ravel().tolist(), seen)
    for client in range(3):
        record = tree.row(clients, client)
        assert not found(record.w[record.mask].tolist(), seen)


# -- what the server learns, by algorithm --------------------------------------------------------------------

WORDS = {
    "w": "weights",
    "shared": "which* parameters are personal",
    "size": "the number of samples",
    "score": "score",
    "weight": "score",
    "scores": "three with",
    "head": "the head",
    "means": "mean features",
    "features": "mean features",
    "spread": "variance",
    "mean": "mean of the features",
    "control": "control variate",
    "cluster": "which cluster",
    "sensitivity": "the sensitivity of each layer",
    "counts": "per class",
    "answers": "answers to the public samples",
    "sums": "sums over its rows",
}


def rows_of_the_table() -> dict[str, str]:
    """What the server learns according to docs/deploy.md, by algorithm."""
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    start = text.index("| algorithm | from each client, each round |")
    rows: dict[str, str] = {}
    for line in text[start:].split("\n\n")[0].splitlines()[2:]:
        names, row = (cell.strip() for cell in line.strip("|").split("|"))
        rows |= dict.fromkeys((name.strip() for name in names.split(",")), row)
    return rows


def test_the_table_has_every_algorithm() -> None:
    assert rows_of_the_table().keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_table_matches_the_uploads(name: str) -> None:
    row = rows_of_the_table()[name]
    needs = getattr(ALGORITHMS[name], "needs", ())
    task, _ = small_federation("batch", (4,), needs=needs, trains=traits(ALGORITHMS[name]).trains)
    upload = example_output(ALGORITHMS[name](), task, blank_samples(task, (1, 8, 8))).upload
    head, norms = int(task.where("head")[: task.d].sum()), int(task.where("norms")[: task.d].sum())
    for field in [name for name, value in upload._asdict().items() if value is not None]:
        word = WORDS[field].replace("*", "")
        if field == "w" and upload.w.numel() == 0:
            assert "weights" not in row
        else:
            assert word in row.replace("*", ""), f"{name} sends {field}, which is not in the table"
    if "w" in upload._fields:
        sizes = {task.d: "all weights", head: "the head's weights", 0: "the number of samples"}
        sizes |= {
            task.d - head: "the weights without the head",
            task.d - norms: "the weights without the norm layers",
            task.d - head + size_of(task): "the weights without the head, with the embeddings",
        }
        if needs:
            a, b, both = (
                int(task.where(*parts).sum()) for parts in (["*.lora_A"], ["*.lora_B"], ["*.lora_?"])
            )
            base = int(task.where("*.base_layer").sum()) if "*.base_layer.weight" in needs else 0
            assert both == a + b
            sizes = {
                task.d - a: "the weights without the adapters' A",
                task.d - b - head: "the weights without the adapters' B and the head",
                task.d - base: "the weights without the adapted layers' own",
            }
        assert row.startswith(sizes[upload.w.numel()])
