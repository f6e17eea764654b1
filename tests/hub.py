"""A hub of our own on loopback: the requests of huggingface_hub, answered from memory, as far as a download needs them.

Repositories are dicts of files. `Hub.requests` is what was asked; `blocked` holds contents back until it is set.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

_ASKED = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<name>[\w.-]+/[\w.-]+)/(?P<what>revision|tree)/(?P<revision>[^?]+).*"
    r"|/(?P<of>datasets/)?(?P<repo>[\w.-]+/[\w.-]+)/resolve/(?P<commit>[^/]+)/(?P<file>[^?]+)"
)


def commit_of(files: Mapping[str, bytes]) -> str:
    """40 hexadecimal digits, of the content."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


@dataclass
class Hub:
    """The server, inside a `with`. repositories: name, or name@revision -> files. refused: name -> (status, code).

    Attributes:
        prefix: of all paths, as where a mirror asks for a token in them.
        stopped: file name -> bytes of it that are sent before the connection is kept silent until `go_on` is set.
    """

    repositories: dict[str, dict[str, bytes]]
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    prefix: str = ""
    stopped: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    go_on: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        hub = self

        class Handler(self.handler):  # type: ignore[name-defined]
            of = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def handler(self) -> type[HubHandler]:
        """What answers."""
        return HubHandler

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    def downloads(self, file: str) -> int:
        """How often the content of `file` was asked for."""
        return sum(each.startswith("GET") and each.endswith(f"/{file}") for each in self.requests)


class HubHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    of: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.of
        hub.requests.append(f"{self.command} {self.path}")
        hub.tokens.add(self.headers.get("Authorization", ""))
        found = _ASKED.fullmatch(self.path.removeprefix(hub.prefix))
        assert found, self.path
        name = found["name"] or found["repo"]
        if name in hub.refused or name not in hub.repositories:
            status, code = hub.refused.get(name, (401, "RepoNotFound"))
            self._answer(b"{}", status, {"X-Error-Code": code} if code else {})
            return
        revision, known = found["revision"] or found["commit"], {"main": hub.repositories[name]}
        known |= {key.partition("@")[2]: files for key, files in hub.repositories.items() if key.startswith(f"{name}@")}
        known |= {commit_of(files): files for files in known.values()}
        files = known.get(revision, {})
        commit = commit_of(files)
        if not files:
            self._answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        elif found["what"] == "revision":
            self._answer(json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": []}).encode())
        elif found["what"] == "tree":
            self._answer(json.dumps([_entry(path, content) for path, content in files.items()]).encode())
        elif found["file"] not in files:
            self._answer(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            content = files[found["file"]]
            etag = hashlib.sha256(content).hexdigest()
            self._answer(content, 200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, found["file"])

    def _answer(self, content: bytes, status: int = 200, headers: Mapping[str, str] = {}, file: str = "") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if file in self.of.stopped and not self.of.go_on.is_set():
            self.wfile.write(content[: self.of.stopped[file]])
            self.wfile.flush()
            self.of.go_on.wait(60.0)
            content = content[self.of.stopped[file] :]
        self.wfile.write(content)


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
