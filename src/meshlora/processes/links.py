"""Messages between ranks of one machine: one socket per pair, read and written by the ranks themselves.

Owns: how ranks find each other (`Meeting`), and sending to and receiving from all others at once (`Links`). Does not
own: which tensors go where (`comm.direct`), and the fallback of ranks without such sockets, gloo's messages.

gloo hands every message to its own thread. Where ranks share cores with these threads, most of a message's time is
spent waiting for one of them to be scheduled. `benchmarks/messages.py` prints both.

The socket folder is private to this user, and a connecting rank must present a secret sent over the store or gloo.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

# Precedes each message: the number of the exchange and the byte count. Ranks that disagree must not read on.
_HEADER = struct.Struct("<QQ")
_HELLO = struct.Struct("<I16s")  # the connecting rank, and the secret of the rank it connects to
_MEETING_S = 30.0  # enough: by then the others have connected and said hello
_ADDRESS = 16 + 112  # the secret and the longest possible socket path, zero-padded
_LONGEST_FOLDER = 60  # bytes; a longer one leaves no room for a name
_LONGEST_POLL_S = 3600.0  # poll() itself accepts at most 24 days
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Links:
    """Open sockets to the other ranks of a group, closed with this object.

    Attributes:
        num_messages, num_bytes: sent so far, excluding headers.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        self._number = self.num_messages = self.num_bytes = 0
        self._first_error: BaseException | None = None
        for one in self._sockets.values():
            one.setblocking(False)
        self._close = weakref.finalize(self, _close_all, list(self._sockets.values()))

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], *, timeout_s: float) -> None:
        """Send `outgoing[rank]` to each rank and fill `incoming[rank]` from it, all at once; contiguous CPU tensors.

        Every rank of the group must call it equally often.

        Raises:
            RuntimeError: a rank has exited, is in another exchange, sends another number of bytes, or did not arrive
                in `timeout_s` seconds. The links are unusable afterwards. OSError: the system is out of resources.
        """
        if self._first_error is not None:
            raise RuntimeError(f"nothing can be sent after an error: {self._first_error}") from self._first_error
        self._number += 1
        try:
            self._exchange(outgoing, incoming, timeout_s)
        except BaseException as error:
            # The rest of a truncated message would be read as the next one. Shutting down tells the others, even where
            # a forked process still holds the sockets.
            self._first_error = error
            for one in self._sockets.values():
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._close()
            raise
        self.num_messages += len(outgoing)
        self.num_bytes += sum(tensor.nbytes for tensor in outgoing.values())

    def _exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], timeout_s: float) -> None:
        headers = {rank: bytearray(_HEADER.size) for rank in incoming}
        sending = {rank: [memoryview(self._header(t)), _memory(t)] for rank, t in outgoing.items()}
        receiving = {rank: [memoryview(headers[rank]), _memory(t)] for rank, t in incoming.items()}
        deadline = time.monotonic() + timeout_s
        while sending or receiving:
            moved = False
            for rank in list(sending):
                moved |= self._send(rank, sending[rank])
                if not sending[rank]:
                    del sending[rank]
            for rank in list(receiving):
                moved |= self._receive(rank, receiving[rank])
                if len(receiving[rank]) <= 1:
                    self._check(rank, headers[rank], incoming[rank])
                if not receiving[rank]:
                    del receiving[rank]
            if not moved and not self._wait(sending, receiving, deadline):
                late = sorted({*sending, *receiving})
                which = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
                raise RuntimeError(f"Timed out waiting {timeout_s:g} s for {which} of the group")

    def _header(self, tensor: Tensor) -> bytes:
        return _HEADER.pack(self._number, tensor.nbytes)

    def _check(self, rank: int, header: bytearray, due: Tensor) -> None:
        if header != self._header(due):
            number, num_bytes = _HEADER.unpack(header)
            raise RuntimeError(
                f"rank {rank} of the group sends {num_bytes} bytes in exchange {number} where {due.nbytes} are due in "
                f"exchange {self._number}: its ranks do not compute the same (have tp ranks the same sequences?)"
            )

    def _send(self, rank: int, parts: list[memoryview]) -> bool:
        """Send what the socket accepts now and drop it from `parts`; whether anything was sent."""
        try:
            sent = self._sockets[rank].sendmsg(parts, (), _NO_SIGNAL)
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise RuntimeError(f"Connection closed by peer: rank {rank} of the group ({error})") from error
        _drop(parts, sent)
        return True

    def _receive(self, rank: int, parts: list[memoryview]) -> bool:
        """Fill `parts` with what has arrived and drop the filled bytes from them; whether anything came."""
        try:
            received, *_ = self._sockets[rank].recvmsg_into(parts)
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise RuntimeError(f"Connection closed by peer: rank {rank} of the group ({error})") from error
        if not received:
            raise RuntimeError(f"Connection closed by peer: rank {rank} of the group has ended")
        _drop(parts, received)
        return True

    def _wait(self, sending: Mapping[int, object], receiving: Mapping[int, object], deadline: float) -> bool:
        """Wait until something can be sent or received, an hour at most; False if the deadline has passed."""
        left = deadline - time.monotonic()
        poll = select.poll()
        for rank in {*sending, *receiving}:
            events = (select.POLLOUT if rank in sending else 0) | (select.POLLIN if rank in receiving else 0)
            poll.register(self._sockets[rank], events)
        return bool(poll.poll(1e3 * min(max(left, 0.0), _LONGEST_POLL_S))) or left > _LONGEST_POLL_S


