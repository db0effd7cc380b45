"""What is trained where no algorithm is named."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import copfl
from copfl.algorithms import ALGORITHMS
from copfl.data.arrays import from_arrays
from copfl.data.samples import CLASSIFICATION, MULTILABEL, NEXT_TOKEN, REGRESSION, Dataset
from copfl.data.sets import datasets
from copfl.settings.checking import SettingError
from copfl.settings.complete import complete
from copfl.settings.data import data_of
from copfl.settings.facts import DATA_SET_DEFAULTS, Facts
from copfl.settings.first_choice import Known, first_choice, training_of, why
from copfl.settings.merging import merge
from copfl.settings.suggestions import ADAPTIVE
from copfl.settings.toml import Tables


@pytest.mark.parametrize(
    ("known", "how"),  # algorithm, server, lr, schedule, batch
    [
        (Known(CLASSIFICATION, 40, 40, "cnn"), ("fedpac", "fedexp", 3e-3, "constant", 8)),
        (Known(CLASSIFICATION, 100, 40, "cnn"), ("fedpac", "fedexp", 1e-3, "constant", 8)),
        (Known(CLASSIFICATION, 200, 40, "cnn"), ("fedpac", "fedexp", 1e-3, "constant", 32)),
        (Known(CLASSIFICATION, 240, 20, "mlp"), ("fedpac", "fedexp", 1e-3, "constant", 8)),
        (Known(CLASSIFICATION, 320, 20, "mlp"), ("fedpac", "fedexp", 1e-3, "constant", 32)),
        (Known(CLASSIFICATION, 200, 20, "embedding"), ("fedpac", "fedexp", 1e-2, "cosine", 8)),
        (Known(CLASSIFICATION, math.inf, 1, "resnet18"), ("fedpac", "fedexp", 1e-3, "constant", 32)),
        (Known(CLASSIFICATION, 40, 40, "embedding"), ("fedpac", "fedexp", 1e-2, "cosine", 8)),
        (Known(CLASSIFICATION, 40, 10, "hf:base", True), ("fedpac", "fedexp", 1e-3, "constant", 16)),
        (
            Known(CLASSIFICATION, 100, 30, "hf:base", True, adapted=True),
            ("fedpac", "fedexp", 3e-3, "constant", 16),
        ),
        (
            Known(CLASSIFICATION, 160, 20, "hf:base", True, adapted=True),
            ("fedpac", "fedexp", 1e-3, "constant", 16),
        ),
        (
            Known(NEXT_TOKEN, 40, 10, "hf:base", True, adapted=True),
            ("fedper", "fedexp", 1e-3, "constant", 16),
        ),
        (Known(REGRESSION, 300, 40, "mlp"), ("ditto", "mean", 1e-3, "constant", 32)),
        (Known(MULTILABEL, 40, 40, "mlp"), ("fedper", "fedexp", 3e-3, "constant", 8)),
        (Known(MULTILABEL, 40, 40, "mlp", sums_only=True), ("fedper", "mean", 3e-3, "constant", 8)),
        (Known(MULTILABEL, 80, 40, "mlp"), ("lg_fedavg", "mean", 1e-3, "constant", 8)),
        (Known(MULTILABEL, 80, 40, "mlp", sums_only=True), ("lg_fedavg", "mean", 1e-3, "constant", 8)),
        (Known(MULTILABEL, 80, 40, "hf:base", True), ("fedper", "mean", 1e-3, "constant", 16)),
        (Known(NEXT_TOKEN, 300, 40, "causal_cnn"), ("fedavg_ft", "fedexp", 1e-2, "cosine", 32)),
        (Known(NEXT_TOKEN, 300, 40, "causal_cnn", sums_only=True), ("fedper", "mean", 1e-2, "cosine", 32)),
        (Known(CLASSIFICATION, 300, 40, "mlp", sums_only=True), ("fedper", "mean", 1e-3, "constant", 32)),
        (Known(CLASSIFICATION, 40, 40, "cnn", head_only=True), ("fedavg_ft", "fedexp", 3e-3, "constant", 8)),
    ],
)
def test_the_rule(known: Known, how: tuple[str, str, float, str, int]) -> None:
    choice = first_choice(known)
    assert (choice.algorithm, choice.server, *choice.training) == how


def test_clients_predict_with_averaged_weights_where_that_was_measured() -> None:
    known = Known(CLASSIFICATION, 100, 20, "cnn")
    assert first_choice(known).layer["addons"] == {"ema": 0.8}
    words = first_choice(known._replace(model="embedding")).layer["addons"]
    assert words == {"lr_schedule": "cosine", "ema": 0.8}
    for kind in (REGRESSION, MULTILABEL):
        assert first_choice(known._replace(kind=kind)).layer["addons"] == {"ema": 0.8}
        assert not first_choice(known._replace(kind=kind, rounds=19)).layer["addons"]
    others = (
        {"rounds": 19},
        {"pretrained": True},
        {"sums_only": True},
        {"head_only": True},
    )
    for other in others:
        assert "ema" not in first_choice(known._replace(**other)).layer["addons"]
    assert not complete({"run": {"rounds": 20}, "addons": {"ema": 0.0}}).addons.options.get("ema")


def test_in_few_rounds_a_client_trains_for_more_epochs() -> None:
    known = Known(CLASSIFICATION, 30, 5, "cnn")
    for rounds, epochs in ((1, 5), (5, 4), (10, 2), (19, 2), (20, None)):
        assert first_choice(known._replace(rounds=rounds)).options.get("epochs") == epochs
    adapters = {"pretrained": True, "adapted": True}  # not measured
    for other in (
        {"samples": 640.0},
        {"samples": math.inf},
        {"pretrained": True},
        adapters,
    ):  # 5 * 640 = 3,200
        assert "epochs" not in first_choice(known._replace(**other)).options
    assert complete({"run": {"rounds": 5}, "algorithm": {"epochs": 2}}).algorithm.epochs == 2


def test_the_limits_are_steps_where_the_page_of_the_study_says_so() -> None:
    """Batches change at 200 samples in runs of 32 rounds or more; the body has two epochs or one at 20 rounds."""

    def known(samples: float, rounds: int) -> Known:
        return Known(CLASSIFICATION, samples, rounds, "cnn")

    for rounds in range(1, 32):
        assert training_of(known(199, rounds)).batch == training_of(known(200, rounds)).batch == 8
    assert [training_of(known(samples, 32)).batch for samples in (199, 200)] == [8, 32]
    assert [first_choice(known(50, rounds)).options.get("epochs") for rounds in (19, 20)] == [2, None]


def test_classes_of_few_clients_are_aligned_less() -> None:
    for sharers, alignment in ((1.5, 0.1), (2.9, 0.1), (3.0, None), (math.inf, None)):
        choice = first_choice(Known(CLASSIFICATION, 40, 40, "cnn", sharers=sharers))
        assert choice.options.get("alignment") == alignment
    few = Known(CLASSIFICATION, 40, 40, "cnn", sharers=2.0)
    for other in ({"model": "embedding"}, {"pretrained": True}):  # a falling rate; not measured
        assert "alignment" not in first_choice(few._replace(**other)).options


def test_clients_without_a_common_class_train_as_if_alone() -> None:
    disjoint = Known(CLASSIFICATION, 40, 40, "cnn", sharers=1.0)
    assert first_choice(disjoint)[:3] == ("apfl", {}, "mean")
    for other in ({"pretrained": True}, {"sums_only": True}, {"sharers": 1.5}):  # the first two: not measured
        assert first_choice(disjoint._replace(**other)).algorithm != "apfl"


def test_values_are_pulled_to_the_common_model_the_less_the_more_samples_a_client_sees() -> None:
    for rounds, samples, lam in (
        (40, 15, 0.05),
        (20, 300, 0.005),
        (100, 40, 0.0075),
        (2, 10, 1.0),
        (0, 10, 1.0),
    ):
        choice = first_choice(Known(REGRESSION, samples, rounds, "mlp"))
        assert choice[:3] == ("ditto", {"lam": lam}, "mean")


def alignment(*layers: dict[str, dict[str, object]], data: Dataset | None = None) -> object:
    """The default's alignment of features; None where it is an algorithm without one."""
    return complete(*layers, values={"data": data}).algorithm.options.get("alignment")


