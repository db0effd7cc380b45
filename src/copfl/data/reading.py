"""Files of unknown origin turned into bytes and arrays, or a DataError that names the file.

Nothing here unpacks an archive, calls what a pickle asks for, or allocates what a header merely claims.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import math
import os
import pickle
import pickletools
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from copfl.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

MIB = 2**20
LARGEST_IMAGE_FILE = 32 * MIB
LARGEST_IMAGE_SIDE = 4096  # pixels
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


class Member(NamedTuple):
    """A regular file in an archive; `read` works until the next member is asked for."""

    name: str
    size: int
    offset: int  # of its first byte in the (unpacked) archive
    read: Callable[[], bytes]


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes."""
    with _damage_named(str(path)):
        size = path.stat().st_size
        if size > limit:
            raise DataError(f"{path} has {size:,} bytes; at most {limit:,} were expected")
        return path.read_bytes()


def md5_of(path: Path) -> str:
    """The md5 of a file, in hexadecimal digits."""
    with _damage_named(str(path)), path.open("rb") as file:
        return hashlib.file_digest(file, _md5).hexdigest()


def members(path: Path) -> Iterator[Member]:
    """The regular files of a tar archive, packed or not, in their order; links, devices and folders are passed over."""
    with _damage_named(str(path)), tarfile.open(path, "r:*", tarinfo=_StrictTarInfo) as archive:
        while (info := archive.next()) is not None:
            # tarfile remembers every member it has seen: 300 MB for CINIC-10.
            archive.members = []  # type: ignore[attr-defined]

            def read(info: tarfile.TarInfo = info) -> bytes:
                with _damage_named(f"{path} ({info.name})"):
                    content = archive.extractfile(info)
                    assert content is not None  # it is a regular file
                    raw = content.read()
                    if len(raw) != info.size:
                        raise DataError(f"{path} ends within {info.name}: the file is incomplete")
                    return raw

            if info.isreg() and not info.issparse():
                yield Member(info.name, info.size, info.offset_data, read)


def read_member(path: Path, member: Member, limit: int) -> bytes:
    """The content of a member of at most `limit` bytes."""
    if member.size > limit:
        raise DataError(f"{path}: {member.name} has {member.size:,} bytes; at most {limit:,} were expected")
    return member.read()


def unpickle(raw: bytes, source: str) -> dict[bytes, Any]:
    """The dictionary in a pickle of Python 2 that holds nothing but containers, numbers, bytes and numpy arrays.

    The three numpy names such a file needs stand for an inert record here: nothing of numpy, and nothing else, is
    called. Any other name is refused. A record becomes an array in `pickled_bytes`.
    """

    # Made anew in each call, so that a pickle that sets attributes of the class changes it for nobody else.
    class Inert:
        def __init__(self, *arguments: object) -> None:
            self.state: object = None

        def __setstate__(self, state: object) -> None:
            self.state = state

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> type[Inert]:
            if (module, name) not in _PICKLED_NUMPY:
                raise DataError(
                    f"{source} is refused: its pickle asks for {module}.{name}, which no data file needs"
                )
            return Inert

    try:
        for code, place, _ in pickletools.genops(raw):
            # Python makes room for as many remembered objects as a number in the file claims, gigabytes for five bytes.
            if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(place or 0) > len(raw):
                raise DataError(f"{source} is refused: its pickle claims to remember {place} objects")
        content = Reader(io.BytesIO(raw), encoding="bytes").load()
    except DataError:
        raise
    except Exception as why:  # a damaged pickle can raise anything
        raise DataError(f"{source} is not a readable pickle ({type(why).__name__}: {why})") from why
    if not isinstance(content, dict):
        raise DataError(f"{source} holds a {type(content).__name__}; a dictionary was expected")
    return content


def pickled_bytes(record: object, columns: int, source: str) -> NDArray[np.uint8]:
    """The uint8 array [n, columns] that `unpickle` left as a record."""
    match getattr(record, "state", None):
        case (_, (int(rows), int(width)), _, False | 0, bytes(raw)) if (
            width == columns and len(raw) == rows * columns
        ):
            return np.frombuffer(raw, dtype=np.uint8).reshape(rows, columns)
    raise DataError(f"{source} holds no image array of the form uint8 [n, {columns}]")


def map_npy(path: Path, offset: int = 0, length: int | None = None) -> NDArray[np.generic]:
    """The array of a .npy file, left on disk; it may be part of another file, `length` bytes from `offset` on."""
    with _damage_named(str(path)), path.open("rb") as file:
        end = path.stat().st_size if length is None else offset + length
        file.seek(offset)
        shape, dtype = _npy_header(file, str(path), end)
        return np.memmap(path, dtype=dtype, mode="r", offset=file.tell(), shape=shape)


def npz_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    """The arrays of a .npz file by name."""
    arrays: dict[str, NDArray[np.generic]] = {}
    with _damage_named(str(path)), zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        # Packed zeros can grow a thousandfold: a small file must not fill the memory.
        limit, total = max(1024 * MIB, 100 * path.stat().st_size), sum(entry.file_size for entry in entries)
        if total > limit:
            raise DataError(
                f"{path} would unpack to {total:,} bytes; at most {limit:,} are accepted for its size"
            )
        for entry in entries:
            source = f"{path} ({entry.filename})"
            with archive.open(entry) as file:
                _npy_header(file, source, entry.file_size)
                file.seek(0)
                arrays[entry.filename.removesuffix(".npy")] = npy.read_array(file, allow_pickle=False)
    return arrays


