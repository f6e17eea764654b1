"""The chat page: who is answered, with what, and that nothing of it is taken for markup or for a request of another."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from meshlora.cli.main import _parser
from meshlora_extra.chat.page import ChatServer, answer_next
from meshlora_extra.chat.speaker import Speaker
from meshlora_extra.commands.chat import _prepare
from tests.extra.talking import QUESTIONS, answered, asked, trained
from tests.processes import Started, answering, wait_until
from tests.run_files import TINY

FACTS = {"model": "tiny", "adapter": "run/adapter", "system": "", "topology": "", "positions": 512}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("page")).parent / "run" / "adapter"


@pytest.fixture(scope="module")
def speaking(adapter: Path) -> Callable[..., Speaker]:
    def get(*more: str) -> Speaker:
        words = ["chat", "--model", str(TINY), "--adapter", str(adapter), "--dtype", "float32", *more]
        blueprint, tokenizer, decoding, _ = _prepare(_parser().parse_args(words), world=1)
        return Speaker(blueprint, tokenizer, decoding)

    return get


@pytest.fixture
def server() -> Iterator[ChatServer]:
    made = ChatServer(FACTS)
    with answering(made):
        yield made


def send(
    server: ChatServer,
    body: Any,
    *,
    path: str = "",
    method: str = "POST",
    headers: dict[str, str] | None = None,
    speaker: Speaker | None = None,
) -> tuple[int, str]:
    """(status, content) of a request, which `speaker` answers where it comes to that."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    given = {"Content-Type": "application/json", **(headers or {})}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path or f"/{server.token}/ask", content, given)
    if speaker is not None:
        answer_next(server, speaker)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_answers_come_piece_by_piece_the_base_beside_the_adapter(
    server: ChatServer, speaking: Callable[..., Speaker], adapter: Path
) -> None:
    speaker = speaking("--max-new-tokens", "24")
    talk = [*asked(QUESTIONS[0], system="Be brief."), {"role": "assistant", "content": "def f"}, *asked(QUESTIONS[1])]
    status, content = send(server, {"messages": talk, "compares": True}, speaker=speaker)
    pieces = [json.loads(line) for line in content.splitlines()]
    assert status == 200
    for who, expected in (("adapter", answered(adapter, [talk])), ("base", answered(None, [talk]))):
        own = [piece for piece in pieces if piece["of"] == who]
        assert ["".join(piece.get("text", "") for piece in own)] == expected
        assert len(own) > 3, "it came at once"
        assert "end" in own[-1]
    status, content = send(server, {"messages": talk}, speaker=speaker)
    assert {json.loads(line)["of"] for line in content.splitlines()} == {"adapter"}


def test_conversation_that_cannot_be_answered_is_said(server: ChatServer, speaking: Callable[..., Speaker]) -> None:
    status, content = send(server, {"messages": asked("word " * 600)}, speaker=speaking())
    (piece,) = map(json.loads, content.splitlines())
    assert status == 200
    assert piece["error"].endswith("the model has 512 positions; begin a new conversation, or ask more briefly")


def test_page_that_is_closed_stops_its_answer(server: ChatServer, speaking: Callable[..., Speaker]) -> None:
    speaker = speaking("--max-new-tokens", "450", "--temperature", "9")
    lengths = []
    ask = speaker.ask

    def noted(*args: Any, **options: Any) -> Any:
        found = ask(*args, **options)
        lengths.append((found.why, found.num_tokens))
        return found

    speaker.ask = noted  # type: ignore[method-assign]
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    body = json.dumps({"messages": asked("a"), "compares": True})
    connection.request("POST", f"/{server.token}/ask", body, {"Content-Type": "application/json"})
    thread = threading.Thread(target=lambda: (connection.getresponse().read(10), connection.close()))
    thread.start()
    answer_next(server, speaker)
    thread.join()
    assert [why for why, _ in lengths] == ["stopped"], "and the base is not asked any more"
    assert lengths[0][1] < 450


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({"Origin": "http://evil.example"}, "", 403),
        ({"Origin": "null"}, "", 403),
        ({"Origin": "http://127.0.0.1:1"}, "", 403),
        ({"Host": "evil.example"}, "", 403),
        ({}, "/ask", 403),
        ({}, "/{other}/ask", 403),
        ({}, "/{token}/more", 404),
        ({"Content-Type": "text/plain"}, "", 400),  # what a form of another page may send without asking
        ({"Content-Type": "application/x-www-form-urlencoded"}, "", 400),
    ],
)
def test_request_of_another_page_or_user_is_not_answered(
    headers: dict[str, str], path: str, status: int, server: ChatServer
) -> None:
    path = path.format(other="a" * len(server.token), token=server.token)
    assert send(server, {"messages": asked("a")}, path=path, headers=headers)[0] == status
    assert server.waiting.empty()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        {"messages": []},
        {"messages": "a"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "nobody", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a" * 2**20}]},
    ],
)
def test_what_is_no_conversation_is_refused(body: Any, server: ChatServer) -> None:
    assert send(server, body)[0] == 400
    assert server.waiting.empty()


def test_page_has_its_own_files_alone_and_puts_text_in_as_text_only(server: ChatServer) -> None:
    root = f"/{server.token}/"
    assert server.server_address[0] == "127.0.0.1"
    for name in ("", "chat.css", "live.css", "chat.js"):
        status, content = send(server, b"", path=root + name, method="GET")
        assert status == 200
        assert "http://" not in content.replace("http://www.w3.org", "")
        assert "https://" not in content
        assert "<script>" not in content
    assert json.loads(send(server, b"", path=f"{root}facts.json", method="GET")[1]) == FACTS
    assert send(server, b"", path=f"{root}live.js", method="GET")[0] == 404
    assert send(server, b"", path="/chat.js", method="GET")[0] == 403
    script = resources.files("meshlora_extra.page").joinpath("chat.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function("):
        assert word not in script, word


@pytest.mark.long
@pytest.mark.parametrize("on", [pytest.param((), id="one"), pytest.param(("--nproc", "2"), id="two")])
def test_command_serves_the_page_until_ctrl_c(on: tuple[str, ...], adapter: Path, tmp_path: Path) -> None:
    words = ["chat", "--model", str(TINY), "--adapter", str(adapter), "--dtype", "float32", "--page", *on]
    words += ["--topology", "tp=2"] * bool(on)
    with Started(tmp_path, "-m", "meshlora", *words, "--max-new-tokens", "8") as started:
        assert started.process.stderr is not None
        lines = iter(started.process.stderr.readline, "")
        (port, path) = next(
            found.groups() for line in lines if (found := re.search(r"http://127.0.0.1:(\d+)(/\S+)", line))
        )
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        body = json.dumps({"messages": asked(QUESTIONS[0]), "compares": True})
        connection.request("POST", f"{path}ask", body, {"Content-Type": "application/json"})
        pieces = [json.loads(line) for line in connection.getresponse().read().splitlines()]
        said = "".join(piece.get("text", "") for piece in pieces if piece["of"] == "adapter")
        assert [said] == answered(adapter, [asked(QUESTIONS[0])], most=8)
        os.kill(started.process.pid, signal.SIGINT)
        assert started.end()[0] == 130
        wait_until(lambda: not started.living())
