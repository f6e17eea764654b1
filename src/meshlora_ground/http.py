"""One request to an address, whose answer is bounded in time, in bytes and in where it comes from.

Each way to miss them is one `AnswerError`. Does not own: what is asked and answered, of engines that serve adapters.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from meshlora_ground.errors import one_line, reason

_LONGEST_ANSWER = 2**30
_LONGEST_REFUSAL = 4000
_PART_BYTES = 2**20
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class AnswerError(Exception):
    """No answer, or none that is taken. status: of an answer that refuses, and is then the message; else None."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def answer_of(
    url: str,
    body: bytes | None,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    most_bytes: int | None = None,
) -> str:
    """The text of the answer to JSON that is sent by POST, or to a GET without any.

    timeout_s: of the whole answer, from its first byte to its last. headers: beside the content's type.
    most_bytes: of an answer; by default 1 GiB.

    Raises:
        AnswerError: it does not come, not in time, is too long, or refuses; it sends to another address.
    """
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    # A proxy of the environment is not for this machine.
    proxies = [urllib.request.ProxyHandler({})] if urlsplit(url).hostname in LOOPBACK else []
    opener = urllib.request.build_opener(_Bounded, _NoRedirect, *proxies)
    try:
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                return _text_of(answer, most_bytes or _LONGEST_ANSWER)
        except urllib.error.HTTPError as refusal:
            if 300 <= refusal.code < 400:
                to = one_line(f"{refusal.headers.get('Location', 'nowhere')}", 200)
                raise AnswerError(
                    f"it sends to another address ({refusal.code}, {to}), which is not followed"
                ) from None
            said = refusal.read(_LONGEST_REFUSAL).decode("utf-8", errors="replace")
            raise AnswerError(said, refusal.code) from None
    except TimeoutError:
        raise AnswerError(f"its answer did not end within {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        raise AnswerError(f"it cannot be reached ({reason(error)})") from None
    except http.client.HTTPException as error:  # no OSError: a line or header that is none, or too long
        raise AnswerError(f"its answer is no HTTP ({reason(error)})") from None


def _text_of(answer: Any, most_bytes: int) -> str:
    parts, size = [], 0
    while part := answer.read(_PART_BYTES):
        parts.append(part)
        size += len(part)
        if size > most_bytes:
            raise AnswerError(f"its answer is longer than {most_bytes >> 20} MB")
    return b"".join(parts).decode("utf-8", errors="replace")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """What another address says is not the engine's."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Until(io.RawIOBase):
    """The bytes of a socket until a moment: each read by itself may take as long as all of them."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self.raw, self.sock = raw, sock
        self.until = time.monotonic() + (sock.gettimeout() or 0.0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self.until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self.sock.settimeout(left_s)
        return self.raw.readinto(buffer)

    def close(self) -> None:
        self.raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Until(self.fp.detach(), sock))


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Bounded(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Connection, req)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_SecureConnection, req)