def image_size(raw: bytes, source: str) -> tuple[int, int]:
    """Height and width of an encoded image, from its header alone."""
    with _opened_image(raw, source) as image:
        return image.height, image.width


def decode(raw: bytes, source: str, size: tuple[int, int] | None, gray: bool = False) -> NDArray[np.uint8]:
    """An encoded image as uint8 [channels, height, width], brought to `size` (height, width) unless that is None."""
    from PIL import Image

    with _opened_image(raw, source) as opened:
        image = opened.convert("RGBA") if "transparency" in opened.info else opened
        if image.mode not in _EIGHT_BIT_MODES:
            raise DataError(f"{source} has pixels of mode {image.mode}; 8 bits per channel were expected")
        image = image.convert("L" if gray else "RGB")
        if size is not None and size != (image.height, image.width):
            shrinks = size[0] * size[1] < image.height * image.width
            how = Image.Resampling.BOX if shrinks else Image.Resampling.BILINEAR
            image = image.resize((size[1], size[0]), how)
        pixels = np.asarray(image)
    return pixels[None] if gray else pixels.transpose(2, 0, 1)


def decode_all(
    images: Sequence[tuple[str, Callable[[], bytes]]],
    size: tuple[int, int],
    gray: bool = False,
    resize: bool = True,
) -> NDArray[np.uint8]:
    """Encoded images (name, read) as uint8 [n, channels, height, width]; without `resize`, another size is an error."""
    decoded = np.empty((len(images), 1 if gray else 3, *size), dtype=np.uint8)

    def put(position: int) -> None:
        name, read = images[position]
        pixels = decode(read(), name, size if resize else None, gray)
        if pixels.shape[1:] != size:
            height, width = pixels.shape[1:]
            raise DataError(
                f"{name} is an image of {width} x {height} pixels; {size[1]} x {size[0]} were expected"
            )
        decoded[position] = pixels

    with ThreadPoolExecutor(
        os.cpu_count()
    ) as pool:  # Pillow lets go of the interpreter lock while it decodes
        for _ in pool.map(put, range(len(images))):
            pass
    return decoded


_PICKLED_NUMPY = {("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}
_EIGHT_BIT_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}


class _StrictTarInfo(tarfile.TarInfo):
    """A header that does not take damage for the end of the archive, as tarfile does beyond the first header."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _StrictTarInfo:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.HeaderError as why:
            if isinstance(why, tarfile.EOFHeaderError):  # type: ignore[attr-defined]  # the two empty blocks at the end
                raise
            raise tarfile.ReadError(f"{why} at byte {tarfile_.offset:,}") from why

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _StrictTarInfo:
        info = super().frombuf(buf, encoding, errors)
        if (
            not info.isreg() and info.size > MIB
        ):  # long names and the like, which tarfile reads into memory at once
            raise tarfile.ReadError(f"a header claims {info.size:,} bytes of name")
        return info


@contextmanager
def _opened_image(raw: bytes, source: str) -> Iterator[Image.Image]:
    """An encoded image of bearable size, not yet decoded; what Pillow raises inside becomes a DataError."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(raw), formats=("PNG", "JPEG")) as image:
            if max(image.size) > LARGEST_IMAGE_SIDE:
                size, side = f"{image.width:,} x {image.height:,}", f"{LARGEST_IMAGE_SIDE:,}"
                raise DataError(
                    f"{source} is an image of {size} pixels; at most {side} x {side} are accepted"
                )
            yield image
    except DataError:
        raise
    except Exception as why:  # Pillow's decoders raise whatever they stumble over
        raise DataError(
            f"{source} is not a readable PNG or JPEG image ({type(why).__name__}: {why})"
        ) from why


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def _npy_header(file: IO[bytes], source: str, end: int) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Shape and dtype from the header of a .npy file, once they agree with the bytes from there to `end`."""
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise DataError(f"{source} is of .npy version {version}; 1.0 or 2.0 was expected")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran_order, dtype = read(file)
    if dtype.hasobject:
        raise DataError(
            f"{source} holds Python objects; numbers were expected: save the array with a numeric dtype"
        )
    if fortran_order and len(shape) > 1:
        raise DataError(f"{source} is in Fortran order; save it with numpy.ascontiguousarray(array)")
    claimed, present = math.prod(shape) * dtype.itemsize, end - file.tell()
    if min(shape, default=0) < 0 or claimed != present:
        raise DataError(
            f"{source} claims {list(shape)} of {dtype} = {claimed:,} bytes, but holds {present:,}"
        )
    return shape, dtype


@contextmanager
def _damage_named(source: str) -> Iterator[None]:
    """Inside, what the readers raise about a damaged file becomes a DataError that names it."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as why:
        raise DataError(f"{source} does not exist") from why
    except OSError as why:
        raise DataError(f"{source} cannot be read: {why.strerror or why}") from why
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        ValueError,
        TypeError,
        OverflowError,
        MemoryError,
        NotImplementedError,
        RuntimeError,  # an encrypted zip file
        SyntaxError,  # the header of a .npy file is a Python literal
        tokenize.TokenError,
    ) as why:
        reason = str(why).partition("\n")[0].rstrip(":") or type(why).__name__
        raise DataError(f"{source} cannot be read: {reason}. The file is damaged or incomplete") from why
