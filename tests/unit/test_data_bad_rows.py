"""Rows that cannot be trained: an error, or passed over, counted, and never without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from meshlora.reading import chat
from meshlora.reading.readers import READERS
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError
from tests.unit.records import END, UNMARKED, make_tokenizer, trained_text

# Refuses what the system says, and never ends where it is asked to wait.
REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}"
    "{% if m.content == 'wait' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{% endfor %}" + UNMARKED
)
GOOD = [[{"role": "user", "content": f"u{n}"}, {"role": "assistant", "content": f"a{n}"}] for n in range(20)]
SYSTEM = [{"role": "system", "content": "s"}, *GOOD[0]]
BROKEN = '{"messages": ['
WEIGHTLESS = [GOOD[0][0], {**GOOD[0][1], "weight": 0}]


def _read(source: Path, reader: str, folder: Path, **options: Any) -> tuple[TokenizedDataset, list[str], Any]:
    tokenizer, said = make_tokenizer(chat_template=REFUSES, eos=END), list[str]()
    given: dict[str, Any] = {"columns": None, "max_length": 256, "vocab_size": 10**6, "cache_dir": folder / "cache"}
    found = READERS[reader](str(source), tokenizer, say=said.append, **(given | {"on_bad_row": "skip"} | options))
    return found, [line for line in said if "passed over" in line], tokenizer


def _lines(file: Path, *rows: Any, key: str = "messages") -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps({key: row})) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("reader", ["text", "streamed"])
def test_malformed_and_refused_rows_are_passed_over_and_said_again_from_the_cache(reader: str, tmp_path: Path) -> None:
    source = _lines(tmp_path / "a.jsonl", *GOOD[:3], BROKEN, *GOOD[3:12], SYSTEM, *GOOD[12:])
    expected = [f"a{n}{END}" for n in range(20)]
    for _ in range(2):
        found, said, tokenizer = _read(source, reader, tmp_path)
        assert [trained_text(found, tokenizer, n) for n in range(len(found))] == expected
        of_rows, of_records = said
        assert of_rows.startswith("1 of 22 rows cannot be trained, and are passed over (data.on_bad_row: skip):")
        assert f"{source}:4: " in of_rows
        assert of_records.startswith("1 of 21 rows cannot be trained")
        assert f"{source}:14: 3 messages (system, user, assistant): the chat template refuses them" in of_records
        assert "no system, please" in of_records


@pytest.mark.parametrize("reader", ["text", "streamed"])
def test_rows_that_train_nothing_or_never_end_are_passed_over(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_SECONDS", 0.3)
    waits = [{"role": "user", "content": "wait"}, GOOD[0][1]]
    source = _lines(tmp_path / "a.jsonl", waits, *GOOD, WEIGHTLESS)
    found, said, _ = _read(source, reader, tmp_path)
    assert found.sources is not None
    assert found.sources.tolist() == [*range(1, 21)]
    assert "it takes longer than 0.3 s" in said[0]
    assert f"{source}:22" in said[0]


def test_rows_of_tables_are_passed_over(tmp_path: Path) -> None:
    rows = [*GOOD, []]
    pyarrow.parquet.write_table(pyarrow.table({"messages": rows}), tmp_path / "a.parquet")
    found, said, _ = _read(tmp_path / "a.parquet", "text", tmp_path)
    assert len(found) == 20
    assert "a.parquet row 20: " in said[0]


def test_of_a_pair_both_answers_are_passed_over(tmp_path: Path) -> None:
    pairs = [
        {"prompt": [row[0]], "chosen": [row[1]], "rejected": [{"role": "assistant", "content": "no"}]} for row in GOOD
    ]
    refused = {**pairs[0], "prompt": SYSTEM[:2]}
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in (*pairs[:7], refused, *pairs[7:])))
    found, said, _ = _read(source, "pairs", tmp_path)
    assert found.num_examples == 20
    assert found.sources is not None
    assert np.setdiff1d(np.arange(42), found.sources).tolist() == [14, 15]
    assert said[0].startswith("1 of 21 rows cannot be trained")


@pytest.mark.parametrize("reader", ["text", "streamed"])
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([*GOOD[:8], SYSTEM], "1 of 9 rows cannot be trained: data.on_bad_row: skip passes over at most one in 10"),
        ([*GOOD[:8], BROKEN], "1 of 9 rows cannot be trained: data.on_bad_row: skip passes over at most one in 10"),
        ([SYSTEM, SYSTEM], "2 of 2 rows cannot be trained"),
    ],
)
def test_more_than_one_in_ten_is_an_error(reader: str, rows: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as raised:
        _read(_lines(tmp_path / "a.jsonl", *rows), reader, tmp_path)
    assert "a.jsonl" in str(raised.value)


def test_an_error_is_the_default(tmp_path: Path) -> None:
    for rows in ([*GOOD, BROKEN], [*GOOD, SYSTEM]):
        with pytest.raises(UserError, match=r"malformed|refuses them"):
            _read(_lines(tmp_path / "a.jsonl", *rows), "text", tmp_path, on_bad_row="error")
