"""The cache of tokens on disk: what hits it, what does not, and what becomes of a damaged file."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast

from meshlora.reading.cache import _checksum as checksum
from meshlora.reading.records import Record
from meshlora.reading.tokenization import tokenize
from meshlora.verify.pool import _context as started_from
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError
from tests.for_each import for_each
from tests.unit.records import BOS, END, EOS, MARKED, make_tokenizer, pair, serialized

RECORDS = [pair("near", " the river"), pair("the city", " is"), Record(text="the house", origin="t")]


class Counted(PreTrainedTokenizerFast):
    """Notes each call in a file, so that calls in other processes are seen too."""

    log: Path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.log.open("a") as file:
            file.write("call\n")
        return super().__call__(*args, **kwargs)


def counted(log: Path) -> Any:
    tokenizer = Counted(tokenizer_object=tokenizers.Tokenizer.from_str(serialized()), eos_token=EOS, bos_token=BOS)
    tokenizer.log = log
    return tokenizer


def num_calls(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def files_of(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.safetensors"))


def assert_same(one: TokenizedDataset, other: TokenizedDataset) -> None:
    for name in ("input_ids", "is_trained", "offsets"):
        a, b = getattr(one, name), getattr(other, name)
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)


def test_a_cache_hit_does_not_call_the_tokenizer(tmp_path: Path) -> None:
    cache, log = tmp_path / "new" / "cache", tmp_path / "log"
    first = tokenize(RECORDS, counted(log), max_length=16, cache_dir=cache)
    calls = num_calls(log)
    assert calls > 0
    second = tokenize(RECORDS, counted(log), max_length=16, cache_dir=cache)
    assert num_calls(log) == calls
    assert_same(first, second)
    assert_same(first, tokenize(RECORDS, make_tokenizer(), max_length=16))
    # One file and its lock: nothing temporary is left.
    assert {path.suffix for path in cache.iterdir()} == {".safetensors", ".lock"}


def test_a_cache_that_may_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("meshlora_ground.private.open_own", refuse)
    assert_same(good, tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path))
    with pytest.raises(UserError, match="Permission denied"):
        tokenize(RECORDS, make_tokenizer(), max_length=15, cache_dir=tmp_path)


def test_a_file_that_moved_and_a_tokenizer_that_was_used_still_hit_the_cache(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenize(RECORDS, tokenizer, max_length=16, cache_dir=tmp_path)
    tokenizer(["near the river"], truncation=True, max_length=2, padding="max_length")  # leaves its mark in the backend
    moved = [Record(text=r.text, prompt=r.prompt, completion=r.completion, origin="elsewhere") for r in RECORDS]
    tokenize(moved, tokenizer, max_length=16, cache_dir=tmp_path)
    assert len(files_of(tmp_path)) == 1


def test_a_tokenizer_set_to_truncate_does_not_truncate_the_data() -> None:
    tokenizer = make_tokenizer()
    tokenizer(["near the river"], truncation=True, max_length=2, padding="max_length")
    assert_same(tokenize(RECORDS, tokenizer, max_length=16), tokenize(RECORDS, make_tokenizer(), max_length=16))


def changes() -> dict[str, tuple[list[Record], Any, dict[str, Any]]]:
    plain: dict[str, Any] = {"max_length": 16}
    split = make_tokenizer()
    split.split_special_tokens = True
    return {
        "max_length": (RECORDS, make_tokenizer(), {"max_length": 15}),
        "train_on": (RECORDS, make_tokenizer(), {**plain, "train_on": "everything"}),
        "too_long": (RECORDS, make_tokenizer(), {**plain, "too_long": "drop"}),
        "rows of an example": ([tuple(RECORDS)], make_tokenizer(), plain),
        "order of records": (RECORDS[::-1], make_tokenizer(), plain),
        "content of a record": ([*RECORDS[:-1], Record(text="the hous", origin="t")], make_tokenizer(), plain),
        "border of a record": ([pair("near ", "the river"), *RECORDS[1:]], make_tokenizer(), plain),
        "kind of a record": ([*RECORDS[:-1], pair("the house", " x")], make_tokenizer(), plain),
        "eos": (RECORDS, make_tokenizer(eos=END), plain),
        "post-processor": (RECORDS, make_tokenizer(adds_bos=True), plain),
        "chat template": (RECORDS, make_tokenizer(chat_template=MARKED), plain),
        "split_special_tokens": (RECORDS, split, plain),
    }


@for_each("change", list(changes()))
def test_whatever_the_tokens_depend_on_changes_the_key(tmp_path: Path, change: str) -> None:
    tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)
    records, tokenizer, options = changes()[change]
    cached = tokenize(records, tokenizer, cache_dir=tmp_path, **options)
    assert len(files_of(tmp_path)) == 2
    assert_same(cached, tokenize(records, tokenizer, **options))


def flip_one_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def with_arrays(path: Path, **arrays: np.ndarray) -> None:
    save_file({**load_file(path), **arrays}, path)


def forged(path: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Other arrays under the right key, with their own right checksum."""
    arrays = load_file(path)
    edit(arrays)
    save_file(arrays, path, metadata={"key": path.stem, "sha256": checksum(arrays)})


