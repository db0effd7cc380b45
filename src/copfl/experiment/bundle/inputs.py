"""New samples as the network takes them: rows of a table, texts, images or arrays, from a file or Python.

A `Bundle` prepares with it whatever it is asked to predict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from copfl.data import reading
from copfl.data.arrays import npz_content
from copfl.data.samples import CLASSIFICATION, SURVIVAL, Inputs, by_name
from copfl.data.tables import tables
from copfl.data.tables.columns import (
    Column,
    DataTable,
    as_numbers,
    check_plain,
    coded,
    floats,
    not_numbers,
    present,
    times_of,
    words,
)
from copfl.data.tables.encoders import MOST_SHOWN, Encoder, encoded, unknown_categories
from copfl.data.tables.files import LINES, READ_AS_MISSING, READERS, read_table, text_lines
from copfl.data.targets import LARGEST_NUMBER, named, numbered, targets_of
from copfl.errors import DataError, how_to_set, one_of
from copfl.experiment.bundle.description import IMAGE, TABLE, TEXT, Input, Output, Tokenizer
from copfl.tables import listed

USUAL_TARGETS = ("target", "label")  # columns of a table of texts whose own target has no name


class PreparedInputs(NamedTuple):
    """The samples, and what is worth to know about them."""

    x: Inputs
    notes: list[str]
    is_sample: NDArray[np.bool_] | None = None  # [rows] of a table, whether each is a sample; None: all are

    def __len__(self) -> int:
        return len(next(iter(by_name(self.x).values())))


class Labelled(NamedTuple):
    """The samples of a file, with the targets of those that have one, which `Preparation.targets` reads."""

    x: Inputs  # of n samples
    y: NDArray[Any] | None  # of the samples with a target; None if none has
    has_target: NDArray[np.bool_]  # [n]
    notes: list[str]  # what is unusual about them
    target: str = "targets"  # what a file without targets lacks
    test: tuple[Inputs, NDArray[Any]] | None = None  # where the file has test samples of its own
    is_sample: NDArray[np.bool_] | None = None  # [rows] of a table: whether it is a sample; None: all are
    files: tuple[str, ...] = ()  # of images, their names below the folder; none of other samples
    unit: NDArray[np.int64] | None = None  # [n], as of copfl.data.samples.Samples
    time: NDArray[np.float64] | None = None

    @property
    def rows(self) -> NDArray[np.int64]:
        """The row of each sample in the file [n], from 0."""
        return np.arange(len(self.has_target)) if self.is_sample is None else np.flatnonzero(self.is_sample)


@dataclass(frozen=True)
class Preparation:
    """How new samples become inputs of the network."""

    input: Input
    output: Output
    tokenizer: Tokenizer | None = None  # of texts

    def of(self, data: Any, missing: str | None = None) -> PreparedInputs:
        """A data frame, columns by name, arrays, or texts; columns may be in any order.

        A missing value of a table is an error, or with missing="fill" the column's mean, no category or an
        empty text. By default it is filled where training did so.

        Args:
            data: The samples.
            missing: "refuse" or "fill"; None: as in training.
        """
        one_of(("refuse", "fill"), **({} if missing is None else {"missing": missing}))
        missing = missing or ("fill" if self.input.missing == "fill" else "refuse")
        kind = self.input.kind
        if kind in (TABLE, TEXT) and (table := _table(data)) is not None:
            return self.of_table(table, missing)
        if kind == TEXT and isinstance(data, str):
            raise DataError("pass a list of texts, not a single one")
        if kind == TEXT and not isinstance(data, Mapping) and all(isinstance(text, str) for text in data):
            return PreparedInputs(self.tokens(list(data)), [])
        if kind == TABLE:
            array = np.asarray(data, dtype=object)
            names = [column.name for column in self.input.columns]
            if array.ndim != 2 or array.shape[1] != len(names):
                raise DataError(
                    f"the model takes the {len(names)} columns {', '.join(names)}; pass a data frame, or an "
                    f"array [n, {len(names)}] in this order, not {list(array.shape)}"
                )
            return self.of_table(DataTable.of(dict(zip(names, array.T.tolist(), strict=True))), missing)
        return PreparedInputs(self._arrays(data), [])

    def of_table(self, table: DataTable, missing: str) -> PreparedInputs:
        """The rows of a table; the notes count missing values and unknown categories by column.

        Args:
            table: Its columns may be in any order.
            missing: What happens to missing values: "refuse"; "fill" (the column's mean, no category, an
                empty text); "drop" (their rows are no samples).
        """
        if self.input.kind not in (TABLE, TEXT):
            raise DataError(f"the model takes {self.shown}, and not the rows of a table")
        names = [encoder.name for encoder in self.input.columns] or [str(self.input.text)]
        if absent := [name for name in names if name not in table.columns]:
            lacks = f"the table lacks {len(absent)} of {len(names)} columns: {', '.join(absent)}"
            raise DataError(f"{lacks}; it has {', '.join(table.columns)}")
        used = DataTable({name: table.columns[name] for name in names})
        has_value = np.stack([present(column) for column in used.columns.values()], axis=1)  # [rows, names]
        is_sample = np.ones(len(used), np.bool_) if missing != "drop" else np.asarray(has_value.all(1))
        about_used = [n for n in table.notes if not (n.startswith(READ_AS_MISSING) and has_value.all())]
        notes = [*about_used, *_missing_notes(names, has_value, missing)]
        if self.input.kind == TEXT:
            texts = [str(text or "")[: tables.LONGEST_TEXT] for text in used.columns[names[0]].to_pylist()]
            return PreparedInputs(self.tokens(list(compress(texts, is_sample))), notes, is_sample)
        encoders = self.input.columns
        fitting = DataTable({e.name: _fitting(e, used.columns[e.name]) for e in encoders})
        notes += unknown_categories(encoders, fitting)
        x = encoded(encoders, fitting)
        if not (is_finite := np.isfinite(x).all(1)).all():
            raise DataError(
                f"row {int(np.argmin(is_finite)) + 1} has a number that is too far from those in training"
            )
        return PreparedInputs(x[is_sample], notes, is_sample)

    def tokens(self, texts: Sequence[str]) -> Inputs:
        """Texts as the model takes them."""
        if self.tokenizer is None:
            raise DataError(f"the model takes {self.shown}, and not texts")
        if not texts:
            raise DataError("there is no text; give at least one")
        return self.tokenizer(texts)

    @property
    def shown(self) -> str:
        """The input, for messages."""
        if self.input.kind == TABLE:
            return f"rows of {len(self.input.columns)} columns"
        arrays = [f"{name} {a.dtype} {list(a.shape)}" for name, a in self.input.arrays.items()]
        return "texts" if self.input.kind == TEXT else ", ".join(arrays)

    def _arrays(self, data: Any) -> Inputs:
        """Arrays of the types and shapes of the network's; tokens may have any length."""
        given = data if isinstance(data, Mapping) else {"x": data}
        arrays = {
            str(k): np.asarray(v.detach().cpu() if hasattr(v, "detach") else v) for k, v in given.items()
        }
        if arrays.keys() != self.input.arrays.keys():
            names = ", ".join(self.input.arrays)
            raise DataError(f"the model takes the arrays {names}, not {', '.join(arrays) or 'none'}")
        for name, info in self.input.arrays.items():
            array = arrays[name]
            wanted = np.dtype(info.dtype)
            if wanted == np.uint8 and len(info.shape) == 3:
                array = _channels_first(array, info.shape)
            elif array.dtype.kind in ("bifu" if wanted.kind == "f" else "biu") and wanted != np.uint8:
                array = array.astype(wanted)
            fits = array.shape[1:] == info.shape or (self.input.text is not None and array.ndim == 2)
            if not fits or array.dtype != wanted:
                found = f"{name} is {array.dtype} {list(array.shape)}"
                raise DataError(f"{found}, but a sample of the model is {info.dtype} {list(info.shape)}")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise DataError(f"{name} has NaN or infinity; all values must be finite")
            arrays[name] = np.ascontiguousarray(array)
        return arrays["x"] if arrays.keys() == {"x"} else arrays

    # -- files

    def read(self, path: Path, missing: str | None = None) -> Labelled:
        """The samples of a file or a folder, and their targets if it has them.

        An .npz file has the arrays x and y; a table the model's columns; a .txt file a text per line. Images
        are a file, all files of a folder, or those of its folders, which are named by the classes.

        A row of a table with a missing value is no sample; with missing="fill", as by default where training
        filled them, it is one, and with "refuse" it is an error.

        Args:
            path: Of the file or folder.
            missing: "drop", "refuse" or "fill"; None: as in training.
        """
        missing = missing or ("fill" if self.input.missing == "fill" else "drop")
        suffix = path.suffix.lower()
        if not path.exists():
            raise DataError(
                f"there is no file or folder {path}; name the samples: an .npz file, a table or images"
            )
        if path.is_dir() or suffix in reading.IMAGES:
            return self._images(path)
        if suffix == ".txt":
            lines = [line if line.strip() else None for line in text_lines(path)]
            return self._rows(DataTable.of({self.input.text or LINES: lines}), missing)
        if suffix in READERS:
            return self._rows(read_table(path), missing)
        if suffix != ".npz":
            known = ", ".join((*READERS, ".npz", *reading.IMAGES))
            raise DataError(
                f"{path} is not a file of a known kind; give one of {known}, or a folder of images"
            )
        arrays = npz_content(path)
        if "x" not in arrays:
            raise DataError(f"{path} lacks the array x; it has {', '.join(arrays) or 'none'}")
        x, y, lacking = self.of(arrays["x"]).x, arrays.get("y"), "the array y"
        if y is None:
            return _without_targets(x)._replace(target=lacking)
        is_number = y.dtype.kind == "f"
        has_target = ~np.isnan(y).reshape(len(y), -1).any(1) if is_number else np.ones(len(y), np.bool_)
        if len(y) != (size := len(PreparedInputs(x, []))):
            raise DataError(f"{path} has {size:,} samples and {len(y):,} targets")
        own_test = {"x_test", "y_test"} <= arrays.keys()
        test = (self.of(arrays["x_test"]).x, arrays["y_test"]) if own_test else None
        return Labelled(x, y[has_target] if has_target.any() else None, has_target, [], lacking, test)

    def _rows(self, table: DataTable, missing: str) -> Labelled:
        """The rows of a table; one without a target is predicted, and not scored."""
        x, notes, is_sample = self.of_table(table, missing)
        usual = next((name for name in USUAL_TARGETS if name in table.columns), USUAL_TARGETS[0])
        names = self.output.targets or (usual,)
        lacking = f"the column {' and '.join(names)} to predict"
        if not all(name in table.columns for name in names):
            return _without_targets(x)._replace(notes=notes, target=lacking, is_sample=is_sample)
        targets = DataTable({name: table.columns[name] for name in names})
        targets = targets if is_sample is None else targets.take(is_sample)
        has_target = np.all([present(column) for column in targets.columns.values()], axis=0)
        known = targets.take(has_target)
        if not len(known):
            return Labelled(x, None, has_target, notes, lacking, is_sample=is_sample)
        numbers = [as_numbers(column) for column in known.columns.values()]
        if self.output.kind == CLASSIFICATION or any(column is None for column in numbers):
            y: NDArray[Any] = words(known.columns[names[0]]).astype(np.str_)
        else:
            y = np.stack([floats(column) for column in numbers], axis=1)
            y = y[:, 0] if y.shape[1] == 1 else y
        samples = table if is_sample is None else table.take(is_sample)
        unit, time = self._units_and_times(samples)
        return Labelled(x, y, has_target, notes, lacking, is_sample=is_sample, unit=unit, time=time)

    def _units_and_times(
        self, table: DataTable
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.float64] | None]:
        """What belongs together and when it was, by the columns of training that the table has."""
        unit = time = None
        for name in (self.input.group, self.input.time):
            if name in table.columns and table.columns[name].null_count:
                raise DataError(f'"{name}" lacks {table.columns[name].null_count:,} values; complete them')
        if self.input.group in table.columns:
            codes = coded(table.columns[self.input.group]).codes
            first, member = np.unique(codes, return_index=True, return_inverse=True)[1:]
            unit = first[member]
        if self.input.time in table.columns:
            time = times_of(self.input.time, table.columns[self.input.time])
        return unit, time

    def targets(self, y: Any) -> NDArray[Any]:
        """Targets as the metrics take them: numbers of classes, labels or values."""
        array = np.asarray(y.detach().cpu() if hasattr(y, "detach") else y)
        if self.output.kind == CLASSIFICATION:
            if array.dtype == object:
                array = array.astype(np.str_)
            numbers: NDArray[Any] = numbered(
                "label", [named(array, self.output.names)], self.output.names
            ).parts[0]
            return numbers
        if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            columns = " and ".join(self.output.targets)
            what = f"the column {columns} to predict" if columns else "the targets"
            raise DataError(f"{what} must have finite numbers, as the model is of {self.output.kind}")
        if self.output.is_survival:
            survival: NDArray[np.float32] = targets_of([array], SURVIVAL, None).parts[0]
            return survival
        if array.size != len(array) * self.output.count:
            raise DataError(f"targets have the shape {list(array.shape)}, but there are {self.output.count}")
        return array.astype(np.float32)

    def _images(self, path: Path) -> Labelled:
        """An image file, or the images of a folder by name, in the size and colours of the model's images.

        Where a folder has folders of images instead, these are named by the classes, as for training.
        """
        if self.input.kind != IMAGE:
            what = "a folder" if path.is_dir() else "an image"
            raise DataError(f"{path} is {what}, but the model takes {self.shown}")
        files = [path] if path.is_file() else _image_files(path)
        folders = [] if files else sorted(folder for folder in path.glob("[!.]*") if folder.is_dir())
        of_classes = {folder.name: _image_files(folder) for folder in folders}
        files = files or [file for found in of_classes.values() for file in found]
        if not files:
            expected = ", ".join(reading.IMAGES)
            raise DataError(
                f"{path} has no images; expected {expected}, or folders of them named by the classes"
            )
        channels, *size = self.input.shape
        images = [(reading.read_bytes(file, reading.LARGEST_IMAGE_FILE), str(file)) for file in files]
        x = np.stack(
            [reading.decode(raw, name, tuple(size), gray=channels == 1, upright=True) for raw, name in images]
        )
        folder = path if path.is_dir() else path.parent
        names = tuple(file.relative_to(folder).as_posix() for file in files)
        labels = [name for name, found in of_classes.items() for _ in found]
        if not labels:
            return _without_targets(x)._replace(target="folders named by the classes", files=names)
        return Labelled(x, np.array(labels), np.ones(len(x), np.bool_), [], files=names)


