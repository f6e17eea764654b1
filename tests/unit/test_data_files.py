"""Files of strangers: none of them is waited for, fills the memory, or ends in a traceback."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshlora.reading.data_files
from meshlora.reading.preferences import read_preferences
from meshlora.reading.rollouts import read_rollouts
from meshlora.reading.sources import read_records
from meshlora_ground.errors import UserError
from meshlora_ground.limits import time_limit
from tests.unit.records import make_tokenizer


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


READERS: dict[str, Callable[[str], Any]] = {
    "sft": read_records,
    "dpo": lambda path: read_preferences(path, make_tokenizer(), max_length=8),
    "policy": lambda path: read_rollouts(path, make_tokenizer(), max_length=8, vocab_size=512),
}


def _error(read: Callable[[str], Any], path: Path | str) -> str:
    with time_limit(5), pytest.raises(UserError) as error:
        read(str(path))
    assert len(str(error.value)) < 2000
    return str(error.value)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_pipe, "is a named pipe; only regular files are read"),
        (_socket, "is a socket; only regular files are read"),
        (_device, "is a device; only regular files are read"),
        (_loop, "cannot be read (Too many levels of symbolic links)"),
    ],
)
def test_what_is_no_file_is_refused_and_not_waited_for(
    make: Callable[[Path], None],
    words: str,
    read: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    make(Path("a.jsonl"))
    message = _error(read, "a.jsonl")
    assert "a.jsonl" in message
    assert words in message
    Path("saved").mkdir()
    make(Path("saved/state.json"))
    assert words in _error(read, "saved")


@pytest.mark.parametrize("path", ["a\0.jsonl", "x" * 5000, "y/" * 3000])
def test_a_path_that_the_system_refuses_is_one_short_message(path: str) -> None:
    assert "cannot be read" in _error(read_records, path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv"])
def test_a_line_without_end_is_not_read_to_its_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshlora.reading.data_files, "MAX_LINE_BYTES", 2**20)
    with (tmp_path / name).open("wb") as file:
        file.write(b"text\n" if name == "a.csv" else b"\n")
        file.write(b"x" * (2**20 + 1))
        file.truncate(2**36)  # 64 GB of nothing
    assert f"{tmp_path / name}:2: the line is longer than 1 MB" in _error(read_records, tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv"])
def test_bytes_that_are_no_text_are_named_by_their_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"text\n\0\n" if name == "a.csv" else b"\n\0\n")
    assert f"{tmp_path / name}:2: the line holds a NUL byte" in _error(read_records, tmp_path / name)


DEEP = "[" * 100_000 + "]" * 100_000
LINES = {
    "deep": ('{"text": ' + DEEP + "}", "nested too deeply"),
    "deep_messages": ('{"messages": [{"role": "user", "content": "a", "x": ' + "[" * 900 + "]" * 900 + "}]}", ""),
    "long_number": ('{"text": ' + "1" * 5000 + "}", "bad JSON (Exceeds the limit (4300 digits)"),
    "nan": ('{"text": NaN}', "NaN is not a finite number"),
    "infinity": ('{"text": -Infinity}', "-Infinity is not a finite number"),
    "twice": ('{"text": "a", "text": "b"}', "the key 'text' is given twice"),
    "twice_inside": ('{"messages": [{"role": "user", "role": "assistant"}]}', "the key 'role' is given twice"),
    "long_key": (json.dumps({"x" * 10**6: 1}), "unknown field 'xxxxxxxx"),
    "long_role": (json.dumps({"messages": [{"role": "x" * 10**6}]}), "unknown role 'xxxxxxxx"),
    "control_characters": (json.dumps({"\x1b]0;owned\x07": 1}), "unknown field '\\x1b]0;owned"),
    "surrogate_key": ('{"\\ud800": 1}', "unknown field '\\ud800'"),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(("line", "words"), LINES.values(), ids=LINES)
def test_a_hostile_line_is_one_short_message_with_its_number(
    line: str, words: str, read: Callable[[str], Any], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + line + "\n", encoding="utf-8")
    message = _error(read, path)
    assert f"{path}:2: " in message
    if read is read_records:  # the others do not look as far into it
        assert words in message
    message.encode()


def test_a_file_of_another_kind_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("no\n" * 10**6)
    assert "1000 or more malformed records" in _error(read_records, tmp_path / "a.jsonl")


def test_a_table_of_a_million_columns_is_one_short_message(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",".join(f"c{number}" for number in range(10**6)) + "\n")
    assert "and 999990 more: unknown field 'c0'" in _error(read_records, tmp_path / "a.csv")


def _saved(folder: Path) -> dict[str, Any]:
    import datasets

    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(folder))
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_data_files": [{"filename": "../../../../../../../../dev/zero"}]}, "outside of its folder"),
        ({"_data_files": [{"filename": "/dev/zero"}]}, "outside of its folder"),
        ({"_data_files": [{"filename": ["a"]}]}, "cannot be read as a saved dataset"),
        ({"_data_files": 3}, "cannot be read as a saved dataset"),
        ({"_format_type": "nosuch"}, ""),
    ],
)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_saved_dataset_stays_in_its_folder(
    change: dict[str, Any], words: str, read: Callable[[str], Any], tmp_path: Path
) -> None:
    state = _saved(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state | change))
    if words or read is not read_records:
        assert words in _error(read, tmp_path / "saved")


def test_a_damaged_dataset_is_one_message(tmp_path: Path) -> None:
    _saved(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:50])
    assert "cannot be read as a saved dataset" in _error(read_records, tmp_path / "saved")
    (tmp_path / "saved" / "dataset_info.json").write_text(DEEP)
    assert "cannot be read as a saved dataset" in _error(read_records, tmp_path / "saved")


@pytest.mark.parametrize("value", [1e300, -(10**4000), True, "1"])
def test_a_number_that_float32_cannot_hold_is_named_by_line(value: object, tmp_path: Path) -> None:
    row = {"input_ids": [5, 6], "is_trained": [0, 1], "advantage": value}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    message = _error(READERS["policy"], tmp_path / "a.jsonl")
    assert "a.jsonl:1: advantage holds what is not a finite number" in message


@pytest.mark.parametrize("name", ["old_log_probs", "engine_log_probs"])
def test_probabilities_in_place_of_their_logarithms_are_named_by_line(name: str, tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7], "is_trained": [0, 1, 1], "advantage": 1.0}
    for values in ([-0.2, 0.8], [-0.2, 1e-6]):
        (tmp_path / "a.jsonl").write_text(json.dumps(row | {name: values}) + "\n")
        if max(values) > 0.1:
            assert f"a.jsonl:1: {name} holds 0.8: the logarithm" in _error(READERS["policy"], tmp_path / "a.jsonl")
        else:
            assert READERS["policy"](str(tmp_path / "a.jsonl")).num_examples == 1


def test_a_number_that_float32_can_hold_is_taken(tmp_path: Path) -> None:
    largest = float(np.finfo(np.float32).max)
    row = {"input_ids": [5, 6], "is_trained": [0, 1], "advantage": largest}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert READERS["policy"](str(tmp_path / "a.jsonl")).columns["advantage"].max() == largest


def test_links_that_lead_nowhere_or_back_are_named(tmp_path: Path) -> None:
    """A folder with a link to itself has each of its files once."""
    (tmp_path / "one.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "data").symlink_to(".")
    assert len(read_records(tmp_path)) == 1
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"gone\.jsonl: is a link to 'nowhere', which is not there"):
        read_records(tmp_path)
    (tmp_path / "gone.jsonl").unlink()
    (tmp_path / "gone.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(UserError, match=r"cannot be read \(Too many levels of symbolic links"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [{"advantage": 1.0, "weight": 0.0}, {"advantage": -1.0, "weights": [0.0]}],
            "the weights of all rollouts are 0",
        ),
        ([{"advantage": 0.0}] * 2, "all advantages are 0"),
        ([{"reward": 1.0, "group": 0}] * 2 + [{"reward": 2.0, "group": 1}] * 2, "in each group all rewards are equal"),
        ([{"reward": 1.0, "group": 0}, {"reward": 2.0, "group": 0}], ""),
        ([{"advantage": 0.0}, {"advantage": 1.0}], ""),
    ],
)
def test_rollouts_that_teach_nothing_are_said(rows: list[dict[str, Any]], words: str, tmp_path: Path) -> None:
    file, said = tmp_path / "rollouts.jsonl", list[str]()
    tokens = {"input_ids": [5, 6], "is_trained": [0, 1]}
    file.write_text("".join(json.dumps(tokens | row) + "\n" for row in rows))
    options: Any = {"max_length": 8, "vocab_size": 10, "is_rewarded": "reward" in rows[0]}
    read_rollouts(str(file), None, say=said.append, **options)  # type: ignore[arg-type]
    assert [line for line in said if "nothing is learnt" in line] == [
        f"note: {words}: nothing is learnt from them"
    ] * bool(words)


@pytest.mark.parametrize("value", [1e-2, -1e38])
def test_no_token_has_such_a_probability(value: float, tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    row = {"input_ids": [5, 6], "is_trained": [0, 1], "advantage": 1.0, "engine_log_probs": [value]}
    file.write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"rollouts\.jsonl:1: engine_log_probs holds"):
        read_rollouts(str(file), None, max_length=8, vocab_size=10)  # type: ignore[arg-type]
