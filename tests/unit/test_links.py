"""Sockets between ranks of one machine: what is sent arrives, and whatever goes wrong is said and ends the sockets."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from meshlora.comm import direct
from meshlora.comm.groups import Axis
from meshlora.processes.links import Links, Meeting


@pytest.fixture
def all_at_once() -> Iterator[Callable[[Sequence[Callable[[], Any]]], list[Future[Any]]]]:
    """Runs functions side by side, as ranks do."""
    with ThreadPoolExecutor(8) as threads:
        yield lambda functions: [threads.submit(function) for function in functions]


def _links(size: int) -> list[Links]:
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for one, other in combinations(range(size), 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()
    return [Links(found) for found in sockets]


def _values(sender: int, receiver: int, number: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(number).add_(100 * sender + receiver).to(dtype)


@pytest.mark.parametrize(
    ("number", "size"),
    [
        pytest.param(1, 2, id="little"),
        pytest.param(1, 4, id="little, of four"),
        pytest.param(3_000_000, 2, id="more than a socket holds"),
        pytest.param(3_000_000, 4, id="more than a socket holds, of four", marks=pytest.mark.proof),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool], ids=str)
def test_every_rank_gets_what_every_other_sent(size: int, dtype: torch.dtype, number: int, all_at_once: Any) -> None:
    links = _links(size)

    def run(rank: int) -> list[tuple[int, Tensor]]:
        others = [other for other in range(size) if other != rank]
        got = []
        for turn in range(2):
            incoming = {other: torch.empty(number, dtype=dtype) for other in others}
            outgoing = {other: _values(rank, other + turn, number, dtype) for other in others}
            links[rank].exchange(outgoing, incoming, timeout_s=60)
            got += [(turn, incoming)]
        return got

    for rank, future in enumerate(all_at_once([lambda rank=rank: run(rank) for rank in range(size)])):
        for turn, incoming in future.result():
            for other, tensor in incoming.items():
                assert torch.equal(tensor, _values(other, rank + turn, number, dtype)), (rank, other)
    assert links[0].num_messages == 2 * (size - 1)
    assert links[0].num_bytes == 2 * (size - 1) * number * dtype.itemsize


def test_one_may_send_where_the_other_only_receives() -> None:
    a, b = _links(2)
    a.exchange({1: torch.ones(3)}, {}, timeout_s=1)
    got = torch.zeros(3)
    b.exchange({}, {0: got}, timeout_s=1)
    assert torch.equal(got, torch.ones(3))


@pytest.mark.parametrize("sent", [3, 5, 100_000])
def test_ranks_that_do_not_agree_on_the_size_end(sent: int) -> None:
    a, b = _links(2)
    sender = threading.Thread(target=lambda: _send(a, sent))
    sender.start()
    with pytest.raises(RuntimeError, match=rf"rank 0 of the group sends {4 * sent} bytes in exchange 1 where 16 "):
        b.exchange({}, {0: torch.empty(4)}, timeout_s=60)
    sender.join(10)
    assert not sender.is_alive(), "whoever waits for the other learns that it has ended"


def _send(links: Links, number: int) -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        links.exchange({1: torch.ones(number)}, {1: torch.empty(1)}, timeout_s=60)


def test_a_message_of_another_exchange_is_not_taken_for_this_one() -> None:
    a, b = _links(2)
    a.exchange({1: torch.ones(4)}, {}, timeout_s=1)
    b.exchange({}, {}, timeout_s=1)  # by its count of rows nothing was due
    a.exchange({1: torch.ones(4)}, {}, timeout_s=1)
    with pytest.raises(RuntimeError, match=r"sends 16 bytes in exchange 1 where 16 are due in exchange 2"):
        b.exchange({}, {0: torch.empty(4)}, timeout_s=1)


def test_one_element_of_any_stride_is_sent() -> None:
    a, b = _links(2)
    matrix, got = torch.arange(5.0).view(1, 5), torch.zeros(())
    a.exchange({1: matrix[:, 3]}, {}, timeout_s=1)
    b.exchange({}, {0: got}, timeout_s=1)
    assert got == 3


def test_a_system_without_room_is_the_cause_itself() -> None:
    a, b = _links(2)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOBUFS, "no room")

    a._sockets[1] = mock.Mock(wraps=a._sockets[1], sendmsg=fail)
    with pytest.raises(OSError, match="no room"):
        a.exchange({1: torch.ones(1)}, {}, timeout_s=1)
    with pytest.raises(RuntimeError, match=r"nothing can be sent after an error: .*no room"):
        a.exchange({1: torch.ones(1)}, {}, timeout_s=1)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        b.exchange({}, {0: torch.empty(1)}, timeout_s=1)


def test_ranks_wait_as_long_as_training_says_and_else_as_their_group() -> None:
    group = mock.Mock()
    group._get_backend.return_value.options._timeout = timedelta(seconds=7)
    axis = Axis(2, 0, (0, 1), group)
    assert direct._patience_s(axis) == 7
    group._get_backend.side_effect = RuntimeError("does not implement getBackendOptions")
    assert direct._patience_s(axis) == 1800
    axis.arrivals.timeout_s = 5
    assert direct._patience_s(axis) == 5


def test_a_time_limit_may_be_longer_than_the_system_can_wait(all_at_once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlora.processes.links._LONGEST_POLL_S", 0.05)
    a, b = _links(2)
    got = torch.zeros(1)
    (waiting,) = all_at_once([lambda: a.exchange({}, {1: got}, timeout_s=1e10)])
    time.sleep(0.2)
    assert not waiting.done()
    b.exchange({0: torch.ones(1)}, {}, timeout_s=1e10)
    waiting.result()
    assert got == 1


def test_no_call_of_a_socket_waits_by_itself() -> None:
    one, other = socket.socketpair()
    ranks = Links({1: one})
    with other:
        assert one.gettimeout() == 0, "a rank that sends nothing would be waited for beyond every limit"
    del ranks


def test_a_rank_that_has_gone_is_noticed_at_once() -> None:
    for is_sending in (False, True):
        a, b = _links(2)
        del b
        outgoing = {1: torch.ones(1)} if is_sending else {}
        with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 of the group"):
            a.exchange(outgoing, {1: torch.empty(1)}, timeout_s=60)


@pytest.mark.parametrize("timeout_s", [0, 0.2])
def test_a_rank_that_does_not_come_is_given_up_and_its_socket_closed(timeout_s: float) -> None:
    links = _links(3)
    of_a_fork = [one.dup() for one in links[0]._sockets.values()]
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"Timed out waiting {timeout_s:g} s for rank 1 of the group"):
        links[0].exchange({1: torch.ones(1), 2: torch.ones(1)}, {1: torch.empty(1)}, timeout_s=timeout_s)
    assert timeout_s <= time.monotonic() - started < 5
    with pytest.raises(RuntimeError, match="nothing can be sent after an error: Timed out waiting"):
        links[0].exchange({}, {1: torch.empty(1)}, timeout_s=1)
    links[2].exchange({}, {0: torch.empty(1)}, timeout_s=1)  # what was sent before that is whole
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        links[2].exchange({}, {0: torch.empty(1)}, timeout_s=1)
    for one in of_a_fork:
        one.close()


# --- finding each other


def test_ranks_of_one_machine_find_each_other(all_at_once: Any) -> None:
    meetings = [Meeting(rank, 3) for rank in range(3)]
    addresses = [meeting.address for meeting in meetings]
    folders = [Path(address[16:].rstrip(b"\0").decode()).parent for address in addresses]
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    assert all(meeting.connect(addresses) for meeting in meetings)
    links = [future.result() for future in all_at_once([meeting.links for meeting in meetings])]
    assert not any(folder.exists() for folder in folders)
    outgoing = {0: torch.tensor([7]), 1: torch.tensor([8])}
    links[2].exchange(outgoing, {}, timeout_s=1)
    for rank, expected in ((0, 7), (1, 8)):
        got = torch.empty(1, dtype=torch.int64)
        links[rank].exchange({}, {2: got}, timeout_s=1)
        assert got.item() == expected


def test_whoever_does_not_know_the_word_is_no_rank() -> None:
    meeting = Meeting(0, 2)
    stranger, friend = Meeting(1, 2), Meeting(1, 2)
    wrong = bytes(16) + meeting.address[16:]
    assert stranger.connect([wrong, stranger.address])
    assert friend.connect([meeting.address, friend.address])
    links = meeting.links()
    stranger.give_up()  # ends the connection of the stranger; that of the friend goes on
    friend.links().exchange({0: torch.ones(2)}, {}, timeout_s=1)
    got = torch.zeros(2)
    links.exchange({}, {1: got}, timeout_s=1)
    assert torch.equal(got, torch.ones(2))


def test_a_rank_that_cannot_be_reached_is_said_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    here, gone = Meeting(1, 2), Meeting(0, 2)
    address = gone.address
    gone.give_up()
    assert not here.connect([address, here.address])
    here.give_up()
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    nowhere = Meeting(0, 2)
    assert nowhere.address == bytes(len(address))
    assert not Meeting(1, 2).connect([nowhere.address, address])


def test_where_the_name_of_the_folder_is_too_long_for_a_socket_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    here, there = Meeting(1, 2), Meeting(0, 2)
    assert here.connect([there.address, here.address])
    for meeting in (here, there):
        folder = Path(meeting.address[16:].rstrip(b"\0").decode()).parent
        assert folder.exists()
        meeting.give_up()
        assert not folder.exists()
    assert not list(long.iterdir())


def test_a_place_where_too_many_wait_is_not_waited_for() -> None:
    here = Meeting(0, 1)  # room for one
    others = [Meeting(1, 2) for _ in range(8)]
    assert not all(other.connect([here.address, other.address]) for other in others)
    for meeting in (here, *others):
        meeting.give_up()
