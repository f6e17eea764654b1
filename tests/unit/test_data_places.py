"""Which files a path means, and how they are unpacked."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from meshlora.reading.places import files_of
from meshlora.reading.sources import read_records
from meshlora_ground.errors import UserError
from tests.for_each import for_each


def rows(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def texts_of(source: Any) -> list[str | None]:
    return [record.text for record in read_records(source)]


def error_of(source: Any) -> str:
    with pytest.raises(UserError) as error:
        read_records(source)
    return str(error.value)


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_pattern_and_a_folder_mean_their_files_in_the_order_of_names(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        put(tmp_path / "parts" / f"part-{number:02d}.jsonl", rows(str(number)))
    put(tmp_path / "parts" / "README.md", "no data")
    put(tmp_path / "parts" / ".hidden.jsonl", rows("hidden"))
    assert texts_of(tmp_path / "parts") == texts_of(str(tmp_path / "parts" / "*.jsonl")) == ["1", "2", "10"]
    assert texts_of([tmp_path / "parts" / "part-1*", tmp_path / "parts" / "part-01.jsonl"]) == ["10", "1"]
    assert texts_of(tmp_path / "**" / "part-0*") == ["1", "2"]
    assert "no file is of this pattern" in error_of(tmp_path / "*.parquet")
    bracket = put(tmp_path / "a[1].jsonl", rows("its own name wins"))
    put(tmp_path / "a1.jsonl", rows("pattern"))
    assert texts_of(bracket) == ["its own name wins"]


def test_splits_are_told_by_names_of_files_and_never_mixed(tmp_path: Path) -> None:
    for name in ("train-00000-of-00001", "test-00000-of-00001", "valid"):
        put(tmp_path / "data" / f"{name}.jsonl", rows(name))
    assert "holds files of several splits, test, train, validation" in error_of(tmp_path)
    assert [path.stem for path in files_of(tmp_path, "validation")] == ["valid"]
    assert [path.stem for path in files_of(tmp_path, "train")] == ["train-00000-of-00001"]
    assert [path.stem for path in files_of(tmp_path / "data" / "*.jsonl", "test")] == ["test-00000-of-00001"]
    for path, split, words in [
        (tmp_path, "extra", "no file is of split 'extra'"),
        (tmp_path / "data" / "valid.jsonl", "train", "a file has no splits"),
    ]:
        with pytest.raises(UserError, match=words):
            files_of(path, split)


@pytest.mark.parametrize("how", ["gz", "zst"])
@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", rows("a", "b")), ("a.json", '[{"text": "a"}, {"text": "b"}]'), ("a.csv", "text\na\nb\n")],
)
def test_compressed_files_are_read_as_what_they_hold(tmp_path: Path, name: str, content: str, how: str) -> None:
    path = tmp_path / f"{name}.{how}"
    with pyarrow.output_stream(str(path), compression={"gz": "gzip", "zst": "zstd"}[how]) as file:
        file.write(content.encode())
    assert texts_of(path) == ["a", "b"]


@pytest.mark.parametrize("how", ["gz", "zst"])
def test_what_is_not_compressed_as_its_name_says_is_one_message(tmp_path: Path, how: str) -> None:
    path = put(tmp_path / f"a.jsonl.{how}", rows("a") * 99)
    assert f"{path}: it cannot be decompressed as" in error_of(path)


def test_a_compressed_file_that_is_cut_is_not_a_shorter_one(tmp_path: Path) -> None:
    whole = gzip.compress(rows(*map(str, range(9999))).encode())
    assert "cannot be decompressed" in error_of(put(tmp_path / "a.jsonl.gz", whole[: len(whole) // 2]))


# ---- lists


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_is_read_one_entry_after_the_other_with_its_lines(tmp_path: Path, indent: int | None) -> None:
    entries = [{"text": f"{number} [{{," + 'é\\"' * 20000} for number in range(9)]
    path = put(tmp_path / "a.json", "\ufeff \n" + json.dumps(entries, indent=indent, ensure_ascii=False) + " \n")
    records = read_records(path)
    assert [record.text for record in records] == [entry["text"] for entry in entries]
    lines = [2 + (1 + 3 * number if indent else 0) for number in range(9)]
    assert [record.origin for record in records] == [f"{path}:{line} [{n}]" for n, line in enumerate(lines)]


def test_malformed_entries_of_a_list_are_named_and_counted_once(tmp_path: Path) -> None:
    entries = [{"text": "a"}, {"text": 3}, "no", {"text": "b"}, {"ask": "c"}]
    path = put(tmp_path / "a.json", json.dumps(entries, indent=1))
    message = error_of(path)
    assert "3 malformed records" in message
    assert f"{path}:5 [1]: text is a number" in message
    assert f"{path}:8 [2]: a string, not an object" in message
    assert f"{path}:12 [4]: unknown field 'ask'" in message


@for_each(
    ("content", "words"),
    [
        ('[{"text": "a"},\n {"text" "b"}]', ":2: bad JSON (Expecting ':' delimiter)"),
        ('[{"text": "a"},\n {"text": "b"}', ":2: bad JSON (it ends too early)"),
        ('[{"text": "a"}\n {"text": "b"}]', ":2: bad JSON (',' or ']' is expected, not '{')"),
        ('[{"text": "a"}]\n[{"text": "b"}]', ":2: bad JSON (the end is expected, not '[')"),
        ('[{"text": "a"},\n]', ":2: bad JSON (Expecting value)"),
        ('[{"text": "a", "text": "b"}]', ":1: bad JSON (the key 'text' is given twice)"),
        ('[{"text": "a", "b": NaN}]', ":1: bad JSON (NaN is not a finite number)"),
        ("[" * 10**5, "nested too deeply"),
        (b'[{"text": "a"},\n {"text": "\xe9"}]', "it is not UTF-8"),
        ("[]", "holds no record"),
        ('{\n "text": "a"\n}', ":1: is an object over several lines"),
    ],
)
def test_a_list_that_is_no_json_is_one_message_with_the_line(tmp_path: Path, content: str | bytes, words: str) -> None:
    message = error_of(put(tmp_path / "a.json", content))
    assert words in message
    assert "\n" not in message


def test_an_entry_that_never_ends_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = put(tmp_path / "a.json", '[{"text": "' + "x" * (34 << 20) + '"}]')
    assert "bad JSON" in error_of(path) or "is longer than 16 MB" in error_of(path)
