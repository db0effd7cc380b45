"""Published sets of images, texts, signals and tables in their own layouts, some with natural clients.

`datasets` has their names.
"""

import csv
import gzip
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.data import reading
from copfl.data.arrays import from_arrays, from_splits
from copfl.data.samples import NEXT_TOKEN, REGRESSION, Dataset
from copfl.data.sets.download import TABLE
from copfl.data.tables.columns import DataTable
from copfl.data.tables.files import read_table
from copfl.data.tables.tables import from_tables, names_of
from copfl.errors import DataError, at_least

IDX_LIMIT, MAT_LIMIT = 64 * reading.MIB, 2048 * reading.MIB
DIGIT_DOMAINS = ("mnist", "mnist_m", "svhn", "syn", "usps")
LIMIT = 512 * reading.MIB
NEWS = ("World", "Sports", "Business", "Sci/Tech")
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
Texts = tuple[list[str], list[str]]  # and their labels
LEAF_LIMIT = 2048 * reading.MIB
Users = tuple[list[Any], list[Any], list[str]]  # x, y and the user of each sample
HEART_CATEGORIES = ("cp", "fbs", "restecg", "exang", "slope", "ca", "thal")  # numbers that count nothing
FEMNIST_CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


# Images


def fashion_mnist(data_dir: Path | None) -> Dataset:
    """Fashion-MNIST: 70,000 gray images of clothes, 28 x 28, 10 classes"""
    name = "fashion_mnist"
    location = reading.first_existing(data_dir, name, "FashionMNIST/raw", "FashionMNIST")
    splits = [
        (_idx(location, f"{split}-images-idx3-ubyte", 3), _idx(location, f"{split}-labels-idx1-ubyte", 1))
        for split in ("train", "t10k")
    ]
    return from_splits(splits, classes=TABLE[name]["classes"], name=name, augment=True, leave_out=False)


def _idx(location: Path, name: str, sides: int) -> NDArray[np.uint8]:
    """The array of an IDX file of bytes, compressed or not."""
    path = next((p for p in (location / f"{name}.gz", location / name) if p.is_file()), None)
    if path is None:
        raise DataError(f"{location} lacks {name}.gz")
    raw = reading.read_bytes(path, IDX_LIMIT)
    with reading.data_errors(str(path), "IDX file"):
        if path.suffix == ".gz":
            with gzip.open(io.BytesIO(raw)) as file:
                raw = file.read(IDX_LIMIT)
        shape = np.frombuffer(raw, ">i4", sides, offset=4).tolist()
        if raw[:4] != bytes([0, 0, 8, sides]) or len(raw) - 4 - 4 * sides != int(np.prod(shape)):
            raise DataError(f"{path} is not an IDX file of bytes with {sides} axes, or is incomplete")
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * sides).reshape(shape).copy()


def svhn(data_dir: Path | None) -> Dataset:
    """SVHN: 99,289 colour images of house numbers, 32 x 32, 10 classes"""
    location = reading.first_existing(data_dir, "svhn", "SVHN")
    splits = [_svhn(location / f"{split}_32x32.mat") for split in ("train", "test")]
    return from_splits(splits, name="svhn", classes="0123456789", leave_out=False)