class Outbox:
    """Messages to one rank, sent one after the other by a thread of its own, which begins with the first."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def put(self, send: Callable[[], None]) -> None:
        """Call `send` in turn. Raises: RuntimeError: an earlier message could not be sent."""
        if self._error is not None:
            raise RuntimeError(f"{self._error}") from self._error
        if self._thread is None:
            # A daemon: a rank that fails does not wait at its end for others to take what it has sent.
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._waiting.put(send)

    def _run(self) -> None:
        while self._error is None:
            try:
                self._waiting.get()()
            except (RuntimeError, OSError) as error:  # raised where the next message is put
                self._error = error


class Meeting:
    """The socket on which this rank awaits the others of its group, until `links` or `give_up`.

    Attributes:
        address: for the others, `_ADDRESS` bytes; all zero if there can be no socket here.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._word = secrets.token_bytes(16)
        self._folder: str | None = None
        self._listener: socket.socket | None = None
        self._found: dict[int, socket.socket] = {}
        self.address = bytes(_ADDRESS)
        if hasattr(socket, "AF_UNIX") and hasattr(select, "poll"):
            with contextlib.suppress(OSError):
                self._listen()

    def _listen(self) -> None:
        folder = tempfile.gettempdir()
        if len(os.fsencode(folder)) > _LONGEST_FOLDER:
            folder = "/tmp"
        self._folder = tempfile.mkdtemp(prefix=f"meshlora-{os.getpid()}-", dir=folder)
        path = os.fsencode(Path(self._folder) / "rank")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(self.size)
        self.address = (self._word + path).ljust(_ADDRESS, b"\0")

    def connect(self, addresses: Sequence[bytes]) -> bool:
        """Connect to all lower ranks at `addresses`, sent by other means; whether all are reachable on this machine."""
        if not all(address.strip(b"\0") for address in addresses):
            return False
        try:
            for rank, address in enumerate(addresses[: self.rank]):
                self._found[rank] = one = socket.socket(socket.AF_UNIX)
                one.setblocking(False)  # at once or not at all: otherwise the listener's queue is full
                one.connect(address[16:].rstrip(b"\0"))
                one.sendall(_HELLO.pack(self.rank, address[:16]))
        except OSError:
            return False
        return True

    def links(self) -> Links:
        """The sockets to all others, once each has said that it connected. Raises: RuntimeError: one did not."""
        assert self._listener is not None
        self._listener.settimeout(_MEETING_S)
        try:
            while len(self._found) < self.size - 1:
                one, _ = self._listener.accept()
                one.settimeout(_MEETING_S)
                rank, word = _HELLO.unpack(one.recv(_HELLO.size, socket.MSG_WAITALL).ljust(_HELLO.size, b"\0"))
                if secrets.compare_digest(word, self._word) and self.rank < rank < self.size:
                    self._found[rank] = one
                else:
                    one.close()
        except TimeoutError as error:
            missing = sorted(set(range(self.size)) - {self.rank} - self._found.keys())
            raise RuntimeError(f"Timed out waiting for ranks {missing} of the group to connect") from error
        found, self._found = self._found, {}
        self.give_up()
        return Links(found)

    def give_up(self) -> None:
        """Stop listening, and close the sockets that `links` has not handed out."""
        _close_all(list(self._found.values()) + ([self._listener] if self._listener is not None else []))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._found, self._listener, self._folder = {}, None, None


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in its own memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element is contiguous with any stride
    return flat.view(torch.uint8).numpy().data


def _drop(parts: list[memoryview], num_bytes: int) -> None:
    """Drop the first `num_bytes` of `parts`, and the parts left empty."""
    while parts and num_bytes >= len(parts[0]):
        num_bytes -= len(parts.pop(0))
    if num_bytes:
        parts[0] = parts[0][num_bytes:]
