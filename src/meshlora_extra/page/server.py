"""The server of the live page: on loopback, for those who know its address, read-only.

Does not own: what is read (`meshlora_extra.page.seen`), the page (live.html, live.css, live.js).

Anybody on the machine can connect to loopback, and any page in a browser can send requests there: so the path begins
with a random token, the Host header must be loopback's own (a name of somebody else's that points here is refused), and
the page's policy allows it nothing but its own files. There is nothing to be changed by a request.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from meshlora_extra.page.seen import Runs
from meshlora_ground.errors import MeshloraError
from meshlora_ground.lifetime import end_with

_FILES = {
    "": ("live.html", "text/html; charset=utf-8"),
    "live.css": ("live.css", "text/css; charset=utf-8"),
    "live.js": ("live.js", "text/javascript; charset=utf-8"),
}
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


class LiveServer(ThreadingHTTPServer):
    """Serves `runs` from construction to `server_close`, once `serve_forever` is called. port: 0 is any."""

    daemon_threads = True

    def __init__(self, runs: Runs, *, port: int = 0) -> None:
        self.runs, self.token = runs, secrets.token_urlsafe(24)
        super().__init__((_HOST, port), _Handler)

    @property
    def url(self) -> str:
        """The page's address, with the token."""
        return f"http://{_HOST}:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> set[str]:
        """The Host headers of requests that were meant for it."""
        return {f"{name}:{self.server_port}" for name in (_HOST, "localhost")}


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = _TIMEOUT_S
    server_version, sys_version = "meshlora", ""

    def log_message(self, *_: object) -> None:
        """Say nothing: the path has the token, and the terminal is the run's."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        try:
            path = urlsplit(self.path)
        except ValueError:  # as of http://[/
            self._answer(400, "text/plain; charset=utf-8", b"no address\n")
            return
        token, _, name = path.path.lstrip("/").partition("/")
        is_known = hmac.compare_digest(token.encode(), self.server.token.encode())
        if self.headers.get("Host", "") not in self.server.hosts or not is_known:
            self._answer(403, "text/plain; charset=utf-8", b"not for you\n")
        elif name == "data.json":
            asked = parse_qs(path.query).get("run", [None])[0]
            content = json.dumps(self.server.runs.shown(asked), allow_nan=False)
            self._answer(200, "application/json", content.encode("ascii"))
        elif name in _FILES:
            file, kind = _FILES[name]
            self._answer(200, kind, resources.files(__package__).joinpath(file).read_bytes())
        else:
            self._answer(404, "text/plain; charset=utf-8", b"no such page\n")

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        try:
            self.send_response(status)
            for header, value in {**_HEADERS, "Content-Type": kind, "Content-Length": f"{len(content)}"}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
        except OSError:  # the browser has gone
            self.close_connection = True


def serve(runs: Runs, say: Callable[[str], object], *, port: int = 0) -> None:
    """Serve the page of `runs` until this process ends. say: told its address first."""
    with LiveServer(runs, port=port) as server:
        say(server.url)
        server.serve_forever()


@contextlib.contextmanager
def serving(folder: Path, *, first: str) -> Iterator[str]:
    """A process of its own serves the page during the block; yields its address. first: the run that it shows."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", "from meshlora_extra.page import server; server._serve_for_parent()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin:
            process.stdin.write(json.dumps([os.getpid(), str(folder), first]))
        if not (url := process.stdout.readline().strip()):
            raise MeshloraError("--watch: the process of the page has ended without an address")
        yield url
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _serve_for_parent() -> None:
    """Serve what stdin says. Signals to the whole terminal are for the run, which ends this process itself."""
    parent, folder, first = json.load(sys.stdin)
    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    serve(Runs(Path(folder), first=first), lambda url: os.write(1, f"{url}\n".encode()))
