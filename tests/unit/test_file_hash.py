"""Large files are read once for their hash, and again when they may have changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from meshlora_ground import file_hash
from meshlora_ground.errors import UserError
from meshlora_ground.file_hash import FileHashes

SIZE = 8 << 20


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(file_hash, "_SETTLED_S", -1.0)  # a file of this moment is kept too
    file = tmp_path / "large"
    file.write_bytes(bytes(SIZE))
    return file


def _hash(file: Path) -> str:
    with FileHashes([file], cache=file.parent / "cache") as hashes:
        return hashes[file]


def _entry(file: Path) -> Path:
    (entry,) = (file.parent / "cache").iterdir()
    return entry


def test_unchanged_file_is_not_read_a_second_time(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hashlib.sha256(bytes(SIZE)).hexdigest()
    assert _hash(large) == right
    assert (large.parent / "cache").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(file_hash.hashlib, "sha256", lambda: pytest.fail("it is read once more"))
    assert _hash(large) == right


def test_other_content_with_the_size_and_the_time_of_before_is_noticed(large: Path) -> None:
    before, times = _hash(large), large.stat()
    with large.open("r+b") as file:
        file.write(b"x")
    os.utime(large, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert _hash(large) != before


def test_file_that_has_just_changed_is_not_kept(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may change again without another time."""
    monkeypatch.setattr(file_hash, "_SETTLED_S", 60.0)
    _hash(large)
    assert not (large.parent / "cache").exists()


@pytest.mark.parametrize("how", ["of anyone", "folder of anyone", "a link", "deep", "cut", "another's file"])
def test_entry_that_somebody_else_may_have_written_is_not_believed(how: str, large: Path) -> None:
    right = _hash(large)
    entry = _entry(large)
    wrong = entry.read_text().replace(right, "0" * 64)
    entry.write_text({"deep": "[" * 900, "cut": wrong[:-3]}.get(how, wrong))
    if how == "another's file":
        entry.write_text(wrong.replace(f"[{large.stat().st_dev},", "[5,"))
    if how == "of anyone":
        entry.chmod(0o666)
    if how == "folder of anyone":
        entry.parent.chmod(0o777)
    if how == "a link":
        entry.replace(entry.parent.parent / "elsewhere")
        entry.symlink_to(entry.parent.parent / "elsewhere")
    assert _hash(large) == right


def test_entry_is_believed_so_that_the_test_above_says_something(large: Path) -> None:
    right = _hash(large)
    _entry(large).write_text(_entry(large).read_text().replace(right, "0" * 64))
    assert _hash(large) == "0" * 64


def test_without_a_cache_files_are_hashed_all_the_same(large: Path) -> None:
    (large.parent / "cache").write_text("in the way")
    assert _hash(large) == hashlib.sha256(bytes(SIZE)).hexdigest()


@pytest.mark.parametrize("how", ["missing", "a pipe", "a folder"])
def test_what_cannot_be_read_is_a_mistake_of_the_user(how: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    if how == "a pipe":
        os.mkfifo(file)
    if how == "a folder":
        file.mkdir()
    with pytest.raises(UserError, match="file: it"):
        _hash(file)


def test_file_that_is_written_while_it_is_read_is_refused(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fstat, calls = os.fstat, []

    def changing(descriptor: int) -> os.stat_result:
        calls.append(descriptor)
        if len(calls) == 2:
            os.utime(large)
        return fstat(descriptor)

    monkeypatch.setattr(file_hash.os, "fstat", changing)
    with pytest.raises(UserError, match="it was changed while it was read"):
        _hash(large)


def test_hashing_that_is_no_longer_needed_ends(tmp_path: Path) -> None:
    file = tmp_path / "endless"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    with FileHashes([file], cache=tmp_path / "cache") as hashes:
        assert not hashes.are_there(0.05)
    assert hashes.are_there(10.0)
