"""What a Parquet file becomes in memory, before it does.

A value that repeats is stored once, and so is its repetition: 874 bytes may be 40 GB. The sizes that a file states are
those before this is undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import FileMetaData

FEW_BYTES = 64 * 2**20  # of a part of a column, which are not counted one by one
CELL = 8  # bytes of a cell at least, a text's place included
ROWS_AT_ONCE, FEW_ROWS = 65_536, 64  # where the texts of a part are in one list, and where each is made
# How a text is stored as itself, or as its number in a list of texts that comes first.
KNOWN_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}


def size_in_memory(path: Path, schema: pa.Schema, metadata: FileMetaData, most: int) -> int:
    """Bytes that the plain columns of a file take, or a number above `most`; its texts are not made for it.

    Args:
        path: The file.
        schema: Its columns.
        metadata: What it states.
        most: Beyond which nothing is counted any more.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    stored = sum(group.total_byte_size for group in groups)
    size = metadata.num_rows * sum(_width(field.type) for field in schema)
    for part in _texts(path, plain_names(schema), most):
        if size > most:
            break
        size += part
    return int(max(stored, size))


def plain_names(schema: pa.Schema) -> list[str]:
    """The columns whose cells are numbers or texts, and neither lists nor records."""
    import pyarrow as pa

    return [field.name for field in schema if not pa.types.is_nested(field.type)]


def _width(kind: pa.DataType) -> int:
    try:
        return max(CELL, int(kind.bit_width) // 8)
    except ValueError:  # of no fixed width
        return CELL


def _texts(path: Path, names: Sequence[str], most: int) -> Iterator[int]:
    """The bytes of the texts of each part of a column, or more than there are where these are few."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as plain, ParquetFile(path, read_dictionary=list(names)) as listed:
        for group in range(plain.metadata.num_row_groups):
            rows = plain.metadata.row_group(group)
            for number in range(rows.num_columns):
                column = rows.column(number)
                if column.physical_type != "BYTE_ARRAY" or column.path_in_schema not in names:
                    continue
                place = ([group], [column.path_in_schema])
                if not {*column.encodings} <= KNOWN_ENCODINGS:  # such as the difference to the text before
                    yield _counted(plain.iter_batches(FEW_ROWS, *place), most)
                    continue
                first = next(listed.iter_batches(1, *place), None)
                bytes_at_most = rows.num_rows * (_longest(first.column(0)) if first else 0)
                is_few = bytes_at_most <= FEW_BYTES
                yield bytes_at_most if is_few else _counted(listed.iter_batches(ROWS_AT_ONCE, *place), most)


def _longest(texts: pa.DictionaryArray) -> int:
    """The bytes of the longest text in the list of a part; one that is not in the list is stored as it is."""
    import pyarrow.compute as pc

    return pc.max(pc.binary_length(texts.dictionary)).as_py() or 0


def _counted(batches: Iterator[pa.RecordBatch], most: int) -> int:
    """The bytes of all texts, each as often as it is there; a number above `most` where it is reached."""
    import pyarrow as pa
    import pyarrow.compute as pc

    size = 0
    for batch in batches:
        texts = batch.column(0)
        if pa.types.is_dictionary(texts.type):
            lengths = pc.take(pc.binary_length(texts.dictionary), texts.indices)
        else:
            lengths = pc.binary_length(texts)
        size += pc.sum(lengths).as_py() or 0
        if size > most:
            break
    return size
