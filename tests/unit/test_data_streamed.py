"""`data.streaming`: the tokens of records that are not held are those of records that are, and stay in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshlora.reading import streamed, tokenization
from meshlora.reading.sources import read_records
from meshlora.reading.streamed import read_streamed
from meshlora.reading.tokenization import tokenize
from meshlora.run.prepared import Prepared
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError, UserError
from tests.unit.mistakes import Setup
from tests.unit.records import MARKED, make_tokenizer

TEXT = "the house is near the river and the city centre "


def rows(number: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{n} near", "completion": TEXT * (n % 5 + 1)}
        if n % 3
        else {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": TEXT * (n % 4 + 1)}]}
        for n in range(1, number + 1)
    ]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of twenty records, which are tokenised three at a time."""
    monkeypatch.setattr(tokenization, "_BLOCK", 3)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(20)))
    return tmp_path / "a.jsonl"


def stream(file: Path, **options: Any) -> TokenizedDataset:
    tokenizer = make_tokenizer(chat_template=MARKED)
    given = {"max_length": 40, "cache_dir": file.parent / "cache", "vocab_size": 2048, "too_long": "drop", **options}
    return read_streamed(str(file), tokenizer, **given)


def assert_same(one: TokenizedDataset, other: TokenizedDataset) -> None:
    for name in ("input_ids", "is_trained", "offsets", "sources"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist()), name
    assert one.taken == other.taken


def is_in_file(array: np.ndarray) -> bool:
    """Whether its memory is a file of the cache."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= array.ctypes.data < end:
            return line.endswith(".safetensors")
    return False


@pytest.mark.long
@pytest.mark.parametrize("too_long", ["truncate", "drop", "split"])
def test_tokens_are_those_of_records_that_are_held(file: Path, too_long: str) -> None:
    said: dict[str, list[str]] = {"held": [], "streamed": []}
    tokenizer, options = make_tokenizer(chat_template=MARKED), {"max_length": 40, "too_long": too_long}
    records = read_records(str(file), say=said["held"].append, has_template=True)
    held = tokenize(records, tokenizer, say=said["held"].append, **options)
    for _ in range(2):  # made, and from the cache
        said["streamed"].clear()
        found = stream(file, too_long=too_long, say=said["streamed"].append)
        assert_same(found, held)
        assert said["streamed"] == said["held"]
    assert is_in_file(found.input_ids)
    assert is_in_file(found[3].input_ids)


def test_what_is_cached_is_not_made_again_and_what_is_damaged_is(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = []
    original = streamed.token_blocks
    monkeypatch.setattr(streamed, "token_blocks", lambda *a, **k: (made.append(1), original(*a, **k))[1])
    good = stream(file).input_ids.tolist()
    assert stream(file).input_ids.tolist() == good
    assert len(made) == 1
    (path,) = (file.parent / "cache").glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)
    assert stream(file).input_ids.tolist() == good
    assert len(made) == 2
    assert "damaged" in caplog.text


def test_file_of_the_cache_is_plain_safetensors_and_serves_records_that_are_held_too(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stream(file)
    monkeypatch.setattr(tokenization, "token_blocks", None)  # it must not be needed
    options: dict[str, Any] = {"max_length": 40, "too_long": "drop", "cache_dir": file.parent / "cache"}
    assert_same(tokenize(read_records(str(file)), make_tokenizer(chat_template=MARKED), **options), found)


def test_files_that_change_while_they_are_read_leave_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = streamed.token_blocks

    def changed(records: Any, *args: Any, **options: Any) -> Any:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows(19)))
        return original(records, *args, **options)

    monkeypatch.setattr(streamed, "token_blocks", changed)
    with pytest.raises(UserError, match="the files changed while they were read"):
        stream(file)
    assert [path.suffix for path in (file.parent / "cache").iterdir()] == [".lock"]


def wrong(row: dict[str, Any]) -> Callable[[Path], object]:
    return lambda file: file.write_text(file.read_text() + json.dumps(row) + "\n")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (wrong({"prompt": 1, "completion": "a"}), UserError, "a.jsonl:21"),
        (wrong({"prompt": "a", "completion": TEXT * 9}), UserError, r"1 of 21 records: .*a.jsonl:21 \("),
        (
            wrong(
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "image", "image": "x.png"}]},
                        {"role": "assistant", "content": "a"},
                    ]
                }
            ),
            UnsupportedError,
            "a.jsonl:21: an image with data.streaming",
        ),
    ],
)
def test_record_that_is_wrong_is_named(
    file: Path, change: Callable[[Path], object], error: type[Exception], message: str
) -> None:
    change(file)
    with pytest.raises(error, match=message):
        stream(file, too_long="error", max_length=60)


def test_token_beyond_the_vocabulary_is_named_with_its_record(file: Path) -> None:
    with pytest.raises(UserError, match=r"a.jsonl:1: token \d+: the model has embeddings for 9"):
        stream(file, vocab_size=9)


def test_run_is_the_one_that_holds_its_records(setup: Setup) -> None:
    """Also for a resume: nothing of its identity says how records were read."""
    runs: list[Prepared] = [setup.prepared(data__streaming=is_streamed) for is_streamed in (False, True)]
    assert runs[0].identity == runs[1].identity
    assert runs[0].train_data.input_ids.tolist() == runs[1].train_data.input_ids.tolist()
    assert [is_in_file(run.train_data.input_ids) for run in runs] == [False, True]