def _image_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("[!.]*") if file.suffix.lower() in reading.IMAGES)


def _table(data: Any) -> DataTable | None:
    """The columns of a data frame, or of a mapping of columns; None of anything else."""
    if hasattr(data, "columns") and hasattr(data, "to_dict"):  # of pandas, which need not be installed
        return DataTable.of({name: data[name] for name in data.columns})
    if isinstance(data, Mapping) and "input_ids" not in data:
        columns = {str(name): v.tolist() if hasattr(v, "tolist") else list(v) for name, v in data.items()}
        if len({len(values) for values in columns.values()}) > 1:
            sizes = ", ".join(f"{name} {len(values):,}" for name, values in columns.items())
            raise DataError(f"the columns have different numbers of rows: {sizes}")
        return DataTable.of(columns)
    return None


def _without_targets(x: Inputs) -> Labelled:
    return Labelled(x, None, np.zeros(len(PreparedInputs(x, [])), np.bool_), [])


def _fitting(encoder: Encoder, column: Column) -> Column:
    """The column as its encoder takes it; a DataError names a nested cell, or no number among numbers."""
    check_plain(encoder.name, column)
    if encoder.categories:
        return column
    numbers = as_numbers(column)
    wrong = (
        not_numbers(column) if numbers is None else np.flatnonzero(np.abs(floats(numbers)) > LARGEST_NUMBER)
    )
    if len(wrong):
        cell = str(column[int(wrong[0])])[:40]
        raise DataError(
            f'the column "{encoder.name}" has numbers in training, but {cell!r} in row {wrong[0] + 1}'
        )
    return numbers


