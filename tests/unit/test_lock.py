"""One run at a time in an output: a second is refused with the first one's name, and a dead one is no hindrance."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshlora.run import lock
from meshlora.run.lock import FILE, hold, holder_of
from meshlora_ground.errors import UserError

ELSEWHERE = {"pid": 7, "host": "elsewhere", "since": 1_700_000_000, "boot": "another-boot"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"_BEAT_S": 0.05, "_STALE_S": 0.5, "_SETTLE_S": 0.05}.items():
        monkeypatch.setattr(lock, name, seconds)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `output`."""
    code = "import sys\nfrom pathlib import Path\nfrom meshlora.run.lock import hold\nwith hold(Path(sys.argv[1])):"
    code += "\n    print('held', flush=True)\n    input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, f"{tmp_path / 'output'}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "held\n"
        yield started
        started.kill()


def test_second_run_is_refused_with_the_name_of_the_first(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    before = (tmp_path / "output" / FILE).read_bytes()
    with pytest.raises(UserError) as caught, hold(tmp_path / "output"):
        pytest.fail("two hold it")
    given, rule = caught.value.given, caught.value.rule
    assert given == f"train.output={tmp_path / 'output'}"
    assert rule.startswith(f"another run trains there: process {process.pid} on host {socket.gethostname()} since 20")
    assert (tmp_path / "output" / FILE).read_bytes() == before
    assert str(holder_of(tmp_path / "output")).startswith(f"process {process.pid} on host")


@pytest.mark.usefixtures("quick")
def test_run_that_was_killed_is_no_hindrance(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "output" / FILE).exists()
    assert holder_of(tmp_path / "output") is None
    with hold(tmp_path / "output", say=pytest.fail):
        assert json.loads((tmp_path / "output" / FILE).read_text())["pid"] == os.getpid()
    assert not (tmp_path / "output" / FILE).exists()


def test_run_that_is_stopped_still_holds_it(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(UserError, match=f"process {process.pid} "), hold(tmp_path / "output"):
        pytest.fail("two hold it")


def test_child_that_was_given_the_file_holds_it_when_its_parent_is_gone(tmp_path: Path) -> None:
    """As ranks do, whose launcher was killed."""
    with hold(tmp_path) as descriptor:
        child = subprocess.Popen(["sleep", "60"], pass_fds=[descriptor])
        # As the kernel does with the open files of a process that ends: without the words of `hold`.
        copy = os.open(tmp_path / FILE, os.O_RDWR)
        os.dup2(copy, descriptor, inheritable=False)
        os.close(copy)
        with pytest.raises(UserError, match="another run"), hold(tmp_path):
            pytest.fail("two hold it")
        child.kill()
        child.wait()
        with hold(tmp_path):
            pass


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("content", [json.dumps(ELSEWHERE), "", "[1, 2]", '{"pid": true}', "[" * 900, "\x1b]0;x\x07"])
def test_lock_of_another_machine_counts_for_nothing_once_it_was_watched(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    said: list[str] = []
    begun = time.monotonic()
    with hold(tmp_path, say=said.append):
        assert time.monotonic() - begun > 0.5
    (line,) = said
    name = (
        "process 7 on host elsewhere since 2023" if content.startswith('{"pid": 7') else "a process that has not said"
    )
    assert name in line
    assert line.isprintable()


@pytest.mark.usefixtures("quick")
def test_lock_of_another_machine_that_still_beats_is_held(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(ELSEWHERE))
    stop = threading.Event()
    descriptor = os.open(tmp_path / FILE, os.O_RDWR)
    beats = threading.Thread(target=lock._beat, args=(descriptor, stop))
    beats.start()
    try:
        with pytest.raises(UserError, match="process 7 on host elsewhere"), hold(tmp_path, say=lambda _: None):
            pytest.fail("two hold it")
    finally:
        stop.set()
        beats.join()
        os.close(descriptor)
    assert json.loads((tmp_path / FILE).read_text()) == ELSEWHERE


@pytest.mark.usefixtures("quick")
def test_two_that_find_the_same_lock_stale_do_not_both_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without locks."""
    monkeypatch.setattr(lock, "_lock", lambda *_: True)
    monkeypatch.setattr(lock, "_SETTLE_S", 0.3)
    (tmp_path / FILE).write_text(json.dumps(ELSEWHERE))
    write = lock._write

    def and_then_another_does(descriptor: int) -> Any:
        own = write(descriptor)
        (tmp_path / FILE).write_text(json.dumps(ELSEWHERE | {"host": "third"}))
        return own

    monkeypatch.setattr(lock, "_write", and_then_another_does)
    with pytest.raises(UserError, match="on host third"), hold(tmp_path, say=lambda _: None):
        pytest.fail("two hold it")


def test_run_beats_while_it_holds(tmp_path: Path, quick: None) -> None:
    with hold(tmp_path):
        before = (tmp_path / FILE).stat().st_mtime_ns
        deadline = time.monotonic() + 10
        while (tmp_path / FILE).stat().st_mtime_ns == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_nothing_is_left_where_nothing_came_of_it(tmp_path: Path) -> None:
    with hold(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / FILE).is_file()
    assert list(tmp_path.iterdir()) == []
    with hold(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "adapter").mkdir()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "adapter", "b"]


@pytest.mark.parametrize("what", ["a folder", "a link", "a pipe", "no room"])
def test_folder_that_cannot_be_locked_is_a_mistake_with_a_way_out(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / FILE
    if what == "a folder":
        file.mkdir()
    if what == "a link":
        file.symlink_to("/etc/passwd")
    if what == "a pipe":
        os.mkfifo(file)
    if what == "no room":
        monkeypatch.setattr(lock.os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    with pytest.raises(UserError, match=f"train.output={tmp_path}: .*; "), hold(tmp_path):
        pytest.fail("it is held")
    assert [path.name for path in tmp_path.iterdir()] == ([] if what == "no room" else [FILE])
