"""Readers of files of unknown origin: they return bytes or arrays, or raise a DataError that names the file.

They never unpack an archive to disk, call a function that a pickle names, or allocate what a header claims.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import pickletools
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from copfl.errors import DataError, how_to_set, raised_as
from copfl.foreign import printable

T = TypeVar("T")
MIB = 2**20
LARGEST_INNER_ARCHIVE = 512 * MIB  # an archive in an archive, which is read into memory
IMAGES = (".png", ".jpg", ".jpeg")  # the ends of their names, in small or capital letters
LARGEST_IMAGE_FILE = 32 * MIB
LARGEST_IMAGE_SIDE = 4096  # pixels
ORIENTATION, QUARTER_TURNS = 0x112, (5, 6, 7, 8)  # in EXIF, and its values that exchange height and width
EIGHT_BIT_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
_PICKLED_NUMPY = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),  # since numpy 2
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
_NUMBERS = {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)} | {"f2", "f4", "f8", "b1"}


@contextmanager
def data_errors(source: str, kind: str = "file") -> Iterator[None]:
    """Turns every error inside into a DataError that names the source: damaged files can raise anything.

    Args:
        source: What is read, for the error.
        kind: Such as "file" or "archive", for the error.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"{source} cannot be read: {error.strerror}") from error
        reason = str(error).partition("\n")[0].rstrip(":") or type(error).__name__
        remedy = "Save it as UTF-8" if isinstance(error, UnicodeError) else "It is damaged or incomplete"
        raise DataError(f"{source} is not a readable {kind}: {reason}. {remedy}") from error


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes.

    Args:
        path: Of the file.
        limit: The most bytes that it may have.
    """
    with data_errors(str(path)):
        return _whole(str(path), path.stat().st_size, path.read_bytes, limit)


def _whole(source: str, size: int, read: Callable[[], bytes], limit: int) -> bytes:
    """The content of a file of this size, if it is at most `limit`."""
    if size > limit:
        raise DataError(f"{source} has {size:,} bytes; at most {limit:,} are accepted")
    with data_errors(source):
        content = read()
    if len(content) != size:
        raise DataError(f"{source} ends after {len(content):,} of {size:,} bytes: the file is incomplete")
    return content


# Folders and archives


class StoredFile(NamedTuple):
    """A regular file in a folder or an archive; one in an archive is readable until the next is requested."""

    name: str
    path: Path  # of the file, or of the archive
    offset: int  # of its first byte in the uncompressed archive
    size: int
    read: Callable[[int], bytes]  # of the largest size that is accepted


def existing(data_dir: Path | None, *names: str) -> list[Path]:
    """The files and folders of these names or patterns in the data folder.

    Args:
        data_dir: The data folder.
        names: Or patterns.
    """
    if data_dir is None:
        folder = how_to_set("data_dir", "DIR", "--data-dir")
        raise DataError(f"no data folder was given; name one with {folder} or in COPFL_DATA")
    if not data_dir.is_dir():
        raise DataError(f"the data folder {data_dir} does not exist")
    return [path for name in names for path in sorted(data_dir.glob(name))]


def first_existing(data_dir: Path | None, *names: str) -> Path:
    """The first of these files or folders in the data folder; a DataError if there is none.

    Args:
        data_dir: The data folder.
        names: Or patterns, the best one first.
    """
    paths = existing(data_dir, *names)
    if not paths:
        raise DataError(f"{data_dir} has neither {' nor '.join(names)}")
    return paths[0]


def members(location: Path) -> Iterator[StoredFile]:
    """The regular files of a folder, a .zip or a tar archive, compressed or not; links are skipped."""
    if location.is_dir():
        for path in sorted(path for path in location.rglob("*") if path.is_file()):
            name, size = path.relative_to(location).as_posix(), path.stat().st_size
            yield StoredFile(name, path, 0, size, partial(read_bytes, path))
        return
    if location.suffix == ".zip":
        yield from _zip_members(location, location)
        return
    with (
        data_errors(str(location), "tar archive"),
        tarfile.open(location, "r:*", tarinfo=_StrictTarInfo) as archive,
    ):
        while (info := archive.next()) is not None:
            # tarfile keeps a record of every member: 300 MB for CINIC-10.
            archive.members = []  # type: ignore[attr-defined]
            if info.isreg() and not info.issparse() and (file := archive.extractfile(info)):
                read = partial(_whole, f"{location} ({info.name})", info.size, file.read)
                yield StoredFile(info.name, location, info.offset_data, info.size, read)


def _zip_members(location: Path, file: Path | IO[bytes]) -> Iterator[StoredFile]:
    """The files of a .zip archive, and of .zip archives in it."""
    with data_errors(str(location), "zip archive"), zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            content = partial(archive.read, info)
            read = partial(_whole, f"{location} ({info.filename})", info.file_size, content)
            if info.filename.endswith(".zip"):
                yield from _zip_members(location, io.BytesIO(read(LARGEST_INNER_ARCHIVE)))
            elif not info.is_dir():
                yield StoredFile(info.filename, location, 0, info.file_size, read)


class _StrictTarInfo(tarfile.TarInfo):
    """A header that reports damage; tarfile takes it, after the first header, for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _StrictTarInfo:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise
            raise tarfile.ReadError(f"{error} at byte {tarfile_.offset:,}") from error

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _StrictTarInfo:
        info = super().frombuf(buf, encoding, errors)
        if not info.isreg() and info.size > MIB:  # such as a long name, which tarfile reads into memory
            raise tarfile.ReadError(f"a header claims {info.size:,} bytes of name")
        return info


