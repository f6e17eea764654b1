"""The server of the live page: it only reads, and there is nothing to be changed by a request.

Does not own: who is answered (`meshlora_extra.page.loopback`), what is read (`meshlora_extra.page.seen`), the page
(live.html, live.css, live.js).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from meshlora_extra.page.loopback import Handler, Loopback
from meshlora_extra.page.seen import Runs
from meshlora_ground.errors import MeshloraError
from meshlora_ground.lifetime import end_with


class LiveServer(Loopback):
    """Serves `runs`."""

    def __init__(self, runs: Runs, *, port: int = 0) -> None:
        self.runs = runs
        super().__init__(_Handler, port=port)


class _Handler(Handler):
    server: LiveServer
    files: ClassVar = {"": "live.html", "live.css": "live.css", "live.js": "live.js"}

    def look(self, name: str, query: Mapping[str, list[str]]) -> bytes | None:
        if name != "data.json":
            return None
        asked = query.get("run", [None])[0]
        return json.dumps(self.server.runs.shown(asked), allow_nan=False).encode("ascii")


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
