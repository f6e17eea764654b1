"""What an engine says is checked before a run writes it down: each lie is one line, in bounded time and memory."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socketserver
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from meshlora_extra.rl.engine import Engine
from meshlora_ground.errors import UserError
from tests.for_each import for_each
from tests.processes import answering

Send = Callable[[Callable[[bytes], Any]], None]


@contextlib.contextmanager
def saying(*parts: bytes, pause_s: float = 0.0) -> Iterator[tuple[str, list[bytes]]]:
    """(address, first lines of its requests) of a server that says `parts`, in order, whatever it is asked."""
    seen = list[bytes]()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            seen.append(self.rfile.readline())
            length = 0
            while (line := self.rfile.readline()).strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            self.rfile.read(length)
            with contextlib.suppress(OSError):
                for part in parts:
                    self.wfile.write(part)
                    time.sleep(pause_s)

    with answering(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}", seen


def _ok(text: str) -> bytes:
    return b"HTTP/1.1 200 OK\r\n\r\n" + text.encode()


def _answer(**changes: Any) -> bytes:
    choice = {"index": 0, "token_ids": [5, 9], "logprobs": {"token_logprobs": [-1.0, -0.5]}} | changes
    return _ok(json.dumps({"choices": [choice], "model": "mine"}))


def _npy(header: str, content: bytes = b"") -> str:
    return base64.b64encode(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + content
    ).decode()


def _routed(shape: str, descr: str = "|u1", content: bytes = bytes(12)) -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n"
    return _answer(routed_experts=_npy(header, content))


def _complete(url: str, timeout_s: float = 60.0) -> Any:
    return Engine(url, timeout_s).complete("mine", [[1, 2]], vocab_size=10, n=1, max_tokens=2)


def test_an_honest_answer_is_taken_whatever_its_rounding_and_its_order_in_memory() -> None:
    array = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    with io.BytesIO() as file:
        np.save(file, array)
        routed = base64.b64encode(file.getvalue()).decode()
    said = _answer(routed_experts=routed, logprobs={"token_logprobs": [1e-7, -9999]})
    with saying(said) as (url, _):
        (((one),),) = _complete(url)
    assert (one.tokens, one.log_probs, one.routed_experts) == ([5, 9], [1e-7, -9999.0], array.tolist())


LIES = {
    "token beyond the vocabulary": (_answer(token_ids=[5, 10]), "outside the vocabulary of 10"),
    "token of 31 digits": (_answer(token_ids=[5, 10**30]), "outside the vocabulary of 10"),
    "token below 0": (_answer(token_ids=[5, -1]), "outside the vocabulary of 10"),
    "token that is true": (_answer(token_ids=[5, True]), "token_ids holds what is no whole number"),
    "positive": (_answer(logprobs={"token_logprobs": [-1.0, 5.0]}), "the logarithm of a probability is at most 0"),
    "impossible": (_answer(logprobs={"token_logprobs": [-1.0, -1e38]}), "no token of that probability is ever sampled"),
    "infinite": (_answer(logprobs={"token_logprobs": [-1.0, -(10**400)]}), "not a finite number"),
    "too long": (
        _answer(token_ids=[5] * 3, logprobs={"token_logprobs": [-1.0] * 3}),
        "it has 3 tokens, and at most 2 were asked for",
    ),
    "another model": (_ok('{"choices": [], "model": "other"}'), "'other' has completed the prompts, and 'mine' was"),
    "a list": (_ok("[]"), "its answer is no object"),
    "deep": (_ok("[" * 200_000), "its answer is not JSON"),
    "deep refusal": (b"HTTP/1.1 400 No\r\n\r\n" + b"[" * 200_000, r"it completes prompts not: 400 \[\[\["),
    "no status": (b"SIP/9 200\r\n\r\n{}", "its answer is no HTTP"),
    "nothing": (b"", "it cannot be reached"),
    "long header": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n{}", "its answer is no HTTP"),
    "many headers": (b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 500 + b"\r\n{}", "its answer is no HTTP"),
    "half a chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{", "its answer is no HTTP"),
    "half": (b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{", "its answer is not JSON"),
    "72 TB": (_routed(f"({2**46}, 1, 1)"), "its routed_experts are uint8 .* in 12 bytes"),
    "below 0": (_routed("(-3, -2, 2)"), "its routed_experts are uint8 .* in 12 bytes"),
    "objects": (_routed("(3, 2, 2)", "|O"), "its routed_experts"),
    "nested header": (_routed("(" * 5000), "its routed_experts cannot be read"),
    "another number": (_routed("(1, 6, 2)"), "routed_experts has 1 tokens, input_ids 4"),
    "no expert": (_routed("(3, 2, 2)", "<u4", b"\xff" * 48), "holds what is no number of an expert"),
}


@for_each("lie", LIES)
def test_a_lie_of_an_engine_is_one_line(lie: str) -> None:
    said, words = LIES[lie]
    with saying(said) as (url, _), pytest.raises(UserError, match=words) as found:
        _complete(url)
    assert f"{found.value}".startswith("the engine at http://127.0.0.1:")


@pytest.mark.parametrize("of", ["body", "headers"])
def test_an_answer_that_drips_has_one_limit_of_time(of: str) -> None:
    start = b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if of == "body" else b"X: ")
    begun = time.monotonic()
    with (
        saying(start, *[b" "] * 100, pause_s=0.05) as (url, _),
        pytest.raises(UserError, match=r"its answer did not end within 0\.3 s"),
    ):
        _complete(url, 0.3)
    assert time.monotonic() - begun < 3


def test_an_answer_is_not_read_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlora_ground.http._LONGEST_ANSWER", 2**20)
    for said in (b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n"):
        with saying(said, *[b" " * 2**20] * 2) as (url, _), pytest.raises(UserError, match="is longer than 1 MB"):
            _complete(url)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_nobody_else_completes_for_the_engine(code: int) -> None:
    with saying(_answer()) as (elsewhere, seen):
        said = f"HTTP/1.1 {code} Found\r\nLocation: {elsewhere}/v1/completions\r\nContent-Length: 0\r\n\r\n".encode()
        with saying(said) as (url, _), pytest.raises(UserError, match=f"another address.*{code}.*not followed"):
            _complete(url)
    assert not seen