# Arrays


def unpickle(raw: bytes, source: str) -> dict[bytes, Any]:
    """The dictionary in a pickle of Python 2 that has only containers, numbers, bytes and numpy arrays.

    `pickled_bytes` turns the record of an array into an array.

    Args:
        raw: The content of the file.
        source: Its name, for the error.
    """
    content = _unpickled(raw, source)
    if not isinstance(content, dict):
        raise DataError(f"{source} contains a {type(content).__name__}; a dictionary was expected")
    return content


class _Row(tuple[Any, ...]):
    """A tuple that is no key: the hash of tuples within each other has no end, in a hundred bytes."""

    __hash__ = None  # type: ignore[assignment]


def _as_row(load: Callable[[Any], None], reader: Any) -> None:
    """An operation of a pickle that makes a tuple.

    Args:
        load: Python's.
        reader: The one that reads.
    """
    load(reader)
    reader.stack[-1] = _Row(reader.stack[-1])


_TUPLES = {
    code[0]: partial(_as_row, pickle._Unpickler.dispatch[code[0]])
    for code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
}


def _unpickled(raw: bytes, source: str) -> Any:
    """The content of a pickle, with a record of `arguments` and `state` in place of each object of numpy.

    The few numpy names that such a file needs are mapped to an inert record: nothing of numpy, and nothing
    else, is called. Any other name is refused.
    """

    # A class per call: a pickle that sets attributes of the class changes it for no other call.
    class Inert:
        def __init__(self, *arguments: object) -> None:
            self.arguments = arguments
            self.state: object = None

        def __setstate__(self, state: object) -> None:
            self.state = state

    class Reader(pickle._Unpickler):
        dispatch: ClassVar = {**pickle._Unpickler.dispatch, **_TUPLES}

        def find_class(self, module: str, name: str) -> type[Inert]:
            if (module, name) not in _PICKLED_NUMPY:
                named = f"its pickle names {printable(f'{module}.{name}')[:100]}"
                raise DataError(f"{source} is refused: {named}, which no data file needs")
            return Inert

    with data_errors(source, "pickle"):
        for code, position, _ in pickletools.genops(raw):
            # Python allocates as many memo entries as a number in the file claims, gigabytes for five bytes.
            if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(position or 0) > len(raw):
                raise DataError(f"{source} is refused: its pickle claims {position} memo entries")
            if code.name in ("EMPTY_SET", "FROZENSET", "ADDITEMS"):
                raise DataError(f"{source} is refused: its pickle has a set, which no data file needs")
        return Reader(io.BytesIO(raw), encoding="bytes").load()