def _missing_notes(names: Sequence[str], has_value: NDArray[np.bool_], missing: str) -> list[str]:
    """What happens to the missing values of these columns; a DataError if they are refused, or in every row.

    Args:
        names: Of the columns.
        has_value: [rows, names].
        missing: As of `Preparation.of_table`.
    """
    one_of(("refuse", "fill", "drop"), missing=missing)
    gaps = {name: int(n) for name, n in zip(names, (~has_value).sum(0), strict=True) if n}
    if not gaps or missing == "fill":
        return [
            f'"{name}": {count:,} missing value{"s" * (count > 1)}, filled' for name, count in gaps.items()
        ]
    counts = listed([f"{name} {count:,}" for name, count in gaps.items()], MOST_SHOWN)
    rows = np.flatnonzero(~has_value.all(1))
    remedy = (
        "Complete them, or take each as the column's mean, no category or an empty text with "
        f"{how_to_set('missing', 'fill', '--missing')}"
    )
    if missing == "refuse" or len(rows) == len(has_value):
        raise DataError(f"values are missing: {counts}, first in row {rows[0] + 1}. {remedy}")
    shown = listed([str(row) for row in rows], MOST_SHOWN)
    return [
        f"{len(rows):,} of {len(has_value):,} rows have no prediction, as values are missing: {counts}. "
        f"They are, counted from 0: {shown}. {remedy}"
    ]


def _channels_first(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """uint8 images [n, h, w], [n, h, w, channels] or [n, channels, h, w] as the last."""
    if array.ndim == 3:
        return array[:, None]
    if array.ndim == 4 and array.shape[1:] != shape and (array.shape[3], *array.shape[1:3]) == shape:
        return array.transpose(0, 3, 1, 2)
    return array
