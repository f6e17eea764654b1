"""Locks between processes: whom one waits for, and for how long."""

from __future__ import annotations

import errno
import os
import platform
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshlora_ground import private
from meshlora_ground.errors import UserError
from meshlora_ground.private import PrivateFolder, locked

_HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(sys.argv[2])
file.flush()
print("held", flush=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> PrivateFolder:
    return PrivateFolder(tmp_path, f"cache_dir={tmp_path}", "choose another folder")


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def hold(holders: list[subprocess.Popen[str]], file: Path, *, words: str = "", seconds: float = 600) -> int:
    """The process that holds `file` from now on."""
    command = [sys.executable, "-c", _HOLDER, str(file), words, str(seconds)]
    holders.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, umask=0o077))
    stdout = holders[-1].stdout
    assert stdout is not None
    assert stdout.readline() == "held\n"
    return holders[-1].pid


@pytest.mark.timeout(60)
def test_lock_of_a_stopped_process_is_waited_for_with_words_and_an_end(
    folder: PrivateFolder,
    holders: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(private, "SAY_AFTER_S", 0.3)
    file = folder.path / "key.lock"
    os.kill(hold(holders, file, words="process 12 on far (meshlora train run.yaml)"), signal.SIGSTOP)
    with pytest.raises(UserError) as caught, locked(folder, "key.lock", "makes the same tokens", limit_s=1.0):
        pytest.fail("two hold one lock")
    assert caplog.messages == [
        f"waiting for process 12 on far (meshlora train run.yaml), which makes the same tokens ({file})"
    ]
    assert str(caught.value) == (
        f"cache_dir={folder.path}: process 12 on far (meshlora train run.yaml), which makes the same tokens, holds "
        "key.lock longer than 1 s; end that process, or choose another folder"
    )


@pytest.mark.timeout(60)
def test_lock_is_taken_when_its_holder_ends_and_a_short_wait_is_not_mentioned(
    folder: PrivateFolder, holders: list[subprocess.Popen[str]], caplog: pytest.LogCaptureFixture
) -> None:
    hold(holders, folder.path / "key.lock", seconds=0.3)
    with locked(folder, "key.lock", "makes the same tokens", limit_s=30.0):
        assert holders[0].wait() == 0
    assert caplog.messages == []


def test_holder_says_who_it_is_in_a_file_for_this_user_alone(folder: PrivateFolder) -> None:
    before = os.umask(0)
    try:
        with locked(folder, "key.lock", "makes the same tokens", limit_s=0.0):
            file = folder.path / "key.lock"
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert file.read_text().startswith(f"process {os.getpid()} on {platform.node()} (")
            with pytest.raises(UserError, match=f"process {os.getpid()} on "):
                locked(folder, "key.lock", "makes the same tokens", limit_s=0.0).__enter__()
    finally:
        os.umask(before)
    with locked(folder, "key.lock", "makes the same tokens", limit_s=0.0):
        pass  # free again


def test_words_of_a_holder_reach_the_terminal_without_control_characters_and_cut(
    folder: PrivateFolder, holders: list[subprocess.Popen[str]]
) -> None:
    hold(holders, folder.path / "key.lock", words="\x1b]0;title\x07 process 1\n" + "x" * 5000)
    with pytest.raises(UserError) as caught:
        locked(folder, "key.lock", "makes the same tokens", limit_s=0.0).__enter__()
    assert "]0;title process 1xxx" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_lock_that_is_a_link_is_not_followed(folder: PrivateFolder, tmp_path_factory: pytest.TempPathFactory) -> None:
    precious = tmp_path_factory.mktemp("elsewhere") / "precious"
    precious.write_text("content")
    (folder.path / "key.lock").symlink_to(precious)
    with pytest.raises(UserError, match=r"it cannot be written \(.*key\.lock: it is a symbolic link\)"):
        locked(folder, "key.lock", "makes the same tokens", limit_s=0.0).__enter__()
    assert precious.read_text() == "content"


def test_file_system_without_locks_is_refused(folder: PrivateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(UserError, match=r"has no locks \(No locks available\); choose another folder"):
        locked(folder, "key.lock", "makes the same tokens", limit_s=0.0).__enter__()