def test_it_counts_the_clients_that_share_a_class() -> None:
    """Digits have ten classes; of the others, by hand: each site has its own, all share all, sites share one."""
    for clients, per_client, expected in ((10, 2, 0.1), (10, 3, 1.0), (2, 5, None), (50, 2, 1.0)):
        partition = {"name": "classes", "per_client": per_client}
        assert alignment({"run": {"clients": clients}, "partition": partition}) == expected
    assert alignment({"run": {"clients": 2}, "partition": {"name": "dirichlet"}}) == 0.1
    assert alignment({"run": {"clients": 3}, "partition": {"name": "dirichlet"}}) == 1.0
    x, sites = np.zeros((90, 4), np.float32), np.arange(90) % 3
    for y, expected in (
        (sites, None),
        (np.arange(90) // 30, 1.0),
        (np.minimum(np.arange(90) // 40, sites), 0.1),
    ):
        assert alignment(data=from_arrays(x, y, group=sites)) == expected


def test_it_says_what_is_trained_and_why(tmp_path: Path) -> None:
    sums = {"privacy": {"clip": 1.0, "noise": 1.0}}
    (tmp_path / "values.csv").write_text("x,y\n" + "".join(f"{n},{n / 7}\n" for n in range(100)))
    values = {"data": {"name": str(tmp_path / "values.csv"), "target": "y", "kind": REGRESSION}}
    (tmp_path / "stays.csv").write_text(
        "x,days,left\n" + "".join(f"{n},{n + 1},{n % 2}\n" for n in range(100))
    )
    survival = {"data": {"name": str(tmp_path / "stays.csv"), "target": "days", "event": "left"}}
    for layer, method, reason in (
        ({}, "fedpac (server step fedexp, adam 0.003, batches of 8, averaged weights)", "seldom far"),
        (
            {"run": {"rounds": 5}},
            "fedpac (server step fedexp, adam 0.003, batches of 8, 4 epochs)",
            "seldom far",
        ),
        (sums, "fedper (server step mean, adam 0.003, batches of 8)", "the server sees sums"),
        (
            values,
            "ditto (server step mean, adam 0.003, batches of 8, averaged weights)",
            "FedPAC needs classes; lam=0.037 pulls",  # 30 over 100 rounds of 8 rows
        ),
        ({"model": {"train": "head"}}, "fedavg_ft (server step fedexp,", "and a body"),
        (survival, "fedavg_ft (server step mean, adam 0.01, batches of 128", "few events at a client"),
    ):
        run = complete(layer)
        assert run.method_text.startswith(method)
        assert reason in why(run)


def test_it_counts_the_samples_of_a_client() -> None:
    rng = np.random.default_rng(0)
    for samples, clients, lr, batch in ((900, 3, 1e-3, 32), (900, 9, 3e-3, 8)):
        y = np.arange(samples) // 10 % 3
        data = from_arrays(
            rng.normal(size=(samples, 4)).astype(np.float32), y, group=np.arange(samples) % clients
        )
        run = complete({"run": {"rounds": 30}}, values={"data": data})
        assert (run.algorithm.name, run.server.name, run.run.clients) == ("fedpac", "fedexp", clients)
        assert (run.optimizer.name, run.optimizer.lr, run.run.batch) == ("adam", lr, batch)


def small(samples: int, clients: int) -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(samples, 4)).astype(np.float32), np.arange(samples) % 3
    return from_arrays(x, y, group=np.arange(samples) % clients)


# These have no optimizer.
@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"levels", "trees", "wide_levels"}))
def test_a_named_algorithm_trains_as_the_first_choice_does(name: str) -> None:
    data, length = small(900, 9), {"run": {"rounds": 5}}
    first = complete(length, values={"data": data})
    named = complete(length, {"algorithm": {"name": name}}, values={"data": data})
    assert (named.optimizer.lr, named.run.batch) == (first.optimizer.lr, first.run.batch) == (3e-3, 8)
    assert named.optimizer.name in ADAPTIVE
    assert not named.server  # a step of the server is not the algorithm's