def moved_offset(arrays: dict[str, np.ndarray]) -> None:
    arrays["offsets"][1] = arrays["offsets"][2] + 1


FORGERIES: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "no offsets": lambda a: a.pop("offsets"),
    "no tokens": lambda a: a.pop("input_ids"),
    "one more array": lambda a: a.update(more=np.zeros(3, dtype=np.int32)),
    "tokens of another type": lambda a: a.update(input_ids=a["input_ids"].astype(np.int64)),
    "tokens in two dims": lambda a: a.update(input_ids=a["input_ids"][None].copy()),
    "offsets in no dim": lambda a: a.update(offsets=np.array(0, dtype=np.int64)),
    "no tokens in the arrays": lambda a: a.update(input_ids=a["input_ids"][:0]),
    "a mark too few": lambda a: a.update(is_trained=a["is_trained"][:-1].copy()),
    "a negative token": lambda a: a["input_ids"].__setitem__(0, -1),
    "offsets that go back": moved_offset,
    "offsets that do not begin at 0": lambda a: a["offsets"].__setitem__(0, 1),
    "offsets that do not end at the end": lambda a: a["offsets"].__setitem__(-1, a["offsets"][-1] - 1),
    "one sequence": lambda a: a.update(offsets=a["offsets"][[0, -1]].copy()),
    "an empty sequence": lambda a: a["offsets"].__setitem__(1, 0),
    "no offset": lambda a: a.update(offsets=a["offsets"][:0]),
}


@pytest.mark.parametrize("kind", list(FORGERIES))
def test_file_with_other_content_than_asked_is_made_again_although_its_checksum_is_right(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)
    (path,) = files_of(tmp_path)
    forged(path, FORGERIES[kind])
    for _ in range(2):
        assert_same(good, tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path))
    (said,) = caplog.messages
    assert said.startswith(f"{path} is damaged (")
    assert said.endswith("; it is made again")


def test_sequence_longer_than_asked_is_not_believed(tmp_path: Path) -> None:
    """Two records whose tokens lie in one file of the right number, cut elsewhere."""
    good = tokenize(RECORDS, make_tokenizer(), max_length=4, cache_dir=tmp_path)
    (path,) = files_of(tmp_path)

    def cut_elsewhere(arrays: dict[str, np.ndarray]) -> None:
        arrays["offsets"][1:-1] = [1, 2]

    forged(path, cut_elsewhere)
    assert_same(good, tokenize(RECORDS, make_tokenizer(), max_length=4, cache_dir=tmp_path))


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


@pytest.mark.parametrize("make", [lambda path: path.chmod(0o666), linked], ids=["writable by others", "a link"])
def test_file_that_somebody_else_can_have_written_is_made_again(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    good = tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)
    (path,) = files_of(tmp_path)
    forged(path, lambda arrays: arrays["input_ids"].fill(5))  # which nothing but its owner tells from a good one
    make(path)
    assert_same(good, tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path))
    (said,) = caplog.messages
    assert said.startswith(f"{path}: ")
    assert said.endswith(", so it is not believed; it is made again")
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600


