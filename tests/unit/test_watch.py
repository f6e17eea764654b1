"""The watch of a rank: the first cause is that of all, a rank that is gone is noticed, and the store hears little."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from meshlora.processes import heartbeat as watch
from meshlora.processes.heartbeat import Board, BoardInFolder, BoardInStore, Cause, Post, Watch


class Words:
    """A board of one process that counts what its ranks send and receive, as torch's store packs it."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.num_bytes = 0

    def _sent(self, *words: str) -> None:
        self.num_bytes += 1 + sum(8 + len(each) for each in words)

    def set(self, key: str, words: str) -> None:
        self._sent(key, words)
        self.known[key] = words

    def check(self, key: str) -> bool:
        self._sent("", key, "")
        return key in self.known

    def get(self, key: str) -> str:
        self._sent(key, self.known[key])
        return self.known[key]

    def claim(self, key: str, words: str) -> str:
        self._sent(key, words, words)
        return self.known.setdefault(key, words)


@pytest.fixture(params=["folder", "store"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Board:
    if request.param == "folder":
        return BoardInFolder(tmp_path)

    class Store(HashStore):  # which alone has no copies: it is in this process
        def clone(self) -> Store:
            return self

    return BoardInStore(Store())


def test_the_first_cause_is_that_of_all_ranks(board: Board) -> None:
    told: list[Cause] = []
    with Watch(board, 2, world=3, told=lambda cause, _: told.append(cause), interval_s=0.02):
        first, second = Watch(board, 0, world=3), Watch(board, 1, world=3)
        cause = first.abort("CUDA out of memory", code=3)
        assert second.abort("lost contact", code=1) == cause
        assert (cause.rank, cause.text, cause.code) == (0, "CUDA out of memory", 3)
        assert second.first_cause(wait_s=0) == cause
        while not told:
            time.sleep(0.01)
    assert told == [cause]


def test_a_rank_that_is_gone_without_a_word_ends_the_job(board: Board) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watching = Watch(board, 0, world=2)
    watching.looks_after(Post({1: process.pid}))
    assert watching.look() is None
    process.kill()
    while watch.is_running(process.pid):  # not waited for: a zombie is gone too
        time.sleep(0.01)
    cause = watching.look()
    assert cause is not None
    assert (cause.rank, cause.by) == (1, 0)
    assert "without a word" in cause.text
    process.communicate()


def test_a_rank_that_ended_well_ends_no_job(board: Board) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    with Watch(board, 1, world=2, interval_s=5.0):
        pass
    process.wait()
    watching = Watch(board, 0, world=2)
    watching.looks_after(Post({1: process.pid}))
    assert watching.look() is None
    assert watching.neighbours == {}


def test_a_machine_without_a_sign_of_life_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    board, now = Words(), [1000.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    here, there = Watch(board, 0, world=16), Watch(board, 8, world=16)
    here.looks_after(Post({}, 8, "node2"))
    there.looks_after(Post({}, 0))
    for _ in range(3):
        now[0] += watch.SILENT_S / 2
        assert there.look() is None
        assert here.look() is None
    now[0] += watch.SILENT_S * 0.9
    assert here.look() is None
    now[0] += watch.SILENT_S * 0.2
    cause = here.look()
    assert cause is not None
    assert (cause.rank, cause.host) == (8, "node2")


def test_a_store_that_does_not_answer_is_an_end() -> None:
    class Gone(Words):
        def check(self, key: str) -> bool:
            raise RuntimeError("Connection reset by peer")

    told: list[Cause] = []
    with Watch(Gone(), 1, world=2, told=lambda cause, _: told.append(cause), interval_s=0.01):
        while not told:
            time.sleep(0.01)
    assert "store of the job does not answer" in told[0].text


def test_a_store_that_never_returns_is_an_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine lost its power: no connection is reset, and torch's client waits for ever."""

    class Hangs(Words):
        def check(self, key: str) -> bool:
            time.sleep(60)
            return False

    monkeypatch.setattr(watch, "SILENT_S", 0.1)
    told: list[Cause] = []
    with Watch(Hangs(), 1, world=2, told=lambda cause, _: told.append(cause), interval_s=0.02):
        while not told:
            time.sleep(0.01)
    assert "store of the job does not answer" in told[0].text


def test_a_rank_that_lost_another_learns_that_the_store_is_gone() -> None:
    class Gone(Words):
        def check(self, key: str) -> bool:
            raise RuntimeError("Connection reset by peer")

    cause = Watch(Gone(), 1, world=2).first_cause(wait_s=1)
    assert cause is not None
    assert (cause.by, cause.host) == (-1, "")  # the one that speaks for its machine prints it


def test_ranks_that_ask_are_answered_once(board: Board) -> None:
    asking, answering = Watch(board, 0, world=2), Watch(board, 1, world=2)
    answers = iter(["here", "there", "nowhere"])
    answering.answer = lambda: next(answers)
    answering.look()
    assert asking.answer_of(1) is None
    for expected in ("here", "there"):
        asking.ask()
        answering.look()
        answering.look()
        assert asking.answer_of(1) == expected


@pytest.mark.long
def test_16384_ranks_say_less_than_a_megabyte_a_second() -> None:
    """Eight ranks a machine; bytes both ways, with each word's length as torch's store sends it."""
    board, world, per_machine = Words(), 16_384, 8
    ranks = [Watch(board, rank, world=world) for rank in range(world)]
    for number, rank in enumerate(ranks):
        if number % per_machine == 0:
            rank.looks_after(Post({}, (number + per_machine) % world))
    for rank in ranks:
        assert rank.look() is None
    board.num_bytes = 0
    for rank in ranks:
        assert rank.look() is None
    assert board.num_bytes / ranks[0].interval_s < 1e6
    assert ranks[0].interval_s < 5  # and all know within ten seconds