def pickled_bytes(record: object, columns: int, source: str) -> NDArray[np.uint8]:
    """The uint8 array [n, columns] of a record that `unpickle` returned.

    Args:
        record: As `unpickle` returned it.
        columns: Of the array.
        source: The name of the file, for the error.
    """
    match getattr(record, "state", None):
        case (_, (int(n), int(width)), _, False | 0, bytes(raw)) if (
            width == columns and len(raw) == n * width
        ):
            return np.frombuffer(raw, dtype=np.uint8).reshape(n, columns)
    raise DataError(f"{source} contains no image array of the form uint8 [n, {columns}]")


def pickled_array(record: object, source: str) -> NDArray[Any]:
    """The array of numbers of a record that `_unpickled` returned."""
    no_array = f"{source} is no array of numbers"
    match getattr(record, "state", None):
        case (_, tuple(shape), dtype, in_fortran_order, bytes(raw)):
            match getattr(dtype, "arguments", None), getattr(dtype, "state", None):
                case (str(code), *_), (_, "<" | ">" | "|" as order, *_) if code in _NUMBERS:
                    kind = np.dtype(f"{order}{code}")
                    sizes = [n for n in shape if type(n) is int and n >= 0]
                    if len(sizes) == len(shape) and math.prod(sizes) * kind.itemsize == len(raw):
                        with raised_as(DataError, no_array, ValueError, OverflowError):  # of too many sides
                            array = np.frombuffer(raw, kind).reshape(
                                shape, order="F" if in_fortran_order else "C"
                            )
                        return np.ascontiguousarray(array, kind.newbyteorder("="))
    raise DataError(no_array)


def pickled_npz(path: Path, entry: str) -> dict[str, NDArray[Any]]:
    """The arrays of a dictionary that numpy.savez pickled into an entry of a .npz file, without unpickling it.

    Args:
        path: The file.
        entry: The name under which the dictionary was saved.
    """
    source = f"{path} ({entry})"
    with data_errors(str(path), ".npz file"), zipfile.ZipFile(path) as archive:
        if f"{entry}.npy" not in [member.filename for member in _npz_entries(archive, path)]:
            raise DataError(f'{path} lacks the entry "{entry}"')
        with archive.open(f"{entry}.npy") as file:
            if npy.read_magic(file) != (1, 0):
                raise DataError(f"{source} is of another .npy version; 1.0 was expected")
            shape, _, dtype = npy.read_array_header_1_0(file)
            if shape != () or not dtype.hasobject:
                raise DataError(f"{source} is an array {list(shape)} of {dtype}; a dictionary was expected")
            raw = file.read()
    match getattr(_unpickled(raw, source), "state", None):
        case (_, (), _, _, [dict(content)]) if all(isinstance(name, str) for name in content):
            return {name: pickled_array(record, f"{source}, {name!r}") for name, record in content.items()}
    raise DataError(f"{source} contains no dictionary of arrays")


def map_npy(path: Path, offset: int = 0, length: int | None = None) -> NDArray[np.generic]:
    """The array of a .npy file, left on disk, or of `length` bytes of another file from `offset` on."""
    with data_errors(str(path), ".npy file"), path.open("rb") as file:
        end = path.stat().st_size if length is None else offset + length
        file.seek(offset)
        shape, dtype = _npy_header(file, str(path), end)
        return np.memmap(path, dtype=dtype, mode="r", offset=file.tell(), shape=shape)


