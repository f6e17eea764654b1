"""Rows of Arrow tables and Parquet files, of which a bounded part is held at once.

Owns: that a small file of a stranger does not fill the memory: the size of a value, how many rows are decoded at once.
Does not own: columns, and what a row is (`sources.py`); the limits of lines (`files.py`).

A file of 41 KB can hold rows of 64 MB each: compressed, or as a dictionary whose one value each row names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from meshlora.reading.data_files import MAX_LINE_BYTES
from meshlora_ground.errors import UserError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_BATCH = 1024  # rows that are decoded at once, at most
_BATCH_BYTES = 2**28  # and about how many bytes
_ROWS_BYTES = 2**26  # of the rows that are Python values at once
_MOST_VALUES = 2**29  # of a row group's lists: runs of one value take no place in a file
_HEADER_BYTES = 64
_FIXED_BYTES = 8  # of a number, a place in a list, a struct


def table_rows(table: pyarrow.Table | pyarrow.RecordBatch, name: str, start: int) -> Iterator[dict[str, Any]]:
    """The rows of a table as Python values. start: the number of its first. Raises: UserError: one is too long."""
    batches = table.to_batches() if hasattr(table, "to_batches") else [table]
    for batch in batches:
        sizes = np.zeros(len(batch), dtype=np.int64)
        for column in batch.columns:
            sizes += _sizes(column)
        if len(long := np.flatnonzero(sizes > MAX_LINE_BYTES)):
            rule = f"the row is longer than {MAX_LINE_BYTES >> 20} MB"
            raise UserError(f"{name} row {start + int(long[0])}", rule, "is it one record?")
        parts = np.flatnonzero(np.diff(np.cumsum(sizes) // _ROWS_BYTES)) + 1
        for begin, end in zip([0, *parts.tolist()], [*parts.tolist(), len(batch)], strict=True):
            yield from batch.slice(begin, end - begin).to_pylist()
        start += len(batch)


def _sizes(array: Any) -> np.ndarray:
    """Bytes of each value of an Arrow array, those of its parts included: int64 `[len]`."""
    import pyarrow
    import pyarrow.compute

    kind = array.type
    if isinstance(array, pyarrow.ExtensionArray):
        return _sizes(array.storage)
    if pyarrow.types.is_dictionary(kind):
        places = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        of_each = _sizes(array.dictionary)
        return of_each[places] if len(of_each) else np.zeros(len(array), np.int64)
    if pyarrow.types.is_struct(kind):
        found = np.full(len(array), _FIXED_BYTES, np.int64)
        for index in range(kind.num_fields):
            found += _sizes(array.field(index))
        return found
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_map(kind):
        offsets = array.offsets.to_numpy()
        values = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        total = np.concatenate([[0], np.cumsum(_sizes(values) + _FIXED_BYTES)])
        return np.diff(total[offsets - offsets[0]])
    if pyarrow.types.is_fixed_size_list(kind):
        values = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        return (_sizes(values) + _FIXED_BYTES).reshape(len(array), kind.list_size).sum(1)
    if pyarrow.types.is_string_view(kind) or pyarrow.types.is_binary_view(kind):
        array, kind = array.cast(pyarrow.large_binary()), pyarrow.large_binary()
    if pyarrow.types.is_fixed_size_binary(kind):
        return np.full(len(array), kind.byte_width, np.int64)
    if kind.num_fields:  # of a rare kind
        return np.full(len(array), array.nbytes, np.int64)
    if kind in (pyarrow.binary(), pyarrow.large_binary(), pyarrow.string(), pyarrow.large_string()):
        return np.asarray(pyarrow.compute.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    return np.full(len(array), _FIXED_BYTES, np.int64)


def rows_at_once(num_rows: int, num_bytes: int, largest: int = 0) -> int:
    """How many rows of a table to decode at once. num_bytes: of all. largest: bytes that one row may have."""
    of_a_row = max(num_bytes // max(1, num_rows), largest, 1)
    return max(1, min(_BATCH, _BATCH_BYTES // of_a_row))


def parquet_batches(
    file: pyarrow.parquet.ParquetFile, raw: IO[bytes], columns: list[str], name: str
) -> Iterator[pyarrow.RecordBatch]:
    """The batches of a Parquet file. raw: the same file. Raises: UserError: rows that are too long on average, or lists
    of more values than are read."""
    for group in range(file.num_row_groups):
        found = file.metadata.row_group(group)
        num_bytes, largest = 0, 0
        for index in range(found.num_columns):
            chunk = found.column(index)
            if not any(f"{chunk.path_in_schema}.".startswith(f"{column}.") for column in columns):
                continue
            if chunk.num_values > _MOST_VALUES:
                rule = f"a column has {chunk.num_values:,} values in one row group"
                raise UserError(f"{name}", rule, "write it with smaller row groups")
            num_bytes += max(chunk.total_uncompressed_size, _FIXED_BYTES * chunk.num_values)
            if chunk.physical_type == "BYTE_ARRAY":
                largest = max(largest, _shared_bytes(chunk, raw))
        if num_bytes > MAX_LINE_BYTES * found.num_rows:
            rule = f"its rows are longer than {MAX_LINE_BYTES >> 20} MB"
            raise UserError(f"{name}: {found.num_rows} rows of {num_bytes >> 20} MB", rule, "are they one record each?")
        yield from file.iter_batches(
            rows_at_once(found.num_rows, num_bytes, largest), row_groups=[group], columns=columns
        )


def _shared_bytes(chunk: Any, raw: IO[bytes]) -> int:
    """The most bytes that many rows of a column may name, although the file has them once: those of its dictionary."""
    if "DELTA_BYTE_ARRAY" in chunk.encodings:  # each value may begin as the one before
        return int(chunk.total_uncompressed_size)
    if not chunk.has_dictionary_page or chunk.dictionary_page_offset is None:
        return 0
    raw.seek(chunk.dictionary_page_offset)
    # A page's header, in Thrift's compact protocol, begins with its kind and its size, both zigzag varints.
    header = raw.read(_HEADER_BYTES)
    kind, at = _varint(header, 1)
    size, _ = _varint(header, at + 1)
    is_header = header[:1] == b"\x15" and header[at : at + 1] == b"\x15" and kind == 4
    return size // 2 if is_header else int(chunk.total_uncompressed_size)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(number, place after it)."""
    number = shift = 0
    for place in range(at, min(len(data), at + 10)):
        number |= (data[place] & 0x7F) << shift
        shift += 7
        if data[place] < 0x80:
            return number, place + 1
    return number, len(data)
