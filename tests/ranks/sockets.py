"""What a process listens on, as the kernel tells it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

_LISTENS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
_UNIX_LISTENS = "00010000"  # the flag of a socket that accepts


class Listener(NamedTuple):
    """kind: tcp, tcp6, udp, udp6 or unix. at: address in hexadecimal and port, or a path, or "@" and a name."""

    kind: str
    at: str


def listeners_of(process: int) -> list[Listener]:
    """All that other processes can connect, or send, to."""
    inodes = _inodes(process)
    found = []
    for kind, state in _LISTENS.items():
        for line in Path(f"/proc/{process}/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == state and words[9] in inodes:
                found.append(Listener(kind, words[1]))
    for line in Path(f"/proc/{process}/net/unix").read_text().splitlines()[1:]:
        words = line.split(maxsplit=7)
        if words[3] == _UNIX_LISTENS and words[6] in inodes:
            found.append(Listener("unix", words[7] if len(words) > 7 else ""))
    return found


def _inodes(process: int) -> set[str]:
    """Of the sockets that a process has open."""
    found = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(file)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found