def npz_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    """The arrays of a .npz file by name."""
    arrays: dict[str, NDArray[np.generic]] = {}
    with data_errors(str(path), ".npz file"), zipfile.ZipFile(path) as archive:
        for entry in _npz_entries(archive, path):
            with archive.open(entry) as file:
                _npy_header(file, f"{path} ({entry.filename})", entry.file_size)
                file.seek(0)
                arrays[entry.filename.removesuffix(".npy")] = npy.read_array(file, allow_pickle=False)
    return arrays


def _npz_entries(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """The entries of a .npz file, if they fit into memory: compressed zeros can grow a thousandfold."""
    entries = archive.infolist()
    _require_size(str(path), sum(entry.file_size for entry in entries), path.stat().st_size)
    return entries


def require_room(paths: Sequence[Path], source: Path) -> None:
    """DataError if .npz files do not fit into memory together.

    Args:
        paths: The files.
        source: Their folder, for the error.
    """
    total = 0
    for path in paths:
        with data_errors(str(path), ".npz file"), zipfile.ZipFile(path) as archive:
            total += sum(entry.file_size for entry in archive.infolist())
    _require_size(str(source), total, sum(path.stat().st_size for path in paths))


def _require_size(source: str, unpacked: int, packed: int) -> None:
    """DataError if what would unpack to so many bytes is too large for files of so many bytes."""
    limit = max(1024 * MIB, 100 * packed)
    if unpacked > limit:
        raise DataError(f"{source} would unpack to {unpacked:,} bytes; at most {limit:,} are accepted")


def _npy_header(file: IO[bytes], source: str, end: int) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Shape and dtype from the header of a .npy file, if they agree with the bytes from there to `end`."""
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise DataError(f"{source} is of .npy version {version}; 1.0 or 2.0 was expected")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran_order, dtype = read(file)
    if dtype.hasobject:
        raise DataError(f"{source} contains Python objects; save the array with a numeric dtype")
    if fortran_order and len(shape) > 1:
        raise DataError(f"{source} is in Fortran order; save it with numpy.ascontiguousarray(array)")
    claimed, present = math.prod(shape) * dtype.itemsize, end - file.tell()
    if min(shape, default=0) < 0 or claimed != present:
        raise DataError(f"{source} claims {list(shape)} of {dtype} = {claimed:,} bytes, but has {present:,}")
    return shape, dtype


# Images


class ImageFile(NamedTuple):
    """An encoded image of a data set."""

    split: str
    label: str
    file: str  # its name
    source: str  # where it is, for messages
    read: Callable[[], bytes]
    client: str = ""


# Split and label by an image's path; None: neither.
Locate = Callable[[PurePosixPath], tuple[str, str] | None]


def by_folder(path: PurePosixPath) -> tuple[str, str] | None:
    """Split and label of [<split>/]<label>/<file>."""
    split, label, _ = ("", "", *path.parts)[-3:]
    return (split, label) if label and not label.startswith(".") else None


def image_files(location: Path, locate: Locate = by_folder) -> list[ImageFile]:
    """The images in a folder or an archive, encoded, ordered by split, label and name.

    Args:
        location: A folder or an archive.
        locate: The split and the label of a path; None: the file is no image of the data set.
    """
    images = []
    for member in members(location):
        path = PurePosixPath(member.name)
        is_image = path.suffix.lower() in IMAGES and not path.name.startswith(".")
        if is_image and (located := locate(path)) is not None:
            source = str(member.path) if location.is_dir() else f"{location} ({member.name})"
            read = partial(member.read, LARGEST_IMAGE_FILE)
            read = read if location.is_dir() else partial(bytes, read())
            images.append(ImageFile(*located, path.name, source, read))
    return sorted(images, key=lambda image: (image.split, image.label, image.file))


@contextmanager
def _opened_image(raw: bytes, source: str) -> Iterator[Any]:
    """An encoded image of accepted size, not yet decoded."""
    from PIL import Image, UnidentifiedImageError

    unknown = f"{source} is not a readable PNG or JPEG image: it begins as neither. It is damaged or of another format"
    with (
        data_errors(source, "PNG or JPEG image"),
        raised_as(DataError, unknown, UnidentifiedImageError),  # which names an object of Python
        Image.open(io.BytesIO(raw), formats=("PNG", "JPEG")) as image,
    ):
        if max(image.size) > LARGEST_IMAGE_SIDE:
            size, side = f"{image.width:,} x {image.height:,}", f"{LARGEST_IMAGE_SIDE:,}"
            raise DataError(f"{source} is an image of {size} pixels; at most {side} x {side} are accepted")
        yield image


def image_size(raw: bytes, source: str, upright: bool = False) -> tuple[int, int]:
    """Height and width of an encoded image, from its header alone; see `decode`.

    Args:
        raw: The encoded image.
        source: Its name, for the error.
        upright: Whether it is turned as its header says.
    """
    with _opened_image(raw, source) as image:
        is_turned = upright and image.getexif().get(ORIENTATION) in QUARTER_TURNS
        return (image.width, image.height) if is_turned else (image.height, image.width)


def decode(
    raw: bytes,
    source: str,
    size: tuple[int, int],
    gray: bool = False,
    resize: bool = True,
    upright: bool = False,
) -> NDArray[np.uint8]:
    """An encoded image as uint8 [channels, *size].

    Args:
        raw: The content of a file.
        source: Where it is, for messages.
        size: Height and width.
        gray: Whether it is read without colour.
        resize: Else an image of another size is an error.
        upright: Whether it is turned as the camera noted (EXIF), and as programs show it.
    """
    from PIL import Image, ImageOps

    with _opened_image(raw, source) as opened:
        image = ImageOps.exif_transpose(opened) if upright else opened
        image = image.convert("RGBA") if "transparency" in image.info else image
        if image.mode not in EIGHT_BIT_MODES:
            raise DataError(f"{source} has pixels of mode {image.mode}; 8 bits per channel were expected")
        image = image.convert("L" if gray else "RGB")
        if size != (image.height, image.width):
            if not resize:
                actual, expected = f"{image.width} x {image.height}", f"{size[1]} x {size[0]}"
                raise DataError(f"{source} is an image of {actual} pixels; {expected} were expected")
            shrinks = size[0] * size[1] < image.height * image.width
            method = Image.Resampling.BOX if shrinks else Image.Resampling.BILINEAR
            image = image.resize((size[1], size[0]), method)
        return np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)


def decode_all(
    images: Sequence[ImageFile],
    size: tuple[int, int],
    gray: bool = False,
    resize: bool = True,
    upright: bool = False,
) -> NDArray[np.uint8]:
    """Encoded images as uint8 [n, channels, *size]; see `decode`.

    Args:
        images: Encoded.
        size: Height and width.
        gray: Whether there is one channel, and not three.
        resize: Whether images of other sizes are resized; else they are an error.
        upright: Whether each is turned as its header says.
    """
    decoded = np.empty((len(images), 1 if gray else 3, *size), dtype=np.uint8)

    def put(position: int, image: ImageFile) -> None:
        decoded[position] = decode(image.read(), image.source, size, gray, resize, upright)

    in_threads(put, range(len(images)), images)  # Pillow releases the interpreter lock while it decodes
    return decoded


def intact(images: Sequence[ImageFile]) -> list[ImageFile]:
    """The images that can be decoded."""

    def is_intact(image: ImageFile) -> bool:
        try:
            decode(image.read(), image.source, (1, 1))
        except DataError:
            return False
        return True

    return list(itertools.compress(images, in_threads(is_intact, images)))


def in_threads(function: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
    """`map`, with a thread per core.

    Args:
        function: What is called.
        arguments: As of `map`.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, *arguments))