def test_what_is_set_beside_the_name_counts() -> None:
    data = {"data": small(900, 9)}
    for layer, optimizer, lr, batch in (
        ({"optimizer": {"name": "sgd"}}, "sgd", 0.1, 8),
        ({"optimizer": {"lr": 0.02}}, "adam", 0.02, 8),
        ({"run": {"batch": 3}}, "adam", 1e-3, 3),
    ):
        run = complete({"algorithm": {"name": "fedper"}}, layer, values=data)
        assert (run.optimizer.name, run.optimizer.lr, run.run.batch) == (optimizer, lr, batch)


def test_the_rate_of_texts_falls_unless_somebody_sets_it(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("words,topic\n" + "good day,a\nbad day,b\n" * 20)
    texts = {"data": {"name": str(tmp_path / "texts.csv"), "text": "words", "target": "topic"}}
    named = complete(texts, {"algorithm": {"name": "fedper"}})
    assert (named.optimizer.lr, named.addons.options["lr_schedule"]) == (1e-2, "cosine")
    assert complete(named.tables()) == named
    assert not complete(texts, {"algorithm": {"name": "fedper"}, "optimizer": {"lr": 0.1}}).addons
    assert not complete(texts, {"algorithm": {"name": "fedper"}, "optimizer": {"name": "sgd"}}).addons


def test_published_sets_and_pretrained_models_keep_their_own() -> None:
    named = {"algorithm": {"name": "fedper"}}
    run = complete(named, {"data": {"name": "cifar10"}})
    assert (run.optimizer.name, run.optimizer.lr, run.run.batch) == ("sgd", 0.01, 32)
    lora = complete(named, {"adapter": {"name": "lora"}, "model": {"name": "cnn"}})
    assert (lora.optimizer.name, lora.optimizer.lr) == ("sgd", 0.1)


def test_a_complete_run_is_completed_without_its_data(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((60, 3), np.float32), y=np.arange(60) % 2, group=np.arange(60) % 3)
    tables = complete({"data": {"name": str(path)}, "algorithm": {"name": "fedper"}}).tables()
    path.write_bytes(b"damaged")
    assert complete(tables).tables() == tables


def test_every_setting_overrides_it() -> None:
    run = complete({"optimizer": {"lr": 0.1}, "server": {"name": "mean"}, "run": {"batch": 3}})
    assert (run.algorithm.name, run.optimizer.lr, run.server.name, run.run.batch) == (
        "fedpac",
        0.1,
        "mean",
        3,
    )
    assert complete({"optimizer": {"name": "sgd"}}).optimizer.name == "sgd"
    assert complete(preset="paper").algorithm.name == "copfl"


def test_what_is_set_for_any_algorithm_stays_when_one_is_named() -> None:
    file = {"optimizer": {"lr": 0.05}}
    for name in ("fedper", "copfl"):
        assert complete(file, {"algorithm": {"name": name}}).optimizer.lr == 0.05


@pytest.fixture
def banking(tmp_path: Path) -> Path:
    """A folder with a published set of the form of Banking77: 12 classes of 20 questions."""
    (tmp_path / "banking77").mkdir()
    rows = [f"question {n},topic {n % 12}" for n in range(240)]
    for split in ("train", "test"):
        (tmp_path / "banking77" / f"{split}.csv").write_text("\n".join(["text,category", *rows]))
    return tmp_path


def test_a_published_set_has_what_the_same_samples_have_in_a_file(banking: Path) -> None:
    published: Tables = {"data": {"name": "banking77", "dir": str(banking)}}
    train, test = (str(banking / "banking77" / f"{split}.csv") for split in ("train", "test"))
    own: Tables = {"data": {"name": train, "test": test, "text": "text", "target": "category"}}
    model = {"model": {"name": "hf:base"}, "adapter": {"name": "lora"}}
    extras: tuple[Tables, ...] = (
        {"run": {"clients": 4}},
        {"partition": {"name": "dirichlet"}, "run": {"clients": 4, "rounds": 20}},
        {"partition": {"name": "iid"}, "run": {"clients": 2, "rounds": 20}, **model},
    )
    for extra, samples, sharers in zip(extras, (100, 60, 120), (2 / 3, 4, 2), strict=True):
        layers = [DATA_SET_DEFAULTS["banking77"], published, extra], [own, extra]
        known, of_file = (Facts(merge(tables, {}), {}).known for tables in layers)
        assert known == of_file
        assert (known.samples, known.sharers) == (samples, sharers)
    assert training_of(known).lr == 3e-3  # of adapters that see 2,400 samples
    assert complete(published, extras[0]).algorithm.name == "apfl"  # 4 clients with 2 of 12 classes


def test_a_published_set_is_read_once(banking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the images of one can take minutes."""
    read, calls = datasets.DATASETS["banking77"], []

    def counted(data_dir: Path | None) -> Dataset:
        calls.append(data_dir)
        return read(data_dir)

    monkeypatch.setitem(datasets.DATASETS, "banking77", counted)
    record = complete({"data": {"name": "banking77", "dir": str(banking)}}).data
    assert len(data_of(record).train) == 240
    assert calls == [banking]
    data_of(record)  # it is not kept any longer
    assert calls == [banking] * 2


def test_small_sets_and_texts_have_their_own(banking: Path) -> None:
    assert complete({"data": {"name": "diabetes"}}).algorithm.name == "ditto"
    words = complete({"data": {"name": "banking77", "dir": str(banking)}})
    assert (words.optimizer.lr, words.addons.options["lr_schedule"]) == (1e-2, "cosine")
    assert complete({"privacy": {"noise": 1.0}}).algorithm.name == "fedper"


def test_a_model_of_one_layer_is_shared_as_a_whole() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert complete(values={"model": flat}).algorithm.name == "fedavg_ft"
    deep = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    assert complete(values={"model": deep}).algorithm.name == "fedpac"
    assert complete({"model": {"name": "mlp", "train": "head"}}).algorithm.name == "fedavg_ft"


def test_an_option_needs_the_name_of_its_algorithm() -> None:
    with pytest.raises(SettingError, match=r"algorithm\.rate=0\.1 needs the name of its algorithm"):
        complete({"algorithm": {"rate": 0.1}})
    assert complete({"algorithm": {"epochs": 2}}).algorithm.epochs == 2


def test_it_trains() -> None:
    result = copfl.run(dataset="digits", rounds=2, clients=6)
    assert result.experiment.title == "fedpac on digits"
    assert np.isfinite(result.accuracy).all()
