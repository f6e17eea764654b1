"""Servers on loopback, for those who know their address.

Owns: who is answered, and what a page may do. Does not own: any page.

Anybody on the machine can connect to loopback, and any page in a browser can send requests there: so the path begins
with a random token, the Host header must be loopback's own (a name of somebody else's that points here is refused), and
the page's policy allows it nothing but its own files. What a browser sends from another page says so in Origin.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address is the secret
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_HOST = "127.0.0.1"
_TIMEOUT_S = 10.0
TEXT = "text/plain; charset=utf-8"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


class Loopback(ThreadingHTTPServer):
    """Serves from construction to `server_close`, once `serve_forever` is called. port: 0 is any."""

    daemon_threads = True

    def __init__(self, handler: type[Handler], *, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        super().__init__((_HOST, port), handler)

    @property
    def url(self) -> str:
        """The page's address, with the token."""
        return f"http://{_HOST}:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> set[str]:
        """The Host headers of requests that were meant for it."""
        return {f"{name}:{self.server_port}" for name in (_HOST, "localhost")}


class Handler(BaseHTTPRequestHandler):
    """Answers a GET with a file of `files`, or else as `look` says. files: name in the address -> file beside this."""

    server: Loopback
    files: ClassVar[Mapping[str, str]] = {}
    timeout = _TIMEOUT_S
    server_version, sys_version = "meshlora", ""

    def look(self, name: str, query: Mapping[str, list[str]]) -> bytes | None:
        """The JSON at `name`; None if there is none."""
        return None

    def log_message(self, *_: object) -> None:
        """Say nothing: the path has the token, and the terminal is the command's."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if (asked := self.asked()) is None:
            return
        name, query = asked
        if (content := self.look(name, query)) is not None:
            self.answer(200, "application/json", content)
        elif file := self.files.get(name):
            kind = _KINDS["." + file.rpartition(".")[2]]
            content = resources.files(__package__).joinpath(file).read_bytes()
            self.answer(200, f"{kind}; charset=utf-8", content)
        else:
            self.answer(404, TEXT, b"no such page\n")

    def asked(self) -> tuple[str, Mapping[str, list[str]]] | None:
        """(name behind the token, query) of the request; None: it was not for us, and has been answered."""
        try:
            path = urlsplit(self.path)
        except ValueError:  # as of http://[/
            self.answer(400, TEXT, b"no address\n")
            return None
        token, _, name = path.path.lstrip("/").partition("/")
        is_known = hmac.compare_digest(token.encode(), self.server.token.encode())
        if self.headers.get("Host", "") not in self.server.hosts or not is_known or not self._is_own_page():
            self.answer(403, TEXT, b"not for you\n")
            return None
        return name, parse_qs(path.query)

    def _is_own_page(self) -> bool:
        """Whether no other page has sent it: browsers give the origin of every POST."""
        origin = self.headers.get("Origin")
        return origin is None or origin in {f"http://{host}" for host in self.server.hosts}

    def begin(self, status: int, kind: str, length: int | None = None) -> None:
        """The headers of an answer. length: None: it ends with the connection."""
        self.send_response(status)
        for header, value in {**_HEADERS, "Content-Type": kind}.items():
            self.send_header(header, value)
        if length is not None:
            self.send_header("Content-Length", f"{length}")
        self.end_headers()

    def answer(self, status: int, kind: str, content: bytes) -> None:
        try:
            self.begin(status, kind, len(content))
            if self.command != "HEAD":
                self.wfile.write(content)
        except OSError:  # the browser has gone
            self.close_connection = True