def test_cache_dir_that_others_can_write_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)
    tmp_path.chmod(0o770)
    with pytest.raises(
        UserError, match=r"cache_dir=.*: others can write it \(mode 0770\), .*; chmod go-w .*, or choose"
    ):
        tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)


@pytest.mark.timeout(60)
def test_lock_that_is_held_for_ever_ends_with_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)
    (path,) = files_of(tmp_path)
    path.unlink()
    monkeypatch.setattr("meshlora.reading.cache._LONGEST_S", 0.2)
    with path.with_suffix(".lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"process \d+ on .*, which makes the same tokens, holds .* longer than"):
            tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)


@for_each(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-4]),
        lambda path: path.write_bytes(b"not safetensors at all"),
        flip_one_byte,
        lambda path: with_arrays(path, is_trained=np.zeros(3, dtype=bool)),
        lambda path: with_arrays(path, offsets=np.array([0, 0], dtype=np.int64)),
        lambda path: with_arrays(path, input_ids=np.zeros(3, dtype=np.float32)),
        lambda path: with_arrays(path, more=np.zeros(3, dtype=np.float32)),
    ],
)
def test_a_damaged_cache_file_is_made_again_not_trained_on(tmp_path: Path, damage: Any) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    good = tokenize(RECORDS, counted(log), max_length=16, cache_dir=cache)
    calls = num_calls(log)
    (path,) = files_of(cache)
    damage(path)
    for _ in range(2):  # made again once, and found sound after that
        assert_same(good, tokenize(RECORDS, counted(log), max_length=16, cache_dir=cache))
        assert num_calls(log) == 2 * calls


def test_a_file_of_another_key_under_this_name_is_not_believed(tmp_path: Path) -> None:
    good = tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)
    (path,) = files_of(tmp_path)
    tokenize(RECORDS[:1], make_tokenizer(), max_length=16, cache_dir=tmp_path)
    (other,) = set(files_of(tmp_path)) - {path}
    path.write_bytes(other.read_bytes())
    assert_same(good, tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path))


def test_a_failed_write_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(UserError, match="No space left on device"):
        tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}


def test_a_cache_dir_that_is_a_file_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache_dir=.*cannot be written"):
        tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path / "file")


def test_records_that_are_refused_are_not_cached_and_free_the_lock(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="no trained token"):
            tokenize([pair("near the river", " c")], make_tokenizer(), max_length=2, cache_dir=tmp_path)
    assert files_of(tmp_path) == []


def tokenize_in_process(cache: str, log: str, barrier: Any, results: Any) -> None:
    tokenizer = counted(Path(log))
    barrier.wait(timeout=120)
    dataset = tokenize(RECORDS * 500, tokenizer, max_length=16, cache_dir=Path(cache))
    results.put((dataset.input_ids.tolist(), dataset.is_trained.tolist(), dataset.offsets.tolist()))


def test_two_processes_that_start_together_tokenize_once_and_read_the_same(tmp_path: Path) -> None:
    context, _ = started_from("cpu")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (str(tmp_path / "cache"), str(tmp_path / "log"), barrier, results)
    processes = [context.Process(target=tokenize_in_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    one, other = results.get(timeout=120), results.get(timeout=120)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert one == other
    alone = tmp_path / "alone"
    tokenize(RECORDS * 500, counted(alone), max_length=16)
    assert num_calls(tmp_path / "log") == num_calls(alone)
    assert len(files_of(tmp_path / "cache")) == 1


def test_the_cache_file_is_plain_safetensors(tmp_path: Path) -> None:
    dataset = tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)
    (path,) = files_of(tmp_path)
    arrays = load_file(path)
    assert set(arrays) == {"input_ids", "is_trained", "offsets", "sources", "too_long", "lost", "bad"}
    assert np.array_equal(arrays["input_ids"], dataset.input_ids)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    assert json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["key"] == path.stem