def _svhn(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images and labels; the digit 0 is stored as 10."""
    content = _mat(path, "X", "y")
    return content["X"].transpose(3, 0, 1, 2), content["y"].reshape(-1).astype(np.int64) % 10


def _mat(path: Path, *names: str) -> Mapping[str, Any]:
    """The arrays of a Matlab file."""
    from scipy.io import loadmat

    with reading.data_errors(str(path), ".mat file"):
        content = loadmat(io.BytesIO(reading.read_bytes(path, MAT_LIMIT)), variable_names=names)
        if missing := [name for name in names if name not in content]:
            raise DataError(f"{path} lacks the array {missing[0]}")
        return dict(content)


def tiny_imagenet(data_dir: Path | None, *, size: int = 64) -> Dataset:
    """Tiny-ImageNet: 110,000 images of 200 classes, 64 x 64 or size=32, ...; its val split is test"""
    location = reading.first_existing(data_dir, "tiny-imagenet-200", "tiny-imagenet-200.zip")
    labels: dict[str, str] = {}
    for member in reading.members(location):
        if PurePosixPath(member.name).name == "val_annotations.txt":
            rows = member.read(reading.MIB).decode().splitlines()
            labels = {file: label for file, label, *_ in (row.split("\t") for row in rows if "\t" in row)}
    if not labels:
        raise DataError(f"{location} lacks val/val_annotations.txt")

    def locate(path: PurePosixPath) -> tuple[str, str] | None:
        if "train" in path.parts:  # train/<label>/images/<file>
            return "train", path.parts[path.parts.index("train") + 1]
        return ("val", labels[path.name]) if "val" in path.parts and path.name in labels else None

    images = reading.image_files(location, locate)
    classes = sorted({image.label for image in images})
    splits = []
    for split in ("train", "val"):
        chosen = [image for image in images if image.split == split]
        if not chosen:
            raise DataError(f"{location} has no images in {split}/")
        y = np.array([image.label for image in chosen])
        splits.append((reading.decode_all(chosen, (size, size)), y))
    return from_splits(splits, classes=classes, name="tiny_imagenet", augment=True, leave_out=False)


def pacs(data_dir: Path | None, *, size: int = 64) -> Dataset:
    """PACS: 9,991 images of 7 classes in 4 domains (photo, art, cartoon, sketch), the clients; size=64"""
    return _domains(data_dir, "pacs", ("PACS", "PACS.zip"), size)


def office_caltech10(data_dir: Path | None, *, size: int = 64) -> Dataset:
    """Office-Caltech-10: 2,533 images of 10 classes in 4 domains, the clients; size=64"""
    return _domains(data_dir, "office_caltech10", ("office_caltech_10", "office_caltech_10.zip"), size)


def _domains(data_dir: Path | None, name: str, folders: Sequence[str], size: int) -> Dataset:
    """Images in <domain>/<class>/, with a fifth of each domain's images as its test samples."""
    location = reading.first_existing(data_dir, *folders)
    images = [image for image in reading.image_files(location) if image.split]
    if len({image.split for image in images}) < 2:
        raise DataError(f"{location} has no images of several domains; expected <domain>/<class>/*.jpg")
    x = reading.decode_all(images, (size, size))
    y, group = (np.array([getattr(image, key) for image in images]) for key in ("label", "split"))
    return from_arrays(x, y, group=group, name=name)


def digits_five(data_dir: Path | None) -> Dataset:
    """Digits-Five: digits of 5 domains (MNIST, MNIST-M, SVHN, synthetic, USPS), the clients; 32 x 32

    From its Matlab files. All images are in colour; those of 28 x 28 have a border of two pixels.
    """
    location = reading.first_existing(data_dir, "Digit-Five", "DigitFive", "digits_five")
    mnist = _mat(location / "mnist_data.mat", "train_32", "test_32", "label_train", "label_test")
    colour = _mat(location / "mnistm_with_label.mat", "train", "test", "label_train", "label_test")
    synthetic = _mat(location / "syn_number.mat", "train_data", "test_data", "train_label", "test_label")
    usps = _mat(location / "usps_28x28.mat", "dataset")["dataset"]
    splits = []
    for row, split in enumerate(("train", "test")):
        domains = [
            (mnist[f"{split}_32"], mnist[f"label_{split}"].argmax(axis=1)),
            (colour[split], colour[f"label_{split}"].argmax(axis=1)),
            _svhn(location / f"svhn_{split}_32x32.mat"),
            (synthetic[f"{split}_data"], synthetic[f"{split}_label"]),
            (np.rint(usps[row, 0][:, 0] * 255), usps[row, 1]),
        ]
        x = np.concatenate([_colour_32(images) for images, _ in domains])
        y = np.concatenate([labels.reshape(-1) % 10 for _, labels in domains]).astype(np.int64)
        splits.append((x, y, np.repeat(np.arange(len(domains)), [len(images) for images, _ in domains])))
    names = {"classes": "0123456789", "groups": DIGIT_DOMAINS}
    return from_splits(splits, name="digits_five", **names, leave_out=False)


def _colour_32(images: NDArray[Any]) -> NDArray[np.uint8]:
    """Images [n, side, side(, 1 or 3)] as uint8 [n, 3, 32, 32]."""
    images = images.astype(np.uint8)
    images = images[..., None] if images.ndim == 3 else images
    border = (32 - images.shape[1]) // 2
    images = np.pad(images, ((0, 0), (border, border), (border, border), (0, 0)))
    return np.ascontiguousarray(np.repeat(images, 3 // images.shape[3], axis=3).transpose(0, 3, 1, 2))


# Embedded: they come with copfl, or with scikit-learn


def heart(data_dir: Path | None, *, drop: str = "") -> Dataset:
    """Heart disease of 920 patients by 13 measurements; the clients are 4 hospitals; needs no files

    Licence and changes: embedded/heart.txt. Missing numbers are the column's mean. A missing category is no
    category, which a model sees: `ca` and `thal` are hardly measured outside of one hospital.
    `drop="ca,thal"` leaves columns out.
    """
    table = read_table(Path(__file__).parent / "embedded" / "heart.csv")
    categories = [name for name in HEART_CATEGORIES if name not in names_of(drop, HEART_CATEGORIES)]
    return from_tables(
        [table],
        "heart",
        target="disease",
        client="hospital",
        drop=drop,
        categories=",".join(categories),
        missing="fill",
    )


def breast_cancer(data_dir: Path | None) -> Dataset:
    """569 tumours by 30 measurements, malignant or benign; comes with scikit-learn, needs no files"""
    return _embedded("breast_cancer")


def wine(data_dir: Path | None) -> Dataset:
    """178 wines by 13 measurements, 3 classes; comes with scikit-learn, needs no files"""
    return _embedded("wine")


def diabetes(data_dir: Path | None) -> Dataset:
    """442 patients by 10 measurements, the progress of their disease to predict; comes with scikit-learn"""
    return _embedded("diabetes", REGRESSION)


def _embedded(name: str, kind: str | None = None) -> Dataset:
    """A table of scikit-learn; a fifth of the rows is test."""
    from sklearn import datasets

    content = getattr(datasets, f"load_{name}")()
    columns: dict[str, Any] = {name: content.data[:, k] for k, name in enumerate(content.feature_names)}
    classes = [str(name) for name in getattr(content, "target_names", ())]
    columns["target"] = [classes[k] for k in content.target] if classes else content.target
    return from_tables([DataTable.of(columns)], name, target="target", kind=kind, classes=classes)


# By person


def uci_har(data_dir: Path | None) -> Dataset:
    """UCI-HAR: 10,299 movements of 9 signals x 128 steps, 6 activities; the clients are the 30 persons

    Published with other persons in train and test. Here a fifth of each person's movements is test.
    """
    location = reading.first_existing(
        data_dir, "UCI HAR Dataset", "UCI HAR Dataset.zip", "human+activity*.zip"
    )
    wanted = [f"{name}_{split}.txt" for split in ("train", "test") for name in (*SIGNALS, "y", "subject")]
    files: dict[str, NDArray[np.float32]] = {}
    activities: dict[int, str] = {}
    for member in reading.members(location):
        path = PurePosixPath(member.name)
        if "__MACOSX" in path.parts or path.name not in (*wanted, "activity_labels.txt"):
            continue
        raw = member.read(LIMIT)
        with reading.data_errors(f"{location} ({member.name})", "table of numbers"):
            if path.name == "activity_labels.txt":
                rows = (row.split() for row in raw.decode().splitlines())
                activities = {int(number): name.lower() for number, name in rows}
            else:
                files[path.name] = np.loadtxt(io.BytesIO(raw), dtype=np.float32, ndmin=2)
    if missing := [name for name in wanted if name not in files]:
        raise DataError(f"{location} lacks {missing[0]}")
    splits = [
        np.stack([files[f"{name}_{split}.txt"] for name in SIGNALS], axis=1) for split in ("train", "test")
    ]
    y, person = (
        np.concatenate([files[f"{name}_{split}.txt"][:, 0] for split in ("train", "test")]).astype(np.int64)
        for name in ("y", "subject")
    )
    labels = np.array([activities.get(number, str(number)) for number in y.tolist()])
    return from_arrays(np.concatenate(splits), labels, group=person, name="uci_har")


# Texts


def ag_news(data_dir: Path | None) -> Dataset:
    """AG News: 127,600 news, 4 classes"""
    location = reading.first_existing(data_dir, "ag_news_csv", "ag_news")
    splits = []
    for split in ("train", "test"):
        rows = _rows(location / f"{split}.csv")
        if any(len(row) != 3 or row[0] not in ("1", "2", "3", "4") for row in rows):
            raise DataError(f"{location}/{split}.csv has a row that is not: class 1 to 4, title, description")
        splits.append(([f"{row[1]} {row[2]}" for row in rows], [NEWS[int(row[0]) - 1] for row in rows]))
    return _of_texts("ag_news", *splits, classes=NEWS)


def sst2(data_dir: Path | None) -> Dataset:
    """SST-2: 68,221 sentences from reviews of films, negative or positive; its dev split is test"""
    location = reading.first_existing(data_dir, "SST-2", "SST-2.zip")
    files = {
        PurePosixPath(m.name).name: m.read(LIMIT)
        for m in reading.members(location)
        if m.name.endswith(".tsv")
    }
    splits = []
    for name in ("train.tsv", "dev.tsv"):
        rows = [row.rpartition("\t") for row in files.get(name, b"").decode().splitlines()[1:]]
        if not rows or any(label not in ("0", "1") for *_, label in rows):
            raise DataError(f"{location} lacks {name} with the columns sentence and label")
        splits.append(
            ([row[0].strip() for row in rows], [("negative", "positive")[int(row[2])] for row in rows])
        )
    return _of_texts("sst2", *splits)


def banking77(data_dir: Path | None) -> Dataset:
    """Banking77: 13,083 questions of a bank's customers, 77 intents"""
    location = reading.first_existing(data_dir, "banking77", "banking_data")
    splits = []
    for split in ("train", "test"):
        head, *rows = _rows(location / f"{split}.csv") or [[]]
        if head != ["text", "category"] or any(len(row) != 2 for row in rows):
            raise DataError(f"{location}/{split}.csv does not have the columns text and category")
        splits.append(([row[0] for row in rows], [row[1] for row in rows]))
    return _of_texts("banking77", *splits)


def clinc150(data_dir: Path | None) -> Dataset:
    """CLINC150: 22,500 requests to an assistant, 150 intents; the clients are the 10 domains

    Its validation split is in train. The requests out of scope are left out.
    """
    location = reading.first_existing(data_dir, "clinc150", "oos-eval/data")
    content, domains = (_json(location / name) for name in ("data_full.json", "domains.json"))
    with reading.data_errors(str(location), "copy of CLINC150"):
        domain = {intent: name for name, intents in domains.items() for intent in intents}
        train, test = content["train"] + content["val"], content["test"]
        parts = [([text for text, _ in rows], [intent for _, intent in rows]) for rows in (train, test)]
        groups = [[domain[intent] for intent in intents] for _, intents in parts]
    return _of_texts("clinc150", *parts, group=groups[0], group_test=groups[1])


def _of_texts(name: str, train: Texts, test: Texts, **options: Any) -> Dataset:
    dataset = from_arrays(
        *(np.array(values) for values in (*train, *test)), name=name, leave_out=False, **options
    )
    return replace(dataset, note="")  # that the classes are texts is known


def _rows(path: Path) -> list[list[str]]:
    text = reading.read_bytes(path, LIMIT)
    with reading.data_errors(str(path), "table"):
        return list(csv.reader(io.StringIO(text.decode("utf-8"))))


def _json(path: Path) -> Any:
    raw = reading.read_bytes(path, LIMIT)
    with reading.data_errors(str(path), "JSON file"):
        return json.loads(raw)


# LEAF's layout: {train,test}/*.json, or one .json file, with the samples of every user, a natural client:
# {"users": [...], "user_data": {USER: {"x": [...], "y": [...]}}}


def is_leaf(location: Path) -> bool:
    """Whether a path is a .json file or a folder with train/*.json, as LEAF's are."""
    return location.suffix == ".json" or any((location / "train").glob("*.json"))


def leaf(location: Path, *, users: int = 0, kind: str | None = None) -> Dataset:
    """A file or folder in LEAF's layout.

    Args:
        location: The file or folder.
        users: Take that many, those with the most samples; 0: all.
        kind: Of the targets, see `copfl.data.arrays.from_arrays`; None: inferred.
    """
    name = location.stem if location.is_file() else location.resolve().name
    return from_splits(_users(location, users), kind=kind, name=name, leave_out=False)


def femnist(data_dir: Path | None, *, users: int = 0) -> Dataset:
    """FEMNIST of LEAF: 28 x 28 images of 62 characters; the clients are the writers (users=N takes N)"""
    splits = []
    for x, y, user in _users(_leaf_folder(data_dir, "femnist"), users):
        pixels = np.array(x, np.float32).reshape(-1, 28, 28)
        splits.append((np.rint(pixels * 255).astype(np.uint8), np.array(y, np.int64), user))
    return from_splits(splits, classes=FEMNIST_CLASSES, name="femnist", leave_out=False)


def shakespeare(data_dir: Path | None, *, users: int = 0) -> Dataset:
    """Shakespeare of LEAF: the next character of 80; the clients are the roles (users=N takes N)"""
    of_users = _users(_leaf_folder(data_dir, "shakespeare"), users)
    texts = [[x + y for x, y in zip(*of_user[:2], strict=True)] for of_user in of_users]
    letters = sorted({letter for of_user in texts for text in of_user for letter in text})
    number = {letter: n for n, letter in enumerate(letters)}
    splits = []
    for (*_, user), lines in zip(of_users, texts, strict=True):
        tokens = np.array([[number[letter] for letter in line] for line in lines], np.int64)
        splits.append((tokens[:, :-1], tokens[:, 1:], user))
    return from_splits(splits, classes=letters, kind=NEXT_TOKEN, name="shakespeare", leave_out=False)


def _leaf_folder(data_dir: Path | None, name: str) -> Path:
    """The folder with train/ and test/, at LEAF's own place for it or directly in the data folder."""
    return reading.first_existing(data_dir, f"leaf/data/{name}/data", f"{name}/data", name)


def _users(location: Path, users: int) -> list[Users]:
    """Train and test, or all samples of one file, user by user; without users who have no train sample."""
    at_least(0, users=users)
    if location.is_file():
        files: list[Sequence[Path]] = [[location]]
    else:
        files = [sorted((location / split).glob("*.json")) for split in ("train", "test")]
        if not all(files):
            raise DataError(f"{location} lacks train/*.json or test/*.json")
    data = [_user_data(split) for split in files]
    names = sorted(data[0], key=lambda user: (-len(data[0][user]["y"]), user))
    users_taken = [user for user in names if all(user in split for split in data)][: users or None]
    return [
        (
            [x for user in users_taken for x in split[user]["x"]],
            [y for user in users_taken for y in split[user]["y"]],
            [user for user in users_taken for _ in split[user]["y"]],
        )
        for split in data
    ]


def _user_data(files: Sequence[Path]) -> dict[str, dict[str, list[Any]]]:
    samples_of: dict[str, dict[str, list[Any]]] = {}
    for path in files:
        with reading.data_errors(str(path), "LEAF file"):
            content = json.loads(reading.read_bytes(path, LEAF_LIMIT))
            users = content["user_data"] if isinstance(content, dict) and "user_data" in content else None
            if not isinstance(users, dict):
                raise DataError(f'{path} has no "user_data": {{USER: {{"x": [...], "y": [...]}}}}')
            for user, samples in users.items():
                if not isinstance(samples, dict) or len(samples.get("x", ())) != len(samples.get("y", "?")):
                    raise DataError(f"{path}: the user {user!r} has not as many x as y")
                if samples["y"]:
                    samples_of[user] = samples
    if not samples_of:
        raise DataError(f"{', '.join(map(str, files))} has no samples")
    return samples_of
