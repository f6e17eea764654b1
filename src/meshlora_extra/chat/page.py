"""The chat page: a conversation in a browser of this machine, the base beside the adapter.

Owns: its requests, and the way of an answer from the model to the page. Does not own: who is answered
(`meshlora_extra.page.loopback`), the page (chat.html, chat.css, chat.js), the model (`meshlora_extra.chat.speaker`).

The page keeps the conversation, and sends all of it. The model is in the main thread, which answers one request after
the other: threads of requests hand them over, and write what comes back, a line of JSON for each piece of text.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from meshlora.reading.conversations import open_conversation
from meshlora.reading.records import MalformedError
from meshlora_extra.chat.speaker import Message, Speaker
from meshlora_extra.chat.terminal import EMPTY, WHY, say
from meshlora_extra.page.loopback import TEXT, Handler, Loopback
from meshlora_ground.errors import MeshloraError, UserError
from meshlora_ground.reading import parse_json

_MOST_BYTES = 2**20
_WAY_OUT = "begin a new conversation, or ask more briefly"


@dataclass
class _Request:
    """messages: of the conversation. of_base: who answers, in turn. pieces: lines for the page; None is the end."""

    messages: tuple[Message, ...]
    of_base: list[bool]
    pieces: queue.SimpleQueue[dict[str, Any] | None] = field(default_factory=queue.SimpleQueue)
    is_gone: threading.Event = field(default_factory=threading.Event)


class ChatServer(Loopback):
    """Serves the page. facts: what it shows of the model. `waiting` has the requests for `answer_next`."""

    def __init__(self, facts: Mapping[str, Any], *, port: int = 0) -> None:
        self.facts = facts
        self.waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        super().__init__(_Handler, port=port)


class _Handler(Handler):
    server: ChatServer
    files: ClassVar = {"": "chat.html", "live.css": "live.css", "chat.css": "chat.css", "chat.js": "chat.js"}

    def look(self, name: str, query: Mapping[str, list[str]]) -> bytes | None:
        return json.dumps(self.server.facts).encode("ascii") if name == "facts.json" else None

    def do_POST(self) -> None:
        if (asked := self.asked()) is None:
            return
        if asked[0] != "ask":
            self.answer(404, TEXT, b"no such page\n")
            return
        try:
            request = self._request()
        except ValueError as error:  # malformed messages among them
            self.answer(400, TEXT, f"{error}\n".encode("utf-8", "replace"))
            return
        self.server.waiting.put(request)
        try:
            self.begin(200, "application/x-ndjson")
            while (piece := request.pieces.get()) is not None:
                self.wfile.write(json.dumps(piece).encode("ascii") + b"\n")
        except OSError:  # the page was closed, or its button pressed
            request.is_gone.set()
            self.close_connection = True

    def _request(self) -> _Request:
        """Raises: ValueError: it is not such a one."""
        length = int(self.headers.get("Content-Length", "0"))
        # Some more is read, as a browser that is cut off while it sends hears no answer.
        content = self.rfile.read(max(0, min(length, 4 * _MOST_BYTES)))
        # Another page's form cannot send this kind without asking first, which nothing here answers.
        if self.headers.get_content_type() != "application/json":
            raise ValueError("it is no JSON")
        if length > _MOST_BYTES:
            raise ValueError(f"it has {length:,} bytes, and at most {_MOST_BYTES:,} are read")
        value = parse_json(content.decode("utf-8"))
        if not isinstance(value, dict):
            raise MalformedError("it is no object")
        messages, _ = open_conversation(value.get("messages"))
        of_base = [False, True] if value.get("compares") is True and self.server.facts["adapter"] else [False]
        return _Request(messages, of_base)


def serve(speaker: Speaker, *, names: tuple[str, str | None], system: str, port: int) -> None:
    """Serve the page until Ctrl-C. names: of the model and its adapter. system: text of the first conversation's."""
    adapter = None if names[1] is None else Path(names[1]).parent.name + "/" + Path(names[1]).name
    facts = {"model": Path(names[0]).name, "adapter": adapter, "system": system, "topology": speaker.topology}
    try:
        server = ChatServer(facts | {"positions": speaker.positions}, port=port)
    except OSError as error:
        raise UserError(f"--port {port}", f"it cannot be used ({error.strerror})", "leave it out") from None
    with server:
        threading.Thread(target=server.serve_forever, daemon=True, name="page").start()
        say(f"talk to it: {server.url}   (until Ctrl-C)")
        try:
            while True:
                answer_next(server, speaker)
        finally:
            server.shutdown()


def answer_next(server: ChatServer, speaker: Speaker) -> None:
    """Wait for a request, and answer it."""
    request = server.waiting.get()
    try:
        ids = speaker.tokens_of(request.messages, way_out=_WAY_OUT)
        for of_base in request.of_base:
            if not request.is_gone.is_set():
                _answer(speaker, request, ids, of_base=of_base)
    except MeshloraError as error:
        request.pieces.put({"error": str(error)})
    finally:
        request.pieces.put(None)


def _answer(speaker: Speaker, request: _Request, ids: list[int], *, of_base: bool) -> None:
    who = "base" if of_base else "adapter"

    def hear(text: str) -> None:
        request.pieces.put({"of": who, "text": text})

    answer = speaker.ask(ids, of_base=of_base, hear=hear, is_stopped=request.is_gone.is_set)
    note = WHY[answer.why].format(answer.num_tokens) if answer.why in WHY else ""
    if not note and not answer.text.strip():
        note = EMPTY
    request.pieces.put({"of": who, "end": note})
