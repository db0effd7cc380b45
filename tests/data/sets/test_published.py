"""The published sets of texts, signals, domains and tables, from small files in their published layouts."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.io import savemat

from copfl.data.sets import published
from copfl.data.sets.datasets import DATASETS, load
from copfl.data.sets.published import SIGNALS
from copfl.errors import DataError
from copfl.settings.complete import complete
from tests.data.files import assert_well_formed, write_image
from tests.data.sets.test_datasets import cifar_pickle
from tests.data.tables.test_tables import leaf_json

RNG = np.random.default_rng(0)


def zipped(path: Path, files: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path.read_bytes()


# Embedded


@pytest.mark.parametrize(
    ("name", "samples", "features", "classes"),
    [
        ("breast_cancer", 569, 30, ("malignant", "benign")),
        ("wine", 178, 13, ("class_0", "class_1", "class_2")),
    ],
)
def test_embedded_tables(name: str, samples: int, features: int, classes: tuple[str, ...]) -> None:
    found = load(name)
    assert_well_formed(found)
    assert len(found.train) + len(found.test) == samples
    assert found.train.x.shape[1:] == (features,)
    assert found.classes == classes
    assert found.train.x.mean(axis=0) == pytest.approx(np.zeros(features), abs=1e-5)


def test_diabetes() -> None:
    found = load("diabetes")
    assert (found.kind, found.classes, found.train.y.dtype) == (
        "regression",
        ("target",),
        np.dtype(np.float32),
    )
    assert len(found.train) + len(found.test) == 442
    assert 25 <= found.train.y.min() < found.train.y.max() <= 346


def test_heart_has_four_hospitals_as_clients() -> None:
    found = load("heart")
    assert_well_formed(found)
    assert found.natural
    assert found.groups == ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")
    assert found.classes == ("no", "yes")
    groups = [samples.group for samples in (found.train, found.test)]
    assert [int(sum((group == n).sum() for group in groups if group is not None)) for n in range(4)] == [
        303,
        294,
        123,
        200,
    ]
    both = np.concatenate([found.train.y, found.test.y])
    assert (both == 1).sum() == 509  # 411 have no disease
    # Six numbers, of which four are missing somewhere, and a feature per category: a missing one is none of them.
    assert found.train.x.shape[1:] == (6 + 4 + 4 + 2 + 3 + 2 + 3 + 4 + 3,)
    assert found.table.columns[-1].categories == ("3", "6", "7")
    thal = np.concatenate([found.train.x, found.test.x])[:, -3:]
    assert (thal.sum(1) == 0).sum() == 486
    assert "chol 202" in found.note  # 30, and 172 that are published as 0


def test_columns_of_heart_can_be_left_out() -> None:
    assert load("heart", drop="ca,thal").train.x.shape[1:] == (31 - 7,)
    with pytest.raises(DataError, match="no column"):
        load("heart", drop="weight")


def test_the_licence_of_heart_is_in_the_package() -> None:
    text = Path(published.__file__).parent.joinpath("embedded", "heart.txt").read_text("utf-8")
    assert "CC BY 4.0" in text
    assert "https://doi.org/10.24432/C52P4X" in text


def test_heart_is_trained_by_hospital() -> None:
    run = complete({"data": {"name": "heart"}})
    assert (run.partition.name, run.run.clients, run.model.name) == ("by_group", 4, "mlp")


# Images


def test_cifar100(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    names = b"".join(b"T" + struct.pack("<i", 3) + f"c{n:02d}".encode() for n in range(100))
    key = b"T" + struct.pack("<i", 16) + b"fine_label_names"
    (folder / "meta").write_bytes(b"\x80\x02}" + key + b"](" + names + b"es.")
    for split in ("train", "test"):
        pixels = RNG.integers(0, 256, (100, 3072)).astype(np.uint8)
        raw = cifar_pickle(pixels, list(range(100)))
        raw = raw.replace(struct.pack("<i", 6) + b"labels", struct.pack("<i", 11) + b"fine_labels")
        (folder / split).write_bytes(raw)
    found = load("cifar100", tmp_path, verify=False)
    assert_well_formed(found)
    assert found.classes[7] == "c07"
    assert found.train.x.shape == (100, 3, 32, 32)
    with pytest.raises(DataError, match=r"train .* has md5 .* instead of 16019d7e"):
        load("cifar100", tmp_path)
    (folder / "meta").unlink()
    with pytest.raises(DataError, match="lacks meta"):
        load("cifar100", tmp_path, verify=False)


def idx(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def test_fashion_mnist(tmp_path: Path) -> None:
    folder = tmp_path / "fashion_mnist"
    folder.mkdir()
    for split in ("train", "t10k"):
        images, labels = (
            RNG.integers(0, 256, (20, 28, 28)).astype(np.uint8),
            np.arange(20).astype(np.uint8) % 10,
        )
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    found = load("fashion_mnist", tmp_path)
    assert_well_formed(found)
    assert found.train.x.shape == (20, 1, 28, 28)
    assert (found.test.x[:, 0] == images).all()
    assert found.classes[9] == "Ankle boot"
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)[:-1]))
    with pytest.raises(DataError, match="not an IDX file of bytes with 3 axes, or is incomplete"):
        load("fashion_mnist", tmp_path)


def save_svhn(path: Path, n: int = 20) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = RNG.integers(0, 256, (32, 32, 3, n)).astype(np.uint8)
    savemat(path, {"X": images, "y": (np.arange(n, dtype=np.uint8) % 10 + 1)[:, None]})


def test_svhn(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_svhn(tmp_path / "svhn" / f"{split}_32x32.mat")
    found = load("svhn", tmp_path)
    assert_well_formed(found)
    assert found.train.y[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]  # 10 stands for 0
    (tmp_path / "svhn" / "test_32x32.mat").write_bytes(b"no Matlab")
    with pytest.raises(DataError, match=r"test_32x32\.mat is not a readable \.mat file"):
        load("svhn", tmp_path)


def image(colour: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64), (colour, 0, 0)).save(file, "JPEG")
    return file.getvalue()


def test_tiny_imagenet(tmp_path: Path) -> None:
    files = {
        f"tiny-imagenet-200/train/{label}/images/{label}_{n}.JPEG": image(10 * n)
        for label in ("n01", "n02")
        for n in range(3)
    }
    rows = [f"val_{n}.JPEG\tn0{n % 2 + 1}\t0\t32\t44\t62" for n in range(4)]
    files |= {f"tiny-imagenet-200/val/images/val_{n}.JPEG": image(n) for n in range(4)}
    files["tiny-imagenet-200/test/images/test_0.JPEG"] = image(0)
    files["tiny-imagenet-200/val/val_annotations.txt"] = "\n".join(rows).encode()
    zipped(tmp_path / "tiny-imagenet-200.zip", files)
    found = load("tiny_imagenet", tmp_path, size=32)
    assert_well_formed(found)
    assert found.classes == ("n01", "n02")
    assert (found.train.x.shape, found.test.x.shape) == ((6, 3, 32, 32), (4, 3, 32, 32))
    assert np.bincount(found.test.y).tolist() == [2, 2]


@pytest.mark.parametrize(("name", "folder"), [("pacs", "PACS"), ("office_caltech10", "office_caltech_10")])
def test_sets_of_domains(tmp_path: Path, name: str, folder: str) -> None:
    for domain in ("photo", "sketch"):
        for label in ("dog", "horse"):
            for n in range(5):
                write_image(tmp_path / folder / domain / label / f"{n}.jpg", (20, 30))
    found = load(name, tmp_path, size=16)
    assert_well_formed(found)
    assert (found.groups, found.classes, found.natural) == (("photo", "sketch"), ("dog", "horse"), True)
    assert found.train.x.shape == (16, 3, 16, 16)
    assert found.test.group is not None
    assert np.bincount(found.test.group).tolist() == [2, 2]
    with pytest.raises(DataError, match=f"has neither {folder} .* no open address; put its images"):
        load(name, tmp_path / folder)


def test_digits_five(tmp_path: Path) -> None:
    folder = tmp_path / "Digit-Five"
    folder.mkdir()
    one_hot = np.eye(10)[np.arange(12) % 10]
    gray, colour = (RNG.integers(0, 256, (12, *shape)).astype(np.uint8) for shape in ((32, 32), (28, 28, 3)))
    labels = {"label_train": one_hot, "label_test": one_hot}
    savemat(folder / "mnist_data.mat", {"train_32": gray, "test_32": gray, **labels})
    savemat(folder / "mnistm_with_label.mat", {"train": colour, "test": colour, **labels})
    for split in ("train", "test"):
        save_svhn(folder / f"svhn_{split}_32x32.mat", 12)
    column, wide = np.arange(12)[:, None] % 10, RNG.integers(0, 256, (12, 32, 32, 3)).astype(np.uint8)
    names = {"train_label": column, "test_label": column}
    savemat(folder / "syn_number.mat", {"train_data": wide, "test_data": wide, **names})
    cells = np.empty((2, 2), object)
    for row in range(2):
        cells[row, 0], cells[row, 1] = np.full((12, 1, 28, 28), 0.2), column
    savemat(folder / "usps_28x28.mat", {"dataset": cells})
    found = load("digits_five", tmp_path)
    assert_well_formed(found)
    assert found.groups == ("mnist", "mnist_m", "svhn", "syn", "usps")
    assert found.train.x.shape == (60, 3, 32, 32)
    assert (found.train.x[:12, 2] == gray).all()
    assert (found.train.x[12:24, :, 2:30, 2:30] == colour.transpose(0, 3, 1, 2)).all()
    assert found.train.x[48, 0, 16, 16] == 51
    assert found.train.y[:12].tolist() == found.train.y[48:].tolist() == column[:, 0].tolist()


# By person, writer or role


def har_files() -> dict[str, bytes]:
    files = {"UCI HAR Dataset/activity_labels.txt": b"1 WALKING\n2 SITTING\n"}
    for split, people in (("train", (1, 3)), ("test", (2,))):
        n = 10 * len(people)
        folder = f"UCI HAR Dataset/{split}"
        for number, name in enumerate(SIGNALS):
            row = " ".join([f"{number / 10:e}"] * 128)
            files[f"{folder}/Inertial Signals/{name}_{split}.txt"] = "\n".join([row] * n).encode()
        files[f"{folder}/y_{split}.txt"] = "\n".join(str(k % 2 + 1) for k in range(n)).encode()
        files[f"{folder}/subject_{split}.txt"] = "\n".join(str(p) for p in people for _ in range(10)).encode()
    return files


@pytest.mark.parametrize("nested", [False, True])
def test_uci_har(tmp_path: Path, nested: bool) -> None:
    raw = zipped(tmp_path / "UCI HAR Dataset.zip", har_files())
    if nested:  # as the archive publishes it today
        (tmp_path / "UCI HAR Dataset.zip").unlink()
        name = "human+activity+recognition+using+smartphones.zip"
        zipped(tmp_path / name, {"UCI HAR Dataset.zip": raw, "UCI HAR Dataset.names": b"about"})
    found = load("uci_har", tmp_path)
    assert_well_formed(found)
    assert (found.groups, found.natural) == (("1", "2", "3"), True)
    assert set(found.classes) == {"walking", "sitting"}
    assert found.train.x.shape == (24, 9, 128)
    assert found.train.x[0, :, 0] == pytest.approx(np.arange(9) / 10)
    assert found.test.group is not None
    assert np.bincount(found.test.group).tolist() == [2, 2, 2]


def test_femnist_and_shakespeare(tmp_path: Path) -> None:
    pixels = [[n / 255] * 784 for n in range(4)]
    lines = ["x" * 79 + letter for letter in "abcd"]
    for split in ("train", "test"):
        leaf_json(tmp_path / "femnist" / "data" / split / "a.json", {"f1": (pixels, [0, 61, 10, 36])})
        leaf_json(tmp_path / "shakespeare" / split / "a.json", {"HAMLET": (lines, list("wxyz"))})
    found = load("femnist", tmp_path)
    assert_well_formed(found)
    assert found.train.x[:, 0, 5, 5].tolist() == [0, 1, 2, 3]
    assert [found.classes[k] for k in found.train.y] == ["0", "z", "A", "a"]
    text = load("shakespeare", tmp_path)
    assert (text.kind, text.groups, text.natural) == ("next_token", ("HAMLET",), True)
    assert text.train.x.shape == text.train.y.shape == (4, 80)
    assert "".join(text.classes[k] for k in text.train.y[0, -2:]) == "aw"
    assert (text.train.x[:, 1:] == text.train.y[:, :-1]).all()


# Texts


def test_ag_news(tmp_path: Path) -> None:
    (tmp_path / "ag_news_csv").mkdir()
    for split in ("train", "test"):
        rows = [f'"{n % 4 + 1}","Title {n}","Body ""{n}"", and more"' for n in range(8)]
        (tmp_path / "ag_news_csv" / f"{split}.csv").write_text("\n".join(rows))
    found = load("ag_news", tmp_path)
    assert found.classes == ("World", "Sports", "Business", "Sci/Tech")
    assert found.train.x[3] == 'Title 3 Body "3", and more'
    assert found.train.y.tolist() == [0, 1, 2, 3] * 2
    (tmp_path / "ag_news_csv" / "test.csv").write_text('"5","a","b"')
    with pytest.raises(DataError, match="class 1 to 4, title, description"):
        load("ag_news", tmp_path)


def test_sst2(tmp_path: Path) -> None:
    rows = "sentence\tlabel\nhide new secretions \t0\ncontains no wit\t0\nthat loves its characters\t1\n"
    files = {f"SST-2/{split}.tsv": rows.encode() for split in ("train", "dev")}
    zipped(tmp_path / "SST-2.zip", {**files, "SST-2/test.tsv": b"index\tsentence\n0\tno label\n"})
    found = load("sst2", tmp_path)
    assert (found.classes, found.train.y.tolist()) == (("negative", "positive"), [0, 0, 1])
    assert found.test.x[0] == "hide new secretions"


def test_banking77_and_clinc150(tmp_path: Path) -> None:
    (tmp_path / "banking77").mkdir()
    for split in ("train", "test"):
        rows = ["text,category", '"I wait, still",card_arrival', "Why?,exchange_rate"]
        (tmp_path / "banking77" / f"{split}.csv").write_text("\n".join(rows))
    found = load("banking77", tmp_path)
    assert (found.classes, found.train.x[0]) == (("card_arrival", "exchange_rate"), "I wait, still")
    (tmp_path / "clinc150").mkdir()
    pairs = [["what is my balance", "balance"], ["set a timer", "timer"]]
    content: dict[str, Any] = {"train": pairs, "val": pairs, "test": pairs, "oos_train": [["blue", "oos"]]}
    (tmp_path / "clinc150" / "data_full.json").write_text(json.dumps(content))
    domains = {"banking": ["balance"], "utility": ["timer"]}
    (tmp_path / "clinc150" / "domains.json").write_text(json.dumps(domains))
    requests = load("clinc150", tmp_path)
    assert (requests.classes, requests.groups) == (("balance", "timer"), ("banking", "utility"))
    assert (len(requests.train), len(requests.test), requests.natural) == (4, 2, True)
    (tmp_path / "clinc150" / "domains.json").write_text("{}")
    with pytest.raises(DataError, match="not a readable copy of CLINC150"):
        load("clinc150", tmp_path)


@pytest.mark.parametrize(
    "name",
    [name for name in DATASETS if name not in ("digits", "breast_cancer", "wine", "diabetes", "heart")],
)
def test_what_is_missing_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"{name}: .*(copfl data get {name}|open address|preprocess\.sh)"):
        load(name, tmp_path)
