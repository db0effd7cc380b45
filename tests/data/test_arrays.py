"""A user's data, whole and damaged: .npz files, folders of images, torch Datasets, arrays."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from copfl.data import reading
from copfl.data.arrays import from_arrays, from_torch, joined
from copfl.data.held_out import held_out, held_out_of_groups, rank_within_class
from copfl.data.sets.datasets import load
from copfl.errors import CopflError, DataError, UsageError
from tests.data.files import Payload, assert_well_formed, saved, write_image

# The fixed split


def test_rank_within_class() -> None:
    assert rank_within_class(np.array([2, 0, 2, 2, 0, 1])).tolist() == [0, 0, 1, 2, 1, 0]


def test_held_out_is_even_in_every_class() -> None:
    assert held_out(np.zeros(10, np.int64), 1, 5).tolist() == [False] * 4 + [True] + [False] * 4 + [True]
    assert held_out(np.zeros(10, np.int64), 3, 10).sum() == 3
    y = np.array([0, 1] * 10)
    assert held_out(y, 1, 2)[y == 0].tolist() == held_out(y, 1, 2)[y == 1].tolist() == [False, True] * 5


# .npz files


def arrays(n: int = 20) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"x": rng.random((n, 4)).astype(np.float32), "y": np.arange(n) % 2}


def test_npz_without_a_test_part(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **arrays(), group=np.arange(20) % 5)
    found = load(tmp_path / "mine.npz")
    assert_well_formed(found)
    assert (len(found.train), len(found.test)) == (15, 5)  # one sample of each group of four is test
    assert found.test.group is not None
    assert np.bincount(found.test.group).tolist() == [1] * 5
    assert found.note == "a fifth of each group's samples is test: 5"
    assert found.train.x.dtype == np.float32
    assert found.mean == ()
    assert found.name == "mine"
    assert found.groups == ("0", "1", "2", "3", "4")
    assert set(found.train.x[:, 0]) & set(found.test.x[:, 0]) == set()


def test_npz_with_a_test_part_of_images(tmp_path: Path) -> None:
    x, x_test = np.random.default_rng(0).integers(0, 256, (2, 10, 6, 5, 3)).astype(np.uint8)
    y = np.arange(10, dtype=np.uint8) % 3
    np.savez_compressed(tmp_path / "mine.npz", x=x, y=y, x_test=x_test[:3], y_test=y[:3])
    found = load(str(tmp_path / "mine.npz"), augment=True)
    assert_well_formed(found)
    assert found.train.x.shape == (10, 3, 6, 5)
    assert (found.train.x[4, 2] == x[4, :, :, 2]).all()
    assert found.mean == pytest.approx(x.mean(axis=(0, 1, 2)) / 255, abs=1e-5)
    assert found.std == pytest.approx(x.std(axis=(0, 1, 2)) / 255, abs=1e-5)
    assert found.augment


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.full((20, 4), np.nan)}, "x has NaN or infinity, first in sample 0"),
        ({"x": np.zeros((20, 4), complex)}, "x has dtype complex128"),
        ({"x": np.zeros((20, 4), "U3")}, "x has dtype <U3"),
        ({"x": np.zeros(20)}, r"x has shape \[20\]"),
        ({"x": np.zeros((0, 4)), "y": np.zeros(0, int)}, r"x has shape \[0, 4\]"),
        ({"x": np.zeros((19, 4))}, r"y has shape \[20\], but there are 19 samples"),
        ({"y": np.zeros((20, 1, 2), "U1")}, r"a label must be one number or text per sample"),
        ({"y": np.arange(20) // 2.0}, "y has 10 different whole numbers .* task='regression'"),
        ({"y": np.arange(20) + 1.7e9 + 0.5}, "up to 1.7e.09 that differ by little: .*; subtract a constant"),
        ({"y": np.full(20, np.nan)}, "y has NaN or infinity, first in sample 0"),
        ({"y": np.zeros(20, complex)}, "complex128; whole numbers or texts were expected"),
        ({"group": np.zeros(3, int)}, r"group has shape \[3\]"),
        ({"x_test": np.zeros((3, 4))}, "x_test and y_test must be given together"),
        ({"x_test": np.zeros((3, 5)), "y_test": np.zeros(3, int)}, "they must be alike"),
        ({"x_test": np.zeros((3, 4)), "y_test": np.zeros(3, int), "group": np.zeros(20, int)}, "group_test"),
        ({"labels": np.zeros(20)}, "has an array labels; known are x, y"),
        ({"x": np.zeros((2, 4)), "y": np.array([0, 1])}, "too few samples"),
    ],
)
def test_npz_names_what_is_wrong(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "mine.npz", **{**arrays(), **changes})
    with pytest.raises(DataError, match=rf"mine\.npz: .*{message}"):
        load(tmp_path / "mine.npz")


def test_npz_without_y_with_objects_or_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((3, 2)))
    with pytest.raises(DataError, match="lacks the array y; it has x"):
        load(path)
    np.savez(path, x=np.array([[Payload(os.mkdir, str(tmp_path / "trap"))]]), y=np.array([0]))
    with pytest.raises(DataError, match=r"x\.npy\) contains Python objects"):
        load(path)
    assert not (tmp_path / "trap").exists()
    np.savez(path, x=np.asfortranarray(np.ones((3, 2))), y=np.zeros(3, int))
    with pytest.raises(DataError, match="Fortran order"):
        load(path)
    path.write_bytes(b"no zip file")
    with pytest.raises(DataError, match="damaged or incomplete"):
        load(path)
    with pytest.raises(DataError, match=r"gone\.npz does not exist"):
        load(tmp_path / "gone.npz")
    (tmp_path / "mine.xls").write_text("1,2")
    with pytest.raises(DataError, match="is not a file of a known kind"):
        load(tmp_path / "mine.xls")


def test_a_truncated_or_flipped_npz_never_escapes_as_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, **arrays())
    whole = path.read_bytes()
    for cut in range(0, len(whole), 37):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError):
            load(path)
    for position in range(0, len(whole), 5):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 255]) + whole[position + 1 :])
        with contextlib.suppress(CopflError):
            load(path)


def npy_claiming(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(16)


@pytest.mark.parametrize(
    "shape", ["(1000000000000, 4)", "(-1, -4)", "(0, -1)", "(5, 1)", "('a',)", "(2.0, 2)"]
)
def test_npz_with_a_shape_it_does_not_hold(tmp_path: Path, shape: str) -> None:
    with zipfile.ZipFile(tmp_path / "mine.npz", "w") as archive:
        archive.writestr("x.npy", npy_claiming(shape))
        archive.writestr("y.npy", saved(np.zeros(4, int)))
    with pytest.raises(DataError, match=r"mine\.npz"):
        load(tmp_path / "mine.npz")


def test_npz_that_unpacks_to_far_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MIB", 1)
    np.savez_compressed(tmp_path / "mine.npz", x=np.zeros((10**6, 4), np.uint8), y=np.zeros(10**6, np.int8))
    with pytest.raises(DataError, match=r"would unpack to 5,000,.* bytes"):
        load(tmp_path / "mine.npz")


# Folders of images


def test_folder_of_classes(tmp_path: Path) -> None:
    for number, label in enumerate(("bee", "ant")):
        for i in range(5):
            write_image(tmp_path / "zoo" / label / f"{i}.png", (6, 4), (number, i, 0))
    (tmp_path / "zoo" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "zoo" / ".hidden").mkdir()
    found = load(tmp_path / "zoo")
    assert_well_formed(found)
    assert found.classes == ("ant", "bee")
    assert found.train.x.shape == (8, 3, 4, 6)
    assert (found.train.x[:, 0, 0, 0] == 1 - found.train.y).all()
    assert found.test.x[:, 1, 0, 0].tolist() == [4, 4]
    assert found.name == "zoo"


def test_folder_with_splits_and_several_sizes(tmp_path: Path) -> None:
    for label in ("a", "b"):
        write_image(tmp_path / "train" / label / "0.png", (8, 8))
        write_image(tmp_path / "train" / label / "1.JPG", (8, 8))
        write_image(tmp_path / "train" / label / "2.jpeg", (20, 30))
        write_image(tmp_path / "test" / label / "0.png", (4, 4), 77, "L")
    found = load(tmp_path)
    assert found.train.x.shape == (6, 3, 8, 8)
    assert found.test.x.shape == (2, 3, 8, 8)
    assert (found.test.x == 77).all()
    assert found.note == "4 of 8 images resized to 8 x 8"
    assert load(tmp_path, size=5, gray=True).train.x.shape == (6, 1, 5, 5)
    write_image(tmp_path / "test" / "c" / "0.png")
    with pytest.raises(DataError, match="test/ has a class c which train/ lacks"):
        load(tmp_path)


def test_folders_of_clients(tmp_path: Path) -> None:
    """<client>/<class>/*.png: the upper folders are the clients, each with a test part of its own."""
    for client, counts in {"north": {"a": 10, "b": 5}, "south": {"b": 10}}.items():
        for label, count in counts.items():
            for i in range(count):
                write_image(tmp_path / client / label / f"{i}.png", (4, 4), (i, 0, 0))
    (tmp_path / "north" / "Thumbs.db").write_bytes(b"no image")
    write_image(tmp_path / ".cache" / "a" / "0.png", (4, 4))
    data = load(tmp_path)
    assert (data.groups, data.classes, data.natural) == (("north", "south"), ("a", "b"), True)
    sides = [np.bincount(part.group).tolist() for part in (data.train, data.test) if part.group is not None]
    assert sides == [[12, 8], [3, 2]]
    (tmp_path / "west").mkdir()
    with pytest.raises(DataError, match="west has no images"):
        load(tmp_path)
    (tmp_path / "west").rmdir()
    write_image(tmp_path / "north" / "0.png", (4, 4))
    with pytest.raises(
        DataError, match=r"north/0\.png has no client, .*north/a/0\.png has one; expected <class>/"
    ):
        load(tmp_path)
    (tmp_path / "north" / "0.png").unlink()
    write_image(tmp_path / "west" / "a" / "deep" / "0.png", (4, 4))
    with pytest.raises(DataError, match=r"deep/0\.png is in too many folders; expected <class>/"):
        load(tmp_path)


def test_folders_of_clients_in_train_and_test(tmp_path: Path) -> None:
    for split, client, label in itertools.product(("train", "test"), ("north", "south"), ("a", "b")):
        write_image(tmp_path / split / client / label / "0.png", (4, 4))
    write_image(tmp_path / "val" / "north" / "a" / "0.png", (4, 4))
    data = load(tmp_path)
    assert (data.groups, data.classes, len(data.train), len(data.test)) == (
        ("north", "south"),
        ("a", "b"),
        4,
        4,
    )
    left_out = "images that are left out: 1 in neither train/ nor test/ (val/north/a/0.png)"
    assert data.note.startswith(left_out)
    shutil.rmtree(tmp_path / "test")
    with pytest.raises(DataError, match=r"there is a folder train/ but none test/ with images; expected"):
        load(tmp_path)


@pytest.mark.parametrize("order", ["{split}/{client}", "{client}/{split}"])
def test_train_and_test_in_capital_letters_or_at_each_client(tmp_path: Path, order: str) -> None:
    for split, client, label in itertools.product(("Train", "TEST"), ("north", "south"), ("a", "b")):
        folder = tmp_path / order.format(split=split, client=client) / label
        write_image(folder / "0.png", (4, 4))
    data = load(tmp_path)
    assert (data.groups, data.classes, len(data.train), len(data.test), data.note) == (
        ("north", "south"),
        ("a", "b"),
        4,
        4,
        "",
    )


def test_images_that_are_left_out_are_counted(tmp_path: Path) -> None:
    for label, i in itertools.product(("Hund groß", "猫"), range(5)):
        write_image(tmp_path / label / f"{i}.PNG", (4, 4))
    (tmp_path / "__MACOSX" / "猫").mkdir(parents=True)
    for name in ("__MACOSX/猫/._0.png", "猫/._0.png"):  # of a Mac: no images
        (tmp_path / name).write_bytes(b"\x00\x05\x16\x07")
    assert "left out" not in load(tmp_path).note
    for name in (".ipynb_checkpoints/a/0.png", "猫/.cache/0.png", "猫/1.bmp", "猫/2.TIF", "0.jpg"):
        write_image(tmp_path / name, (4, 4))
    data = load(tmp_path)
    assert data.note.startswith(
        "images that are left out: 2 in hidden files or folders (.ipynb_checkpoints/a/0.png), "
        "1 in no folder of a class (0.jpg), 2 neither PNG nor JPEG (猫/1.bmp); "
    )
    assert (len(data.train) + len(data.test), data.classes) == (10, ("Hund groß", "猫"))
    for label in data.classes:
        (tmp_path / label).rename(tmp_path / f".{label}")
    with pytest.raises(DataError, match=r"no images; expected .*: 14 in hidden files or folders \("):
        load(tmp_path)


def test_a_photo_is_upright_as_its_camera_noted(tmp_path: Path) -> None:
    """Stored with its left column at the top: programs turn it by a quarter, and so does copfl."""
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, :4] = 255
    stored = Image.fromarray(np.rot90(pixels))
    exif = Image.Exif()
    exif[0x112] = 6
    (tmp_path / "a").mkdir()
    for i in range(5):
        stored.save(tmp_path / "a" / f"{i}.jpg", exif=exif, quality=100)
    found = load(tmp_path).train.x
    assert found.shape[1:] == (3, 4, 8)
    assert np.abs(found[0].transpose(1, 2, 0).astype(int) - pixels).max() < 10


@pytest.mark.parametrize(
    ("mode", "colour"), [("L", 9), ("LA", (9, 0)), ("RGBA", (9, 9, 9, 0)), ("1", 1), ("P", 3)]
)
def test_modes_of_images(tmp_path: Path, mode: str, colour: Any) -> None:
    for i in range(5):
        write_image(tmp_path / "a" / f"{i}.png", (4, 4), colour, mode)
    assert load(tmp_path).train.x.shape == (4, 3, 4, 4)


def test_palette_with_transparency_does_not_warn(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 50, 60, 70])
    (tmp_path / "a").mkdir()
    for i in range(5):
        image.save(tmp_path / "a" / f"{i}.png", transparency=b"\x00\x80")
    assert load(tmp_path).train.x[0, :, 0, 0].tolist() == [50, 60, 70]


def test_corrupt_images_are_named_or_skipped_and_counted(tmp_path: Path) -> None:
    for i in range(6):
        write_image(tmp_path / "a" / f"{i}.png", (4, 4))
    whole = (tmp_path / "a" / "0.png").read_bytes()
    (tmp_path / "a" / "1.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        DataError,
        match=r"1\.png is not a readable .* leave such images out with data_options=\{'skip_corrupt': True\}",
    ):
        load(tmp_path)
    found = load(tmp_path, skip_corrupt=True)
    assert len(found.train) + len(found.test) == 5
    assert found.note.startswith("1 of 6 images are corrupt and were skipped")


def test_folders_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images; expected <class>"):
        load(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty has no images"):
        load(tmp_path)
    (tmp_path / "empty" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    with pytest.raises(DataError, match=r"broken\.png is not a readable PNG or JPEG image"):
        load(tmp_path)
    write_image(tmp_path / "empty" / "broken.png", (5000, 1))
    with pytest.raises(DataError, match=r"broken\.png is an image of 5,000 x 1 pixels; at most 4,096"):
        load(tmp_path)
    write_image(tmp_path / "empty" / "broken.png", (4, 4), 7000, "I;16")
    with pytest.raises(DataError, match=r"broken\.png has pixels of mode I.*; 8 bits per channel"):
        load(tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "empty" / "broken.png", "BMP")  # a wrong suffix
    with pytest.raises(DataError, match=r"broken\.png is not a readable PNG or JPEG"):
        load(tmp_path)


def png_claiming(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    raw = bytearray(file.getvalue())
    raw[16:24] = struct.pack(">II", width, height)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    return bytes(raw)


@pytest.mark.parametrize("side", [4097, 12_000, 2**31 - 1])
def test_a_pixel_bomb_is_refused_by_its_header(side: int) -> None:
    with pytest.raises(DataError, match="bomb"):
        reading.decode(png_claiming(side, side), "bomb", (32, 32))


# torch and arrays


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, pairs: list[Any], classes: list[str] | None = None) -> None:
        self.pairs = pairs
        if classes:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        return self.pairs[index]


def test_from_torch_tensors() -> None:
    train = torch.utils.data.TensorDataset(torch.rand(10, 3, 4, 4), torch.arange(10) % 2)
    found = from_torch(train, train, name="mine")
    assert_well_formed(found)
    assert found.train.x.shape == (10, 3, 4, 4)
    assert found.train.x.dtype == np.float32
    assert found.mean == ()
    assert (found.name, found.classes) == ("mine", ("0", "1"))


def test_pictures_of_16_bits_are_refused() -> None:
    deep = Image.fromarray(np.full((4, 4), 60_000, np.uint16))
    with pytest.raises(DataError, match=r"item 0 of the train set .*: its pixels have mode I;16; 8 bits"):
        from_torch(Pairs([(deep, 0)] * 10, ["one"]))


def test_from_torch_pictures() -> None:
    pairs = [(Image.new("RGB", (6, 4), (i, 0, 0)), i % 2) for i in range(10)]
    found = from_torch(Pairs(pairs, ["even", "odd"]), augment=True)
    assert_well_formed(found)
    assert found.train.x.shape == (8, 3, 4, 6)
    assert found.train.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert found.classes == ("even", "odd")


def test_from_torch_without_length() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return ((np.full((4, 4), i, np.uint8), np.int64(0)) for i in range(5))

    assert from_torch(Stream()).train.x.shape == (4, 1, 4, 4)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "train set is empty"),
        ([1], "item 0 of the train set is not a pair"),
        (
            [(torch.zeros(2), 0), (torch.zeros(3), 0)],
            r"item 1 of the train set is not .* its shape is \[3\], that of the first \[2\]",
        ),
        ([(torch.zeros(2), 0), (torch.zeros(2), torch.zeros(3))], "item 1 of the train set is not a pair"),
        ([(torch.zeros(2, dtype=torch.bfloat16), 0)], "item 0"),
        ([(torch.full((2,), torch.nan), 0)], "NaN"),
    ],
)
def test_from_torch_names_what_is_wrong(pairs: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_torch(Pairs(pairs))


def test_from_arrays_names() -> None:
    x, y = np.zeros((4, 2)), np.array([0, 1, 2, 0])
    found = from_arrays(
        x, y, x, y, group=[0, 0, 1, 1], group_test=[1, 1, 0, 0], groups=["w", "e"], classes="abc"
    )
    assert_well_formed(found)
    assert found.classes == ("a", "b", "c")
    assert found.groups == ("w", "e")
    with pytest.raises(DataError, match="there is a label 2, but only 2 names"):
        from_arrays(x, y, x, y, classes=["a", "b"])
    with pytest.raises(DataError, match="x must be an array"):
        from_arrays([[1, 2], [3]], [0, 0])


# Labels, groups and other targets as people have them


def test_labels_with_gaps_from_one_or_negative_are_numbered_from_zero() -> None:
    x = np.zeros((30, 2))
    found = from_arrays(x, np.tile([1, 2, 7], 10))
    assert_well_formed(found)
    assert found.classes == ("1", "2", "7")
    assert sorted(set(found.train.y.tolist())) == [0, 1, 2]
    assert found.note.startswith("labels 1, 2, 7 are numbered from 0; ")
    assert from_arrays(x, np.tile([-1, 1, 0], 10)).classes == ("-1", "0", "1")
    assert "numbered" not in from_arrays(x, np.tile([0, 1, 2], 10)).note
    with pytest.raises(DataError, match=r"70,000 different labels, at most 65,536 .* task='regression'"):
        from_arrays(np.zeros((70_000, 1)), np.arange(70_000))


def test_texts_are_labels_and_groups() -> None:
    y = np.tile(["cat", "dog"], 10)
    for labels in (y, y.astype(object), y.tolist()):
        found = from_arrays(np.zeros((20, 2)), labels, group=np.repeat(["west", "east"], 10))
        assert_well_formed(found)
        assert (found.classes, found.groups) == (("cat", "dog"), ("east", "west"))
        assert found.train.group is not None
        assert found.groups[found.train.group[0]] == "west"
    other = from_arrays(np.zeros((20, 2)), y, classes=["dog", "cat"])
    assert other.classes[other.train.y[0]] == "cat"
    with pytest.raises(DataError, match="there is a label 'dog', but the names are cat, cow"):
        from_arrays(np.zeros((20, 2)), y, classes=["cat", "cow"])


def test_one_hot_labels_are_classes_and_other_rows_of_zero_and_one_are_labels() -> None:
    x, y = np.zeros((20, 2)), np.arange(20) % 4
    found = from_arrays(x, np.eye(5)[y])
    assert_well_formed(found)
    assert (found.kind, len(found.classes)) == ("classification", 5)
    assert found.note.startswith("one-hot labels are classes")
    labels = from_arrays(x, np.array([[1, 0, 1], [0, 0, 1]] * 10), classes=["a", "b", "c"])
    assert (labels.kind, labels.classes) == ("multilabel", ("a", "b", "c"))
    assert labels.train.y.dtype == np.float32
    assert labels.train.y.shape == (16, 3)
    assert from_arrays(x, np.eye(5)[y], kind="multilabel").kind == "multilabel"
    with pytest.raises(DataError, match="labels are 0 or 1"):
        from_arrays(x, np.full((20, 2), 2.5), kind="multilabel")


def test_values_and_tokens() -> None:
    x = np.arange(40.0).reshape(20, 2)
    found = from_arrays(x, np.linspace(0, 1, 20))
    assert (found.kind, found.classes, found.train.y.shape) == ("regression", ("target 0",), (16,))
    assert from_arrays(x, np.zeros((20, 3)) + 0.5).train.y.shape == (16, 3)
    assert from_arrays(x, np.arange(20) % 3, kind="regression").train.y.dtype == np.float32
    tokens = from_arrays(x, np.arange(80).reshape(20, 4) % 7)
    assert (tokens.kind, len(tokens.classes), tokens.train.y.shape) == ("next_token", 7, (16, 4))
    with pytest.raises(UsageError, match='did you mean "regression"'):
        from_arrays(x, np.zeros(20), kind="regresion")
    with pytest.raises(DataError, match="regression needs numbers"):
        from_arrays(x, np.full(20, "a"), kind="regression")


def test_samples_of_several_arrays(tmp_path: Path) -> None:
    ids, mask = np.arange(60).reshape(20, 3), np.ones((20, 3), bool)
    content: dict[str, Any] = {"x.ids": ids, "x.mask": mask, "y": np.arange(20) % 2}
    np.savez(tmp_path / "mine.npz", **content)
    found = load(tmp_path / "mine.npz")
    assert sorted(found.train.x) == ["ids", "mask"]
    assert found.train.x["ids"].shape == (16, 3)
    assert found.train.x["mask"].dtype == np.bool_
    pairs = [({"ids": torch.arange(3), "image": torch.zeros(1, 2, 2)}, n % 2) for n in range(10)]
    assert from_torch(Pairs(pairs)).train.x["image"].shape == (8, 1, 2, 2)
    with pytest.raises(DataError, match="different numbers of samples: a 3, b 4"):
        from_arrays({"a": np.zeros((3, 1)), "b": np.zeros((4, 1))}, np.zeros(3, int))


def test_text_samples() -> None:
    found = from_arrays(["good", "bad"] * 10, ["pos", "neg"] * 10)
    assert found.train.x.dtype.kind == "U"
    assert found.train.x.shape == (16,)


def test_every_group_has_test_samples_of_its_own() -> None:
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(80), rng.integers(2, 12, 80))  # 80 small groups
    y = rng.integers(0, 3, len(group))
    found = from_arrays(np.zeros((len(group), 2)), y, group=group)
    assert found.test.group is not None
    assert found.train.group is not None
    assert np.bincount(found.test.group, minlength=80).min() == 1
    assert np.bincount(found.train.group, minlength=80).min() == 1
    assert len(found.train) + len(found.test) == len(group)
    even = held_out_of_groups(np.zeros(50, np.int64), np.repeat([0, 1], 25))
    assert even[:25].sum() == even[25:].sum() == 5  # evenly over the classes
    rare = held_out_of_groups(np.zeros(10, np.int64), np.arange(10))
    assert not rare.any()  # every class has one sample, which is trained on


def test_several_data_sets_are_one_with_a_group_each() -> None:
    first = from_arrays(np.zeros((10, 2)), ["a", "b"] * 5)
    second = from_arrays(np.ones((5, 2)), ["b"] * 5)
    both = joined([first, second])
    assert_well_formed(both)
    assert (both.classes, both.groups, both.natural) == (("a", "b"), ("0", "1"), True)
    assert both.train.group is not None
    assert (both.train.y[both.train.group == 1] == 1).all()
    with pytest.raises(DataError, match=r"client 0 has .* they must be alike"):
        joined([first, from_arrays(np.zeros((10, 3)), ["a", "b"] * 5)])


def test_a_class_in_test_alone_is_refused() -> None:
    x = np.zeros((4, 2))
    found = from_arrays(x, ["a", "a", "b", "b"], x, ["a", "b", "c", "c"])
    with pytest.raises(DataError, match='the class "c" of "arrays" has test samples and no train sample'):
        found.check_test_classes()


def test_a_constant_channel_keeps_a_deviation_of_one() -> None:
    found = from_arrays(np.full((5, 4, 4), 51, np.uint8), np.zeros(5, int))
    assert (found.mean, found.std) == ((0.2,), (1.0,))


def test_names_that_differ_in_capital_letters_or_spaces_are_noted() -> None:
    y, sites = np.array(["Yes", "no", "yes"] * 10), np.array(["north", "north "] * 15)
    note = from_arrays(np.zeros((30, 2)), y, group=sites).note
    alike = "that differ only in capital letters, spaces or zeros, to make alike if they are the same:"
    assert f'classes {alike} "Yes", "yes"' in note
    assert f'groups {alike} "north", "north "' in note
    assert "differ" not in from_arrays(np.zeros((30, 2)), np.arange(30) % 3).note
