"""Tables have the limits of lines, and what is held of them at once is bounded."""

from __future__ import annotations

import datetime
import gzip
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshlora.reading import tables
from meshlora.reading.sources import read_records
from meshlora_ground.errors import UserError

LONG = 17 * 2**14
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
PLAIN: dict[str, Any] = {
    "text": pa.array(["a", None, "", "b" * 40] * 5),
    "large": pa.array([b"a", None, b"", b"b" * 40] * 5, pa.large_binary()),
    "coded": pa.array(["x", "y", None, "x" * 30] * 5).dictionary_encode(),
    "turns": pa.array([TURNS, [], None, TURNS * 3] * 5),
    "pairs": pa.array([[("k", "v")], [], None, [("k" * 9, "v")] * 3] * 5, pa.map_(pa.string(), pa.string())),
    "three": pa.array([[1, 2, 3], [4, 5, None], None, [7, 8, 9]] * 5, pa.list_(pa.int32(), 3)),
    "when": pa.array([datetime.date(2026, 1, 1), None] * 10),
    "none": pa.nulls(20),
}


@pytest.mark.parametrize("first", [0, 3])
def test_rows_of_any_kind_are_those_of_arrow_in_parts_of_bounded_size(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table(PLAIN).slice(first)
    monkeypatch.setattr(tables, "_ROWS_BYTES", 600)
    asked = list[int]()
    batch = pa.RecordBatch.to_pylist
    monkeypatch.setattr(tables, "_sizes", lambda array, own=tables._sizes: asked.append(len(array)) or own(array))
    assert list(tables.table_rows(table, "t", 0)) == table.to_pylist() == batch(table.to_batches()[0])
    assert max(asked) >= len(table)


@pytest.mark.parametrize("kind", PLAIN)
def test_a_long_value_of_any_kind_is_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its row, the fourth."""
    if kind in ("three", "when", "none"):  # all of one size
        return
    monkeypatch.setattr(tables, "MAX_LINE_BYTES", 29)
    with pytest.raises(UserError, match=r"^t row "):
        list(tables.table_rows(pa.table({kind: PLAIN[kind]}).slice(1, 3), "t", 1))
    if kind in ("text", "large", "coded"):
        with pytest.raises(UserError, match=r"^t row 3: the row is longer than"):
            list(tables.table_rows(pa.table({kind: PLAIN[kind]}).slice(1, 3), "t", 1))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 64th of the limits."""
    monkeypatch.setattr(tables, "MAX_LINE_BYTES", tables.MAX_LINE_BYTES >> 6)
    monkeypatch.setattr(tables, "_BATCH_BYTES", tables._BATCH_BYTES >> 6)


def _refused(file: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_records(file)


@pytest.mark.usefixtures("small")
def test_a_small_parquet_file_of_long_values_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it says so in its metadata, once each row names the one value of a dictionary."""
    file, rows = tmp_path / "bomb.parquet", list[int]()
    table = pa.table({"prompt": ["p" * LONG] * 60, "completion": ["c"] * 60})
    read = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda self, size, **rest: rows.append(size) or read(self, size, **rest)
    )
    pq.write_table(table, file, compression="zstd", use_dictionary=False)
    assert file.stat().st_size < 2**16
    _refused(file, r"bomb\.parquet: 60 rows of 15 MB: its rows are longer than 0 MB")
    assert not rows
    pq.write_table(table, file, compression="zstd", dictionary_pagesize_limit=2**30)
    _refused(file, r"bomb\.parquet row 0: the row is longer than 0 MB; is it one record\?")
    assert rows == [15]
    pq.write_table(table, file, compression="zstd", use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY")
    _refused(file, "longer than 0 MB")
    assert rows[1:] in ([], [15])


@pytest.mark.usefixtures("small")
def test_one_long_row_of_a_table_is_named(tmp_path: Path) -> None:
    rows = {"prompt": ["p"] * 1500, "completion": ["c"] * 1499 + ["c" * LONG]}
    pq.write_table(pa.table(rows), tmp_path / "one.parquet", row_group_size=1000)
    _refused(tmp_path / "one.parquet", r"one\.parquet row 1499: the row is longer than 0 MB")
    dataset = datasets.Dataset.from_dict(rows)
    _refused(dataset, "dataset row 1499: the row is longer than 0 MB")
    dataset.select([1499, 0]).save_to_disk(tmp_path / "saved")
    _refused(tmp_path / "saved", "saved row 0: the row is longer than 0 MB")


@pytest.mark.usefixtures("small")
def test_lists_that_a_file_has_as_runs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs.parquet"
    pq.write_table(pa.table({"input_ids": [[5] * 40_000] + [[5, 6]] * 99}), file)
    assert file.stat().st_size < 2**16
    _refused(file, r"runs\.parquet row 0: the row is longer than 0 MB")
    monkeypatch.setattr(tables, "_MOST_VALUES", 10**4)
    _refused(file, "a column has 40,198 values in one row group; write it with smaller row groups")


@pytest.mark.usefixtures("small")
def test_what_is_not_read_has_no_limit(tmp_path: Path) -> None:
    """Nor do ordinary rows with a dictionary come in small parts."""
    file, number = tmp_path / "wide.parquet", 10_000
    text = [f"a text {row * row * 7919 % 4093 % 16}" for row in range(number)]
    pq.write_table(pa.table({"text": text, "audio.bytes": ["p" * 2 * LONG] + ["p"] * (number - 1)}), file)
    assert len(read_records(file, columns={"text": "text"})) == number
    with pq.ParquetFile(file) as opened, file.open("rb") as raw:
        assert opened.metadata.row_group(0).column(0).total_uncompressed_size > tables._BATCH_BYTES // 1024
        assert [len(each) for each in tables.parquet_batches(opened, raw, ["text"], "")] == [1024] * 9 + [784]


@pytest.mark.parametrize("suffix", ["jsonl.gz", "csv.gz", "txt.gz"])
def test_blank_lines_without_an_end_are_refused(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlora.reading.data_files._MOST_BLANK", 1000)
    file, first = tmp_path / f"blank.{suffix}", {"jsonl.gz": b'{"text": "a"}', "csv.gz": b"text", "txt.gz": b"a||b"}
    blank = b"\n" * 1000
    file.write_bytes(gzip.compress(first[suffix] + blank + first[suffix] + blank + b" \n\n"))
    _refused(file, r"blank\.[a-z]+\.gz:2002: more than 1,000 blank lines; is the file whole\?")
